"""Weights by broadcast, from the learner's memory into the rollout workers'.

All weights are one run of bytes, laid out as in a :class:`~sota_grpo.policy.weight_pack.WeightPack`, that is sent slice
by slice: a small tensor costs no message, and nothing is sent twice for a tied head.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sota_grpo.policy.device_copy import as_bytes, copy_to_host
from sota_grpo.policy.shards import replicated
from sota_grpo.policy.weight_pack import Place, WeightPack, padded, rounded, rounded_dtype
from sota_grpo.workers.weight_group import Meeting, Seat, TransferFailed, first_line


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

    def views(self, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that lie in ``whole`` (uint8 ``[num_bytes]``, any device), uncopied."""
        for name, place in self.places.items():
            dtype: torch.dtype = getattr(torch, place.dtype)
            stop = place.offset + dtype.itemsize * torch.Size(place.shape).numel()
            yield name, whole[place.offset : stop].view(dtype).view(place.shape)


class SendsWeights(Protocol):
    """A learner whose weights can be sent: :class:`WeightSender`, or the facade of one in another process."""

    def weight_layout(self, dtype: torch.dtype | None) -> WeightLayout: ...

    def send_weights(self, meeting: Meeting | None, version: int, dtype: torch.dtype | None) -> str | None: ...

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
        self._seat = Seat()
        self._kept: tuple[WeightPack, int] | None = None

    def weight_layout(self, dtype: torch.dtype | None) -> WeightLayout:
        """What receivers must know beforehand; ``dtype`` as in :meth:`send_weights`."""
        return WeightLayout.of(self._state(), dtype)

    def send_weights(self, meeting: Meeting | None, version: int, dtype: torch.dtype | None) -> str | None:
        """Send every weight to the members of the meeting (None: only keep a copy); collective over the ranks.

        Args:
            meeting: where.
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
        if meeting is not None and meeting.backend == "nccl":
            device = next(iter(self._state().values())).device
        slice_bytes = layout.num_bytes if meeting is None else meeting.slice_bytes
        kept = torch.empty(layout.num_bytes, dtype=torch.uint8)
        failure = None
        for part in _filled(self._whole(dtype), layout, kept, slice_bytes, device):
            if meeting is None or failure is not None:  # the ranks go on gathering, and the copy is needed all the more
                continue
            try:
                self._seat.take(meeting, 0, device).broadcast(part)
            except TransferFailed as error:
                failure = str(error)
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
        member: what this worker is called in a :class:`Meeting`.
        failure: why the last transfer failed here; None when it did not.
    """

    def __init__(self) -> None:
        self.member = uuid.uuid4().hex
        self.failure: str | None = None
        self._seat = Seat()

    def receive(
        self, meeting: Meeting, layout: WeightLayout, progress: Callable[[], None]
    ) -> Iterator[tuple[str, torch.Tensor]] | None:
        """All weights by name, on this process's device, as views of one new buffer; None when the transfer failed.

        The engine is given nothing before everything is here: it never serves a part of a version. That costs room for
        the weights once more, while they come.
        """
        try:
            self.failure = None
            if self.member not in meeting.members:
                raise TransferFailed("this worker started after the members were counted")
            device = torch.device("cpu")
            if meeting.backend == "nccl":
                device = torch.device("cuda", torch.cuda.current_device())
            group = self._seat.take(meeting, 1 + meeting.members.index(self.member), device)
            whole = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
            for part in whole.split(meeting.slice_bytes):
                group.broadcast(part)
                progress()
            return layout.views(whole)
        except (TransferFailed, torch.OutOfMemoryError) as error:
            self.failure = first_line(error)
            self._seat.leave()
            return None
