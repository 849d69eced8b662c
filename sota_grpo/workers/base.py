"""What a run needs of a process that works for it, whoever started it (Ray, multiprocessing, a thread)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from sota_grpo.errors import RunFailed

Result = TypeVar("Result")


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
    both, lock, left = promised(), threading.Lock(), len(futures)

    def one_is_done(_: Future[Result]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            resolve(both, lambda: [future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one_is_done)
    return both


class WorkerDied(RunFailed, RuntimeError):
    """A worker is gone, hangs, or says that it cannot go on; the message names it and the cause."""


class WorkerLate(RunFailed, TimeoutError):
    """Nobody answered in time, and replacing who was late did not help; the message names them."""


@dataclass(frozen=True)
class ServantSpec:
    """What a worker runs: ``factory(**options)``, called once in the worker's own process.

    The object that it returns is the servant. Its public methods are what :meth:`Worker.call` may name. A method that
    takes long returns a :class:`concurrent.futures.Future`; one that returns a value must be quick, because the host
    answers calls one after the other. ``ping()`` returns the seconds for which the servant has had work and made no
    progress (0 when idle); ``close()`` frees what it holds. A servant that cannot go on fails its futures with
    :class:`WorkerDied`.

    Args:
        factory: ``"package.module:function"``, imported in the worker.
        options: keyword arguments, picklable.
    """

    factory: str
    options: Mapping[str, Any] = field(default_factory=dict)


class Worker(Protocol):
    """A servant in a place of its own.

    ``call`` returns at once; its future has the method's result (or, where the method returned a future, that one's),
    the method's exception, or :class:`WorkerDied`. Calls are started in the order given; a long one does not hold up
    the others. The servant is constructed while earlier calls wait; when its construction fails, every call fails with
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
