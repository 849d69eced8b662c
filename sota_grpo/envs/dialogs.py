"""Dialogs of several turns over any engine: the policy speaks, is answered by its partner, and speaks again.

Between two turns of the policy stand the end of its turn, what it is answered, and the start of its next turn. In a
ChatML template, after the policy ended its turn with ``<|im_end|>`` itself, the reply ``Think again.`` is::

    sampled      ...  18  <|im_end|>
    inserted     \\n  <|im_start|>user  \\n  Think again.  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      I see, it is 19  <|im_end|>

What was sampled stays as it is, also where a template would render an earlier turn differently (without its thinking).
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Streams, Task, result
from sota_grpo.envs.chat_tokens import ChatTokens, Messages, num_shared
from sota_grpo.errors import UserError
from sota_grpo.policy.end_tokens import response_text
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rewards.grading import Grader
from sota_grpo.rl.records import (
    Example,
    GroupOutput,
    GroupRequest,
    KeptTokens,
    Sample,
    SampledText,
    Sampling,
    sample_seed,
    task_of_example,
)
from sota_grpo.rl.tool_schemas import call_id
from sota_grpo.workers.base import resolve

Ask = Callable[[GroupRequest], Future[GroupOutput]]

logger = logging.getLogger(__name__)

_EARLIER = "earlierassistantturn"  # plain letters, which every template and every filter in it leaves alone
_PROBE = "laterturn"


class TurnTokens:
    """Reads the turns of a policy and writes the turns that answer them, as the chat template frames them.

    Without a chat template a reply stands between blank lines, as the turns of a prompt do. A template that cannot
    render the role ``tool`` is given a user turn instead, which is said once in the log.

    Args:
        tokenizer: of the policy.
        template_kwargs: further arguments of ``apply_chat_template``.

    >>> from sota_grpo.policy.load import load_tokenizer
    >>> tokenizer = load_tokenizer("tiny")
    >>> tokenizer.decode(TurnTokens(tokenizer).ids([{"role": "user", "content": "Again?"}], tokenizer.eos_token_id))
    '\\n<|im_start|>user\\nAgain?<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat = ChatTokens(tokenizer, self._rendered)
        self._reply_ids = functools.lru_cache(maxsize=1024)(self._tokenised)
        self._role_of = functools.cache(self._supported)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tokenizer, self._template_kwargs)  # without what is remembered

    def text(self, token_ids: torch.Tensor) -> str:
        """One turn of the policy ``[R]`` as its grader reads it: end tokens and padding left out."""
        return response_text(self._tokenizer, token_ids)

    def ids(self, replies: Messages, last_id: int) -> tuple[int, ...]:
        """What stands between the policy's last token and its next turn.

        The end-of-turn token with which the template begins is left out where the policy has sampled it.

        Args:
            replies: messages with ``role`` (``user`` or ``tool``), ``content`` and perhaps ``name`` and
                ``tool_call_id``. What they say may repeat what a model wrote: names of special tokens in it are text
                (:class:`~sota_grpo.envs.chat_tokens.ChatTokens`).
            last_id: last token that the policy sampled.

        Raises:
            UserError: the chat template cannot render a conversation of several turns.
        """
        ids = self._reply_ids(tuple(tuple(reply.items()) for reply in replies))
        return ids[1:] if ids and ids[0] == last_id else ids

    def _tokenised(self, replies: tuple[tuple[tuple[str, str], ...], ...]) -> tuple[int, ...]:
        messages = [dict(items) for items in replies]
        for number, message in enumerate(messages):
            if message["role"] not in ("user", "tool"):
                raise ValueError(f"a reply has the role {message['role']!r}; use user or tool.")
            if self._has_template:
                message["role"] = self._role_of(message["role"])
            if message["role"] == "tool":
                message.setdefault("tool_call_id", call_id(number))  # of a task's own, that no call has asked for
        return self._chat.ids(messages)

    def _supported(self, role: str) -> str:
        """``role``, or ``user`` where the template does not show what a ``tool`` says."""
        try:
            of_tool = {"name": _EARLIER, "tool_call_id": call_id(0)} if role == "tool" else {}
            if _PROBE in self._rendered([{"role": role, "content": _PROBE, **of_tool}]):
                return role
            reason = "leaves it out"
        except Exception as error:  # a template is a program that came with the model: it raises what it likes
            reason = f"{type(error).__name__}: {error}"
        if role == "tool":
            logger.info("The chat template has no tool turns (%s): what a tool says is a user turn.", reason)
            return self._role_of("user")
        raise UserError(
            f"The chat template cannot render a user turn after an assistant turn ({reason}); use env.max_steps=1, or "
            "a model whose template is made for conversations."
        )

    def _rendered(self, replies: Messages) -> str:
        if not self._has_template:
            return "".join(f"\n\n{reply['content']}\n\n" for reply in replies)
        before = [{"role": "user", "content": _PROBE}, {"role": "assistant", "content": _EARLIER}]
        text = self._tokenizer.apply_chat_template(
            [*before, *replies], tokenize=False, add_generation_prompt=True, **self._template_kwargs
        )
        return text.partition(_EARLIER)[2]


