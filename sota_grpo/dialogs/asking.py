"""The ways in which a stream of dialogs asks its engine: futures, steps, or rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from sota_grpo.engines.base import Engine, Generates
from sota_grpo.engines.stepping import FairLock
from sota_grpo.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.workers.futures import promised

Asked = tuple[GroupRequest, Future[GroupOutput]]


class Submits(Protocol):
    """An engine that answers with futures, such as :class:`sota_grpo.fleet_engine.FleetEngine`."""

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]: ...


class Asking(Protocol):
    """One stream's way to its engine: ``ask`` never waits; ``advance`` samples what was asked for, while ``busy``."""

    @property
    def busy(self) -> bool: ...

    def ask(self, request: GroupRequest) -> Future[GroupOutput]: ...

    def advance(self) -> None: ...

    def close(self) -> None: ...


class AskByFuture:
    """Of an engine that samples by itself."""

    busy = False

    def __init__(self, engine: Submits, sampling: Sampling):
        self._engine, self._sampling = engine, sampling

    def ask(self, request: GroupRequest) -> Future[GroupOutput]:
        return self._engine.submit(request, self._sampling)

    def advance(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """The engine samples what it was asked for to its end, and nobody reads it."""


class AskByRound:
    """Of an engine that has ``generate`` alone: what was asked for during a round is the next round.

    The engine has less and less to do towards the end of a round. In a simulation of an engine with room for all (16
    groups of 8, three turns of lognormal lengths with sigma 0.6, cut at four medians) rounds took 1.4 times as long as
    steps. vLLM on two CPU cores, which is busy with few rows already, took equally long; the transformers engine, which
    computes the groups of every call by themselves, took a third of the time that steps took.

    Within a round requests are numbered from 0, so that equal group ids are told apart.
    """

    def __init__(self, engine: Generates, sampling: Sampling):
        self._engine, self._sampling = engine, sampling
        self._asked: list[Asked] = []
        self._round: dict[int, Future[GroupOutput]] = {}
        self._stream: Iterator[GroupOutput] = iter(())

    @property
    def busy(self) -> bool:
        return bool(self._asked or self._round)

    def ask(self, request: GroupRequest) -> Future[GroupOutput]:
        future: Future[GroupOutput] = promised()
        self._asked.append((request, future))
        return future

    def advance(self) -> None:
        """Return when a group of the round has ended."""
        if not self._round:
            requests = [replace(request, group_id=number) for number, (request, _) in enumerate(self._asked)]
            self._round = {number: future for number, (_, future) in enumerate(self._asked)}
            self._asked = []
            self._stream = self._engine.generate(requests, self._sampling)
        output = next(self._stream)
        self._round.pop(output.group_id).set_result(output)

    def close(self) -> None:
        self._stream = iter(())  # a stream that is dropped takes its groups along


class Steps:
    """Who waits for which group of a stepwise engine: whoever steps it may end anybody's group.

    An engine can forget all that is in flight, but not some of it. So the groups of a stream that was left are sampled
    on while other streams step the engine, and are forgotten in the first call that finds nobody waiting.

    Args:
        engine: nobody else adds to it.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._lock = FairLock()
        self._waiting: dict[int, Future[GroupOutput]] = {}  # by ticket
        self._left: deque[Future[GroupOutput]] = deque()

    def advance(self, asked: Sequence[Asked], sampling: Sampling) -> None:
        """Take the new groups in, all together, and make one step.

        Raises:
            RuntimeError: the engine has forgotten groups that are waited for.
        """
        with self._lock:
            self._forget_left()
            if asked:
                tickets = self._engine.add([request for request, _ in asked], sampling)
                self._waiting.update(zip(tickets, (future for _, future in asked)))
            lost = self._waiting and not self._engine.num_in_flight
            ended = [(self._waiting.pop(ticket, None), output) for ticket, output in self._engine.step()]
        if lost:
            raise RuntimeError("The groups of this stream were dropped by abort() or close(); generate them again.")
        for future, output in ended:
            if future is not None:
                future.set_result(output)

    def leave(self, futures: Collection[Future[GroupOutput]]) -> None:
        """Nobody waits for these any more. Never waits itself: the garbage collector may call it anywhere."""
        self._left.extend(futures)

    def settle(self) -> None:
        """Forget what nobody waits for, where the engine can."""
        with self._lock:
            self._forget_left()

    def _forget_left(self) -> None:
        left = {self._left.popleft() for _ in range(len(self._left))}
        if left:
            self._waiting = {ticket: future for ticket, future in self._waiting.items() if future not in left}
        if not self._waiting and self._engine.num_in_flight:
            self._engine.abort()


class AskByStep:
    """Of a stepwise engine: new turns begin while others are in the middle of theirs."""

    def __init__(self, steps: Steps, sampling: Sampling):
        self._steps, self._sampling = steps, sampling
        self._asked: list[Asked] = []
        self._open: set[Future[GroupOutput]] = set()

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def ask(self, request: GroupRequest) -> Future[GroupOutput]:
        future: Future[GroupOutput] = promised()
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        self._asked.append((request, future))
        return future

    def advance(self) -> None:
        """Take in what was asked for since the last step, and make a step."""
        asked, self._asked = self._asked, []
        self._steps.advance(asked, self._sampling)

    def close(self) -> None:
        self._steps.leave(self._open.copy())
