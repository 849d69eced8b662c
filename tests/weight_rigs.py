"""Rollout workers that can be looked into, and that die or stop in the middle of a transfer of weights."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future

import torch
import torch.distributed as dist

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.policy.weight_pack import WeightPack, WeightPacks
from sota_grpo.rl.records import GroupOutput
from sota_grpo.workers.base import WorkerThread
from sota_grpo.workers.rollout import RolloutWorker
from sota_grpo.workers.weight_transfer import Rendezvous, WeightLayout, WeightReceiver
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


class Holder:
    """A rollout worker without an engine: it keeps what it is sent, and may die in the middle."""

    def __init__(self) -> None:
        self._receiver, self._thread = WeightReceiver(), WorkerThread("holder")
        self._weights, self._version, self._slices_left = WeightPack.of([]), 0, -1

    def arm(self, slices: int) -> None:
        """It kills itself when it has so many slices of the next transfer."""
        self._slices_left = slices

    def ping(self) -> float:
        return self._thread.silent_s()

    def update_weights(self, pack: WeightPack | WeightPacks, version: int) -> Future[int]:
        return self._thread.submit(lambda: self._hold(pack.tensors(), version))

    def weight_member(self) -> str:
        return self._receiver.member

    def receive_weights(self, rendezvous: Rendezvous, layout: WeightLayout, version: int) -> None:
        def receive() -> None:
            if (weights := self._receiver.receive(rendezvous, layout, self._progress)) is not None:
                self._hold(weights, version)

        self._thread.submit(receive)

    def served(self) -> Future[tuple[int, str | None]]:
        return self._thread.submit(lambda: (self._version, self._receiver.failure))

    def weights(self) -> Future[WeightPack]:
        return self._thread.submit(lambda: self._weights)

    def digest(self) -> Future[str]:
        return self._thread.submit(lambda: hashlib.sha256(self._weights.buffer).hexdigest())

    def _hold(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> int:
        self._weights, self._version = WeightPack.of(weights), version
        return version

    def _progress(self) -> None:
        self._thread.progress()
        self._slices_left -= 1
        if self._slices_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def close(self) -> None:
        self._thread.close()


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
