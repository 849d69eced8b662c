"""Workers, in a thread, a process or a Ray actor: their contract, their host, and how they start.

A worker is an object whose methods are called from elsewhere; a :class:`Host` constructs it and calls them, and a
:class:`Worker` is its owner's handle. Imports no torch: a process that grades has none.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Protocol, TypeVar

import psutil

from sota_grpo.errors import RunFailed

Result = TypeVar("Result")
Unpack = Callable[[], tuple[Any, ...]]
IDLE_METHOD = "__idle_s__"  # answered by every host, at once, while its worker is being constructed too
_SILENCES = 12  # a start that never falls silent is given up after so many times the longest silence
_BUSY = 0.05  # share of one core, below which a process waits (an idle Ray actor takes 0.01)
_MOVED = 1 << 20  # bytes read and written in a second, above which it loads
_SHORTEST_LOOK_S = 0.05


def pending_future() -> Future[Any]:
    """A pending future that its reader cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(future: Future[Result], compute: Callable[[], Result]) -> None:
    """Set what ``compute()`` returns or raises as the result of ``future``.

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
    """A worker is gone, hangs, or cannot continue; the message names it and the cause."""


class WorkerLate(RunFailed, TimeoutError):
    """No worker answered in time, and replacing the late ones did not help; the message names them."""


class ConstructionFailed(WorkerDied):
    """The worker's factory raised; another try would most likely raise again."""


@dataclass(frozen=True)
class WorkerSpec:
    """How a worker is made: ``factory(**options)``, called once in its own process.

    :meth:`Worker.call` may name its public methods, which are called one after the other. A method that takes long
    returns a :class:`concurrent.futures.Future`, or holds up the others. Some names have a meaning:

    - ``ping()`` returns the seconds for which the worker has had work and made no progress (0 when idle). It is called
      on another thread while a method runs. Without it, the time of the running method counts.
    - ``advance()`` is called whenever no call waits, until it returns False: a step of what the worker has in flight.
    - ``close()`` frees what the worker holds.

    A worker that cannot continue fails its futures with :class:`WorkerDied`.

    Args:
        factory: ``"package.module:function"``, imported there.
        options: keyword arguments, picklable.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    """The owner's handle of a worker in a thread, a process or a Ray actor.

    ``call`` returns at once; its future has the method's result (or, where the method returned a future, that one's),
    the method's exception, or :class:`WorkerDied`. Calls are started in the order given. The worker is constructed
    while earlier calls wait; when its construction fails, every call fails with :class:`WorkerDied` and the cause.
    ``kill`` ends the process at once (SIGKILL, stopped processes included), is idempotent, and fails pending calls
    with :class:`WorkerDied`.
    """

    name: str

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def kill(self) -> None: ...


class Launcher:
    """Starts workers of one kind, and shares large values with them.

    Attributes:
        start: ``start(name, spec, **placement)``; each launcher documents its placement.
    """

    start: Callable[..., Worker]

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[Any] = weakref.WeakSet()

    def share(self, value: Any) -> Any:
        """A handle that may be given to ``call`` in place of ``value`` and is sent to every worker once."""
        return value

    def close(self) -> None:
        """End every worker that is left; idempotent."""
        for worker in list(self._workers):
            worker.kill()


def starter(
    launcher: Launcher, role: str, spec: WorkerSpec, placements: Sequence[Mapping[str, Any]] = ()
) -> Callable[[int], Worker]:
    """The ``start`` of a fleet: names are ``role-0``, and ``role-0.1`` for the first replacement in that slot.

    Args:
        launcher: of every worker.
        role: first part of the names.
        spec: what each runs.
        placements: of slot 0, 1, ...: keywords of the launcher's ``start``; empty when it needs none.
    """
    starts: dict[int, int] = {}

    def start(index: int) -> Worker:
        number = starts[index] = starts.get(index, -1) + 1
        name = f"{role}-{index}" + (f".{number}" if number else "")
        return launcher.start(name, spec, **(placements[index] if placements else {}))

    return start


class JobQueue:
    """Functions that one thread calls in their order.

    Contract. Consumes: functions, from any thread. Produces: their results; of a function that returns a future, the
    future's. Waits for: the next function. A function that never returns holds up the others, and :meth:`silent_s`
    grows.

    Args:
        name: of the thread.
    """

    advance: Callable[[], bool] = staticmethod(lambda: False)  # called while no function waits, until it is False

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Future[Any]], object]] | None]
        self._jobs = queue.SimpleQueue()
        self._since: float | None = None

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue ``function(*args)``."""
        future = pending_future()
        self._jobs.put((partial(function, *args), lambda done: resolve(future, done.result)))
        return future

    def progress(self) -> None:
        """Called by the running function whenever a part of it is done: :meth:`silent_s` starts anew."""
        self._since = time.monotonic()

    def silent_s(self) -> float:
        """Seconds for which the running function has made no progress; 0 when none runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def serve(self) -> None:
        """Call what comes, on this thread, until :meth:`close`."""
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
                self._since, done, is_busy = time.monotonic(), pending_future(), True
                resolve(done, function)
                self._since = None
                result = done.result() if done.exception() is None else None
                (result if isinstance(result, Future) else done).add_done_callback(answer)
                del done, result, function, answer, job  # which may be large

    def serve_on_thread(self) -> threading.Thread:
        """Run :meth:`serve` on a daemon thread, which does not keep the process alive."""
        thread = threading.Thread(target=self.serve, name=self.name, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End :meth:`serve` after what is queued."""
        self._jobs.put(None)


