"""What a worker is, whoever started it (Ray, multiprocessing, a thread): its contract, what is in it, how it starts.

A worker is an object whose methods are called from elsewhere; a :class:`Host` constructs it and calls them, and
:class:`Worker` is what its owner has in hand. Imports no torch: a process that grades has none.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sota_grpo.errors import RunFailed
from sota_grpo.orphans import descendants

Result = TypeVar("Result")
Unpack = Callable[[], tuple[Any, ...]]
IDLE_METHOD = "__idle_s__"  # answered by every host, at once, while its worker is being constructed too
_SILENCES = 12  # a start that never falls silent is given up after so many times the longest silence
_BUSY = 0.05  # share of one core, below which a process waits (an idle Ray actor takes 0.01)
_MOVED = 1 << 20  # bytes read and written in a second, above which it loads
_SHORTEST_LOOK_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def promised() -> Future[Any]:
    """A future that whoever made it will resolve; its reader cannot cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(future: Future[Result], compute: Callable[[], Result]) -> None:
    """Give ``future`` what ``compute()`` returns or raises.

    >>> future = promised()
    >>> resolve(future, lambda: 1 / 0)
    >>> type(future.exception()).__name__
    'ZeroDivisionError'
    """
    try:
        result = compute()
    except BaseException as error:  # it belongs to whoever reads the future
        future.set_exception(error)
    else:
        future.set_result(result)


def gathered(futures: Sequence[Future[Result]]) -> Future[list[Result]]:
    """All results in order, once the last future is done; the first failure in that order instead, if there is one.

    >>> parts = [promised(), promised()]
    >>> both = gathered(parts)
    >>> parts[1].set_result("b"), both.done()
    (None, False)
    >>> parts[0].set_result("a")
    >>> both.result()
    ['a', 'b']
    """
    both, left = promised(), itertools.count(len(futures) - 1, -1)  # a count is taken by one thread at a time

    def one_is_done(_: Future[Result]) -> None:
        if next(left) == 0:
            resolve(both, lambda: [future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one_is_done)
    return both


class WorkerDied(RunFailed, RuntimeError):
    """A worker is gone, hangs, or says that it cannot go on; the message names it and the cause."""


class WorkerLate(RunFailed, TimeoutError):
    """Nobody answered in time, and replacing who was late did not help; the message names them."""


class ConstructionFailed(WorkerDied):
    """The worker's factory raised; another try would most likely raise again."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is made by: ``factory(**options)``, called once in its own process.

    Its public methods are what :meth:`Worker.call` may name. A method that
    takes long returns a :class:`concurrent.futures.Future`; one that returns a value must be quick, because the host
    answers calls one after the other. ``ping()`` returns the seconds for which the worker has had work and made no
    progress (0 when idle); ``close()`` frees what it holds. A worker that cannot go on fails its futures with
    :class:`WorkerDied`.

    Args:
        factory: ``"package.module:function"``, imported there.
        options: keyword arguments, picklable.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    """A worker as its owner has it in hand, wherever it is.

    ``call`` returns at once; its future has the method's result (or, where the method returned a future, that one's),
    the method's exception, or :class:`WorkerDied`. Calls are started in the order given; a long one does not hold up
    the others. The worker is constructed while earlier calls wait; when its construction fails, every call fails with
    :class:`WorkerDied` and the cause. ``kill`` ends the process at once (SIGKILL, stopped processes included), is
    idempotent, and fails what is in flight with :class:`WorkerDied`.
    """

    name: str

    def call(self, method: str, *args: Any) -> Future[Any]: ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts workers of one kind, and shares large values with them."""

    @property
    def start(self) -> Callable[..., Worker]:
        """``start(name, spec, **placement)``; what a placement is, each launcher says."""
        ...

    def share(self, value: Any) -> Any:
        """A handle that may be given to ``call`` in place of ``value`` and is sent to every worker once."""
        ...

    def close(self) -> None:
        """End every worker that is left; idempotent."""
        ...


class Host:
    """Constructs a worker, then calls its methods in the order given, on the thread that runs :meth:`serve`.

    Contract. Consumes: calls, from any thread. Produces: one future per call: the method's result, its exception, or,
    where the method returned a future, what that one has. Waits for: the next call. Unblocked by: :meth:`call` and
    :meth:`close`. A worker whose construction raises leaves a host that answers every call with
    :class:`ConstructionFailed`. The call ``"__idle_s__"`` (for how long this process has done nothing) is the host's
    own and is answered at once, during the construction too.

    Args:
        name: of the worker, for messages.
        unpack_spec: gives what to construct; called on that thread, and what it raises is a failed construction.

    >>> host = Host("counter-0", lambda: WorkerSpec("collections:Counter", {"a": 2}))
    >>> total = host.call("total")  # waits: nothing is constructed yet
    >>> thread = host.serve_on_thread()
    >>> total.result(), host.call("get", "a").result()
    (2, 2)
    >>> host.close()
    """

    def __init__(self, name: str, unpack_spec: Callable[[], WorkerSpec]) -> None:
        self.name = name
        self._unpack_spec = unpack_spec
        self._inbox: queue.SimpleQueue[tuple[Future[Any], str, Unpack] | None] = queue.SimpleQueue()
        self._activity = Activity()

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Queue ``method(*args)``."""
        return self.post(method, lambda: args)

    def post(self, method: str, unpack: Unpack) -> Future[Any]:
        """Queue ``method(*unpack())``; what unpacking raises is the call's exception.

        Unpacking imports the modules of the arguments' classes. It happens on the thread that constructed the worker,
        because two threads that import parts of one package at once may see half of a module.
        """
        future = promised()
        if method == IDLE_METHOD:
            future.set_result(self._activity.idle_s())
        else:
            self._inbox.put((future, method, unpack))
        return future

    def serve(self) -> None:
        """Construct the worker and answer calls until :meth:`close`, which closes the worker too."""
        worker, refusal = _construct(self.name, self._unpack_spec)
        while (item := self._inbox.get()) is not None:
            if refusal is None:
                _answer(worker, *item)
            else:
                item[0].set_exception(refusal)
        if callable(getattr(worker, "close", None)):
            worker.close()

    def serve_on_thread(self) -> threading.Thread:
        """Run :meth:`serve` on a daemon thread of its own, which is returned."""
        thread = threading.Thread(target=self.serve, name=f"host of {self.name}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End :meth:`serve` after the calls that are queued."""
        self._inbox.put(None)


