"""Workers that are processes of this machine, started afresh (never forked) and spoken to through a socket pair."""

from __future__ import annotations

import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sota_grpo.orphans import end_group_with, ending
from sota_grpo.workers.base import Host, OpenCalls, WorkerDied, WorkerSpec, child_environment, outcome, portable

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    "from sota_grpo.workers.processes import serve_child; serve_child(int(sys.argv[3]), int(sys.argv[4]))"
)
_EXIT_S = 1.0  # from the end of the socket to the end of the process
_REAP_S = 10.0  # longest wait of kill() for the kernel
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # what others end a process with
_STDERR = 2  # descriptor
_EXPENDABLE = "1000"  # oom_score_adj: the kernel ends such a process first when memory runs out


class Message:
    """A head that always can be read, a pickled body, and the body's large buffers beside it."""

    def __init__(self, head: tuple[Any, ...], body: bytes, buffers: list[Any]) -> None:
        self._head, self._body, self._buffers = head, body, buffers

    @classmethod
    def of(cls, head: tuple[Any, ...], value: Any) -> Message:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        return cls(head, body, [buffer.raw() for buffer in buffers])

    def send(self, connection: Connection) -> None:
        connection.send_bytes(pickle.dumps((self._head, self._body, [len(buffer) for buffer in self._buffers])))
        for buffer in self._buffers:
            connection.send_bytes(buffer)

    @classmethod
    def receive(cls, connection: Connection) -> tuple[tuple[Any, ...], Message]:
        head, body, sizes = pickle.loads(connection.recv_bytes())
        buffers = [bytearray(size) for size in sizes]
        for buffer in buffers:
            connection.recv_bytes_into(buffer)
        return head, cls(head, body, buffers)

    def load(self) -> Any:
        return pickle.loads(self._body, buffers=self._buffers)


class Shared:
    """A value that is pickled once, however often it is sent; at the other end it is the value."""

    def __init__(self, value: Any) -> None:
        self._message = Message.of((), value)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        message = self._message
        return _unshare, (message._body, [pickle.PickleBuffer(buffer) for buffer in message._buffers])


def _unshare(body: bytes, buffers: list[Any]) -> Any:
    return pickle.loads(body, buffers=buffers)


class ProcessEndedItself(WorkerDied):
    """A worker's process ended by what it did itself: an exit, a fault. Others end one by SIGKILL or SIGTERM."""


