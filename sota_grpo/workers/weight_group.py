"""Weights by broadcast, from the learner's memory into the rollout workers': gloo between CPUs, NCCL between GPUs.

The learner is member 0 of a process group of its own, which neither side's default group (FSDP's, vLLM's) knows of.
All weights are one run of bytes, laid out as in a :class:`~sota_grpo.policy.weight_pack.WeightPack`, that is sent slice
by slice: a small tensor costs no message.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from sota_grpo.policy.lora import base_model
from sota_grpo.policy.shards import replicated
from sota_grpo.policy.weight_pack import Place, WeightPack
from sota_grpo.workers.futures import promised, resolve

SLICE_BYTES = 64 << 20
_ALIGNMENT = 64  # bytes; wide enough for every dtype and for vector loads
_NCCL_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


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
    def of(cls, state: Mapping[str, torch.Tensor]) -> WeightLayout:
        """Of a ``state_dict(keep_vars=True)``, sharded or not; a tensor under two names (a tied head) lies once."""
        places: dict[str, Place] = {}
        seen: dict[int, Place] = {}
        end = 0
        for name, value in state.items():
            if id(value) not in seen:
                seen[id(value)] = Place(str(value.dtype).removeprefix("torch."), tuple(value.shape), end)
                end += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
            places[name] = seen[id(value)]
        return cls(places, end)

    def views(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that lie in ``whole`` (uint8 ``[num_bytes]``, any device), uncopied."""
        for name, place in self.places.items():
            dtype: torch.dtype = getattr(torch, place.dtype)
            stop = place.offset + dtype.itemsize * torch.Size(place.shape).numel()
            yield name, whole[place.offset : stop].view(dtype).view(place.shape)


@dataclass(frozen=True)
class Meeting:
    """How the members of one group find each other.

    Args:
        host, port: of the store.
        group: its name, never used before.
        members: what the rollout workers call themselves, in the order of their ranks from 1.
        backend: ``gloo`` or ``nccl``.
        stall_s: longest wait for the others, to come and at each slice.
    """

    host: str
    port: int
    group: str
    members: tuple[str, ...]
    backend: Literal["gloo", "nccl"]
    stall_s: float

    @property
    def device(self) -> torch.device:
        """Where slices lie in the process that asks."""
        return torch.device("cuda", torch.cuda.current_device()) if self.backend == "nccl" else torch.device("cpu")


class WeightGroup:
    """One member's end of a group; made when all others make theirs.

    Raises:
        TransferFailed: they did not, within ``meeting.stall_s``.
    """

    def __init__(self, meeting: Meeting, rank: int):
        self.name = meeting.group
        self._limit = timedelta(seconds=meeting.stall_s)
        self._backend = meeting.backend
        self._group: Any = None
        device, made = meeting.device, promised()
        make: Callable[[], Any] = lambda: _joined(meeting, rank, device)  # noqa: E731
        # NCCL may wait for a member that has just died, for ever: that thread is left behind
        threading.Thread(target=resolve, args=(made, make), name="weight group", daemon=True).start()
        try:
            self._group = made.result(2 * meeting.stall_s)
        except (RuntimeError, TimeoutError) as error:
            raise TransferFailed(f"the members did not find each other: {_first_line(error)}") from error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Fill ``flat`` with member 0's, on every member.

        Raises:
            TransferFailed: another member is gone or was late; the group cannot be used again.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, self._limit
        try:
            work = self._group.broadcast([flat], options)
            if self._backend == "nccl":
                work.wait(self._limit)  # the host waits too; without a limit only the stream would
            else:
                work.wait()  # its own timeout ends it
        except RuntimeError as error:
            raise TransferFailed(_first_line(error)) from error

    def close(self) -> None:
        """Leave; members that wait for this one notice it (NCCL's at their deadline). Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(RuntimeError):  # it may be broken already
                group.abort()


def _joined(meeting: Meeting, rank: int, device: torch.device) -> Any:
    limit, size = timedelta(seconds=meeting.stall_s), 1 + len(meeting.members)
    client = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=limit)
    store = dist.PrefixStore(meeting.group, client)
    if meeting.backend == "gloo":
        gloo = dist.ProcessGroupGloo._Options()
        local = meeting.host.startswith("127.")
        make_device = dist.ProcessGroupGloo.create_device
        gloo._devices = [make_device(hostname=meeting.host) if local else dist.ProcessGroupGloo.create_default_device()]
        gloo._timeout = limit
        return dist.ProcessGroupGloo(store, rank, size, gloo)
    torch.cuda.set_device(device)
    before = os.environ.get(_NCCL_HANDLING)
    os.environ[_NCCL_HANDLING] = "0"  # read once, here: its watchdog would end the process where a member dies
    try:
        group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
    finally:
        os.environ.pop(_NCCL_HANDLING)
        if before is not None:
            os.environ[_NCCL_HANDLING] = before
    group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], dist.BroadcastOptions()).wait(limit)
    return group


class _Seat:
    """The group that this process is in, kept from one transfer to the next."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    def take(self, meeting: Meeting, rank: int) -> WeightGroup:
        if self._group is None or self._group.name != meeting.group:
            self.leave()
            self._group = WeightGroup(meeting, rank)
        return self._group

    def leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


