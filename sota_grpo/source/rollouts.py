"""Samples and grades responses to prompts, for training, the checks before training, evaluation and TorchRL's loops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import EventLoop, Task, as_completed, result
from sota_grpo.envs import PromptSource
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.rl.collate import drawn_entries, group_table, last_turn
from sota_grpo.rl.records import (
    Example,
    GroupRequest,
    Sample,
    SampledText,
    Sampling,
    Score,
    rewarded,
)
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import write_scores

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
        self._since = dict.fromkeys(self.counts, 0.0)
        self._lock = threading.Lock()

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Count one group in ``stage`` inside the ``with`` block."""
        with self._lock:
            if self.counts[stage] == 0:
                self._since[stage] = time.monotonic()
            self.counts[stage] += 1
        try:
            yield
        finally:
            with self._lock:
                self.counts[stage] -= 1
                if self.counts[stage] == 0:
                    self._seconds[stage] += time.monotonic() - self._since[stage]

    def lap(self) -> dict[str, float]:
        """Return {stage: seconds with at least one group} since the previous call."""
        now = time.monotonic()
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(self.counts, 0.0)
            for stage, count in self.counts.items():
                if count:
                    seconds[stage] += now - self._since[stage]
                    self._since[stage] = now
        return seconds


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
        """Sample and grade one group; a coroutine for a :class:`Task` that posts to an event loop, not for asyncio.

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
            output = await result(self.engine.submit(request, sampling))
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
            texts = zip(rows.get(keys.RESPONSE_TEXT), samples)
            responses = [
                SampledText(text, last_turn(one).int().numpy().tobytes(), one.record, self.env.opens_thinking)
                for text, one in texts
            ]
            scores = await result(self.env.grader.scores([(text, prompt.example) for text in responses]))
        scores = [*map(rewarded, scores)]
        write_scores(rows, scores, self.env.task.term_weights)
        return Graded(prompt, samples, rows, scores)

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        """Yield groups in the order in which they are graded; iterating runs the engine.

        If the iterator is dropped or raises (see :meth:`group`), the groups that are not finished are cancelled.
        """
        loop = EventLoop(self.engine, self.poll)
        return as_completed(loop, (partial(Task, self.group(prompt, sampling), loop.post) for prompt in prompts))
