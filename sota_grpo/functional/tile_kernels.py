"""Triton kernels for the elementwise part of log-probs over one tile of logits: one for forward, one for backward.

They compute what :func:`sota_grpo.functional.log_probs.chunked_log_probs` computes with torch's operators, which are
the reference. Each program processes one row, whose logits stay in registers and are read once. Logits are in base 2;
see :class:`sota_grpo.functional.log_probs.LogitTiles`.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 16384  # of a tile, because a kernel holds a row in registers: 32 numbers per thread


@triton.jit
def _scan_row(
    raw, targets, top, at_targets, mass, moment, weights, tops, factor, first, columns,
    ENTROPY: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(raw + row * columns + column, mask=inside, other=float("-inf")) * factor
    last = tl.load(top + row)
    peak = tl.maximum(last, tl.max(z, 0))
    z -= peak
    p = tl.exp2(z)
    drop = last - peak
    scale = tl.exp2(drop)
    before = tl.load(mass + row)
    if ENTROPY:
        added = tl.sum(tl.where(inside, z, 0.0) * p, 0)  # outside 0, not -inf 0
        tl.store(moment + row, (tl.load(moment + row) + drop * before) * scale + added)
    tl.store(top + row, peak)
    tl.store(mass + row, before * scale + tl.sum(p, 0))
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < columns)
    at_target = tl.sum(tl.where(column == target, z, 0.0), 0)
    tl.store(at_targets + row, tl.where(here, at_target, tl.load(at_targets + row) + drop))
    if WEIGHTS:
        others = tl.where(column == target, 0.0, p).to(weights.dtype.element_ty)
        tl.store(weights + row * columns + column, others, mask=inside)
        tl.store(tops + row, peak)


@triton.jit
def _pull_row(
    raw, targets, top, by_p, by_zp, at_target, grad, factor, first, columns,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    z = tl.load(raw + row * columns + column, mask=inside, other=float("-inf")) * factor - tl.load(top + row)
    slope = tl.load(by_p + row)
    if ENTROPY:
        slope += tl.load(by_zp + row) * tl.where(inside, z, 0.0)
    gradient = slope * tl.exp2(z) + tl.where(column == tl.load(targets + row) - first, tl.load(at_target + row), 0.0)
    tl.store(grad + row * columns + column, gradient.to(grad.dtype.element_ty), mask=inside)


def scan(
    raw: Tensor,
    targets: Tensor,
    *state: Tensor,
    first: int,
    factor: float,
    with_entropy: bool,
    weights: Tensor | None,
    tops: Tensor | None,
) -> None:
    """Update the online softmax of ``r`` rows in place with a tile of logits ``factor raw``, in base 2.

    ``raw [r, c]``: columns ``[first, first + c)``, float32, contiguous, at most ``MAX_COLUMNS`` (else ValueError).
    ``targets [r, 1]``: each target's column, of any tile. ``state``, over all tiles so far, is float32 ``[r, 1]``:
    ``top``, the largest logit, and for ``z = factor raw - top``: ``target``, the target's ``z`` (once its tile is
    processed); ``mass = sum 2^z``; ``moment = sum z 2^z`` (updated only ``with_entropy``). ``weights [r, c]`` gets the
    tile's ``2^z``, 0 at the target, and ``tops [r, 1]`` then gets ``top``.
    """
    rows, columns = raw.shape
    with on_device_of(raw):
        _scan_row[(rows,)](
            raw, targets, *state, raw if weights is None else weights, state[0] if tops is None else tops,
            factor, first, columns,
            ENTROPY=with_entropy, WEIGHTS=weights is not None, **_block(columns),
        )  # fmt: skip


def pull(
    raw: Tensor,
    targets: Tensor,
    top: Tensor,
    by_p: Tensor,
    by_zp: Tensor | None,
    at_target: Tensor,
    grad: Tensor,
    *,
    first: int,
    factor: float,
) -> None:
    """Fill ``grad [r, c]`` with ``(by_p + by_zp z) 2^z``, plus ``at_target`` at the target; ``z = factor raw - top``.

    For ``raw, targets, top, first`` and ValueError see :func:`scan`. ``by_p``, ``by_zp`` and ``at_target`` are float32
    ``[r, 1]``; ``by_zp=None`` means 0. ``grad`` must be contiguous, in any dtype; it may be ``raw`` itself.
    """
    rows, columns = raw.shape
    with on_device_of(raw):
        _pull_row[(rows,)](
            raw, targets, top, by_p, by_p if by_zp is None else by_zp, at_target, grad, factor, first, columns,
            ENTROPY=by_zp is not None, **_block(columns),
        )  # fmt: skip


def _block(columns: int) -> dict[str, int]:
    if columns > MAX_COLUMNS:
        raise ValueError(f"A tile has {columns} columns; a kernel supports at most {MAX_COLUMNS}.")
    block = triton.next_power_of_2(columns)
    return {"BLOCK": block, "num_warps": max(8, block // 1024)}


def on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which the tensor's GPU is current, because Triton launches kernels there; no-op on a CPU."""
    return torch.cuda.device(tensor.device.index) if tensor.is_cuda else contextlib.nullcontext()
