"""Many rollout workers behind the protocol of one engine."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from sota_grpo.engines.checks import response_rooms
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.records import GroupOutput, GroupRequest, Sampling
from sota_grpo.workers.fleet import Fleet


class FleetEngine:
    """What the gate, the evaluation, the publisher and the source see of the rollout workers.

    Contract. Consumes: requests, one group at a time. Produces: groups, from whichever worker had room. Waits for:
    workers, at most ``deadline_s`` without any answer. Unblocked by: the next finished group. When a worker dies or is
    silent, the fleet replaces it, gives the new one the newest weights, and asks again for the groups it had; a push
    returns when every worker that is alive serves the version.

    Args:
        fleet: rollout workers (:class:`~sota_grpo.workers.rollout.RolloutServant`).
        name: of the engines behind it.
        max_model_len: context in tokens.
        share: makes a large value available to every worker (:meth:`~sota_grpo.workers.base.Launcher.share`).
        deadline_s: longest wait for a group or for a push.
    """

    def __init__(
        self, fleet: Fleet, *, name: str, max_model_len: int, share: Callable[[Any], Any], deadline_s: float
    ):
        self.fleet = fleet
        self.name = name
        self.max_model_len = max_model_len
        self.version = 0
        self._share = share
        self._deadline_s = deadline_s

    def submit(self, request: GroupRequest, sampling: Sampling) -> Future[GroupOutput]:
        """The group, some day; its samples are drawn by the weights that are newest as they are drawn."""
        response_rooms([request], sampling, self.max_model_len)
        return self.fleet.submit(request, sampling)

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        """Yield each group once, as soon as it is finished.

        Raises:
            ValueError: a prompt leaves no room for a response; nothing was sampled then.
            TimeoutError: no group was finished for ``deadline_s``.
        """
        response_rooms(requests, sampling, self.max_model_len)
        return self._stream(requests, sampling)

    def _stream(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]:
        done: queue.SimpleQueue[Future[GroupOutput]] = queue.SimpleQueue()
        for request in requests:
            self.fleet.submit(request, sampling).add_done_callback(done.put)
        for received in range(len(requests)):
            try:
                found = done.get(timeout=self._deadline_s)
            except queue.Empty:
                raise TimeoutError(
                    f"The rollout workers finished {received} of {len(requests)} groups and then none for "
                    f"{self._deadline_s:g} s; raise inference_model.timeout_s if responses take that long."
                ) from None
            yield found.result()

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Push to every worker, in flight; returns when each one's next token comes from the new weights.

        Raises:
            RuntimeError: a worker serves another version afterwards.
        """
        pack = weights if isinstance(weights, WeightPack) else WeightPack.of(weights)
        served = self.fleet.broadcast(
            "update_weights", self._share(pack), version, deadline_s=self._deadline_s, sticky=True
        )
        wrong = sorted({found for found in served if found != version})
        if wrong:
            raise RuntimeError(f"Rollout workers serve versions {wrong} after a push of {version}.")
        self.version = version

    def sleep(self) -> None:
        """Nothing: these engines have their own devices."""

    def wake(self) -> None:
        """Nothing to undo."""

    def close(self) -> None:
        """End the workers; idempotent."""
        self.fleet.close()
