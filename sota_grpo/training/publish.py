"""Weights from the learner to the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sota_grpo.engines.base import Engine


class Publisher:
    """Pushes the learner's weights to every engine.

    Contract. Consumes: the weights as they stand. Produces: engines that serve them. Waits for: every engine.
    Unblocked by: the last engine's answer. When an engine fails its exception ends the run.

    Args:
        weights: named tensors under the names of the base model, adapters merged, ``lm_head.weight`` included; or the
            adapter alone, for engines that merge it (:class:`~sota_grpo.policy.lora.AdapterPack`).
        engines: who receives them.
        share_device: the engines stand on the learner's GPU, so each makes room for the other.
    """

    def __init__(self, weights: Callable[[], Any], engines: Sequence[Engine], *, share_device: bool = False):
        self.weights = weights
        self.engines = tuple(engines)
        self.share_device = share_device
        self.seconds = 0.0

    def publish(self, version: int) -> None:
        """Return when every engine samples its next token from the weights called ``version``."""
        began = time.perf_counter()
        self.wake()
        for engine in self.engines:
            engine.update_weights(self.weights(), version)
            if engine.version != version:
                raise RuntimeError(f"Engine {engine.name} serves version {engine.version} after a push of {version}.")
        self.seconds = time.perf_counter() - began

    def sleep(self) -> None:
        """Leave a shared GPU to the learner; nothing where the engines have their own."""
        if self.share_device:
            for engine in self.engines:
                engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`. An engine in another process finds only the memory that this one has given back."""
        if self.share_device:
            torch.cuda.empty_cache()
        for engine in self.engines:
            engine.wake()
