"""Many rollout workers behind the protocol of one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import torch

from sota_grpo.engines.base import response_rooms
from sota_grpo.engines.stepping import Streams
from sota_grpo.policy.lora import AdapterPack
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.weight_transfer import WeightTransfer


class FleetEngine(Streams):
    """What the gate, the evaluation, the publisher and the source see of the rollout workers.

    Contract. Consumes: requests, one group at a time. Produces: groups, from whichever worker had room. Waits for:
    workers, as long as each shows progress. Unblocked by: the next finished group. When a worker dies or is silent, the
    fleet replaces it, gives the new one the newest weights, and asks again for the groups it had; a push returns when
    every worker that is alive serves the version. A stream that is dropped is sampled to its end all the same.

    Args:
        fleet: rollout workers (:class:`~sota_grpo.workers.rollout.RolloutServant`).
        name: of the engines behind it.
        max_model_len: context in tokens.
        share: makes a large value available to every worker (:meth:`~sota_grpo.workers.base.Launcher.share`).
        deadline_s: longest wait of a push for one worker.
        base: the weights under an adapter, packed once, where the learner publishes its adapter only.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        name: str,
        max_model_len: int,
        share: Callable[[Any], Any],
        deadline_s: float,
        base: Callable[[], WeightPack] | None = None,
    ):
        self.fleet = fleet
        self.name = name
        self.max_model_len = max_model_len
        self.version = 0
        self._share = share
        self.base = base
        self._deadline_s = deadline_s

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """The group, some day; its samples are drawn by the weights that are newest as they are drawn."""
        response_rooms([request], sampling, self.max_model_len)
        return self.fleet.submit(request, sampling)

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]] | AdapterPack | WeightTransfer, version: int
    ) -> None:
        """Push to every worker, in flight; returns when each one's next token comes from the new weights.

        Args:
            weights: the tensors; or an adapter; or what brings the learner's weights by itself.
            version: what they are called.

        Raises:
            RuntimeError: a worker serves another version afterwards.
        """
        if isinstance(weights, WeightTransfer):
            served = weights.push(version)
        else:
            served = self._broadcast("update_weights", self._share(self._packed(weights)), version)
        wrong = sorted({found for found in served if found != version})
        if wrong:
            raise RuntimeError(f"Rollout workers serve versions {wrong} after a push of {version}.")
        self.version = version

    @cached_property
    def weight_dtype(self) -> torch.dtype | None:
        """The one that all the engines' matrices have, so that pushed ones may come in it; None where there is none."""
        found = set(self.fleet.broadcast("weight_dtype", deadline_s=self._deadline_s))
        return found.pop() if len(found) == 1 else None

    def _packed(self, weights: Iterable[tuple[str, torch.Tensor]] | AdapterPack) -> WeightPack | AdapterPack:
        if isinstance(weights, AdapterPack):
            self._send_base()
            return weights
        return weights if isinstance(weights, WeightPack) else WeightPack.of(weights)

    def _send_base(self) -> None:
        """What the adapter is merged into, once; a worker that starts later gets it before its first adapter."""
        if self.base is not None:
            base, self.base = self.base(), None
            self._broadcast("set_base", self._share(base))

    def _broadcast(self, method: str, *args: Any) -> list[Any]:
        return self.fleet.broadcast(method, *args, deadline_s=self._deadline_s, sticky=True)

    def sleep(self) -> None:
        """Nothing: these engines have their own devices."""

    def wake(self) -> None:
        """Nothing to undo."""

    def close(self) -> None:
        """End the workers; idempotent."""
        self.fleet.close()
