"""Multi-turn dialogs over any engine: a task, tools or an environment answers each turn of the policy.

The tokens inserted between two turns of the policy are the end of its turn, the answer, and the start of its next turn.
If the policy sampled the ``<|im_end|>`` of its turn, a ChatML template inserts the reply ``Think again.`` as::

    sampled      ...  18  <|im_end|>
    inserted     \\n  <|im_start|>user  \\n  Think again.  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      I see, it is 19  <|im_end|>

A tool's result is a turn of the role ``tool``; a policy turn without a tool call ends the dialog::

    sampled      <tool_call>{"name": "multiply", "arguments": {"a": 347, "b": 28}}</tool_call> <|im_end|>
    inserted     \\n  <|im_start|>tool  \\n  9716  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      It is 9716. <|im_end|>

Sampled tokens are never changed, even if the template would render an earlier turn otherwise (without its thinking).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Task, Wrapped, result
from sota_grpo.envs.chat_tokens import Messages, TurnTokens, num_shared
from sota_grpo.envs.prompts import PromptSource
from sota_grpo.envs.tool_calls import ToolCallReader, message_of
from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import Grader
from sota_grpo.rl.records import (
    TASK,
    TURNS,
    Example,
    GroupOutput,
    GroupRequest,
    Sample,
    Sampling,
    SamplingSupport,
    sample_seed,
)
from sota_grpo.rl.tool_schemas import ToolCall, call_id
from sota_grpo.tasks.wrappers import row_of
from sota_grpo.workers.base import resolve
from sota_grpo.workers.instances import Answer, InstanceLost, Instances

Submit = Callable[[GroupRequest], Future[GroupOutput]]


class Episode(Protocol):
    """The environment of one dialog. ``answer`` and ``end`` run one at a time, in any thread.

    The coroutines may wait for futures (:func:`~sota_grpo.engines.stepping.result`). ``prompt_ids`` is the prompt of
    this dialog; None: the group's. ``answer`` takes the token ids of a policy turn and returns the messages that answer
    the turn, or None to end the dialog. ``end`` takes the last turn's token ids if it got no answer (it was truncated
    or the last allowed), else None; and whether the dialog was truncated. It returns the ``record`` of the
    :class:`~sota_grpo.rl.records.Sample`, or None. ``leave`` abandons the dialog: it may be called in any thread, while
    ``answer`` waits, and after ``end``.
    """

    prompt_ids: tuple[int, ...] | None

    async def answer(self, token_ids: torch.Tensor) -> Messages | None: ...

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None: ...

    def leave(self) -> None: ...


class Responder(Protocol):
    """Opens the episodes that answer the policy: ``begin`` opens that of a request's sample ``index``, from 0."""

    async def begin(self, request: GroupRequest, index: int) -> Episode: ...


class GradedTurns:
    """Grades each policy turn and answers with the score's ``reply``; an error or no reply ends the dialog."""

    def __init__(self, grader: Grader, turns: TurnTokens):
        self.grader, self.turns = grader, turns

    async def begin(self, request: GroupRequest, index: int) -> Episode:
        return GradedEpisode(self, example_of(request))


class GradedEpisode:
    """One dialog of :class:`GradedTurns`; its record has ``replies``, one list for each answered turn, or is None."""

    prompt_ids: tuple[int, ...] | None = None

    def __init__(self, responder: GradedTurns, example: Example):
        self._responder, self._example = responder, example
        self._replies: list[Messages] = []

    async def answer(self, token_ids: torch.Tensor) -> Messages | None:
        text = self._responder.turns.text(token_ids)
        (score,) = await result(self._responder.grader.scores([(text, self._example)]))
        if score.reply is None or score.error is not None:
            return None
        self._replies.append([score.reply])
        return self._replies[-1]

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None:
        return {"replies": self._replies} if self._replies else None

    def leave(self) -> None: ...


#: How a dialog ended, if not by :data:`~sota_grpo.rl.records.TURNS`: final answer, truncation, or lost instance.
ANSWERED, TRUNCATED, LOST = "answer", "truncated", "lost"


