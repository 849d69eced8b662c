"""Workers of one role behind one queue: dispatch, deadlines, replacement, re-queueing."""

from __future__ import annotations

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from sota_grpo.workers.base import IDLE_METHOD, ConstructionFailed, Launcher, Start, Worker, WorkerDied, WorkerSpec
from sota_grpo.workers.slots import (
    Broadcast,
    Broadcasts,
    Limits,
    OnDemand,
    Slot,
    Sticky,
    Task,
    TaskLost,
    TaskOverdue,
    TimeoutPolicy,
    Timers,
)

logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two starts that fail
_GOODBYE_S = 10.0  # longest wait for threads that are starting a worker when the fleet is closed


class Supervisor:
    """The state of a fleet. Every method is called on one thread; none blocks; each costs O(workers + log tasks).

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
        self._offered: dict[int, Slot] = {}  # ready, with room for a task; who waits longest comes first
        max_deaths = limits.max_attempts * count
        self._broadcasts = Broadcasts(role, self.slots, self._ask, self._later, self._lose, max_deaths)

    def begin(self, slot: Slot, pause_s: float = 0.0) -> None:
        """Put a new worker in a slot, whoever was there before."""
        old, slot.worker = slot.worker, None
        slot.life += 1
        slot.state, slot.is_pinged, slot.is_timed = "starting", False, False
        slot.start = Start(self._limits.start_silence_s, self.timers.now_s() + pause_s)
        self._look_at_start(slot)
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

    def _look_at_start(self, slot: Slot) -> None:
        """Ask a worker whether it works at its start, eight times in the longest silence."""
        if slot.state != "starting" or self.dead is not None:
            return
        now_s, start = self.timers.now_s(), slot.start
        if why := start.verdict(now_s, [other.start for other in self.slots if other.state == "starting"]):
            self.start_failed(slot, slot.life, TimeoutError(why))
            return
        if slot.worker is not None and not start.is_asked:
            start.is_asked = True
            self._ask(slot, IDLE_METHOD, (), self._seen_at_start)
        self._later(start.limit_s / 8, self._look_at_start, slot)

    def _seen_at_start(self, slot: Slot, future: Future[Any]) -> None:
        if future.exception() is None:  # of its death, what it is asked to prepare will tell
            slot.start.answered(future.result(), self.timers.now_s())

    def _prepare(self, slot: Slot, method: str, args: Sticky) -> None:
        slot.answers_owed += 1
        if isinstance(args, OnDemand):
            args.made().add_done_callback(partial(self._post, self._if_same, slot, slot.life, self._made, method, args))
        else:
            self._ask(slot, method, args, self._prepared)

    def _made(self, slot: Slot, method: str, args: OnDemand, made: Future[Any]) -> None:
        if self._broadcasts.sticky.get(method) is not args:  # newer ones are on their way to this worker
            self._one_less(slot)
        elif error := made.exception():
            self.start_failed(slot, slot.life, error)
        else:
            self._ask(slot, method, made.result(), self._prepared)

    def _prepared(self, slot: Slot, future: Future[Any]) -> None:
        if error := future.exception():
            self.start_failed(slot, slot.life, error)
        else:
            self._one_less(slot)

    def _one_less(self, slot: Slot) -> None:
        slot.answers_owed -= 1
        if slot.answers_owed == 0:
            self._welcome(slot)

    def _welcome(self, slot: Slot) -> None:
        slot.state, slot.has_run, slot.failed_starts = "ready", True, 0
        logger.info("%s is ready.", slot.who)
        slot.heard_s = self.timers.now_s()
        self._offer(slot)
        self._tick(slot)
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

    def _offer(self, slot: Slot) -> None:
        """The slot's tasks have changed: it is the last in the line of those that have as many."""
        self._offered.pop(slot.index, None)
        if len(slot.tasks) < self._limits.capacity:
            self._offered[slot.index] = slot

    def _dispatch(self) -> None:
        while self._queue and self._offered:
            task, slot = heapq.heappop(self._queue), min(self._offered.values(), key=lambda slot: len(slot.tasks))
            slot.tasks[task.number] = task
            self._offer(slot)
            task.since_s = self.timers.now_s()
            self._ask(slot, self._method, task.args, self._done, task)
            self._time(slot)

    def _done(self, slot: Slot, task: Task, future: Future[Any]) -> None:
        error = future.exception()
        if isinstance(error, WorkerDied):
            self._lose(slot, error)
            return
        del slot.tasks[task.number]
        self._offer(slot)
        self._dispatch()
        if error is None:
            task.future.set_result(future.result())
        else:
            task.future.set_exception(error)

    def _time(self, slot: Slot) -> None:
        """Have a look at the slot's tasks when one may be overdue."""
        if (timeout := self._limits.timeout) is not None and slot.tasks and not slot.is_timed:
            slot.is_timed = True
            due_s = timeout.look_at_s(next(iter(slot.tasks.values())), self.timers.now_s())
            self._later(due_s - self.timers.now_s(), self._look_for_overdue, slot, timeout)

    def _look_for_overdue(self, slot: Slot, timeout: TimeoutPolicy) -> None:
        slot.is_timed, now_s = False, self.timers.now_s()
        overdue = [task for task in slot.tasks.values() if timeout.is_over(task, now_s)]
        if not overdue:
            self._time(slot)
            return
        what = f"{slot.who} was at one task for more than {timeout.limit_s:g} s"
        for task in overdue:
            del slot.tasks[task.number]
        self._lose(slot, what)
        for task in overdue:
            task.future.set_exception(TaskOverdue(what, task.progress))

    def _lose(self, slot: Slot, why: str | WorkerDied) -> None:
        """Replace a ready worker and queue its tasks again, where they were."""
        who = slot.who
        self._offered.pop(slot.index, None)
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

    def _tick(self, slot: Slot) -> None:
        """Ping, four times in the longest silence."""
        silence_s = self._limits.silence_s
        if not slot.is_pinged:
            slot.is_pinged = True
            self._ask(slot, "ping", (), self._ponged)
            due_s = slot.heard_s + silence_s
            self._later(due_s - self.timers.now_s(), self._look_for_silence, slot, slot.heard_s)
        self._later(silence_s / 4, self._tick, slot)

    def _ponged(self, slot: Slot, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._lose(slot, error if isinstance(error, WorkerDied) else f"its ping failed: {error!r}")
        elif future.result() > self._limits.silence_s:
            self._lose(slot, f"it has had work and made no progress for {future.result():.1f} s")
        else:
            slot.is_pinged, slot.heard_s = False, self.timers.now_s()

    def _look_for_silence(self, slot: Slot, heard_s: float) -> None:
        if slot.heard_s == heard_s:
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
        """Call the slot's worker and have ``then(slot, *about, future)`` called here when that one has answered."""
        assert slot.worker is not None
        future = slot.worker.call(method, *args)
        future.add_done_callback(partial(self._post, self._if_same, slot, slot.life, then, *about))

    def _later(self, wait_s: float, then: Callable[..., None], slot: Slot, *about: Any) -> None:
        """Have ``then(slot, *about)`` called in ``wait_s`` seconds, if the slot has the same worker still."""
        self.timers.at(self.timers.now_s() + wait_s, self._if_same, slot, slot.life, then, *about)

    def _if_same(self, slot: Slot, life: int, then: Callable[..., None], *about: Any) -> None:
        if slot.life == life:
            then(slot, *about)


class Fleet:
    """``count`` workers of one role behind one queue.

    Contract. Consumes: calls of ``method``. Produces: one future per call, answered exactly once, in the order of
    submission as far as workers have room. Waits for: workers, on one supervisor thread, each wait with a deadline.
    Every live worker is pinged; one that dies, does not answer a ping for ``silence_s`` or says that it has made no
    progress for so long is killed and replaced in its slot, and its tasks go back to the front of the queue. Clients'
    callbacks run on the supervisor thread and must be quick.

    Args:
        role: what the workers are, in messages.
        start: starts the worker of a slot; it may take long, and is called on a thread of its own.
        count: slots.
        capacity: tasks that one worker has at a time.
        method: of the worker, called for a task.
        task_deadline_s: a worker that is at one task for longer is killed and the task fails with TimeoutError.
        progress: ``progress(*args)`` counts the parts of a task that are done; the deadline then is that of a part.
        silence_s: see above.
        start_silence_s: a start counts as failed when neither this worker nor another that is starting does anything
            for so long (:class:`~.starting.Activity`), when this one does not answer for so long, or after 12 times it.
        max_attempts: a task that was with so many workers as they died fails with :class:`WorkerDied`.
        max_start_failures: in a row; the slot is then given up, and with the last slot the fleet. A construction that
            raises in a slot where none has worked yet is not repeated.

    >>> from sota_grpo.workers.threads import ThreadLauncher
    >>> spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", {"score": len, "term_names": ("length",)})
    >>> fleet = Fleet("reward", starter(ThreadLauncher(), "reward", spec), 2, capacity=4)
    >>> fleet.wait_ready()
    >>> fleet.submit([]).result(), fleet.broadcast("ping", deadline_s=10.0), fleet.names
    ([], [0.0, 0.0], ['reward-0', 'reward-1'])
    >>> fleet.close()
    """

    def __init__(
        self,
        role: str,
        start: Callable[[int], Worker],
        count: int,
        *,
        capacity: int,
        method: str = "run",
        task_deadline_s: float | None = None,
        progress: Callable[..., int] | None = None,
        silence_s: float = 60.0,
        start_silence_s: float = 600.0,
        max_attempts: int = 8,
        max_start_failures: int = 5,
    ) -> None:
        if count < 1 or capacity < 1:
            raise ValueError(f"A fleet needs at least one worker with room for one task; got {count} and {capacity}.")
        timeout = None if task_deadline_s is None else TimeoutPolicy(task_deadline_s, progress)
        limits = Limits(capacity, timeout, silence_s, start_silence_s, max_attempts, max_start_failures)
        self._role, self._start = role, start
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._is_open, self._closing = threading.Lock(), True, threading.Event()
        self._launches: set[threading.Thread] = set()
        self._supervisor = Supervisor(role, method, limits, count, self._launch, self._post)
        self._thread = threading.Thread(target=self._supervise, name=f"{role} fleet", daemon=True)
        self._thread.start()

    @property
    def restarts(self) -> int:
        """Workers that were replaced, failed starts included."""
        return self._supervisor.restarts

    @property
    def requeued(self) -> int:
        """How often a task was given to another worker because its own was lost."""
        return self._supervisor.requeued

    @property
    def names(self) -> list[str]:
        """Of the workers, slot by slot; a slot whose worker is being started has none."""
        return [worker.name for slot in self._supervisor.slots if (worker := slot.worker) is not None]

    @property
    def pids(self) -> list[int | None]:
        """Of the workers, as :attr:`names`; None for a thread, and for an actor that has not said it yet."""
        workers = [slot.worker for slot in self._supervisor.slots]
        return [getattr(worker, "pid", None) for worker in workers if worker is not None]

    def wait_ready(self) -> None:
        """Return when every worker has been constructed.

        Raises:
            WorkerDied: a slot was given up: its worker's construction raised, or too many starts failed.
        """
        self._supervisor.ready.result()

    def submit(self, *args: Any) -> Future[Any]:
        """``method(*args)`` on the least loaded worker, as soon as one has room.

        The future has the method's result or exception; :class:`~.slots.TaskLost` when the task was with
        ``max_attempts`` workers that died; another :class:`WorkerDied` when the fleet was closed or no slot is left;
        :class:`~.slots.TaskOverdue`, a TimeoutError, after ``task_deadline_s``.
        """
        task = Task(next(self._numbers), args)
        if not self._post(self._supervisor.submit, task):
            task.future.set_exception(self._closed())
        return task.future

    def broadcast(self, method: str, *args: Any, deadline_s: float, sticky: bool = False) -> list[Any]:
        """``method(*args)`` on every live worker; returns their answers, slot by slot.

        A worker that dies, or has not answered ``deadline_s`` after it was asked, is replaced and left out of the
        answer. When all that were asked are lost, the next replacement is asked instead, up to a limit.

        Args:
            method: of the worker.
            deadline_s: for one worker.
            sticky: every worker that starts later gets the newest sticky call of each method before its first task.

        Raises:
            WorkerLate: nobody answered, the replacements neither (a TimeoutError).
            WorkerDied: nobody answered, or the fleet was closed or has no slot left.
            Exception: what the method raised on a worker; a sticky call is then forgotten again.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("A future's callback cannot wait for a broadcast: it runs on the fleet's own thread.")
        broadcast = Broadcast(method, args, deadline_s)
        if not self._post(self._supervisor.open, broadcast, sticky):
            raise self._closed()
        return broadcast.future.result()

    def keep(self, method: str, args: Sticky) -> None:
        """As a sticky broadcast, but those that are ready are not asked: they have it already.

        Args:
            method: of the worker.
            args: or what makes them when the first worker needs them.
        """
        self._post(self._supervisor.keep, method, args)

    def close(self) -> None:
        """Kill every worker and fail what is open; idempotent."""
        self._closing.set()
        self._post(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, function: Callable[..., None], *args: Any) -> bool:
        with self._lock:
            if self._is_open:
                self._inbox.put(partial(function, *args))
            return self._is_open

    def _supervise(self) -> None:
        cause = self._closed()
        try:
            for slot in self._supervisor.slots:
                self._supervisor.begin(slot)
            while not self._closing.is_set():
                self._turn()
        except BaseException as error:  # nobody may be left waiting, whatever is wrong here
            logger.exception("The supervisor of the %s fleet failed.", self._role)
            cause = WorkerDied(f"the supervisor of the {self._role} fleet failed: {error!r}")
        self._wind_up(cause)

    def _turn(self) -> None:
        with suppress(queue.Empty):
            self._inbox.get(timeout=self._supervisor.timers.wait_s())()
        for _ in range(self._inbox.qsize()):  # answers that are here already come before deadlines
            self._inbox.get()()
        while (due := self._supervisor.timers.take_due()) is not None:
            function, args = due
            function(*args)

    def _wind_up(self, cause: WorkerDied) -> None:
        """Leave no worker, no waiting client and no thread that would start another worker."""
        self._closing.set()
        self._supervisor.end(cause)
        until_s = time.monotonic() + _GOODBYE_S
        for thread in list(self._launches):
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            self._is_open = False
        while not self._inbox.empty():
            self._inbox.get()()

    def _launch(self, slot: Slot, life: int, old: Worker | None, pause_s: float) -> None:
        name = f"start of {self._role} {slot.index}"
        thread = threading.Thread(target=self._bring_up, args=(slot, life, old, pause_s), name=name, daemon=True)
        self._launches.add(thread)
        thread.start()

    def _bring_up(self, slot: Slot, life: int, old: Worker | None, pause_s: float) -> None:
        try:
            if old is not None:
                old.kill()
            if self._closing.wait(pause_s):
                return
            worker = self._start(slot.index)
            if not self._post(self._supervisor.started, slot, life, worker):
                worker.kill()
        except Exception as error:  # whatever a launcher raises is a start that failed, for the supervisor to judge
            self._post(self._supervisor.start_failed, slot, life, error)
        finally:
            self._launches.discard(threading.current_thread())

    def _closed(self) -> WorkerDied:
        return WorkerDied(f"the {self._role} fleet was closed")


def starter(
    launcher: Launcher, role: str, spec: WorkerSpec, placements: Sequence[Mapping[str, Any]] = ()
) -> Callable[[int], Worker]:
    """The ``start`` of a :class:`Fleet`: names are ``role-0``, and ``role-0.1`` for the first replacement in that slot.

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
