"""The dialogs of one group, from its first request to its output. Nothing waits here: every step follows a future."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from sota_grpo.records import GroupOutput, GroupRequest, Sample, Score, sample_seed
from sota_grpo.rewards.grading import Grader
from sota_grpo.workers.futures import promised

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
