"""Workers of one role behind one queue: dispatch, deadlines, replacement, re-queueing."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any

from sota_grpo.workers.base import (
    IDLE_METHOD,
    ConstructionFailed,
    Result,
    Start,
    Worker,
    WorkerDied,
    WorkerLate,
)
from sota_grpo.workers.slots import Broadcast, Slot, Task, TaskLost, TaskOverdue, Timers

logger = logging.getLogger(__name__)
_MAX_ATTEMPTS = 8  # workers that die with a task before it is given up
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two starts that fail
_GOODBYE_S = 10.0  # longest wait for threads that are starting a worker when the fleet is closed
_ATTEND_S = 1.0  # between two calls of what is to be attended to while a broadcast is waited for
_MAX_LATE = 2  # times that a slot's worker may be late before the call itself is taken to be hopeless


class Fleet:
    """``count`` workers of one role behind one queue.

    Contract. Consumes: calls of ``run``. Produces: one future per call, answered exactly once, in the order of
    submission as far as workers have room. Waits for: workers, on one supervisor thread, each wait with a deadline.
    Every live worker is pinged; one that dies, does not answer a ping for ``silence_s`` or says that it has made no
    progress for so long is killed and replaced in its slot, and its tasks go back to the front of the queue. Clients'
    callbacks run on the supervisor thread and must be quick.

    Args:
        role: what the workers are, in messages.
        start: starts the worker of a slot; it may take long, and is called on a thread of its own.
        count: slots.
        capacity: tasks that one worker has at a time.
        task_deadline_s: a worker that is at one task for longer is killed and the task fails with TimeoutError.
        progress: ``progress(*args)`` counts the parts of a task that are done; the deadline then is that of a part.
        silence_s: see above.
        start_silence_s: a start counts as failed when neither this worker nor another that is starting does anything
            for so long (:class:`~.base.Activity`), when this one does not answer for so long, or after 12 times it.
        max_attempts: a task that was with so many workers as they died fails with :class:`WorkerDied`.
        max_start_failures: in a row; the slot is then given up, and with the last slot the fleet. A construction that
            raises in a slot where none has worked yet is not repeated.

    >>> from sota_grpo.workers.base import WorkerSpec, starter
    >>> from sota_grpo.workers.processes import ThreadLauncher
    >>> spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", {"score": len, "term_names": ("length",)})
    >>> fleet = Fleet("reward", starter(ThreadLauncher(), "reward", spec), 2, capacity=4)
    >>> fleet.wait_ready()
    >>> fleet.submit([]).result(), fleet.broadcast("ping", deadline_s=10.0), fleet.names
    ([], [0.0, 0.0], ['reward-0', 'reward-1'])
    >>> fleet.close()

    Attributes:
        restarts: workers that were replaced, failed starts included.
        requeued: how often a task was given to another worker because its own was lost.
        attend: called now and then by whoever waits for all workers. What it raises ends the wait, which may be for a
            replacement that no machine has room for.
    """

    def __init__(
        self,
        role: str,
        start: Callable[[int], Worker],
        count: int,
        *,
        capacity: int,
        task_deadline_s: float | None = None,
        progress: Callable[..., int] | None = None,
        silence_s: float = 60.0,
        start_silence_s: float = 600.0,
        max_attempts: int = _MAX_ATTEMPTS,
        max_start_failures: int = 5,
    ) -> None:
        if count < 1 or capacity < 1:
            raise ValueError(f"A fleet needs at least one worker with room for one task; got {count} and {capacity}.")
        self.restarts = self.requeued = 0
        self.attend: Callable[[], object] = lambda: None
        self._role, self._start, self._capacity = role, start, capacity
        self._task_deadline_s = math.inf if task_deadline_s is None else task_deadline_s
        self._progress = progress
        self._silence_s, self._start_silence_s = silence_s, start_silence_s
        self._max_attempts, self._max_start_failures = max_attempts, max_start_failures
        self._slots = [Slot(role, index) for index in range(count)]
        self._timers = Timers(max_late_s=silence_s / 4)
        self._numbers = itertools.count()
        self._queue: list[Task] = []
        # Ready, with room for a task, by their number of tasks: who waits longest comes first. No line is empty.
        self._offered: dict[int, dict[int, Slot]] = {}
        self._broadcasts: list[Broadcast] = []  # open
        self._sticky: dict[str, tuple[Any, ...]] = {}  # method -> the arguments that a new worker gets
        self._ready: Future[None] = Future()
        self._dead: WorkerDied | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._is_open, self._closing = threading.Lock(), True, threading.Event()
        self._launches: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._supervise, name=f"{role} fleet", daemon=True)
        self._thread.start()

    @property
    def names(self) -> list[str]:
        """Of the workers, slot by slot; a slot whose worker is being started has none."""
        return [worker.name for slot in self._slots if (worker := slot.worker) is not None]

    @property
    def pids(self) -> list[int | None]:
        """Of the workers, as :attr:`names`; None for a thread, and for an actor that has not said it yet."""
        return [getattr(worker, "pid", None) for slot in self._slots if (worker := slot.worker) is not None]

    def wait_ready(self) -> None:
        """Return when every worker has been constructed.

        Raises:
            WorkerDied: a slot was given up: its worker's construction raised, or too many starts failed.
        """
        self._ready.result()

    def submit(self, *args: Any) -> Future[Any]:
        """``run(*args)`` on the least loaded worker, as soon as one has room.

        The future has the method's result or exception; :class:`TaskLost` when the task was with ``max_attempts``
        workers that died; another :class:`WorkerDied` when the fleet was closed or no slot is left;
        :class:`TaskOverdue`, a TimeoutError, after ``task_deadline_s``.
        """
        task = Task(next(self._numbers), args)
        if not self._post(self._enqueue, task):
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
            Exception: what the method raised on a worker; a sticky call is then forgotten again. Or what
                :attr:`attend` raised; the broadcast goes on then.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("A future's callback cannot wait for a broadcast: it runs on the fleet's own thread.")
        broadcast = Broadcast(method, args, deadline_s)
        if not self._post(self._open, broadcast, sticky):
            raise self._closed()
        return self._attended(broadcast.future)

    def _attended(self, future: Future[Result]) -> Result:
        while not wait([future], timeout=_ATTEND_S).done:
            self.attend()
        return future.result()

    def close(self) -> None:
        """Kill every worker and fail what is open; idempotent."""
        self._closing.set()
        self._post(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _closed(self) -> WorkerDied:
        return WorkerDied(f"the {self._role} fleet was closed")

    def _post(self, function: Callable[..., None], *args: Any) -> bool:
        """Have a function called on the supervisor's thread; False when there is none any more."""
        with self._lock:
            if self._is_open:
                self._inbox.put(partial(function, *args))
            return self._is_open

    # The supervisor's thread. Nothing from here on blocks; each step costs O(workers + log tasks).

    def _supervise(self) -> None:
        cause = self._closed()
        try:
            for slot in self._slots:
                self._begin(slot)
            while not self._closing.is_set():
                with suppress(queue.Empty):
                    self._inbox.get(timeout=self._timers.wait_s())()
                for _ in range(self._inbox.qsize()):  # answers that are here already come before deadlines
                    self._inbox.get()()
                while (due := self._timers.take_due()) is not None:
                    function, args = due
                    function(*args)
        except BaseException as error:  # nobody may be left waiting, whatever is wrong here
            logger.exception("The supervisor of the %s fleet failed.", self._role)
            cause = WorkerDied(f"the supervisor of the {self._role} fleet failed: {error!r}")
        self._closing.set()
        self._end(cause)
        until_s = time.monotonic() + _GOODBYE_S
        for thread in list(self._launches):
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            self._is_open = False
        while not self._inbox.empty():
            self._inbox.get()()

    def _ask(self, slot: Slot, method: str, args: tuple[Any, ...], then: Callable[..., None], *about: Any) -> None:
        """Call the slot's worker and have ``then(slot, *about, future)`` called here when that one has answered."""
        assert slot.worker is not None
        future = slot.worker.call(method, *args)
        future.add_done_callback(partial(self._post, self._if_same, slot, slot.life, then, *about))

    def _later(self, wait_s: float, then: Callable[..., None], slot: Slot, *about: Any) -> None:
        """Have ``then(slot, *about)`` called in ``wait_s`` seconds, if the slot has the same worker still."""
        self._timers.at(self._timers.now_s() + wait_s, self._if_same, slot, slot.life, then, *about)

    def _if_same(self, slot: Slot, life: int, then: Callable[..., None], *about: Any) -> None:
        if slot.life == life:
            then(slot, *about)

    def _end(self, cause: WorkerDied) -> None:
        """Kill every worker, and fail what is open and what comes later."""
        if self._dead is not None:
            return
        self._dead = cause
        tasks = [*self._queue, *(task for slot in self._slots for task in slot.tasks.values())]
        for slot in self._slots:
            slot.life += 1
            slot.tasks = {}
            if slot.worker is not None:
                slot.worker.kill()
        if not self._ready.done():
            self._ready.set_exception(cause)
        broadcasts, self._broadcasts, self._queue = self._broadcasts, [], []
        for broadcast in broadcasts:
            broadcast.waiting.clear()
            broadcast.future.set_exception(cause)
        for task in sorted(tasks):
            task.future.set_exception(cause)

    # Starts

    def _begin(self, slot: Slot, pause_s: float = 0.0) -> None:
        """Put a new worker in a slot, whoever was there before."""
        old, slot.worker = slot.worker, None
        slot.life += 1
        slot.state, slot.is_pinged, slot.is_timed = "starting", False, False
        slot.start = Start(self._start_silence_s, self._timers.now_s() + pause_s)
        self._look_at_start(slot)
        name = f"start of {self._role} {slot.index}"
        thread = threading.Thread(target=self._bring_up, args=(slot, slot.life, old, pause_s), name=name, daemon=True)
        self._launches.add(thread)
        thread.start()

    def _bring_up(self, slot: Slot, life: int, old: Worker | None, pause_s: float) -> None:
        """On a thread of its own: killing and starting a worker may take long."""
        try:
            if old is not None:
                old.kill()
            if self._closing.wait(pause_s):
                return
            worker = self._start(slot.index)
            if not self._post(self._started, slot, life, worker):
                worker.kill()
        except Exception as error:  # whatever a launcher raises is a start that failed, for the supervisor to judge
            self._post(self._start_failed, slot, life, error)
        finally:
            self._launches.discard(threading.current_thread())

    def _started(self, slot: Slot, life: int, worker: Worker) -> None:
        """The worker exists; it is ready when it has what was broadcast before, and has answered a ping."""
        if slot.life != life or self._dead is not None:
            worker.kill()
            return
        slot.worker = worker
        slot.answers_owed = 0
        for method, args in [*self._sticky.items(), ("ping", ())]:
            self._prepare(slot, method, args)

    def _start_failed(self, slot: Slot, life: int, error: BaseException) -> None:
        """Try again, unless this slot failed too often or its first construction raised."""
        if slot.life != life or slot.state != "starting" or self._dead is not None:
            return
        slot.failed_starts += 1
        no_construction = isinstance(error, ConstructionFailed) and not slot.has_run
        if no_construction or slot.failed_starts >= self._max_start_failures:
            self._retire(slot, error)
            return
        logger.warning("%s does not start: %s; it is tried again.", slot.who, error)
        self.restarts += 1
        self._begin(slot, min(_FIRST_PAUSE_S * 2 ** min(slot.failed_starts - 1, 20), _LONGEST_PAUSE_S))

    def _retire(self, slot: Slot, error: BaseException) -> None:
        left = sum(other.state != "retired" for other in self._slots) - 1
        tries = f"{slot.failed_starts} start{'s' * (slot.failed_starts > 1)}"
        what = f"{slot.who} is given up after {tries} that failed, {left} left: {error}"
        logger.error("%s", what)
        slot.life += 1
        slot.state = "retired"
        if slot.worker is not None:
            slot.worker.kill()
        cause = WorkerDied(what)
        cause.__cause__ = error
        if not self._ready.done():
            self._ready.set_exception(cause)
        if left == 0:
            self._end(cause)

    def _look_at_start(self, slot: Slot) -> None:
        """Ask a worker whether it works at its start, eight times in the longest silence."""
        if slot.state != "starting" or self._dead is not None:
            return
        now_s, start = self._timers.now_s(), slot.start
        if why := start.verdict(now_s, (other.start for other in self._slots if other.state == "starting")):
            self._start_failed(slot, slot.life, TimeoutError(why))
            return
        if slot.worker is not None and not start.is_asked:
            start.is_asked = True
            self._ask(slot, IDLE_METHOD, (), self._seen_at_start)
        self._later(start.limit_s / 8, self._look_at_start, slot)

    def _seen_at_start(self, slot: Slot, future: Future[Any]) -> None:
        if future.exception() is None:  # of its death, what it is asked to prepare will tell
            slot.start.answered(future.result(), self._timers.now_s())

    def _prepare(self, slot: Slot, method: str, args: tuple[Any, ...]) -> None:
        slot.answers_owed += 1
        self._ask(slot, method, args, self._prepared)

    def _prepared(self, slot: Slot, answer: Future[Any]) -> None:
        if error := answer.exception():
            self._start_failed(slot, slot.life, error)
            return
        slot.answers_owed -= 1
        if slot.answers_owed == 0:
            self._welcome(slot)

    def _welcome(self, slot: Slot) -> None:
        """Give it work, and ask it what nobody else can answer any more."""
        slot.state, slot.has_run, slot.failed_starts = "ready", True, 0
        logger.info("%s is ready.", slot.who)
        slot.heard_s = self._timers.now_s()
        self._offer(slot)
        self._tick(slot)
        if not self._ready.done() and all(other.state == "ready" for other in self._slots):
            self._ready.set_result(None)
        for broadcast in self._broadcasts:
            if broadcast.needs_another:
                self._ask_for(broadcast, slot)
        self._dispatch()

    # Tasks

    def _enqueue(self, task: Task) -> None:
        """Give the task to the least loaded worker that has room, now or later."""
        if self._dead is not None:
            task.future.set_exception(self._dead)
            return
        heapq.heappush(self._queue, task)
        self._dispatch()

    def _offer(self, slot: Slot) -> None:
        """The slot's tasks have changed: it is the last in the line of those that have as many."""
        self._withdraw(slot)
        if len(slot.tasks) < self._capacity:
            self._offered.setdefault(len(slot.tasks), {})[slot.index] = slot

    def _withdraw(self, slot: Slot) -> None:
        for count, line in list(self._offered.items()):
            if line.pop(slot.index, None) is not None and not line:
                del self._offered[count]

    def _dispatch(self) -> None:
        while self._queue and self._offered:
            task, slot = heapq.heappop(self._queue), next(iter(self._offered[min(self._offered)].values()))
            slot.tasks[task.number] = task
            self._offer(slot)
            task.since_s = self._timers.now_s()
            self._ask(slot, "run", task.args, self._done, task)
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
        """Have a look at the slot's tasks when one may be overdue.

        A task of several parts has the deadline for each: its progress is looked at eight times in it, and the time
        counts from when that was last seen to change, so a part gets between the deadline and nine eighths of it.
        """
        if self._task_deadline_s < math.inf and slot.tasks and not slot.is_timed:
            slot.is_timed = True
            wait_s = next(iter(slot.tasks.values())).since_s + self._task_deadline_s - self._timers.now_s()
            if self._progress is not None:
                wait_s = min(wait_s, self._task_deadline_s / 8)
            self._later(wait_s, self._look_for_overdue, slot)

    def _look_for_overdue(self, slot: Slot) -> None:
        slot.is_timed, now_s = False, self._timers.now_s()
        for task in slot.tasks.values():
            if self._progress is not None and (done := self._progress(*task.args)) != task.progress:
                task.progress, task.since_s = done, now_s
        overdue = [task for task in slot.tasks.values() if now_s - task.since_s >= self._task_deadline_s]
        if not overdue:
            self._time(slot)
            return
        what = f"{slot.who} was at one task for more than {self._task_deadline_s:g} s"
        for task in overdue:
            del slot.tasks[task.number]
        self._lose(slot, what)
        for task in overdue:
            task.future.set_exception(TaskOverdue(what, task.progress))

    def _lose(self, slot: Slot, why: str | WorkerDied) -> None:
        """Replace a ready worker and queue its tasks again, where they were."""
        who = slot.who
        self._withdraw(slot)
        tasks, slot.tasks = list(slot.tasks.values()), {}
        failed = []
        for task in tasks:
            task.workers_lost += 1
            if task.workers_lost < self._max_attempts:
                heapq.heappush(self._queue, task)
            else:
                failed.append(task)
        again = len(tasks) - len(failed)
        self.restarts += 1
        self.requeued += again
        logger.warning("%s is replaced: %s. Tasks queued again: %d; given up: %d.", who, why, again, len(failed))
        self._begin(slot)
        for broadcast in [broadcast for broadcast in self._broadcasts if slot.index in broadcast.waiting]:
            broadcast.waiting.remove(slot.index)
            broadcast.deaths += 1
            self._conclude(broadcast, str(why))
        self._dispatch()
        for task in failed:
            lost = TaskLost(f"A task was with {task.workers_lost} {self._role} workers that died, at last {who}: {why}")
            lost.__cause__ = why if isinstance(why, WorkerDied) else None
            task.future.set_exception(lost)

    # Pings

    def _tick(self, slot: Slot) -> None:
        """Ping, four times in the longest silence."""
        if not slot.is_pinged:
            slot.is_pinged = True
            self._ask(slot, "ping", (), self._ponged)
            due_s = slot.heard_s + self._silence_s
            self._later(due_s - self._timers.now_s(), self._look_for_silence, slot, slot.heard_s)
        self._later(self._silence_s / 4, self._tick, slot)

    def _ponged(self, slot: Slot, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._lose(slot, error if isinstance(error, WorkerDied) else f"its ping failed: {error!r}")
        elif future.result() > self._silence_s:
            self._lose(slot, f"it has had work and made no progress for {future.result():.1f} s")
        else:
            slot.is_pinged, slot.heard_s = False, self._timers.now_s()

    def _look_for_silence(self, slot: Slot, heard_s: float) -> None:
        if slot.heard_s == heard_s:
            self._lose(slot, f"it has not answered a ping for {self._silence_s:g} s")

    # Broadcasts

    def _open(self, broadcast: Broadcast, sticky: bool) -> None:
        """Ask every ready worker; one that is starting gets a sticky broadcast before its first task."""
        if self._dead is not None:
            broadcast.future.set_exception(self._dead)
            return
        self._broadcasts.append(broadcast)
        broadcast.previous = self._sticky.get(broadcast.method)
        for slot in self._slots:
            if slot.state == "ready":
                self._ask_for(broadcast, slot)
            elif sticky and slot.state == "starting" and slot.worker is not None:
                self._prepare(slot, broadcast.method, broadcast.args)
        if sticky:
            self._sticky[broadcast.method] = broadcast.args

    def _ask_for(self, broadcast: Broadcast, slot: Slot) -> None:
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
        count, method = len(self._slots), broadcast.method
        hopeless = broadcast.deaths >= self._max_attempts * count or len(broadcast.late) >= _MAX_LATE * count
        if broadcast.waiting or (broadcast.needs_another and not hopeless):
            return
        self._broadcasts.remove(broadcast)
        if broadcast.refusals:
            if self._sticky.get(method) is broadcast.args:  # those that start later get what came before
                del self._sticky[method]
                if broadcast.previous is not None:
                    self._sticky[method] = broadcast.previous
            broadcast.future.set_exception(broadcast.refusals[0])
        elif broadcast.answers:
            broadcast.future.set_result([answer for _, answer in sorted(broadcast.answers.items())])
        elif broadcast.late:
            late = f"No {self._role} worker answered {method} within {broadcast.deadline_s:g} s"
            broadcast.future.set_exception(WorkerLate(f"{late}; late: {', '.join(broadcast.late)}"))
        else:
            died = f"{broadcast.deaths} {self._role} workers died at {method}, at last: {why}"
            broadcast.future.set_exception(WorkerDied(died))
        broadcast.args, broadcast.previous = (), None  # a timer holds the broadcast for long, and weights are large


def worker_metrics(fleets: Sequence[Fleet]) -> dict[str, int]:
    """Workers that were replaced and tasks that were queued again since the start, over all fleets."""
    return {
        "workers/restarts": sum(fleet.restarts for fleet in fleets),
        "workers/requeued": sum(fleet.requeued for fleet in fleets),
    }
