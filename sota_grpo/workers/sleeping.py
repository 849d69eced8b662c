"""A fleet whose workers sleep together while others compute on their devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sota_grpo.workers.base import Start, Worker, WorkerDied, promised
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.slots import Slot, Task


class SleepingFleet(Fleet):
    """A fixed number of workers that leave their devices to others between :meth:`sleep` and :meth:`wake`.

    Contract, beside that of :class:`~.fleet.Fleet`. While they sleep nothing is started, because a worker that loads a
    model takes the memory that others use: one that dies then is killed, and its slot waits, without a deadline, until
    the fleet wakes. A task ends the sleep too; the worker that has it wakes by itself.

    Args:
        role, start, count: as of a fleet; workers have ``sleep`` and ``wake``.
        options: of a fleet.
    """

    def __init__(self, role: str, start: Callable[[int], Worker], count: int, **options: Any) -> None:
        self._may_start = threading.Event()
        self._may_start.set()
        self._all_asleep: Future[None] | None = None  # while somebody waits for it

        def start_when_awake(index: int) -> Worker:
            self._may_start.wait()
            if self._closing.is_set():
                raise self._closed()
            return start(index)

        super().__init__(role, start_when_awake, count, **options)

    def sleep(self, deadline_s: float) -> None:
        """Return when every worker sleeps; one that is being started or replaced is waited for.

        Args:
            deadline_s: a worker that takes longer is replaced.

        Raises:
            WorkerDied, WorkerLate: as :meth:`~.fleet.Fleet.broadcast`.
            RuntimeError: tasks are open, which would wake their workers again.
        """
        if not self._may_start.is_set():
            return
        idle = promised()
        if not self._post(self._require_idle, idle):
            raise self._closed()
        idle.result()
        self.broadcast("sleep", deadline_s=deadline_s, sticky=True)
        all_asleep = promised()
        if not self._post(self._hold_starts, all_asleep):
            raise self._closed()
        self._attended(all_asleep)

    def wake(self, deadline_s: float) -> None:
        """Return when every worker that lives is awake; those that died meanwhile are replaced from now on."""
        self._post(self._resume)
        self.broadcast("wake", deadline_s=deadline_s)

    # The supervisor's thread.

    def _require_idle(self, idle: Future[None]) -> None:
        if count := len(self._queue) + sum(len(slot.tasks) for slot in self._slots):
            idle.set_exception(RuntimeError(f"{count} tasks of {self._role} are open while it is to sleep."))
        else:
            idle.set_result(None)

    def _hold_starts(self, all_asleep: Future[None]) -> None:
        if self._dead is not None:
            all_asleep.set_exception(self._dead)
            return
        self._all_asleep = all_asleep
        self._look_whether_all_sleep()

    def _look_whether_all_sleep(self) -> None:
        """Who became ready after the broadcast was told to sleep before, because that call is sticky."""
        if self._all_asleep is not None and all(slot.state in ("ready", "retired") for slot in self._slots):
            self._may_start.clear()
            self._all_asleep.set_result(None)
            self._all_asleep = None

    def _resume(self) -> None:
        self._sticky.pop("sleep", None)
        if self._may_start.is_set():
            return
        self._may_start.set()
        for slot in self._slots:
            if slot.state == "starting":
                slot.start = Start(self._start_silence_s, self._timers.now_s())
                self._look_at_start(slot)

    def _look_at_start(self, slot: Slot) -> None:
        if self._may_start.is_set():
            super()._look_at_start(slot)

    def _welcome(self, slot: Slot) -> None:
        super()._welcome(slot)
        self._look_whether_all_sleep()

    def _retire(self, slot: Slot, error: BaseException) -> None:
        super()._retire(slot, error)
        self._look_whether_all_sleep()

    def _enqueue(self, task: Task) -> None:
        if not self._may_start.is_set():
            self._resume()
        super()._enqueue(task)

    def _end(self, cause: WorkerDied) -> None:
        super()._end(cause)
        self._may_start.set()
        if self._all_asleep is not None:
            self._all_asleep.set_exception(cause)
            self._all_asleep = None
