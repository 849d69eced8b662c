"""The part of an environment that training uses: its prompts, their order and token ids, and graded rollouts of them.

:class:`Rollouts` is the one way from a prompt to graded rows: of training, of the checks before it, of evaluation and
of TorchRL's loops.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch

from sota_grpo import keys
from sota_grpo.engines import Engine, stepping
from sota_grpo.envs.chat_tokens import prompt_tokens
from sota_grpo.errors import UserError
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.policy.causal import response_text
from sota_grpo.rewards.grading import Grader, LocalGrader
from sota_grpo.rl.collate import drawn_entries, group_table, last_turn
from sota_grpo.rl.records import (
    TASK,
    Example,
    GroupRequest,
    Sample,
    SampledText,
    Sampling,
    Score,
    rewarded,
    sample_seed,
)
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.task import Task
from sota_grpo.rl.transforms import write_scores
from sota_grpo.tasks.mixture import MixedExamples
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)

_FINGERPRINTED = 64  # prompts of each task that are hashed
_NAMED = 10  # maximum number of prompts named in the warning about skipped prompts


class PromptStream:
    """An endless, deterministic sequence of ``(group id, example)``.

    Each epoch has every one of ``n`` examples once: draw ``k`` is element ``k mod n`` of epoch ``k div n``, in an order
    that depends on seed and epoch only; with ``shuffle=False`` it is that of ``examples``. In a mixture this holds
    within each task, with a seed derived from its name. Every draw has another group id, also if it repeats an example.
    ValueError if a task has no examples.

    >>> stream = PromptStream([Example(f"{i} + 1?", str(i + 1)) for i in range(3)], seed=0, shuffle=False)
    >>> [(group_id, example.query) for group_id, example in stream.draw(4)]
    [(0, '0 + 1?'), (1, '1 + 1?'), (2, '2 + 1?'), (3, '0 + 1?')]
    >>> state = stream.state_dict()
    >>> state["epoch"], state["position"], state["next_group_id"]
    (1, 1, 4)
    >>> stream.example_of(2).query
    '2 + 1?'
    """

    def __init__(self, examples: Sequence[Example], *, seed: int = 0, shuffle: bool = True):
        #: Examples by task name in a mixture; without a mixture all examples under ``""``.
        self.examples_of = examples.examples_of if isinstance(examples, MixedExamples) else {"": examples}
        if not self.examples_of or not all(map(len, self.examples_of.values())):
            raise ValueError("a task has no examples to draw prompts from; give it at least one.")
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.next_group_id = 0
        self._first_group_id = 0  # the first one drawn with this seed

    def name_apart(self) -> None:
        """Start the group ids at a hash of seed, next id and prompts; no-op after a draw with the current seed.

        Rows of streams that differ in seed or prompts can then share a replay buffer. A training run counts from 0.
        """
        if self.next_group_id == self._first_group_id:
            identity = repr((self.seed, self.next_group_id, len(self.examples), self._prompts)).encode()
            number = int.from_bytes(hashlib.blake2b(identity, digest_size=4).digest()) >> 1
            self.next_group_id = self._first_group_id = number << 32

    def draw(self, num_groups: int) -> list[tuple[int, Example]]:
        """Return the next ``num_groups`` pairs ``(group id, example)``; every group id is new."""
        group_ids = range(self.next_group_id, self.next_group_id + num_groups)
        self.next_group_id += num_groups
        return [(group_id, self.example_of(group_id)) for group_id in group_ids]

    def example_of(self, group_id: int) -> Example:
        """Return the example of a group already drawn; ValueError if it was not drawn since the seed was set."""
        if not self._first_group_id <= group_id < self.next_group_id:
            raise ValueError(
                f"group {group_id} is not of this stream: since its seed was set it has drawn "
                f"{self.next_group_id - self._first_group_id} groups from {self._first_group_id} on; pass one of these."
            )
        draw = group_id - self._first_group_id
        name, seed = "", self.seed
        if isinstance(self.examples, MixedExamples):
            name, draw = self.examples.drawn(draw)
            seed = sample_seed(self.seed, int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()))
        count = len(self.examples_of[name])
        epoch, position = divmod(draw, count)
        index = _permutation(count, seed, epoch)[position] if self.shuffle else position
        return self.examples.example(name, index) if isinstance(self.examples, MixedExamples) else self.examples[index]

    def reseed(self, seed: int) -> None:
        """Restart the stream with another seed; group ids continue, so that they stay unique."""
        self.seed = seed
        self._first_group_id = self.next_group_id

    def state_dict(self) -> dict[str, Any]:
        """Return the position (``epoch``, ``position`` in the epoch, ``next_group_id``) and what identifies the stream.

        That is its seed, ``shuffle``, number of examples, a hash of up to 64 prompts per task, and the mixture.
        """
        epoch, position = divmod(self.next_group_id - self._first_group_id, len(self.examples))
        return self._identity() | {"epoch": epoch, "position": position, "next_group_id": self.next_group_id}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of ``state_dict``; KeyError if that is missing.

        ValueError if the state was saved with another seed, ``shuffle`` (unless an older state lacks it), mixture or
        examples, judged by their number and up to 64 prompts of each task.
        """
        saved = {"mixture": None, "shuffle": self.shuffle} | dict(state_dict)
        for name, value in ({"mixture": None} | self._identity()).items():
            if saved.get(name) != value:
                raise ValueError(
                    f"the saved prompt stream has {name}={saved.get(name)}, but this stream has {name}={value}; "
                    "resume with the dataset, the seed and the shuffle of the saved run (of a mixture: its tasks and "
                    "weights, too)."
                )
        self.next_group_id = state_dict["next_group_id"]
        drawn = state_dict["epoch"] * len(self.examples) + state_dict["position"]
        self._first_group_id = self.next_group_id - drawn

    @cached_property
    def _prompts(self) -> int:
        """Hash of up to 64 evenly spaced prompts of each task."""
        digest = hashlib.blake2b(digest_size=7)
        for name, part in self.examples_of.items():
            chosen = range(0, len(part), -(-len(part) // _FINGERPRINTED))
            digest.update(repr((name, [part[index].query for index in chosen])).encode())
        return int.from_bytes(digest.digest())

    def _identity(self) -> dict[str, Any]:
        """Return the state entries that must be equal when a state is loaded."""
        size = len(self.examples)
        own = {"seed": self.seed, "shuffle": self.shuffle, "num_examples": size, "prompts": self._prompts}
        if not isinstance(self.examples, MixedExamples):
            return own
        weights = self.examples.weights
        return own | {"mixture": {name: [len(part), str(weights[name])] for name, part in self.examples_of.items()}}


@lru_cache(maxsize=32)  # groups in flight may be of the previous epoch; mixtures have one permutation per task
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()


def _named(example: Example) -> str:
    return f"the prompt of {example.query[:60]!r}" + (f" ({one_line(example.place)})" if example.place else "")


class PromptSource:
    """The prompts of a task as token ids, and the grader of its responses.

    Training draws from ``stream``, samples responses to :meth:`prompt_ids`, and has them scored by ``grader``;
    :class:`~sota_grpo.envs.TaskEnv` adds TorchRL's interface of an environment.

    Args:
        task: its examples, their chat messages and its ``score``; ValueError if it has no examples for training.
        tokenizer: the policy's; without a chat template the messages are separated by blank lines.
        repeats: group size, the number of responses to each prompt.
        shuffle, seed: arguments of the :class:`PromptStream` over ``task.train``.
        max_prompt_tokens: maximum prompt length; None: no limit.
        grader: scores responses; None grades with ``task.score`` in this process.
        multi_turn: samples are multi-turn dialogs; every request then has ``GroupRequest.example``.
        template_kwargs: further arguments of ``apply_chat_template``.
        task_kwargs: additional ``template_kwargs`` (tools) by task name of a mixture.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        repeats: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        max_prompt_tokens: int | None = None,
        grader: Grader | None = None,
        multi_turn: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        task_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ):
        self.task, self.tokenizer, self.repeats = task, tokenizer, repeats
        self.stream = PromptStream(task.train, seed=seed, shuffle=shuffle)
        self.max_prompt_tokens, self.multi_turn = max_prompt_tokens, multi_turn
        self.template_kwargs = dict(template_kwargs or {})
        self.grader = LocalGrader(task.score, task.term_weights) if grader is None else grader
        self.longest_prompt = 0  # tokens; set by check_prompts()
        self._prompt_ids: dict[tuple[str, str], tuple[int, ...]] = {}
        own: dict[Any, Mapping[str, Any]] = {None: {}, **(task_kwargs or {})}
        self._chats = {name: prompt_tokens(tokenizer, {**self.template_kwargs, **more}) for name, more in own.items()}

    def prompt_ids(self, example: Example, observation: str = "") -> tuple[int, ...]:
        """Return the token ids of the templated prompt of ``example``, cached if there is no ``observation``.

        Names of special tokens in the messages are text: they cannot begin or end a turn. ``observation`` is text that
        an environment appends to the last message. UserError if the prompt is longer than ``max_prompt_tokens``, or
        cannot be rendered or tokenised.
        """
        key = (example.query, json.dumps(dict(example.extra), sort_keys=True))
        ids = None if observation else self._prompt_ids.get(key)
        if ids is None:
            *before, last = self.task.messages(example)
            try:
                chat = self._chats.get(example.extra.get(TASK), self._chats[None])
                ids = chat.ids([*before, {**last, "content": last["content"] + observation}])
            except UserError as error:
                raise UserError(f"{_named(example)}: {error}") from error
            if not observation:
                self._prompt_ids[key] = ids
        if self.max_prompt_tokens is not None and len(ids) > self.max_prompt_tokens:
            raise UserError(
                f"{_named(example)} has {len(ids)} tokens and at most {self.max_prompt_tokens} fit; raise "
                "inference_model.max_model_len (of a TaskEnv: max_prompt_tokens) if the model allows more, or remove "
                "the problem from the dataset."
            )
        return ids

    @property
    def opens_thinking(self) -> bool:
        """Whether prompts end in an opened thinking block (``<think>``), in which every response begins."""
        return self._chats[None].opens_thinking

    def check_prompts(self, *, skip: bool = False) -> int:
        """Tokenise all prompts of the task; return the length of the longest in tokens, also as ``longest_prompt``.

        ``skip`` removes the prompts that :meth:`prompt_ids` refuses from ``task``, in place, with a warning that names
        the first ten, and restarts the stream. The held-out split is chosen before this, from all problems. UserError
        if a prompt is refused, or with ``skip`` all prompts of a split, or all training prompts of a task in a mixture.
        """
        longest, left_out = 0, []
        for split in ("train", "heldout"):
            examples, short = getattr(self.task, split), []
            for number, example in enumerate(examples, start=1):
                try:
                    longest = max(longest, len(self.prompt_ids(example)))
                    short.append(example)
                except UserError as error:
                    if not skip or (not short and number == len(examples)):
                        raise
                    left_out.append((example, error))
            if len(short) < len(examples):
                is_mixed = isinstance(examples, MixedExamples)
                setattr(self.task, split, examples.only(short, may_be_empty=split == "heldout") if is_mixed else short)
        if left_out:
            self.stream = PromptStream(self.task.train, seed=self.stream.seed, shuffle=self.stream.shuffle)
            rows: dict[str, list[str]] = {}  # by file
            for example, _ in left_out[:_NAMED]:
                file, mark, row = example.place.rpartition(", row ")
                rows.setdefault(one_line(file) + mark, []).append(row or repr(example.query[:60]))
            names = "; ".join(file + ", ".join(numbers) for file, numbers in rows.items())
            more = ", .." if len(left_out) > _NAMED else ""
            first = one_line(str(left_out[0][1]), None)
            logger.warning("%d prompts are skipped (%s%s). Reason for the first: %s", len(left_out), names, more, first)
        self.longest_prompt = longest
        return longest

    def decode(self, token_ids: torch.Tensor) -> str:
        """Return the text that graders read: the response decoded without end tokens and padding."""
        return response_text(self.tokenizer, token_ids)


SAMPLE, GRADE, REFERENCE = "sample", "grade", "reference"


@dataclass(frozen=True)
class Prompt:
    """A request for one group: ``num_samples`` responses to ``example``, sampled with seeds derived from ``seed``."""

    group_id: int
    example: Example
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Graded:
    """A graded prompt group: the engine's samples, a row with the reward for each, and the grader's score of each."""

    prompt: Prompt
    samples: Sequence[Sample]
    rows: RowTable
    scores: Sequence[Score]


class StageClock:
    """Counts the groups in each stage, and measures for how many seconds a stage has at least one group.

    >>> clock = StageClock()
    >>> with clock.stage(GRADE):
    ...     clock.counts
    {'sample': 0, 'grade': 1, 'reference': 0}
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys((SAMPLE, GRADE, REFERENCE), 0)
        self._seconds = dict.fromkeys(self.counts, 0.0)
        self._measured_at, self._lock = time.monotonic(), threading.Lock()

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Count one group in ``stage`` inside the ``with`` block."""
        with self._measured():
            self.counts[stage] += 1
        try:
            yield
        finally:
            with self._measured():
                self.counts[stage] -= 1

    def lap(self) -> dict[str, float]:
        """Return {stage: seconds with at least one group} since the previous call."""
        with self._measured():
            seconds, self._seconds = self._seconds, dict.fromkeys(self.counts, 0.0)
        return seconds

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Hold the lock; first add the time since the last measurement to each stage that has a group."""
        with self._lock:
            before, self._measured_at = self._measured_at, time.monotonic()
            for stage, count in self.counts.items():
                self._seconds[stage] += (self._measured_at - before) * (count > 0)
            yield


class Rollouts:
    """Samples the responses to prompts with an engine, builds their rows, and grades them.

    Each group is one coroutine that awaits the engine and then ``env.grader``, so a group is graded while the engine
    samples others. Errors of the engine are raised. A response on which the grader fails gets a score with ``error``.
    ``poll``, a health check of the workers, is called during the wait for groups.

    Example: ``for group in Rollouts(env, engine).stream(prompts, Sampling(max_tokens=64)): group.rows``.
    """

    def __init__(self, env: PromptSource, engine: Engine, poll: Callable[[], object] | None = None):
        self.env, self.engine, self.poll = env, engine, poll

    async def group(self, prompt: Prompt, sampling: Sampling, clock: StageClock | None = None) -> Graded:
        """Sample and grade one group; a coroutine for a ``stepping.Task`` that posts to an event loop, not for asyncio.

        The task may limit the length of ``sampling`` further. ``clock`` counts the group in each stage. UserError: the
        prompt is longer than the environment allows, or cannot be rendered. ValueError: the prompt leaves no room for a
        response. UnusableValues: the engine returned a log-prob that is NaN or infinite.
        """
        clock = clock or StageClock()
        limit = getattr(self.env.task, "max_tokens", lambda _: sampling.max_tokens)(prompt.example)
        sampling = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
        with clock.stage(SAMPLE):
            prompt_ids = self.env.prompt_ids(prompt.example)
            example = prompt.example if self.env.multi_turn else None  # the turns of a dialog are answered by it
            request = GroupRequest(prompt.group_id, prompt_ids, prompt.num_samples, prompt.seed, example)
            output = await stepping.result(self.engine.submit(request, sampling))
        with clock.stage(GRADE):  # rows are built only now: a group in flight needs little memory
            samples = output.samples
            if output.prompt_ids is not None:
                prompt_ids = output.prompt_ids
            entries = drawn_entries(prompt.group_id, prompt.example, prompt_ids)
            rows = group_table(entries, samples, self.env.tokenizer)
            if not bool(rows.flat(keys.LOG_PROBS).isfinite().all()):
                # the loss ignores tokens with unknown log-probs, but this package's engines must know them
                raise UnusableValues(
                    f"the engine returned a log-prob that is not finite for a token of group {prompt.group_id}; check "
                    "its weights and its sampling options."
                )
            pairs = []
            for text, sample in zip(rows.get(keys.RESPONSE_TEXT), samples):
                ids = last_turn(sample).int().numpy().tobytes()
                pairs.append((SampledText(text, ids, sample.record, self.env.opens_thinking), prompt.example))
            graded = await stepping.result(self.env.grader.scores(pairs))
        scores = [*map(rewarded, graded)]
        write_scores(rows, scores, self.env.task.term_weights)
        return Graded(prompt, samples, rows, scores)

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        """Yield groups in the order in which they are graded; iterating runs the engine.

        If the iterator is dropped or raises (see :meth:`group`), the groups that are not finished are cancelled.
        """
        loop = stepping.EventLoop(self.engine, self.poll)
        starts = (partial(stepping.Task, self.group(prompt, sampling), loop.post) for prompt in prompts)
        return stepping.as_completed(loop, starts)
