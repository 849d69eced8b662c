"""The driver's side of weights that travel by broadcast: who takes part, what if one does not, who comes later."""

from __future__ import annotations

import logging
import socket
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from sota_grpo.workers.broadcasts import OnDemand
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.weight_ends import SendsWeights, WeightLayout
from sota_grpo.workers.weight_group import Meeting

logger = logging.getLogger(__name__)
_MAX_FAILURES = 3  # in a row, while no worker was lost


class WeightTransfer:
    """Gives the learner's weights to every rollout worker of a fleet by one broadcast.

    Contract. Consumes: versions to push. Produces: workers that serve them. Waits for: every live worker, at each slice
    for ``deadline_s / 2``, and then for its engine to load them. When one dies or hangs meanwhile, or is out of reach,
    the weights of this version go to all through the object store instead, out of the copy that the learner keeps; the
    next version is sent to a new group of those that live then. A worker that starts in between gets that copy. Where
    nobody was lost and it failed all the same, three times in a row, the object store is used from then on.

    Args:
        fleet: of rollout workers.
        sender: the learner.
        share: see :meth:`~sota_grpo.workers.base.Launcher.share`.
        backend: ``nccl`` where learner and workers each have a GPU, else ``gloo``.
        deadline_s: longest wait for one worker.
        host: this process's address, as workers and learner reach it; the store listens there only.
        dtype: that of all the engines' matrices, asked at the first push; None: weights are sent as they are.
        slice_bytes: of one message.
    """

    def __init__(
        self,
        fleet: Fleet,
        sender: SendsWeights,
        *,
        share: Callable[[Any], Any],
        backend: Literal["gloo", "nccl"],
        deadline_s: float,
        host: str = "127.0.0.1",
        dtype: Callable[[], torch.dtype | None] = lambda: None,
        slice_bytes: int = 64 << 20,
    ):
        self._fleet, self._sender, self._share, self._backend = fleet, sender, share, backend
        self._deadline_s, self._stall_s = deadline_s, deadline_s / 2  # a worker that waits is not silent
        self._slice_bytes, self._dtype = slice_bytes, dtype
        self._layout: WeightLayout | None = None
        self._meeting: Meeting | None = None
        self._failures = 0
        with socket.create_server((host, 0)) as listener:
            self._host, self._port = host, listener.getsockname()[1]
            self._store: Any = dist.TCPStore(
                host,
                self._port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._stall_s),
                master_listen_fd=listener.detach(),
            )

    def push(self, version: int) -> list[int]:
        """Send the learner's weights as they are, called ``version``; the versions that the workers serve afterwards.

        Raises:
            WorkerDied, TimeoutError, ValueError: as :meth:`~sota_grpo.workers.fleet.Fleet.broadcast`.
        """
        restarts, is_tried = self._fleet.restarts, self._failures < _MAX_FAILURES
        meeting = self._gather(version) if is_tried else None
        failure = self._sender.send_weights(meeting, version, self._dtype()) or (
            None if meeting else "no worker answered"
        )
        newest = OnDemand(self._newest)
        self._fleet.keep("update_weights", newest)
        answers = [] if meeting is None else self._served(self._stall_s if failure else self._deadline_s)
        if answers and all(served == version for served, _ in answers):
            self._failures = 0
            return [served for served, _ in answers]
        self._meeting = None
        if is_tried:
            reasons = {failure, *(why for _, why in answers)} - {None}
            lost = self._fleet.restarts - restarts
            self._failures = 0 if lost else self._failures + 1
            logger.warning(
                "Version %d goes to the rollout workers through the object store, because its broadcast failed (%s; "
                "workers lost: %d)%s.",
                version,
                "; ".join(sorted(map(str, reasons))) or "a worker came later",
                lost,
                ", and so do all later ones" * (self._failures == _MAX_FAILURES),
            )
        return self._fleet.broadcast(
            "update_weights", *newest.made().result(), deadline_s=self._deadline_s, sticky=True
        )

    def close(self) -> None:
        """Free the port; idempotent."""
        self._store = None

    def _gather(self, version: int) -> Meeting | None:
        """Tell everybody to take part; the group of the last time, if it has the same members."""
        if self._layout is None:
            self._layout = self._sender.weight_layout(self._dtype())
        try:
            members = tuple(sorted(self._fleet.broadcast("weight_member", deadline_s=self._stall_s)))
            if self._meeting is None or self._meeting.members != members:
                name, limits = uuid.uuid4().hex, (self._stall_s, self._slice_bytes)
                self._meeting = Meeting(self._host, self._port, name, members, self._backend, *limits)
            call = ("receive_weights", self._meeting, self._layout, version)
            self._fleet.broadcast(*call, deadline_s=self._stall_s)
        except TimeoutError:  # all were mute and are being replaced
            return None
        return self._meeting

    def _served(self, deadline_s: float) -> list[tuple[int, str | None]]:
        try:
            return self._fleet.broadcast("served", deadline_s=deadline_s)
        except TimeoutError:
            return []

    def _newest(self) -> tuple[Any, int]:
        pack, version = self._sender.kept_weights()
        return self._share(pack), version
