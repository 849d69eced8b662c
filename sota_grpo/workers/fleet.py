"""A pool of interchangeable workers with one task queue: dispatch, deadlines, replacement, sleep."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import math
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from sota_grpo.workers.base import (
    ConstructionFailed,
    Result,
    Worker,
    WorkerDied,
    WorkerLate,
    pending_future,
    resolve,
)

logger = logging.getLogger(__name__)
_MAX_ATTEMPTS = 8  # workers that die with a task before the task fails
_MAX_FAILED_STARTS = 5  # in a row, after which a slot is retired
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0  # between two failed starts
_GOODBYE_S = 10.0  # longest wait of close() for threads that are starting a worker
_POLL_S = 1.0  # between two calls of `poll` while a caller waits for a broadcast
_LOOK_S = 0.02  # between two looks at the state of all slots
_MAX_LATE = 2  # late workers per slot after which a broadcast fails


class TaskOverdue(TimeoutError):
    """A worker exceeded ``task_deadline_s``; ``progress``: the last count of the task's finished parts, else 0."""

    def __init__(self, what: str, progress: int) -> None:
        super().__init__(what)
        self.progress = progress


class TaskLost(WorkerDied):
    """``max_attempts`` workers died or hung with this task; ``__cause__``: why the last one died, None if it hung."""


class _Unfit(RuntimeError):
    """The reason why the fleet kills and replaces a live worker."""


class _Late(_Unfit):
    """A worker did not answer a broadcast in time; raised where the broadcast waits."""


@dataclass(eq=False)
class Task:
    """One call that any worker may run. The queue is ordered by ``number``, which a requeued task keeps."""

    number: int
    turn: asyncio.Future[Slot]  # the slot, once it has the task; a new future each time the task is queued
    workers_lost: int = 0
    progress: int = 0


@dataclass(eq=False)
class Slot:
    """One of the fleet's ``count`` worker slots: the current worker, its state and its tasks."""

    name: str  # of its last worker
    index: int
    worker: Worker | None = None
    state: Literal["starting", "ready", "retired"] = "starting"
    owed: list[asyncio.Future[Any]] = field(default_factory=list)  # answers to wait for before it is ready
    lost: asyncio.Future[Exception] = field(init=False)  # of a ready worker: done, with the reason, once it is lost
    awaited: set[asyncio.Future[Any]] = field(default_factory=set)  # its answers, which are cancelled then
    tasks: dict[int, Task] = field(default_factory=dict)  # by number, oldest first
    failed_starts: int = 0  # in a row
    has_run: bool = False
    line: dict[Slot, None] = field(default_factory=dict)  # entry of Fleet._lines that has this slot


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock leaves out the time for which this process is stopped (SIGSTOP, a suspended laptop).

    Otherwise every deadline would have passed when the process continues, and all workers would be replaced.

    Args:
        max_late_s: a wait that exceeds its timeout by more seconds counts as a stop: the clock leaves out the excess.
    """

    def __init__(self, max_late_s: float) -> None:
        self.away_s = 0.0

        class Selector(selectors.DefaultSelector):
            def select(selector, timeout: float | None = None) -> list[Any]:
                began_s = time.monotonic()
                events = super().select(timeout)
                late_s = time.monotonic() - began_s - (math.inf if timeout is None else timeout)
                self.away_s += late_s if late_s > max_late_s else 0.0
                return events

        super().__init__(Selector())

    def time(self) -> float:
        return time.monotonic() - self.away_s

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Log the error at level debug: calls to replaced workers fail, and no coroutine awaits them."""
        logger.debug("%s", context.get("message"), exc_info=context.get("exception"))


