"""Rollout workers that can be looked into, and that die or stop in the middle of a transfer of weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.records import GroupOutput
from sota_grpo.workers.rollout import RolloutWorker
from tests.engine_rigs import EOS, PAD, tiny_model

TOKENS_HELD = 5


class HeldEngine(TransformersEngine):
    """Its two groups begin together, and stay at some tokens until the weights called 1 have come."""

    num_steps = 0

    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        if self.version == 0 and (self.num_in_flight < 2 or self.num_steps == TOKENS_HELD):
            time.sleep(0.005)
            return []
        self.num_steps += 1
        return super()._step()


class WatchedWorker(RolloutWorker):
    """Says what it has, and sends itself a signal after some slices."""

    _slices_left, _signal = 0, signal.SIGCONT

    def arm(self, pid: int, name: str, slices: int) -> None:
        """The worker with this pid sends itself the signal when it has so many slices of the next transfer."""
        if pid == os.getpid():
            self._slices_left, self._signal = slices, signal.Signals[name]

    def num_steps(self) -> int:
        return self._engine.num_steps

    def weights(self) -> Future[tuple[WeightPack, float]]:
        """Those that the engine serves; and a sum by the process's default group, which is another one."""

        def look(engine: HeldEngine) -> tuple[WeightPack, float]:
            total = torch.tensor(2.5)
            dist.all_reduce(total)
            return WeightPack.of(engine._model.state_dict().items()), total.item()

        return self._submit(look)

    def resources(self) -> tuple[int, int]:
        return resources()

    def _progress(self) -> None:
        super()._progress()
        self._slices_left -= 1
        if self._slices_left == 0:
            os.kill(os.getpid(), self._signal)


def resources() -> tuple[int, int]:
    """Open files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def watched_rollout() -> WatchedWorker:
    """The tiny model, beside a default process group as vLLM and FSDP initialise one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = HeldEngine(tiny_model(), eos_token_ids=[EOS], pad_token_id=PAD, copy_model=False)
    worker = WatchedWorker(lambda: engine)
    worker._engine = engine
    return worker
