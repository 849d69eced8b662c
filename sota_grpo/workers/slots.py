"""The book-keeping of a fleet: places for workers, the tasks that they have, open broadcasts, what is due when."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from sota_grpo.workers.base import Start, Worker, WorkerDied, WorkerLate, promised, resolve

_MAX_LATE = 2  # times that a slot's worker may be late before the call itself is taken to be hopeless


class TaskOverdue(TimeoutError):
    """A worker was at a task for too long; ``progress`` says how far it had come with it."""

    def __init__(self, what: str, progress: int) -> None:
        super().__init__(what)
        self.progress = progress


class TaskLost(WorkerDied):
    """As many workers died with a task as may; ``__cause__`` is how the last one did, where that is known."""


@dataclass(eq=False)
class Task:
    """One call that any worker may answer. ``number`` is its place in the queue, kept when it is queued again."""

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
    """A place for one worker at a time. ``life`` counts them: what an earlier one still says is not listened to."""

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


class TimeoutPolicy:
    """How long a worker may be at a task without coming further with it.

    A task of several parts has the limit for each: ``progress`` is looked at eight times in it, and the limit counts
    from when it was last seen to have changed, so a part gets between the limit and nine eighths of it.

    Args:
        limit_s: see above.
        progress: ``progress(*task.args)`` counts what is done of a task, from 0; None: it shows at its end only.

    >>> done = iter([1, 1])
    >>> timeout, task = TimeoutPolicy(8.0, lambda: next(done)), Task(0, (), since_s=5.0)
    >>> timeout.look_at_s(task, 5.0), timeout.is_over(task, 6.0), timeout.is_over(task, 14.0)
    (6.0, False, True)
    """

    def __init__(self, limit_s: float, progress: Callable[..., int] | None = None) -> None:
        self.limit_s, self._progress = limit_s, progress

    def is_over(self, task: Task, now_s: float) -> bool:
        """Whether its worker has made no progress for too long."""
        if self._progress is not None and (done := self._progress(*task.args)) != task.progress:
            task.progress, task.since_s = done, now_s
        return now_s - task.since_s >= self.limit_s

    def look_at_s(self, oldest: Task, now_s: float) -> float:
        """When to ask again."""
        due_s = oldest.since_s + self.limit_s
        return due_s if self._progress is None else min(due_s, now_s + self.limit_s / 8)


@dataclass(frozen=True)
class Limits:
    """How long a fleet waits and how often it tries (:class:`~sota_grpo.workers.fleet.Fleet` explains each)."""

    capacity: int
    timeout: TimeoutPolicy | None
    silence_s: float
    start_silence_s: float
    max_attempts: int
    max_start_failures: int


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


class OnDemand:
    """Arguments of a sticky call that are made when a worker first needs them, on a thread of their own.

    Args:
        make: gives the arguments; called again only after it has raised.

    >>> arguments = OnDemand(lambda: (1, 2))
    >>> arguments.made().result()
    (1, 2)
    """

    def __init__(self, make: Callable[[], tuple[Any, ...]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Future[tuple[Any, ...]] | None = None

    def made(self) -> Future[tuple[Any, ...]]:
        """The arguments, some day."""
        with self._lock:
            if self._made is None or (self._made.done() and self._made.exception()):
                self._made = promised()
                threading.Thread(target=resolve, args=(self._made, self._make), name="on demand", daemon=True).start()
            return self._made


Sticky = tuple[Any, ...] | OnDemand


@dataclass(eq=False)
class Broadcast:
    """One call to every live worker, until each has answered, died or been late."""

    method: str
    args: tuple[Any, ...]
    deadline_s: float  # for each worker, from when it is asked
    previous: Sticky | None = None  # sticky arguments that these replaced
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


class Broadcasts:
    """The broadcasts of a fleet that are open, on its supervisor's thread.

    Args:
        role: of the workers, for messages.
        slots: of the fleet.
        ask: ``ask(slot, method, args, then, *about)``: ``then(slot, *about, future)`` is called with the answer.
        later: ``later(wait_s, then, slot, *about)``: ``then(slot, *about)`` is called unless the worker is another.
        lose: ``lose(slot, why)`` replaces a worker, and calls :meth:`lost` here.
        max_deaths: of workers that were asked, until a broadcast that nobody answered fails.

    Attributes:
        sticky: method -> the arguments that a new worker gets.
    """

    def __init__(
        self,
        role: str,
        slots: Sequence[Slot],
        ask: Callable[..., None],
        later: Callable[..., None],
        lose: Callable[[Slot, str], None],
        max_deaths: int,
    ) -> None:
        self.sticky: dict[str, Sticky] = {}
        self._role, self._slots, self._ask, self._later, self._lose = role, slots, ask, later, lose
        self._max_deaths = max_deaths
        self._open: list[Broadcast] = []

    def open(self, broadcast: Broadcast, sticky: bool) -> None:
        """Ask every ready worker."""
        self._open.append(broadcast)
        if sticky:
            broadcast.previous = self.sticky.get(broadcast.method)
            self.sticky[broadcast.method] = broadcast.args
        for slot in self._slots:
            if slot.state == "ready":
                self._ask_one(broadcast, slot)

    def welcome(self, slot: Slot) -> None:
        """A worker is ready: ask it what nobody else can answer any more."""
        for broadcast in self._open:
            if broadcast.needs_another:
                self._ask_one(broadcast, slot)

    def lost(self, slot: Slot, why: str) -> None:
        """A worker is dead, whatever it was asked."""
        for broadcast in list(self._open):
            if slot.index in broadcast.waiting:
                broadcast.waiting.remove(slot.index)
                broadcast.deaths += 1
                self._conclude(broadcast, why)

    def end(self, cause: WorkerDied) -> None:
        """Fail what is open."""
        left, self._open = self._open, []
        for broadcast in left:
            broadcast.waiting.clear()
            broadcast.future.set_exception(cause)

    def _ask_one(self, broadcast: Broadcast, slot: Slot) -> None:
        broadcast.waiting.add(slot.index)
        self._later(broadcast.deadline_s, self._look_for_late, slot, broadcast)
        self._ask(slot, broadcast.method, broadcast.args, self._answered, broadcast)

    def _answered(self, slot: Slot, broadcast: Broadcast, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, WorkerDied):
            self._lose(slot, str(error))
            return
        broadcast.waiting.remove(slot.index)
        if error is None:
            broadcast.answers[slot.index] = future.result()
        else:
            broadcast.refusals.append(error)
        self._conclude(broadcast, "")

    def _look_for_late(self, slot: Slot, broadcast: Broadcast) -> None:
        if slot.index in broadcast.waiting:
            broadcast.late.append(slot.who)
            self._lose(slot, f"it has not answered {broadcast.method} within {broadcast.deadline_s:g} s")

    def _conclude(self, broadcast: Broadcast, why: str) -> None:
        """Answer when nobody is left to wait for; where all are lost, wait for a replacement, up to a limit."""
        hopeless = broadcast.deaths >= self._max_deaths or len(broadcast.late) >= _MAX_LATE * len(self._slots)
        if broadcast.waiting or (broadcast.needs_another and not hopeless):
            return
        self._open.remove(broadcast)
        if broadcast.refusals:
            self._forget(broadcast)
            broadcast.future.set_exception(broadcast.refusals[0])
        elif broadcast.answers:
            broadcast.future.set_result([answer for _, answer in sorted(broadcast.answers.items())])
        elif broadcast.late:
            late = f"No {self._role} worker answered {broadcast.method} within {broadcast.deadline_s:g} s"
            broadcast.future.set_exception(WorkerLate(f"{late}; late: {', '.join(broadcast.late)}"))
        else:
            died = f"{broadcast.deaths} {self._role} workers died at {broadcast.method}, at last: {why}"
            broadcast.future.set_exception(WorkerDied(died))
        broadcast.args, broadcast.previous = (), None  # a timer holds the broadcast for long, and weights are large

    def _forget(self, broadcast: Broadcast) -> None:
        """A worker refused it: those that start later get what came before."""
        if self.sticky.get(broadcast.method) is not broadcast.args:
            return
        del self.sticky[broadcast.method]
        if broadcast.previous is not None:
            self.sticky[broadcast.method] = broadcast.previous
