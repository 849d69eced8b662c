"""Workers, which run in a thread, a process or a Ray actor: handle, host, launcher; those of this machine.

A worker is an object that other threads or processes call. A :class:`Host` constructs it and calls its methods; the
caller has a :class:`Worker` handle. Workers here are threads of this process, or child processes that are called over a
socket pair; Ray actors are in :mod:`.ray_cluster`. This module does not import torch, which grading processes do
without.
"""

from __future__ import annotations

import itertools
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
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import psutil

from sota_grpo.errors import RunFailed, collect_garbage_rarely
from sota_grpo.orphans import end_group_with, ending
from sota_grpo.text import readable

Result = TypeVar("Result")
Unpack = Callable[[], tuple[Any, ...]]
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]);"
    "from sota_grpo.orphans import fork_under_subreaper; fork_under_subreaper();"
    "from sota_grpo.workers.base import serve_child; serve_child(int(sys.argv[3]), int(sys.argv[4]))"
)
CLOSING_S = 10.0  # longest wait of ThreadLauncher.close() for threads
_EXIT_S = 1.0  # longest wait for a process to end after its socket has closed
_REAP_S = 10.0  # longest wait of kill() for the process to be reaped
_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # sent by others to end a process
_PID = -1  # call number of the message that has the process id
_STDERR = 2  # file descriptor
_SHOWN_BYTES = 64 << 10  # most output of a worker that is shown per minute
_EXPENDABLE = "1000"  # oom_score_adj: out of memory, the kernel kills such a process first


def pending_future() -> Future[Any]:
    """Return an unresolved future that cannot be cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(future: Future[Result], compute: Callable[[], Result]) -> None:
    """Call ``compute()`` and set its result or exception on ``future``.

    >>> future = pending_future()
    >>> resolve(future, lambda: 1 / 0)
    >>> type(future.exception()).__name__
    'ZeroDivisionError'
    """
    try:
        result = compute()
    except BaseException as error:  # raised where the future is read
        future.set_exception(error)
    else:
        future.set_result(result)


class WorkerDied(RunFailed, RuntimeError):
    """A worker, or a pool of workers, died, hangs, was closed or cannot continue; the message has the cause."""


class WorkerLate(RunFailed, TimeoutError):
    """No worker answered a broadcast in time, or no prompt group made progress; the message says which."""


class ConstructionFailed(WorkerDied):
    """The construction of a worker raised; a second try would most likely raise again."""


@dataclass(frozen=True)
class WorkerSpec:
    """How a worker is constructed: ``factory(**options)``, called once in the worker's process.

    :meth:`Worker.call` may call the worker's public methods, one after the other. A slow method should return a
    :class:`concurrent.futures.Future`, else later calls wait for it. These methods are optional:

    - ``ping()`` returns for how many seconds the worker has had work without making progress (0 when idle). It is
      called on another thread, also while a method runs. Default: the time for which the running method has run.
    - ``advance()`` does a step of the work in progress. After a call it is called while no other call waits, until it
      returns False.
    - ``close()`` frees resources.

    A worker that cannot continue must fail its calls and futures with :class:`WorkerDied`.

    Args:
        factory: ``"package.module:function"``, imported in the worker's process.
        options: picklable keyword arguments of the factory.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    """Handle with which the caller uses a worker in a thread, a process or a Ray actor.

    ``call`` returns a future at once. The future gets the method's result (if that is a future, the future's result),
    the method's exception (:func:`portable`), the exception of pickling the arguments, or :class:`WorkerDied`. Methods
    are started in the order of the calls, but ``ping`` does not wait for a running method. Calls wait for the worker's
    construction; if that fails, so do they (:class:`ConstructionFailed`). ``kill`` fails pending and later calls with
    :class:`WorkerDied` and ends the worker: a process without delay, a thread after its queued calls. It is idempotent.
    """

    name: str

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def kill(self) -> None: ...


class Launcher:
    """Base class: starts workers as threads, processes or Ray actors, and shares large values with them.

    Attributes:
        start: ``start(name, spec, **placement)`` returns a worker; each subclass documents its placement.
    """

    start: Callable[..., Worker]

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[Any] = weakref.WeakSet()

    def share(self, value: Any) -> Any:
        """Return a handle to pass to ``call`` for ``value``, cheaper for many calls with Ray; else ``value`` itself."""
        return value

    def close(self) -> None:
        """Kill all workers that this launcher started; idempotent."""
        for worker in list(self._workers):
            worker.kill()


