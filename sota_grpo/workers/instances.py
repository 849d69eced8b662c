"""Environments with state: one object per sample, in worker processes that may hang and crash. Imports no torch."""

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
from sota_grpo.workers.base import WorkerSpec, pending_future, starter
from sota_grpo.workers.fleet import Fleet, TaskLost, TaskOverdue
from sota_grpo.workers.processes import ProcessLauncher

_DESCRIBE_S = 120.0  # longest for the construction of one object and the schemas of its tools (imports transformers)
_SILENCE_S = 60.0  # longest without an answer to a ping, beyond the deadline of a call


class InstanceLost(RuntimeError):
    """An environment cannot continue; the message is the reason. Adapters raise it, too."""


@dataclass(frozen=True)
class InstanceSpec:
    """How environments are made.

    Args:
        kind: ``functions`` (plain tools), ``factory`` (TRL's protocol), or ``package.module:function`` of an adapter,
            which is called with ``options``. What it returns has ``schemas``, ``reset(**row)``,
            ``call(name, arguments)``, and perhaps ``get_reward()`` and ``close()``; results may be awaitable.
        path: of the user's file, or of a pickle of functions and factories that were passed in Python; the user's
            word for an adapter.
        names: of the functions in it, or of the one factory; none of a pickle means all.
        options: of an adapter.
    """

    kind: str
    path: str = ""
    names: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path}:{','.join(self.names)}" if self.names else self.path or self.kind

    @property
    def is_adapter(self) -> bool:
        """Whether the environment is elsewhere and calls mostly wait: a worker then calls several concurrently."""
        return ":" in self.kind


@dataclass(frozen=True)
class Answer:
    """The result of one tool call as text; that of a tool that raised, or is missing, begins with ``error:``."""

    content: str
    is_error: bool


@dataclass(frozen=True)
class Opened:
    """An environment and the observation that its ``reset`` returned."""

    key: int
    observation: str | None


class Instances:
    """Live environments of one kind, each from :meth:`open` to :meth:`finish` or :meth:`drop`.

    A worker is a process that runs the user's file once, and then calls its environments one after the other, on its
    main thread (an adapter's concurrently). Workers are added when all have ``per_worker`` environments. A worker that
    takes longer than ``timeout_s`` for a request, or dies, is replaced, and the futures of its environments fail with
    :class:`InstanceLost`. They fail with :class:`~.base.WorkerDied` where no worker starts any more, or after
    :meth:`close`. Methods may be called from any thread; the futures' callbacks must be quick.

    Args:
        spec: of the environments.
        timeout_s: longest for a reset, a tool call or a reward.
        max_chars: of an observation, or of the answer to one call; the rest is cut with a note.
        per_worker: most environments of one worker, hence most that one hang can cost.

    Attributes:
        schemas: of the tools, as chat templates take them, after :meth:`wait_ready`.
        has_reward: whether there is a ``get_reward``, after :meth:`wait_ready`.
        workers: fleets of one worker each, because an environment cannot move.

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
        """Return when environments can be opened.

        Raises:
            UserError: the file or the object cannot be used; the message says why.
        """
        deadline_s = max(_DESCRIBE_S, self._timeout_s)
        describing = self._started("environment", deadline_s)
        try:
            described = describing.submit("describe", 0).result()
        except (TaskLost, TaskOverdue, InstanceLost) as error:
            raise UserError(f"{self._spec} cannot be used: {_loss(error, deadline_s)}; mend it there.") from None
        except UserError as error:
            raise type(error)(str(error)) from None  # without the worker's traceback
        finally:
            describing.close()
        self.schemas, self.has_reward = described["schemas"], described["has_reward"]
        with self._lock:
            self._add_worker()

    def open(self, row: Mapping[str, Any], seeds: tuple[int, int] | None = None) -> Future[Opened]:
        """Make an environment and reset it with ``row``.

        Args:
            row: its columns.
            seeds: of the random numbers of Python, NumPy and torch, where they are imported: until the end of the
                reset, and of the calls from then on; None leaves them to chance.
        """
        key = next(self._keys)
        with self._lock:
            loads = Counter([*self._worker_of.values()])
            if not self._is_closed and all(loads[worker] >= self._per_worker for worker in self.workers):
                self._add_worker()
            worker = self._worker_of[key] = min(self.workers, key=loads.__getitem__)

        async def opened() -> Opened:
            return Opened(key, await self._request(worker, "open", key, dict(row), seeds))

        return worker.start(opened())

    def call(self, key: int, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> Future[list[Answer]]:
        """Call tools, by name and with keyword arguments, one after the other; a deadline each."""

        async def answers(worker: Fleet) -> list[Answer]:
            return [Answer(*await self._request(worker, "call", key, name, dict(values))) for name, values in calls]

        return self._start(key, answers)

    def state(self, key: int) -> Future[dict[str, Any] | None]:
        """The public attributes of an environment that are JSON; None of what is no environment of a factory."""
        return self._start(key, lambda worker: self._request(worker, "state", key))

    def finish(self, key: int) -> Future[float | None]:
        """The environment's reward, None where it has none; it is then gone."""

        async def reward(worker: Fleet) -> float | None:
            value = await self._request(worker, "finish", key)
            self._worker_of.pop(key, None)
            return value

        return self._start(key, reward)

    def drop(self, key: int) -> None:
        """Forget an environment; one that is gone may be dropped."""
        worker = self._worker_of.pop(key, None)
        if worker is not None:
            worker.submit("drop", key)

    def close(self) -> None:
        """End all workers; pending futures fail. Idempotent."""
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
            silence_s=_SILENCE_S + deadline_s,  # a call may hold the interpreter lock
            max_attempts=1,
        )

    def _start(self, key: int, request: Callable[[Fleet], Coroutine[Any, Any, Any]]) -> Future[Any]:
        worker = self._worker_of.get(key)
        if worker is not None:
            return worker.start(request(worker))
        lost = pending_future()
        lost.set_exception(InstanceLost("it was finished or dropped, or is lost with its worker"))
        return lost

    async def _request(self, worker: Fleet, kind: str, key: int, *content: Any) -> Any:
        try:
            return await worker.run(kind, key, *content)
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, TaskLost):  # of the file, or no worker is left
                raise
            self.drop(key)
            raise InstanceLost(_loss(error, self._timeout_s)) from None


def _loss(error: BaseException, timeout_s: float) -> str:
    """Why an environment is lost, without the worker's traceback."""
    if isinstance(error, TaskOverdue):
        return f"TimeoutError: no answer within {timeout_s:g} s"
    if isinstance(error, TaskLost):
        return f"WorkerDied: {one_line(str(error.__cause__ or error))}"
    return str(error) if isinstance(error, InstanceLost) else sentence(error)
