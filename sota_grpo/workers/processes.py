"""Workers on this machine: threads of this process, and child processes that are called over a socket pair."""

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
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from sota_grpo.errors import collect_garbage_rarely
from sota_grpo.orphans import end_group_with, ending
from sota_grpo.text import readable
from sota_grpo.workers.base import (
    Host,
    Launcher,
    OpenCalls,
    WorkerDied,
    WorkerSpec,
    child_environment,
    portable,
)

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    "from sota_grpo.orphans import fork_under_subreaper; fork_under_subreaper();"
    "from sota_grpo.workers.processes import serve_child; serve_child(int(sys.argv[3]), int(sys.argv[4]))"
)
CLOSING_S = 10.0  # longest wait of ThreadLauncher.close() for threads
_EXIT_S = 1.0  # longest wait for a process to end after its socket has closed
_REAP_S = 10.0  # longest wait of kill() for the process to be reaped
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # sent by others to end a process
_PID = -1  # call number of the message that has the process id
_STDERR = 2  # file descriptor
_SHOWN_BYTES = 64 << 10  # most output of a worker that is shown per minute
_EXPENDABLE = "1000"  # oom_score_adj: out of memory, the kernel kills such a process first


class ThreadWorker:
    """A worker on a thread of this process (:class:`~.base.Worker`); after :meth:`kill`, queued calls still run."""

    pid: int | None = None

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        self.name = name
        self._calls = OpenCalls()
        self._host = Host(name, lambda: spec)
        self.thread = self._host.serve_on_thread()

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._calls.open(
            lambda number: self._host.post(method, lambda: args, partial(self._calls.resolve, number))
        )

    def kill(self) -> None:
        if self._calls.dead is None:
            self._calls.fail(WorkerDied(f"{self.name} was killed"))
            self._host.close()


class ThreadLauncher(Launcher):
    """Starts workers on threads (:class:`ThreadWorker`), for tests, simulations, and workers that wait for a server.

    :meth:`close` waits for the threads, at most ``CLOSING_S`` seconds in total: a thread that runs C++ code when the
    interpreter exits would abort the process.

    >>> launcher = ThreadLauncher()
    >>> worker = launcher.start("counter-0", WorkerSpec("collections:Counter", {"a": 2}))
    >>> worker.call("total").result()
    2
    >>> launcher.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._threads: list[threading.Thread] = []  # including those of killed workers

    def start(self, name: str, spec: WorkerSpec, **placement: Any) -> ThreadWorker:
        """Start a worker on a new thread; ``placement`` is ignored."""
        worker = ThreadWorker(name, spec)
        self._workers.add(worker)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), worker.thread]
        return worker

    def close(self) -> None:
        super().close()
        until = time.monotonic() + CLOSING_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))


def receive(connection: Connection) -> tuple[tuple[Any, ...], Callable[[], Any]]:
    """Wait for (head, pickled value); return (head, function that unpickles the value); EOFError without a sender."""
    head, body = connection.recv()
    return head, partial(pickle.loads, body)


class ProcessEndedItself(WorkerDied):
    """A worker's process exited or crashed, but not by a signal that others send: SIGKILL, SIGTERM, SIGHUP, SIGINT."""