class SendsWeights(Protocol):
    """A learner whose weights can be sent: :class:`WeightSender`, or the facade of one in another process."""

    def weight_layout(self) -> WeightLayout: ...

    def send_weights(self, meeting: Meeting | None, version: int) -> str | None: ...

    def kept_weights(self) -> tuple[WeightPack, int]: ...


class WeightSender:
    """The learner's end of a transfer, in the learner's process; of several ranks each has one.

    A copy of what was sent last stays in this host's memory (as much as the weights), for workers that start later and
    for a transfer that failed: it is made beside the transfer, and of exactly the weights that were announced.

    Args:
        model: without adapter, whole or sharded (:func:`~sota_grpo.policy.sharding.shard`).
        leads: whether this rank is the one that sends; the others only take part in gathering.
        progress: called for every weight.
    """

    def __init__(self, model: nn.Module, *, leads: bool = True, progress: Callable[[], None] = lambda: None):
        self._model, self._leads, self._progress = model, leads, progress
        self._seat = _Seat()
        self._kept: tuple[WeightPack, int] | None = None

    def weight_layout(self) -> WeightLayout:
        """What receivers must know beforehand."""
        return WeightLayout.of(self._state())

    def send_weights(self, meeting: Meeting | None, version: int) -> str | None:
        """Send every weight to the members of the meeting (None: only keep a copy); collective over the ranks.

        Returns:
            Why the transfer failed; None when every byte is on its way. Either way the copy is complete.
        """
        if not self._leads:
            for _ in self._whole():
                pass
            return None
        group, failure = None, None
        if meeting is not None:
            try:
                group = self._seat.take(meeting, rank=0)
            except TransferFailed as error:
                failure = str(error)
        layout, device = self.weight_layout(), torch.device("cpu") if meeting is None else meeting.device
        kept = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for part in _filled(self._whole(), layout, kept, device):
            try:
                if group is not None and failure is None:
                    group.broadcast(part)
            except TransferFailed as error:  # the other ranks go on gathering, and the copy is needed all the more
                failure = str(error)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if failure is not None:
            self._seat.leave()
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
        return base_model(self._model).state_dict(keep_vars=True)

    @torch.no_grad()
    def _whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight under its first name, where it is computed with; gathered one by one."""
        seen: set[int] = set()
        for name, value in self._state().items():
            if id(value) not in seen:
                seen.add(id(value))
                self._progress()
                yield name, replicated(value).detach()


def _filled(
    weights: Iterable[tuple[str, torch.Tensor]], layout: WeightLayout, kept: torch.Tensor, device: torch.device
) -> Iterator[torch.Tensor]:
    """Copy the weights into ``kept``, and give every slice of it, on ``device``, when it is full.

    On the CPU slices are views of ``kept``; on a GPU each is filled there first, in memory that the next one takes.
    """
    on_cpu = device.type == "cpu"
    staging = kept if on_cpu else torch.empty(SLICE_BYTES, dtype=torch.uint8, device=device)
    start = 0
    part = staging[:SLICE_BYTES]
    for name, tensor in weights:
        offset, flat = layout.places[name].offset, tensor.contiguous().reshape(-1).view(torch.uint8)
        while flat.numel():
            if offset >= start + SLICE_BYTES:
                yield part
                if not on_cpu:
                    kept[start : start + SLICE_BYTES].copy_(part, non_blocking=True)
                start += SLICE_BYTES
                part = staging[start : start + SLICE_BYTES] if on_cpu else staging
            room = start + SLICE_BYTES - offset
            here, flat = flat[:room], flat[room:]
            part[offset - start : offset - start + here.numel()].copy_(here)
            offset += here.numel()
    part = part[: layout.num_bytes - start]
    yield part
    if not on_cpu:
        kept[start:].copy_(part, non_blocking=True)


class WeightReceiver:
    """A rollout worker's end of transfers.

    Attributes:
        member: what this worker is called in a :class:`Meeting`.
        failure: why the last transfer failed here; None when it did not.
    """

    def __init__(self) -> None:
        self.member = uuid.uuid4().hex
        self.failure: str | None = None
        self._seat = _Seat()

    def receive(
        self, meeting: Meeting, layout: WeightLayout, progress: Callable[[], None]
    ) -> Iterator[tuple[str, torch.Tensor]] | None:
        """All weights by name, on the meeting's device, as views of one new buffer; None when the transfer failed.

        The engine is given nothing before everything is here: it never serves a part of a version. That costs room for
        the weights once more, while they come.
        """
        try:
            self.failure = None
            if self.member not in meeting.members:
                raise TransferFailed("this worker started after the members were counted")
            group = self._seat.take(meeting, rank=1 + meeting.members.index(self.member))
            whole = torch.empty(layout.num_bytes, dtype=torch.uint8, device=meeting.device)
            for part in whole.split(SLICE_BYTES):
                group.broadcast(part)
                progress()
            return layout.views(whole)
        except (TransferFailed, torch.OutOfMemoryError) as error:
            self.failure = _first_line(error)
            self._seat.leave()
            return None


def _first_line(error: BaseException) -> str:
    """What an exception of torch says, without its stack and its own address in torch's source.

    >>> _first_line(RuntimeError("[/src/pair.cc:553] Connection closed by peer [127.0.0.1]:63649. This is due to you"))
    'Connection closed by peer [127.0.0.1]:63649'
    """
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (text.partition("] ")[2] if text.startswith("[/") else text).partition(". ")[0]
