"""Dialogs of several turns over any engine: the policy's turns are answered by its task, by tools or an environment.

Between two turns of the policy are the end of its turn, the answer, and the start of its next turn. In a ChatML
template, after the policy ended its turn with ``<|im_end|>`` itself, the reply ``Think again.`` is::

    sampled      ...  18  <|im_end|>
    inserted     \\n  <|im_start|>user  \\n  Think again.  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      I see, it is 19  <|im_end|>

Tools answer with a turn of the role ``tool``; a turn without a call is the final answer and ends the dialog::

    sampled      <tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 28}}</tool_call> <|im_end|>
    inserted     \\n  <|im_start|>tool  \\n  9716  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      It is 9716. <|im_end|>

Sampled tokens stay as they are, also where a template would render an earlier turn differently (without its thinking).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Streams, Task, result
from sota_grpo.envs.chat_tokens import Messages, TurnTokens, num_shared
from sota_grpo.envs.prompts import PromptSource
from sota_grpo.envs.tool_calls import ToolCallReader, message_of
from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import Grader
from sota_grpo.rl.records import (
    TURNS,
    Example,
    GroupOutput,
    GroupRequest,
    Sample,
    SampledText,
    Sampling,
    SamplingSupport,
    sample_seed,
    task_of_example,
)
from sota_grpo.rl.tool_schemas import ToolCall, call_id
from sota_grpo.tasks.wrappers import reward_inputs
from sota_grpo.workers.base import resolve
from sota_grpo.workers.instances import Answer, InstanceLost, Instances

Submit = Callable[[GroupRequest], Future[GroupOutput]]


class Episode(Protocol):
    """The environment's side of one dialog; its methods are called one after the other, from any thread.

    The coroutines may wait for futures (:func:`~sota_grpo.engines.stepping.result`). ``prompt_ids`` is the prompt of
    this dialog, None where it is the group's. ``answer`` maps the ids of a turn of the policy to the messages that
    answer it, None where the dialog is over. ``end`` takes the last turn if it was not answered (it was truncated, or
    the last allowed one) and whether the dialog was cut for length, and returns the dialog's record
    (:class:`~sota_grpo.rl.records.Sample`). ``leave`` is called instead of ``end`` when the request was cancelled.
    """

    prompt_ids: tuple[int, ...] | None

    async def answer(self, token_ids: torch.Tensor) -> Messages | None: ...

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None: ...

    def leave(self) -> None: ...


class Responder(Protocol):
    """What answers the policy; ``begin`` opens the dialog of sample ``index`` of a group."""

    async def begin(self, request: GroupRequest, index: int) -> Episode: ...


class GradedTurns:
    """Grade every turn; the reply of the score is the answer, and without a reply the dialog is over.

    Args:
        grader: of the task.
        turns: reads the turns.
    """

    def __init__(self, grader: Grader, turns: TurnTokens):
        self._grader, self._turns = grader, turns

    async def begin(self, request: GroupRequest, index: int) -> Episode:
        assert request.example is not None
        return GradedEpisode(self._grader, self._turns, request.example)


class GradedEpisode:
    """One dialog of :class:`GradedTurns`."""

    prompt_ids: tuple[int, ...] | None = None

    def __init__(self, grader: Grader, turns: TurnTokens, example: Example):
        self._grader, self._turns, self._example = grader, turns, example
        self._replies: list[Messages] = []

    async def answer(self, token_ids: torch.Tensor) -> Messages | None:
        text = SampledText(self._turns.text(token_ids), token_ids.tolist())
        (score,) = await result(self._grader.scores([(text, self._example)]))
        if score.reply is None or score.error is not None:
            return None
        self._replies.append([score.reply])
        return self._replies[-1]

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None:
        return {"replies": self._replies} if self._replies else None

    def leave(self) -> None: ...


#: How a dialog may end, besides :data:`~sota_grpo.rl.records.TURNS`: with an answer, cut, or without its instance.
ANSWERED, TRUNCATED, LOST = "answer", "truncated", "lost"


class ToolResponder:
    """Answer turns with tools: each sample has an instance of its own (:mod:`sota_grpo.workers.instances`).

    Calls are read from the ids that the policy sampled. An instance that misses its deadline, dies, or cannot begin
    costs its sample: the dialog ends, and its record says why.

    Args:
        env: its prompts describe the tools.
        instances: of the tools' environment.
        template_kwargs: further arguments of ``apply_chat_template``.

    Raises:
        UserError: the chat template has no tools.
    """

    def __init__(
        self, env: PromptSource, instances: Instances, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._env, self.instances = env, instances
        self.reader = ToolCallReader(env.tokenizer, instances.schemas, template_kwargs)
        #: Whether records hold the attributes that the environment had at the end.
        self.reads_environments = getattr(env.task, "reads_environments", False)

    async def begin(self, request: GroupRequest, index: int) -> Episode:
        """Open and reset an instance.

        Siblings are reset with the random numbers of their group, so that they begin alike; later numbers differ.
        """
        example = request.example
        assert example is not None
        seeds = sample_seed(request.seed), sample_seed(request.seed, request.first_sample + index)
        inputs = reward_inputs(self._env.task, "", example)
        row = {"ground_truth": inputs.ground_truth, **inputs.columns, "prompt": inputs.prompt}  # under TRL's names
        try:
            there = await result(self.instances.open(row, seeds))
        except InstanceLost as error:
            return ToolEpisode(self, None, error=str(error))
        if not there.observation:
            return ToolEpisode(self, there.key)
        try:
            return ToolEpisode(self, there.key, self._env.prompt_ids(example, there.observation))
        except UserError as error:  # it is the environment's text, not the user's: it costs the sample
            self.instances.drop(there.key)
            return ToolEpisode(self, None, error=f"what reset returned cannot be said: {error}")


class ToolEpisode:
    """One dialog with tools.

    Graders read its record as ``response.record``: ``messages`` in TRL's form (``role``, ``content``, ``tool_calls`` of
    the policy, ``name`` and ``tool_call_id`` of a tool), ``failed`` (indices of the answers to calls that failed),
    ``tool_calls``, ``tool_errors``, ``ended`` (how), ``reward`` (of ``get_reward``, None without one), ``error`` (why
    the instance was lost, else None) and, if reward functions read it, ``environment`` (its attributes at the end, by
    name). The id of a call is the one that the policy sampled, if every template accepts it, else its number.

    Args:
        responder: shared by all dialogs.
        key: of the instance; None where there is none.
        prompt_ids: of this dialog, where the environment added to its prompt.
        error: why there is none.
    """

    def __init__(
        self,
        responder: ToolResponder,
        key: int | None,
        prompt_ids: tuple[int, ...] | None = None,
        error: str | None = None,
    ) -> None:
        self.prompt_ids = prompt_ids
        self._responder, self._key, self._error = responder, key, error
        self._messages: list[dict[str, Any]] = []
        self._num_parsed = self._num_calls = 0
        self._failed: list[int] = []
        self._ended = ANSWERED if error is None else LOST

    async def answer(self, token_ids: torch.Tensor) -> Messages | None:
        """Return the tools' answers in the order of the calls, errors included; None if the turn calls no tool."""
        calls = self._parse(token_ids)
        if not calls or self._error is not None:
            return None
        self._num_calls += len(calls)
        sound = [(call.name, call.arguments) for call in calls if call.error is None]
        answers: list[Answer] = []
        if sound:
            assert self._key is not None
            try:
                answers = await result(self._responder.instances.call(self._key, sound))
            except InstanceLost as error:
                self._key, self._error, self._ended = None, str(error), LOST
                return None
        left = iter(answers)
        replies: list[dict[str, str]] = []
        for call in calls:
            answer = next(left) if call.error is None else Answer(f"error: {call.error}", is_error=True)
            if answer.is_error:
                self._failed.append(len(self._messages) + len(replies))
            name = call.name or "unknown"
            replies.append({"role": "tool", "name": name, "tool_call_id": call.id, "content": answer.content})
        self._messages += replies
        return replies

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None:
        """Submit the instance for its reward, close it, and return the record."""
        calls = () if unanswered is None else self._parse(unanswered)
        if truncated:
            self._ended = TRUNCATED
        elif calls:
            self._ended = TURNS
        key, self._key = self._key, None
        reward = state = None
        if key is not None:
            instances = self._responder.instances
            seen = instances.state(key) if self._responder.reads_environments else None
            rewarded = instances.finish(key)
            try:
                known = None if seen is None else await result(seen)
                reward, state = await result(rewarded), known
            except InstanceLost as error:
                self._error = str(error)
        counts = {"tool_calls": self._num_calls, "tool_errors": len(self._failed)}
        ended = {"ended": self._ended, "reward": reward, "error": self._error}
        environment = {} if state is None else {"environment": state}
        return {"messages": self._messages, "failed": self._failed, **counts, **ended, **environment}

    def leave(self) -> None:
        """Drop the instance."""
        key, self._key = self._key, None
        if key is not None:
            self._responder.instances.drop(key)

    def _parse(self, token_ids: torch.Tensor) -> tuple[ToolCall, ...]:
        turn = self._responder.reader.read(token_ids.tolist())
        calls = tuple(
            replace(call, id=call.id or call_id(number)) for number, call in enumerate(turn.calls, self._num_parsed)
        )
        self._num_parsed += len(calls)
        self._messages.append(message_of(turn.content, calls))
        return calls


