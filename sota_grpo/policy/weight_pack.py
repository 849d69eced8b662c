"""Weights on their way from the learner to the engines: one flat buffer, so that a process boundary costs no copy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_ALIGNMENT = 64  # bytes; wide enough for every dtype and for vector loads


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
    def of(cls, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightPack:
        """Copy ``weights`` (any dtype, any device) into a new pack, one after the other."""
        places: dict[str, Place] = {}
        parts: list[tuple[int, torch.Tensor]] = []
        seen: dict[tuple[int, torch.dtype, torch.Size], tuple[Place, StorageWeakRef]] = {}
        end = 0
        for name, tensor in weights:
            flat = tensor.detach().contiguous()
            identity = (flat.data_ptr(), flat.dtype, flat.shape)
            place, storage = seen.get(identity, (None, None))
            if place is None or storage is None or storage.expired():  # a merged weight frees its address to the next
                place = Place(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), end)
                parts.append((end, flat.cpu()))
                seen[identity] = place, StorageWeakRef(flat.untyped_storage())
                end += -(-flat.numel() * flat.element_size() // _ALIGNMENT) * _ALIGNMENT
            places[name] = place
        buffer = np.empty(end, dtype=np.uint8)
        for offset, flat in parts:
            data = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
            buffer[offset : offset + data.size] = data
        return cls(buffer, places)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the buffer, under the names and in the order given."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # shared: nobody writes
            whole = torch.from_numpy(self.buffer)
        for name, place in self.places.items():
            dtype: torch.dtype = getattr(torch, place.dtype)
            num_bytes = dtype.itemsize * int(np.prod(place.shape, dtype=np.int64))
            yield name, whole[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors()

    @property
    def num_bytes(self) -> int:
        """Size of what travels."""
        return self.buffer.nbytes
