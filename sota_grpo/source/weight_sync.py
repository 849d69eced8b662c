"""Pushes of the learner's weights to the engines, as a TorchRL weight-sync scheme."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update import WeightSyncScheme

from sota_grpo.engines import Engine
from sota_grpo.policy.weight_pack import Checksum


def named_weights(weights: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Return ``(name, tensor)`` pairs of a module, a (nested) TensorDict, a mapping, or pairs as they are.

    >>> [name for name, _ in named_weights(nn.Linear(2, 1))]
    ['weight', 'bias']
    """
    if isinstance(weights, nn.Module):
        return weights.state_dict().items()
    if isinstance(weights, TensorDictBase):
        weights = weights.flatten_keys(".")
    return weights.items() if hasattr(weights, "items") else weights


@dataclass
class Compared:
    """Names of the learner's weights, by whether the engine holds equal ones.

    Args:
        reported: the engine reports weights at all.
        unread: it has no weight of that name, or its elements in another order.
    """

    reported: bool = True
    equal: set[str] = field(default_factory=set)
    differing: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)


class EngineWeightSync(WeightSyncScheme):
    """Pushes the learner's weights to the engine; a failure of the engine is raised.

    Args:
        weights: named tensors under the names of the base model, adapters merged, ``lm_head.weight`` included; or the
            adapter alone (:func:`~sota_grpo.policy.lora.adapter_pack`).
        engine: receives them.
        make_room: releases the learner's cached memory if the engine shares its devices; None: it has its own.
        whole: all weights with the adapter merged, if ``weights`` is the adapter alone.

    Attributes:
        seconds: of the last push.
    """

    def __init__(
        self,
        weights: Callable[[], Any],
        engine: Engine,
        make_room: Callable[[], object] | None = None,
        whole: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None,
    ):
        super().__init__()
        self.policy_weights, self.engine, self.make_room, self.whole = weights, engine, make_room, whole
        self.seconds = 0.0
        self._initialized_on_sender = self.synchronized_on_sender = True

    def create_transport(self, **kwargs: Any) -> Any:
        raise NotImplementedError("The engine is the transport: its update_weights() returns when all have them.")

    def send(self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None) -> None:  # type: ignore[override]
        """Return when every engine samples its next token from the weights of ``version`` (default: the next).

        Args:
            weights: what :func:`named_weights` reads; None: the learner's.
        """
        began = time.perf_counter()
        version = self.engine.version + 1 if version is None else version
        pushed = self.policy_weights() if weights is None else named_weights(weights)
        self.wake()  # after gathering the weights, whose memory it releases
        self.engine.update_weights(pushed, version)
        if self.engine.version != version:
            raise RuntimeError(
                f"Engine {self.engine.name} serves version {self.engine.version} after a push of {version}."
            )
        self.seconds = time.perf_counter() - began

    def compared(self) -> Compared:
        """Compare the weights that the engine holds with the learner's, by checksum."""
        if (held := self.engine.weight_sums()) is None:
            return Compared(reported=False)
        result = Compared()
        for name, value in (self.whole or self.policy_weights)():
            if (held_sum := held.get(name)) is None:
                result.unread.add(name)
            elif (expected := Checksum.of(value, held_sum.dtype)) == held_sum:
                result.equal.add(name)
            else:
                (result.unread if expected.total == held_sum.total else result.differing).add(name)
        return result

    def sleep(self) -> None:
        """Leave shared GPUs to the learner; a no-op if the engine has its own."""
        if self.make_room is not None:
            self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`; first release cached memory, which an engine in another process cannot use."""
        if self.make_room is not None:
            self.make_room()
        self.engine.wake()
