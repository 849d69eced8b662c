"""What all engines share: tickets, streams of groups on top of single steps, and whose turn it is."""

from __future__ import annotations

import contextlib
import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from sota_grpo.engines.base import response_rooms
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling


class FairLock:
    """A mutex that goes to the thread that has waited longest.

    ``threading.Lock`` goes to whoever asks first after the release, and a thread that steps in a loop asks again at
    once: another thread with new weights can then wait for ever.

    >>> lock = FairLock()
    >>> with lock:
    ...     lock.try_acquire()
    False
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C while waiting: leave the queue, or pass on the turn that has just come
            with self._mutex:
                still_waiting = turn in self._waiting
                if still_waiting:
                    self._waiting.remove(turn)
            if not still_waiting:
                self.release()
            raise

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Hand the lock to the next in the queue."""
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()  # stays held, now by that thread
            else:
                self._held = False

    def try_acquire(self) -> bool:
        """Take the lock if that needs no waiting at all."""
        if not self._mutex.acquire(blocking=False):
            return False
        try:
            taken, self._held = not self._held, True
            return taken
        finally:
            self._mutex.release()


class SteppingEngine(ABC):
    """``add``, ``step``, ``abort`` and ``generate`` of an engine that says how to start, step and drop groups.

    Every group in flight has a ticket and a basket, where its output goes: that of ``add`` and ``step``, or that of
    one stream of ``generate``. So whoever steps may end anybody's group. All state changes hold the engine's turn; a
    thread waits for at most one step of every thread before it in the queue.

    A subclass sets ``max_model_len``, takes ``with self._turn():`` around what must not run within a step (pushing
    weights, sleeping), and writes the four hooks below, which are called within a turn.
    """

    max_model_len: int
    device = torch.device("cpu")  # these two: see :class:`~sota_grpo.engines.base.Engine`
    weight_dtype: torch.dtype | None = None

    def __init__(self) -> None:
        self._lock = FairLock()
        self._numbers = itertools.count()
        self._finished: dict[int, GroupOutput] = {}
        self._baskets: dict[int, dict[int, GroupOutput]] = {}  # by the ticket of every group in flight
        self._abandoned: deque[int] = deque()

    @abstractmethod
    def _require_open(self) -> object:
        """Raise RuntimeError when the engine is closed."""

    @abstractmethod
    def _start(
        self, tickets: Sequence[int], requests: Sequence[GroupRequest], rooms: Sequence[int], sampling: Sampling
    ) -> None:
        """Take the groups in; ``rooms`` has the most response tokens of each."""

    @abstractmethod
    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        """Move everything in flight on; the groups that ended, by ticket."""

    @abstractmethod
    def _drop(self, tickets: Collection[int]) -> None:
        """Forget these groups, those already unknown too. Bookkeeping only: the garbage collector may call it."""

    @property
    def num_in_flight(self) -> int:
        """Groups added and not yet returned by :meth:`step` or a stream."""
        return len(self._baskets) + len(self._finished)

    def add(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[int]:
        """Take groups in, to be sampled by :meth:`step`; one ticket per request.

        Raises:
            ValueError: a prompt leaves no room for a response; no request was taken in then.
            RuntimeError: the engine is closed.
        """
        with self._turn():
            return self._accept(requests, sampling, self._finished)

    def step(self) -> list[tuple[int, GroupOutput]]:
        """Move everything in flight on, once; the added groups that have ended since the last call, by ticket."""
        with self._turn():
            self._advance()
            ended = list(self._finished.items())
            self._finished.clear()
        return ended

    def abort(self) -> None:
        """Forget everything in flight; an open stream raises RuntimeError when it is asked for more."""
        with self._turn():
            self._forget_all()

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, when its last sample has ended; nothing is sampled before the first is asked for.

        Raises:
            ValueError: a prompt leaves no room for a response; raised at the call.
            RuntimeError: the engine is closed.
        """
        self._require_open()
        response_rooms(requests, sampling, self.max_model_len)
        return self._stream(list(requests), sampling)

    def _stream(self, requests: list[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        basket: dict[int, GroupOutput] = {}
        tickets: set[int] = set()
        try:
            with self._turn():
                tickets.update(self._accept(requests, sampling, basket))
            while tickets:
                with self._turn():
                    if not basket:
                        self._advance()
                    ended = list(basket.items())
                    basket.clear()
                    lost = not ended and tickets.isdisjoint(self._baskets)
                if lost:
                    raise RuntimeError(
                        f"{len(tickets)} groups of this stream were dropped by abort() or close(); generate them again."
                    )
                for ticket, output in ended:
                    tickets.discard(ticket)
                    yield output
        finally:
            self._abandon(tickets)

    def _accept(
        self, requests: Sequence[GroupRequest], sampling: Sampling, basket: dict[int, GroupOutput]
    ) -> list[int]:
        self._require_open()
        rooms = response_rooms(requests, sampling, self.max_model_len)
        tickets = [next(self._numbers) for _ in requests]
        try:
            self._start(tickets, requests, rooms, sampling)
        except BaseException:
            self._drop(tickets)
            raise
        self._baskets.update(dict.fromkeys(tickets, basket))
        return tickets

    def _advance(self) -> None:
        if self._baskets:
            self._require_open()
            self._hand_out(self._step())

    def _hand_out(self, ended: Iterable[tuple[int, GroupOutput]]) -> None:
        """Put what a step has ended where it was asked for."""
        for ticket, output in ended:
            self._baskets.pop(ticket)[ticket] = output

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            self._drop_abandoned()
            yield

    def _abandon(self, tickets: Collection[int]) -> None:
        """Drop the groups of a stream that was left: now, or in the next turn when this comes in the middle of one.

        The garbage collector may end a stream at any point, within a step of this very thread too: so never wait.
        """
        if not tickets:
            return
        self._abandoned.extend(tickets)
        if self._lock.try_acquire():
            try:
                self._drop_abandoned()
            finally:
                self._lock.release()

    def _drop_abandoned(self) -> None:
        tickets = {self._abandoned.popleft() for _ in range(len(self._abandoned))}
        known = {ticket for ticket in tickets if self._baskets.pop(ticket, None) is not None}
        if known:
            self._drop(known)

    def _forget_all(self) -> None:
        self._drop(list(self._baskets))
        self._baskets.clear()
        self._finished.clear()
