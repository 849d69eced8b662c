"""Transfer of weights from learner to engines: in memory (:class:`WeightPack`) or by files (:class:`WeightFolder`).

Also a learner's state in one buffer (:class:`StatePack`), copies of tensors to a GPU (:func:`copy_to`), and checksums
to compare weights of learner and engine.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sota_grpo.files import folder_for_sockets

logger = logging.getLogger(__name__)
_MARK = "stored_tensor"
_ALIGNMENT = 64  # bytes; wide enough for every dtype and for vector loads
_SLICE_BYTES = 64 << 20  # a power of two, because torch rounds pinned memory up to one
_CACHED_BYTES = 1 << 18  # per thread: temporary values of a checksum stay in the processor's cache
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # factor of the hash: 2^64 over the golden ratio, as int64
_SHARED_MEMORY = Path("/dev/shm")
_SOCKET_BYTES = len("/sota-grpo-vllm-12345678/") + 36  # a server in such a folder creates a socket named by a UUID


class BufferView(NamedTuple):
    """Dtype, shape and byte offset of a tensor in a buffer."""

    dtype: torch.dtype
    shape: torch.Size
    offset: int


@dataclass(frozen=True)
class WeightPack:
    """Named weights in ``uint8`` buffers on the CPU, which can be passed to another process without a copy.

    The weights are those of a model, or a LoRA adapter alone: ``NAME:A`` ``[r, columns]`` and ``NAME:B`` ``[rows, r]``
    for every weight ``NAME`` ``[rows, columns]`` in ``scales``.

    Pickle protocol 5 (Ray, multiprocessing with out-of-band buffers) passes buffers by reference. :meth:`tensors`
    yields views of the buffers; never write into them, because other processes may use the same memory. A tensor with
    two names (a tied head) is stored once.

    >>> pack = WeightPack.of([("a", torch.arange(3.0)), ("b", torch.ones(2, dtype=torch.bfloat16))])
    >>> {name: tensor.tolist() for name, tensor in pack.tensors()}
    {'a': [0.0, 1.0, 2.0], 'b': [1.0, 1.0]}
    """

    buffers: tuple[tuple[np.ndarray, Mapping[str, BufferView]], ...]  # each buffer, and its tensors by name
    scales: Mapping[str, float] = field(default_factory=dict)  # alpha / r by weight name, for an adapter

    @classmethod
    def of(
        cls, weights: Iterable[tuple[str, Tensor]], *, dtype: torch.dtype | None = None, room: int | None = None
    ) -> WeightPack:
        """Copy ``weights`` (any dtype, any device) into a new pack of one buffer.

        Args:
            dtype: the engine's dtype, see :func:`rounded`; matrices are cast on their device. None: keep all dtypes.
            room: bytes of the buffer, at least the sum of the packed tensors' :func:`padded` sizes; then only one of
                ``weights`` is held at a time. None: all are listed first to compute the sum.
        """
        if room is None:
            weights = list(weights)
            room = sum(padded(tensor.numel() * rounded_dtype(tensor, dtype).itemsize) for _, tensor in weights)
        buffer = np.empty(room, dtype=np.uint8)  # pages that are not written take no memory
        whole = torch.from_numpy(buffer)
        view_of: dict[str, BufferView] = {}
        seen: dict[tuple[int, torch.dtype, torch.Size], tuple[BufferView, StorageWeakRef]] = {}
        end = 0
        for name, tensor in weights:
            flat = tensor.detach().contiguous()
            identity = (flat.data_ptr(), flat.dtype, flat.shape)
            view, storage = seen.get(identity, (None, None))
            if view is None or storage is None or storage.expired():  # a freed address may be reused
                sent = flat.to(rounded_dtype(flat, dtype))
                view = BufferView(sent.dtype, sent.shape, end)
                seen[identity] = view, StorageWeakRef(flat.untyped_storage())
                if sent.nbytes:
                    copy_to_host(whole[end : end + sent.nbytes], as_bytes(sent))
                end += padded(sent.nbytes)
            view_of[name] = view
        return cls(((buffer[:end], view_of),))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield ``(name, tensor)`` in the order of packing; the tensors are views of the buffers."""
        return chain.from_iterable(views(view_of, readable(buffer)) for buffer, view_of in self.buffers)

    __iter__ = tensors

    def merged(self, base: Iterable[tuple[str, Tensor]], device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight of ``base``, with this adapter merged (``W + scale * B A``) if the adapter is on it.

        The product is computed in float32, one weight at a time, on ``device`` (on the device of ``W`` if ``device`` is
        the CPU), rounded to the dtype of ``W`` and returned on the device of ``W``. On one device the result equals
        that of :func:`~sota_grpo.policy.lora.engine_weights` bit for bit (up to rounding for transposed weights).
        """
        factors = dict(self.tensors())
        for name, weight in base:
            if name in self.scales:
                on = weight.device if torch.device(device).type == "cpu" else device
                delta = (factors[f"{name}:B"].to(on) @ factors[f"{name}:A"].to(on)) * self.scales[name]
                wide = torch.promote_types(weight.dtype, torch.float32)
                weight = (weight.to(on, wide) + delta.to(wide)).to(weight.device, weight.dtype)
            yield name, weight


class WeightFolder:
    """Folder for weight files, readable by this user only, which is deleted by :meth:`close` and at process exit.

    Args:
        shapes: shapes of all weights that one push writes.
        dtype: the server's dtype, see :func:`rounded`; None: keep all dtypes.
        base: folder that a server on another machine can read too; None: shared memory, or a temporary folder if there
            is too little (a warning is logged) or none.

    >>> folder = WeightFolder({"w": torch.Size([2])}, torch.float32)
    >>> push = folder.write({"w": torch.zeros(2)})
    >>> [file.name for file in push.iterdir()]
    ['model.safetensors']
    >>> folder.close()
    >>> push.exists()
    False
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype | None, base: Path | None = None):
        self.dtype = dtype
        if base is not None:
            self.path = base.absolute() / f".weights.{secrets.token_hex(6)}.tmp"  # stays if killed
            self.path.mkdir(mode=0o700)
        else:
            num_bytes = sum(math.prod(shape) for shape in shapes.values()) * (dtype or torch.float32).itemsize
            exists = _SHARED_MEMORY.is_dir()
            free = shutil.disk_usage(_SHARED_MEMORY).free if exists else 0
            folder: Path | str = _SHARED_MEMORY if free > num_bytes else folder_for_sockets(room=_SOCKET_BYTES)
            if exists and free <= num_bytes:
                logger.warning(
                    "%s has %.2f GiB free and a push of weights takes %.2f GiB, so weights are written to %s: free "
                    "shared memory, or start a container with a larger --shm-size (or --ipc=host).",
                    *(_SHARED_MEMORY, free / 2**30, num_bytes / 2**30, folder),
                )
            self.path = Path(tempfile.mkdtemp(prefix="sota-grpo-", dir=folder))
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def write(self, weights: Mapping[str, Tensor]) -> Path:
        """Write ``model.safetensors`` into a new folder and return the folder, which the caller must delete.

        OSError or SafetensorError if the file cannot be written, for example for lack of space or after :meth:`close`.
        """
        folder = Path(tempfile.mkdtemp(prefix="push-", dir=self.path))
        tensors: dict[str, Tensor] = {}
        written: set[int] = set()
        for name, weight in weights.items():
            tensor = rounded(weight, self.dtype).cpu().contiguous()
            # safetensors refuses tensors that share memory, and readers need a tied weight under both names
            tensors[name] = tensor.clone() if tensor.data_ptr() in written else tensor
            written.add(tensor.data_ptr())
        save_file(tensors, folder / "model.safetensors")
        return folder


