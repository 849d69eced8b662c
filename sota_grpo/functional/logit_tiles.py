"""Tiles of the logits ``[M, V]`` of an output layer, made one after the other in the same buffers.

A tile of ``r`` rows and ``c`` columns reads ``r`` hidden states and ``c`` output embeddings, and its gradient adds to
as many: over all tiles, ``M V H (1 / r + 1 / c)`` numbers each. Of tiles of one size the square moves the fewest; whole
rows (``c = V``) move ``V / (2 sqrt(r c))`` times as many, which is 74 for 152k columns and a million logits.
"""

from __future__ import annotations

import math
import os
import shutil
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LN2 = math.log(2.0)
LOGITS_BYTES_ON_CPU = 8 * 2**20
LOGITS_BYTES = 256 * 2**20
MAX_COLUMNS = 8192  # of a tile whose rows lie in the registers of a kernel
ALIGNED = 128  # rows of a tile begin where matrix products on a GPU read fastest


class LogitTiles:
    """Pieces ``rows`` and ``columns`` of the logits of ``[M, H]`` hidden states, and the buffers to compute them in.

    Logits are in base 2, ``z log2 e``, because on a CPU ``exp2`` is four times as fast as ``exp`` and equally accurate:
    ``factor`` times what :meth:`raw` returns. The derivative of ``z`` by ``hidden weight^T + bias`` is ``slope``, and
    with a softcap ``slope raw (1 - raw)``.

    Args:
        hidden: ``[M, H]``; its dtype is that of the matrix products, the buffers are float32 (float64 if it is).
        weight: ``[V, H]``, in any dtype.
        bias: ``[V]`` or None.
        temperature: the logits are divided by it.
        softcap: bound ``c`` of the logits, ``c tanh(x / c)`` before the division, or None.
        num_bytes: of all buffers together; None for 8 MiB on a CPU and 256 MiB elsewhere.
        num_buffers: wide buffers of one tile; a softcap adds one.

    Memory for 9 logits cuts 5 rows and 7 columns into rows 0:3, 3:5 and columns 0:3, 3:6, 6:7:

    >>> hidden, weight = torch.ones(5, 2), torch.ones(7, 2)
    >>> tiles = LogitTiles(hidden, weight, None, temperature=1.0, softcap=None, num_bytes=9 * 4, num_buffers=1)
    >>> [[(piece.start, piece.stop) for piece in pieces] for pieces in (tiles.rows, tiles.columns)]
    [[(0, 3), (3, 5)], [(0, 3), (3, 6), (6, 7)]]
    >>> tiles.raw(hidden[0:3], weight[6:7], tiles.columns[2]).tolist()
    [[2.0], [2.0], [2.0]]
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        temperature: float,
        softcap: float | None,
        num_bytes: int | None,
        num_buffers: int,
    ) -> None:
        if num_bytes is None:
            num_bytes = LOGITS_BYTES_ON_CPU if hidden.device.type == "cpu" else LOGITS_BYTES
        self.weight, self.bias, self.temperature, self.softcap = weight, bias, temperature, softcap
        self.factor = (1 if softcap is None else 2 * softcap) / (LN2 * temperature)
        self.slope = (1 if softcap is None else 4) / temperature
        self.dtype, self.wide = hidden.dtype, torch.promote_types(hidden.dtype, torch.float32)
        self.kernels = _takes_kernels(hidden, bias, softcap)
        num_buffers = 1 if self.kernels else num_buffers + (softcap is not None)
        narrow_bytes = 0 if self.dtype == self.wide else self.dtype.itemsize
        size = max(1, num_bytes // (num_buffers * self.wide.itemsize + narrow_bytes))
        num_rows = max(1, min(len(hidden), math.isqrt(size)))
        num_columns = min(len(weight), size // num_rows, MAX_COLUMNS if self.kernels else size)
        num_rows = max(1, min(len(hidden), size // num_columns))
        self.rows = _pieces(len(hidden), num_rows)
        self.columns = _pieces(len(weight), num_columns, ALIGNED if hidden.is_cuda else 1)
        self.buffers = hidden.new_empty(num_buffers, num_rows * num_columns, dtype=self.wide)
        self.narrow_buffer = hidden.new_empty(num_rows * num_columns if narrow_bytes else 0)

    def raw(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """``x = hidden weight^T + bias`` ``[r, c]``, or with a softcap ``c`` ``sigmoid(2 x / c)``, in the first buffer.

        ``c tanh(x / c) = 2 c sigmoid(2 x / c) - c``, and a softmax does not see the constant. ``hidden [r, H]`` and
        ``weight [c, H]`` are those of the tile, in one dtype.
        """
        shape = (len(hidden), len(weight))
        x = self.buffers[0, : shape[0] * shape[1]].view(shape)
        if self.dtype == self.wide:
            torch.mm(hidden, weight.t(), out=x)
        elif x.is_cuda:  # the sums of the products as they are, not rounded to half precision first
            torch.mm(hidden, weight.t(), out_dtype=self.wide, out=x)
        else:
            x.copy_(torch.mm(hidden, weight.t(), out=self.narrow_buffer[: x.numel()].view(shape)))
        if self.bias is not None:
            x.add_(self.bias[columns])
        return x if self.softcap is None else x.mul_(2 / self.softcap).sigmoid_()

    def minus(self, raw: Tensor, shift: Tensor) -> Tensor:
        """Logits minus ``shift [r, 1]``, both in base 2, in the place of ``raw`` unless there is a softcap."""
        return torch.add(-shift, raw, alpha=self.factor, out=raw if self.softcap is None else self.buffer(1, raw))

    def buffer(self, i: int, tile: Tensor) -> Tensor:
        """Wide buffer ``i`` in the shape of ``tile``."""
        return self.buffers[i, : tile.numel()].view_as(tile)

    def narrowed(self, tile: Tensor) -> Tensor:
        """``tile`` in the dtype of the matrix products."""
        return tile if self.dtype == self.wide else self.narrow(tile).copy_(tile)

    def narrow(self, tile: Tensor) -> Tensor:
        """Room for ``tile`` in the dtype of the matrix products, which is its own where that is the wide one."""
        return tile if self.dtype == self.wide else self.narrow_buffer[: tile.numel()].view_as(tile)

    @staticmethod
    def find(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Index of each target ``[r, 1]`` among the columns, and whether it is there at all.

        >>> [x.flatten().tolist() for x in LogitTiles.find(torch.tensor([[2], [5], [9]]), slice(4, 8))]
        [[0, 1, 3], [False, True, False]]
        """
        index, last = targets - columns.start, columns.stop - columns.start - 1
        return index.clamp(0, last), (index >= 0) & (index <= last)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in one kernel where the dtypes agree, else summed in the dtype of ``total``.

    >>> total = torch.ones(1, 1)
    >>> add_product(total, torch.full((1, 2), 2.0), torch.full((2, 1), 3.0))
    >>> total.item()
    13.0
    """
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _takes_kernels(hidden: Tensor, bias: Tensor | None, softcap: float | None) -> bool:
    """Whether :mod:`sota_grpo.functional.tile_kernels` computes these logits."""
    takes = hidden.is_cuda and hidden.dtype != torch.float64 and bias is None and softcap is None
    return takes and builds_kernels()


@cache
def builds_kernels() -> bool:
    """Whether kernels can be built here: by Triton, which comes with torch for CUDA on Linux, and a C compiler."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return find_spec("triton") is not None and compiler is not None


def _pieces(total: int, most: int, multiple: int = 1) -> list[slice]:
    """``range(total)`` in pieces of nearly equal size, at most ``most``; all but the last a ``multiple`` if possible.

    >>> [(piece.start, piece.stop) for piece in _pieces(10, 4)]
    [(0, 4), (4, 8), (8, 10)]
    >>> [(piece.start, piece.stop) for piece in _pieces(1000, 400, 128)]
    [(0, 384), (384, 768), (768, 1000)]
    """
    most = most // multiple * multiple or most
    size = -(-total // max(1, -(-total // most)))
    size = min(-(-size // multiple) * multiple, most)
    return [slice(start, min(start + size, total)) for start in range(0, total, max(1, size))]
