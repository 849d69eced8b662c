"""The book-keeping of a fleet: slots for workers, the tasks that they have, open broadcasts, what is due when."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from sota_grpo.workers.base import Start, Worker, WorkerDied, promised


class TaskOverdue(TimeoutError):
    """A worker was at a task for too long; ``progress`` says how far it had come with it."""

    def __init__(self, what: str, progress: int) -> None:
        super().__init__(what)
        self.progress = progress


class TaskLost(WorkerDied):
    """As many workers died with a task as may; ``__cause__`` is how the last one did, where that is known."""


@dataclass(eq=False)
class Task:
    """One call that any worker may answer. ``number`` orders the queue, and is kept when it is queued again."""

    number: int
    args: tuple[Any, ...]
    future: Future[Any] = field(default_factory=promised)
    workers_lost: int = 0
    since_s: float = 0.0  # when its worker got it, or was last seen to come further with it
    progress: int = 0

    def __lt__(self, other: Task) -> bool:
        return self.number < other.number


@dataclass(eq=False)
class Slot:
    """One worker at a time has it. ``life`` counts them: what an earlier one still says is not listened to."""

    role: str
    index: int
    life: int = 0
    worker: Worker | None = None
    state: Literal["starting", "ready", "retired"] = "starting"
    start: Start = field(default_factory=lambda: Start(0.0, 0.0))  # while it is starting
    tasks: dict[int, Task] = field(default_factory=dict)  # oldest first
    failed_starts: int = 0  # in a row
    has_run: bool = False
    heard_s: float = 0.0  # when it last answered a ping
    is_pinged: bool = False  # and has not answered yet
    is_timed: bool = False  # a timer looks at its oldest task
    answers_owed: int = 0  # before it is ready

    @property
    def who(self) -> str:
        return f"{self.role} worker {self.index}" if self.worker is None else self.worker.name


class Timers:
    """Functions and when they are due, on a clock that stands still while nobody could have looked at it.

    A stopped driver (SIGSTOP, a suspended laptop) finds every deadline passed when it goes on, and its workers are not
    to blame: what :meth:`take_due` is late by, beyond ``max_late_s``, is not counted as time.

    >>> timers = Timers(max_late_s=1.0)
    >>> timers.at(timers.now_s(), print, "due")
    >>> function, args = timers.take_due()
    >>> function(*args), timers.take_due()
    due
    (None, None)
    """

    def __init__(self, max_late_s: float) -> None:
        self._max_late_s = max_late_s
        self._away_s = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def now_s(self) -> float:
        return time.monotonic() - self._away_s

    def at(self, due_s: float, function: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (due_s, self._count, function, args))

    def wait_s(self) -> float | None:
        """Seconds until the next one is due; None when there is none."""
        return max(0.0, self._heap[0][0] - self.now_s()) if self._heap else None

    def take_due(self) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
        """The function that is due, if one is, with its arguments."""
        if not self._heap or (late_s := self.now_s() - self._heap[0][0]) < 0:
            return None
        if late_s > self._max_late_s:
            self._away_s += late_s
        _, _, function, args = heapq.heappop(self._heap)
        return function, args


@dataclass(eq=False)
class Broadcast:
    """One call to every live worker, until each has answered, died or been late."""

    method: str
    args: tuple[Any, ...]
    deadline_s: float  # for each worker, from when it is asked
    previous: tuple[Any, ...] | None = None  # sticky arguments that these replaced
    waiting: set[int] = field(default_factory=set)  # slots
    answers: dict[int, Any] = field(default_factory=dict)  # slot -> answer
    refusals: list[BaseException] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    deaths: int = 0
    future: Future[list[Any]] = field(default_factory=promised)

    @property
    def needs_another(self) -> bool:
        """Nobody is asked and nobody has said anything: the next worker that is ready is to be asked."""
        return not (self.waiting or self.answers or self.refusals)