def views(view_of: Mapping[str, BufferView], whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, tensor)``, views into the buffer ``whole`` (uint8 ``[num_bytes]``) as ``view_of`` describes."""
    for name, (dtype, shape, offset) in view_of.items():
        yield name, whole[offset : offset + dtype.itemsize * shape.numel()].view(dtype).view(shape)


def readable(array: np.ndarray) -> Tensor:
    """Return a tensor view of an array; do not write into it, because other processes may use the memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def padded(num_bytes: int) -> int:
    """Return ``num_bytes`` rounded up to the alignment of 64 bytes: the offset from one tensor to the next."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Checksum(NamedTuple):
    """Dtype and checksum of a tensor: two sums of its rows' hashes, plain and weighted by row number; -0.0 equals 0.0.

    A row's bits, read as integers (8-byte words if the row is of floats and fills whole words, else elements), are
    summed modulo 2^64, and the sum is hashed. Rows are numbered from 1; a vector's elements are rows. ``columns``:
    (start, stop) of the hashed columns; None: all.

    >>> first, second = (Checksum.of(torch.tensor(rows)) for rows in ([[1.0], [2.0]], [[2.0], [1.0]]))
    >>> first == second, first.total == second.total
    (False, True)
    """

    dtype: torch.dtype
    total: int
    by_row: int
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.total % 2**64:016x}-{self.by_row % 2**64:016x}"

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype | None = None, columns: tuple[int, int] | None = None) -> Checksum:
        """Return the checksum of ``columns`` of ``tensor``, after a cast to ``dtype`` if that is not None."""
        dtype = dtype or tensor.dtype
        rows = tensor.detach().flatten(1) if tensor.ndim > 1 else tensor.detach().reshape(-1, 1)
        rows = rows if columns is None else rows[:, slice(*columns)]
        row_bytes = rows.shape[1] * dtype.itemsize
        word = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        if dtype.is_floating_point and row_bytes % 8 == 0:
            word = torch.int64
        most = _SLICE_BYTES if tensor.is_cuda else _CACHED_BYTES * torch.get_num_threads()
        sums = []
        for block in rows.split(max(1, most // max(1, row_bytes))):
            block = block.to(dtype) + 0 if dtype.is_floating_point else block.to(dtype)
            sums.append(block.contiguous().view(word).sum(1, dtype=torch.int64))
        hashed = torch.cat(sums)
        for shift in (29, 32):
            hashed = (hashed ^ (hashed >> shift)) * _GOLDEN
        numbers = torch.arange(1, len(hashed) + 1, device=hashed.device)
        return cls(dtype, int(hashed.sum()), int((hashed * numbers).sum()), columns)


def rounded(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``tensor``, detached, cast to the engine's ``dtype`` if it is a float matrix and ``dtype`` is narrower.

    Vectors are not cast, because engines keep some of them in float32 (biases, decay rates).
    """
    return tensor.detach().to(rounded_dtype(tensor, dtype))


