"""Dialogs of several turns over any engine: the policy speaks, is graded, is answered, and speaks again.

Between two turns of the policy stand the end of its turn, what it is answered, and the start of its next turn. In a
ChatML template, after the policy ended its turn with ``<|im_end|>`` itself, the reply ``Think again.`` is::

    sampled      ...  18  <|im_end|>
    inserted     \\n  <|im_start|>user  \\n  Think again.  <|im_end|>  \\n  <|im_start|>assistant  \\n
    sampled      I see, it is 19  <|im_end|>

What was sampled stays as it is, also where a template would render an earlier turn differently (without its thinking).
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Streams
from sota_grpo.envs.chat_tokens import ChatTokens, Messages
from sota_grpo.errors import UserError
from sota_grpo.rewards.grading import Grader
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling, Score, sample_seed
from sota_grpo.rl.task import SampledText

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
    >>> tokenizer.decode(TurnTokens(tokenizer).ids({"role": "user", "content": "Again?"}, tokenizer.eos_token_id))
    '\\n<|im_start|>user\\nAgain?<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None):
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat = ChatTokens(tokenizer, self._rendered)
        self._reply_ids = functools.lru_cache(maxsize=1024)(self._tokenised)
        self._role_of = functools.cache(self._supported)

    def text(self, token_ids: torch.Tensor) -> str:
        """One turn of the policy ``[R]`` as its grader reads it: special tokens left out."""
        return self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)

    def ids(self, reply: Mapping[str, str], last_id: int) -> tuple[int, ...]:
        """What stands between the policy's last token and its next turn.

        The end-of-turn token with which the template begins is left out where the policy has sampled it.

        Args:
            reply: ``role`` (``user`` or ``tool``) and ``content``, which may repeat what a model wrote: names of
                special tokens in it are text (:class:`~sota_grpo.envs.chat_tokens.ChatTokens`).
            last_id: last token that the policy sampled.

        Raises:
            UserError: the chat template cannot render a conversation of several turns.
        """
        ids = self._reply_ids(reply["role"], reply["content"])
        return ids[1:] if ids and ids[0] == last_id else ids

    def _tokenised(self, role: str, content: str) -> tuple[int, ...]:
        if role not in ("user", "tool"):
            raise ValueError(f"a reply has the role {role!r}; use user or tool.")
        if self._has_template:
            role = self._role_of(role)
        return self._chat.ids([{"role": role, "content": content}])

    def _supported(self, role: str) -> str:
        """``role``, or ``user`` where the template does not show what a ``tool`` says."""
        try:
            if _PROBE in self._rendered([{"role": role, "content": _PROBE}]):
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


@dataclass(frozen=True)
class Rules:
    """How a dialog goes on: ``max_steps`` turns of the policy at most, ``max_model_len`` tokens, prompt included."""

    grader: Grader
    turns: TurnTokens
    max_steps: int
    max_model_len: int


class Dialog:
    """One sample of a group: what the policy and the others have said so far.

    Args:
        prompt_ids: of the group.
    """

    def __init__(self, prompt_ids: Sequence[int]):
        self.ids = [*prompt_ids]
        self.num_turns = 0
        self.last = torch.zeros(0, dtype=torch.int64)  # what the policy said last
        self.truncated = False
        self._parts: list[Sample] = []

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
    """Samples the dialogs of a group, each by itself, until the last has ended.

    Every turn of every sample is a request of its own: the first turn of sample ``i`` has the stream that it would have
    in a request for the group, turn ``t >= 2`` the seed ``sample_seed(request.seed, i, t)``. What follows a future is
    done by whoever resolves it.

    Args:
        request: the group, with its example.
        rules: when a dialog goes on, and with what.
        ask: asks the engine.

    Attributes:
        done: the group's output, or the first failure of the engine, the grader or the chat template. Cancelled, it
            cancels what the engine was asked for.
    """

    def __init__(self, request: GroupRequest, rules: Rules, ask: Ask):
        self.done: Future[GroupOutput] = Future()
        self.done.add_done_callback(self._leave)
        self._request, self._rules, self._ask = request, rules, ask
        self._dialogs = [Dialog(request.prompt_ids) for _ in range(request.num_samples)]
        self._lock = threading.RLock()  # futures resolve on several threads; a cancel comes in the middle of anything
        self._num_open = request.num_samples
        self._requested: list[Future[GroupOutput]] = []
        self._finished = False

    def begin(self) -> None:
        """Ask for the first turns.

        Raises:
            ValueError: the engine refuses them.
        """
        try:
            for index in range(self._request.num_samples):
                first = replace(self._request, num_samples=1, first_sample=index, example=None)
                self._speak(first, partial(self._spoken, index))
        except BaseException:
            self.done.cancel()  # and with it those that it did not refuse
            raise

    def _speak(self, request: GroupRequest, handle: Callable[[GroupOutput], None]) -> None:
        future = self._ask(request)
        self._requested.append(future)
        self._then(future, handle)
        if self._finished or self.done.cancelled():  # meanwhile
            future.cancel()

    def _then(self, future: Future[Any], handle: Callable[[Any], None]) -> None:
        def follow(done: Future[Any]) -> None:
            if self._finished or self.done.cancelled():  # nobody waits: no further turn
                return
            try:
                handle(done.result())
            except BaseException as error:  # it belongs to whoever reads the future
                self._finish(partial(self.done.set_exception, error))

        future.add_done_callback(follow)

    def _finish(self, tell: Callable[[], object]) -> None:
        """Once; and not at all where nobody waits."""
        with self._lock:
            first, self._finished = not self._finished, True
        if first and self.done.set_running_or_notify_cancel():
            tell()

    def _leave(self, done: Future[GroupOutput]) -> None:
        for future in list(self._requested):  # nothing happens to those that are done
            future.cancel()

    def _spoken(self, index: int, output: GroupOutput) -> None:
        """Have a turn graded whose dialog may still go on."""
        dialog = self._dialogs[index]
        dialog.speak(*output.samples)
        if dialog.truncated or dialog.num_turns == self._rules.max_steps:
            self._end()
            return
        assert self._request.example is not None
        said = SampledText(self._rules.turns.text(dialog.last), dialog.last.tolist())
        pair = (said, self._request.example)
        self._then(self._rules.grader.scores([pair]), partial(self._answer, index))

    def _answer(self, index: int, scores: Sequence[Score]) -> None:
        request = self._continuation(index, *scores)
        if request is None:
            self._end()
        else:
            self._speak(request, partial(self._spoken, index))

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

    def _end(self) -> None:
        with self._lock:
            self._num_open -= 1
            last = not self._num_open
        if last:
            samples = tuple(dialog.sample() for dialog in self._dialogs)
            self._finish(partial(self.done.set_result, GroupOutput(self._request.group_id, samples)))


class DialogEngine(Streams):
    """Groups of dialogs: each sample is graded, and where its score has a reply, the policy hears it and goes on.

    A sample then holds all that follows the prompt, as it was sampled and inserted: nothing that was sampled is ever
    tokenised again. On the tokens of user and tool turns ``assistant_mask`` is False, log-probs are 0, versions -1.
    A dialog ends with a score without reply, a failed grader, a truncated turn, its ``max_steps``-th turn, or where the
    context has no room for the reply and one more token (truncated too). ``sampling.max_tokens`` bounds one turn.

    Contract. Consumes: requests with their examples. Produces: groups, as soon as all their dialogs have ended; a
    dialog's next turn begins while others, siblings too, are in the middle of theirs. Waits for: the engine and the
    grader, which have deadlines of their own. Unblocked by: the last dialog of a group. A failure of either fails the
    group.

    The random numbers of turn ``t`` of sample ``i`` derive from ``(request.seed, i, t)``, so a dialog depends on no
    other, up to the rounding of the engine's batches.

    Args:
        engine: samples single turns.
        grader: between the turns.
        turns: reads and writes the ids of turns (:class:`TurnTokens`).
        max_steps: most turns of the policy in a dialog, at least 2.

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

    def __init__(self, engine: Engine, grader: Grader, turns: TurnTokens, *, max_steps: int):
        if max_steps < 2:
            raise ValueError(f"max_steps={max_steps} leaves no second turn; use the engine itself.")
        self.engine: Any = engine
        self.name, self.max_model_len, self.stepwise = engine.name, engine.max_model_len, engine.stepwise
        self._rules = Rules(grader, turns, max_steps, engine.max_model_len)

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """Begin the group's dialogs.

        Raises:
            ValueError: the prompt leaves no room for a response, or the request has no example.
        """
        self._check([request])
        group = GroupDialogs(request, self._rules, partial(self.engine.submit, sampling=sampling))
        group.begin()
        return group.done

    def advance(self) -> bool:
        """A step of the engine."""
        return self.engine.advance()

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

    def sleep(self) -> None:
        """Free the engine's device until :meth:`wake`."""
        self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`."""
        self.engine.wake()

    def close(self) -> None:
        """Close the engine; idempotent."""
        self.engine.close()