class ToolResponder:
    """A responder that answers turns with tools: each sample has an instance (:mod:`sota_grpo.workers.instances`).

    Tool calls are parsed from the token ids that the policy sampled. If an instance fails or times out, only the dialog
    of that sample ends, and its record has the ``error``. If no worker can be started, the group fails. UserError if
    the chat template does not support tools, or there are no tools.

    Args:
        env: source of the prompts, which describe the tools.
        instances: pool of instances of the tools or of their environment, whose ``schemas`` are known.
        template_kwargs: further arguments of ``apply_chat_template``.
    """

    def __init__(
        self, env: PromptSource, instances: Instances, template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._env, self.instances = env, instances
        self.reader = ToolCallReader(env.tokenizer, instances.schemas, template_kwargs)
        #: Whether records hold the final attributes of the environment.
        self.reads_environments = getattr(env.task, "reads_environments", False)

    async def begin(self, request: GroupRequest, index: int) -> Episode:
        """Open and reset an instance; return the episode of the dialog.

        The samples of a group reset with one seed, to start in the same state; their later calls differ in seed.
        """
        example = example_of(request)
        seeds = sample_seed(request.seed), sample_seed(request.seed, request.first_sample + index)
        try:
            there = await result(self.instances.open(row_of(self._env.task, example), seeds))
        except InstanceLost as error:
            return ToolEpisode(self, None, error=str(error))
        if not there.observation:
            return ToolEpisode(self, there.key)
        try:
            return ToolEpisode(self, there.key, self._env.prompt_ids(example, there.observation))
        except UserError as error:  # bad text from the environment ends this dialog only
            self.instances.drop(there.key)
            return ToolEpisode(self, None, error=f"the observation that reset returned cannot be rendered: {error}")


class ToolEpisode:
    """The episode of one dialog with tools.

    Graders read its record as ``response.record``: ``messages`` in TRL's form (``role``, ``content``, ``tool_calls`` of
    the policy, ``name`` and ``tool_call_id`` of a tool), ``failed`` (indices of the messages that report a failed
    call), ``tool_calls`` and ``tool_errors`` (counts over the answered turns), ``ended``
    (``answer``, ``truncated``, ``lost`` or ``turns``), ``reward`` (of ``get_reward``, or None), ``error`` (why the
    instance was lost, or None) and, if a reward function reads it, ``environment`` (final attributes by name). A call
    keeps its sampled id if that is nine letters or digits, which every template accepts; else it is ``call00000`` etc.

    Args:
        key: the instance's key; None without an instance.
        prompt_ids: the prompt of this dialog, if the environment added an observation to the group's.
        error: why the instance could not be opened.
    """

    def __init__(
        self,
        responder: ToolResponder,
        key: int | None,
        prompt_ids: tuple[int, ...] | None = None,
        error: str | None = None,
    ) -> None:
        self.prompt_ids, self._responder, self._key = prompt_ids, responder, key
        self._num_parsed = 0
        self._messages: list[dict[str, Any]] = []
        self._failed: list[int] = []
        ended = ANSWERED if error is None else LOST
        self._record: dict[str, Any] = {"messages": self._messages, "failed": self._failed, "tool_calls": 0}
        self._record |= {"tool_errors": 0, "ended": ended, "reward": None, "error": error}

    async def answer(self, token_ids: torch.Tensor) -> Messages | None:
        """Run the turn's tool calls; return one message per call, in order, or None without a call or an instance."""
        calls = self._parse(token_ids)
        if not calls or self._key is None:
            return None
        sound = [(call.name, call.arguments) for call in calls if call.error is None]
        try:
            made = await result(self._responder.instances.call(self._key, sound)) if sound else []
        except InstanceLost as error:
            self._key = None
            self._record |= {"error": str(error), "ended": LOST}
            return None
        self._record["tool_calls"] += len(calls)
        answers, replies = iter(made), list[dict[str, str]]()
        for call in calls:
            answer = next(answers) if call.error is None else Answer(f"error: {call.error}", is_error=True)
            if answer.is_error:
                self._failed.append(len(self._messages) + len(replies))
            name = call.name or "unknown"
            replies.append({"role": "tool", "name": name, "tool_call_id": call.id, "content": answer.content})
        self._messages += replies
        return replies

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None:
        """Get the instance's reward, end the instance and return the record; arguments: :class:`Episode`."""
        calls = () if unanswered is None else self._parse(unanswered)
        if truncated or calls:
            self._record["ended"] = TRUNCATED if truncated else TURNS
        self._record["tool_errors"] = len(self._failed)
        key, self._key = self._key, None
        if key is not None:
            instances = self._responder.instances
            seen = instances.state(key) if self._responder.reads_environments else None
            rewarded = instances.finish(key)
            try:
                state = None if seen is None else await result(seen)
                self._record["reward"] = await result(rewarded)
                self._record |= {} if state is None else {"environment": state}
            except InstanceLost as error:
                self._record["error"] = str(error)
        return self._record

    def leave(self) -> None:
        """Drop the instance without reading its reward; idempotent."""
        key, self._key = self._key, None
        if key is not None:
            self._responder.instances.drop(key)

    def _parse(self, token_ids: torch.Tensor) -> tuple[ToolCall, ...]:
        turn = self._responder.reader.read(token_ids.tolist())
        calls = tuple(replace(call, id=call.id or call_id(at)) for at, call in enumerate(turn.calls, self._num_parsed))
        self._num_parsed += len(calls)
        self._messages.append(message_of(turn.content, calls))
        return calls


@dataclass(frozen=True)
class Rules:
    """Responder, reply tokenizer and limits of a dialog: ``max_steps`` turns, ``max_model_len`` tokens in all."""

    responder: Responder
    turns: TurnTokens
    max_steps: int
    max_model_len: int


class Dialog:
    """State of one sample of a group: the prompt and the turns so far.

    Without ``episode`` and ``rules`` (both None) it only stores turns. ``ids`` are the token ids of the prompt and all
    turns, which the policy's next turn continues. ``is_over``: the dialog has ended, and ``record`` is complete.
    """

    def __init__(self, episode: Any, prompt_ids: Sequence[int], rules: Any = None):
        self.episode, self.prompt_ids, self._rules = episode, tuple(prompt_ids), rules
        self.ids = [*prompt_ids]
        self.num_turns = 0
        self.last = torch.zeros(0, dtype=torch.int64)  # the policy's last turn
        self.truncated = self.is_over = False
        self.record: Mapping[str, Any] | None = None
        self._parts: list[Sample] = []

    async def follow(self, said: Sample, ends: Callable[[], object] = lambda: None) -> None:
        """Add the policy's turn and the episode's answer; end the dialog if the answer is None or does not fit.

        A truncated turn, or turn ``max_steps``, ends the dialog without an answer. ``ends`` is called when the dialog
        ends, before the wait for ``record``.
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
        """Add tokens that were inserted between two turns of the policy."""
        self._parts.append(_inserted(token_ids))
        self.ids += token_ids

    def sample(self, common: int) -> Sample:
        """Return the dialog as one sample: all tokens after the first ``common`` prompt tokens, which the group shares.

        If that is the whole prompt of a one-turn dialog, this is the engine's sample, without a mask, with the record.
        """
        own = self.prompt_ids[common:]
        if self.num_turns == 1 and not own:
            return replace(self._parts[0], truncated=self.truncated, assistant_mask=None, record=self.record)
        turns = [_inserted(own), *self._parts] if own else self._parts
        fields = ("token_ids", "log_probs", "versions", "assistant_mask")
        ids, log_probs, versions, mask = (torch.cat([getattr(turn, name) for turn in turns]) for name in fields)
        return Sample(ids, log_probs, versions, self.truncated, mask, self.record, _joined(turns), turns[-1].text)


def _inserted(token_ids: Sequence[int]) -> Sample:
    """Return inserted tokens, which the policy did not sample, as a :class:`Sample` that is masked everywhere."""
    ids, count = torch.tensor(token_ids, dtype=torch.int64), len(token_ids)
    return Sample(ids, torch.zeros(count), torch.full((count,), -1), False, torch.zeros(count, dtype=torch.bool))


def _joined(turns: Sequence[Sample]) -> SamplingSupport | None:
    """Concatenate the sampling supports of the turns; inserted tokens have count 0. None if no turn has one."""
    if not any(turn.support for turn in turns):
        return None
    none = torch.zeros(0, dtype=torch.int32)
    supports = [turn.support or SamplingSupport(none, none.new_zeros(len(turn.token_ids))) for turn in turns]
    return SamplingSupport(*map(torch.cat, zip(*supports)))


class TurnOrder:
    """Submits turns to an engine in an order that does not depend on how long the answers take.

    The log-probs of :class:`~sota_grpo.engines.transformers_engine.TransformersEngine` depend, in the last bits, on the
    other rows of the batch. So turns are held until the engine would start a batch if all reserved turns were
    submitted. Then the engine waits for the pending answers, and gets the turns in the order of their numbers.

    Args:
        may_start: ``may_start(n)`` returns whether the engine would start a batch if ``n`` turns were submitted now.
            None, for an engine whose rows do not depend on each other: each turn is submitted immediately.

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
        self._turns: dict[int, Callable[[], None] | None] = {}  # None: answer pending
        self._num_expected = 0  # since the last release, dropped turns included
        self._lock = threading.RLock()  # cancel may be called at any point

    def expect(self) -> int:
        """Reserve and return a number for a turn, to enqueue or drop later."""
        number = next(self._numbers)
        if self._may_start is not None:
            with self._lock:
                self._turns[number] = None
                self._num_expected += 1
        return number

    def enqueue(self, number: int, submit: Callable[[], None]) -> None:
        """Call ``submit`` (must not raise): now if ``may_start`` is None, else by :meth:`release` if not dropped."""
        if self._may_start is None:
            submit()
            return
        with self._lock:
            if number in self._turns:
                self._turns[number] = submit

    def drop(self, number: int) -> None:
        """Cancel the reserved turn ``number``; no-op if it was submitted or dropped, or if ``may_start`` is None."""
        with self._lock:
            self._turns.pop(number, None)

    def release(self) -> bool:
        """Submit the enqueued turns if the engine would start a batch with all reserved turns.

        Return False if it would, but the answer before a reserved turn is still pending: call this again before the
        next engine step. Else return True, also if nothing was submitted.
        """
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
    """Future of the engine's future for one policy turn; the turn is requested once the dialog waits for it.

    So the dialog already waits for the engine when the submitting thread takes the next engine step, and the thread
    that resolves the turn reserves a possible next turn before the step after that.
    """

    def __init__(self, request: Callable[[_Turn], None]):
        super().__init__()
        self._request = request

    def add_done_callback(self, function: Callable[[Any], object]) -> None:
        super().add_done_callback(function)
        self._request(self)


def example_of(request: GroupRequest) -> Example:
    """Return the example of a request; ValueError if it has none."""
    if request.example is None:
        raise ValueError(f"Group {request.group_id} has no example for its dialogs or agent; set GroupRequest.example.")
    return request.example


class SampleGroup(Future[GroupOutput]):
    """Future of a group whose samples end independently: it resolves when the last has ended, or the first fails.

    A subclass runs each sample in :meth:`_counted`. It defines ``_output``, which returns the group's output, and
    ``_leave``, which abandons the samples when the group fails or is cancelled.
    """

    _output: Callable[[], GroupOutput]
    _leave: Callable[[], None]

    def __init__(self, num_samples: int):
        super().__init__()
        self._num_open, self._finished = num_samples, False
        self._lock = threading.RLock()  # futures resolve on several threads; cancel may be called at any point

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._leave()
        return cancelled

    async def _counted(self, sample: Coroutine[Any, Any, None]) -> None:
        """Run one sample; resolve the group at the first exception of a sample, or when all samples have ended."""
        try:
            await sample
        except GeneratorExit:  # it is dropped
            raise
        except BaseException as error:
            if self._ends(now=True):
                self.set_exception(error)
                self._leave()
            raise
        if self._ends():
            resolve(self, self._output)
            if self.exception() is not None:
                self._leave()

    def _ends(self, *, now: bool = False) -> bool:
        """Count a sample as ended; return whether the caller must resolve the group: with its last sample, or now."""
        with self._lock:
            self._num_open -= 1
            if self._finished or (self._num_open and not now):
                return False
            self._finished = True
        return self.set_running_or_notify_cancel()


class GroupDialogs(SampleGroup):
    """A group whose dialogs are sampled independently.

    Every turn of every sample is a separate request: the first turn of sample ``i``, counted from
    ``request.first_sample``, has the random stream that it would have in a request for the group; turn ``t >= 2`` has
    the seed ``sample_seed(request.seed, i, t)``. A dialog is a coroutine, which continues in the thread that resolves
    its pending future. The result is the group's output, or the first exception of the engine, the responder or the
    chat template. :meth:`cancel` cancels the pending requests.
    """

    def __init__(self, request: GroupRequest, rules: Rules, submit: Submit, order: TurnOrder):
        super().__init__(request.num_samples)
        self._request, self._rules, self._submit, self._order = request, rules, submit, order
        self._turns: dict[int, int] = {}  # by sample: number of the turn that may be next
        self._dialogs: dict[int, Dialog] = {}
        self._last_turns: dict[int, Future[GroupOutput]] = {}  # by sample: its last turn

    def begin(self) -> None:
        """Open the dialogs; each dialog submits its first turn once it is open.

        If a dialog fails at once, for example because the engine rejects its turn, cancel all and raise the exception.
        """
        try:
            for index in range(self._request.num_samples):
                self._expect(index)
                dialog = Task(self._counted(self._dialog(index)), partial(self._go_on, index))
                if dialog.done() and index not in self._last_turns:
                    dialog.result()
        except BaseException:
            self.cancel()  # also the turns that the engine accepted
            raise

    async def _dialog(self, index: int) -> None:
        """Run one dialog, from its opening to its record."""
        episode = await self._rules.responder.begin(self._request, index)
        prompt_ids = self._request.prompt_ids if episode.prompt_ids is None else episode.prompt_ids
        dialog = Dialog(episode, prompt_ids, self._rules)
        with self._lock:
            self._dialogs[index] = dialog
        if self._is_left():  # cancelled in the meantime
            episode.leave()
            return
        sample = self._request.first_sample + index
        request = replace(self._request, prompt_ids=prompt_ids, num_samples=1, first_sample=sample, example=None)
        while True:
            future = await result(_Turn(partial(self._request_turn, index, request)))
            (said,) = (await result(future)).samples
            await dialog.follow(said, partial(self._order.drop, self._expect(index)))
            if dialog.is_over:
                return
            seed = sample_seed(self._request.seed, sample, dialog.num_turns + 1)
            request = GroupRequest(self._request.group_id, tuple(dialog.ids), num_samples=1, seed=seed)

    def _go_on(self, index: int, dialog: Callable[[], object]) -> None:
        """Continue a dialog unless the request was cancelled; a dialog that opens after that abandons its episode."""
        if index not in self._dialogs or not self._is_left():
            dialog()

    def _request_turn(self, index: int, request: GroupRequest, turn: _Turn) -> None:
        def submit() -> None:
            try:
                self._last_turns[index] = future = self._submit(request)
            except BaseException as error:  # fails this dialog
                turn.set_exception(error)
                return
            if self._is_left():  # meanwhile
                future.cancel()
            turn.set_result(future)

        self._order.enqueue(self._turns[index], submit)

    def _is_left(self) -> bool:
        return self._finished or self.cancelled()

    def _expect(self, index: int) -> int:
        """Reserve and return the number of a sample's next turn."""
        self._turns[index] = number = self._order.expect()
        if self._is_left():  # meanwhile
            self._order.drop(number)
        return number

    def _leave(self) -> None:
        """Cancel the pending requests, and abandon the episodes."""
        for future in list(self._last_turns.values()):  # no effect on finished ones
            future.cancel()
        for number in list(self._turns.values()):
            self._order.drop(number)
        with self._lock:
            episodes = [dialog.episode for dialog in self._dialogs.values()]
        for episode in episodes:
            episode.leave()

    def _output(self) -> GroupOutput:
        dialogs = [dialog for _, dialog in sorted(self._dialogs.items())]
        common = num_shared([dialog.prompt_ids for dialog in dialogs])  # observations follow it
        samples = tuple(dialog.sample(common) for dialog in dialogs)
        return GroupOutput(self._request.group_id, samples, dialogs[0].prompt_ids[:common])


class DialogEngine(Wrapped):
    """An engine whose samples are multi-turn dialogs: each policy turn is answered, and the policy continues.

    A sample holds all tokens after the prompt as they were sampled and inserted; nothing is tokenised again. On the
    tokens of user and tool turns ``assistant_mask`` is False, log-probs are 0, versions -1. A dialog ends after a turn
    that the responder does not answer, a truncated turn, or turn ``max_steps``; or, truncated, if the context has no
    room for the answer and one more token. ``sampling.max_tokens`` limits one turn. If a responder adds to the prompts,
    their common prefix is the group's prompt, and each sample begins with the other tokens of its own prompt, masked
    like inserted tokens. Weights may be updated during dialogs: each token keeps the version that sampled it.

    A group is finished when all its dialogs have ended; no dialog waits for a sibling. An exception of the engine or
    of the responder, which enforce their deadlines, fails the group. The random numbers of turn ``t`` of sample ``i``
    derive from ``(request.seed, i, t)``, so dialogs do not affect each other, up to rounding in the engine's batches.

    Args:
        engine: samples single turns; groups of tasks without rules are passed on to it.
        rules: :class:`Rules` by task name in a mixture; without a mixture under the key None.

    Example: the grader rejects every turn, and each answer is two tokens:

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
        super().__init__(engine)
        self._rules, self._order = dict(rules), TurnOrder(getattr(engine, "may_start", None))

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Start the group's dialogs; return the future of the group.

        ValueError without an example or, at once or in the future, if the prompt leaves no room for a response.
        """
        rules = self._rules.get(example_of(request).extra.get(TASK))
        if rules is None:
            return self.engine.submit(replace(request, example=None), sampling)
        group = GroupDialogs(request, rules, partial(self.engine.submit, sampling=sampling), self._order)
        group.begin()
        return group

    def advance(self) -> bool:
        """Run one engine step, unless :class:`TurnOrder` must wait for an answer; return False if nothing was done."""
        return self._order.release() and super().advance()

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, as :meth:`~sota_grpo.engines.stepping.Streams.generate` does.

        ValueError at the call if a prompt leaves no room for a response, or a request has no example.
        """
        for request in requests:
            example_of(request)
        return super().generate(requests, sampling)