class WorkerThread(JobQueue):
    """A :class:`JobQueue` that is served from the start.

    >>> thread = WorkerThread("adder")
    >>> thread.submit(lambda a, b: a + b, 2, 3).result(), thread.silent_s()
    (5, 0.0)
    >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.serve_on_thread()


class Host(JobQueue):
    """Constructs a worker, then calls its methods in the order given, on the thread that runs :meth:`serve`.

    A worker whose construction raises leaves a host that answers every call with :class:`ConstructionFailed`. The call
    ``"__idle_s__"`` (for how long this process has done nothing) is answered at once, during the construction too.
    :meth:`close` closes the worker after the calls that are queued.

    Args:
        name: of the worker, for messages.
        unpack_spec: gives what to construct; called on that thread, and what it raises is a failed construction.

    >>> host, answers = Host("counter-0", lambda: WorkerSpec("collections:Counter", {"a": 2})), queue.SimpleQueue()
    >>> host.post("total", tuple, lambda *answer: answers.put(answer))  # waits: nothing is constructed yet
    >>> thread = host.serve_on_thread()
    >>> host.post("get", lambda: ("a",), lambda *answer: answers.put(answer))
    >>> answers.get(), answers.get()
    ((True, 2), (True, 2))
    >>> host.close()
    """

    def __init__(self, name: str, unpack_spec: Callable[[], WorkerSpec]) -> None:
        super().__init__(name)
        self._activity = Activity()
        self._worker = self.submit(self._construct, unpack_spec)

    def post(self, method: str, unpack: Unpack, answer: Callable[[bool, Any], object]) -> None:
        """Queue ``method(*unpack())`` and have ``answer(True, result)`` or ``answer(False, exception)`` called.

        Unpacking imports the modules of the arguments' classes. It happens on the thread that constructed the worker,
        because two threads that import parts of one package at once may see half of a module.
        """
        if method == IDLE_METHOD:
            answer(True, self._activity.idle_s())
        elif method == "ping" and self._worker.done() and self._worker.exception() is None:
            try:
                answer(True, getattr(self._worker.result(), "ping", self.silent_s)())
            except Exception as error:
                answer(False, portable(self.name, error))
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
        except BaseException as error:  # SystemExit of a command-line library included: it is for the caller to report
            refusal = ConstructionFailed(f"{self.name} could not be constructed: {type(error).__name__}: {error}")
            refusal.add_note("".join(traceback.format_exception(error)).rstrip())
        raise refusal  # outside of the handler: the error's frames would keep the worker's memory

    def _answer(self, method: str, unpack: Unpack) -> Any:
        worker = self._worker.result()
        if method.startswith("_"):
            raise AttributeError(f"{type(worker).__name__}.{method} is private and cannot be called from outside")
        if method == "ping" and not hasattr(worker, "ping"):
            return 0.0  # it waited for the construction
        return getattr(worker, method)(*unpack())

    def _reply(self, answer: Callable[[bool, Any], object], done: Future[Any]) -> None:
        error = CancelledError() if done.cancelled() else done.exception()
        answer(*((True, done.result()) if error is None else (False, portable(self.name, error))))


class Activity:
    """Whether this process and those that it has started do something: compute, read or write.

    Loading a model, compiling it and capturing graphs are calls into other libraries, most of which say nothing for
    minutes; but none of them does nothing. What waits for a lock, for the network or for another rank does nothing, and
    so does what hangs; a thread that waits by spinning looks busy. Elsewhere than on Linux only processor time is seen.

    >>> activity = Activity()
    >>> activity.idle_s()
    0.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_at = self._looked_at = time.monotonic()
        self._seen: dict[int, tuple[float, int]] | None = None

    def idle_s(self) -> float:
        """Seconds since the look at which it was last busy, compared with the look before; 0 at the first."""
        with self._lock:
            now = time.monotonic()
            elapsed_s = now - self._looked_at
            if self._seen is None:
                self._seen, self._busy_at, self._looked_at = _used(), now, now
            elif elapsed_s >= _SHORTEST_LOOK_S:
                used = _used()
                before = [self._seen.get(pid, (0.0, 0)) for pid in used]
                cpu_s = sum(max(0.0, cpu - old) for (cpu, _), (old, _) in zip(used.values(), before))
                moved = sum(max(0, count - old) for (_, count), (_, old) in zip(used.values(), before))
                if cpu_s >= _BUSY * elapsed_s or moved >= _MOVED * elapsed_s:
                    self._busy_at = now
                self._seen, self._looked_at = used, now
            return now - self._busy_at


