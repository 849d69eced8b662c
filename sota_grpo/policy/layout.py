"""Rows as one unpadded sequence in which every distinct prompt stands once, followed by its responses.

Three rows, the first two of one prompt ``p q``; ``a b c d e`` are what follows the prompts::

    row 0   p q a b .          packed     p q c a b   r d e
    row 1   p q c . .   ->     position   0 1 2 2 3   0 1 2
    row 2   r d e . .          block 0: prompt [0, 2), responses [2, 3) and [3, 5); block 1: [5, 6), [6, 8)

Positions restart after the prompt, so each response reads as if it stood behind its prompt alone; the attention sees
to the same (:mod:`sota_grpo.policy.shared_attention`). Within a block responses are sorted by length, so those of one
length stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby

import torch
from torch import Tensor

from sota_grpo.policy.device_copy import copy_to


@dataclass(frozen=True)
class Run:
    """``count`` responses of ``length`` tokens each, one behind the other from ``start``."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Block:
    """One prompt ``[start, end)`` and the responses behind it."""

    start: int
    end: int
    runs: tuple[Run, ...]

    @property
    def stop(self) -> int:
        """Where the next block begins."""
        return self.runs[-1].end if self.runs else self.end


@dataclass(frozen=True)
class Spans:
    """The segments of a packed sequence as variable-length attention takes them: each query span has a key span.

    The keys of a prompt are its own; those of a response are its prompt's and then its own.
    """

    key_index: Tensor  # int64 [K], the packed positions of all keys
    query_ends: Tensor  # int32 [S + 1], 0 and where each span of queries ends
    key_ends: Tensor  # int32 [S + 1]
    longest_query: int
    longest_key: int


@dataclass
class Layout:
    """The packed sequence of ``L`` tokens that right-padded rows ``[N, T]`` become, ``M`` of them predicted."""

    tokens: Tensor  # int64 [L], the sequence
    positions: Tensor  # int64 [1, L], position of each token in its row
    predicting: Tensor  # int64 [M], where each assistant token's predecessor stands in the sequence, row by row
    targets: Tensor  # int64 [M], these assistant tokens
    slots: Tensor  # int64 [M], their flat positions in [N, T]
    place: Tensor  # int64 [N, T] on the CPU, packed position of each real token; siblings share their prompt's
    blocks: tuple[Block, ...]  # prompts and their responses, in the order of the packed sequence
    windows: list[int | None] = field(default_factory=list)  # the sliding window that each layer asked for

    def tensors(self) -> list[Tensor]:
        """What a GPU computes with; see :meth:`on`."""
        spans = self.spans
        own = [self.tokens, self.positions, self.predicting, self.targets, self.slots]
        return [*own, spans.key_index, spans.query_ends, spans.key_ends]

    def on(self, tensors: Sequence[Tensor]) -> Layout:
        """The same layout with :meth:`tensors` on another device."""
        ids, positions, predicting, targets, slots, key_index, query_ends, key_ends = tensors
        moved = Layout(ids, positions, predicting, targets, slots, self.place, self.blocks)
        moved.spans = replace(self.spans, key_index=key_index, query_ends=query_ends, key_ends=key_ends)
        return moved

    def to(self, device: torch.device) -> Layout:
        """Itself on ``device``."""
        return self if self.tokens.device == device else self.on(copy_to(self.tensors(), device))

    def scatter(self, values: Tensor) -> Tensor:
        """``values [M]`` as ``[N, T]``, 0 where there is none."""
        return values.new_zeros(self.place.shape).put(self.slots, values)  # no view: FSDP2's hooks are on this tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(max((run.length for run in b.runs), default=0) + b.end - b.start for b in self.blocks)

    @cached_property
    def spans(self) -> Spans:
        """The same for one variable-length attention call."""
        queries, keys, index = [], [], [torch.arange(0)]
        for block in self.blocks:
            prompt = torch.arange(block.start, block.end)
            queries.append(len(prompt))
            keys.append(len(prompt))
            index.append(prompt)
            for run in block.runs:
                for start in range(run.start, run.end, run.length):
                    queries.append(run.length)
                    keys.append(len(prompt) + run.length)
                    index += [prompt, torch.arange(start, start + run.length)]
        ends = [torch.tensor([0, *accumulate(lengths)], dtype=torch.int32) for lengths in (queries, keys)]
        return Spans(torch.cat(index), ends[0], ends[1], max(queries, default=0), max(keys, default=0))


