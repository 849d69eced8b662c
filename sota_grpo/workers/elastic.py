"""A fleet whose workers come and go with the machines that there are (spot machines, clusters that grow)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sota_grpo.workers.base import IDLE_METHOD, Start, Worker, WorkerDied
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.slots import Slot

logger = logging.getLogger(__name__)
_MAX_REFUSALS = 5  # in a row


@dataclass(frozen=True)
class Newcomer:
    """A worker that has the newest weights and gets no task before :meth:`ElasticFleet.admit`; a fleet of itself alone.

    Args:
        index, life: which of its slot's workers it is.
        worker: itself.
    """

    index: int
    life: int
    worker: Worker

    def submit(self, *args: Any) -> Future[Any]:
        """``run(*args)``, whoever may be given tasks."""
        return self.worker.call("run", *args)

    def broadcast(self, method: str, *args: Any, deadline_s: float, sticky: bool = False) -> list[Any]:
        """Its answer. Nothing sticks: the fleet has the newest of what does."""
        return [self.worker.call(method, *args).result(deadline_s)]


class ElasticFleet(Fleet):
    """``least`` to ``most`` workers of one role behind one queue: as many as there is room for.

    Contract, beside that of :class:`~.fleet.Fleet`. A worker that was started and has not said a word is *pending*, for
    want of a machine: nothing waits for it, it has no deadline, and nothing lies in its queue but one question, however
    often weights are pushed meanwhile. Its first answer begins its start, with the newest sticky calls before its first
    task. The fleet is ready with ``least`` workers. One that is lost is pending again. With fewer than ``least`` the
    others go on; after ``gone_s`` of that the fleet ends, and what is open fails with :class:`~.base.WorkerDied`; only
    those that are starting then have ``start_silence_s`` more. Once a worker has been ready, no number of starts that
    fail ends the tries.

    Args:
        role, start: as of a fleet; ``start`` may take for ever.
        least: workers that are enough.
        most: slots.
        gone_s: longest time with fewer than ``least``, the first included.
        advice: what the user can do then, the end of that sentence.
        options: of a fleet.

    >>> from sota_grpo.workers.base import WorkerSpec, starter
    >>> from sota_grpo.workers.processes import ThreadLauncher
    >>> spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", {"score": len, "term_names": ("length",)})
    >>> fleet = ElasticFleet("reward", starter(ThreadLauncher(), "reward", spec), 1, 3, gone_s=60.0, capacity=4)
    >>> fleet.wait_ready()
    >>> fleet.submit([]).result(), 1 <= fleet.num_live <= 3
    ([], True)
    >>> fleet.close()
    """

    _first_state = "pending"
    _longest_pause_s = 60.0  # a machine that lacks something is asked again and again

    def __init__(
        self,
        role: str,
        start: Callable[[int], Worker],
        least: int,
        most: int,
        *,
        gone_s: float,
        advice: str = "start more",
        **options: Any,
    ) -> None:
        if not 1 <= least <= most:
            raise ValueError(f"An elastic fleet has 1 worker or more, and not fewer at most; got {least} to {most}.")
        self._least, self._gone_s, self._advice = least, gone_s, advice
        self._stood = 0  # as far as the log knows
        self._shortage: object | None = None  # while there are fewer than least: a mark of its own for each time
        self._last_error: BaseException | None = None  # of a start
        self._holds_newcomers = False
        self._held: dict[int, int] = {}  # slot -> its worker's life
        self._judged: set[Newcomer] = set()  # until the supervisor has heard of it
        self._refusals: Counter[int] = Counter()
        super().__init__(role, start, most, **options)

    @property
    def num_live(self) -> int:
        """Workers that are given tasks."""
        return sum(slot.state == "ready" and self._held.get(slot.index) != slot.life for slot in self._slots)

    def metrics(self) -> dict[str, int]:
        """And how many there are now."""
        return super().metrics() | {"workers/engines": self.num_live}

    def hold_newcomers(self) -> None:
        """From now on, who becomes ready gets no task before :meth:`admit`; broadcasts and pings reach it."""
        self._holds_newcomers = True

    def newcomers(self) -> list[Newcomer]:
        """Those that wait for one or the other word."""
        held = [
            Newcomer(slot.index, slot.life, slot.worker)
            for index, life in list(self._held.items())
            if (slot := self._slots[index]).life == life and slot.state == "ready" and slot.worker is not None
        ]
        return [newcomer for newcomer in held if newcomer not in self._judged]

    def admit(self, newcomer: Newcomer) -> None:
        """Give it tasks; nothing happens where it is gone."""
        self._judged.add(newcomer)
        self._post(self._admit, newcomer)

    def refuse(self, newcomer: Newcomer, why: str) -> None:
        """Replace it, after a pause; its slot is given up with the fifth in a row."""
        self._judged.add(newcomer)
        self._post(self._replace, newcomer, why, True)

    def lose(self, newcomer: Newcomer, why: str) -> None:
        """Replace it at once, as any worker that is gone: that says nothing of the machine."""
        self._judged.add(newcomer)
        self._post(self._replace, newcomer, why, False)

    # The supervisor's thread.

    def _begin(self, slot: Slot, pause_s: float = 0.0) -> None:
        super()._begin(slot, self._longest_pause_s if self._refusals[slot.index] else pause_s)
        self._count()

    def _bring_up_to_date(self, slot: Slot) -> None:
        self._ask(slot, IDLE_METHOD, (), self._has_room)

    def _has_room(self, slot: Slot, answer: Future[Any]) -> None:
        """It exists; what it was not told before is newer now."""
        if error := answer.exception():
            self._start_failed(slot, slot.life, error)
            return
        slot.state, slot.start = "starting", Start(self._start_silence_s, self._timers.now_s())
        self._look_at_start(slot)
        super()._bring_up_to_date(slot)

    @property
    def _enough(self) -> tuple[int, int]:
        return self._least, self._least

    def _start_failed(self, slot: Slot, life: int, error: BaseException) -> None:
        self._last_error = error
        super()._start_failed(slot, life, error)

    def _is_hopeless(self, slot: Slot, error: BaseException) -> bool:
        return not any(other.has_run for other in self._slots) and super()._is_hopeless(slot, error)

    def _welcome(self, slot: Slot) -> None:
        if self._holds_newcomers:
            self._held[slot.index] = slot.life
        super()._welcome(slot)
        self._count()

    def _offer(self, slot: Slot) -> None:
        if self._held.get(slot.index) != slot.life:
            super()._offer(slot)

    def _admit(self, newcomer: Newcomer) -> None:
        slot = self._slots[newcomer.index]
        if slot.life == newcomer.life and self._held.pop(newcomer.index, None) is not None:
            self._refusals.pop(newcomer.index, None)
            self._offer(slot)
            self._dispatch()
        self._judged.discard(newcomer)

    def _replace(self, newcomer: Newcomer, why: str, is_refused: bool) -> None:
        slot = self._slots[newcomer.index]
        self._judged.discard(newcomer)
        if slot.life != newcomer.life or slot.state != "ready":
            return
        self._refusals[slot.index] += is_refused
        if not is_refused or self._refusals[slot.index] < _MAX_REFUSALS:
            self._lose(slot, why)
        else:
            slot.failed_starts = _MAX_REFUSALS
            self._retire(slot, WorkerDied(why))
            self._count()

    def _count(self) -> None:
        """See whether there are enough, whenever one has come or gone."""
        standing = self._in("ready")
        if standing >= self._least:
            self._shortage = None
        elif self._shortage is None:
            self._shortage = object()
            self._timers.at(self._timers.now_s() + self._gone_s, self._look_at_shortage, self._shortage)
            if self._ready.done():
                logger.warning(
                    "Only %d of at least %d %s workers are left; in %g s without enough of them the run ends.",
                    *(standing, self._least, self._role, self._gone_s),
                )
        if standing != self._stood:
            self._stood = standing
            logger.info("%s workers: %d stand, of %d to %d.", self._role, standing, self._least, len(self._slots))

    def _look_at_shortage(self, shortage: object, *, again: bool = False) -> None:
        if shortage is not self._shortage or self._dead is not None:
            return
        standing = self._in("ready")
        if not again and standing + self._in("starting") >= self._least:
            due_s = self._timers.now_s() + self._start_silence_s
            self._timers.at(due_s, lambda: self._look_at_shortage(shortage, again=True))
            return
        last = "" if self._last_error is None else f" (the last start that failed: {self._last_error})"
        cause = f"For {self._gone_s:g} s there were fewer than {self._least} {self._role} workers, {standing} at last"
        self._end(WorkerDied(f"{cause}{last}; {self._advice}."))

    def _in(self, state: str) -> int:
        return sum(slot.state == state for slot in self._slots)
