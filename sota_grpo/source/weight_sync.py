"""Weight sync from the learner to the engines, as a TorchRL ``WeightSyncScheme``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.weight_update import WeightSyncScheme

from sota_grpo.engines import Engine
from sota_grpo.errors import RunFailed
from sota_grpo.policy.weight_pack import Checksum, WeightPack
from sota_grpo.text import one_line

logger = logging.getLogger(__name__)


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
    """Result of a comparison of the checksums of weights in the learner and in every worker, as names of weights."""

    reported: bool = True  # False: nothing was compared: the engine has no checksums, or its only worker got an adapter
    equal: set[str] = field(default_factory=set)  # alike in the learner and every worker
    differing: dict[str, str] = field(default_factory=dict)  # {name: sentence with a worker and both checksums}
    unread: set[str] = field(default_factory=set)  # not comparable: a worker lacks it, or orders its elements otherwise


class EngineWeightSync(WeightSyncScheme):
    """Sends the learner's weights to the engine, and verifies by checksum that every worker has loaded them.

    The log says once if weights cannot be compared. If only an adapter is sent, the workers' weights are compared with
    each other.

    Args:
        weights: returns named tensors, with the base model's names, LoRA merged and ``lm_head.weight`` included; or
            only the adapter (:func:`~sota_grpo.policy.lora.adapter_pack`).
        make_room: releases the learner's cached memory, if the engine shares its devices; None: it has its own.
        whole: returns all weights with LoRA merged, if ``weights`` returns only the adapter.
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
        self.seconds = 0.0  # duration of the last send()
        self._reports: bool | None = None  # whether workers can be compared; None before the first comparison
        self._has_logged = False
        self._initialized_on_sender = self.synchronized_on_sender = True

    def create_transport(self, **kwargs: Any) -> Any:
        raise NotImplementedError("The engine transfers the weights itself: use send(), which waits for all workers.")

    def send(  # type: ignore[override]
        self, weights: Any = None, worker_ids: Any = None, *, version: int | None = None, verify: bool = True
    ) -> None:
        """Wake the engine, send weights, and wait until every next token is sampled with them.

        Args:
            weights: input of :func:`named_weights`; None: the learner's.
            worker_ids: ignored, because all workers get the weights.
            version: version number of the weights; None: the engine's plus 1.
            verify: compare checksums afterwards.

        Raises:
            RunFailed: a worker's checksum differs from that of the sent weight; for an adapter, only a warning, once.
            RuntimeError, ValueError: the engine does not serve ``version`` after the update, or refuses the weights.
        """
        began = time.perf_counter()
        version = self.engine.version + 1 if version is None else version
        if isinstance(weights, Iterator):
            weights = list(weights)  # read again by compared()
        pushed = self.policy_weights() if weights is None else named_weights(weights)
        self.wake()  # after gathering, whose cached memory this releases
        self.engine.update_weights(pushed, version)
        if self.engine.version != version:
            raise RuntimeError(
                f"Engine {self.engine.name} serves version {self.engine.version} after an update to version {version}."
            )
        if verify and self._reports is not False:
            if isinstance(pushed, Iterator):  # the engine has consumed it
                pushed = self.policy_weights()
            compared = self.compared(pushed)
            if self._reports is None:  # later a single worker may be ready, whose adapter has nothing to compare with
                self._reports = compared.reported
            if compared.differing or compared.unread or not compared.reported:
                self._report(compared, pushed, version)
        self.seconds = time.perf_counter() - began

    def _report(self, compared: Compared, pushed: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Raise RunFailed if weights differ (of an adapter: log a warning); log which weights cannot be compared."""
        if compared.differing:
            name, values = next(iter(compared.differing.items()))
            fault = (
                f"Weight version {version} was not loaded as it was sent: {values} as the checksum of {name}, and "
                f"{len(compared.differing)} of {len(compared.differing) + len(compared.equal)} weights differ."
            )
            if not (isinstance(pushed, WeightPack) and pushed.scales):
                remedy = "Resume from the last checkpoint, without that worker's machine if the fault returns."
                raise RunFailed(f"{fault} {remedy}")
            if not self._has_logged:  # workers merge the adapter, and machines of two kinds round differently
                logger.warning("%s Use machines of the same type for all engines.", one_line(fault, None))
                self._has_logged = True
        if not self._has_logged and (compared.unread or not self._reports):
            unread = ", ".join(sorted(compared.unread)[:3]) + f" ({len(compared.unread)} in all)"
            what = one_line(unread, None) if self._reports else "its weights"
            fault = "Engine %s: the checksums of %s cannot be compared, so wrong values after a push are not detected."
            logger.info(fault, self.engine.name, what)
            self._has_logged = True

    def compared(self, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> Compared:
        """Compare all workers' weights by checksum with ``weights``; None: with the learner's, adapter merged.

        If ``weights`` are an adapter alone, all workers are compared with the first worker.
        """
        if (held := self.engine.weight_sums()) is None:
            return Compared(reported=False)
        if weights is None:
            weights = (self.whole or self.policy_weights)()
        result, owner, pairs = Compared(), "the learner", weights
        if isinstance(weights, WeightPack) and weights.scales:
            if len(held) == 1:  # nothing to compare with: the worker has merged the adapter itself
                return Compared(reported=False)
            owner, sums = next(iter(held.items()))
            pairs = sums.items()
        for name, value in pairs:
            expected: Checksum | None = None
            for worker, sums in held.items():
                if (one := sums.get(name)) is None:
                    result.unread.add(name)
                    continue
                if isinstance(value, Checksum):
                    expected = value
                elif expected is None or one[::3] != expected[::3]:
                    expected = Checksum.of(value, one.dtype, one.columns)
                if one == expected:
                    result.equal.add(name)
                elif one[::3] != expected[::3] or _in_another_order(one, expected, value):
                    result.unread.add(name)
                else:
                    result.differing.setdefault(name, f"{worker} has {one}, {owner} has {expected}")
        result.equal -= result.unread | result.differing.keys()
        return result

    def sleep(self) -> None:
        """Put an engine that shares the learner's devices to sleep; no-op if it has its own."""
        if self.make_room is not None:
            self.engine.sleep()

    def wake(self) -> None:
        """Release the learner's cached memory, then undo :meth:`sleep`; no-op if the engine has its own devices."""
        if self.make_room is not None:
            self.make_room()
            self.engine.wake()


def _in_another_order(one: Checksum, expected: Checksum, value: torch.Tensor | Checksum) -> bool:
    """Whether ``one`` is the checksum of ``value`` with permuted rows or, if ``value`` is square, transposed."""
    if one.total == expected.total or not isinstance(value, torch.Tensor) or value.ndim != 2:
        return one.total == expected.total
    return value.shape[0] == value.shape[1] and Checksum.of(value.t(), one.dtype, one.columns) == one