@dataclass(frozen=True)
class Rules:
    """The responder of a dialog, and its limits: ``max_steps`` turns, ``max_model_len`` tokens with the prompt."""

    responder: Responder
    turns: TurnTokens
    max_steps: int
    max_model_len: int


class Dialog:
    """One sample of a group: its turns so far.

    Args:
        episode: the environment's side.
        prompt_ids: of the dialog.
        rules: its limits. Without ``episode`` and ``rules`` it only stores turns.

    Attributes:
        ids: the prompt and all turns: what the policy's next turn continues.
        is_over: there is no further turn, and ``record`` is set.
    """

    def __init__(self, episode: Any, prompt_ids: Sequence[int], rules: Any = None):
        self.episode, self.prompt_ids, self._rules = episode, tuple(prompt_ids), rules
        self.ids = [*prompt_ids]
        self.num_turns = 0
        self.last = torch.zeros(0, dtype=torch.int64)  # what the policy said last
        self.truncated = self.is_over = False
        self.record: Mapping[str, Any] | None = None
        self._parts: list[Sample] = []

    async def follow(self, said: Sample, ends: Callable[[], object] = lambda: None) -> None:
        """Add a turn of the policy and its answer, or end the dialog.

        Args:
            said: the turn.
            ends: called as soon as no further turn will follow, before the record is complete.
        """
        self.add_turn(said)
        unanswered: torch.Tensor | None = self.last
        if not self.truncated and self.num_turns < self._rules.max_steps:
            unanswered, replies = None, await self.episode.answer(self.last)
            if replies is not None:
                between = self._rules.turns.ids(replies, self.ids[-1])
                self.truncated = len(self.ids) + len(between) >= self._rules.max_model_len
                if not self.truncated:
                    self.add_observation(between)
                    return
        ends()
        self.record = await self.episode.end(unanswered, self.truncated)
        self.is_over = True

    def add_turn(self, said: Sample) -> None:
        """Add a turn of the policy."""
        self._parts.append(replace(said, assistant_mask=torch.ones(len(said.token_ids), dtype=torch.bool)))
        self.ids += said.token_ids.tolist()
        self.num_turns += 1
        self.last, self.truncated = said.token_ids, said.truncated

    def add_observation(self, token_ids: Sequence[int]) -> None:
        """Add the tokens between two turns of the policy."""
        self._parts.append(_parse(token_ids))
        self.ids += token_ids

    def sample(self, common: int) -> Sample:
        """Return everything after the first ``common`` tokens of the prompt, which the group's dialogs share.

        A dialog of one turn returns the engine's own sample.
        """
        own = self.prompt_ids[common:]
        if self.num_turns == 1 and not own:
            return replace(self._parts[0], truncated=self.truncated, assistant_mask=None, record=self.record)
        turns = [_parse(own), *self._parts] if own else self._parts
        fields = ("token_ids", "log_probs", "versions", "assistant_mask")
        ids, log_probs, versions, mask = (torch.cat([getattr(turn, name) for turn in turns]) for name in fields)
        return Sample(ids, log_probs, versions, self.truncated, mask, self.record, _joined(turns), turns[-1].text)


