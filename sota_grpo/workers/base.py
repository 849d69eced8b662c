"""What a run needs of a process that works for it, whoever started it (Ray, multiprocessing, a thread)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from sota_grpo.errors import RunFailed


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