def rounded_dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the result of :func:`rounded`."""
    if dtype is None or tensor.ndim < 2 or not tensor.is_floating_point():
        return tensor.dtype
    return dtype if dtype.itemsize < tensor.dtype.itemsize else tensor.dtype


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of ``tensor``, in row-major order, as uint8 ``[n]``; a view if ``tensor`` is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def copy_to(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``; from CPU to GPU they are copied as one block of pinned memory, for speed."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    *offsets, end = accumulate((padded(tensor.nbytes) for tensor in tensors), initial=0)
    block = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    for offset, tensor in zip(offsets, tensors):
        block[offset : offset + tensor.nbytes].copy_(as_bytes(tensor))
    view_of = {str(start): BufferView(each.dtype, each.shape, start) for start, each in zip(offsets, tensors)}
    return [tensor for _, tensor in views(view_of, block.to(device, non_blocking=True))]


def copy_to_host(target: Tensor, source: Tensor) -> None:
    """Copy bytes ``source`` (uint8 ``[n]``, any device) to ``target`` in pageable memory of the host.

    From a GPU the copy uses a slice of pinned memory: the driver's copies are slower, and pinning all of ``target``
    would take seconds.
    """
    if source.device.type != "cuda":
        target.copy_(source)
        return
    pinned = torch.empty(_SLICE_BYTES, dtype=torch.uint8, pin_memory=True)  # torch caches it for the next call
    for into, piece in zip(target.split(_SLICE_BYTES), source.split(_SLICE_BYTES)):
        into.copy_(pinned[: piece.numel()].copy_(piece))


def emptied(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a nested state into (state without tensors, {dotted name: tensor}), without copies; empty tensors stay.

    ``{"stored_tensor": name}`` replaces each tensor. ValueError if two tensors have the same dotted name.

    >>> emptied({"model": [torch.ones(1)], "step": 3})
    ({'model': [{'stored_tensor': 'model.0'}], 'step': 3}, {'model.0': tensor([1.])})
    """
    tensors: dict[str, torch.Tensor] = {}

    def without(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor) and value.numel():
            name = ".".join(path)
            if name in tensors:
                raise ValueError(f"two tensors of a state have the dotted name {name}; rename one of their keys")
            tensors[name] = value
            return {_MARK: name}
        if isinstance(value, Mapping):
            return {key: without(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(without(item, (*path, str(index))) for index, item in enumerate(value))
        return value

    return without(state, ()), tensors


def filled(rest: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo :func:`emptied`: return ``rest`` with ``tensors[name]`` for each ``{"stored_tensor": name}``."""
    if isinstance(rest, dict):
        if rest.keys() == {_MARK}:
            return tensors[rest[_MARK]]
        return {key: filled(item, tensors) for key, item in rest.items()}
    if isinstance(rest, (list, tuple)):
        return type(rest)(filled(item, tensors) for item in rest)
    return rest


@dataclass(frozen=True)
class StatePack:
    """A nested state of dicts, lists and tuples, whose tensors (except empty ones) are in one CPU buffer.

    >>> StatePack.of({"model": {"w": torch.ones(2)}, "betas": (0.9, 0.99)}).state()
    {'model': {'w': tensor([1., 1.])}, 'betas': (0.9, 0.99)}
    """

    tensors: WeightPack
    rest: Any

    @classmethod
    def of(cls, state: Any) -> StatePack:
        """Pack ``state``: copy its tensors to the CPU, but keep empty ones as they are; raise as :func:`emptied`."""
        rest, tensors = emptied(state)
        return cls(WeightPack.of(tensors.items()), rest)

    def state(self, *, views: bool = False) -> Any:
        """Return the state with copies of its tensors, or with ``views`` that you must not write or ``torch.save``."""
        return filled(self.rest, {name: tensor if views else tensor.clone() for name, tensor in self.tensors.tensors()})
