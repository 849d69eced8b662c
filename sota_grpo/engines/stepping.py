"""What engines share: who drives them, streams of groups, and groups in flight on top of single steps."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from sota_grpo.engines.base import Engine, response_rooms
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling

Result = TypeVar("Result")
_IDLE_S = 0.005  # an engine without work is asked again so soon: another thread may have submitted some


class Inbox:
    """What other threads have left to do for the one that drives an engine.

    Args:
        engine: makes a step whenever nothing is left to do.

    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> inbox, done = Inbox(ScriptedEngine()), []
    >>> inbox.post(lambda: done.append(1))
    >>> inbox.turn(), done, inbox.turn(timeout_s=0.0)
    (1, [1], 0)
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._actions: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def post(self, action: Callable[[], object]) -> None:
        """Have ``action`` called by the thread that takes turns; from any thread."""
        self._actions.put(action)

    def drain(self) -> int:
        """Do what is there, and what that posts; how many actions it was."""
        done = 0
        with contextlib.suppress(queue.Empty):
            while True:
                action = self._actions.get_nowait()
                action()
                done += 1
        return done

    def turn(self, timeout_s: float | None = None) -> int:
        """Do what is there; else let the engine make a step; else wait for an action, ``timeout_s`` at most.

        Returns:
            How many actions were done.
        """
        done = self.drain()
        if done or self._engine.advance():
            return done
        if self._engine.stepwise:
            timeout_s = _IDLE_S if timeout_s is None else min(_IDLE_S, timeout_s)
        try:
            self._actions.get(timeout=timeout_s)()
        except queue.Empty:
            return 0
        return 1 + self.drain()


def completed(inbox: Inbox, begin: Iterable[Callable[[], Future[Result]]]) -> Iterator[Result]:
    """Begin everything, then yield the results as they come, driving the engine of ``inbox``.

    What is left when the iterator is dropped, or when a failure ends it, is cancelled.
    """
    done: deque[Future[Result]] = deque()
    left: set[Future[Result]] = set()
    try:
        for one in begin:
            left.add(future := one())
            future.add_done_callback(lambda future: inbox.post(partial(done.append, future)))
        while left:
            while not done:
                inbox.turn()
            left.discard(future := done.popleft())
            yield future.result()
    finally:
        for future in left:
            future.cancel()


