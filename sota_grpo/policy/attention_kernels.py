"""Triton kernels for attention over packed rows on CUDA: all responses of a prompt read its keys in place.

A query ``i`` of a packed sequence attends to the keys ``[start_i, i]`` of its own span (its prompt, or its response)
and, in a response, to all keys of its prompt (:mod:`sota_grpo.policy.shared_prompt`). The forward pass is the online
softmax over both (FlashAttention-2, arXiv:2307.08691, algorithm 1), with one program per tile of queries and query
head. A tile may hold several short responses of one prompt.

The backward pass has a kernel for tiles of queries, and one for tiles of keys and values, which loops over the query
heads that share the keys. The queries of all responses of a prompt are cut into pieces, whose float32 sums are added in
a fixed order, without atomic additions: equal inputs give equal bits. :class:`~sota_grpo.policy.shared_prompt.Tables`
assign work to programs. Another kernel computes the gradient of the heads' norms and rotary positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sota_grpo.functional.tile_kernels import on_device_of
from sota_grpo.policy.shared_prompt import TILE, Tables

ROWS = tl.constexpr(16)  # tokens per program of ``unrotate``
LOWEST = tl.constexpr(-1e30)  # score of a masked key; finite, so that a row without any key yet gives no NaN


class Blocks(NamedTuple):
    """Tile sizes of a kernel (divisors of ``TILE``), and its numbers of warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


class Launch(NamedTuple):
    """Tile sizes, warps and stages of the three kernels for one head width on one type of GPU."""

    forward: Blocks
    by_query: Blocks
    by_key: Blocks


def launch_for(width: int, shared_memory: int) -> Launch:
    """Return tile sizes, warps and stages for a head width up to 256, for kernels on one type of GPU.

    ``shared_memory``: bytes that a thread block can use (H100: 227 KiB, L4: 99 KiB).

    >>> launch_for(128, 227 * 1024).forward.queries, launch_for(256, 99 * 1024).forward.queries
    (128, 64)
    """
    if width <= 128 and shared_memory >= 200 * 1024:
        return Launch(Blocks(128, 128, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 128, 8, 1))
    if width <= 128 and shared_memory >= 150 * 1024:
        return Launch(Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2))
    if width <= 128:
        return Launch(Blocks(64, 64, 4, 2), Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 2))
    return Launch(Blocks(64, 32, 4, 1), Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1))


@triton.jit
def _scaled(raw, factor, cap, CAPPED: tl.constexpr):
    """Return base-2 scores of query-key products: ``raw factor``, or with a cap ``cap tanh(raw factor / cap)``."""
    scores = raw * factor
    if CAPPED:
        scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
    return scores


