"""TorchRL's experimental GRPOTrainer around the parts of :class:`benchmarks.peers.torchrl.TorchRL`.

It is given what its recipe gives it: the collector, the buffer, the loss (which pads and scores the reference first)
and a sender of weights. One micro-batch is the whole batch, because under gradient accumulation it fails where it
averages its metrics: the gradient's norm is only in those of the last micro-batch (TorchRL 0.14.1).
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from tensordict import TensorDictBase
from torchrl.trainers.algorithms.grpo import GRPOTrainer

from benchmarks.peers.paced import Paced
from benchmarks.peers.torchrl import TorchRL
from benchmarks.peers.work import CLIP_NORM, Folder


class TorchRLTrainer(TorchRL):
    """Steps of ``GRPOTrainer.train()``, which is held before each collection.

    Args:
        folder: the work.
    """

    def __init__(self, folder: Folder):
        super().__init__(folder, "vllm", micro=folder.case.rows)
        self.ref_s = 0.0
        self.paced = Paced()
        inner = self.policy.forward

        def forward(*arguments: Any, **options: Any) -> Any:
            self.paced.boundary()
            began = time.perf_counter()
            measured = inner(*arguments, **options)
            self.generate_s = time.perf_counter() - began
            return measured

        self.policy.forward = forward
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = GRPOTrainer(
                collector=self.collector,
                total_frames=1000 * self.case.rows,
                loss_module=self._loss_module,
                optimizer=self.optimizer,
                weight_sync_sender=self,
                empty_replay_buffer_on_weight_update=True,
                replay_buffer=self.buffer,
                clip_norm=CLIP_NORM,
                progress_bar=False,
                log_rewards=False,
                log_kl=False,
            )
        self.paced.start(trainer.train)

    def _loss_module(self, sampled: TensorDictBase) -> Any:
        began = time.perf_counter()
        batch = self._referred(sampled)
        self.ref_s += time.perf_counter() - began
        return self._losses(batch)

    def update_weights(self) -> None:
        """Called by the trainer once per collected batch."""
        began = time.perf_counter()
        self._publish()
        self.publish_s = time.perf_counter() - began

    def step(self) -> dict[str, float]:
        """One step of the trainer; what it does beside the phases named counts as learning."""
        self.ref_s = self.env.seconds = 0.0
        whole = self.paced.step()
        measured = {
            "generate": self.generate_s,
            "score": self.env.seconds,
            "ref": self.ref_s,
            "publish": self.publish_s,
        }
        return measured | {"learn": whole - sum(measured.values()), "whole": whole}

    def close(self) -> None:
        self.paced.end()
        super().close()