class Streams:
    """``generate`` of an engine that has ``submit``; without another ``advance`` it is one that drives itself."""

    stepwise = False

    def advance(self) -> bool:
        """Nothing to do for whoever waits."""
        return False

    def generate(self: Any, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, when its last sample has ended; nothing is sampled before the first is asked for.

        Raises:
            ValueError: a prompt leaves no room for a response; raised at the call.
        """
        response_rooms(requests, sampling, self.max_model_len)
        return completed(Inbox(self), [partial(self.submit, request, sampling) for request in requests])


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


class Flight(NamedTuple):
    """A group that was submitted: ``room`` is the most tokens of a response to it."""

    request: GroupRequest
    room: int
    sampling: Sampling
    future: Future[GroupOutput]


class SteppingEngine(Streams, ABC):
    """An engine that says how to start, step and drop groups, which have tickets.

    All state changes hold the engine's turn, which goes to the thread that has waited longest: one that pushes weights
    waits for at most one step of every thread before it. Futures are resolved outside the turn, by whoever made the
    step, so what follows may push or submit.

    A subclass sets ``max_model_len``, takes ``with self._turn():`` around what must not run within a step (pushing
    weights, sleeping), and writes the hooks below, which are called within a turn.
    """

    name: str
    version: int
    max_model_len: int
    stepwise = True
    device = torch.device("cpu")  # where this process can compute with weights before it pushes them
    weight_dtype: torch.dtype | None = None  # see :class:`~sota_grpo.engines.base.Engine`

    def __init__(self) -> None:
        self._lock = FairLock()
        self._numbers = itertools.count()
        self._submitted: deque[Flight] = deque()
        self._flights: dict[int, Flight] = {}  # by ticket
        self._ended: deque[tuple[Flight, GroupOutput | Exception]] = deque()
        self._cancelled: deque[Future[GroupOutput]] = deque()

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    @abstractmethod
    def sleep(self) -> None: ...

    @abstractmethod
    def wake(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

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
        """Forget these groups, those already unknown too."""

    def _refuse(self, request: GroupRequest, sampling: Sampling) -> None:
        """Raise ValueError for what this engine cannot do; called by :meth:`submit`, in any thread."""

    @property
    def num_in_flight(self) -> int:
        """Groups submitted whose futures are open."""
        flights = [*list(self._submitted), *list(self._flights.values()), *(flight for flight, _ in list(self._ended))]
        return sum(not flight.future.cancelled() for flight in flights)

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Take one group in, to be sampled by :meth:`advance`; from any thread.

        Raises:
            ValueError: its prompt leaves no room for a response.
            RuntimeError: the engine is closed.
        """
        self._require_open()
        (room,) = response_rooms([request], sampling, self.max_model_len)
        self._refuse(request, sampling)
        future: Future[GroupOutput] = Future()
        future.add_done_callback(self._note_cancelled)
        self._submitted.append(Flight(request, room, sampling, future))
        return future

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """As :meth:`Streams.generate`; a closed engine raises RuntimeError at the call."""
        self._require_open()
        return super().generate(requests, sampling)

    def advance(self) -> bool:
        """Take in what was submitted, and move everything in flight on, once; False where nothing was.

        A failure in between fails every group in flight: nobody knows how far each has come.
        """
        busy = resolved = False
        try:
            with self._turn():
                try:
                    self._take_in()
                    busy = bool(self._flights)
                    if busy:
                        self._require_open()
                        self._land(self._step())
                except BaseException as error:
                    self._forget_all(f"was lost when the engine failed ({error!r})")
                    raise
        finally:
            resolved = self._resolve_ended()
        return resolved or busy

    def abort(self) -> None:
        """Forget everything in flight; its futures raise RuntimeError."""
        with self._turn():
            self._forget_all()
        self._resolve_ended()

    def _forget_all(self, why: str = "was dropped by abort() or close(); ask for it again") -> None:
        """The futures are told by :meth:`_resolve_ended`."""
        lost = [*(self._submitted.popleft() for _ in range(len(self._submitted))), *self._flights.values()]
        tickets = list(self._flights)
        self._flights.clear()
        for flight in lost:
            self._ended.append((flight, RuntimeError(f"Group {flight.request.group_id} {why}.")))
        self._drop(tickets)  # last: a broken engine may fail here

    def _take_in(self) -> None:
        """Start what was submitted, neighbours of one sampling together."""
        while self._submitted:
            sampling, flights = self._submitted[0].sampling, []
            while self._submitted and self._submitted[0].sampling == sampling:
                flights.append(self._submitted.popleft())
            if flights := [flight for flight in flights if not flight.future.cancelled()]:
                self._start_together(flights)

    def _start_together(self, flights: Sequence[Flight]) -> None:
        """An engine refuses all or none: where it refuses, each is tried alone."""
        by_ticket = {next(self._numbers): flight for flight in flights}
        requests, rooms, samplings, _ = zip(*flights)
        self._flights |= by_ticket
        try:
            self._start(list(by_ticket), requests, rooms, samplings[0])
        except ValueError as error:
            self._drop(list(by_ticket))
            for ticket in by_ticket:
                self._flights.pop(ticket, None)
            if len(flights) == 1:
                self._ended.append((flights[0], error))
                return
            for flight in flights:
                self._start_together([flight])

    def _land(self, ended: Iterable[tuple[int, GroupOutput]]) -> None:
        """What a step has ended waits for the end of the turn."""
        self._ended.extend((self._flights.pop(ticket), output) for ticket, output in ended)

    def _resolve_ended(self) -> bool:
        found = False
        with contextlib.suppress(IndexError):  # another thread may take the last one
            while self._ended:
                flight, output = self._ended.popleft()
                found = True
                if not flight.future.set_running_or_notify_cancel():
                    continue
                if isinstance(output, Exception):
                    flight.future.set_exception(output)
                else:
                    flight.future.set_result(output)
        return found

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            self._drop_cancelled()
            yield

    def _note_cancelled(self, future: Future[GroupOutput]) -> None:
        """The garbage collector may cancel at any point, within a step of this very thread too: so never wait."""
        if future.cancelled():
            self._cancelled.append(future)
            if self._lock.try_acquire():
                try:
                    self._drop_cancelled()
                finally:
                    self._lock.release()

    def _drop_cancelled(self) -> None:
        """Of what was started; the others are left out when they would be."""
        gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
        tickets = [ticket for ticket, flight in self._flights.items() if flight.future in gone] if gone else []
        for ticket in tickets:
            del self._flights[ticket]
        if tickets:
            self._drop(tickets)
