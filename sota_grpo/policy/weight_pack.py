"""Many tensors as one block of bytes: weights on their way to the engines, rows on their way to a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

ALIGNMENT = 64  # bytes; wide enough for every dtype and for vector loads
_SLICE_BYTES = 64 << 20  # a power of two, to which torch rounds pinned memory up


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the buffer: its dtype by name, its shape, its first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, offset: int) -> Place:
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


@dataclass(frozen=True)
class WeightPack:
    """Named tensors in ``uint8`` buffers on the CPU, so that a process boundary costs no copy.

    Pickle protocol 5 (Ray, multiprocessing with out-of-band buffers) moves a buffer by reference; :meth:`tensors` views
    it without a copy. The views are to be read, never written: other processes may see the same memory.

    A tensor that occurs under two names (a tied head) is stored once.

    >>> pack = WeightPack.of([("a", torch.arange(3.0)), ("b", torch.ones(2, dtype=torch.bfloat16))])
    >>> {name: tensor.tolist() for name, tensor in pack.tensors()}
    {'a': [0.0, 1.0, 2.0], 'b': [1.0, 1.0]}
    """

    parts: tuple[tuple[np.ndarray, Mapping[str, Place]], ...]  # buffers, and which tensors are in each

    @classmethod
    def of(
        cls, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None, room: int | None = None
    ) -> WeightPack:
        """Copy ``weights`` (any dtype, any device) into a new pack of one buffer.

        Args:
            weights: named tensors.
            dtype: of all the engine's matrices: :func:`rounded` one by one, before they leave their device. None:
                as they are.
            room: most bytes that they take, each rounded up as :func:`padded` does: then each is copied as it comes and
                let go. None counts them first, all at once.
        """
        if room is None:
            weights = list(weights)
            room = sum(padded(tensor.numel() * rounded_dtype(tensor, dtype).itemsize) for _, tensor in weights)
        buffer = np.empty(room, dtype=np.uint8)  # what is not written takes no memory
        whole = torch.from_numpy(buffer)
        places: dict[str, Place] = {}
        seen: dict[tuple[int, torch.dtype, torch.Size], tuple[Place, StorageWeakRef]] = {}
        end = 0
        for name, tensor in weights:
            flat = tensor.detach().contiguous()
            identity = (flat.data_ptr(), flat.dtype, flat.shape)
            place, storage = seen.get(identity, (None, None))
            if place is None or storage is None or storage.expired():  # a merged weight frees its address to the next
                sent = rounded(flat, dtype)
                place = Place.of(sent, end)
                seen[identity] = place, StorageWeakRef(flat.untyped_storage())
                if sent.nbytes:
                    copy_to_host(whole[end : end + sent.nbytes], as_bytes(sent))
                end += padded(sent.nbytes)
            places[name] = place
        return cls(((buffer[:end], places),))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the buffers, under the names and in the order given."""
        return chain.from_iterable(views(places, readable(buffer)) for buffer, places in self.parts)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors()


def views(places: Mapping[str, Place], whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that lie in ``whole`` (uint8 ``[num_bytes]``, any device), uncopied."""
    for name, place in places.items():
        dtype: torch.dtype = getattr(torch, place.dtype)
        stop = place.offset + dtype.itemsize * torch.Size(place.shape).numel()
        yield name, whole[place.offset : stop].view(dtype).view(place.shape)


def readable(array: np.ndarray) -> Tensor:
    """A view of an array that nobody writes into: other processes may see the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def padded(num_bytes: int) -> int:
    """Bytes from one tensor's first to the next one's."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Checksum(NamedTuple):
    """What tells whether a tensor has these very values: its dtype, and two sums of its bits.

    ``total`` is that of all elements, ``by_row`` depends on their order. -0.0 is 0.0.

    >>> one, other = (Checksum.of(torch.tensor(each)) for each in ([[1.0], [2.0]], [[2.0], [1.0]]))
    >>> one == other, one.total == other.total, one == Checksum.of(torch.tensor([[1.0], [2.0]]))
    (False, True, True)
    """

    dtype: torch.dtype
    total: int
    by_row: int

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> Checksum:
        """Of the tensor, rounded to ``dtype`` where that is given."""
        values = tensor.detach().to(dtype or tensor.dtype).contiguous()
        values = values + 0 if values.is_floating_point() else values
        whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
        rows = values.view(whole).reshape(len(values) if values.ndim else 1, -1).sum(1, dtype=torch.int64)
        places = torch.arange(1, len(rows) + 1, device=rows.device)
        return cls(values.dtype, int(rows.sum()), int((rows * places).sum()))


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A matrix in the dtype of its engine, where that is known and narrower.

    Vectors stay as they are: engines keep some of them in float32 (biases, decay rates), and they take no room.
    """
    return tensor.detach().to(rounded_dtype(tensor, dtype))


def rounded_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What :func:`rounded` gives."""
    if dtype is None or tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor.dtype
    return dtype if dtype.itemsize < tensor.dtype.itemsize else tensor.dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """Its numbers, row after row, as uint8 ``[n]``: a view, where they lie so."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def copy_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on ``device``; those of a CPU go to a GPU as one block of pinned memory.

    A tensor by itself, from pageable memory, costs a launch, and the host waits until it is there.
    """
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    *offsets, end = accumulate((padded(tensor.nbytes) for tensor in tensors), initial=0)
    block = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for offset, tensor in zip(offsets, tensors):
        block[offset : offset + tensor.nbytes].copy_(as_bytes(tensor))
    places = {str(index): Place.of(tensor, offsets[index]) for index, tensor in enumerate(tensors)}
    return [tensor for _, tensor in views(places, block.to(device, non_blocking=True))]


def copy_to_host(target: Tensor, source: Tensor) -> None:
    """Copy bytes (``uint8 [n]``, of any device) into ordinary memory of the host.

    From a GPU they go through one slice of pinned memory; without it the driver makes slower copies of its own, and to
    pin all of ``target`` takes seconds.
    """
    if source.device.type != "cuda":
        target.copy_(source)
        return
    pinned = torch.empty(_SLICE_BYTES, dtype=torch.uint8, pin_memory=True)  # torch keeps it for the next call
    for into, piece in zip(target.split(_SLICE_BYTES), source.split(_SLICE_BYTES)):
        into.copy_(pinned[: piece.numel()].copy_(piece))