class Talk(Protocol):
    """The partner's side of one dialog; its methods are called one after the other, from any thread.

    The coroutines may wait for futures (:func:`~sota_grpo.engines.stepping.result`). ``prompt_ids`` is the prompt of
    this dialog, None where it is the group's. ``answer`` takes the ids of a turn of the policy and gives the messages
    that answer it, None where the dialog is over. ``end`` takes the last turn where it was not answered (it was
    truncated, or the last that is allowed) and whether the dialog was cut for length, and gives its record
    (:class:`~sota_grpo.rl.records.Sample`). ``leave`` is called instead after the request was cancelled.
    """

    prompt_ids: tuple[int, ...] | None

    async def answer(self, said: torch.Tensor) -> Messages | None: ...

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None: ...

    def leave(self) -> None: ...


class Partner(Protocol):
    """Whom the policy talks with; ``begin`` opens the dialog of sample ``index`` of a group."""

    async def begin(self, request: GroupRequest, index: int) -> Talk: ...


class GradedTurns:
    """A partner that has every turn graded: the score's reply is its answer; without one the dialog is over.

    Args:
        grader: of the task.
        turns: reads the turns.
    """

    def __init__(self, grader: Grader, turns: TurnTokens):
        self._grader, self._turns = grader, turns

    async def begin(self, request: GroupRequest, index: int) -> Talk:
        """At once; nothing but the example is remembered."""
        assert request.example is not None
        return GradedTalk(self._grader, self._turns, request.example)


class GradedTalk:
    """One dialog of :class:`GradedTurns`."""

    prompt_ids: tuple[int, ...] | None = None

    def __init__(self, grader: Grader, turns: TurnTokens, example: Example):
        self._grader, self._turns, self._example = grader, turns, example
        self._replies: list[Messages] = []

    async def answer(self, said: torch.Tensor) -> Messages | None:
        text = SampledText(self._turns.text(said), said.tolist())
        (score,) = await result(self._grader.scores([(text, self._example)]))
        if score.reply is None or score.error is not None:
            return None
        self._replies.append([score.reply])
        return self._replies[-1]

    async def end(self, unanswered: torch.Tensor | None, truncated: bool) -> Mapping[str, Any] | None:
        return {"replies": self._replies} if self._replies else None

    def leave(self) -> None: ...


@dataclass(frozen=True)
class Rules:
    """How a dialog goes on: ``max_steps`` turns of the policy at most, ``max_model_len`` tokens, prompt included."""

    partner: Partner
    turns: TurnTokens
    max_steps: int
    max_model_len: int


