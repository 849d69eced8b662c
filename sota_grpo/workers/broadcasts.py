"""Calls to every live worker of a fleet, and the newest of them for workers that start later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from sota_grpo.workers.base import WorkerDied, WorkerLate
from sota_grpo.workers.futures import promised, resolve
from sota_grpo.workers.slots import Slot, Timers

_MAX_LATE = 2  # times that a slot's worker may be late before the call itself is taken to be hopeless


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
    waiting: dict[int, int] = field(default_factory=dict)  # slot -> life
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
        timers: of the fleet.
        ask: ``ask(slot, method, args, then, *about)``: ``then(slot, life, *about, future)`` is called with the answer.
        lose: ``lose(slot, why)`` replaces a worker, and calls :meth:`lost` here.
        max_deaths: of workers that were asked, until a broadcast that nobody answered fails.

    Attributes:
        sticky: method -> the arguments that a new worker gets.
    """

    def __init__(
        self,
        role: str,
        slots: Sequence[Slot],
        timers: Timers,
        ask: Callable[..., None],
        lose: Callable[[Slot, str], None],
        max_deaths: int,
    ) -> None:
        self.sticky: dict[str, Sticky] = {}
        self._role, self._slots, self._timers, self._ask, self._lose = role, slots, timers, ask, lose
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
            if broadcast.waiting.pop(slot.index, None) is not None:
                broadcast.deaths += 1
                self._conclude(broadcast, why)

    def end(self, cause: WorkerDied) -> None:
        """Fail what is open."""
        left, self._open = self._open, []
        for broadcast in left:
            broadcast.waiting.clear()
            broadcast.future.set_exception(cause)

    def _ask_one(self, broadcast: Broadcast, slot: Slot) -> None:
        broadcast.waiting[slot.index] = slot.life
        self._timers.at(self._timers.now_s() + broadcast.deadline_s, self._look_for_late, broadcast, slot, slot.life)
        self._ask(slot, broadcast.method, broadcast.args, self._answered, broadcast)

    def _answered(self, slot: Slot, life: int, broadcast: Broadcast, future: Future[Any]) -> None:
        if broadcast.waiting.get(slot.index) != life:
            return
        error = future.exception()
        if isinstance(error, WorkerDied):
            self._lose(slot, str(error))
            return
        del broadcast.waiting[slot.index]
        if error is None:
            broadcast.answers[slot.index] = future.result()
        else:
            broadcast.refusals.append(error)
        self._conclude(broadcast, "")

    def _look_for_late(self, broadcast: Broadcast, slot: Slot, life: int) -> None:
        if broadcast.waiting.get(slot.index) == life:
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