class Fleet:
    """A pool of ``count`` interchangeable workers with one task queue, which replaces workers that die or hang.

    The constructor begins to start the workers. Tasks are started in the order of submission, each on the least loaded
    worker. A worker that dies, or for ``silence_s`` does not answer a ping or makes no progress, is killed and replaced
    in its slot, and its tasks return to the front of the queue. A slot is retired after 5 failed starts in a row, or if
    its first worker's construction raises; once all are retired, all tasks fail. All coroutines, those passed to
    :meth:`start` included, run on one thread of the fleet and must not block.

    Args:
        role: name of the workers in messages.
        start: ``start(index)`` starts the worker of a slot. It may be slow: it runs on a new thread.
        count: number of workers (slots), at least 1.
        capacity: tasks that one worker runs concurrently, at least 1.
        task_deadline_s: longest time for one task; the worker is then replaced and the task fails with TaskOverdue.
        progress: ``progress(*args)`` counts finished parts of a task; the deadline is then per part. It is read eight
            times per deadline, so a part gets at most nine eighths of it.
        silence_s: longest time without an answer to a ping, or without progress.
        start_s: longest time until a started worker has answered a ping; then it is killed and the start has failed.
        max_attempts: a task fails with :class:`TaskLost` when so many workers died or hung with it.
        shares_devices: others use the workers' devices between :meth:`sleep` and :meth:`wake`; the workers must have
            methods of these names.

    >>> from sota_grpo.workers.base import ThreadLauncher, WorkerSpec, starter
    >>> spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", {"score": len, "term_names": ("length",)})
    >>> fleet = Fleet("reward", starter(ThreadLauncher(), "reward", spec), 2, capacity=4)
    >>> fleet.wait_ready()
    >>> fleet.submit([]).result(), fleet.broadcast("ping", deadline_s=10.0)
    ([], {'reward-0': 0.0, 'reward-1': 0.0})
    >>> fleet.close()

    Attributes:
        restarts: number of replaced workers and of failed starts that were tried again.
        requeued: number of tasks queued again because their worker was lost.
        poll: called once a second by a thread that waits in :meth:`broadcast`, :meth:`sleep` or :meth:`wake`; an
            exception that it raises ends the wait.
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
        start_s: float = 600.0,
        max_attempts: int = _MAX_ATTEMPTS,
        shares_devices: bool = False,
    ) -> None:
        if count < 1 or capacity < 1:
            raise ValueError(f"need at least 1 worker with capacity for 1 task; got count={count}, capacity={capacity}")
        self.restarts = self.requeued = 0
        self.poll: Callable[[], object] = lambda: None
        self._role, self._start, self._capacity = role, start, capacity
        self._task_deadline_s, self._progress = task_deadline_s, progress
        self._silence_s, self._start_s = silence_s, start_s
        self._max_attempts, self._shares_devices = max_attempts, shares_devices
        self._slots = [Slot(f"{role}-{index}", index) for index in range(count)]
        self._numbers = itertools.count()
        self._queue: list[tuple[int, Task]] = []  # a heap: number, task
        # _lines[n]: ready slots with n < capacity tasks; the slot that has waited longest is first.
        self._lines: list[dict[Slot, None]] = [{} for _ in range(capacity)]
        self._sticky: dict[str, tuple[Any, ...]] = {}  # {method: arguments} to call on a new worker
        self._ready: Future[None] = Future()
        self._dead: WorkerDied | None = None
        self._awake, self._stop = asyncio.Event(), asyncio.Event()
        self._awake.set()
        self._lock, self._is_open = threading.Lock(), True
        self._launches: set[threading.Thread] = set()
        self._loop = PatientLoop(max_late_s=silence_s / 4)
        self._thread = threading.Thread(target=self._live, name=f"{role} fleet", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until all workers have once been ready together; WorkerDied if a slot or the fleet ends before."""
        self._ready.result()

    def submit(self, *args: Any) -> Future[Any]:
        """Queue a task, from any thread; return a future of the result or exception of :meth:`run`."""
        return self.start(self.run(*args))

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run ``coroutine`` on the fleet's thread; return an uncancellable future; it fails if the fleet is closed."""
        future = pending_future()
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(self._loop.create_task, _settle(future, coroutine))
                return future
        coroutine.close()
        future.set_exception(self._closed())
        return future

    async def run(self, *args: Any) -> Any:
        """Queue a task: call ``run(*args)`` on the least loaded worker that has capacity, and return the result.

        Await it on the fleet's thread (:meth:`start`). A task ends :meth:`sleep`. If the caller is cancelled, the
        worker still runs the task, but its answer is dropped and the next task does not wait for it.

        Raises:
            TaskOverdue: the task, or a part that ``progress`` reports, took longer than ``task_deadline_s``.
            TaskLost, WorkerDied: ``max_attempts`` workers died or hung with the task, or the fleet has ended.
            Exception: raised by the worker's method.
        """
        if self._dead is not None:
            raise self._dead
        if not self._awake.is_set():
            self._end_sleep()
        task = Task(next(self._numbers), self._loop.create_future())
        heapq.heappush(self._queue, (task.number, task))
        self._dispatch()
        try:
            while True:
                slot = await task.turn
                with suppress(WorkerDied, _Unfit):  # the worker is lost: `turn` is a new one, or has the task's error
                    if task.number in slot.tasks:
                        return await self._attempt(slot, task, args)
        finally:
            if not task.turn.cancel() and not task.turn.cancelled() and task.turn.exception() is None:
                slot = task.turn.result()
                slot.tasks.pop(task.number, None)
                self._offer(slot)
                self._dispatch()

    def broadcast(self, method: str, *args: Any, deadline_s: float, sticky: bool = False) -> dict[str, Any]:
        """Call ``method(*args)`` on every ready worker; wait and return the results by worker name, in slot order.

        A worker that dies, or does not answer within ``deadline_s``, is replaced, and the result lacks its answer. If
        no worker is ready, or all called ones are lost, the next ready worker is called, a limited number of times.

        Args:
            deadline_s: longest wait for each worker.
            sticky: also call it on every worker that becomes ready later, before its first task. A later sticky call of
                the same method replaces this one.

        Raises:
            WorkerLate: no worker and no replacement answered in time (a TimeoutError).
            WorkerDied: all called workers died, or the fleet has ended.
            RuntimeError: called on the fleet's thread, where the wait would block.
            Exception: raised by the method (a sticky call is then not repeated), or by :attr:`poll`.
        """
        return self._polling(self._broadcast(method, args, deadline_s, sticky))

    def sleep(self, deadline_s: float) -> None:
        """Put every worker to sleep and wait until all sleep, starting ones too. No-op unless ``shares_devices``.

        During the sleep no worker is started, as loading a model takes device memory: one that dies is replaced later.
        A new task ends the sleep, but wakes only the worker that runs it. Pending tasks are waited for: RuntimeError if
        there are some after ``deadline_s``. Other exceptions, and the deadline of the call itself (which does not bound
        the wait for starting workers), are those of :meth:`broadcast`.
        """
        if self._shares_devices:
            self._polling(self._sleep(deadline_s))

    def wake(self, deadline_s: float) -> None:
        """Wake all ready workers, as :meth:`broadcast`; start to replace dead ones. No-op unless ``shares_devices``."""
        if self._shares_devices:
            self._polling(self._wake(deadline_s))

    def close(self) -> None:
        """Kill every worker, fail pending calls with WorkerDied, and wait for the fleet's thread to end. Idempotent."""
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _polling(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError(
                "Do not wait for a broadcast in a callback of a future or in a coroutine of the fleet: both run on the "
                "fleet's thread; wait on another thread."
            )
        future = self.start(coroutine)
        while not wait([future], timeout=_POLL_S).done:
            self.poll()
        return future.result()

    def _closed(self) -> WorkerDied:
        return WorkerDied(f"the {self._role} fleet was closed")

    # Methods of the fleet's thread: none of them blocks, and each step costs O(capacity + log tasks).

    def _live(self) -> None:
        cause = self._closed()
        try:
            self._loop.run_until_complete(self._supervise())
        except BaseException as error:  # callers must not wait for ever, whatever failed
            logger.exception("The supervisor of the %s fleet failed.", self._role)
            cause = WorkerDied(f"the supervisor of the {self._role} fleet failed: {error!r}")
        self._end(cause)
        until_s = time.monotonic() + _GOODBYE_S
        for thread in list(self._launches):
            thread.join(max(0.0, until_s - time.monotonic()))
        with self._lock:
            self._is_open = False
        self._loop.run_until_complete(self._drain())
        self._loop.close()

    async def _supervise(self) -> None:
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(slot)) for slot in self._slots]
            await self._stop.wait()
            for keeper in keepers:
                keeper.cancel()

    async def _drain(self) -> None:
        await asyncio.sleep(0)  # coroutines passed to start() become tasks
        while clients := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(clients)

    async def _until(self, is_so: Callable[[], object]) -> None:
        """Wait until ``is_so()``; raise if the fleet ends before."""
        while not is_so():
            await asyncio.sleep(_LOOK_S)
            self._require_alive()

    def _require_alive(self) -> None:
        if self._dead is not None or self._stop.is_set():
            raise self._dead or self._closed()

    def _end(self, cause: WorkerDied) -> None:
        """Kill every worker, and fail pending and later tasks and broadcasts with ``cause``."""
        if self._dead is not None:
            return
        self._dead = cause
        tasks = [task for _, task in self._queue]
        self._queue = []
        for slot in self._slots:
            tasks += self._taken_from(slot, cause)
            if slot.worker is not None:
                slot.worker.kill()
        for task in tasks:
            if not task.turn.cancelled():
                task.turn.set_exception(cause)
        if not self._ready.done():
            self._ready.set_exception(cause)

    # One slot

    async def _keep(self, slot: Slot) -> None:
        """Start a worker in the slot, and replace it when it is lost, until too many starts fail."""
        pause_s = 0.0
        while True:
            try:
                await self._bring_up(slot, pause_s)
            except Exception as error:  # whatever a launcher raises is a failed start
                slot.failed_starts += 1
                no_construction = isinstance(error, ConstructionFailed) and not slot.has_run
                if no_construction or slot.failed_starts >= _MAX_FAILED_STARTS:
                    self._retire(slot, error)
                    return
                logger.warning(
                    "%s could not be started: %s. Another start is tried.", slot.name, str(error).rstrip(".")
                )
                self.restarts += 1
                pause_s = min(_FIRST_PAUSE_S * 2 ** min(slot.failed_starts - 1, 20), _LONGEST_PAUSE_S)
            else:
                pause_s = 0.0
                self._mark_ready(slot)
                with suppress(WorkerDied, _Unfit):
                    await self._watch(slot)

    async def _bring_up(self, slot: Slot, pause_s: float) -> None:
        """Start a worker, call the sticky broadcasts on it, and wait until it has answered them and a ping."""
        old, slot.worker = slot.worker, None
        if old is not None:
            await self._on_thread(slot, old.kill)
        await self._awake.wait()
        await asyncio.sleep(pause_s)
        limit = asyncio.timeout(self._start_s)
        try:
            async with limit:
                slot.worker = await self._on_thread(slot, self._start, slot.index)
                slot.name = slot.worker.name
                calls = [*self._sticky.items(), ("ping", ())]
                slot.owed = [self._call(slot, method, *args) for method, args in calls]
                while slot.owed:
                    await slot.owed.pop(0)
        except TimeoutError:
            if limit.expired():
                raise TimeoutError(f"it was not ready after {self._start_s:g} s") from None
            raise

    async def _on_thread(self, slot: Slot, function: Callable[..., Any], *args: Any) -> Any:
        """Await ``function(*args)`` on a new thread; if this is cancelled, kill the worker that it returns later."""
        done = pending_future()

        def launch() -> None:
            resolve(done, partial(function, *args))
            self._launches.discard(threading.current_thread())

        thread = threading.Thread(target=launch, name=f"start of {self._role} {slot.index}", daemon=True)
        self._launches.add(thread)
        thread.start()
        try:
            return await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            done.add_done_callback(_kill_result)
            raise

    def _retire(self, slot: Slot, error: BaseException) -> None:
        left = sum(other.state != "retired" for other in self._slots) - 1
        tries = f"{slot.failed_starts} start{'s' * (slot.failed_starts > 1)}"
        what = f"{slot.name} is not started again after {tries} that failed; workers left: {left}. Last error: {error}"
        logger.error("%s", what)
        slot.state = "retired"
        if slot.worker is not None:
            slot.worker.kill()
        cause = WorkerDied(what)
        cause.__cause__ = error
        if not self._ready.done():
            self._ready.set_exception(cause)
        if left == 0:
            self._end(cause)

    def _mark_ready(self, slot: Slot) -> None:
        """Mark a worker ready for tasks and broadcasts."""
        slot.state, slot.has_run, slot.failed_starts = "ready", True, 0
        slot.lost, slot.awaited = self._loop.create_future(), set()
        logger.info("Worker %s is ready.", slot.name)
        if not self._ready.done() and all(other.state == "ready" for other in self._slots):
            self._ready.set_result(None)
        self._offer(slot)
        self._dispatch()

    async def _watch(self, slot: Slot) -> None:
        """Ping a ready worker four times per ``silence_s`` until it is lost, and then raise the reason."""
        answered_s = self._loop.time()
        while True:
            began_s = self._loop.time()
            ping = self._call(slot, "ping")
            if not await self._answered(slot, ping, answered_s + self._silence_s - began_s):
                self._lose(slot, _Unfit(f"it has not answered a ping for {self._silence_s:g} s"))
            elif (error := ping.exception()) is not None:
                self._lose(slot, _Unfit(f"its ping failed: {error!r}"))
            elif ping.result() > self._silence_s:
                self._lose(slot, _Unfit(f"its work has made no progress for {ping.result():.1f} s"))
            answered_s = self._loop.time()
            await asyncio.wait([slot.lost], timeout=began_s + self._silence_s / 4 - answered_s)
            if slot.lost.done():
                raise slot.lost.result()

    def _lose(self, slot: Slot, why: Exception) -> None:
        """Give a ready worker up: requeue its tasks at their old positions, and end all waits for its answers."""
        failed = []
        tasks = self._taken_from(slot, why)
        for task in tasks:
            task.workers_lost += 1
            if task.workers_lost < self._max_attempts:
                heapq.heappush(self._queue, (task.number, task))
            else:
                failed.append(task)
        again = len(tasks) - len(failed)
        self.restarts += 1
        self.requeued += again
        logger.warning(
            "%s is replaced: %s. Tasks queued again: %d; given up: %d.",
            slot.name,
            str(why).rstrip("."),
            again,
            len(failed),
        )
        self._dispatch()
        for task in failed:
            what = f"{task.workers_lost} {self._role} workers died or hung with it, the last was {slot.name}: {why}"
            lost = TaskLost(f"A task failed: {what}")
            lost.__cause__ = why if isinstance(why, WorkerDied) else None
            task.turn.set_exception(lost)

    def _taken_from(self, slot: Slot, why: Exception) -> list[Task]:
        """Take a worker out of service, for a reason; return its tasks, each of which has to get another turn."""
        if slot.state == "ready":
            slot.state = "starting"
            slot.lost.set_result(why)
            for answer in slot.awaited:
                answer.cancel()
        tasks, slot.tasks = [*slot.tasks.values()], {}
        self._offer(slot)
        for task in tasks:
            task.turn = self._loop.create_future()
        return tasks

    # Calls

    def _call(self, slot: Slot, method: str, *args: Any) -> asyncio.Future[Any]:
        assert slot.worker is not None
        answer = asyncio.wrap_future(slot.worker.call(method, *args))
        slot.awaited.add(answer)
        answer.add_done_callback(slot.awaited.discard)
        return answer

    async def _answered(self, slot: Slot, answer: asyncio.Future[Any], within_s: float) -> bool:
        """Wait for an answer of a ready worker; return whether it came in time. Raise the reason if it is lost."""
        lost = slot.lost
        if within_s == math.inf:
            with suppress(Exception, asyncio.CancelledError):  # raised below, or where the answer is read
                await answer
        else:
            await asyncio.wait([answer], timeout=within_s)
        if not lost.done() and answer.done() and isinstance(death := answer.exception(), WorkerDied):
            self._lose(slot, death)
        if lost.done():
            raise lost.result()
        return answer.done()

    def _offer(self, slot: Slot) -> None:
        """Move the slot to the end of the line for its number of tasks; out of all lines if it cannot take a task."""
        slot.line.pop(slot, None)
        if slot.state == "ready" and len(slot.tasks) < self._capacity:
            slot.line = self._lines[len(slot.tasks)]
            slot.line[slot] = None

    def _dispatch(self) -> None:
        while not self._stop.is_set() and self._queue and (line := next(filter(None, self._lines), None)):
            (_, task), slot = heapq.heappop(self._queue), next(iter(line))
            if not task.turn.cancelled():
                slot.tasks[task.number] = task
                self._offer(slot)
                task.turn.set_result(slot)

    async def _attempt(self, slot: Slot, task: Task, args: tuple[Any, ...]) -> Any:
        """Return the result of a task on the slot's worker; past the deadline replace that, and raise TaskOverdue."""
        answer, parts = self._call(slot, "run", *args), self._progress
        limit_s = self._task_deadline_s or math.inf
        look_s = wait_s = limit_s if parts is None else limit_s / 8
        due_s = self._loop.time() + limit_s
        while not await self._answered(slot, answer, wait_s):
            now_s = self._loop.time()
            if parts is not None and (done := parts(*args)) != task.progress:
                task.progress, due_s = done, now_s + limit_s
            if now_s >= due_s:
                what = "a task" if parts is None else "a part of a task"
                late = TaskOverdue(f"{slot.name} did not finish {what} within {limit_s:g} s", task.progress)
                del slot.tasks[task.number]
                self._lose(slot, _Unfit(str(late)))
                raise late
            wait_s = min(look_s, due_s - now_s)
        return answer.result()

    async def _broadcast(self, method: str, args: tuple[Any, ...], deadline_s: float, sticky: bool) -> dict[str, Any]:
        """Call every ready worker, or the next one; for a sticky broadcast every starting worker before it is ready."""
        previous = self._sticky.get(method)
        if sticky and self._dead is None:
            for slot in self._slots:
                if slot.state == "starting" and slot.worker is not None:
                    slot.owed.append(self._call(slot, method, *args))
            self._sticky[method] = args
        deaths, late, count = 0, list[str](), len(self._slots)
        while True:
            self._require_alive()
            await self._until(lambda: any(slot.state == "ready" for slot in self._slots))
            asked = {
                slot.name: self._ask(slot, self._call(slot, method, *args), method, deadline_s)
                for slot in self._slots
                if slot.state == "ready"
            }
            answers = dict(zip(asked, await asyncio.gather(*asked.values(), return_exceptions=True)))
            if self._dead is not None:
                raise self._dead
            errors = [answer for answer in answers.values() if isinstance(answer, BaseException)]
            if refusals := [error for error in errors if not isinstance(error, (WorkerDied, _Unfit))]:
                if self._sticky.get(method) is args:  # workers that start later get the previous call
                    del self._sticky[method]
                    if previous is not None:
                        self._sticky[method] = previous
                raise refusals[0]
            if len(errors) < len(answers):
                return {name: answer for name, answer in answers.items() if not isinstance(answer, BaseException)}
            deaths += len(errors)
            late += [name for name, answer in answers.items() if isinstance(answer, _Late)]
            if deaths >= self._max_attempts * count or len(late) >= _MAX_LATE * count:
                what = f"No {self._role} worker answered {method} within {deadline_s:g} s; late: {', '.join(late)}"
                died = f"{deaths} {self._role} workers died or hung during {method}; the last: {errors[-1]}"
                raise WorkerLate(what) if late else WorkerDied(died)

    async def _ask(self, slot: Slot, answer: asyncio.Future[Any], method: str, deadline_s: float) -> Any:
        """Return a ready worker's answer; raise the reason if it is lost, and :class:`_Late` if it is too late."""
        if await self._answered(slot, answer, deadline_s):
            return answer.result()
        why = f"it has not answered {method} within {deadline_s:g} s"
        self._lose(slot, _Unfit(why))
        raise _Late(why)

    # Sleep

    async def _sleep(self, deadline_s: float) -> None:
        if not self._awake.is_set():
            return
        due_s = self._loop.time() + deadline_s
        while count := len(self._queue) + sum(len(slot.tasks) for slot in self._slots):  # their clients may be gone
            if self._loop.time() >= due_s:
                raise RuntimeError(
                    f"cannot put the {self._role} workers to sleep: {count} tasks are pending after {deadline_s:g} s"
                )
            await asyncio.sleep(_LOOK_S)
        await self._broadcast("sleep", (), deadline_s, sticky=True)
        # the call above is sticky: a starting worker sleeps when it is ready
        await self._until(lambda: all(slot.state != "starting" for slot in self._slots))
        self._awake.clear()

    async def _wake(self, deadline_s: float) -> None:
        self._end_sleep()
        await self._broadcast("wake", (), deadline_s, sticky=False)

    def _end_sleep(self) -> None:
        self._sticky.pop("sleep", None)
        self._awake.set()


def _kill_result(started: Future[Worker | None]) -> None:
    if started.exception() is None and (worker := started.result()) is not None:
        worker.kill()


async def _settle(future: Future[Result], coroutine: Coroutine[Any, Any, Result]) -> None:
    try:
        future.set_result(await coroutine)
    except BaseException as error:  # raised where the result is read
        future.set_exception(error)
