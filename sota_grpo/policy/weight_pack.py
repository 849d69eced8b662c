"""Weights on their way from the learner to the engines: one flat buffer, so that a process boundary costs no copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sota_grpo.policy.device_copy import as_bytes, copy_to_host

ALIGNMENT = 64  # bytes; wide enough for every dtype and for vector loads


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the buffer: its dtype by name, its shape, its first byte."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class WeightPack:
    """Named tensors in one ``uint8`` buffer on the CPU.

    Pickle protocol 5 (Ray, multiprocessing with out-of-band buffers) moves the buffer by reference; :meth:`tensors`
    views it without a copy. The views are to be read, never written: other processes may see the same memory.

    A tensor that occurs under two names (a tied head) is stored once.

    >>> pack = WeightPack.of([("a", torch.arange(3.0)), ("b", torch.ones(2, dtype=torch.bfloat16))])
    >>> {name: tensor.tolist() for name, tensor in pack.tensors()}
    {'a': [0.0, 1.0, 2.0], 'b': [1.0, 1.0]}
    """

    buffer: np.ndarray
    places: Mapping[str, Place]

    @classmethod
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]], *, room: int | None = None) -> WeightPack:
        """Copy ``weights`` (any dtype, any device) into a new pack.

        Args:
            weights: named tensors.
            room: most bytes that they take, each rounded up as :func:`padded` does: then each is copied as it comes and
                let go. None counts them first, all at once.
        """
        if room is None:
            weights = list(weights)
            room = sum(padded(tensor.numel() * tensor.element_size()) for _, tensor in weights)
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
                place = Place(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), end)
                seen[identity] = place, StorageWeakRef(flat.untyped_storage())
                num_bytes = flat.numel() * flat.element_size()
                if num_bytes:
                    copy_to_host(whole[end : end + num_bytes], as_bytes(flat))
                end += padded(num_bytes)
            places[name] = place
        return cls(buffer[:end], places)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the buffer, under the names and in the order given."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # shared: nobody writes
            whole = torch.from_numpy(self.buffer)
        return views(self.places, whole)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()

    @property
    def num_bytes(self) -> int:
        """Size of what travels."""
        return self.buffer.nbytes


def views(places: Mapping[str, Place], whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that lie in ``whole`` (uint8 ``[num_bytes]``, any device), uncopied."""
    for name, place in places.items():
        dtype: torch.dtype = getattr(torch, place.dtype)
        stop = place.offset + dtype.itemsize * torch.Size(place.shape).numel()
        yield name, whole[place.offset : stop].view(dtype).view(place.shape)


def rounded(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A matrix in the dtype of the engine that it is for, where that is known and narrower: as it will be there.

    Vectors stay as they are: engines keep some of them in float32 (biases, decay rates), and they take no room.

    >>> rounded(torch.tensor([[1.001]]), torch.bfloat16), rounded(torch.tensor([1.001]), torch.bfloat16)
    (tensor([[1.]], dtype=torch.bfloat16), tensor([1.0010]))
    """
    return tensor.detach().to(rounded_dtype(tensor, dtype))


def rounded_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What :func:`rounded` gives."""
    if dtype is None or tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor.dtype
    return dtype if dtype.itemsize < tensor.dtype.itemsize else tensor.dtype


def padded(num_bytes: int) -> int:
    """Bytes from one tensor's first to the next one's.

    >>> padded(0), padded(1), padded(64), padded(65)
    (0, 64, 64, 128)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
