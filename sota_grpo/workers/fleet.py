"""Workers of one role behind one queue: dispatch, deadlines, replacement, re-queueing."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from sota_grpo.workers.base import Launcher, ServantSpec, Worker, WorkerDied
from sota_grpo.workers.broadcasts import Broadcast, Sticky
from sota_grpo.workers.slots import Limits, Patience, Slot, Task
from sota_grpo.workers.supervisor import Supervisor

logger = logging.getLogger(__name__)
_GOODBYE_S = 10.0  # longest wait for threads that are starting a worker when the fleet is closed


def starter(
    launcher: Launcher, role: str, spec: ServantSpec, placements: Sequence[Mapping[str, Any]] = ()
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
        method: of the servant, called for a task.
        task_deadline_s: a worker that is at one task for longer is killed and the task fails with TimeoutError.
        progress: ``progress(*args)`` counts the parts of a task that are done; the deadline then is that of a part.
        silence_s: see above.
        start_silence_s: a start counts as failed when neither this worker nor another that is starting does anything
            for so long (:class:`~.starting.Activity`), when this one does not answer for so long, or after 12 times it.
        max_attempts: a task that was with so many workers as they died fails with :class:`WorkerDied`.
        max_start_failures: in a row; the slot is then given up, and with the last slot the fleet. A construction that
            raises in a slot where none has worked yet is not repeated.

    >>> from sota_grpo.workers.threads import ThreadLauncher
    >>> spec = ServantSpec("sota_grpo.workers.reward:RewardServant", {"score": len, "term_names": ("length",)})
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
        patience = None if task_deadline_s is None else Patience(task_deadline_s, progress)
        limits = Limits(capacity, patience, silence_s, start_silence_s, max_attempts, max_start_failures)
        self._role, self._start = role, start
        self._numbers = itertools.count()
        self._inbox: queue.SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
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
            WorkerDied: a slot was given up: its servant's construction raised, or too many starts failed.
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
            method: of the servant.
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
            method: of the servant.
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
                self._inbox.put((function, args))
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
            function, args = self._inbox.get(timeout=self._supervisor.timers.wait_s())
            function(*args)
        for _ in range(self._inbox.qsize()):  # answers that are here already come before deadlines
            function, args = self._inbox.get()
            function(*args)
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
            function, args = self._inbox.get()
            function(*args)

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
