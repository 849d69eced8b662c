"""Weights on their way from the learner to the engines: one flat buffer, so that a process boundary costs no copy.

:func:`perturb` shows that they arrive: a small change of the weights, which :func:`restore` takes back bit for bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from sota_grpo.policy.device_copy import as_bytes, copy_to_host
from sota_grpo.policy.sharding import local

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


def padded(num_bytes: int) -> int:
    """Bytes from one tensor's first to the next one's.

    >>> padded(0), padded(1), padded(64), padded(65)
    (0, 64, 64, 128)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


PROBE_SHARE = 0.01  # of each tensor's elements; changed signs move a tensor by 2 sqrt(share), a fifth, of its norm


class Changed(NamedTuple):
    """Where a tensor was changed, and what stood there."""

    tensor: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor


@torch.no_grad()
def perturb(parameters: Iterable[torch.Tensor]) -> list[Changed]:
    """Change every tensor in place; :func:`restore` of the result brings back each bit.

    ``PROBE_SHARE`` of its elements, at least one, change their sign (zeros become 1). Noise on all elements would need
    a copy of the whole model to restore; this keeps 3 to 5 % of its bytes. Of a sharded tensor each rank changes its
    own part.

    >>> weight = torch.tensor([0.0, 2.0])
    >>> kept = perturb([weight])
    >>> weight.tolist() in ([1.0, 2.0], [0.0, -2.0])
    True
    >>> restore(kept)
    >>> weight.tolist()
    [0.0, 2.0]
    """
    generator = torch.Generator().manual_seed(0)
    kept = []
    for parameter in parameters:
        tensor = local(parameter.data)
        if not tensor.numel():
            continue
        count = max(1, round(PROBE_SHARE * tensor.numel()))
        places = torch.randint(tensor.numel(), (count,), generator=generator).to(tensor.device)
        values = tensor.take(places)
        kept.append(Changed(tensor, places, values))
        tensor.put_(places, torch.where(values == 0, 1.0, -values))
    return kept


@torch.no_grad()
def restore(kept: Iterable[Changed]) -> None:
    """Put back what :func:`perturb` changed."""
    for tensor, places, values in kept:
        tensor.put_(places, values)