def _parse(token_ids: Sequence[int]) -> Sample:
    """Tokens that the policy did not sample."""
    count = len(token_ids)
    heard, nothing = torch.tensor(token_ids, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    return Sample(heard, torch.zeros(count), torch.full((count,), -1), False, nothing)


def _joined(turns: Sequence[Sample]) -> SamplingSupport | None:
    """Join the sampling supports of the policy's turns; inserted tokens have none."""
    supports = [turn.support for turn in turns]
    if not any(supports):
        return None
    ids, counts = [], []
    for turn, support in zip(turns, supports):
        ids += [] if support is None else [support.ids]
        counts.append(torch.zeros(len(turn.token_ids), dtype=torch.int32) if support is None else support.counts)
    return SamplingSupport(torch.cat(ids), torch.cat(counts))


class TurnOrder:
    """Submit turns to an engine in an order that does not depend on when answers arrive.

    Rows of :class:`~sota_grpo.engines.transformers_engine.TransformersEngine` depend, in the last bits, on the other
    rows of the batch. So turns are submitted in the order in which the turns before them ended, and none of them while
    an answer is pending and the engine would begin a batch without it.

    Args:
        may_start: ``may_start(n)`` is whether the engine would begin a batch if ``n`` turns were submitted now; None:
            its rows do not depend on each other, and each turn is submitted at once.

    >>> order, asked = TurnOrder(lambda n: n >= 2), []
    >>> first, second = order.expect(), order.expect()
    >>> order.enqueue(second, lambda: asked.append("second")), order.release(), asked
    (None, False, [])
    >>> order.enqueue(first, lambda: asked.append("first")), order.release(), asked
    (None, True, ['first', 'second'])
    """

    def __init__(self, may_start: Callable[[int], bool] | None):
        self._may_start = may_start
        self._numbers = itertools.count()
        self._turns: dict[int, Callable[[], None] | None] = {}  # None: not yet known
        self._num_expected = 0  # since the last release, those that were dropped included
        self._lock = threading.RLock()  # a cancel comes in the middle of anything

    def expect(self) -> int:
        """Return the number of a turn that may follow; called by the thread that drives the engine."""
        number = next(self._numbers)
        if self._may_start is not None:
            with self._lock:
                self._turns[number] = None
                self._num_expected += 1
        return number

    def enqueue(self, number: int, submit: Callable[[], None]) -> None:
        """Call ``submit``, which must not raise, for the turn now or in :meth:`release`."""
        if self._may_start is None:
            submit()
            return
        with self._lock:
            if number in self._turns:
                self._turns[number] = submit

    def drop(self, number: int) -> None:
        """Cancel the turn."""
        with self._lock:
            self._turns.pop(number, None)

    def release(self) -> bool:
        """Submit the turns that are due, before a step of the engine; False if one has to be waited for first."""
        if self._may_start is None or not self._may_start(self._num_expected):
            return True
        with self._lock:
            if None in self._turns.values():
                return False
            turns, self._turns, self._num_expected = self._turns, {}, 0
        for submit in filter(None, turns.values()):
            submit()
        return True


class _Turn(Future[Future[GroupOutput]]):
    """The engine's future of a turn of the policy, which is requested once the dialog waits for it.

    So the thread that submits the turn has the dialog wait for the engine before its next step, and the thread that
    resolves it announces before the step after whether another turn may follow.
    """

    def __init__(self, request: Callable[[_Turn], None]):
        super().__init__()
        self._request = request

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        super().add_done_callback(function)
        self._request(self)


class GroupDialogs(Future[GroupOutput]):
    """The future of a group whose dialogs are sampled independently of each other, until the last one has ended.

    Every turn of every sample is a request of its own: the first turn of sample ``i`` has the random stream that it
    would have in a request for the group, turn ``t >= 2`` the seed ``sample_seed(request.seed, i, t)``. A dialog is a
    coroutine, which continues in the thread that resolves its future. The result is the group's output, or the first
    failure of the engine, the responder or the chat template. :meth:`cancel` cancels the pending requests.

    Args:
        request: the group, with its example.
        rules: of its dialogs.
        submit: submits a request to the engine.
        order: of the submissions.
    """

    def __init__(self, request: GroupRequest, rules: Rules, submit: Submit, order: TurnOrder):
        super().__init__()
        self._request, self._rules, self._submit, self._order = request, rules, submit, order
        self._turns: dict[int, int] = {}  # of each sample, the number of the turn that may be next
        self._dialogs: dict[int, Dialog] = {}
        self._lock = threading.RLock()  # futures resolve on several threads; a cancel comes in the middle of anything
        self._num_open = request.num_samples
        self._last_turns: dict[int, Future[GroupOutput]] = {}  # of each sample, its last turn
        self._finished = False

    def begin(self) -> None:
        """Open the dialogs, and submit the first turns of those that open at once.

        Raises:
            ValueError: the engine refuses them.
        """
        try:
            for index in range(self._request.num_samples):
                self._expect(index)
                dialog = Task(self._to_its_end(index), partial(self._go_on, index))
                if dialog.done() and index not in self._last_turns:
                    dialog.result()
        except BaseException:
            self.cancel()  # and with it those that it did not refuse
            raise

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._leave()
        return cancelled

    async def _to_its_end(self, index: int) -> None:
        """One sample; the last dialog that ends, or the first that fails, resolves the group."""
        try:
            await self._dialog(index)
        except GeneratorExit:  # it is dropped
            raise
        except BaseException as error:
            self._ended(error)
            raise
        self._ended(None)

    async def _dialog(self, index: int) -> None:
        """One sample, from the opening of its dialog to its record."""
        episode = await self._rules.responder.begin(self._request, index)
        prompt_ids = self._request.prompt_ids if episode.prompt_ids is None else episode.prompt_ids
        dialog = Dialog(episode, prompt_ids, self._rules)
        with self._lock:
            self._dialogs[index] = dialog
        if self._is_left():  # meanwhile
            episode.leave()
            return
        request = replace(self._request, prompt_ids=prompt_ids, num_samples=1, first_sample=index, example=None)
        while True:
            future = await result(_Turn(partial(self._request_turn, index, request)))
            (said,) = (await result(future)).samples
            await dialog.follow(said, partial(self._order.drop, self._expect(index)))
            if dialog.is_over:
                return
            seed = sample_seed(self._request.seed, index, dialog.num_turns + 1)
            request = GroupRequest(self._request.group_id, tuple(dialog.ids), num_samples=1, seed=seed)

    def _go_on(self, index: int, dialog: Callable[[], object]) -> None:
        """Continue a dialog, unless the request was cancelled; one that opens later is abandoned."""
        if index not in self._dialogs or not self._is_left():
            dialog()

    def _request_turn(self, index: int, request: GroupRequest, turn: _Turn) -> None:
        def submit() -> None:
            try:
                self._last_turns[index] = future = self._submit(request)
            except BaseException as error:  # of one dialog
                turn.set_exception(error)
                return
            if self._is_left():  # meanwhile
                future.cancel()
            turn.set_result(future)

        self._order.enqueue(self._turns[index], submit)

    def _is_left(self) -> bool:
        return self._finished or self.cancelled()

    def _expect(self, index: int) -> int:
        """Take the number of a sample's next turn."""
        self._turns[index] = number = self._order.expect()
        if self._is_left():  # meanwhile
            self._order.drop(number)
        return number

    def _ended(self, error: BaseException | None) -> None:
        """Resolve the group, once: with its first failure, or when all dialogs are over."""
        with self._lock:
            self._num_open -= 1
            if self._finished or (self._num_open and error is None):
                return
            self._finished = True
        if not self.set_running_or_notify_cancel():
            return
        if error is None:
            resolve(self, self._output)
        else:
            self.set_exception(error)
        if self.exception() is not None:
            self._leave()

    def _leave(self) -> None:
        """Cancel the pending requests, and leave the episodes."""
        for future in list(self._last_turns.values()):  # nothing happens to those that are done
            future.cancel()
        for number in list(self._turns.values()):
            self._order.drop(number)
        with self._lock:
            episodes = [dialog.episode for dialog in self._dialogs.values()]
        for episode in episodes:
            episode.leave()

    def _output(self) -> GroupOutput:
        dialogs = [dialog for _, dialog in sorted(self._dialogs.items())]
        common = num_shared([dialog.prompt_ids for dialog in dialogs])  # environments' observations differ after it
        samples = tuple(dialog.sample(common) for dialog in dialogs)
        return GroupOutput(self._request.group_id, samples, dialogs[0].prompt_ids[:common])


class DialogEngine(Streams):
    """An engine whose samples are dialogs: each turn of the policy is answered, and the policy continues.

    A sample holds everything after the prompt as it was sampled and inserted; nothing is tokenised again. On the tokens
    of user and tool turns ``assistant_mask`` is False, log-probs are 0, versions -1. A dialog ends when the responder
    has no answer, with a truncated turn, with turn ``max_steps``, or when the context has no room for the answer and
    one more token (truncated too). ``sampling.max_tokens`` bounds one turn. If a responder adds to the prompts, their
    common beginning is the group's prompt, and the rest precedes the first turn of each sample, masked like other
    turns. Weights may be pushed during dialogs: every token keeps the version that sampled it.

    A group is finished when all its dialogs have ended; no dialog waits for a sibling. A failure of the engine or of
    the responder, which have deadlines of their own, fails the group. The random numbers of turn ``t`` of sample ``i``
    derive from ``(request.seed, i, t)``, so a dialog depends on no other, up to the rounding of the engine's batches.

    Args:
        engine: samples single turns, and the groups of tasks without rules.
        rules: by the name of its task in a mixture; without a mixture under None.

    Example, with a grader that rejects every turn and answers of two tokens between the turns of the policy:

    >>> from types import SimpleNamespace
    >>> from sota_grpo.engines.scripted import ScriptedEngine
    >>> from sota_grpo.rl.records import Example, Score
    >>> graded = Future()
    >>> graded.set_result([Score({}, False, reply={"role": "user", "content": "Again?"})])
    >>> grader = SimpleNamespace(scores=lambda pairs: graded)
    >>> turns = SimpleNamespace(text=str, ids=lambda replies, last_id: (8, 9))
    >>> scripted = ScriptedEngine(lambda request, sample, version: [5])
    >>> engine = DialogEngine(scripted, {None: Rules(GradedTurns(grader, turns), turns, 2, scripted.max_model_len)})
    >>> request = GroupRequest(0, (1, 2), num_samples=1, seed=0, example=Example("?", "!"))
    >>> ((sample,),) = [output.samples for output in engine.generate([request], Sampling(max_tokens=4))]
    >>> sample.token_ids.tolist(), sample.assistant_mask.int().tolist()
    ([5, 0, 8, 9, 5, 0], [1, 1, 0, 0, 1, 1])
    >>> sample.record
    {'replies': [[{'role': 'user', 'content': 'Again?'}]]}
    """

    def __init__(self, engine: Engine, rules: Mapping[str | None, Rules]):
        self.engine: Any = engine
        self.name, self.max_model_len, self.stepwise = engine.name, engine.max_model_len, engine.stepwise
        self._rules, self._order = dict(rules), TurnOrder(getattr(engine, "may_start", None))

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Begin the group's dialogs.

        Raises:
            ValueError: the prompt leaves no room for a response, or the request has no example.
        """
        self._check([request])
        assert request.example is not None
        rules = self._rules.get(task_of_example(request.example.extra))
        if rules is None:
            return self.engine.submit(replace(request, example=None), sampling)
        group = GroupDialogs(request, rules, partial(self.engine.submit, sampling=sampling), self._order)
        group.begin()
        return group

    def advance(self) -> bool:
        """Step the engine, unless :class:`TurnOrder` has to wait for an answer first."""
        return self._order.release() and self.engine.advance()

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, as :meth:`~sota_grpo.engines.stepping.Streams.generate` does.

        Raises:
            ValueError: a prompt leaves no room for a response, or a request has no example; raised at the call.
        """
        self._check(requests)
        return super().generate(requests, sampling)

    def _check(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            if request.example is None:
                raise ValueError(f"Group {request.group_id} has no example to grade its dialogs against; give it one.")

    def __getattr__(self, name: str) -> Any:
        """Return the engine's attribute: a push of weights, sleep, wake and close are the engine's own."""
        if name == "engine":  # before __init__
            raise AttributeError(name)
        return getattr(self.engine, name)
