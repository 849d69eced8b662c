"""Packing of rows into one unpadded sequence that stores every distinct prompt once, and attention over it.

Three rows, the first two with the prompt ``p q``; ``a b c d e`` are response tokens::

    row 0   p q a b .          packed     p q c a b   r d e
    row 1   p q c . .   ->     position   0 1 2 2 3   0 1 2
    row 2   r d e . .          block 0: prompt [0, 2), responses [2, 3) and [3, 5); block 1: [5, 6), [6, 8)

Every response's positions continue those of its prompt, and a response attends to its prompt and itself. Within a
block, responses are sorted by length. Rows are not padded; on a CPU, attention pads copies of spans of similar lengths.

With the scores of a response's token ``t`` split into those of the prompt (a) and of the response itself (b),

    o_t = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b,    lse = log(exp lse_a + exp lse_b),

so two calls of the flash kernel and this sum compute one softmax over both (Dao et al. 2022, arXiv:2205.14135, section
3.1). The backward pass calls the flash kernel's backward for (a) and (b) with ``o`` and ``lse`` of the whole: the
recomputed probabilities ``exp(score - lse)`` are then those of the whole softmax, and the two gradients are added.

On CUDA in half precision the attention is one operation with its own kernels
(:mod:`sota_grpo.policy.attention_kernels`), which torch.compile can trace. Elsewhere, a slower form runs response by
response for layers with a sliding window shorter than the longest row, for capped scores, and on CUDA in float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sota_grpo.functional.log_probs import SupportSets, add_product, builds_kernels
from sota_grpo.policy.weight_pack import copy_to

SHARED_ATTENTION = "sota_grpo_shared"
LAYER_TYPES = {"full_attention", "sliding_attention"}
UNKNOWN = ("position_bias", "s_aux", "sinks", "cache")  # arguments that would change scores and are not supported
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
TILE = 128  # most queries or keys in one row of a table
PIECE = 1024  # unmasked queries per program for gradients of a prompt's keys, unless that makes too many pieces
MOST_PIECES = 8  # pieces of those queries, each of which takes a float32 buffer of the keys' size
NO_PROMPT = 2**30  # a prompt's end after every token


@dataclass
class Layout:
    """Layout of right-padded rows ``[N, T]`` as a packed sequence of ``L`` tokens with ``M`` assistant tokens."""

    tokens: Tensor  # int64 [L], the packed sequence
    positions: Tensor  # int64 [1, L], position of each token in its row; in a tree, on its path
    predicting: Tensor  # int64 [M], index of each assistant token's predecessor in the sequence, row by row
    targets: Tensor  # int64 [M], ids of the assistant tokens
    slots: Tensor  # int64 [M], flat positions of the assistant tokens in [N, T]
    packed_at: Tensor  # int64 [N, T] on the CPU, packed position of each real token; shared by the rows of a prompt
    blocks: tuple[Block, ...]  # prompts and their responses, in the order of the packed sequence
    windows: list[int | None] = field(default_factory=list)  # sliding window of each layer, recorded by the layer
    support: SupportSets | None = None  # sampling supports of the M assistant tokens, if sampling was truncated

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a GPU needs, as :meth:`on` expects them."""
        support = [] if self.support is None else self.support[:4]
        return [self.tokens, self.positions, self.predicting, self.targets, self.slots, self.tables.flat, *support]

    def on(self, tensors: Sequence[Tensor]) -> Layout:
        """Return a copy of the layout with ``tensors``, those of :meth:`tensors` on another device."""
        support = self.support
        if support is not None:
            support = SupportSets(tensors[6], tensors[7], tensors[8], tensors[9], support.largest)
        tokens, positions, predicting, targets, slots = tensors[:5]
        moved = Layout(tokens, positions, predicting, targets, slots, self.packed_at, self.blocks, support=support)
        moved.tables = replace(self.tables, flat=tensors[5])
        return moved

    def to(self, device: torch.device) -> Layout:
        return self if self.tokens.device == device else self.on(copy_to(self.tensors(), device))

    @cached_property
    def tables(self) -> Tables:
        """Work tables of the CUDA kernels."""
        return attention_tables(self.blocks, len(self.tokens))

    @cached_property
    def spans(self) -> list[Spans]:
        """All prompts and responses in batches, each of spans up to 8 tokens or an eighth longer than its shortest.

        A prompt of 11 tokens with responses of 1 and 2: batches at ``[11, 11, 12, 13]`` and ``[0, 1, .., 10]``.
        """
        spans = [(block.end - block.start, block.start) for block in self.blocks if block.end > block.start]
        runs = [run for block in self.blocks for run in block.runs]
        spans += [(run.length, run.start + index * run.length) for run in runs for index in range(run.count)]
        batches: list[list[tuple[int, int]]] = []
        for length, start in sorted(spans):
            if not batches or length > batches[-1][0][0] + max(8, batches[-1][0][0] // 8):
                batches.append([])
            batches[-1].append((length, start))
        padded = []
        for batch in batches:
            lengths, starts = np.array(batch).T
            place = np.arange(lengths.max())
            positions = starts[:, None] + np.minimum(place, lengths[:, None] - 1)
            is_real = (place < lengths[:, None]).ravel()
            indices = (positions.ravel(), np.flatnonzero(is_real), np.flatnonzero(~is_real))
            taken, real, padding = map(torch.from_numpy, indices)
            padded.append(Spans(taken, real, padding, len(batch)))
        return padded

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest row; of a tree, of its longest path."""
        return int(self.positions.max()) + 1 if self.positions.numel() else 0


@dataclass(frozen=True)
class Run:
    """``count`` consecutive responses of ``length`` tokens each, from packed position ``start``."""

    start: int
    count: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.count * self.length


@dataclass(frozen=True)
class Block:
    """A prompt at packed positions ``[start, end)`` and its responses at ``[end, stop)``."""

    start: int
    end: int
    stop: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Spans:
    """Packed positions of prompts and responses of similar lengths, padded by repeating the last position of each."""

    positions: Tensor  # int64 [N * T], those of N spans of up to T tokens
    real: Tensor  # int64, places in ``positions`` that are no padding
    padding: Tensor  # int64, the other places
    count: int  # N

    def take(self, tensor: Tensor) -> Tensor:
        """Return a copy ``[N, heads, T, ...]`` of ``tensor [1, heads, L, ...]``."""
        taken = tensor[0].transpose(0, 1).index_select(0, self.positions)
        return taken.unflatten(0, (self.count, -1)).transpose(1, 2)

    def put(self, whole: Tensor, tensor: Tensor) -> None:
        """Write ``tensor [N, heads, T, ...]`` without its padding to ``whole [1, heads, L, ...]``."""
        rows = tensor.transpose(1, 2).flatten(0, 1).index_select(0, self.real)
        whole[0].transpose(0, 1).index_copy_(0, self.positions[self.real], rows)


@dataclass(frozen=True)
class Tables:
    """Work tables of the CUDA kernels, int32, in one tensor ``flat``; tiles are sorted by work, the most first.

    - ``starts [L]``: packed position of the first token of each token's span (a prompt or a response).
    - ``query_tiles [.., 4]``: queries ``[first, end)`` of one prompt or of its responses; keys ``[prompt, prompt_end)``
      of the prompt that they attend to in addition to their own span (0, 0: none).
    - ``key_tiles [.., 7]``: keys ``[first, end)``; queries ``[asked, masked)`` attend causally to keys of their span,
      and queries ``[masked, last)`` to all these keys; first row in a buffer of partial sums, or -1; the prompt's end,
      or ``NO_PROMPT``.
    - ``joins [.., 5]``: ``first, end, slot, stride, pieces``: the gradients of keys ``[first, end)`` are the sum of
      ``pieces`` buffer ranges, which start at row ``slot`` and are ``stride`` rows apart.

    ``sizes``: number of rows of query tiles, of key tiles, of joins and of the buffer.
    """

    flat: Tensor
    sizes: Sequence[int]

    def split(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ``(starts, query_tiles, key_tiles, joins)``, views of ``flat``."""
        rows = [4 * self.sizes[0], 7 * self.sizes[1], 5 * self.sizes[2]]
        starts, queries, keys, joins = self.flat.split([len(self.flat) - sum(rows), *rows])
        return starts, queries.view(-1, 4), keys.view(-1, 7), joins.view(-1, 5)


def attention_tables(blocks: Sequence[Block], length: int) -> Tables:
    """Return the CUDA kernels' :class:`Tables` of ``length`` packed tokens.

    For a prompt of 130 tokens with responses of 3 and 4, ``starts`` is 130 times 0, 3 times 130, 4 times 133. The
    responses share the tile [130, 137), whose queries also attend to the prompt's keys [0, 130).

    >>> tables = attention_tables([Block(0, 130, 137, (Run(130, 1, 3), Run(133, 1, 4)))], 137)
    >>> starts, query_tiles, key_tiles, joins = tables.split()
    >>> query_tiles.tolist()
    [[130, 137, 0, 130], [128, 130, 0, 0], [0, 128, 0, 0]]
    >>> key_tiles.tolist()
    [[0, 128, 0, 128, 137, -1, 130], [128, 130, 128, 130, 137, -1, 130], [130, 137, 130, 137, 137, -1, 1073741824]]
    """
    starts, ends = np.zeros(length, np.int32), np.zeros(length, np.int32)
    query_tiles: list[tuple[int, ...]] = []
    key_tiles: list[tuple[int, ...]] = []
    joins: list[tuple[int, ...]] = [(0, 0, 0, 0, 0)] * 2  # empty: sizes 0 and 1 would be compiled apart
    num_slots = 2
    for block in blocks:
        starts[block.start : block.end], ends[block.start : block.end] = block.start, block.end
        for run in block.runs:
            span_starts = np.arange(run.start, run.end, run.length, dtype=np.int32).repeat(run.length)
            starts[run.start : run.end], ends[run.start : run.end] = span_starts, span_starts + run.length
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


def pack(tokens: Tensor, attention_mask: Tensor, assistant_mask: Tensor, parents: Tensor | None = None) -> Layout:
    """Return the packed layout of right-padded rows, in which equal prompts are stored once.

    A row's prompt is all tokens before its first assistant token; a row without one is a prompt without a response. A
    row that is a tree (``keys.PARENTS``) has a response per leaf (:func:`tree_branches`); tokens after the prompt that
    leaves share are computed once per leaf. ValueError if padding precedes a token, or there are no rows.

    Args:
        tokens: int64 ``[N, T]``; the layout is computed on the CPU, see :meth:`Layout.to`.
        attention_mask: bool ``[N, T]``, False for padding, which must be at the end of each row.
        assistant_mask: bool ``[N, T]``, the tokens that the policy sampled.
        parents: int64 ``[N, T]``, the position of each token's predecessor, -1 for a root; None: rows are no trees.

    >>> tokens = torch.tensor([[5, 6, 1, 2, 0], [5, 6, 3, 0, 0], [7, 8, 9, 0, 0]])
    >>> said = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0]]).bool()
    >>> layout = pack(tokens, tokens > 0, said)
    >>> layout.tokens.tolist(), layout.positions.tolist()
    ([5, 6, 3, 1, 2, 7, 8, 9], [[0, 1, 2, 2, 3, 0, 1, 2]])
    >>> layout.predicting.tolist(), layout.targets.tolist()
    ([1, 3, 1, 5, 6], [1, 2, 3, 8, 9])
    """
    tokens, attention_mask, assistant_mask = tokens.cpu(), attention_mask.cpu(), assistant_mask.cpu()
    if not is_right_padded(attention_mask):
        raise ValueError("padding precedes a real token in attention_mask; the packed layout needs right-padded rows")
    lengths = attention_mask.sum(-1)
    completion_mask = assistant_mask & attention_mask
    prompts = torch.where(completion_mask.any(-1), completion_mask.int().argmax(-1), lengths)
    total, prompt, width = lengths.tolist(), prompts.tolist(), tokens.shape[1]
    ids, packed = tokens.numpy(), np.zeros(tokens.shape, np.int64)
    source: list[Any] = []  # flat positions in [N, T] from which packed tokens are taken
    positions: list[Any] = []
    blocks: list[Block] = []
    end = 0
    by_prompt: dict[bytes, list[tuple[int, Any]]] = {}  # (row, its positions on a path from a root to a leaf)
    for row, shared in enumerate(prompt):
        branches = [Branch(shared, np.arange(total[row]))]
        if parents is not None:
            branches = tree_branches(parents[row, : total[row]], completion_mask[row, : total[row]])
        for shared, path in branches:
            by_prompt.setdefault(ids[row, path[:shared]].tobytes(), []).append((row, path))
    for text, paths in by_prompt.items():
        shared = len(text) // ids.itemsize
        row, path = paths[0]
        source.append(path[:shared] + row * width)
        positions.append(np.arange(shared))
        start, end = end, end + shared
        for row, path in paths:
            packed[row, path[:shared]] = np.arange(start, end)
        prompt_end, runs = end, []
        paths = sorted(((row, path) for row, path in paths if len(path) > shared), key=lambda one: len(one[1]))
        for length, equal in groupby(paths, key=lambda one: len(one[1]) - shared):
            first, count = end, 0
            for row, path in equal:
                source.append(path[shared:] + row * width)
                positions.append(np.arange(shared, shared + length))
                packed[row, path[shared:]] = np.arange(end, end + length)
                count, end = count + 1, end + length
            runs.append(Run(first, count, length))
        if end > start:  # a row of padding alone has no token, and kernels divide by their number
            blocks.append(Block(start, prompt_end, end, tuple(runs)))
    predicted, column = assistant_mask[:, 1:].nonzero(as_tuple=True)
    where = torch.from_numpy(packed)
    return Layout(
        tokens=tokens.flatten()[torch.from_numpy(np.concatenate(source))],
        positions=torch.from_numpy(np.concatenate(positions)).unsqueeze(0),
        predicting=where[predicted, column if parents is None else parents[predicted, column + 1]],
        targets=tokens[predicted, column + 1],
        slots=predicted * width + column + 1,
        packed_at=where,
        blocks=tuple(blocks),
    )


class Branch(NamedTuple):
    """A path from root to leaf in a row that is a tree of tokens; its first ``shared`` tokens are the prompt's."""

    shared: int
    path: Any  # int64 [length], positions in the row


def tree_branches(parents: Tensor, completion_mask: Tensor) -> list[Branch]:
    """Return the paths from roots to leaves of a row that is a tree (``keys.PARENTS``), in the order of the leaves.

    The prompt of a root with several leaves is the longest common prefix of their paths; of a root with one leaf, the
    tokens before its first assistant token.

    Args:
        parents: int64 ``[T]`` on the CPU, position of each token's predecessor, which precedes it; -1 for a root.
        completion_mask: bool ``[T]``, the tokens that the policy sampled.

    >>> branches = tree_branches(torch.tensor([-1, 0, 1, 2, 1, 4, -1]), torch.tensor([0, 0, 1, 1, 1, 1, 0]).bool())
    >>> [(branch.shared, branch.path.tolist()) for branch in branches]
    [(2, [0, 1, 2, 3]), (2, [0, 1, 4, 5]), (1, [6])]
    """
    before = parents.numpy()
    starts = np.flatnonzero(before != np.arange(-1, len(before) - 1))
    starts = np.union1d([0], starts).astype(np.int64)  # of runs, in which each token follows the one before it
    inner, paths = {*before[starts].tolist()}, []
    for end in [*starts[1:].tolist(), len(before)]:
        last, pieces = end - 1, []
        if last in inner:
            continue
        while last >= 0:
            start = int(starts[np.searchsorted(starts, last, "right") - 1])
            pieces.append(np.arange(start, last + 1))
            last = int(before[start])
        paths.append(np.concatenate(pieces[::-1]))
    shared: dict[int, int] = {}
    for root in {int(path[0]) for path in paths}:
        first, *others = (path for path in paths if path[0] == root)
        said = np.flatnonzero(completion_mask.numpy()[first])
        shared[root] = int(said[0]) if len(said) and not others else len(first)
        for other in others:
            length = min(shared[root], len(other))
            differs = np.flatnonzero(first[:length] != other[:length])
            shared[root] = int(differs[0]) if len(differs) else length
    return [Branch(shared[int(path[0])], path) for path in paths]


def branch_rows(
    tokens: Tensor, attention_mask: Tensor, assistant_mask: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each path from root to leaf of rows that are trees as a right-padded row; arguments as in :func:`pack`.

    All tensors are on the CPU: tokens int64 ``[B, D]`` of the ``B`` paths; and int64 ``[M]``, for each assistant token
    of the input, row by row, the position of its predecessor in the flattened ``[B, D]``.
    """
    paths = [
        (row, branch.path)
        for row, length in enumerate(attention_mask.sum(-1).tolist())
        for branch in tree_branches(parents[row, :length], assistant_mask[row, :length])
    ]
    width = max(len(path) for _, path in paths)
    branches = tokens.new_zeros(len(paths), width)
    at = np.zeros(tokens.shape, np.int64)
    for number, (row, path) in enumerate(paths):
        branches[number, : len(path)] = tokens[row, path]
        at[row, path] = np.arange(len(path)) + number * width
    rows, columns = assistant_mask.nonzero(as_tuple=True)
    return branches, torch.from_numpy(at)[rows, parents[rows, columns]]


def is_right_padded(attention_mask: Tensor) -> bool:
    """Return whether in every row of ``[N, T]`` all padding is at the end."""
    return bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())


def shared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    layout: Layout | None = None,
    tables: Tables | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return one layer's attention over packed rows, and None: an attention function of transformers.

    Without ``layout``, rows are padded, and transformers' SDPA computes them unless there is a ``softcap``. Packed rows
    give ``[1, L, heads, width]``, padded rows ``[N, T, heads, width]``. NotImplementedError for packed rows with
    dropout, without causality, or with an argument in :data:`UNKNOWN`.

    Args:
        query: ``[1, heads, L, width]``, of padded rows ``[N, heads, T, width]``; ``key`` and ``value`` may have fewer
            heads, a divisor of ``heads``.
        attention_mask: mask of padded rows; ignored with a layout.
        scaling: factor of the scores; None: ``width ** -0.5``.
        layout: layout of the ``L`` packed tokens; ``tables``: its tables, which the compiler can trace.
        sliding_window: with a layout, number of tokens that a token attends to, itself included.
        softcap: scores become ``softcap * tanh(score / softcap)``.
    """
    if layout is None and softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    width = query.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    if layout is not None:
        unsupported = [name for name in UNKNOWN if kwargs.get(name) is not None]
        if dropout or unsupported or kwargs.get("is_causal") is False:
            what = ", ".join(unsupported) or "dropout, or attention that is not causal"
            raise NotImplementedError(f"attention over packed rows does not support {what}")
        query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast rotary positions make them float32
    equal_widths = width == value.shape[-1]
    if layout is None or tables is None or not (equal_widths and takes_kernels(query.device, value.dtype, width)):
        out = _between_graphs(query, key, value, attention_mask, layout, scale, sliding_window, softcap)
        return out.transpose(1, 2), None
    if not torch.compiler.is_compiling():
        layout.windows.append(sliding_window)
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    scores = [scale, softcap or 0.0, sliding_window or 0]
    out = packed_attention(query, key, value, tables.flat, [*tables.sizes], scores)
    return out.unsqueeze(0), None


AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


@torch.compiler.disable  # blocks differ in every micro-batch
def _between_graphs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor | None,
    layout: Layout | None,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Compute attention without the CUDA kernels; a compiled layer has a graph break here."""
    if layout is None:  # torch's SDPA has no cap, and transformers omits it without an error
        return _attend(query, key, value, scale, softcap, seen=seen)
    layout.windows.append(sliding_window)
    window = sliding_window if sliding_window and sliding_window < layout.longest else None
    if softcap is None and window is None and not query.is_cuda and query.shape[-1] == value.shape[-1]:
        return _FlashShared.apply(query, key, value, layout, scale)
    return _plain(query, key, value, layout, scale, window, softcap)


class _FlashShared(torch.autograd.Function):
    """Attention ``[1, heads, L, width]`` by CPU flash kernels; saves inputs, output and lse ``[1, heads, L]``."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        out, of_prompt = (torch.zeros_like(query) for _ in range(2))
        lse, lse_of_prompt = (query.new_full(query.shape[:3], -torch.inf, dtype=wide) for _ in range(2))
        for spans in layout.spans:  # every prompt and every response attends to itself
            attended, attended_lse = _flash(*map(spans.take, (query, key, value)), 0.0, True, scale=scale)
            spans.put(out, attended)
            spans.put(lse, attended_lse)
        for block in layout.blocks:
            if block.runs and block.end > block.start:
                prompt, responses = slice(block.start, block.end), slice(block.end, block.stop)
                inputs = query[:, :, responses], key[:, :, prompt], value[:, :, prompt]
                attended, attended_lse = _flash(*inputs, 0.0, False, scale=scale)
                of_prompt[:, :, responses] = attended
                lse_of_prompt[:, :, responses] = attended_lse
        whole = torch.logaddexp(lse, lse_of_prompt)
        by_span, by_prompt = ((each - whole).exp_().unsqueeze(-1) for each in (lse, lse_of_prompt))
        out.copy_(out * by_span + of_prompt * by_prompt)
        ctx.save_for_backward(query, key, value, out, whole)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        wide = lse.dtype  # torch's kernel takes two to seven times as long in half precision
        query, key, value, out, grad = (tensor.to(wide) for tensor in (*saved, grad))
        totals = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        for spans in ctx.layout.spans:
            inputs = [spans.take(tensor) for tensor in (grad, query, key, value, out, lse)]
            inputs[0].transpose(1, 2).flatten(0, 1).index_fill_(0, spans.padding, 0.0)
            for total, tensor in zip(totals, _flash_backward(*inputs, 0.0, True, scale=ctx.scale)):
                spans.put(total, tensor)
        for block in ctx.layout.blocks:
            if block.runs and block.end > block.start:
                prompt, responses = slice(block.start, block.end), slice(block.end, block.stop)
                of_responses = [tensor[:, :, responses] for tensor in (grad, query, out, lse)]
                of_prompt = [tensor[:, :, prompt] for tensor in (key, value)]
                grads = _flash_backward(*of_responses[:2], *of_prompt, *of_responses[2:], 0.0, False, scale=ctx.scale)
                for span, total, tensor in zip((responses, prompt, prompt), totals, grads):
                    total[:, :, span].add_(tensor)
        return *(total.to(tensor.dtype) for total, tensor in zip(totals, saved)), None, None


def takes_kernels(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether the CUDA kernels can run: a GPU of Ampere or newer, and Triton and a C compiler to build them.

    They need half precision and a head width that is a multiple of 8 up to 256.
    """
    half = dtype in (torch.float16, torch.bfloat16)
    return device.type == "cuda" and half and width % 8 == 0 and width <= 256 and _builds_kernels(device)


@torch.compiler.assume_constant_result
def _builds_kernels(device: torch.device) -> bool:
    return builds_kernels() and torch.cuda.get_device_capability(device) >= (8, 0)


_library = torch.library.Library("sota_grpo", "FRAGMENT")


def _operation(name: str, schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define an operation of torch that graphs contain; ``torch.library.custom_op`` adds 17 calls."""
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sota_grpo::{name}", fake, lib=_library)
    return getattr(torch.ops.sota_grpo, name).default


_KERNELS = "sota_grpo.policy.attention_kernels"


def _kernel(name: str, schema: str, fake: Callable[..., Any]) -> Any:
    """Define the operation that is computed by this function of ``attention_kernels``, which needs Triton."""

    def compute(*args: Any) -> Any:
        module = sys.modules.get(_KERNELS) or import_module(_KERNELS)  # import_module costs four calls each time
        return getattr(module, name)(*args)

    return _operation(name, schema, compute, fake)


_OPTIONS = "Tensor tables, SymInt[] sizes, float[] scores"  # Tables(tables, sizes); scale, softcap and window (0: none)
_attention = _kernel(
    "packed_attention",
    f"(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> (Tensor, Tensor)",
    lambda query, *_: (query.new_empty(query.shape), query.new_empty(*query.shape[1::-1], dtype=torch.float32)),
)
_attention_backward = _kernel(
    "packed_attention_backward",
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    lambda grad, *tensors: tuple([each.new_empty(each.shape) for each in tensors[:3]]),
)
_unrotate = _kernel(
    "unrotate",
    "(Tensor[] pulls, Tensor states, Tensor[] norms, Tensor cos, Tensor sin, float eps) -> (Tensor, Tensor)",
    lambda pulls, states, norms, *_: (
        states.new_empty(states.shape),
        states.new_empty(len(norms), states.shape[2], dtype=torch.float32),
    ),
)
_add_gradient = _operation(
    "add_gradient",
    "(Tensor(a!) total, Tensor grad, Tensor states) -> ()",
    # data: what was saved for another backward pass remains valid
    lambda total, grad, states: add_product(total.data, grad.t(), states),
    lambda *tensors: None,
)


class _PackedAttention(torch.autograd.Function):
    """Attention with a gradient: ``packed_attention`` of ``attention_kernels``, which describes the arguments."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tables: Tensor, *numbers: Any) -> Tensor:
        out, lse = _attention(query, key, value, tables, *numbers)
        ctx.save_for_backward(query, key, value, out, lse, tables)
        ctx.numbers = numbers
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_attention_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers), None, None, None


packed_attention = _PackedAttention.apply


class SummingLinear(torch.autograd.Function):
    """``linear(states, weight, bias)``, whose backward pass adds the weight's gradient to ``total``; no ``.grad``."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, total: Tensor, *bias: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, total)
        ctx.biases = len(bias)
        return linear(states, weight, *bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, total = ctx.saved_tensors
        _add_gradient(total, grad, states)
        return grad @ weight, None, None, *[grad.sum(0)] * ctx.biases


def rotated_heads(states: Tensor, norms: Sequence[Tensor], cos: Tensor, sin: Tensor, heads: int, eps: float) -> Tensor:
    """Return queries and keys ``[L, heads + key heads, width]``, normed unless ``norms`` are empty, and rotated.

    ``states``: queries, keys and values, ``[L, heads + 2 key heads, width]``. ``norms``: float32 weights ``[width]`` of
    the RMS norms of queries and of keys. ``cos``, ``sin``: rotary factors, float32 ``[L, width]``.
    """
    turned = states[:, : (states.shape[1] + heads) // 2].float()
    if norms:
        of_query = torch.arange(turned.shape[1], device=states.device).unsqueeze(1) < heads
        normed = turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + eps)
        query_norm, key_norm = norms
        turned = torch.where(of_query, query_norm, key_norm) * normed.to(states.dtype)
    first, second = turned.chunk(2, -1)
    turned = turned * cos.unsqueeze(1) + torch.cat((-second, first), -1) * sin.unsqueeze(1)
    return turned.to(states.dtype)


class HeadAttention(torch.autograd.Function):
    """Attention over packed rows of heads that :func:`rotated_heads` norms and rotates; without softcap.

    Arguments: ``states, cos, sin, tables, sizes, heads, eps, scale, window`` and norms of queries and keys, if any.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, cos: Tensor, sin: Tensor, tables: Tensor, *others: Any) -> Tensor:
        (sizes, heads, eps, scale, window), norms = others[:5], others[5:]
        rotated = rotated_heads(states, norms, cos, sin, heads, eps)
        query, key, value = rotated[:, :heads], rotated[:, heads:], states[:, rotated.shape[1] :]
        out, lse = _attention(query, key, value, tables, sizes, [scale, 0.0, window])
        ctx.save_for_backward(states, cos, sin, tables, rotated, out, lse, *norms)
        ctx.numbers = others[:5]
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, cos, sin, tables, rotated, out, lse, *norms = ctx.saved_tensors
        sizes, heads, eps, scale, window = ctx.numbers
        attended = (rotated[:, :heads], rotated[:, heads:], states[:, rotated.shape[1] :], out, lse, tables)
        pulls = _attention_backward(grad.contiguous(), *attended, sizes, [scale, 0.0, window])
        by_states, by_norms = _unrotate([*pulls], states, norms, cos, sin, eps)
        return by_states, *[None] * 8, *by_norms.unbind()


def _plain(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Return the attention ``[1, heads, L, width]``, computed response by response with torch's autograd."""
    outputs = []
    for block in layout.blocks:
        queries, keys, values = (tensor[:, :, block.start : block.end] for tensor in (query, key, value))
        outputs.append(_attend(queries, keys, values, scale, softcap, window=window))
        for run in block.runs:
            many, cut = (run.count, -1, -1, -1), slice(run.start, run.end)
            of_run = (tensor[0, :, cut].unflatten(1, (run.count, -1)).transpose(0, 1) for tensor in (query, key, value))
            own, own_keys, own_values = of_run
            whole = torch.cat([keys.expand(many), own_keys], dim=2)
            held = torch.cat([values.expand(many), own_values], dim=2)
            attended = _attend(own, whole, held, scale, softcap, window=window)
            outputs.append(attended.transpose(0, 1).flatten(1, 2).unsqueeze(0))
    return torch.cat(outputs, dim=2)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float | None,
    *,
    seen: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return attention of the last ``T`` of ``K`` positions under ``seen`` ``[.., T, K]``, or causal and windowed."""
    if seen is None:
        queries, keys = query.shape[2], key.shape[2]
        position = torch.arange(keys, device=query.device)
        distance = position[keys - queries :].unsqueeze(1) - position
        seen = (distance >= 0) & (distance < (window or keys))
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1) for tensor in (key, value))
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    wide = torch.promote_types(query.dtype, torch.float32)
    lowest = torch.finfo(scores.dtype).min  # finite: a padding token attends to nothing
    return scores.masked_fill(~seen, lowest).softmax(-1, dtype=wide).to(value.dtype) @ value
