"""TorchRL's interface to the rollouts, for pipelines of one's own: importing TorchRL's collectors takes seconds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.collectors import BaseCollector
from torchrl.data import ReplayBuffer

from sota_grpo.engines import Engine
from sota_grpo.envs import TaskEnv
from sota_grpo.rl.records import Sampling, sample_seed
from sota_grpo.rl.table import RowTable, row_list
from sota_grpo.source.source import Prompt, Rollouts


class RolloutCollector(BaseCollector):
    """Draws prompts, samples a group of responses to each, and returns the graded rows.

    TorchRL's interface to :class:`Rollouts`, for pipelines of one's own; the trainers use
    :class:`~sota_grpo.source.source.RolloutSource`. Rows come out in the order in which their prompts were drawn,
    whatever the order in which they finished.

    Args:
        env: the :class:`~sota_grpo.envs.TaskEnv` that draws, tokenises and grades.
        engine: samples the responses.
        sampling: how a response is drawn.
        dialog_turns_per_batch: responses per yielded batch, a multiple of ``env.repeats``; where tasks have group sizes
            of their own, the number of prompts that have so many with ``env.repeats`` each.
        total_dialog_turns: batches end when so many responses are collected; -1 never ends.
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
        """The graded rows of so many prompts, siblings together."""
        prompts = [
            Prompt(group_id, example, self.env.group_size(example), sample_seed(self._seed, group_id))
            for group_id, example in self.env.stream.draw(num_groups)
        ]
        groups = {group.prompt.group_id: group.rows for group in self.rollouts.stream(prompts, self.sampling)}
        rows = row_list(RowTable.cat([groups[prompt.group_id] for prompt in prompts]).stack())
        self._collected += len(rows)
        return rows

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
