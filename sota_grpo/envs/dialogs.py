"""Dialogs of several turns over any engine: the policy speaks, is graded, is answered, and speaks again."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from sota_grpo.engines.base import Engine, Generates, response_rooms
from sota_grpo.engines.stepping import FairLock
from sota_grpo.rewards.grading import Grader
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling, Score, sample_seed
from sota_grpo.workers.base import promised

Asked = tuple[GroupRequest, Future[GroupOutput]]


class Submits(Protocol):
    """An engine that answers with futures, such as :class:`sota_grpo.workers.fleet_engine.FleetEngine`."""

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


Ask = Callable[[GroupRequest], Future[GroupOutput]]
Post = Callable[[Callable[[], None]], None]


class Turns(Protocol):
    """What reads and writes turns: :class:`sota_grpo.envs.turns.TurnTokens`."""

    def text(self, token_ids: torch.Tensor) -> str: ...

    def ids(self, reply: Mapping[str, str], last_id: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Rules:
    """How a dialog goes on: ``max_steps`` turns of the policy at most, ``max_model_len`` tokens, prompt included."""

    grader: Grader
    turns: Turns
    max_steps: int
    max_model_len: int


class Dialog:
    """One sample of a group: what the policy and the others have said so far.

    Args:
        prompt_ids: of the group.
        first: what the policy said first.
    """

    def __init__(self, prompt_ids: Sequence[int], first: Sample):
        self.ids = [*prompt_ids]
        self.num_turns = 0
        self._parts: list[Sample] = []
        self.speak(first)

    def speak(self, said: Sample) -> None:
        """Add a turn of the policy."""
        self._parts.append(replace(said, assistant_mask=torch.ones(len(said.token_ids), dtype=torch.bool)))
        self.ids += said.token_ids.tolist()
        self.num_turns += 1
        self.last, self.truncated = said.token_ids, said.truncated

    def hear(self, token_ids: Sequence[int]) -> None:
        """Add what stands between two turns of the policy."""
        count = len(token_ids)
        heard = torch.tensor(token_ids, dtype=torch.int64)
        nothing = torch.zeros(count, dtype=torch.bool)
        self._parts.append(Sample(heard, torch.zeros(count), torch.full((count,), -1), False, nothing))
        self.ids += token_ids

    def sample(self) -> Sample:
        """All that follows the prompt; in a dialog of one turn, what the engine gave."""
        if self.num_turns == 1:
            return replace(self._parts[0], truncated=self.truncated, assistant_mask=None)
        fields = ("token_ids", "log_probs", "versions", "assistant_mask")
        joined = {name: torch.cat([getattr(part, name) for part in self._parts]) for name in fields}
        return Sample(**joined, truncated=self.truncated)


class GroupDialogs:
    """Samples a group's first turns together, then every dialog's next turns by themselves, until the last has ended.

    Turn ``t >= 2`` of sample ``i`` is a request of its own, whose seed is ``sample_seed(request.seed, i, t)``.

    Args:
        request: the group, with its example.
        rules: when a dialog goes on, and with what.
        ask: asks the engine.
        post: runs what follows a future: at once, or on the thread that the group lives on.

    Attributes:
        done: the group's output, or the first failure of the engine, the grader or the chat template.
    """

    def __init__(self, request: GroupRequest, rules: Rules, ask: Ask, post: Post):
        self.done: Future[GroupOutput] = promised()
        self._request, self._rules, self._ask, self._post = request, rules, ask, post
        self._dialogs: list[Dialog] = []
        self._lock = threading.Lock()  # futures may resolve on several threads
        self._num_open = request.num_samples
        self._failed = False

    def begin(self) -> None:
        """Ask for the first turns."""
        self._guarded(lambda: self._then(self._ask(replace(self._request, example=None)), self._begun))

    def _then(self, future: Future[Any], handle: Callable[[Any], None]) -> None:
        future.add_done_callback(lambda done: self._post(lambda: self._guarded(lambda: handle(done.result()))))

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # it belongs to whoever reads the future
            with self._lock:
                first, self._failed = not self._failed, True
            if first:
                self.done.set_exception(error)

    def _begun(self, output: GroupOutput) -> None:
        self._dialogs = [Dialog(self._request.prompt_ids, first) for first in output.samples]
        self._judge(range(len(self._dialogs)))

    def _judge(self, indexes: Sequence[int]) -> None:
        """Have those graded that may still go on; the others have ended."""
        going = [
            i for i in indexes if not self._dialogs[i].truncated and self._dialogs[i].num_turns < self._rules.max_steps
        ]
        self._end(len(indexes) - len(going))
        if going:
            assert self._request.example is not None
            pairs = [(self._rules.turns.text(self._dialogs[i].last), self._request.example) for i in going]
            self._then(self._rules.grader.scores(pairs), partial(self._answer, going))

    def _answer(self, indexes: Sequence[int], scores: Sequence[Score]) -> None:
        for index, score in zip(indexes, scores, strict=True):
            request = self._continuation(index, score)
            if request is None:
                self._end(1)
            else:
                self._then(self._ask(request), partial(self._spoken, index))

    def _spoken(self, index: int, output: GroupOutput) -> None:
        (said,) = output.samples
        self._dialogs[index].speak(said)
        self._judge([index])

    def _continuation(self, index: int, score: Score) -> GroupRequest | None:
        """The request for a dialog's next turn; None where the score, or the end of the context, ends it."""
        if score.reply is None or score.error is not None:
            return None
        dialog, request = self._dialogs[index], self._request
        between = self._rules.turns.ids(score.reply, dialog.ids[-1])
        if len(dialog.ids) + len(between) >= self._rules.max_model_len:
            dialog.truncated = True
            return None
        dialog.hear(between)
        seed = sample_seed(request.seed, index, dialog.num_turns + 1)
        return GroupRequest(request.group_id, tuple(dialog.ids), num_samples=1, seed=seed)

    def _end(self, count: int) -> None:
        with self._lock:
            self._num_open -= count
            last = not self._num_open and not self._failed
        if last:
            samples = tuple(dialog.sample() for dialog in self._dialogs)
            self.done.set_result(GroupOutput(self._request.group_id, samples))