def pack(tokens: Tensor, attention_mask: Tensor, assistant_mask: Tensor) -> Layout:
    """The layout of ``tokens`` ``[N, T]``: rows are dense, prompts that are equal stand once.

    A row's prompt is what stands before its first assistant token; a row without one is a prompt that nothing follows.
    All is computed on the CPU, and stays there: see :meth:`Layout.to`.

    Args:
        tokens: int64 ``[N, T]``.
        attention_mask: bool ``[N, T]``, the real tokens: the first ones of each row.
        assistant_mask: bool ``[N, T]``, the tokens that the policy produced.

    Raises:
        ValueError: padding stands before a real token.

    >>> tokens = torch.tensor([[5, 6, 1, 2, 0], [5, 6, 3, 0, 0], [7, 8, 9, 0, 0]])
    >>> said = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
    >>> layout = pack(tokens, tokens > 0, said)
    >>> layout.tokens.tolist(), layout.positions.tolist()
    ([5, 6, 3, 1, 2, 7, 8, 9], [[0, 1, 2, 2, 3, 0, 1, 2]])
    >>> layout.predicting.tolist(), layout.targets.tolist()
    ([1, 3, 1, 5, 6], [1, 2, 3, 8, 9])
    >>> layout.place[0, :4].tolist(), layout.place[1, :3].tolist()
    ([0, 1, 3, 4], [0, 1, 2])
    """
    tokens, attention_mask, assistant_mask = tokens.cpu(), attention_mask.cpu(), assistant_mask.cpu()
    if not is_right_padded(attention_mask):
        raise ValueError("padding stands before a real token; the packed layout needs right-padded rows")
    lengths = attention_mask.sum(-1)
    completion_mask = assistant_mask & attention_mask
    prompts = torch.where(completion_mask.any(-1), completion_mask.int().argmax(-1), lengths)
    source, positions, place, blocks = _placed(tokens, lengths.tolist(), prompts.tolist())
    row, column = assistant_mask[:, 1:].nonzero(as_tuple=True)
    return Layout(
        tokens=tokens.flatten()[source],
        positions=positions.unsqueeze(0),
        predicting=place[row, column],
        targets=tokens[row, column + 1],
        slots=row * tokens.shape[1] + column + 1,
        place=place,
        blocks=tuple(blocks),
    )


def _placed(tokens: Tensor, total: list[int], prompt: list[int]) -> tuple[Tensor, Tensor, Tensor, list[Block]]:
    """Where each packed token is taken from in ``[N, T]`` (flat), its position in its row, ``place``, the blocks."""
    width = tokens.shape[1]
    source, positions, blocks = [], [], []
    place = torch.zeros(tokens.shape, dtype=torch.int64)
    end = 0
    by_prompt: dict[bytes, list[int]] = {}
    for row, length in enumerate(prompt):
        by_prompt.setdefault(tokens[row, :length].numpy().tobytes(), []).append(row)
    for rows in by_prompt.values():
        shared = prompt[rows[0]]
        source.append(torch.arange(shared) + rows[0] * width)
        positions.append(torch.arange(shared))
        start, end = end, end + shared
        place[rows, :shared] = torch.arange(start, end)
        prompt_end, runs = end, []
        rows = sorted((row for row in rows if total[row] > shared), key=total.__getitem__)
        for length, equal in groupby(rows, key=lambda row: total[row] - shared):
            first, count = end, 0
            for row in equal:
                here = torch.arange(shared, shared + length)
                source.append(here + row * width)
                positions.append(here)
                place[row, shared : shared + length] = torch.arange(end, end + length)
                count, end = count + 1, end + length
            runs.append(Run(first, count, length))
        if end > start:  # a row of padding alone has no token, and kernels divide by their number
            blocks.append(Block(start, prompt_end, tuple(runs)))
    return torch.cat(source), torch.cat(positions), place, blocks


def is_right_padded(attention_mask: Tensor) -> bool:
    """Whether no real token of ``[N, T]`` follows padding.

    >>> is_right_padded(torch.tensor([[True, False, True]]))
    False
    """
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
