"""From a prompt to graded samples: the one way of training, the gate, every evaluation, and TorchRL's own loops."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Inbox, completed
from sota_grpo.envs import TaskEnv
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.rl.collate import drawn_entries, group_table, last_turn
from sota_grpo.rl.records import (
    Example,
    GroupOutput,
    GroupRequest,
    Sample,
    SampledText,
    Sampling,
    Score,
    rewarded,
)
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import write_scores
from sota_grpo.workers.base import resolve

Post = Callable[[Callable[[], object]], object]
Move = Callable[[str | None, str | None], None]
SAMPLE, GRADE, REFERENCE = "sample", "grade", "reference"

logger = logging.getLogger(__name__)

_POLL_S = 0.1  # how often a waiting main thread looks at should_stop


@dataclass(frozen=True)
class Prompt:
    """What is asked for: ``num_samples`` responses to ``example``, from the random streams of ``seed``."""

    group_id: int
    example: Example
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Graded:
    """A group that was sampled and graded.

    Args:
        prompt: what was asked for.
        samples: as the engine gave them.
        rows: one per sample, rewards written.
        scores: what the grader said of each.
    """

    prompt: Prompt
    samples: Sequence[Sample]
    rows: RowTable
    scores: Sequence[Score]


class StageClock:
    """How many groups are in each stage, and for how many seconds each stage had at least one.

    >>> clock = StageClock()
    >>> clock.move(None, SAMPLE), clock.move(SAMPLE, GRADE), clock.counts
    (None, None, {'sample': 0, 'grade': 1, 'reference': 0})
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys((SAMPLE, GRADE, REFERENCE), 0)
        self._seconds = dict.fromkeys(self.counts, 0.0)
        self._since = dict.fromkeys(self.counts, 0.0)
        self._lock = threading.Lock()

    def move(self, before: str | None, after: str | None) -> None:
        """A group left ``before`` and entered ``after``; None is outside."""
        now = time.monotonic()
        with self._lock:
            if before is not None:
                self.counts[before] -= 1
                if self.counts[before] == 0:
                    self._seconds[before] += now - self._since[before]
            if after is not None:
                if self.counts[after] == 0:
                    self._since[after] = now
                self.counts[after] += 1

    def lap(self) -> dict[str, float]:
        """Seconds by stage since the last lap."""
        now = time.monotonic()
        with self._lock:
            seconds, self._seconds = self._seconds, dict.fromkeys(self.counts, 0.0)
            for stage, count in self.counts.items():
                if count:
                    seconds[stage] += now - self._since[stage]
                    self._since[stage] = now
        return seconds


class Rollouts:
    """Asks an engine for a prompt's samples, makes their rows, and has them graded.

    Contract. Consumes: prompts. Produces: futures of graded groups. Waits for: nothing; the engine and ``env.grader``
    resolve what they were asked for. A group is graded while the engine still samples others. A failure of either is
    that of the group's future; a grader that fails at a response is no failure (``Score.error``).

    Args:
        env: tokenises, and has the grader.
        engine: samples the responses.
        attend: called now and then by whoever has the learner and waits for groups.

    Example: ``for group in Rollouts(env, engine).stream(prompts, Sampling(max_tokens=64)): group.rows``.
    """

    def __init__(self, env: TaskEnv, engine: Engine, attend: Callable[[], object] | None = None):
        self.env, self.engine, self.attend = env, engine, attend

    def request(self, prompt: Prompt) -> GroupRequest:
        """What the engine is asked, with the example where a dialog needs that between its turns."""
        known = prompt.example if self.env.multi_turn else None
        return GroupRequest(
            prompt.group_id, self.env.prompt_ids(prompt.example), prompt.num_samples, prompt.seed, known
        )

    def begin(self, prompt: Prompt, sampling: Sampling, post: Post, clock: StageClock | None = None) -> Future[Graded]:
        """Ask for one group; cancelled, the future takes along what the engine was asked for.

        Args:
            prompt: of the group.
            sampling: how a response is drawn; the task may bound its length further.
            post: has what follows a future done, on the caller's thread (:meth:`.Inbox.post`).
            clock: is told of the stages.

        Raises:
            ValueError: the prompt leaves no room for a response.
        """
        sampled = self.engine.submit(self.request(prompt), self._limited(prompt, sampling))
        graded: Future[Graded] = Future()
        graded.add_done_callback(lambda graded: sampled.cancel() if graded.cancelled() else None)
        move = (clock or StageClock()).move
        move(None, SAMPLE)
        sampled.add_done_callback(lambda _: post(partial(self._sampled, prompt, sampled, graded, post, move)))
        return graded

    def _limited(self, prompt: Prompt, sampling: Sampling) -> Sampling:
        """With the token limit of the prompt's task, where that is lower."""
        limit = getattr(self.env.task, "max_tokens", lambda _: sampling.max_tokens)(prompt.example)
        return replace(sampling, max_tokens=min(limit, sampling.max_tokens))

    def _sampled(
        self, prompt: Prompt, sampled: Future[GroupOutput], graded: Future[Graded], post: Post, move: Move
    ) -> None:
        """The rows are made here and not at the beginning: a group in flight is a few numbers."""
        move(SAMPLE, GRADE)
        try:
            output = sampled.result()
            samples, prompt_ids = output.samples, output.prompt_ids or self.env.prompt_ids(prompt.example)
            drawn = drawn_entries(prompt.group_id, prompt.example, prompt_ids)
            rows = group_table(drawn, samples, self.env.tokenizer)
            if not bool(rows.flat(keys.LOG_PROBS).isfinite().all()):
                # the loss leaves out tokens whose log-prob is not known, which an engine of ours has to know
                raise UnusableValues(
                    f"the engine gave a log-prob that is not finite for a token of group {prompt.group_id}; check its "
                    "weights and its sampling options."
                )
            texts = zip(rows.get(keys.RESPONSE_TEXT), samples)
            said = [SampledText(text, last_turn(one).int().numpy().tobytes(), one.record) for text, one in texts]
            scores = self.env.grader.scores([(text, prompt.example) for text in said])
            group = partial(Graded, prompt, samples, rows)
            scores.add_done_callback(lambda _: post(partial(self._graded, group, scores, graded, move)))
        except BaseException as error:  # it belongs to whoever reads the future
            move(GRADE, None)
            if graded.set_running_or_notify_cancel():
                graded.set_exception(error)

    def _graded(
        self, group: Callable[[list[Score]], Graded], scores: Future[list[Score]], graded: Future[Graded], move: Move
    ) -> None:
        move(GRADE, None)
        if graded.set_running_or_notify_cancel():
            resolve(graded, lambda: self._written(group([*map(rewarded, scores.result())])))

    def _written(self, group: Graded) -> Graded:
        write_scores(group.rows, group.scores, self.env.task.term_weights)
        return group

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        """Each group as soon as it is graded, driving the engine; nothing is asked for before the first is.

        What is left when the iterator is dropped is cancelled.
        """
        inbox = Inbox(self.engine, self.attend)
        return completed(inbox, [partial(self.begin, prompt, sampling, inbox.post) for prompt in prompts])