@triton.jit
def _attend(
    total, peak, mass, query, key, value, key_row, value_row, first, end, i, start, shift, window, factor, cap,
    OWN: tl.constexpr, PROMPT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys ``[first, end)``; ``OWN``: mask by span and causally; ``PROMPT``: mask the last tile."""
    column = tl.arange(0, PADDED)
    for n in range(first, end, KEYS):
        j = n + tl.arange(0, KEYS)
        inside = column[None, :] < WIDTH
        if OWN or PROMPT:
            inside = inside & (j < end)[:, None]
        keys = tl.load(key + j[:, None] * key_row + column[None, :], mask=inside, other=0.0)
        scores = _scaled(tl.dot(query, tl.trans(keys)), factor, cap, CAPPED)
        if OWN:
            scores = tl.where(
                (j[None, :] <= i[:, None]) & (j[None, :] >= start[:, None]) & (j < end)[None, :], scores, LOWEST
            )
        if PROMPT:
            scores = tl.where((j < end)[None, :], scores, LOWEST)
        if WINDOWED:
            scores = tl.where(i[:, None] - j[None, :] + shift[:, None] < window, scores, LOWEST)
        new = tl.maximum(peak, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        scale = tl.exp2(peak - new)
        mass = mass * scale + tl.sum(p, 1)
        values = tl.load(value + j[:, None] * value_row + column[None, :], mask=inside, other=0.0)
        total = tl.dot(p.to(values.dtype), values, total * scale[:, None])
        peak = new
    return total, peak, mass


@triton.jit
def _forward_tile(
    query, key, value, out, lse, starts, tiles, query_row, key_row, value_row, length, window, factor, cap,
    GROUP: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) // (TILE // QUERIES), tl.program_id(1)
    first = tl.load(tiles + 4 * tile) + tl.program_id(0) % (TILE // QUERIES) * QUERIES
    end = tl.load(tiles + 4 * tile + 1)
    if first >= end:
        return
    end = tl.minimum(end, first + QUERIES)
    prompt, prompt_end = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    i, column = first + tl.arange(0, QUERIES), tl.arange(0, PADDED)
    real = (i < end)[:, None] & (column < WIDTH)[None, :]
    start = tl.load(starts + i, mask=i < end, other=0)
    low, high = tl.load(starts + first), tl.minimum(tl.load(starts + end - 1), first)
    q = tl.load(query + head * WIDTH + i[:, None] * query_row + column[None, :], mask=real, other=0.0)
    key += head // GROUP * WIDTH
    value += head // GROUP * WIDTH
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    peak = tl.full([QUERIES], LOWEST, tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    nearer = tl.zeros([QUERIES], tl.int32)
    further = prompt_end - start  # distance to a prompt's keys as if the response followed the prompt
    whole = prompt + (prompt_end - prompt) // KEYS * KEYS
    middle = high + (first - high) // KEYS * KEYS
    total, peak, mass = _attend(
        total, peak, mass, q, key, value, key_row, value_row, prompt, whole, i, start, further, window, factor, cap,
        False, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total, peak, mass = _attend(
        total, peak, mass, q, key, value, key_row, value_row, whole, prompt_end, i, start, further, window, factor,
        cap, False, True, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total, peak, mass = _attend(
        total, peak, mass, q, key, value, key_row, value_row, low, high, i, start, nearer, window, factor, cap,
        True, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total, peak, mass = _attend(
        total, peak, mass, q, key, value, key_row, value_row, high, middle, i, start, nearer, window, factor, cap,
        False, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total, peak, mass = _attend(
        total, peak, mass, q, key, value, key_row, value_row, middle, end, i, start, nearer, window, factor, cap,
        True, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    row = tl.num_programs(1) * WIDTH
    tl.store(
        out + head * WIDTH + i[:, None] * row + column[None, :],
        (total / mass[:, None]).to(out.dtype.element_ty),
        mask=real,
    )
    tl.store(lse + head * length + i, peak + tl.log2(mass), mask=i < end)


@triton.jit
def _pull_query(
    total, query, key, value, grad, lse, delta, key_row, value_row, first, end, i, start, shift, window, factor, cap,
    OWN: tl.constexpr, PROMPT: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Add ``sum_j dscore_ij key_j`` over keys ``[first, end)`` to ``total``; for masks see :func:`_attend`."""
    column = tl.arange(0, PADDED)
    for n in range(first, end, KEYS):
        j = n + tl.arange(0, KEYS)
        inside = column[None, :] < WIDTH
        if OWN or PROMPT:
            inside = inside & (j < end)[:, None]
        keys = tl.load(key + j[:, None] * key_row + column[None, :], mask=inside, other=0.0)
        values = tl.load(value + j[:, None] * value_row + column[None, :], mask=inside, other=0.0)
        scores = _scaled(tl.dot(query, tl.trans(keys)), factor, cap, CAPPED)
        p = tl.exp2(scores - lse[:, None])
        if OWN:
            p = tl.where((j[None, :] <= i[:, None]) & (j[None, :] >= start[:, None]) & (j < end)[None, :], p, 0.0)
        if PROMPT:
            p = tl.where((j < end)[None, :], p, 0.0)
        if WINDOWED:
            p = tl.where(i[:, None] - j[None, :] + shift[:, None] < window, p, 0.0)
        by_score = p * (tl.dot(grad, tl.trans(values)) - delta[:, None])
        if CAPPED:
            by_score *= 1 - (scores / cap) * (scores / cap)
        total = tl.dot(by_score.to(keys.dtype), keys, total)
    return total


@triton.jit
def _by_query_tile(
    query, key, value, grad, out, lse, delta, by_query, starts, tiles, query_row, key_row, value_row, length, window,
    factor, cap, scale, GROUP: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Also store ``delta = sum_d grad out`` of each query, which the gradient of the softmax subtracts."""
    tile, head = tl.program_id(0) // (TILE // QUERIES), tl.program_id(1)
    first = tl.load(tiles + 4 * tile) + tl.program_id(0) % (TILE // QUERIES) * QUERIES
    end = tl.load(tiles + 4 * tile + 1)
    if first >= end:
        return
    end = tl.minimum(end, first + QUERIES)
    prompt, prompt_end = tl.load(tiles + 4 * tile + 2), tl.load(tiles + 4 * tile + 3)
    i, column = first + tl.arange(0, QUERIES), tl.arange(0, PADDED)
    real = (i < end)[:, None] & (column < WIDTH)[None, :]
    start = tl.load(starts + i, mask=i < end, other=0)
    low, high = tl.load(starts + first), tl.minimum(tl.load(starts + end - 1), first)
    q = tl.load(query + head * WIDTH + i[:, None] * query_row + column[None, :], mask=real, other=0.0)
    at = (i[:, None] * tl.num_programs(1) + head) * WIDTH + column[None, :]
    pulls = tl.load(grad + at, mask=real, other=0.0)
    sums = tl.load(lse + head * length + i, mask=i < end, other=0.0)
    means = tl.sum(pulls.to(tl.float32) * tl.load(out + at, mask=real, other=0.0).to(tl.float32), 1)
    tl.store(delta + head * length + i, means, mask=i < end)
    key += head // GROUP * WIDTH
    value += head // GROUP * WIDTH
    total = tl.zeros([QUERIES, PADDED], tl.float32)
    nearer = tl.zeros([QUERIES], tl.int32)
    further = prompt_end - start
    whole = prompt + (prompt_end - prompt) // KEYS * KEYS
    middle = high + (first - high) // KEYS * KEYS
    total = _pull_query(
        total, q, key, value, pulls, sums, means, key_row, value_row, prompt, whole, i, start, further, window,
        factor, cap, False, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total = _pull_query(
        total, q, key, value, pulls, sums, means, key_row, value_row, whole, prompt_end, i, start, further, window,
        factor, cap, False, True, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total = _pull_query(
        total, q, key, value, pulls, sums, means, key_row, value_row, low, high, i, start, nearer, window, factor,
        cap, True, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total = _pull_query(
        total, q, key, value, pulls, sums, means, key_row, value_row, high, middle, i, start, nearer, window,
        factor, cap, False, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    total = _pull_query(
        total, q, key, value, pulls, sums, means, key_row, value_row, middle, end, i, start, nearer, window, factor,
        cap, True, False, CAPPED, WINDOWED, WIDTH, PADDED, KEYS,
    )  # fmt: skip
    tl.store(by_query + at, (total * scale).to(by_query.dtype.element_ty), mask=real)


@triton.jit
def _pull_key(
    by_key, by_value, keys, values, query, grad, lse, delta, starts, query_row, grad_row, first, end, j, prompt_end,
    window, factor, cap, OWN: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Add the gradients by keys and values from queries ``[first, end)`` of a head; ``OWN``: mask by span, causally."""
    column = tl.arange(0, PADDED)
    for n in range(first, end, QUERIES):
        i = n + tl.arange(0, QUERIES)
        real = (i < end)[:, None] & (column < WIDTH)[None, :]
        q = tl.load(query + i[:, None] * query_row + column[None, :], mask=real, other=0.0)
        pulls = tl.load(grad + i[:, None] * grad_row + column[None, :], mask=real, other=0.0)
        sums = tl.load(lse + i, mask=i < end, other=float("inf"))
        means = tl.load(delta + i, mask=i < end, other=0.0)
        scores = _scaled(tl.dot(keys, tl.trans(q)), factor, cap, CAPPED)
        p = tl.exp2(scores - sums[None, :])
        if OWN or WINDOWED:
            start = tl.load(starts + i, mask=i < end, other=0)
        if OWN:
            p = tl.where((j[:, None] <= i[None, :]) & (j[:, None] >= start[None, :]), p, 0.0)
        if WINDOWED:
            shift = tl.minimum(prompt_end - start, 0)  # 0 for keys of the query's own span
            p = tl.where(i[None, :] - j[:, None] + shift[None, :] < window, p, 0.0)
        by_value = tl.dot(p.to(pulls.dtype), pulls, by_value)
        by_score = p * (tl.dot(values, tl.trans(pulls)) - means[None, :])
        if CAPPED:
            by_score *= 1 - (scores / cap) * (scores / cap)
        by_key = tl.dot(by_score.to(q.dtype), q, by_key)
    return by_key, by_value


@triton.jit
def _by_key_tile(
    query, key, value, grad, lse, delta, by_key, by_value, key_sums, value_sums, starts, tiles, query_row, key_row,
    value_row, length, window, factor, cap, scale, GROUP: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0) // (TILE // KEYS), tl.program_id(1)
    begin = tl.load(tiles + 7 * tile)
    first, end = begin + tl.program_id(0) % (TILE // KEYS) * KEYS, tl.load(tiles + 7 * tile + 1)
    if first >= end:
        return
    end = tl.minimum(end, first + KEYS)
    unmasked, masked = tl.load(tiles + 7 * tile + 2), tl.load(tiles + 7 * tile + 3)
    last, slot = tl.load(tiles + 7 * tile + 4), tl.load(tiles + 7 * tile + 5)
    prompt_end = tl.load(tiles + 7 * tile + 6)
    j, column = first + tl.arange(0, KEYS), tl.arange(0, PADDED)
    real = (j < end)[:, None] & (column < WIDTH)[None, :]
    keys = tl.load(key + head * WIDTH + j[:, None] * key_row + column[None, :], mask=real, other=0.0)
    values = tl.load(value + head * WIDTH + j[:, None] * value_row + column[None, :], mask=real, other=0.0)
    to_key, to_value = tl.zeros([KEYS, PADDED], tl.float32), tl.zeros([KEYS, PADDED], tl.float32)
    heads = tl.num_programs(1) * GROUP
    for member in range(GROUP):
        query_head = head * GROUP + member
        queries, pulls = query + query_head * WIDTH, grad + query_head * WIDTH
        sums, means = lse + query_head * length, delta + query_head * length
        to_key, to_value = _pull_key(
            to_key, to_value, keys, values, queries, pulls, sums, means, starts, query_row, heads * WIDTH, unmasked,
            masked, j, prompt_end, window, factor, cap, True, CAPPED, WINDOWED, WIDTH, PADDED, QUERIES,
        )  # fmt: skip
        to_key, to_value = _pull_key(
            to_key, to_value, keys, values, queries, pulls, sums, means, starts, query_row, heads * WIDTH, masked,
            last, j, prompt_end, window, factor, cap, False, CAPPED, WINDOWED, WIDTH, PADDED, QUERIES,
        )  # fmt: skip
    to_key *= scale
    if slot < 0:
        at = (j[:, None] * tl.num_programs(1) + head) * WIDTH + column[None, :]
        tl.store(by_key + at, to_key.to(by_key.dtype.element_ty), mask=real)
        tl.store(by_value + at, to_value.to(by_value.dtype.element_ty), mask=real)
    else:
        piece = ((slot.to(tl.int64) + j - begin)[:, None] * tl.num_programs(1) + head) * WIDTH + column[None, :]
        tl.store(key_sums + piece, to_key, mask=real)
        tl.store(value_sums + piece, to_value, mask=real)


@triton.jit
def _join_pieces(
    by_key, by_value, key_sums, value_sums, tiles, row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):
    """Sum the partial gradients of a prompt's keys in order; a key has ``row`` numbers (see ``Tables.joins``)."""
    tile = tl.program_id(0) // (TILE // ROWS)
    begin, end = tl.load(tiles + 5 * tile), tl.load(tiles + 5 * tile + 1)
    slot, stride = tl.load(tiles + 5 * tile + 2).to(tl.int64), tl.load(tiles + 5 * tile + 3)
    pieces = tl.load(tiles + 5 * tile + 4)
    j = begin + tl.program_id(0) % (TILE // ROWS) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = (j < end)[:, None] & (column < row)[None, :]
    to_key, to_value = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for piece in range(pieces):
        at = (slot + piece * stride + j - begin)[:, None] * row + column[None, :]
        to_key += tl.load(key_sums + at, mask=real, other=0.0)
        to_value += tl.load(value_sums + at, mask=real, other=0.0)
    at = j[:, None] * row + column[None, :]
    tl.store(by_key + at, to_key.to(by_key.dtype.element_ty), mask=real)
    tl.store(by_value + at, to_value.to(by_value.dtype.element_ty), mask=real)


@triton.jit
def _pull_heads(
    pulls, norm, first, states, cos, sin, out, sums, row, length, eps, COUNT: tl.constexpr, ROTATED: tl.constexpr,
    NORMED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Store the gradient by heads ``[first, first + COUNT)`` of the states, and the program's share of the norm's."""
    i, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    partner = (column + WIDTH // 2) % WIDTH
    real = (i < length)[:, None] & (column < WIDTH)[None, :]
    narrow = states.dtype.element_ty
    total = tl.zeros([PADDED], tl.float32)
    if ROTATED:
        cosines = tl.load(cos + i[:, None] * WIDTH + column[None, :], mask=real, other=0.0)
        sines = tl.load(sin + i[:, None] * WIDTH + partner[None, :], mask=real, other=0.0)
        sines *= tl.where(column < WIDTH // 2, 1.0, -1.0)[None, :]
    for head in range(COUNT):
        at = pulls + (i * COUNT + head)[:, None] * WIDTH
        pull = tl.load(at + column[None, :], mask=real, other=0.0).to(tl.float32)
        here = i[:, None] * row + (first + head) * WIDTH + column[None, :]
        if ROTATED:
            pull = pull * cosines + tl.load(at + partner[None, :], mask=real, other=0.0).to(tl.float32) * sines
        if ROTATED and NORMED:
            x = tl.load(states + here, mask=real, other=0.0).to(tl.float32)
            factor = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
            total += tl.sum(pull * (x * factor).to(narrow).to(tl.float32), 0)
            weight = tl.load(norm + column, mask=column < WIDTH, other=0.0)
            pull = (pull * weight[None, :]).to(narrow).to(tl.float32)
            mean = tl.sum(pull * x, 1)[:, None] / WIDTH
            pull = pull * factor - x * (factor * factor * factor * mean)
        tl.store(out + here, pull.to(narrow), mask=real)
    if ROTATED and NORMED:
        tl.store(sums + (tl.program_id(0) * 2 + tl.program_id(1)) * WIDTH + column, total, mask=column < WIDTH)


@triton.jit
def _unrotate_tile(
    by_query, by_key, by_value, query_norm, key_norm, states, cos, sin, out, sums, length, eps, HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr, NORMED: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row = (HEADS + 2 * KEY_HEADS) * WIDTH
    if tl.program_id(1) == 0:
        _pull_heads(
            by_query, query_norm, 0, states, cos, sin, out, sums, row, length, eps, HEADS, True, NORMED, WIDTH, PADDED
        )
    elif tl.program_id(1) == 1:
        _pull_heads(
            by_key, key_norm, HEADS, states, cos, sin, out, sums, row, length, eps, KEY_HEADS, True, NORMED, WIDTH,
            PADDED,
        )  # fmt: skip
    else:
        _pull_heads(
            by_value, key_norm, HEADS + KEY_HEADS, states, cos, sin, out, sums, row, length, eps, KEY_HEADS, False,
            NORMED, WIDTH, PADDED,
        )  # fmt: skip


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, tables: Tensor, sizes: Sequence[int], scores: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Return the attention ``[L, heads, width]``, and ``[heads, L]``, the base-2 log-sum-exp of its scores.

    Args:
        query, key, value: ``[L, heads, width]`` and twice ``[L, key heads, width]``, contiguous in the last two.
        tables, sizes: those of :class:`~sota_grpo.policy.shared_prompt.Tables`.
        scores: scale of the products, softcap (0: none), sliding window in tokens (0: none).
    """
    starts, tiles, _, _ = Tables(tables, sizes).split()
    length, heads, width = query.shape
    out, lse = query.new_empty(length, heads, width), query.new_empty(heads, length, dtype=torch.float32)
    blocks = _launch(query.device, width).forward
    numbers, options = _arguments(query, key, value, scores, blocks)
    with on_device_of(query):
        _forward_tile[(len(tiles) * (TILE // blocks.queries), heads)](
            query, key, value, out, lse, starts, tiles, *numbers, **options
        )
    return out, lse


def packed_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tables: Tensor,
    sizes: Sequence[int],
    scores: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contiguous gradients by ``query``, ``key`` and ``value``; ``grad``: that by ``out``, contiguous."""
    starts, query_tiles, key_tiles, joins = Tables(tables, sizes).split()
    width, launch, delta = query.shape[2], _launch(query.device, query.shape[2]), torch.empty_like(lse)
    by_query, by_key, by_value = (
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)
    )
    key_sums, value_sums = query.new_empty(2, sizes[3], *key.shape[1:], dtype=torch.float32)
    with on_device_of(query):
        numbers, options = _arguments(query, key, value, scores, launch.by_query)
        _by_query_tile[(len(query_tiles) * (TILE // launch.by_query.queries), query.shape[1])](
            query, key, value, grad, out, lse, delta, by_query, starts, query_tiles, *numbers, scores[0], **options
        )
        numbers, options = _arguments(query, key, value, scores, launch.by_key)
        _by_key_tile[(len(key_tiles) * (TILE // launch.by_key.keys), key.shape[1])](
            query, key, value, grad, lse, delta, by_key, by_value, key_sums, value_sums, starts, key_tiles, *numbers,
            scores[0], **options,
        )  # fmt: skip
        row = key.shape[1] * width
        _join_pieces[(len(joins) * (TILE // 16), triton.cdiv(row, 128))](
            by_key, by_value, key_sums, value_sums, joins, row, ROWS=16, COLUMNS=128, TILE=TILE, num_warps=4
        )
    return by_query, by_key, by_value


def unrotate(
    pulls: list[Tensor], states: Tensor, norms: list[Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``rotated_heads`` by ``states``, and by ``norms`` as ``[2, width]`` or ``[0, width]``.

    ``pulls``: gradients by rotated queries, rotated keys, and values, which are copied; all tensors are contiguous.
    """
    (length, _, width), by_states = states.shape, torch.empty_like(states)
    sums = states.new_empty(triton.cdiv(length, ROWS.value), len(norms), width, dtype=torch.float32)
    with on_device_of(states):
        _unrotate_tile[(len(sums), 3)](
            *pulls, *(norms or (cos, cos)), states, cos, sin, by_states, sums, length, eps, HEADS=pulls[0].shape[1],
            KEY_HEADS=pulls[1].shape[1], NORMED=len(norms) > 0, WIDTH=width, PADDED=_padded(width),
        )  # fmt: skip
    return by_states, sums.sum(0)


def _arguments(
    query: Tensor, key: Tensor, value: Tensor, scores: Sequence[float], blocks: Blocks
) -> tuple[list[Any], dict[str, Any]]:
    """Return the numbers from ``query_row`` to ``cap``, which are in base 2, and the compile-time options."""
    (scale, softcap, window), base_2 = scores, 1.4426950408889634
    rows, (length, heads, width) = [tensor.stride(0) for tensor in (query, key, value)], query.shape
    sizes = {"GROUP": heads // key.shape[1], "WIDTH": width, "PADDED": _padded(width), "TILE": TILE}
    launched = dict(zip(("QUERIES", "KEYS", "num_warps", "num_stages"), blocks, strict=True))
    numbers = [*rows, length, int(window), scale * base_2, softcap * base_2]
    return numbers, {"CAPPED": softcap > 0, "WINDOWED": window > 0, **sizes, **launched}


def _padded(width: int) -> int:
    return max(16, triton.next_power_of_2(width))  # minimum width of a Triton product


@cache
def _launch(device: torch.device, width: int) -> Launch:
    if device.type != "cuda":  # Triton's interpreter
        return Launch(Blocks(32, 16, 4, 1), Blocks(16, 32, 4, 1), Blocks(16, 32, 4, 1))
    properties: Any = torch.cuda.get_device_properties(device)  # Any: the type stubs lack an attribute
    return launch_for(width, properties.shared_memory_per_block_optin)