def starter(
    launcher: Launcher, role: str, spec: WorkerSpec, placements: Sequence[Mapping[str, Any]] = ()
) -> Callable[[int], Worker]:
    """Return a function that starts a worker for a slot number, as :class:`~.fleet.Fleet` needs it.

    The first worker of slot 0 is named ``role-0``, the second ``role-0.1``. ``placements`` has the keyword arguments of
    ``launcher.start`` for each slot; empty: no arguments.
    """
    starts: dict[int, int] = {}

    def start(index: int) -> Worker:
        number = starts[index] = starts.get(index, -1) + 1
        name = f"{role}-{index}" + (f".{number}" if number else "")
        return launcher.start(name, spec, **(placements[index] if placements else {}))

    return start


class WorkerThread:
    """A FIFO executor with one thread: functions are submitted from any thread and called in order.

    :meth:`submit` returns a future of the function's result; if the function returns a future, of that future's
    result. A function that never returns blocks the later ones, and :meth:`silent_s` grows.

    Args:
        start: False starts no thread: the caller runs :meth:`serve`, or :meth:`serve_on_thread` later.

    >>> thread = WorkerThread("adder")
    >>> thread.submit(lambda a, b: a + b, 2, 3).result(), thread.silent_s()
    (5, 0.0)
    >>> thread.close()
    """

    advance: Callable[[], bool] = staticmethod(lambda: False)  # called while the queue is empty, until it returns False

    def __init__(self, name: str, *, start: bool = True) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Future[Any]], object]] | None]
        self._jobs = queue.SimpleQueue()
        self._since: float | None = None
        if start:
            self.serve_on_thread()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue ``function(*args)``; return a future of its result."""
        future = pending_future()
        self._jobs.put((partial(function, *args), lambda done: resolve(future, done.result)))
        return future

    def progress(self) -> None:
        """Reset :meth:`silent_s` to 0; the running function calls this when it makes progress."""
        self._since = time.monotonic()

    def silent_s(self) -> float:
        """Return the seconds since the running function began or last called :meth:`progress`; 0 if none runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def serve(self) -> None:
        """Call queued functions, and ``advance`` while none is queued, on the calling thread until :meth:`close`."""
        is_busy = False
        while True:
            if is_busy and self._jobs.empty():
                self._since = time.monotonic()
                is_busy = self.advance()
                self._since = None
            elif (job := self._jobs.get()) is None:
                return
            else:
                function, answer = job
                self._since, done, is_busy = time.monotonic(), Future[Any](), True
                resolve(done, function)
                if done.exception() is None and isinstance(done.result(), Future):
                    done = done.result()
                self._since = None
                done.add_done_callback(answer)
                del done, function, answer, job  # which may be large

    def serve_on_thread(self) -> threading.Thread:
        """Run :meth:`serve` on a new daemon thread, and return the thread."""
        thread = threading.Thread(target=self.serve, name=self.name, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """Let :meth:`serve` return after the queued functions; functions that are submitted later are never called."""
        self._jobs.put(None)


class Host(WorkerThread):
    """Constructs a worker and calls its methods, in order, on the thread that runs :meth:`serve`.

    If the construction raises, every call fails with :class:`ConstructionFailed`. Once the worker is constructed,
    ``ping`` is not queued, but called in :meth:`post`. :meth:`close` closes the worker after the queued calls.

    Args:
        unpack_spec: returns the worker's spec; called in :meth:`serve`; an exception is a failed construction.

    >>> host, answers = Host("counter-0", lambda: WorkerSpec("collections:Counter", {"a": 2})), queue.SimpleQueue()
    >>> host.post("total", tuple, lambda *answer: answers.put(answer))  # waits: nothing is constructed yet
    >>> thread = host.serve_on_thread()
    >>> host.post("get", lambda: ("a",), lambda *answer: answers.put(answer))
    >>> answers.get(), answers.get()
    ((True, 2), (True, 2))
    >>> host.close()
    """

    def __init__(self, name: str, unpack_spec: Callable[[], WorkerSpec]) -> None:
        super().__init__(name, start=False)
        self._worker = self.submit(self._construct, unpack_spec)

    def post(self, method: str, unpack: Unpack, answer: Callable[[bool, Any], object]) -> None:
        """Queue ``method(*unpack())`` for the worker; pass the outcome to ``answer(succeeded, result or error)``."""
        # unpack imports the modules of its arguments: imports on two threads may see a partly initialized module
        if method == "ping" and self._worker.done() and self._worker.exception() is None:
            done: Future[Any] = Future()
            resolve(done, getattr(self._worker.result(), "ping", self.silent_s))
            self._reply(answer, done)
        else:
            self._jobs.put((partial(self._answer, method, unpack), partial(self._reply, answer)))

    def serve(self) -> None:
        super().serve()
        close = getattr(self._worker.result(), "close", None) if self._worker.exception() is None else None
        if callable(close):
            close()

    def _construct(self, unpack_spec: Callable[[], WorkerSpec]) -> Any:
        try:
            spec = unpack_spec()
            module, _, function = spec.factory.partition(":")
            worker = getattr(import_module(module), function)(**spec.options)
            self.advance = getattr(worker, "advance", self.advance)
            return worker
        except BaseException as error:  # including SystemExit of a command-line library: the caller reports it
            refusal = ConstructionFailed(f"{self.name} could not be constructed: {type(error).__name__}: {error}")
            refusal.add_note("".join(traceback.format_exception(error)).rstrip())
        raise refusal  # outside of the handler: the error's frames would keep the worker's memory

    def _answer(self, method: str, unpack: Unpack) -> Any:
        worker = self._worker.result()
        if method.startswith("_"):
            raise AttributeError(f"{type(worker).__name__}.{method} is private and cannot be called from outside")
        if method == "ping" and not hasattr(worker, "ping"):
            return 0.0  # this ping waited for the construction
        return getattr(worker, method)(*unpack())

    def _reply(self, answer: Callable[[bool, Any], object], done: Future[Any]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        answer(*((True, done.result()) if error is None else (False, portable(self.name, error))))


def descendants() -> list[psutil.Process]:
    """Return all child processes of this process, recursively; processes of users that /proc hides are left out."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            children.setdefault(process.ppid(), []).append(process)
    ours = list(children.get(os.getpid(), ()))
    for process in ours:  # grows in the loop
        ours += children.get(process.pid, ())
    return ours


class OpenCalls:
    """The pending calls to one worker, by number; each future is completed exactly once.

    >>> calls, sent = OpenCalls(), []
    >>> future = calls.open(sent.append)
    >>> calls.fail(WorkerDied("rollout-0 was killed"))
    >>> calls.resolve(sent[0], True, "too late")
    >>> print(future.exception(), calls.open(sent.append).exception(), sep=", ")
    rollout-0 was killed, rollout-0 was killed
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self.dead: WorkerDied | None = None  # error of every later call

    def open(self, send: Callable[[int], object]) -> Future[Any]:
        """Call ``send(call number)``; return the call's future, failed if ``send`` raises or the worker is dead."""
        future = pending_future()
        with self._lock:
            number = next(self._numbers)
            self._futures[number] = future
        if self.dead is not None:
            self.resolve(number, False, self.dead)
            return future
        try:
            send(number)
        except Exception as error:  # arguments that cannot be pickled are this call's failure
            self.resolve(number, False, error)
        return future

    def resolve(self, number: int, succeeded: bool, value: Any) -> None:
        """Set the result or exception of call ``number``; no-op if it was set before."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is not None:
            (future.set_result if succeeded else future.set_exception)(value)

    def fail(self, death: WorkerDied) -> None:
        """Fail pending and later calls with ``death``; no-op if the worker is dead already."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = death
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_exception(death)


def portable(name: str, error: BaseException) -> BaseException:
    """Return ``error`` for the caller, with the traceback in the worker ``name`` as a note (a WorkerDied gets none).

    A RuntimeError with the type and text of ``error`` replaces an error that cannot be pickled, or that would end or
    disturb the caller's event loop (SystemExit, CancelledError, StopIteration).
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        if not isinstance(error, Exception) or isinstance(error, (CancelledError, StopIteration)):
            raise TypeError
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class may raise anything here; keep its text
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, WorkerDied):
        error.add_note(f"In {name}:\n{trace}")
    return error


def child_environment(env: Mapping[str, str] | None, threads: int | None) -> dict[str, str]:
    """Return the variables to set for a worker: ``env``, and OMP_NUM_THREADS=``threads`` unless None or in ``env``.

    >>> child_environment({"A": "b"}, threads=2)
    {'OMP_NUM_THREADS': '2', 'A': 'b'}
    """
    return ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | dict(env or {})


class ThreadWorker:
    """A worker on a thread of this process (:class:`Worker`); after :meth:`kill`, queued calls still run."""

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


class ProcessEndedItself(WorkerDied):
    """A worker's process exited or crashed, but not by a signal that others send: SIGKILL, SIGTERM, SIGHUP, SIGINT."""


class ProcessWorker:
    """A worker in a child process (:class:`Worker`).

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
                (number, succeeded), body = self._connection.recv()
                if number == _PID:
                    self.pid = pickle.loads(body)
                    continue
                try:
                    value = pickle.loads(body)
                except Exception as error:  # this process cannot unpickle it: only this call fails
                    succeeded, value = False, error
                self._calls.resolve(number, succeeded, value)
                del body, value  # which may be large
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
                (number, method), body = connection.recv()
                host.post(method, partial(pickle.loads, body), partial(answer, number))
        except (EOFError, OSError):
            os._exit(0)

    connection.send(((_PID, True), pickle.dumps(os.getpid())))
    (name,), spec = connection.recv()
    host = Host(name, partial(pickle.loads, spec))
    threading.Thread(target=relay, daemon=True).start()
    host.serve()