class Dialog:
    """One sample of a group: what the policy and the others have said so far.

    Args:
        talk: the partner's side.
        prompt_ids: of the dialog.
        rules: when it goes on, and with what. Without both it only keeps what is added.

    Attributes:
        ids: all that was said, the prompt included; what the policy speaks after.
        is_over: there is no further turn, and ``record`` is the partner's.
    """

    def __init__(self, talk: Any, prompt_ids: Sequence[int], rules: Any = None):
        self.talk, self.prompt_ids, self._rules = talk, tuple(prompt_ids), rules
        self.ids = [*prompt_ids]
        self.num_turns = 0
        self.last = torch.zeros(0, dtype=torch.int64)  # what the policy said last
        self.truncated = self.is_over = False
        self.record: Mapping[str, Any] | None = None
        self._parts: list[Sample] = []

    async def follow(self, said: Sample, ends: Callable[[], object] = lambda: None) -> None:
        """Add a turn of the policy and what answers it, or the record of the dialog that :attr:`is_over` then.

        Args:
            said: the turn.
            ends: called as soon as it is known that no turn follows, before the partner has said what came of it.
        """
        self.speak(said)
        unanswered: torch.Tensor | None = self.last
        if not self.truncated and self.num_turns < self._rules.max_steps:
            unanswered, replies = None, await self.talk.answer(self.last)
            if replies is not None:
                between = self._rules.turns.ids(replies, self.ids[-1])
                self.truncated = len(self.ids) + len(between) >= self._rules.max_model_len
                if not self.truncated:
                    self.hear(between)
                    return
        ends()
        self.record = await self.talk.end(unanswered, self.truncated)
        self.is_over = True

    def speak(self, said: Sample) -> None:
        """Add a turn of the policy."""
        self._parts.append(replace(said, assistant_mask=torch.ones(len(said.token_ids), dtype=torch.bool)))
        self.ids += said.token_ids.tolist()
        self.num_turns += 1
        self.last, self.truncated = said.token_ids, said.truncated

    def hear(self, token_ids: Sequence[int]) -> None:
        """Add what stands between two turns of the policy."""
        self._parts.append(_heard(token_ids))
        self.ids += token_ids

    def sample(self, common: int) -> Sample:
        """All that follows the first ``common`` tokens of the prompt, which the group's dialogs share.

        In a dialog of one turn that is what the engine gave.
        """
        own = self.prompt_ids[common:]
        if self.num_turns == 1 and not own:
            return replace(self._parts[0], truncated=self.truncated, assistant_mask=None, record=self.record)
        turns = [_heard(own), *self._parts] if own else self._parts
        fields = ("token_ids", "log_probs", "versions", "assistant_mask")
        ids, log_probs, versions, mask = (torch.cat([getattr(turn, name) for turn in turns]) for name in fields)
        return Sample(ids, log_probs, versions, self.truncated, mask, self.record, _joined(turns), turns[-1].text)


def _heard(token_ids: Sequence[int]) -> Sample:
    """Tokens that the policy did not sample."""
    count = len(token_ids)
    heard, nothing = torch.tensor(token_ids, dtype=torch.int64), torch.zeros(count, dtype=torch.bool)
    return Sample(heard, torch.zeros(count), torch.full((count,), -1), False, nothing)


def _joined(turns: Sequence[Sample]) -> KeptTokens | None:
    """The kept sets of all parts, where the policy's have some; what others said has none."""
    known = [turn.kept for turn in turns]
    if not any(known):
        return None
    ids, counts = [], []
    for turn, kept in zip(turns, known):
        ids += [] if kept is None else [kept.ids]
        counts.append(torch.zeros(len(turn.token_ids), dtype=torch.int32) if kept is None else kept.counts)
    return KeptTokens(torch.cat(ids), torch.cat(counts))


