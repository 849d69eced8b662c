"""Weights by broadcast, from the learner's memory into the rollout workers': the two ends, the process group that
joins them, and the driver, who knows what happens if a worker does not take part or comes later.

All weights are one run of bytes, laid out as in a :class:`~sota_grpo.policy.weight_pack.WeightPack`, that is sent slice
by slice: a small tensor costs no message, and nothing is sent twice for a tied head.

The group is gloo between CPUs, NCCL between GPUs. The learner is member 0 of a process group of its own, which neither
side's default group (FSDP's, vLLM's) knows of.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from sota_grpo.policy.sharding import replicated
from sota_grpo.policy.weight_pack import (
    Place,
    WeightPack,
    as_bytes,
    copy_to_host,
    padded,
    rounded,
    rounded_dtype,
    views,
)
from sota_grpo.text import first_line
from sota_grpo.workers.base import promised, resolve
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.slots import OnDemand

logger = logging.getLogger(__name__)
_NCCL_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_MAX_FAILURES = 3  # in a row, while no worker was lost


class TransferFailed(RuntimeError):
    """A member of the group is gone, was late, or has no room; the weights may go another way."""


@dataclass(frozen=True)
class WeightLayout:
    """Where each weight lies in the bytes that are sent.

    >>> layout = WeightLayout.of({"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)})
    >>> [(name, place.offset) for name, place in layout.places.items()], layout.num_bytes
    ([('a', 0), ('b', 64)], 128)
    """

    places: Mapping[str, Place]
    num_bytes: int

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], dtype: torch.dtype | None = None) -> WeightLayout:
        """Of a ``state_dict(keep_vars=True)``, sharded or not; a tensor under two names (a tied head) lies once.

        Args:
            state: named weights.
            dtype: that they are sent in; None: as they are.
        """
        places: dict[str, Place] = {}
        seen: dict[int, Place] = {}
        end = 0
        for name, value in state.items():
            if id(value) not in seen:
                sent = rounded_dtype(value, dtype)
                seen[id(value)] = Place(str(sent).removeprefix("torch."), tuple(value.shape), end)
                end += padded(value.numel() * sent.itemsize)
            places[name] = seen[id(value)]
        return cls(places, end)


@dataclass(frozen=True)
class Rendezvous:
    """How the members of one group find each other.

    Args:
        host, port: of the store.
        group: its name, never used before.
        members: what the rollout workers call themselves, in the order of their ranks from 1.
        backend: ``gloo`` or ``nccl``.
        stall_s: longest wait for the others, to come and at each slice.
        slice_bytes: of one message, a multiple of 64.
    """

    host: str
    port: int
    group: str
    members: tuple[str, ...]
    backend: Literal["gloo", "nccl"]
    stall_s: float
    slice_bytes: int


class WeightGroup:
    """The group that this process is in, kept from one transfer to the next."""

    def __init__(self) -> None:
        self._group: Any = None
        self._rendezvous: Rendezvous | None = None

    def join(self, rendezvous: Rendezvous, rank: int, device: torch.device) -> None:
        """Return when all members are in the group, at once where this one is in it already.

        Args:
            rendezvous: where.
            rank: of this member.
            device: where its slices lie.

        Raises:
            TransferFailed: they did not come within ``rendezvous.stall_s``.
        """
        if self._rendezvous is not None and self._rendezvous.group == rendezvous.group:
            return
        self.leave()
        made, make = promised(), partial(_joined, rendezvous, rank, device)
        # NCCL may wait for a member that has just died, for ever: that thread is left behind
        threading.Thread(target=resolve, args=(made, make), name="weight group", daemon=True).start()
        try:
            self._group = made.result(rendezvous.stall_s)
        except TimeoutError as error:
            raise TransferFailed(f"not all members came within {rendezvous.stall_s:g} s") from error
        except (RuntimeError, OSError) as error:
            raise TransferFailed(f"the members did not find each other: {what_torch_says(error)}") from error
        self._rendezvous = rendezvous

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill ``flat`` with member 0's, on every member.

        Raises:
            TransferFailed: another member is gone or was late; the group cannot be used again.
        """
        assert self._rendezvous is not None
        limit, options = timedelta(seconds=self._rendezvous.stall_s), dist.BroadcastOptions()
        options.rootRank, options.timeout, options.asyncOp = 0, limit, True
        try:
            work = self._group.broadcast([flat], options)
            if self._rendezvous.backend == "nccl":
                work.wait(limit)  # the host waits too; without a limit only the stream would
            else:
                work.wait()  # its own timeout ends it
        except RuntimeError as error:
            raise TransferFailed(what_torch_says(error)) from error

    def leave(self) -> None:
        """Members that wait for this one notice it (NCCL's at their deadline). Idempotent."""
        group, self._group, self._rendezvous = self._group, None, None
        if group is not None:
            with suppress(RuntimeError):  # it may be broken already
                group.abort()


def _joined(rendezvous: Rendezvous, rank: int, device: torch.device) -> Any:
    limit, size = timedelta(seconds=rendezvous.stall_s), 1 + len(rendezvous.members)
    client = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, wait_for_workers=False, timeout=limit)
    store = dist.PrefixStore(rendezvous.group, client)
    if rendezvous.backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        with socket.create_connection((rendezvous.host, rendezvous.port), limit.total_seconds()) as probe:
            own = probe.getsockname()[0]  # gloo's default is what this machine's name resolves to, often loopback
        options._devices = [gloo.create_device(hostname=own)]
        options._timeout = limit
        return gloo(store, rank, size, options)
    torch.cuda.set_device(device)
    before = os.environ.get(_NCCL_HANDLING)
    os.environ[_NCCL_HANDLING] = "0"  # read once, here: its watchdog would end the process where a member dies
    try:
        group: Any = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    finally:
        os.environ.pop(_NCCL_HANDLING)
        if before is not None:
            os.environ[_NCCL_HANDLING] = before
    group.eager_connect_single_device(device)
    return group


def what_torch_says(error: BaseException) -> str:
    """What an exception of torch says, without its stack and its own address in torch's source.

    >>> what_torch_says(RuntimeError("[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:63649. This is due"))
    'Connection closed by peer [127.0.0.1]:63649'
    """
    text = first_line(error)
    return (text.partition("] ")[2] if text.startswith("[/") else text).partition(". ")[0]


class WeightSender:
    """The learner's end of transfers to one or more fleets, in the learner's process; of several ranks each has one.

    A copy of what was sent last stays in this host's memory (as much as the weights), for workers that start later and
    for a transfer that failed: it is made beside the transfer, and of exactly the weights that were announced.

    Args:
        model: without adapter, whole or sharded (:func:`~sota_grpo.policy.sharding.shard`).
        leads: whether this rank is the one that sends; the others only take part in gathering.
        progress: called for every weight.
    """

    def __init__(self, model: nn.Module, *, leads: bool = True, progress: Callable[[], None] = lambda: None):
        self._model, self._leads, self._progress = model, leads, progress
        self._groups: defaultdict[tuple[str, int], WeightGroup] = defaultdict(WeightGroup)  # by store: one per fleet
        self._kept: tuple[WeightPack, int] | None = None

    def weight_layout(self, dtype: torch.dtype | None) -> WeightLayout:
        """What receivers must know beforehand; ``dtype`` as in :meth:`send_weights`."""
        return WeightLayout.of(self._state(), dtype)

    def send_weights(self, rendezvous: Rendezvous | None, version: int, dtype: torch.dtype | None) -> str | None:
        """Send every weight to the members of the rendezvous (None: only keep a copy); collective over the ranks.

        Args:
            rendezvous: where.
            version: what they are called.
            dtype: of all the engines' matrices, to which these are rounded where they lie; None sends them as they are.

        Returns:
            Why the transfer failed; None when every byte is on its way. Either way the copy is complete.
        """
        if not self._leads:
            for _ in self._whole(dtype):
                pass
            return None
        layout, device = self.weight_layout(dtype), torch.device("cpu")
        if rendezvous is not None and rendezvous.backend == "nccl":
            device = next(iter(self._state().values())).device
        slice_bytes = layout.num_bytes if rendezvous is None else rendezvous.slice_bytes
        kept = torch.empty(layout.num_bytes, dtype=torch.uint8)
        failure = None
        for part in _filled(self._whole(dtype), layout, kept, slice_bytes, device):
            # after a failure too the ranks go on gathering, and the copy is needed all the more
            if rendezvous is None or failure is not None:
                continue
            try:
                group = self._groups[rendezvous.host, rendezvous.port]
                group.join(rendezvous, 0, device)
                group.broadcast(part)
            except TransferFailed as error:
                failure = str(error)
                group.leave()
        self._kept = WeightPack(kept.numpy(), layout.places), version
        return failure

    def kept_weights(self) -> tuple[WeightPack, int]:
        """What was sent last, or was to be, and its version.

        Raises:
            RuntimeError: nothing was yet.
        """
        if self._kept is None:
            raise RuntimeError("No weights have been sent yet.")
        return self._kept

    def _state(self) -> dict[str, torch.Tensor]:
        return self._model.state_dict(keep_vars=True)

    @torch.no_grad()
    def _whole(self, dtype: torch.dtype | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight under its first name, where it is computed with; rounded and gathered one by one."""
        seen: set[int] = set()
        for name, value in self._state().items():
            if id(value) not in seen:
                seen.add(id(value))
                self._progress()
                yield name, replicated(rounded(value, dtype))


def _filled(
    weights: Iterable[tuple[str, torch.Tensor]],
    layout: WeightLayout,
    kept: torch.Tensor,
    slice_bytes: int,
    device: torch.device,
) -> Iterator[torch.Tensor]:
    """Copy the weights into ``kept``, and give every slice of it, on ``device``, as soon as it is full.

    On the CPU slices are views of ``kept``; on a GPU each is filled there first, in memory that the next one takes.
    """
    parts = iter(kept.split(slice_bytes))
    staging = None if device.type == "cpu" else torch.empty(slice_bytes, dtype=torch.uint8, device=device)
    start, copy = 0, next(parts)
    part = copy if staging is None else staging[: copy.numel()]
    for name, tensor in weights:
        offset, flat = layout.places[name].offset, as_bytes(tensor)
        while flat.numel():
            if offset >= start + slice_bytes:
                yield part
                if staging is not None:
                    copy_to_host(copy, part)
                start, copy = start + slice_bytes, next(parts)
                part = copy if staging is None else staging[: copy.numel()]
            here, flat = flat.tensor_split([start + slice_bytes - offset])
            part[offset - start : offset - start + here.numel()].copy_(here)
            offset += here.numel()
    yield part
    if staging is not None:
        copy_to_host(copy, part)


class WeightReceiver:
    """A rollout worker's end of transfers.

    Attributes:
        member: what this worker is called in a :class:`Rendezvous`.
        failure: why the last transfer failed here; None when it did not.
    """

    def __init__(self) -> None:
        self.member = uuid.uuid4().hex
        self.failure: str | None = None
        self._group = WeightGroup()

    def receive(
        self, rendezvous: Rendezvous, layout: WeightLayout, progress: Callable[[], None]
    ) -> Iterator[tuple[str, torch.Tensor]] | None:
        """All weights by name, on this process's device, as views of one new buffer; None when the transfer failed.

        The engine is given nothing before everything is here: it never serves a part of a version. That costs room for
        the weights once more, while they come.
        """
        try:
            self.failure = None
            if self.member not in rendezvous.members:
                raise TransferFailed("this worker started after the members were counted")
            device = torch.device("cpu")
            if rendezvous.backend == "nccl":
                device = torch.device("cuda", torch.cuda.current_device())
            self._group.join(rendezvous, 1 + rendezvous.members.index(self.member), device)
            whole = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
            for part in whole.split(rendezvous.slice_bytes):
                self._group.broadcast(part)
                progress()
            return views(layout.places, whole)
        except (TransferFailed, torch.OutOfMemoryError) as error:
            self.failure = what_torch_says(error)
            self._group.leave()
            return None


class WeightTransfer:
    """Gives the learner's weights to every rollout worker of a fleet by one broadcast.

    Contract. Consumes: versions to push. Produces: workers that serve them. Waits for: every live worker, at each slice
    for ``deadline_s / 2``, and then for its engine to load them. When one dies or hangs meanwhile, or is out of reach,
    the weights of this version go to all through the object store instead, out of the copy that the learner keeps; the
    next version is sent to a new group of those that live then. A worker that starts in between gets that copy. Where
    nobody was lost and it failed all the same, three times in a row, the object store is used from then on.

    Args:
        fleet: of rollout workers.
        sender: the learner: a :class:`WeightSender`, or the facade of one in another process.
        share: see :meth:`~sota_grpo.workers.base.Launcher.share`.
        backend: ``nccl`` where learner and workers each have a GPU, else ``gloo``.
        deadline_s: longest wait for one worker.
        host: this process's address, as workers and learner reach it; the store listens there only.
        dtype: that of all the engines' matrices; None: weights are sent as they are.
        slice_bytes: of one message.
    """

    def __init__(
        self,
        fleet: Fleet,
        sender: Any,
        *,
        share: Callable[[Any], Any],
        backend: Literal["gloo", "nccl"],
        deadline_s: float,
        host: str = "127.0.0.1",
        dtype: torch.dtype | None = None,
        slice_bytes: int = 64 << 20,
    ):
        self._fleet, self._sender, self._share, self._backend = fleet, sender, share, backend
        self._deadline_s, self._stall_s = deadline_s, deadline_s / 2  # a worker that waits is not silent
        self._slice_bytes, self._dtype = slice_bytes, dtype
        self._layout: WeightLayout | None = None
        self._rendezvous: Rendezvous | None = None
        self._invitation: tuple[Any, ...] = ()  # handles of the rendezvous and the layout
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
        rendezvous = self._gather(version) if is_tried else None
        failure = self._sender.send_weights(rendezvous, version, self._dtype) or (
            None if rendezvous else "no worker answered"
        )
        newest = OnDemand(self._newest)
        self._fleet.keep("update_weights", newest)
        answers = [] if rendezvous is None else self._served(self._stall_s if failure else self._deadline_s)
        if answers and all(served == version for served, _ in answers):
            self._failures = 0
            return [served for served, _ in answers]
        self._rendezvous = None
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

    def _gather(self, version: int) -> Rendezvous | None:
        """Tell everybody to take part; the group of the last time, if it has the same members."""
        if self._layout is None:
            self._layout = self._sender.weight_layout(self._dtype)
        try:
            members = tuple(sorted(self._fleet.broadcast("weight_member", deadline_s=self._stall_s)))
            if self._rendezvous is None or self._rendezvous.members != members:
                name, limits = uuid.uuid4().hex, (self._stall_s, self._slice_bytes)
                self._rendezvous = Rendezvous(self._host, self._port, name, members, self._backend, *limits)
                # pickled for each, N members would be N times N
                self._invitation = self._share(self._rendezvous), self._share(self._layout)
            self._fleet.broadcast("receive_weights", *self._invitation, version, deadline_s=self._stall_s)
        except TimeoutError:  # all were mute and are being replaced
            return None
        return self._rendezvous

    def _served(self, deadline_s: float) -> list[tuple[int, str | None]]:
        try:
            return self._fleet.broadcast("served", deadline_s=deadline_s)
        except TimeoutError:
            return []

    def _newest(self) -> tuple[Any, int]:
        pack, version = self._sender.kept_weights()
        return self._share(pack), version
