"""Copies between host and GPU: many small tensors there in one, large ones back through pinned memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SLICE_BYTES = 64 << 20  # a power of two, to which torch rounds pinned memory up


def copy_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on ``device``; those of a CPU go to a GPU as one block of pinned memory.

    A tensor by itself, from pageable memory, costs a launch, and the host waits until it is there.

    >>> copy_to([torch.tensor([1, 2]), torch.tensor([True])], torch.device("cpu"))
    [tensor([1, 2]), tensor([True])]
    """
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    return unpacked(bytes_of(tensors).pin_memory().to(device, non_blocking=True), tensors)


def bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers, as uint8 ``[n]``; the widest first, so that each tensor begins where its type may."""
    return torch.cat([as_bytes(tensors[index]) for index in _widest_first(tensors)])


def as_bytes(tensor: Tensor) -> Tensor:
    """Its numbers, row after row, as uint8 ``[n]``: a view, where they lie so."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in :func:`bytes_of`, as views, in the order, types and shapes of ``like``.

    >>> given = [torch.tensor([True, False]), torch.tensor([[3], [4]]), torch.zeros(0)]
    >>> unpacked(bytes_of(given), given)
    [tensor([ True, False]), tensor([[3],
            [4]]), tensor([])]
    """
    views: dict[int, Tensor] = {}
    start = 0
    for index in _widest_first(like):
        size = like[index].numel() * like[index].element_size()
        views[index] = flat[start : start + size].view(like[index].dtype).view(like[index].shape)
        start += size
    return [views[index] for index in range(len(like))]


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())


def copy_to_host(target: Tensor, source: Tensor) -> None:
    """Copy bytes (``uint8 [n]``, of any device) into ordinary memory of the host.

    From a GPU they go through one slice of pinned memory, which the driver can write to by itself: without it, it makes
    slower copies of its own. To pin all of ``target`` would take up to twice its size, and seconds.
    """
    if source.device.type != "cuda":
        target.copy_(source)
        return
    pinned = torch.empty(_SLICE_BYTES, dtype=torch.uint8, pin_memory=True)  # torch keeps it for the next call
    for into, part in zip(target.split(_SLICE_BYTES), source.split(_SLICE_BYTES)):
        into.copy_(pinned[: part.numel()].copy_(part))
