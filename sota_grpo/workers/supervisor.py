"""What a fleet decides, event by event, on one thread: who gets which task, who is dead, what happens to its tasks."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from sota_grpo.workers.base import Worker, WorkerDied
from sota_grpo.workers.broadcasts import Broadcast, Broadcasts, OnDemand, Sticky
from sota_grpo.workers.host import ConstructionFailed
from sota_grpo.workers.slots import Limits, Patience, Rota, Slot, Task, TaskLost, TaskOverdue, Timers
from sota_grpo.workers.starting import IDLE_METHOD, Start

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two starts that fail


class Supervisor:
    """The state of a fleet. Every method is called on one thread; none blocks; each costs O(log tasks) or less.

    Args:
        role, method, limits: as in :class:`~sota_grpo.workers.fleet.Fleet`.
        count: slots.
        launch: ``launch(slot, life, old_worker, pause_s)`` kills the old worker, starts one after a pause on another
            thread, and posts :meth:`started` or :meth:`start_failed`.
        post: ``post(function, *args)`` has a function called on this thread; safe from every thread.
    """

    def __init__(
        self,
        role: str,
        method: str,
        limits: Limits,
        count: int,
        launch: Callable[[Slot, int, Worker | None, float], None],
        post: Callable[..., Any],
    ) -> None:
        self.restarts = self.requeued = 0
        self.dead: WorkerDied | None = None
        self.ready: Future[None] = Future()
        self.timers = Timers(max_late_s=limits.silence_s / 4)
        self.slots = [Slot(role, index) for index in range(count)]
        self._role, self._method, self._limits, self._launch, self._post = role, method, limits, launch, post
        self._queue: list[Task] = []
        self._rota = Rota(limits.capacity)
        max_deaths = limits.max_attempts * count
        self._broadcasts = Broadcasts(role, self.slots, self.timers, self._ask, self._lose, max_deaths)

    def begin(self, slot: Slot, pause_s: float = 0.0) -> None:
        """Put a new worker in a slot, whoever was there before."""
        old, slot.worker = slot.worker, None
        slot.life += 1
        slot.state, slot.is_pinged, slot.is_timed = "starting", False, False
        slot.start = Start(self._limits.start_silence_s, self.timers.now_s() + pause_s)
        self._look_at_start(slot, slot.life)
        self._launch(slot, slot.life, old, pause_s)

    def started(self, slot: Slot, life: int, worker: Worker) -> None:
        """The worker exists; it is ready when it has what was broadcast before, and has answered a ping."""
        if slot.life != life or self.dead is not None:
            worker.kill()
            return
        slot.worker = worker
        slot.answers_owed = 0
        for method, args in [*self._broadcasts.sticky.items(), ("ping", ())]:
            self._prepare(slot, method, args)

    def start_failed(self, slot: Slot, life: int, error: BaseException) -> None:
        """Try again, unless this slot failed too often or its first construction raised."""
        if slot.life != life or slot.state != "starting" or self.dead is not None:
            return
        slot.failed_starts += 1
        hopeless = isinstance(error, ConstructionFailed) and not slot.has_run
        if hopeless or slot.failed_starts >= self._limits.max_start_failures:
            self._retire(slot, error)
            return
        logger.warning("%s does not start: %s; it is tried again.", slot.who, error)
        self.restarts += 1
        self.begin(slot, min(_FIRST_PAUSE_S * 2 ** (slot.failed_starts - 1), _LONGEST_PAUSE_S))

    def _look_at_start(self, slot: Slot, life: int) -> None:
        """Ask a worker whether it works at its start, eight times in the longest silence."""
        if slot.life != life or slot.state != "starting" or self.dead is not None:
            return
        now_s, start = self.timers.now_s(), slot.start
        if why := start.verdict(now_s, [other.start for other in self.slots if other.state == "starting"]):
            self.start_failed(slot, life, TimeoutError(why))
            return
        if slot.worker is not None and not start.is_asked:
            start.is_asked = True
            self._ask(slot, IDLE_METHOD, (), self._seen_at_start)
        self.timers.at(now_s + start.limit_s / 8, self._look_at_start, slot, life)

    def _seen_at_start(self, slot: Slot, life: int, future: Future[Any]) -> None:
        if slot.life == life and future.exception() is None:  # of its death, what it is asked to prepare will tell
            slot.start.answered(future.result(), self.timers.now_s())

    def _prepare(self, slot: Slot, method: str, args: Sticky) -> None:
        slot.answers_owed += 1
        if isinstance(args, OnDemand):
            args.made().add_done_callback(partial(self._post, self._made, slot, slot.life, method, args))
        else:
            self._ask(slot, method, args, self._prepared)

    def _made(self, slot: Slot, life: int, method: str, args: OnDemand, made: Future[Any]) -> None:
        if slot.life != life:
            return
        if self._broadcasts.sticky.get(method) is not args:  # newer ones are on their way to this worker
            self._one_less(slot)
        elif error := made.exception():
            self.start_failed(slot, life, error)
        else:
            self._ask(slot, method, made.result(), self._prepared)

    def _prepared(self, slot: Slot, life: int, future: Future[Any]) -> None:
        if slot.life != life:
            return
        error = future.exception()
        if error is not None:
            self.start_failed(slot, life, error)
            return
        self._one_less(slot)

    def _one_less(self, slot: Slot) -> None:
        slot.answers_owed -= 1
        if slot.answers_owed == 0:
            self._welcome(slot)

    def _welcome(self, slot: Slot) -> None:
        slot.state, slot.has_run, slot.failed_starts = "ready", True, 0
        logger.info("%s is ready.", slot.who)
        slot.heard_s = self.timers.now_s()
        self._rota.put(slot)
        self._tick(slot, slot.life)
        if not self.ready.done() and all(other.has_run for other in self.slots):
            self.ready.set_result(None)
        self._broadcasts.welcome(slot)
        self._dispatch()

    def _retire(self, slot: Slot, error: BaseException) -> None:
        left = sum(other.state != "retired" for other in self.slots) - 1
        tries = f"{slot.failed_starts} start{'s' * (slot.failed_starts > 1)}"
        what = f"{slot.who} is given up after {tries} that failed, {left} left: {error}"
        logger.error("%s", what)
        slot.life += 1
        slot.state = "retired"
        if slot.worker is not None:
            slot.worker.kill()
        cause = WorkerDied(what)
        cause.__cause__ = error
        if not self.ready.done():
            self.ready.set_exception(cause)
        if left == 0:
            self.end(cause)

    def submit(self, task: Task) -> None:
        """Give the task to the least loaded worker that has room, now or later."""
        if self.dead is not None:
            task.future.set_exception(self.dead)
            return
        heapq.heappush(self._queue, task)
        self._dispatch()

    def _dispatch(self) -> None:
        while self._queue and (slot := self._rota.least()) is not None:
            task = heapq.heappop(self._queue)
            self._rota.take(slot)
            slot.tasks[task.number] = task
            self._rota.put(slot)
            task.since_s = self.timers.now_s()
            self._ask(slot, self._method, task.args, self._done, task)
            self._time(slot)

    def _done(self, slot: Slot, life: int, task: Task, future: Future[Any]) -> None:
        if slot.life != life or task.number not in slot.tasks:
            return
        error = future.exception()
        if isinstance(error, WorkerDied):
            self._lose(slot, error)
            return
        self._rota.take(slot)
        del slot.tasks[task.number]
        self._rota.put(slot)
        self._dispatch()
        if error is None:
            task.future.set_result(future.result())
        else:
            task.future.set_exception(error)

    def _time(self, slot: Slot) -> None:
        """Have a look at the slot's tasks when one may be overdue."""
        if (patience := self._limits.patience) is not None and slot.tasks and not slot.is_timed:
            slot.is_timed = True
            due_s = patience.look_at_s(next(iter(slot.tasks.values())), self.timers.now_s())
            self.timers.at(due_s, self._look_for_overdue, slot, slot.life, patience)

    def _look_for_overdue(self, slot: Slot, life: int, patience: Patience) -> None:
        if slot.life != life:
            return
        slot.is_timed, now_s = False, self.timers.now_s()
        overdue = [task for task in slot.tasks.values() if patience.is_over(task, now_s)]
        if not overdue:
            self._time(slot)
            return
        what = f"{slot.who} was at one task for more than {patience.limit_s:g} s"
        self._rota.take(slot)
        for task in overdue:
            del slot.tasks[task.number]
        self._rota.put(slot)
        self._lose(slot, what)
        for task in overdue:
            task.future.set_exception(TaskOverdue(what, task.progress))

    def _lose(self, slot: Slot, why: str | WorkerDied) -> None:
        """Replace a ready worker and queue its tasks again, where they were."""
        who = slot.who
        self._rota.take(slot)
        tasks, slot.tasks = list(slot.tasks.values()), {}
        failed = [task for task in tasks if task.workers_lost + 1 >= self._limits.max_attempts]
        for task in tasks:
            task.workers_lost += 1
            if task.workers_lost < self._limits.max_attempts:
                heapq.heappush(self._queue, task)
        again = len(tasks) - len(failed)
        self.restarts += 1
        self.requeued += again
        logger.warning("%s is replaced: %s. Tasks queued again: %d; given up: %d.", who, why, again, len(failed))
        self.begin(slot)
        self._broadcasts.lost(slot, str(why))
        self._dispatch()
        for task in failed:
            lost = TaskLost(f"A task was with {task.workers_lost} {self._role} workers that died, at last {who}: {why}")
            lost.__cause__ = why if isinstance(why, WorkerDied) else None
            task.future.set_exception(lost)

    def _tick(self, slot: Slot, life: int) -> None:
        """Ping, four times in the longest silence."""
        if slot.life != life:
            return
        silence_s = self._limits.silence_s
        if not slot.is_pinged:
            slot.is_pinged = True
            self._ask(slot, "ping", (), self._ponged)
            self.timers.at(slot.heard_s + silence_s, self._look_for_silence, slot, life, slot.heard_s)
        self.timers.at(self.timers.now_s() + silence_s / 4, self._tick, slot, life)

    def _ponged(self, slot: Slot, life: int, future: Future[Any]) -> None:
        if slot.life != life:
            return
        error = future.exception()
        if error is not None:
            self._lose(slot, error if isinstance(error, WorkerDied) else f"its ping failed: {error!r}")
        elif future.result() > self._limits.silence_s:
            self._lose(slot, f"it has had work and made no progress for {future.result():.1f} s")
        else:
            slot.is_pinged, slot.heard_s = False, self.timers.now_s()

    def _look_for_silence(self, slot: Slot, life: int, heard_s: float) -> None:
        if slot.life == life and slot.heard_s == heard_s:
            self._lose(slot, f"it has not answered a ping for {self._limits.silence_s:g} s")

    def open(self, broadcast: Broadcast, sticky: bool) -> None:
        """Ask every ready worker; one that is starting gets a sticky broadcast before its first task."""
        if self.dead is not None:
            broadcast.future.set_exception(self.dead)
            return
        self._broadcasts.open(broadcast, sticky)
        if sticky:
            self._prepare_starting(broadcast.method, broadcast.args)

    def keep(self, method: str, args: Sticky) -> None:
        """Call ``method`` on workers that are not ready yet, and on those that start later, before their first task."""
        self._broadcasts.sticky[method] = args
        self._prepare_starting(method, args)

    def _prepare_starting(self, method: str, args: Sticky) -> None:
        for slot in self.slots:
            if slot.state == "starting" and slot.worker is not None:
                self._prepare(slot, method, args)

    def end(self, cause: WorkerDied) -> None:
        """Kill every worker, and fail what is open and what comes later."""
        if self.dead is not None:
            return
        self.dead = cause
        tasks = [*self._queue, *(task for slot in self.slots for task in slot.tasks.values())]
        for slot in self.slots:
            slot.life += 1
            slot.tasks = {}
            if slot.worker is not None:
                slot.worker.kill()
        if not self.ready.done():
            self.ready.set_exception(cause)
        self._broadcasts.end(cause)
        self._queue = []
        for task in sorted(tasks):
            task.future.set_exception(cause)

    def _ask(self, slot: Slot, method: str, args: tuple[Any, ...], then: Callable[..., None], *about: Any) -> None:
        """Call the slot's worker and have ``then(slot, life, *about, future)`` called here when it has answered."""
        assert slot.worker is not None
        future = slot.worker.call(method, *args)
        future.add_done_callback(partial(self._post, then, slot, slot.life, *about))