class ProcessWorker:
    """A worker in a child process (:class:`~.base.Worker`).

    One thread writes the calls, so that a stopped process does not block :meth:`call`; another reads the answers. When
    the process ends, pending and later calls fail with a WorkerDied that names its exit code or signal, the process is
    reaped, and its descendants are killed. Its output goes to this process's stderr, control characters escaped, at
    most 64 KiB per minute.

    Args:
        name, spec, pass_fds: see :meth:`ProcessLauncher.start`.
        environment: all environment variables of the process.
        spawner: executor whose only thread starts processes.
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
        self._calls = OpenCalls()
        self._spawner = spawner  # keeps the thread alive: the process dies with the thread that started it
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-c", _BOOT, name, json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
            self._process = spawner.submit(
                subprocess.Popen[bytes],
                command,
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(environment),
            ).result()
        self.pid = self._process.pid  # the subreaper's, until the worker process sends its own
        self._printer = threading.Thread(target=_show, args=(name, self._process.stdout), daemon=True)
        self._printer.start()
        self._connection = Connection(os.dup(self._socket.fileno()))
        self._outbox: queue.SimpleQueue[tuple[tuple[Any, ...], bytes] | None] = queue.SimpleQueue()
        self._outbox.put(((name,), pickle.dumps(spec)))
        self._writer = threading.Thread(target=self._write, name=f"calls to {name}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"answers of {name}", daemon=True)
        self._writer.start()
        self._reader.start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._calls.open(lambda number: self._outbox.put(((number, method), pickle.dumps(args))))

    def kill(self) -> None:
        self._end_group()
        self._calls.fail(WorkerDied(f"{self.name} (pid {self.pid}) was killed"))
        if threading.current_thread() is not self._reader:
            self._reader.join(_REAP_S)

    def _end_group(self) -> None:
        """Let the subreaper kill all descendants, also those outside of the process group; then kill the group."""
        with suppress(ProcessLookupError):  # it has ended and been reaped
            if sys.platform == "linux":
                os.kill(self._process.pid, signal.SIGTERM)
                os.kill(self._process.pid, signal.SIGCONT)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_EXIT_S)
            os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send(message)
            except OSError:  # the process ended; the reader reports it
                return

    def _read(self) -> None:
        death = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else None
        watched: list[Any] = [self._connection] if death is None else [self._connection, death]
        try:
            while True:
                if self._connection not in wait(watched):
                    # Descendants of the process may keep its end of the socket open.
                    self._socket.shutdown(socket.SHUT_RDWR)
                (number, succeeded), load = receive(self._connection)
                if number == _PID:
                    self.pid = load()
                    continue
                try:
                    value = load()
                except Exception as error:  # this process cannot unpickle it: only this call fails
                    succeeded, value = False, error
                self._calls.resolve(number, succeeded, value)
                del load, value  # which may be large
        except Exception:  # the process ended, or sent an invalid message
            self._reap()
        finally:
            if death is not None:
                os.close(death)

    def _reap(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self._end_group()
        code = self._process.wait()
        self._printer.join(_EXIT_S)
        kind = WorkerDied if -code in _OUTSIDE else ProcessEndedItself
        self._calls.fail(kind(f"{self.name} (pid {self.pid}) {ending(code)}"))
        self._outbox.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.join()  # once closed, the descriptor may be reused for another file
        self._socket.close()
        self._connection.close()


class ProcessLauncher(Launcher):
    """Starts workers in child processes (:class:`ProcessWorker`).

    Linux kills the processes when this process dies, even by SIGKILL and even while they hold the GIL; on other systems
    they exit within a second. Worker processes ignore Ctrl-C. On Linux a worker is two processes, itself and its
    subreaper (:func:`sota_grpo.orphans.fork_under_subreaper`).

    >>> launcher = ProcessLauncher()
    >>> worker = launcher.start("counter-0", WorkerSpec("collections:Counter", {"a": 2}), threads=1)
    >>> worker.call("total").result(timeout=60)
    2
    >>> launcher.close()
    """

    def __init__(self) -> None:
        super().__init__()
        self._spawner = ThreadPoolExecutor(1, thread_name_prefix="spawner")

    def start(
        self,
        name: str,
        spec: WorkerSpec,
        *,
        env: Mapping[str, str] | None = None,
        threads: int | None = None,
        pass_fds: Sequence[int] = (),
    ) -> ProcessWorker:
        """Start a worker in a new process; RuntimeError if the launcher is closed, OSError if the process cannot start.

        Args:
            name: name of the worker in messages and in ``ps``.
            env: environment variables to add, set before the process imports any module.
            threads: OpenMP threads, hence torch's, unless ``env`` has OMP_NUM_THREADS; None: not set.
            pass_fds: file descriptors that the process inherits.
        """
        worker = ProcessWorker(name, spec, {**os.environ, **child_environment(env, threads)}, self._spawner, pass_fds)
        self._workers.add(worker)
        return worker

    def close(self) -> None:
        super().close()
        self._spawner.shutdown(wait=False)


def _show(name: str, printed: IO[bytes]) -> None:
    """Copy a worker's output to stderr, at most 64 KiB per minute."""
    begin, count = time.monotonic(), 0
    with printed:
        while line := printed.readline(4096):
            if time.monotonic() - begin > 60:
                begin, count = time.monotonic(), 0
            shown, count = count, count + len(line)
            text = ""
            if count <= _SHOWN_BYTES:
                text = readable(line.decode(errors="replace").replace("\r", "\n"))
            elif shown <= _SHOWN_BYTES:
                text = f"{name} printed more than {_SHOWN_BYTES >> 10} KiB: the rest of the minute is not shown.\n"
            with suppress(OSError):  # stderr is gone; the worker may still print
                os.write(_STDERR, text.encode())


def serve_child(fd: int, parent_pid: int) -> None:
    """Run a worker on its process's main thread until the socket ``fd`` closes or the process ``parent_pid`` ends."""
    collect_garbage_rarely()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if isinstance(sys.stdout, TextIOWrapper):  # printed lines are not lost when the process is killed
        sys.stdout.reconfigure(line_buffering=True)
    end_group_with(parent_pid)
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text(_EXPENDABLE)
    connection, lock = Connection(fd), threading.Lock()

    def answer(number: int, succeeded: bool, value: Any) -> None:
        try:
            body = pickle.dumps(value)
        except Exception as error:  # the result cannot be pickled: only this call fails
            succeeded, body = False, pickle.dumps(portable(host.name, error))
        with lock, suppress(OSError):  # the parent ended: this process is about to end
            connection.send(((number, succeeded), body))

    def relay() -> None:
        try:
            while True:
                (number, method), load = receive(connection)
                host.post(method, load, partial(answer, number))
        except (EOFError, OSError):
            os._exit(0)

    connection.send(((_PID, True), pickle.dumps(os.getpid())))
    (name,), load_spec = receive(connection)
    host = Host(name, load_spec)
    threading.Thread(target=relay, daemon=True).start()
    host.serve()
