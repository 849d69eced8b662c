"""Weights from the learner to the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sota_grpo.engines.base import Generates


class Publisher:
    """Pushes the learner's weights to every engine.

    Contract. Consumes: the weights as they stand. Produces: engines that serve them. Waits for: every engine.
    Unblocked by: the last engine's answer. When an engine fails its exception ends the run.

    Args:
        weights: named tensors under the names of the base model, adapters merged, ``lm_head.weight`` included; or the
            adapter alone, for engines that merge it (:class:`~sota_grpo.policy.adapter_pack.AdapterPack`).
        engines: who receives them.
    """

    def __init__(self, weights: Callable[[], Any], engines: Sequence[Generates]):
        self.weights = weights
        self.engines = tuple(engines)
        self.seconds = 0.0

    def publish(self, version: int) -> None:
        """Return when every engine samples its next token from the weights called ``version``."""
        began = time.perf_counter()
        for engine in self.engines:
            engine.wake()
            engine.update_weights(self.weights(), version)
            if engine.version != version:
                raise RuntimeError(f"Engine {engine.name} serves version {engine.version} after a push of {version}.")
        self.seconds = time.perf_counter() - began
