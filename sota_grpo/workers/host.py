"""What every worker has in it, wherever it lives: a servant, one thread that speaks to it, and futures."""

from __future__ import annotations

import os
import pickle
import queue
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from importlib import import_module
from typing import Any

from sota_grpo.workers.base import ServantSpec, WorkerDied, promised, resolve
from sota_grpo.workers.starting import IDLE_METHOD, Activity

PID_METHOD = "__pid__"
Unpack = Callable[[], tuple[Any, ...]]


class ConstructionFailed(WorkerDied):
    """The servant's factory raised; another try would most likely raise again."""


class Host:
    """Constructs a servant, then calls its methods in the order given, on the thread that runs :meth:`serve`.

    Contract. Consumes: calls, from any thread. Produces: one future per call: the method's result, its exception, or,
    where the method returned a future, what that one has. Waits for: the next call. Unblocked by: :meth:`call` and
    :meth:`close`. A servant whose construction raises leaves a host that answers every call with
    :class:`ConstructionFailed`. The calls ``"__pid__"`` and ``"__idle_s__"`` (for how long this process has done
    nothing) are the host's own and are answered at once, during the construction too.

    Args:
        name: of the worker, for messages.
        unpack_spec: gives what to construct; called on that thread, and what it raises is a failed construction.

    >>> host = Host("counter-0", lambda: ServantSpec("collections:Counter", {"a": 2}))
    >>> total = host.call("total")  # waits: nothing is constructed yet
    >>> thread = host.serve_on_thread()
    >>> total.result(), host.call("get", "a").result()
    (2, 2)
    >>> host.close()
    """

    def __init__(self, name: str, unpack_spec: Callable[[], ServantSpec]) -> None:
        self.name = name
        self._unpack_spec = unpack_spec
        self._inbox: queue.SimpleQueue[tuple[Future[Any], str, Unpack] | None] = queue.SimpleQueue()
        self._activity = Activity()

    def call(self, method: str, *args: Any) -> Future[Any]:
        """Queue ``method(*args)``."""
        return self.post(method, lambda: args)

    def post(self, method: str, unpack: Unpack) -> Future[Any]:
        """Queue ``method(*unpack())``; what unpacking raises is the call's exception.

        Unpacking imports the modules of the arguments' classes. It happens on the thread that constructed the servant,
        because two threads that import parts of one package at once may see half of a module.
        """
        future = promised()
        if method == PID_METHOD:
            future.set_result(os.getpid())
        elif method == IDLE_METHOD:
            future.set_result(self._activity.idle_s())
        else:
            self._inbox.put((future, method, unpack))
        return future

    def serve(self) -> None:
        """Construct the servant and answer calls until :meth:`close`, which closes the servant too."""
        servant, refusal = _construct(self.name, self._unpack_spec)
        while (item := self._inbox.get()) is not None:
            if refusal is None:
                _answer(servant, *item)
            else:
                item[0].set_exception(refusal)
        if callable(getattr(servant, "close", None)):
            servant.close()

    def serve_on_thread(self) -> threading.Thread:
        """Run :meth:`serve` on a daemon thread of its own, which is returned."""
        thread = threading.Thread(target=self.serve, name=f"host of {self.name}", daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        """End :meth:`serve` after the calls that are queued."""
        self._inbox.put(None)


class OpenCalls:
    """The calls to one worker that have no answer yet; each is answered exactly once.

    Args:
        name: of the worker, for messages.

    >>> calls = OpenCalls("rollout-0")
    >>> number, future = calls.open()
    >>> calls.fail("was killed")
    >>> calls.resolve(number, True, "too late")
    >>> print(future.exception())
    rollout-0 was killed
    >>> print(calls.open()[1].exception())
    rollout-0 was killed
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._count = 0
        self._futures: dict[int, Future[Any]] = {}
        self._dead: WorkerDied | None = None

    @property
    def dead(self) -> WorkerDied | None:
        """Why no call is answered any more."""
        return self._dead

    def open(self) -> tuple[int, Future[Any]]:
        """A number and its future, which has failed already when the worker is dead."""
        future = promised()
        with self._lock:
            number, self._count = self._count, self._count + 1
            dead = self._dead
            if dead is None:
                self._futures[number] = future
        if dead is not None:
            future.set_exception(dead)
        return number, future

    def resolve(self, number: int, succeeded: bool, value: Any) -> None:
        """Answer a call; nothing happens when it has been answered before."""
        with self._lock:
            future = self._futures.pop(number, None)
        if future is not None:
            _settle(future, succeeded, value)

    def fail(self, what: str, kind: type[WorkerDied] = WorkerDied) -> None:
        """The worker is dead: open calls and later ones fail with ``{name} {what}``; only the first cause counts."""
        with self._lock:
            if self._dead is not None:
                return
            self._dead = kind(f"{self._name} {what}")
            left, self._futures = self._futures, {}
        for future in left.values():
            _settle(future, False, self._dead)


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


def _construct(name: str, unpack_spec: Callable[[], ServantSpec]) -> tuple[Any, ConstructionFailed | None]:
    try:
        spec = unpack_spec()
        module, _, function = spec.factory.partition(":")
        return getattr(import_module(module), function)(**spec.options), None
    except BaseException as error:  # SystemExit of a command-line library included: it is for the caller to report
        trace = "".join(traceback.format_exception(error)).rstrip()
        refusal = ConstructionFailed(f"{name} could not be constructed: {type(error).__name__}: {error}")
        refusal.add_note(trace)
        return None, refusal


def _answer(servant: Any, future: Future[Any], method: str, unpack: Unpack) -> None:
    try:
        if method.startswith("_"):
            raise AttributeError(f"{type(servant).__name__}.{method} is private and cannot be called from outside")
        found = getattr(servant, method)(*unpack())
    except BaseException as error:  # it belongs to whoever called; the next call is to be answered all the same
        future.set_exception(error)
        return
    if isinstance(found, Future):
        found.add_done_callback(lambda done: resolve(future, done.result))
    else:
        future.set_result(found)


def _settle(future: Future[Any], succeeded: bool, value: Any) -> None:
    if succeeded:
        future.set_result(value)
    else:
        future.set_exception(value)