class TurnOrder:
    """The order in which an engine is asked for turns; no moment at which an answer comes is in it.

    What rows of :class:`~sota_grpo.engines.transformers_engine.TransformersEngine` compute differs, in the last bits,
    with the rows beside them. So turns are asked for in the order in which those before them ended, and none of them
    while an answer is missing without which the engine would begin a batch.

    Args:
        may_start: ``may_start(n)`` is whether the engine would begin anything if it were asked for ``n`` turns now;
            None: its rows do not depend on each other, and it is asked for each turn at once.

    >>> order, asked = TurnOrder(lambda n: n >= 2), []
    >>> first, second = order.expect(), order.expect()
    >>> order.ask(second, lambda: asked.append("second")), order.release(), asked
    (None, False, [])
    >>> order.ask(first, lambda: asked.append("first")), order.release(), asked
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

    def ask(self, number: int, submit: Callable[[], None]) -> None:
        """The turn follows: ``submit`` asks the engine for it and never raises, now or in :meth:`release`."""
        if self._may_start is None:
            submit()
            return
        with self._lock:
            if number in self._turns:
                self._turns[number] = submit

    def drop(self, number: int) -> None:
        """The turn does not follow."""
        with self._lock:
            self._turns.pop(number, None)

    def release(self) -> bool:
        """Before a step of the engine: ask for the turns that are due; False where one is missing first."""
        if self._may_start is None or not self._may_start(self._num_expected):
            return True
        with self._lock:
            if None in self._turns.values():
                return False
            turns, self._turns, self._num_expected = self._turns, {}, 0
        for submit in filter(None, turns.values()):
            submit()
        return True


class _Turn(Future[GroupOutput]):
    """The future of a turn of the policy, which :meth:`add_done_callback` requests from the engine.

    So the thread that resolves the turn continues the dialog at once, and announces before the engine's next step
    whether another turn may follow; a turn requested earlier could be resolved before its dialog waits for it.
    """

    def __init__(self, ask: Callable[[Future[GroupOutput]], None]):
        super().__init__()
        self._ask = ask

    def add_done_callback(self, function: Callable[[Future[GroupOutput]], object]) -> None:
        super().add_done_callback(function)
        self._ask(self)


class GroupDialogs:
    """Samples the dialogs of a group, each by itself, until the last has ended.

    Every turn of every sample is a request of its own: the first turn of sample ``i`` has the stream that it would have
    in a request for the group, turn ``t >= 2`` the seed ``sample_seed(request.seed, i, t)``. A dialog is a coroutine,
    which goes on in the thread that resolves what it waits for.

    Args:
        request: the group, with its example.
        rules: when a dialog goes on, and with what.
        ask: asks the engine.
        order: when.

    Attributes:
        done: the group's output, or the first failure of the engine, the partner or the chat template. Cancelled, it
            cancels what the engine was asked for.
    """

    def __init__(self, request: GroupRequest, rules: Rules, ask: Ask, order: TurnOrder):
        self.done: Future[GroupOutput] = Future()
        self.done.add_done_callback(self._leave)
        self._request, self._rules, self._ask, self._order = request, rules, ask, order
        self._turns: dict[int, int] = {}  # of each sample, the number of the turn that may be next
        self._dialogs: dict[int, Dialog] = {}
        self._lock = threading.RLock()  # futures resolve on several threads; a cancel comes in the middle of anything
        self._num_open = request.num_samples
        self._asked: dict[int, Future[GroupOutput]] = {}  # of each sample, its last turn
        self._finished = False

    def begin(self) -> None:
        """Open the dialogs, and ask for the first turns of those that are open at once.

        Raises:
            ValueError: the engine refuses them.
        """
        try:
            for index in range(self._request.num_samples):
                self._expect(index)
                dialog = Task(self._dialog(index), partial(self._go_on, index))
                if dialog.done() and index not in self._asked:
                    dialog.result()
                dialog.add_done_callback(self._ended)
        except BaseException:
            self.done.cancel()  # and with it those that it did not refuse
            raise

    async def _dialog(self, index: int) -> None:
        """One sample, from its partner's beginning to its record."""
        talk = await self._rules.partner.begin(self._request, index)
        prompt_ids = self._request.prompt_ids if talk.prompt_ids is None else talk.prompt_ids
        dialog = Dialog(talk, prompt_ids, self._rules)
        with self._lock:
            self._dialogs[index] = dialog
        if self._is_left():  # meanwhile
            talk.leave()
            return
        request = replace(self._request, prompt_ids=prompt_ids, num_samples=1, first_sample=index, example=None)
        while True:
            (said,) = (await result(_Turn(partial(self._speak, index, request)))).samples
            await dialog.follow(said, partial(self._order.drop, self._expect(index)))
            if dialog.is_over:
                return
            seed = sample_seed(self._request.seed, index, dialog.num_turns + 1)
            request = GroupRequest(self._request.group_id, tuple(dialog.ids), num_samples=1, seed=seed)

    def _go_on(self, index: int, dialog: Callable[[], object]) -> None:
        """After the request was cancelled there is no further turn; a partner that begins later is left."""
        if index not in self._dialogs or not self._is_left():
            dialog()

    def _speak(self, index: int, request: GroupRequest, turn: Future[GroupOutput]) -> None:
        def submit() -> None:
            try:
                self._asked[index] = future = self._ask(request)
            except BaseException as error:  # of one dialog
                turn.set_exception(error)
                return
            if self._is_left():  # meanwhile
                future.cancel()
            future.add_done_callback(lambda done: resolve(turn, done.result))

        self._order.ask(self._turns[index], submit)

    def _is_left(self) -> bool:
        return self._finished or self.done.cancelled()

    def _expect(self, index: int) -> int:
        """Take the number of a sample's next turn."""
        self._turns[index] = number = self._order.expect()
        if self._is_left():  # meanwhile
            self._order.drop(number)
        return number

    def _ended(self, dialog: Future[None]) -> None:
        """Resolve the group, once: with its first failure, or when all dialogs are over."""
        with self._lock:
            self._num_open -= 1
            if self._finished or (self._num_open and dialog.exception() is None):
                return
            self._finished = True
        if self.done.set_running_or_notify_cancel():
            resolve(self.done, lambda: dialog.result() or self._output())

    def _leave(self, done: Future[GroupOutput]) -> None:
        for future in list(self._asked.values()):  # nothing happens to those that are done
            future.cancel()
        for number in list(self._turns.values()):
            self._order.drop(number)
        if done.cancelled() or done.exception() is not None:
            with self._lock:
                talks = [dialog.talk for dialog in self._dialogs.values()]
            for talk in talks:
                talk.leave()

    def _output(self) -> GroupOutput:
        dialogs = [dialog for _, dialog in sorted(self._dialogs.items())]
        common = num_shared([dialog.prompt_ids for dialog in dialogs])  # they differ behind what environments told
        samples = tuple(dialog.sample(common) for dialog in dialogs)
        return GroupOutput(self._request.group_id, samples, dialogs[0].prompt_ids[:common])