def _used() -> dict[int, tuple[float, int]]:
    """Processor seconds, and bytes read and written by calls and from storage into mapped files, by process."""
    this_process, used = psutil.Process(), {}
    for process in (this_process, *descendants()):
        with suppress(psutil.Error):  # it has ended, or may not be looked into
            times = process.cpu_times()  # in steps of 10 ms
            cpu_s = time.process_time() if process.pid == this_process.pid else times.user + times.system
            used[process.pid] = cpu_s, 0
            if psutil.LINUX:
                with suppress(OSError, RuntimeError, ValueError):  # a kernel that does not count them, a file torn off
                    counts = process.io_counters()
                    used[process.pid] = cpu_s, counts.read_chars + counts.write_chars + counts.read_bytes
    return used


def descendants() -> list[psutil.Process]:
    """The children of this process, theirs, and so on.

    ``psutil.Process.children`` fails where /proc hides what belongs to others (mounted with ``hidepid=1``).
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            children.setdefault(process.ppid(), []).append(process)
    ours = list(children.get(os.getpid(), ()))
    for process in ours:  # which grows meanwhile
        ours += children.get(process.pid, ())
    return ours


class OpenCalls:
    """The calls to one worker that have no answer yet; each is answered exactly once.

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
        self.dead: WorkerDied | None = None  # why no call is answered any more

    def open(self, send: Callable[[int], object]) -> Future[Any]:
        """The future of a call that ``send(number)`` begins; failed at once when the worker is dead or that raises."""
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
        """Answer a call; nothing happens when it has been answered before."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is not None:
            (future.set_result if succeeded else future.set_exception)(value)

    def fail(self, death: WorkerDied) -> None:
        """The worker is dead: open calls and later ones fail with ``death``; only the first counts."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = death
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_exception(death)


def portable(name: str, error: BaseException) -> BaseException:
    """The exception with the worker's traceback as a note; a RuntimeError that quotes it where it cannot be pickled.

    So for SystemExit, CancelledError, StopIteration and the like, which would end or disturb the owner's event loop.
    """
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
        if not isinstance(error, Exception) or isinstance(error, (CancelledError, StopIteration)):
            raise TypeError
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class may do anything here; what it said must not be lost
        error = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, WorkerDied):
        error.add_note(f"In {name}:\n{trace}")
    return error


def child_environment(env: Mapping[str, str] | None, threads: int | None) -> dict[str, str]:
    """What differs in a worker's environment; OpenMP reads its number of threads there, once, when it is loaded.

    >>> child_environment({"A": "b"}, threads=2)
    {'OMP_NUM_THREADS': '2', 'A': 'b'}
    """
    return ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}) | dict(env or {})


@dataclass
class Start:
    """One worker's start, as its owner sees it; times are of one clock of the owner's.

    Args:
        limit_s: longest silence.
        began_s: when it was started.
    """

    limit_s: float
    began_s: float
    is_pinged: bool = False

    def __post_init__(self) -> None:
        self.answered_s = self.worked_s = self.began_s

    def answered(self, idle_s: float, now_s: float) -> None:
        """It has answered ``IDLE_METHOD``."""
        self.is_pinged, self.answered_s, self.worked_s = False, now_s, max(self.worked_s, now_s - idle_s)

    def verdict(self, now_s: float, starts: Iterable[Start]) -> str | None:
        """Why it is to be given up; None where it is to be waited for.

        Args:
            now_s: on the owner's clock.
            starts: all that start with it. One may wait for another (for a download, at a rendezvous):
                while one of them works, none is silent.

        >>> start, other = Start(10.0, began_s=0.0), Start(10.0, began_s=0.0)
        >>> other.answered(idle_s=0.0, now_s=9.0)
        >>> start.answered(idle_s=9.0, now_s=9.0)
        >>> start.verdict(12.0, [start, other])
        >>> start.answered(idle_s=15.0, now_s=15.0), start.verdict(19.5, [start, other])
        (None, 'it did nothing for 10 s while it was being started')
        >>> other.verdict(19.5, [start, other])
        'it has not answered for 10 s while it was being started'
        >>> start.answered(idle_s=0.0, now_s=120.0), start.verdict(120.0, [start])
        (None, 'it was not ready after 120 s')
        """
        if now_s - self.answered_s >= self.limit_s:
            return f"it has not answered for {self.limit_s:g} s while it was being started"
        silent_s = now_s - self.worked_s  # a fleet that starts looks at all others only where this one is silent
        if silent_s >= self.limit_s <= now_s - max((start.worked_s for start in starts), default=self.worked_s):
            return f"it did nothing for {self.limit_s:g} s while it was being started"
        if now_s - self.began_s >= _SILENCES * self.limit_s:
            return f"it was not ready after {_SILENCES * self.limit_s:g} s"
        return None