class DialogEngine:
    """Groups of dialogs: each sample is graded, and where its score has a reply, the policy hears it and goes on.

    A sample then holds all that follows the prompt, as it was sampled and inserted: nothing that was sampled is ever
    tokenised again. On the tokens of user and tool turns ``assistant_mask`` is False, log-probs are 0, versions -1.
    A dialog ends with a score without reply, a failed grader, a truncated turn, its ``max_steps``-th turn, or where the
    context has no room for the reply and one more token (truncated too). ``sampling.max_tokens`` bounds one turn.

    Contract. Consumes: requests with their examples. Produces: groups, as soon as all their dialogs have ended. Waits
    for: the engine and the grader, which have deadlines of their own. Unblocked by: the last dialog of a group. A
    failure of either ends the stream, or fails the future. A stream that is dropped takes its groups along, at the next
    call where the engine is stepwise.

    An engine with ``submit`` (rollout workers) and a stepwise one (:class:`~sota_grpo.engines.base.Engine`; it must be
    nobody else's) begin a dialog's next turn while others are in the middle of theirs. One that has ``generate`` alone
    is asked in rounds, turn by turn: see :class:`sota_grpo.envs.dialogs.AskByRound` for what that costs.

    The random numbers of turn ``t`` of sample ``i`` derive from ``(request.seed, i, t)``, so a dialog depends on no
    other, up to the rounding of the engine's batches.

    Args:
        engine: samples single turns.
        grader: between the turns.
        turns: reads and writes the ids of turns (:class:`sota_grpo.envs.turns.TurnTokens`).
        max_steps: most turns of the policy in a dialog, at least 2.
        in_rounds: ask in rounds whatever the engine; for ``transformers``, which computes every call by itself.

    Raises:
        ValueError: ``max_steps`` is below 2, where the engine alone does the same.

    Example, with a grader that is never content and turns of two tokens between those of the policy:

    >>> from types import SimpleNamespace
    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> from sota_grpo.rl.records import Example, Score
    >>> graded = Future()
    >>> graded.set_result([Score({}, False, reply={"role": "user", "content": "Again?"})])
    >>> grader = SimpleNamespace(scores=lambda pairs: graded)
    >>> turns = SimpleNamespace(text=str, ids=lambda reply, last_id: (8, 9))
    >>> engine = DialogEngine(ScriptedEngine(lambda request, sample, version: [5]), grader, turns, max_steps=2)
    >>> request = GroupRequest(0, (1, 2), num_samples=1, seed=0, example=Example("?", "!"))
    >>> ((sample,),) = [output.samples for output in engine.generate([request], Sampling(max_tokens=4))]
    >>> sample.token_ids.tolist(), sample.assistant_mask.int().tolist()
    ([5, 0, 8, 9, 5, 0], [1, 1, 0, 0, 1, 1])
    """

    def __init__(self, engine: Generates, grader: Grader, turns: Turns, *, max_steps: int, in_rounds: bool = False):
        if max_steps < 2:
            raise ValueError(f"max_steps={max_steps} leaves no second turn; use the engine itself.")
        self.engine: Any = engine
        self.name, self.max_model_len = engine.name, engine.max_model_len
        self._rules = Rules(grader, turns, max_steps, engine.max_model_len)
        self._in_rounds = in_rounds
        self._steps = Steps(engine) if isinstance(engine, Engine) and not in_rounds else None

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """The group, some day, of an engine that has ``submit``; what is to be done runs where its futures resolve.

        Raises:
            ValueError: the prompt leaves no room for a response, or the request has no example.
        """
        self._check([request], sampling)
        group = GroupDialogs(request, self._rules, AskByFuture(self.engine, sampling).ask, post=_at_once)
        group.begin()
        return group.done

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, when its last dialog has ended; nothing is sampled before the first is asked for.

        Raises:
            ValueError: a prompt leaves no room for a response, or a request has no example; raised at the call.
        """
        self._check(requests, sampling)
        return self._stream(list(requests), sampling)

    def _stream(self, requests: list[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        ended: deque[Future[GroupOutput]] = deque()
        asking = self._asking(sampling)
        try:
            for request in requests:
                group = GroupDialogs(request, self._rules, asking.ask, post=inbox.put)
                group.done.add_done_callback(ended.append)
                group.begin()
            for _ in requests:
                while not ended:
                    _move_on(inbox, asking)
                yield ended.popleft().result()
        finally:
            asking.close()

    def _asking(self, sampling: Sampling) -> Asking:
        if self._steps is not None:
            return AskByStep(self._steps, sampling)
        if hasattr(self.engine, "submit") and not self._in_rounds:
            return AskByFuture(self.engine, sampling)
        return AskByRound(self.engine, sampling)

    def _check(self, requests: Sequence[GroupRequest], sampling: Sampling) -> None:
        response_rooms(requests, sampling, self.max_model_len)
        for request in requests:
            if request.example is None:
                raise ValueError(f"Group {request.group_id} has no example to grade its dialogs against; give it one.")

    @property
    def version(self) -> int:
        """The version that the engine serves."""
        return self.engine.version

    @version.setter
    def version(self, version: int) -> None:  # the protocol's attribute is one that can be set
        self.engine.version = version

    @property
    def fleet(self) -> Any:
        """The workers of an engine that has some."""
        return self.engine.fleet

    @property
    def base(self) -> Any:
        """What a pushed adapter is merged into, of an engine that takes adapters."""
        return self.engine.base

    @base.setter
    def base(self, base: Any) -> None:
        self.engine.base = base

    def update_weights(self, weights: Iterable[Any], version: int) -> None:
        """Push to the engine, in the middle of running dialogs too; every token keeps the version that sampled it."""
        self.engine.update_weights(weights, version)

    def sleep(self) -> None:
        """Free the engine's device until :meth:`wake`."""
        if self._steps is not None:
            self._steps.settle()  # an engine does not sleep over groups in flight, those that nobody waits for included
        self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.engine.wake()

    def close(self) -> None:
        """Close the engine; idempotent."""
        self.engine.close()


def _at_once(action: Callable[[], None]) -> None:
    action()


def _move_on(inbox: queue.SimpleQueue[Callable[[], None]], asking: Asking) -> None:
    """Do what has come; where nothing has, sample, or wait for the grader where nothing is left to sample."""
    try:
        action = inbox.get(block=not asking.busy)
    except queue.Empty:
        asking.advance()
        return
    action()
    while not inbox.empty():
        inbox.get()()