class DialogEngine(Streams):
    """Groups of dialogs: each turn of the policy is answered by its partner, and the policy goes on.

    A sample then holds all that follows the prompt, as it was sampled and inserted: nothing that was sampled is ever
    tokenised again. On the tokens of user and tool turns ``assistant_mask`` is False, log-probs are 0, versions -1.
    A dialog ends where the partner has no answer, with a truncated turn, its ``max_steps``-th turn, or where the
    context has no room for the answer and one more token (truncated too). ``sampling.max_tokens`` bounds one turn.
    Where a partner adds to the prompts, what these begin with alike is the group's prompt, and the rest stands before
    the first turn of each sample, masked like other turns. Weights may be pushed in the middle of dialogs: every token
    keeps the version that sampled it.

    Contract. Consumes: requests with their examples. Produces: groups, as soon as all their dialogs have ended; a
    dialog's next turn begins while others, siblings too, are in the middle of theirs. Waits for: the engine and the
    partner, which have deadlines of their own. Unblocked by: the last dialog of a group. A failure of either fails the
    group.

    The random numbers of turn ``t`` of sample ``i`` derive from ``(request.seed, i, t)``, so a dialog depends on no
    other, up to the rounding of the engine's batches.

    Args:
        engine: samples single turns, and the groups of tasks without rules.
        rules: of each task of a mixture that has dialogs, by name; those under None are of examples of no mixture.

    Example, with a grader that is never content and answers of two tokens between the turns of the policy:

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
        return group.done

    def advance(self) -> bool:
        """A step of the engine, unless an answer is missing that decides what it begins (:class:`TurnOrder`)."""
        return self._order.release() and self.engine.advance()

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """As :meth:`~sota_grpo.engines.stepping.Streams.generate`; a request without an example is refused too."""
        self._check(requests)
        return super().generate(requests, sampling)

    def _check(self, requests: Sequence[GroupRequest]) -> None:
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
    def weight_dtype(self) -> torch.dtype | None:
        """That of the engine."""
        return self.engine.weight_dtype

    def update_weights(self, weights: Iterable[Any], version: int) -> None:
        """Push to the engine, in the middle of running dialogs too; every token keeps the version that sampled it."""
        self.engine.update_weights(weights, version)

    def weight_sums(self) -> Mapping[str, Checksum] | None:
        """Those of the engine."""
        return self.engine.weight_sums()

    def sleep(self) -> None:
        """Free the engine's device until :meth:`wake`."""
        self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.engine.wake()

    def close(self) -> None:
        """Close the engine; idempotent."""
        self.engine.close()
