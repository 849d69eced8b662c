"""Tensors in files of the safetensors format, written and read piece by piece, so that no process needs them whole.

A file is 8 bytes (the length of the header), a JSON header (dtype, shape and place of each tensor), and the numbers.
safetensors' own writer wants all tensors of a file at once, and so does torch.distributed.checkpoint's
(``HuggingFaceStorageWriter``), which makes two more copies of them; its other format keeps a pickle beside its files.
Where a piece begins in its tensor stands in the header as torch.distributed.checkpoint writes it, so that its
``HuggingFaceStorageReader`` reads a folder of such files too.
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
from typing import IO, Any

import torch

from sota_grpo.files import sync, write_json
from sota_grpo.policy.weight_pack import as_bytes
from sota_grpo.untrusted import open_file

SUFFIX = ".safetensors"
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_METADATA, _PLACES, _BEGINS = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
_SLICE_BYTES = 16 << 20
_SYNC_BYTES = 512 << 20  # what the disk has not taken is bounded, and a writer shows progress
_HEADER_BYTES = 64 << 20
_MOST_DIMENSIONS = 64  # of torch's own tensors
_LEVELS = 3  # from a run directory to such a file: checkpoints, the checkpoint's folder, the file


class TensorFileError(ValueError):
    """A file is not of the safetensors format, or not what was written; the text says which."""


@dataclass(frozen=True)
class Kept:
    """The shape and dtype of a tensor, or of a piece of one, and where it begins in the whole.

    Args:
        dtype: of its numbers.
        shape: of the piece.
        begin: its first row, and of a matrix its first column; empty for a whole tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, begin: tuple[int, ...] = ()) -> Kept:
        return cls(tensor.dtype, tuple(tensor.shape), begin)

    @property
    def box(self) -> tuple[range, range]:
        """Its rows and columns in the whole; a scalar is one row, and what is no matrix has one column."""
        (rows, columns, *_), (first, left, *_) = (*self.shape, 1, 1), (*self.begin, 0, 0)
        return range(first, first + rows), range(left, left + columns)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path,
    layout: Mapping[str, Kept],
    tensors: Iterable[torch.Tensor],
    *,
    durable: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> str:
    """Write a new file, one tensor after the other; each may be made when it is asked for and is let go afterwards.

    Args:
        path: that nothing stands at.
        layout: of the tensors by name, which is known before they are.
        tensors: on the CPU, in that order.
        durable: the file is on the disk afterwards.
        progress: called after every slice.

    Returns:
        The SHA-256 of the file, in hexadecimal.

    Raises:
        OSError: the file system refused.
        ValueError: a tensor is not what the layout says.

    >>> folder = getfixture("tmp_path")
    >>> digest = write_tensors(folder / "a.safetensors", {"w": Kept(torch.float32, (2,))}, iter([torch.ones(2)]))
    >>> from safetensors.torch import load_file
    >>> load_file(folder / "a.safetensors")
    {'w': tensor([1., 1.])}
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
        for (name, kept), tensor in zip(layout.items(), tensors, strict=True):
            if (tensor.dtype, tuple(tensor.shape)) != (kept.dtype, kept.shape):
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)} and was to be {kept}")
            write(as_bytes(tensor.detach()).numpy().data)
    if durable:
        sync(path)
    return digest.hexdigest()


def _header(layout: Mapping[str, Kept]) -> bytes:
    begins = {name: [*kept.begin, *[0] * len(kept.shape)][: len(kept.shape)] for name, kept in layout.items()}
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    if any(any(kept.begin) for kept in layout.values()):
        header[_METADATA][_PLACES] = json.dumps({name: {_BEGINS: begin} for name, begin in begins.items()})
    end = 0
    for name, kept in layout.items():
        entry = {"dtype": _CODES[kept.dtype], "shape": list(kept.shape)}
        header[name] = entry | {"data_offsets": [end, end := end + kept.num_bytes]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_model(
    folder: Path, layout: Mapping[str, Kept], tensors: Iterable[torch.Tensor], *, most_bytes: int = 50 * 10**9
) -> None:
    """The weights of a model as transformers loads them: one file, or several and an index of who is where.

    Args:
        folder: of the model.
        layout, tensors: as :func:`write_tensors` takes them.
        most_bytes: of one file, but for a tensor that is larger.

    Raises:
        OSError, ValueError: as :func:`write_tensors`.
    """
    groups: list[dict[str, Kept]] = [{}]
    for name, kept in layout.items():
        if groups[-1] and kept.num_bytes + sum(one.num_bytes for one in groups[-1].values()) > most_bytes:
            groups.append({})
        groups[-1][name] = kept
    stream = iter(tensors)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}" if len(groups) > 1 else f"model{SUFFIX}"
        write_tensors(folder / file, group, islice(stream, len(group)))
        places |= dict.fromkeys(group, file)
    if len(groups) > 1:
        total = sum(kept.num_bytes for kept in layout.values())
        write_json(folder / f"model{SUFFIX}.index.json", {"metadata": {"total_size": total}, "weight_map": places})


@dataclass(frozen=True)
class Piece:
    """Some rows of a tensor, or some columns of these, one row after the other in a file."""

    path: str
    offset: int  # of its first byte
    kept: Kept


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in files in pieces; :meth:`block` reads those rows that are asked for and no others.

    Args:
        dtype: of its numbers.
        shape: of the whole.
        pieces: that share it without gap or overlap.
    """

    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[Piece, ...]

    def read(self) -> torch.Tensor:
        """All of it."""
        return self.block(())

    def block(self, cut: Sequence[slice]) -> torch.Tensor:
        """``whole[cut]`` in memory of its own, where ``cut`` says rows, columns, both or nothing.

        Raises:
            OSError: a file cannot be read.
            TensorFileError: a file has become shorter.
        """
        shape = [len(range(size)[rows]) for size, rows in zip(self.shape, cut)]
        wanted = Kept(self.dtype, (*shape, *self.shape[len(shape) :]), tuple(rows.start or 0 for rows in cut))
        tensor = torch.empty(wanted.shape, dtype=self.dtype)
        for piece in self.pieces:
            rows, columns = (_common(*both) for both in zip(wanted.box, piece.kept.box))
            if rows and columns and tensor.numel():
                _read(piece, rows, columns, tensor, wanted)
        return tensor


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _read(piece: Piece, rows: range, columns: range, tensor: torch.Tensor, wanted: Kept) -> None:
    """Fill in of ``tensor`` what a piece has of it, reading its rows whole."""
    kept, path = piece.kept, piece.path
    (first, left), (own_first, own_left) = ([each.start for each in one.box] for one in (wanted, kept))
    there = tensor[rows.start - first : rows.stop - first] if tensor.ndim else tensor
    alike = kept.box[1] == wanted.box[1]
    read = there if alike else torch.empty((len(rows), *kept.shape[1:]), dtype=kept.dtype)
    with open_file(path, levels=_LEVELS) as file:
        file.seek(piece.offset + (rows.start - own_first) * prod(kept.shape[1:]) * kept.dtype.itemsize)
        _fill(file, as_bytes(read).numpy().data, path)
    if not alike:
        there.narrow(1, columns.start - left, len(columns)).copy_(
            read.narrow(1, columns.start - own_left, len(columns))
        )


