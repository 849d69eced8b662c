"""Safetensors files of tensors or slices of tensors, written and read one by one to save memory.

The writers of safetensors and of torch.distributed.checkpoint need all tensors of a file at once. Slice offsets are in
the header in the form of torch.distributed.checkpoint, whose ``HuggingFaceStorageReader`` can read these files too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sota_grpo.files import sync, write_json
from sota_grpo.policy.weight_pack import as_bytes
from sota_grpo.text import one_line
from sota_grpo.untrusted import open_file

SUFFIX = ".safetensors"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA, _SHARDING, _BEGINS = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
_WHOLE = "whole_shapes"  # of the tensors whose slices are in the file; other readers ignore it
_SLICE_BYTES = 16 << 20
_SYNC_BYTES = 512 << 20  # bounds unwritten data, and lets a writer show progress
_LEVELS = 3  # depth of a file in the run directory: checkpoints, the checkpoint's folder, the file


class TensorFileError(ValueError):
    """A file is not in the safetensors format, is damaged, or has changed since it was opened."""


@dataclass(frozen=True)
class Piece:
    """Dtype, shape and offset of a stored tensor, or of a stored slice of a tensor.

    ``begin``: first row and, for a matrix, first column of a slice; empty for a whole tensor. ``whole``: shape of the
    whole tensor; None: not known.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: tuple[int, ...] = ()
    whole: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, begin: tuple[int, ...] = (), whole: tuple[int, ...] | None = None) -> Piece:
        return cls(tensor.dtype, tuple(tensor.shape), begin, whole)

    @property
    def box(self) -> tuple[range, range]:
        """Ranges of rows and columns in the whole tensor; a scalar has one row, and a vector one column."""
        (rows, columns, *_), (first, left, *_) = (*self.shape, 1, 1), (*self.begin, 0, 0)
        return range(first, first + rows), range(left, left + columns)

    def within(self, rows: range, columns: range) -> tuple[slice, ...]:
        """Return the index in this piece of ``rows`` and ``columns`` of the whole tensor; this piece must have them."""
        cuts = [slice(cut.start - box.start, cut.stop - box.start) for cut, box in zip((rows, columns), self.box)]
        return tuple(cuts[: len(self.shape)])

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    layout: Mapping[str, Piece],
    tensors: Iterable[torch.Tensor],
    *,
    durable: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> str:
    """Write tensors one by one to a new safetensors file; return the file's SHA-256 in hexadecimal.

    FileExistsError if ``path`` exists; KeyError if safetensors has no name for a dtype; ValueError if dtype, shape or
    number of the tensors differs from ``layout``. Errors other than the first can leave an incomplete file.

    Args:
        layout: dtype, shape and offset of each tensor, by name.
        tensors: CPU tensors in the order of ``layout``; an iterator may compute them one by one.
        durable: sync the file to the disk. ``progress`` is called after every written block.
    """
    digest, unsynced = hashlib.sha256(), 0
    with open(path, "xb", buffering=0) as file:

        def write(data: memoryview) -> None:
            nonlocal unsynced
            for start in range(0, len(data), _SLICE_BYTES):
                piece = data[start : start + _SLICE_BYTES]
                digest.update(piece)
                while piece:
                    piece = piece[file.write(piece) :]
                unsynced += _SLICE_BYTES
                if durable and unsynced >= _SYNC_BYTES:
                    os.fsync(file.fileno())
                    unsynced = 0
                progress()

        write(memoryview(_header(layout)))
        for (name, layout_of), tensor in zip(layout.items(), tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (layout_of.dtype, layout_of.shape):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, but its layout is {layout_of}")
            write(as_bytes(tensor.detach()).numpy().data)
    if durable:
        sync(path)
    return digest.hexdigest()


def _header(layout: Mapping[str, Piece]) -> bytes:
    begins = {name: [*piece.begin, *[0] * len(piece.shape)][: len(piece.shape)] for name, piece in layout.items()}
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    if any(any(piece.begin) for piece in layout.values()):
        header[_METADATA][_SHARDING] = json.dumps({name: {_BEGINS: begin} for name, begin in begins.items()})
    if whole := {name: piece.whole for name, piece in layout.items() if piece.whole not in (None, piece.shape)}:
        header[_METADATA][_WHOLE] = json.dumps(whole)
    end = 0
    for name, piece in layout.items():
        entry = {"dtype": _CODES[piece.dtype], "shape": list(piece.shape)}
        header[name] = entry | {"data_offsets": [end, end := end + piece.num_bytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_model(
    folder: Path, layout: Mapping[str, Piece], tensors: Iterable[torch.Tensor], *, most_bytes: int = 50 * 10**9
) -> None:
    """Write weights in transformers' format: one file; above ``most_bytes``, several and an index.

    For the other arguments and the errors see :func:`write_tensors`.
    """
    groups: list[dict[str, Piece]] = [{}]
    for name, piece in layout.items():
        if groups[-1] and piece.num_bytes + sum(other.num_bytes for other in groups[-1].values()) > most_bytes:
            groups.append({})
        groups[-1][name] = piece
    stream = iter(tensors)
    file_of: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}" if len(groups) > 1 else f"model{SUFFIX}"
        write_tensors(folder / file, group, islice(stream, len(group)))
        file_of |= dict.fromkeys(group, file)
    if len(groups) > 1:
        total = sum(piece.num_bytes for piece in layout.values())
        write_json(folder / f"model{SUFFIX}.index.json", {"metadata": {"total_size": total}, "weight_map": file_of})


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in one or more files; :meth:`block` reads only the requested rows and columns.

    ``pieces``: (file, slice) pairs, which cover the tensor without gap or overlap.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[tuple[Path, Piece], ...]

    def block(self, cut: Sequence[slice]) -> torch.Tensor:
        """Read ``whole[cut]``; ``cut``: ``()``, ``(rows,)`` or ``(rows, columns)``, without step or negative bound.

        OSError if a file cannot be read, TensorFileError if it has changed since it was opened.
        """
        shape = [len(range(size)[rows]) for size, rows in zip(self.shape, cut)]
        requested = Piece(self.dtype, (*shape, *self.shape[len(shape) :]), tuple(rows.start or 0 for rows in cut))
        tensor = torch.empty(requested.shape, dtype=self.dtype)
        for path, piece in self.pieces:
            both = zip(requested.box, piece.box)
            rows, columns = (range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in both)
            if rows and columns and tensor.numel():
                try:
                    with _opened(path) as file:
                        there = piece.within(rows, columns)
                        stored = file.get_slice(self.name)[there] if there else file.get_tensor(self.name)
                        tensor[requested.within(rows, columns)] = stored
                except (SafetensorError, RuntimeError) as error:
                    raise TensorFileError(f"{path} has changed since it was opened: {error}") from error
        return tensor


def in_memory(value: torch.Tensor | StoredTensor) -> torch.Tensor:
    """Return ``value`` itself if it is in memory, else read it whole; errors as in :meth:`StoredTensor.block`."""
    return value.block(()) if isinstance(value, StoredTensor) else value


def _opened(path: Path) -> Any:
    open_file(path, levels=_LEVELS).close()  # refuses a file outside the run
    return safe_open(path, "pt")


def stored_tensors(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """Return the tensors in the files ``paths`` by name, without reading their values.

    OSError if a file cannot be read or is a link out of its third parent folder, the run directory. TensorFileError if
    a file is damaged, or slices overlap, differ in dtype or leave a gap (at the end: if a file has the whole shape).
    """
    pieces: dict[str, list[tuple[Path, Piece]]] = {}
    for path in paths:
        try:
            with _opened(path) as file:
                names, metadata = file.keys(), file.metadata() or {}
                begins, whole = (json.loads(metadata.get(key, "{}")) for key in (_SHARDING, _WHOLE))
                for name in names:
                    stored, begin = file.get_slice(name), begins[name][_BEGINS] if begins else []
                    of = tuple(whole[name]) if name in whole else None
                    piece = Piece(_DTYPES[stored.get_dtype()], tuple(stored.get_shape()), tuple(begin), of)
                    if any(begin[2:]) or any(cut.start < 0 for cut in piece.box):
                        raise TensorFileError(f"{name} has the invalid offset {begin}")
                    pieces.setdefault(name, []).append((path, piece))
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            what = str(error) if isinstance(error, TensorFileError) else f"invalid header ({type(error).__name__})"
            raise TensorFileError(f"{path.name}: {what}") from error
    return {name: _whole(name, files) for name, files in pieces.items()}


def _whole(name: str, pieces: list[tuple[Path, Piece]]) -> StoredTensor:
    """Join slices to one tensor; they must be in order by columns, and by rows within equal columns."""
    pieces.sort(key=lambda piece: [each.start for each in reversed(piece[1].box)])
    like = pieces[0][1]
    if not like.shape:
        return StoredTensor(name, like.dtype, torch.Size(), tuple(pieces[:1]))
    num_rows: dict[range, int] = {}  # so far, by columns
    fits = True
    for _, stored in pieces:
        rows, columns = stored.box
        follows = columns in num_rows or columns.start == sum(map(len, num_rows))
        same = (stored.dtype, len(stored.shape), stored.shape[2:]) == (like.dtype, len(like.shape), like.shape[2:])
        fits &= follows and same and rows.start == num_rows.get(columns, 0)
        num_rows[columns] = rows.stop
    if not fits or len(set(num_rows.values())) > 1:
        raise TensorFileError(
            f"the stored slices of {name} have gaps, overlap or differ in dtype: a file is damaged or missing"
        )
    shape = (rows.stop, columns.stop, *like.shape[2:])[: len(like.shape)]
    for path, stored in pieces:
        if stored.whole is not None and stored.whole != shape:
            raise TensorFileError(
                f"the stored slices of {name} make a tensor of the shape {list(shape)}, but by {path.name} it has "
                f"{one_line(str(list(stored.whole)), 60)}: a file is missing or damaged"
            )
    return StoredTensor(name, like.dtype, torch.Size(shape), tuple(pieces))
