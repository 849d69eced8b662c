"""Rollouts: a TorchRL collector over any engine, and the source that the loop reads batches from."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv, prompt_rows
from sota_grpo.envs.stream import before_draws
from sota_grpo.errors import UserError
from sota_grpo.rl.collate import row_list
from sota_grpo.rl.records import Sampling, sample_seed
from sota_grpo.source.batches import apply_transforms, constant_rows, finish_group, group_request, require_age

logger = logging.getLogger(__name__)


class RolloutCollector(BaseCollector):
    """Draws prompts, samples a group of responses to each, and returns the graded rows.

    One class over any :class:`~sota_grpo.engines.base.Generates`. A group is graded while the engine still generates
    the others: elsewhere, where ``env.grader`` has workers. Rows come out in the order in which their prompts were
    drawn, whatever the order in which they finished.

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

    Attributes:
        seconds: that the caller waited for, by phase: the engine, and the scores that were not there by then.

    Example::

        collector = RolloutCollector(env, engine, sampling=Sampling(max_tokens=64), dialog_turns_per_batch=32)
        for rows in collector:                  # LazyStackedTensorDict, batch_size [32], one row per response
            ...
    """

    trajs_per_batch = None

    def __init__(
        self,
        env: TaskEnv,
        engine: Generates,
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
        self.seconds = {"generate": 0.0, "score": 0.0}
        self._seed = seed
        self._collected = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def collect(self, num_groups: int) -> list[TensorDictBase]:
        """``num_groups * env.repeats`` graded rows, siblings next to each other."""
        draws = self.env.stream.draw(num_groups)
        prompts = {
            group_id: prompt_rows(group_id, example, self.env.prompt_ids(example), repeats=1)
            for group_id, example in draws
        }
        requests = [
            group_request(
                self.env, group_id, example, num_samples=self.env.repeats, seed=sample_seed(self._seed, group_id)
            )
            for group_id, example in draws
        ]
        grading: dict[int, Future[list[TensorDictBase]]] = {}
        began = time.perf_counter()
        scoring = 0.0
        for output in self.engine.generate(requests, self.sampling):
            arrived = time.perf_counter()
            rows = finish_group(prompts[output.group_id], output, self.env.tokenizer)
            grading[output.group_id] = self.env.begin_grading(rows)
            scoring += time.perf_counter() - arrived
        generated = time.perf_counter()
        graded = [row for group_id in prompts for row in grading[group_id].result()]
        self.seconds["score"] += scoring + time.perf_counter() - generated
        self.seconds["generate"] += generated - began - scoring
        self._collected += num_groups * self.env.repeats
        return graded

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


class SyncSource:
    """Batches in lockstep: every row of a batch was sampled by the newest policy.

    Contract. Consumes: prompts of ``collector``. Produces: ``num_groups`` complete graded groups per call,
    with reference log-probs and advantages. Waits for: the engine. Unblocked by: its last finished group. When the
    engine dies its exception ends the run.

    Args:
        collector: yields graded rows.
        transforms: applied in order to the whole batch (reference log-probs, penalties, advantages).
        num_groups: groups per batch.
        max_policy_age: oldest policy, in published versions, whose tokens may be in a batch; 0 is lockstep.
        refill: replace groups whose rewards are all equal by fresh ones (dynamic sampling, DAPO, arXiv:2503.14476).
        sleep_engine: free the engine's device as soon as a batch is sampled; the next publish wakes it.
        max_draws: most collections per batch under ``refill``; then the batch is completed with the groups at hand.
    """

    def __init__(
        self,
        collector: RolloutCollector,
        transforms: Sequence[tuple[str, Transform]],
        *,
        num_groups: int,
        max_policy_age: int = 0,
        refill: bool = False,
        max_draws: int = 10,
        sleep_engine: bool = False,
    ):
        self.collector = collector
        self.transforms = tuple(transforms)
        self.num_groups = num_groups
        self.max_policy_age = max_policy_age
        self.refill = refill
        self.max_draws = max_draws
        self.sleep_engine = sleep_engine
        self._metrics: dict[str, float] = {}

    def next_batch(self, version: int) -> TensorDictBase:
        """The next batch for the learner that stands at ``version``.

        Raises:
            RuntimeError: a token is older than ``max_policy_age`` versions: the engine serves old weights.
        """
        self.collector.seconds = {"generate": 0.0, "score": 0.0}
        fresh, refilled = self._whole_batch()
        if self.sleep_engine:
            self.collector.engine.sleep()
        require_age(fresh, version, self.max_policy_age)
        seconds = dict(self.collector.seconds)
        rows = apply_transforms(self.transforms, LazyStackedTensorDict.lazy_stack(fresh), seconds)
        self._metrics = {f"time/{phase}_s": value for phase, value in seconds.items()}
        flat = sum(constant_rows(row_list(rows))) // self.collector.env.repeats
        self._metrics |= {"groups/zero_signal": flat, "groups/refilled": refilled}
        return rows

    def _whole_batch(self) -> tuple[list[TensorDictBase], int]:
        """The rows of ``num_groups`` groups in the order drawn, and how many groups were replaced by fresh ones."""
        size = self.collector.env.repeats
        if not self.refill:
            return self.collector.collect(self.num_groups), 0
        kept: list[TensorDictBase] = []
        flat: list[TensorDictBase] = []
        for _ in range(self.max_draws):
            rows = self.collector.collect(self.num_groups - len(kept) // size)
            constant = constant_rows(rows)
            flat += [row for row, alike in zip(rows, constant) if alike]
            kept += [row for row, alike in zip(rows, constant) if not alike]
            if len(kept) == self.num_groups * size:
                return kept, len(flat) // size
        missing = self.num_groups * size - len(kept)
        logger.warning(
            "After %d collections only %d of %d groups have unequal rewards; the rest carries no gradient.",
            *(self.max_draws, len(kept) // size, self.num_groups),
        )
        batch = sorted(kept + flat[-missing:], key=lambda row: int(row.get(keys.GROUP_ID)))
        return batch, (len(flat) - missing) // size

    def release(self, batch: TensorDictBase) -> None:
        """Nothing to free: in lockstep the next prompts are drawn when the next batch is asked for."""

    def metrics(self) -> dict[str, float]:
        """Seconds per phase and group counts of the last batch."""
        return dict(self._metrics)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.collector.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken, by this class or by a source with workers in lockstep."""
        self.collector.load_state_dict(_in_lockstep(state) if "in_flight" in state else state)


def _in_lockstep(state: dict[str, Any]) -> dict[str, Any]:
    """The state of a source with workers as a position in the prompts: those in flight are drawn again."""
    stream = before_draws(state["stream"], [group_id for group_id, *_ in state["in_flight"]])
    if stream is None or state["finished"]["groups"]:
        raise UserError("Workers had finished groups that this run would lose; resume it in its first mode.")
    return {"stream": stream, "collected": 0}