def _construct(name: str, unpack_spec: Callable[[], WorkerSpec]) -> tuple[Any, ConstructionFailed | None]:
    try:
        spec = unpack_spec()
        module, _, function = spec.factory.partition(":")
        return getattr(import_module(module), function)(**spec.options), None
    except BaseException as error:  # SystemExit of a command-line library included: it is for the caller to report
        trace = "".join(traceback.format_exception(error)).rstrip()
        refusal = ConstructionFailed(f"{name} could not be constructed: {type(error).__name__}: {error}")
        refusal.add_note(trace)
        return None, refusal


def _answer(worker: Any, future: Future[Any], method: str, unpack: Unpack) -> None:
    try:
        if method.startswith("_"):
            raise AttributeError(f"{type(worker).__name__}.{method} is private and cannot be called from outside")
        result = getattr(worker, method)(*unpack())
    except BaseException as error:  # it belongs to whoever called; the next call is to be answered all the same
        future.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda done: resolve(future, done.result))
    else:
        future.set_result(result)


class Activity:
    """Whether this process and those that it has started do something: compute, read or write.

    Loading a model, compiling it and capturing graphs are calls into other libraries, most of which say nothing for
    minutes; but none of them does nothing. What waits for a lock, for the network or for another rank does nothing, and
    so does what hangs; a thread that waits by spinning looks busy. Elsewhere than on Linux only the processor time of
    this process is seen.

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
    """Processor seconds, and bytes read and written, by process."""
    own = os.getpid()
    used = {pid: (_cpu_s(pid), _moved(pid)) for pid in descendants(own)}
    return used | {own: (time.process_time(), _moved(own))}


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime


def _moved(pid: int) -> int:
    """By read and write calls, and from storage into mapped files."""
    try:
        lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:  # it has ended, or there is no /proc
        return 0
    return sum(int(lines[name]) for name in ("rchar", "wchar", "read_bytes"))


class OpenCalls:
    """The calls to one worker that have no answer yet; each is answered exactly once.

    Args:
        name: of the worker, for messages.

    >>> calls, sent = OpenCalls("rollout-0"), []
    >>> future = calls.open(sent.append)
    >>> calls.fail("was killed")
    >>> calls.resolve(sent[0], True, "too late")
    >>> print(future.exception())
    rollout-0 was killed
    >>> print(calls.open(sent.append).exception())
    rollout-0 was killed
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._futures: dict[int, Future[Any]] = {}
        self.dead: WorkerDied | None = None  # why no call is answered any more

    def open(self, send: Callable[[int], object]) -> Future[Any]:
        """The future of a call that ``send(number)`` begins; failed at once when the worker is dead or that raises."""
        future = promised()
        with self._lock:
            number, self._count = self._count, self._count + 1
            dead = self.dead
            if dead is None:
                self._futures[number] = future
        if dead is not None:
            future.set_exception(dead)
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
        if future is None:
            return
        if succeeded:
            future.set_result(value)
        else:
            future.set_exception(value)

    def fail(self, what: str | WorkerDied, kind: type[WorkerDied] = WorkerDied) -> None:
        """The worker is dead: open calls and later ones fail with ``{name} {what}``; only the first cause counts."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = kind(f"{self._name} {what}") if isinstance(what, str) else what
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_exception(self.dead)


def outcome(name: str, future: Future[Any]) -> tuple[bool, Any]:
    """What a finished call has to say to another process: ``(True, result)`` or ``(False, exception)``."""
    error = future.exception()
    return (True, future.result()) if error is None else (False, portable(name, error))


def portable(name: str, error: BaseException) -> BaseException:
    """The exception with the worker's traceback as a note; a RuntimeError that quotes it where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error)).rstrip()
    try:
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
    is_asked: bool = False

    def __post_init__(self) -> None:
        self.heard_s = self.worked_s = self.began_s

    def answered(self, idle_s: float, now_s: float) -> None:
        """It has answered ``IDLE_METHOD``."""
        self.is_asked, self.heard_s, self.worked_s = False, now_s, max(self.worked_s, now_s - idle_s)

    def verdict(self, now_s: float, beside: Iterable[Start]) -> str | None:
        """Why it is to be given up; None where it is to be waited for.

        Args:
            now_s: on the owner's clock.
            beside: all that start with it. One may wait for another (who downloads, who comes last to a meeting): while
                one of them works, none is silent.

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
        if now_s - self.heard_s >= self.limit_s:
            return f"it has not answered for {self.limit_s:g} s while it was being started"
        if now_s - max((start.worked_s for start in beside), default=self.worked_s) >= self.limit_s:
            return f"it did nothing for {self.limit_s:g} s while it was being started"
        if now_s - self.began_s >= _SILENCES * self.limit_s:
            return f"it was not ready after {_SILENCES * self.limit_s:g} s"
        return None
