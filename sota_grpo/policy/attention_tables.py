"""Which program of the attention's kernels computes what, as tables of integers made on the CPU.

For one prompt of 130 tokens and its responses of 3 and 4, which follow it::

    starts       0 x 130, 130 x 3, 133 x 4         where each token's span begins
    query_tiles  [0, 128) and [128, 130) see their own span; [130, 137), both responses, see [0, 130) too
    key_tiles    [0, 128) is read by queries [0, 137), [128, 130) by [128, 137), [130, 137) by itself
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE = 128  # most queries or keys of a row of a table
PIECE = 1024  # queries that one program runs over a prompt's keys without a mask, unless that makes too many pieces
MOST_PIECES = 8  # of a prompt's keys, each of which takes their size in float32
NO_PROMPT = 2**30  # a prompt's end that lies behind every token


@dataclass(frozen=True)
class Run:
    """``count`` responses of ``length`` tokens each, one after the other from ``start``."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Block:
    """One prompt ``[start, end)`` and the responses that follow it, up to ``stop``."""

    start: int
    end: int
    runs: tuple[Run, ...]

    @property
    def stop(self) -> int:
        return self.runs[-1].end if self.runs else self.end


@dataclass(frozen=True)
class Tables:
    """Rows of int32, all in one tensor ``flat``; the most work comes first, so that the last programs to end are short.

    - ``starts [L]``: the first token of each token's span.
    - ``query_tiles [N, 4]``: queries ``[first, end)`` of one prompt, or of its responses; the prompt's keys
      ``[prompt, prompt_end)`` that they see beside their own span's (none: 0, 0).
    - ``key_tiles [N, 7]``: keys ``[first, end)``; queries ``[asked, masked)`` see those of their span up to themselves,
      and ``[masked, last)`` all; the row of a buffer for sums that are joined later, or -1; the prompt's end, or
      ``NO_PROMPT``.
    - ``joins [N, 5]``: keys ``[first, end)`` whose sums are in ``pieces`` places of the buffer, from ``slot``,
      ``stride`` rows apart: ``first, end, slot, stride, pieces``.

    ``sizes`` are the rows of query tiles, key tiles and joins, and those of the buffer.
    """

    flat: Tensor
    sizes: Sequence[int]

    def split(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Starts, query tiles, key tiles and joins."""
        rows = [4 * self.sizes[0], 7 * self.sizes[1], 5 * self.sizes[2]]
        starts, queries, keys, joins = self.flat.split([len(self.flat) - sum(rows), *rows])
        return starts, queries.view(-1, 4), keys.view(-1, 7), joins.view(-1, 5)


def attention_tables(blocks: Sequence[Block], length: int) -> Tables:
    """The tables of ``length`` packed tokens.

    >>> tables = attention_tables([Block(0, 130, (Run(130, 1, 3), Run(133, 1, 4)))], 137)
    >>> starts, query_tiles, key_tiles, joins = tables.split()
    >>> query_tiles.tolist()
    [[130, 137, 0, 130], [128, 130, 0, 0], [0, 128, 0, 0]]
    >>> key_tiles.tolist()
    [[0, 128, 0, 128, 137, -1, 130], [128, 130, 128, 130, 137, -1, 130], [130, 137, 130, 137, 137, -1, 1073741824]]
    """
    starts, ends = np.zeros(length, np.int32), np.zeros(length, np.int32)
    query_tiles: list[tuple[int, ...]] = []
    key_tiles: list[tuple[int, ...]] = []
    joins: list[tuple[int, ...]] = [(0, 0, 0, 0, 0)] * 2  # of nothing: a compiler makes another graph for sizes 0 and 1
    num_slots = 2
    for block in blocks:
        starts[block.start : block.end], ends[block.start : block.end] = block.start, block.end
        for run in block.runs:
            own = np.arange(run.start, run.end, run.length, dtype=np.int32).repeat(run.length)
            starts[run.start : run.end], ends[run.start : run.end] = own, own + run.length
        for first, end in _tiles(block.start, block.end):
            query_tiles.append((first, end, 0, 0))
            piece = max(PIECE, -(-(block.stop - end) // MOST_PIECES))
            cuts = list(range(end, block.stop, piece)) or [end]
            pieces = [(first if cut == end else cut, cut, min(cut + piece, block.stop)) for cut in cuts]
            slots = [-1] if len(pieces) == 1 else [num_slots + index * (end - first) for index in range(len(pieces))]
            key_tiles += [(first, end, *piece, slot, block.end) for piece, slot in zip(pieces, slots)]
            if len(pieces) > 1:
                joins.append((first, end, num_slots, end - first, len(pieces)))
                num_slots += len(pieces) * (end - first)
        for first, end in _tiles(block.end, block.stop):
            query_tiles.append((first, end, block.start, block.end))
            last = int(ends[end - 1])
            masked = end if starts[first] == starts[end - 1] else last
            key_tiles.append((first, end, first, masked, last, -1, NO_PROMPT))
    query_tiles.sort(key=lambda row: row[0] - int(starts[row[0]]) + row[3] - row[2], reverse=True)
    key_tiles.sort(key=lambda row: row[4] - row[2], reverse=True)
    rows = [value for row in (*query_tiles, *key_tiles, *joins) for value in row]
    flat = torch.from_numpy(np.concatenate([starts, np.array(rows, np.int32)]))
    return Tables(flat, (len(query_tiles), len(key_tiles), len(joins), num_slots))


def _tiles(start: int, stop: int) -> list[tuple[int, int]]:
    return [(first, min(first + TILE, stop)) for first in range(start, stop, TILE)]