class ProcessWorker:
    """A worker in a process of its own (:class:`~.base.Worker`).

    Contract. One thread writes the calls, so that a stopped process holds nobody up; one reads the answers. The end of
    the process, however it comes, fails what is open with its exit code or signal; the process is reaped, and whatever
    it had started in its session is killed with it. Arguments are pickled by :meth:`call`, large buffers by reference:
    leave arrays unchanged until the call is answered.

    Args:
        name: in messages and in ``ps``.
        spec: what the process runs.
        environment: of the process, whole.
        spawner: the one thread that starts processes (see :class:`ProcessLauncher`).
        pass_fds: descriptors that it inherits.
    """

    def __init__(
        self,
        name: str,
        spec: WorkerSpec,
        environment: Mapping[str, str],
        spawner: ThreadPoolExecutor,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._calls = OpenCalls(name)
        self._spawner = spawner  # kept: the process dies with the thread that started it
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = spawner.submit(_spawn, name, theirs.fileno(), environment, pass_fds).result()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outbox.put(Message.of((name,), spec))
        self._writer = threading.Thread(target=self._write, name=f"calls to {name}", daemon=True)
        self._writer.start()
        self._reader = threading.Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._calls.open(lambda number: self._outbox.put(Message.of((number, method), args)))

    def kill(self) -> None:
        self._signal_group()
        self._calls.fail(f"(pid {self.pid}) was killed")
        if threading.current_thread() is not self._reader:
            self._reader.join(_REAP_S)

    def _signal_group(self) -> None:
        with suppress(ProcessLookupError):  # it has ended and been reaped
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                message.send(self._connection)
            except OSError:  # it is gone; the reader says so
                return

    def _read(self) -> None:
        death = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else None
        watched: list[Any] = [self._connection] if death is None else [self._connection, death]
        try:
            while True:
                if self._connection not in wait(watched):
                    # Something that the process left behind may hold its end of the socket open: end it here.
                    self._socket.shutdown(socket.SHUT_RDWR)
                (number, succeeded), message = Message.receive(self._connection)
                self._resolve(number, succeeded, message)
        except (EOFError, OSError):
            self._bury()
        finally:
            if death is not None:
                os.close(death)

    def _resolve(self, number: int, succeeded: bool, message: Message) -> None:
        try:
            value = message.load()
        except Exception as error:  # an answer whose class this process lacks is that call's failure, not the worker's
            succeeded, value = False, error
        self._calls.resolve(number, succeeded, value)

    def _bury(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._signal_group()
        code = self._process.wait()
        self._calls.fail(
            f"(pid {self.pid}) {ending(code)}", ProcessEndedItself if -code not in _OUTSIDE else WorkerDied
        )
        self._outbox.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.join()  # the descriptor may mean another file as soon as it is closed
        self._socket.close()
        self._connection.close()


class ProcessLauncher:
    """Starts :class:`ProcessWorker` (:class:`~.base.Launcher`).

    Processes are started by one thread that lives as long as the launcher: Linux then kills them the moment that this
    process dies, even by SIGKILL and even while they hold the interpreter lock; elsewhere they notice within a second.
    A process ignores Ctrl-C: whoever started it decides when it ends. What it prints goes to stderr, line by line:
    stdout is for what the command that started it has to say.

    >>> launcher = ProcessLauncher()
    >>> worker = launcher.start("counter-0", WorkerSpec("collections:Counter", {"a": 2}), threads=1)
    >>> worker.call("total").result(timeout=60)
    2
    >>> launcher.close()
    """

    def __init__(self) -> None:
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")
        self._workers: weakref.WeakSet[ProcessWorker] = weakref.WeakSet()

    def start(
        self,
        name: str,
        spec: WorkerSpec,
        *,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ProcessWorker:
        """Start a worker.

        Args:
            name: in messages and in ``ps``.
            spec: what it runs.
            env: variables set before the process imports anything.
            threads: of OpenMP, hence of torch; None leaves it to the environment.
            pass_fds: descriptors that it inherits under the same numbers.
        """
        worker = ProcessWorker(name, spec, {**os.environ, **child_environment(env, threads)}, self._spawner, pass_fds)
        self._workers.add(worker)
        return worker

    def share(self, value: Any) -> Any:
        """A handle for ``call``: the value is pickled here, once, and sent with every call that names the handle."""
        return Shared(value)

    def close(self) -> None:
        for worker in list(self._workers):
            worker.kill()
        self._spawner.shutdown(wait=False)


def _spawn(name: str, fd: int, environment: Mapping[str, str], pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _BOOT, name, json.dumps(sys.path), str(fd), str(os.getpid())]
    return subprocess.Popen(
        command,
        pass_fds=(fd, *pass_fds),
        stdin=subprocess.DEVNULL,
        stdout=_STDERR,
        start_new_session=True,
        env=dict(environment),
    )


def serve_child(fd: int, parent_pid: int) -> None:
    """The life of a worker's process: its object on the main thread, where it may use signals; calls on another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(sys.stdout, TextIOWrapper):  # what is printed is not lost when the process is killed
        sys.stdout.reconfigure(line_buffering=True)
    end_group_with(parent_pid)
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE)
    connection = Connection(fd)
    (name,), message = Message.receive(connection)
    host = Host(name, message.load)
    threading.Thread(target=_relay, args=(connection, host), daemon=True).start()
    host.serve()


def _relay(connection: Connection, host: Host) -> None:
    """Hand calls to the host, in their order, until the other end is gone."""
    lock = threading.Lock()

    def answer(number: int, future: Future[Any]) -> None:
        succeeded, value = outcome(host.name, future)
        try:
            message = Message.of((number, succeeded), value)
        except Exception as error:  # a result that cannot be pickled is that call's failure
            message = Message.of((number, False), portable(host.name, error))
        with lock, suppress(OSError):  # the other end is gone: this process is about to end
            message.send(connection)

    try:
        while True:
            (number, method), message = Message.receive(connection)
            host.post(method, message.load).add_done_callback(partial(answer, number))
    except (EOFError, OSError):
        os._exit(0)
