"""Weight sync from the learner to the engines, as a TorchRL ``WeightSyncScheme``."""

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
    """Return the ``(name, tensor)`` pairs of a module, a (nested) TensorDict or a mapping; return pairs unchanged.

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
    """Names of the learner's weights by checksum: ``equal`` to the engine's, ``differing``, ``unread``.

    Args:
        reported: whether the engine reports checksums.
        unread: the engine has no weight of that name, or stores its elements in another order.
    """

    reported: bool = True
    equal: set[str] = field(default_factory=set)
    differing: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)


class EngineWeightSync(WeightSyncScheme):
    """Sends the learner's weights to the engine; errors of the engine are raised.

    Args:
        weights: returns named tensors, with the base model's names, LoRA merged and ``lm_head.weight`` included; or
            only the adapter (:func:`~sota_grpo.policy.lora.adapter_pack`).
        engine: receives the weights.
        make_room: releases the learner's cached memory, if the engine shares its devices; None: it does not.
        whole: returns all weights with LoRA merged, if ``weights`` returns only the adapter.

    Attributes:
        seconds: duration of the last :meth:`send`.
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
        raise NotImplementedError("The engine sends the weights itself: use send(), which waits for all workers.")

    def send(self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None) -> None:  # type: ignore[override]
        """Send weights as ``version`` (default: the next) and wait until every next token is sampled with them.

        Args:
            weights: input of :func:`named_weights`; None: the learner's weights.
        """
        began = time.perf_counter()
        version = self.engine.version + 1 if version is None else version
        pushed = self.policy_weights() if weights is None else named_weights(weights)
        self.wake()  # after gathering, whose cached memory this releases
        self.engine.update_weights(pushed, version)
        if self.engine.version != version:
            raise RuntimeError(
                f"Engine {self.engine.name} serves version {self.engine.version} after an update to version {version}."
            )
        self.seconds = time.perf_counter() - began

    def compared(self) -> Compared:
        """Compare the engine's weights with the learner's by checksum."""
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
        """Put an engine that shares the learner's devices to sleep; no-op if it has its own."""
        if self.make_room is not None:
            self.engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`, after releasing the learner's cached memory so that the engine can allocate it."""
        if self.make_room is not None:
            self.make_room()
            self.engine.wake()
