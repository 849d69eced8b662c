"""From a prompt to graded samples: the one way of training, the gate, every evaluation, and TorchRL's own loops."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.engines.stepping import Inbox, completed
from sota_grpo.envs import TaskEnv, finish_rows, prompt_rows
from sota_grpo.rl.records import Example, GroupOutput, GroupRequest, Sample, Sampling, Score, sample_seed
from sota_grpo.rl.transforms import write_scores
from sota_grpo.workers.base import resolve

Post = Callable[[Callable[[], object]], object]
Move = Callable[[str | None, str | None], None]
SAMPLE, GRADE, REFERENCE = "sample", "grade", "reference"


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
    rows: list[TensorDictBase]
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

    Example: ``for group in Rollouts(env, engine).stream(prompts, Sampling(max_tokens=64)): group.rows``.
    """

    def __init__(self, env: TaskEnv, engine: Engine):
        self.env, self.engine = env, engine

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
            sampling: how a response is drawn.
            post: has what follows a future done, on the caller's thread (:meth:`.Inbox.post`).
            clock: is told of the stages.

        Raises:
            ValueError: the prompt leaves no room for a response.
        """
        sampled = self.engine.submit(self.request(prompt), sampling)
        graded: Future[Graded] = Future()
        graded.add_done_callback(lambda graded: sampled.cancel() if graded.cancelled() else None)
        move = (clock or StageClock()).move
        move(None, SAMPLE)
        sampled.add_done_callback(lambda _: post(partial(self._sampled, prompt, sampled, graded, post, move)))
        return graded

    def _sampled(
        self, prompt: Prompt, sampled: Future[GroupOutput], graded: Future[Graded], post: Post, move: Move
    ) -> None:
        """The rows are made here and not at the beginning: a group in flight is a few numbers."""
        move(SAMPLE, GRADE)

        def grade() -> None:
            samples = sampled.result().samples
            (row,) = prompt_rows(prompt.group_id, prompt.example, self.env.prompt_ids(prompt.example), repeats=1)
            rows = finish_rows(row, samples, self.env.tokenizer)
            scores = self.env.grader.scores([(row[keys.RESPONSE_TEXT], prompt.example) for row in rows])
            group = partial(Graded, prompt, samples, rows)
            scores.add_done_callback(lambda _: post(partial(self._graded, group, scores, graded, move)))

        try:
            grade()
        except BaseException as error:  # it belongs to whoever reads the future
            move(GRADE, None)
            if graded.set_running_or_notify_cancel():
                graded.set_exception(error)

    def _graded(
        self, group: Callable[[list[Score]], Graded], scores: Future[list[Score]], graded: Future[Graded], move: Move
    ) -> None:
        move(GRADE, None)
        if graded.set_running_or_notify_cancel():
            resolve(graded, lambda: self._written(group(scores.result())))

    def _written(self, group: Graded) -> Graded:
        write_scores(lazy_stack(group.rows), group.scores, self.env.task.term_weights)
        return group

    def stream(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[Graded]:
        """Each group as soon as it is graded, driving the engine; nothing is asked for before the first is.

        What is left when the iterator is dropped is cancelled.
        """
        inbox = Inbox(self.engine)
        return completed(inbox, [partial(self.begin, prompt, sampling, inbox.post) for prompt in prompts])


class RolloutCollector(BaseCollector):
    """Draws prompts, samples a group of responses to each, and returns the graded rows.

    TorchRL's interface to :class:`Rollouts`, for pipelines of one's own; the trainers use
    :class:`~sota_grpo.source.source.RolloutSource`. Rows come out in the order in which their prompts were drawn,
    whatever the order in which they finished.

    Args:
        env: the :class:`~sota_grpo.envs.TaskEnv` that draws, tokenises and grades.
        engine: samples the responses.
        sampling: how a response is drawn.
        dialog_turns_per_batch: responses per yielded batch; a multiple of ``env.repeats``.
        total_dialog_turns: responses in all; -1 never ends.
        seed: sample ``i`` of group ``g`` is drawn from the stream derived from ``(seed, g, i)``.
        replay_buffer: filled by :meth:`start` instead of yielding.

    Raises:
        ValueError: when a batch is not made of whole groups.

    Example::

        collector = RolloutCollector(env, engine, sampling=Sampling(max_tokens=64), dialog_turns_per_batch=32)
        for rows in collector:                  # LazyStackedTensorDict, batch_size [32], one row per response
            ...
    """

    trajs_per_batch = None

    def __init__(
        self,
        env: TaskEnv,
        engine: Engine,
        *,
        sampling: Sampling,
        dialog_turns_per_batch: int,
        total_dialog_turns: int = -1,
        seed: int = 0,
        replay_buffer: ReplayBuffer | None = None,
    ):
        super().__init__()
        if dialog_turns_per_batch % env.repeats:
            raise ValueError(
                f"dialog_turns_per_batch={dialog_turns_per_batch} is not divisible by the group size {env.repeats}; "
                f"use {max(1, dialog_turns_per_batch // env.repeats) * env.repeats}."
            )
        self.env = env
        self.engine = engine
        self.sampling = sampling
        self.total_frames = total_dialog_turns
        self.requested_frames_per_batch = dialog_turns_per_batch
        self.replay_buffer = replay_buffer
        self.rollouts = Rollouts(env, engine)
        self._seed = seed
        self._collected = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def collect(self, num_groups: int) -> list[TensorDictBase]:
        """``num_groups * env.repeats`` graded rows, siblings next to each other."""
        prompts = [
            Prompt(group_id, example, self.env.repeats, sample_seed(self._seed, group_id))
            for group_id, example in self.env.stream.draw(num_groups)
        ]
        groups = {group.prompt.group_id: group.rows for group in self.rollouts.stream(prompts, self.sampling)}
        self._collected += num_groups * self.env.repeats
        return [row for prompt in prompts for row in groups[prompt.group_id]]

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yield batches of ``dialog_turns_per_batch`` rows until ``total_dialog_turns`` have been collected."""
        groups = self.requested_frames_per_batch // self.env.repeats
        while not self._stop.is_set() and (self.total_frames < 0 or self._collected < self.total_frames):
            yield LazyStackedTensorDict.lazy_stack(self.collect(groups))

    def start(self) -> None:
        """Fill ``replay_buffer`` from a thread until :meth:`shutdown`; a failure is raised there."""
        if self.replay_buffer is None:
            raise RuntimeError("RolloutCollector.start() fills a replay buffer; give replay_buffer=.")

        def fill() -> None:
            try:
                for rows in self.iterator():
                    self.replay_buffer.extend(rows)  # type: ignore[union-attr]
            except BaseException as failure:  # handed to the caller of shutdown, who cannot see this thread
                self._failure = failure

        self._thread = threading.Thread(target=fill, name="rollouts", daemon=True)
        self._thread.start()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """Stop collecting and close the engine; idempotent."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self.engine.close()
        if close_env and not self.env.is_closed:
            self.env.close(raise_if_closed=False)
        failure, self._failure = self._failure, None
        if failure is not None and raise_on_error:
            raise failure

    def update_policy_weights_(  # type: ignore[override]
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Push named tensors to the engine; returns when the next token comes from them."""
        self.engine.update_weights(weights, version)

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self._seed = seed
        return seed

    def state_dict(self) -> OrderedDict:
        """Position in the prompts and amount collected; the engine holds no state between collections."""
        return OrderedDict(stream=self.env.stream.state_dict(), collected=self._collected)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        self.env.stream.load_state_dict(state_dict["stream"])
        self._collected = state_dict["collected"]
