"""From a prompt to graded samples, for training, the checks before it, evaluation, and TorchRL's own loops."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import EventLoop, as_completed, result
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
    """The prompt of one group: ``num_samples`` responses to ``example``, from the random streams of ``seed``."""

    group_id: int
    example: Example
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Graded:
    """A prompt group with its rewards.

    Args:
        samples: as the engine gave them.
        rows: one per sample, rewards written.
        scores: of each sample, by the grader.
    """

    prompt: Prompt
    samples: Sequence[Sample]
    rows: RowTable
    scores: Sequence[Score]


class StageClock:
    """Counts the groups in each stage, and the seconds in which a stage has at least one.

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
        """Count a group in ``stage`` within the context."""
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
        """Return the seconds by stage since the last lap."""
        now = time.monotonic()
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(self.counts, 0.0)
            for stage, count in self.counts.items():
                if count:
                    seconds[stage] += now - self._since[stage]
                    self._since[stage] = now
        return seconds


class Rollouts:
    """Requests a prompt's samples from an engine, makes their rows, and has them graded.

    Each group is one coroutine that awaits the engine and then ``env.grader``, so a group is graded while the engine
    samples others. It raises what the engine raises. A grader that fails at a response is no failure: the score has
    the ``error``.

    Args:
        env: tokenises, and has the grader.
        engine: samples the responses.
        poll: runs the health checks of the workers; is called while groups are waited for.

    Example: ``for group in Rollouts(env, engine).stream(prompts, Sampling(max_tokens=64)): group.rows``.
    """

    def __init__(self, env: PromptSource, engine: Engine, poll: Callable[[], object] | None = None):
        self.env, self.engine, self.poll = env, engine, poll

    def request(self, prompt: Prompt) -> GroupRequest:
        """Return the request to the engine, with the example where a dialog needs that between its turns."""
        example = prompt.example if self.env.multi_turn else None
        return GroupRequest(
            prompt.group_id, self.env.prompt_ids(prompt.example), prompt.num_samples, prompt.seed, example
        )

    async def group(self, prompt: Prompt, sampling: Sampling, clock: StageClock | None = None) -> Graded:
        """Sample and grade one group.

        Args:
            prompt: of the group.
            sampling: temperature, length and the like; the task may bound the length further.
            clock: counts the stages.

        Raises:
            ValueError: the prompt leaves no room for a response.
            UnusableValues: the engine gave a log-prob that is not finite.
        """
        clock = clock or StageClock()
        limit = getattr(self.env.task, "max_tokens", lambda _: sampling.max_tokens)(prompt.example)
        sampling = replace(sampling, max_tokens=min(limit, sampling.max_tokens))
        with clock.stage(SAMPLE):
            output = await result(self.engine.submit(self.request(prompt), sampling))
        with clock.stage(GRADE):  # the rows are made now, so that a group in flight is a few numbers
            samples, prompt_ids = output.samples, output.prompt_ids or self.env.prompt_ids(prompt.example)
            rows = group_table(drawn_entries(prompt.group_id, prompt.example, prompt_ids), samples, self.env.tokenizer)
            if not bool(rows.flat(keys.LOG_PROBS).isfinite().all()):
                # the loss leaves out tokens whose log-prob is not known, which an engine of ours has to know
                raise UnusableValues(
                    f"the engine gave a log-prob that is not finite for a token of group {prompt.group_id}; check its "
                    "weights and its sampling options."
                )
            texts = zip(rows.get(keys.RESPONSE_TEXT), samples)
            responses = [SampledText(text, last_turn(one).int().numpy().tobytes(), one.record) for text, one in texts]
            scores = await result(self.env.grader.scores([(text, prompt.example) for text in responses]))
        scores = [*map(rewarded, scores)]
        write_scores(rows, scores, self.env.task.term_weights)
        return Graded(prompt, samples, rows, scores)

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        """Yield each group once it is graded; the caller drives the engine. Dropping the iterator cancels the rest."""
        loop = EventLoop(self.engine, self.poll)
        return as_completed(loop, (partial(self._begin, loop, prompt, sampling) for prompt in prompts))

    def _begin(self, loop: EventLoop, prompt: Prompt, sampling: Sampling) -> Future[Graded]:
        return loop.start(self.group(prompt, sampling))
