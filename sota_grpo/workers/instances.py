"""Stateful environments, one object per sample, in worker processes that may hang or crash; without torch."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.text import one_line, sentence
from sota_grpo.workers.base import WorkerDied, WorkerSpec, pending_future, starter
from sota_grpo.workers.fleet import Fleet, TaskLost, TaskOverdue
from sota_grpo.workers.processes import ProcessLauncher

_DESCRIBE_S = 120.0  # longest time to construct an object and its tools' schemas (imports transformers)
_SILENCE_S = 60.0  # longest time without an answer to a ping, in addition to the deadline of a call


class InstanceLost(RuntimeError):
    """An environment failed or has ended; the message is the reason. Adapters may raise it too."""


@dataclass(frozen=True)
class InstanceSpec:
    """How environment objects are created.

    Args:
        kind: ``functions`` (plain tools), ``factory`` (TRL's protocol), or ``package.module:function`` of an adapter,
            which is called with ``**options``. The object that it returns has ``schemas``, ``reset(**row)``,
            ``call(name, arguments)``, and optionally ``get_reward()``, ``attributes()``, ``seed``, ``close()`` and
            ``kill()``, which ends a running call; results may be awaitable.
        path: path of the user's file, or of a pickle of functions and factories that were passed in Python; for an
            adapter, the value that the user gave.
        names: names of the functions in the file, or of its factory; empty for a pickle: all.
        options: keyword arguments of an adapter.
    """

    kind: str
    path: str = ""
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path}:{','.join(self.names)}" if self.names else self.path or self.kind

    @property
    def is_adapter(self) -> bool:
        """Whether ``kind`` names an adapter, whose calls mostly wait, so that a worker runs several concurrently."""
        return ":" in self.kind


@dataclass(frozen=True)
class Answer:
    """The result of one tool call as text; if the tool raised or does not exist, ``error:`` and the reason."""

    content: str
    is_error: bool


@dataclass(frozen=True)
class Opened:
    """A new environment: its key for later calls, and the observation that ``reset`` returned."""

    key: int
    observation: str | None


class Instances:
    """The live environments of one spec; an environment lives from :meth:`open` to :meth:`finish` or :meth:`drop`.

    A worker process runs the user's file once. It then calls its environments one after the other on its main thread,
    or, if they are an adapter's, all concurrently. A worker is added when all have ``per_worker`` environments. A
    worker that dies, or exceeds ``timeout_s`` for a request, is replaced, and the futures of its environments fail with
    :class:`InstanceLost`. Futures fail with :class:`~.base.WorkerDied` if workers cannot be started, or after
    :meth:`close`. Thread-safe; callbacks of the futures must not block.

    Args:
        timeout_s: longest time for one request: construction with reset, a tool call, the state or the reward.
        max_chars: most characters of an observation or tool result, which is truncated with a note, and of a state.
        per_worker: most environments per worker; all are lost if the worker hangs.

    Attributes:
        schemas: JSON schemas of the tools, as chat templates need them; set by :meth:`wait_ready`.
        has_reward: whether environments have ``get_reward``; set by :meth:`wait_ready`.
        workers: fleets of one worker each, because an environment cannot move to another process.

    Example::

        instances = Instances(InstanceSpec("factory", "guess.py", ("Guess",)), timeout_s=5.0)
        instances.wait_ready()
        opened = instances.open({"word": "river"}).result()
        instances.call(opened.key, [("guess", {"word": "lakes"})]).result()
        reward = instances.finish(opened.key).result()
        instances.close()
    """

    def __init__(self, spec: InstanceSpec, *, timeout_s: float, max_chars: int = 65536, per_worker: int = 8) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.has_reward = False
        self._spec, self._timeout_s, self._per_worker = spec, timeout_s, per_worker
        self._worker = WorkerSpec(
            "sota_grpo.workers.environment_worker:EnvironmentWorker", {"spec": spec, "max_chars": max_chars}
        )
        self._launcher = ProcessLauncher()
        self._keys = itertools.count()
        self._lock, self._is_closed = threading.Lock(), False
        self.workers: list[Fleet] = []
        self._worker_of: dict[int, Fleet] = {}

    def wait_ready(self) -> None:
        """Read the tools' schemas from a temporary environment (UserError if that fails); begin to start a worker."""
        deadline_s = max(_DESCRIBE_S, self._timeout_s)
        describing = self._started("environment", deadline_s)
        try:
            described = describing.submit("describe", 0).result()
        except (TaskLost, TaskOverdue, InstanceLost) as error:
            raise UserError(
                f"{self._spec} cannot be used: {_loss(error, deadline_s).rstrip('.')}; correct this."
            ) from None
        except UserError as error:
            raise type(error)(str(error)) from None  # without the worker's traceback
        finally:
            describing.close()
        self.schemas, self.has_reward = described["schemas"], described["has_reward"]
        with self._lock:
            self._add_worker()

    def open(self, row: Mapping[str, Any], seeds: tuple[int, int] | None = None) -> Future[Opened]:
        """Create an environment and call ``reset(**row)``; return a future of its key and observation.

        ``seeds`` are (seed of construction and reset, seed of later calls), for Python's random numbers, and NumPy's
        and torch's if they are imported (of an adapter only the attribute ``seed``); None: not seeded.
        """
        key = next(self._keys)
        with self._lock:
            if self._is_closed:
                return _failed(WorkerDied("the environments were closed"))
            loads = Counter([*self._worker_of.values()])
            if all(loads[worker] >= self._per_worker for worker in self.workers):
                self._add_worker()
            worker = self._worker_of[key] = min(self.workers, key=loads.__getitem__)

        async def opened() -> Opened:
            return Opened(key, await self._request(worker, "open", key, dict(row), seeds))

        return worker.start(opened())

    def call(self, key: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Future[list[Answer]]:
        """Make tool calls, each (name, keyword arguments), in order; return a future of the answers."""

        async def answers(worker: Fleet) -> list[Answer]:
            return [Answer(*await self._request(worker, "call", key, name, dict(values))) for name, values in calls]

        return self._start(key, answers)

    def state(self, key: int) -> Future[dict[str, Any] | None]:
        """Return a future of {name: value} of the environment's public attributes that are JSON, up to ``max_chars``.

        The future's result is None for functions and for adapters without ``attributes``.
        """
        return self._start(key, lambda worker: self._request(worker, "state", key))

    def finish(self, key: int) -> Future[float | None]:
        """Get the environment's reward, and end it; return a future of the reward (None if it gives none)."""

        async def reward(worker: Fleet) -> float | None:
            value = await self._request(worker, "finish", key)
            self._worker_of.pop(key, None)
            return value

        return self._start(key, reward)

    def drop(self, key: int) -> None:
        """End an environment without its reward; do not wait until it has ended; no-op if it had ended before."""
        worker = self._worker_of.pop(key, None)
        if worker is not None:
            worker.submit("drop", key)

    def close(self) -> None:
        """Kill all workers and fail pending futures with WorkerDied; idempotent."""
        with self._lock:
            self._is_closed = True
        for worker in self.workers:
            worker.close()
        self._launcher.close()

    def _add_worker(self) -> None:
        self.workers.append(self._started(f"environments-{len(self.workers)}", self._timeout_s))

    def _started(self, role: str, deadline_s: float) -> Fleet:
        return Fleet(
            role,
            starter(self._launcher, role, self._worker, [{"threads": 1}]),
            1,
            capacity=self._per_worker if self._spec.is_adapter else 1,
            task_deadline_s=deadline_s,
            silence_s=_SILENCE_S + deadline_s,  # a call may hold the GIL
            max_attempts=1,
        )

    def _start(self, key: int, request: Callable[[Fleet], Coroutine[Any, Any, Any]]) -> Future[Any]:
        worker = self._worker_of.get(key)
        if worker is not None:
            return worker.start(request(worker))
        return _failed(InstanceLost("the environment was finished or dropped, or its worker process died"))

    async def _request(self, worker: Fleet, kind: str, key: int, *content: Any) -> Any:
        try:
            return await worker.run(kind, key, *content)
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, TaskLost):  # bad file, or no worker left
                raise
            self.drop(key)
            raise InstanceLost(_loss(error, self._timeout_s)) from None


def _failed(error: Exception) -> Future[Any]:
    future = pending_future()
    future.set_exception(error)
    return future


def _loss(error: BaseException, timeout_s: float) -> str:
    """Return why an environment was lost, without the worker's traceback."""
    if isinstance(error, TaskOverdue):
        return f"TimeoutError: no answer within {timeout_s:g} s"
    if isinstance(error, TaskLost):
        return f"WorkerDied: {one_line(str(error.__cause__ or error))}"
    return str(error) if isinstance(error, InstanceLost) else sentence(error)