def in_memory(value: torch.Tensor | StoredTensor) -> torch.Tensor:
    """The tensor itself, or all of a stored one."""
    return value.read() if isinstance(value, StoredTensor) else value


def _fill(file: IO[bytes], target: memoryview, path: str) -> None:
    while target:
        count = file.readinto(target[:_SLICE_BYTES])  # type: ignore[attr-defined]
        if not count:
            raise TensorFileError(f"{path} has become shorter")
        target = target[count:]


def stored_tensors(paths: Sequence[Path]) -> dict[str, StoredTensor]:
    """The tensors whose pieces these files hold; no number is read, and none takes more memory than its bytes.

    Raises:
        OSError: a file cannot be read, or is none of the run's.
        TensorFileError: a file is not what :func:`write_tensors` writes, or the pieces of a tensor do not make a whole.
    """
    pieces: dict[str, list[Piece]] = {}
    for path in paths:
        try:
            for name, piece in _pieces(path):
                pieces.setdefault(name, []).append(piece)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            what = str(error) if isinstance(error, TensorFileError) else f"its header is none ({type(error).__name__})"
            raise TensorFileError(f"{path.name}: {what}") from error
    return {name: _whole(name, own) for name, own in pieces.items()}


def _pieces(path: Path) -> list[tuple[str, Piece]]:
    with open_file(path, levels=_LEVELS) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(size - 8, _HEADER_BYTES):
            raise TensorFileError(f"its header would have {length} bytes")
        header = json.loads(file.read(length))
    begins = json.loads(header.pop(_METADATA, {}).get(_PLACES, "{}"))
    pieces, claimed = [], 0
    for name, entry in header.items():
        shape, (start, stop) = tuple(entry["shape"]), entry["data_offsets"]
        if len(shape) > _MOST_DIMENSIONS:
            raise TensorFileError(f"{name} has {len(shape)} dimensions")
        first = begins[name][_BEGINS] if begins else [0] * len(shape)
        numbers = (*shape, start, stop, *first)
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or any(first[2:]):
            raise TensorFileError(f"{name} has numbers that are no sizes")
        piece = Piece(str(path), 8 + length + start, Kept(_DTYPES[entry["dtype"]], shape, tuple(first)))
        claimed += piece.kept.num_bytes
        if piece.kept.num_bytes != stop - start or max(stop, claimed) > size - 8 - length:
            raise TensorFileError(f"{name} claims {piece.kept.num_bytes} bytes and the file has {size - 8 - length}")
        pieces.append((name, piece))
    return pieces


def _whole(name: str, pieces: list[Piece]) -> StoredTensor:
    """Columns stand side by side, and of each the rows follow one another."""
    pieces.sort(key=lambda piece: [each.start for each in reversed(piece.kept.box)])
    like = pieces[0].kept
    if not like.shape:
        return StoredTensor(like.dtype, torch.Size(), tuple(pieces[:1]))
    num_rows: dict[range, int] = {}  # so far, by columns
    for kept in (piece.kept for piece in pieces):
        rows, columns = kept.box
        follows = columns in num_rows or columns.start == sum(map(len, num_rows))
        same = (kept.dtype, len(kept.shape), kept.shape[2:]) == (like.dtype, len(like.shape), like.shape[2:])
        if not (follows and same and rows.start == num_rows.get(columns, 0)):
            raise TensorFileError(f"the pieces of {name} do not make a whole")
        num_rows[columns] = rows.stop
    if len(set(num_rows.values())) > 1:
        raise TensorFileError(f"the pieces of {name} do not make a whole")
    shape = (rows.stop, columns.stop, *like.shape[2:])[: len(like.shape)]
    return StoredTensor(like.dtype, torch.Size(shape), tuple(pieces))
