"""Many small tensors to a device in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    return torch.cat([tensors[index].contiguous().view(-1).view(torch.uint8) for index in _widest_first(tensors)])


def unpacked(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in :func:`bytes_of`, as views, in the order, types and shapes of ``like``.

    >>> given = [torch.tensor([True, False]), torch.tensor([[3], [4]]), torch.zeros(0)]
    >>> unpacked(bytes_of(given), given)
    [tensor([ True, False]), tensor([[3],
            [4]]), tensor([])]
    """
    found: dict[int, Tensor] = {}
    start = 0
    for index in _widest_first(like):
        size = like[index].numel() * like[index].element_size()
        found[index] = flat[start : start + size].view(like[index].dtype).view(like[index].shape)
        start += size
    return [found[index] for index in range(len(like))]


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
