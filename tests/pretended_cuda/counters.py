"""What a step costs the host, and what it holds on the device: counted by the operations themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = str(Path(__file__).parent)
BLOCK_BYTES = 512  # what CUDA's caching allocator rounds up to


@dataclass
class HostTraffic:
    """Events by kind and by the line of Python that caused them.

    Attributes:
        waits: the host waits until the device has done all that it was given.
        copies: memory that is not pinned goes to the device.
    """

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = []
        for name, counter in (("waits", self.waits), ("unpinned copies", self.copies)):
            lines.append(f"{counter.total()} {name}")
            lines += [f"  {count:4d}  {kind}  {place}" for (kind, place), count in counter.most_common()]
        return "\n".join(lines)


_counting: list[HostTraffic] = []


@contextlib.contextmanager
def host_traffic() -> Iterator[HostTraffic]:
    """Count while the block runs, in every thread."""
    counted = HostTraffic()
    _counting.append(counted)
    try:
        yield counted
    finally:
        _counting.remove(counted)


def note_wait(kind: str) -> None:
    """The host waits for the device."""
    for counted in _counting:
        counted.waits[kind, _line()] += 1


def note_copy(kind: str) -> None:
    """Pageable memory is copied to the device."""
    for counted in _counting:
        counted.copies[kind, _line()] += 1


def _line() -> str:
    """The innermost line of the project, or else of anything that is neither torch nor this package."""
    frame, outside = sys._getframe(2), None
    while frame is not None:
        name = frame.f_code.co_filename
        own = os.path.dirname(name) == HERE
        if "/sota_grpo/" in name and not own:
            return f"sota_grpo/{name.rsplit('/sota_grpo/', 1)[1]}:{frame.f_lineno}"
        if outside is None and not own and "/torch/" not in name:
            outside = f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return outside or "backward"


class DeviceMemory:
    """Bytes of the storages that live on the device, as CUDA's caching allocator would count them."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.peak_reserved = 0

    def take(self, size: int) -> None:
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def reset_peak(self) -> None:
        self.peak, self.peak_reserved = self.allocated, self.reserved

    def release_cached(self) -> None:
        self.reserved = self.allocated


MEMORY = DeviceMemory()


class Lease:
    """The share of one storage in :data:`MEMORY`, as long as a tensor of the device refers to it."""

    __slots__ = ("__weakref__", "serial", "size")
    _serials = itertools.count()

    def __init__(self, size: int) -> None:
        self.size = size
        self.serial = next(self._serials)  # which storage it is, also when its address is another's
        MEMORY.take(size)

    def __del__(self) -> None:
        MEMORY.allocated -= self.size

    @classmethod
    def on(cls, tensor: torch.Tensor) -> Lease:
        """The lease of a tensor's storage; views share it."""
        storage = tensor.untyped_storage()
        lease = _leases.get(storage._cdata)
        if lease is None:
            lease = _leases[storage._cdata] = cls(-(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES)
        return lease


_leases: weakref.WeakValueDictionary[int, Lease] = weakref.WeakValueDictionary()
