"""Log-probs of target tokens from hidden states, computed in tiles instead of from ``[M, V]`` logits in memory.

Tiles of logits are computed one after the other in the same buffers. With tiles of ``r`` rows and ``c`` columns
``M V H (1 / r + 1 / c)`` numbers are read in all; for a given tile size, square tiles read the fewest. On a GPU the
forward pass may store ``[M, V]`` probabilities for the backward pass (:func:`max_saved_bytes`).

Under truncated sampling (top-k, top-p, min-p) the *sampling support* ``S`` of a position is the set of tokens that
truncation leaves; the token is sampled from ``q(v) = p(v) 1[v in S] / p(S)``. Every policy in the loss is renormalised
over the same ``S``, the engine's when it sampled the token (:func:`support_log_probs`). Then the mean of
``q_new(v) / q(v)`` over samples of ``q`` is 1, as importance sampling requires; the mean of ``p_new(v) / p(v)`` is not.
Only the logits in ``S`` are computed.
"""

from __future__ import annotations

import math
import os
import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

LN2 = math.log(2.0)
LOGITS_BYTES_ON_CPU = 8 * 2**20
LOGITS_BYTES = 2**30
SAVED_SHARE = 12  # 1/12 of a GPU's memory may hold probabilities from the output layer's forward to its backward
ALIGNED = 128  # rows of a tile begin where matrix products on a GPU read fastest


class LogitTiles:
    """Tiles of the logits of ``[M, H]`` hidden states: slices of ``rows`` and ``columns``, and buffers for one tile.

    ``factor`` times the result of :meth:`raw` is the logits in base 2, ``z log2 e`` (with a softcap up to a constant),
    because on a CPU ``exp2`` is four times as fast as ``exp``. The derivative of ``z`` by ``hidden weight^T + bias`` is
    ``slope``, and with a softcap ``slope raw (1 - raw)``. ``options.logits_bytes`` (None: 8 MiB on a CPU, else 1 GiB)
    is the memory of all buffers: one to three of float32 (float64 if ``hidden`` is), and one in half precision.

    With memory for 9 logits, 5 rows and 7 columns are cut into rows 0:3, 3:5 and columns 0:3, 3:6, 6:7:

    >>> tiles = LogitTiles(torch.ones(5, 2), torch.ones(7, 2), None, _Options(logits_bytes=9 * 4))
    >>> [[(piece.start, piece.stop) for piece in pieces] for pieces in (tiles.rows, tiles.columns)]
    [[(0, 3), (3, 5)], [(0, 3), (3, 6), (6, 7)]]
    """

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, options: _Options) -> None:
        num_bytes, softcap = options.logits_bytes, options.softcap
        if num_bytes is None:
            num_bytes = LOGITS_BYTES_ON_CPU if hidden.device.type == "cpu" else LOGITS_BYTES
        self.weight, self.bias, self.softcap = weight, bias, softcap
        self.copy = weight if options.copy is None else options.copy
        self.factor = (1 if softcap is None else 2 * softcap) / (LN2 * options.temperature)
        self.slope = (1 if softcap is None else 4) / options.temperature
        self.dtype, self.wide = hidden.dtype, torch.promote_types(hidden.dtype, torch.float32)
        self.kernels = _takes_kernels(hidden, bias, softcap)
        num_buffers = 1 if self.kernels else 1 + options.with_entropy + (softcap is not None)
        narrow_bytes = 0 if self.dtype == self.wide else self.dtype.itemsize
        size = max(1, num_bytes // (num_buffers * self.wide.itemsize + narrow_bytes))
        height = math.isqrt(size) * (2 if self.kernels else 1)  # a GPU takes fewer tiles where all rows are in each
        num_rows = max(1, min(len(hidden), height))
        num_columns = min(len(weight), size // num_rows, _kernels().MAX_COLUMNS if self.kernels else size)
        num_rows = max(1, min(len(hidden), size // num_columns))
        self.rows = _pieces(len(hidden), num_rows)
        self.columns = _pieces(len(weight), num_columns, ALIGNED if hidden.is_cuda else 1)
        self.buffers = hidden.new_empty(num_buffers, num_rows * num_columns, dtype=self.wide)
        self.narrow_buffer = hidden.new_empty(num_rows * num_columns if narrow_bytes else 0)

    def raw(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """Return ``x = hidden weight^T + bias[columns]`` ``[r, c]``, or ``sigmoid(2 x / s)`` with a softcap ``s``.

        ``weight`` is cut to ``columns``. ``x`` is a view of buffer 0, which the next call overwrites. ``factor`` times
        it is the logits in base 2, with a softcap up to a constant: ``s tanh(x / s) = 2 s sigmoid(2 x / s) - s``.
        """
        shape = (len(hidden), len(weight))
        x = self.buffers[0, : shape[0] * shape[1]].view(shape)
        if self.dtype == self.wide:
            torch.mm(hidden, weight.t(), out=x)
        elif x.is_cuda:  # sums of products in float32, not rounded to half precision first
            torch.mm(hidden, weight.t(), out_dtype=self.wide, out=x)
        else:
            x.copy_(torch.mm(hidden, weight.t(), out=self.narrow_buffer[: x.numel()].view(shape)))
        if self.bias is not None:
            x.add_(self.bias[columns])
        return x if self.softcap is None else x.mul_(2 / self.softcap).sigmoid_()

    def minus(self, raw: Tensor, shift: Tensor) -> Tensor:
        """Return ``factor raw - shift``, with ``shift [r, 1]``, in place of ``raw``, or in buffer 1 with a softcap."""
        out = raw if self.softcap is None else self.buffers[1, : raw.numel()].view_as(raw)
        return torch.add(-shift, raw, alpha=self.factor, out=out)

    def narrow(self, tile: Tensor) -> Tensor:
        """Return scratch memory like ``tile`` in the matrix products' dtype; ``tile`` itself if it has that dtype."""
        return tile if self.dtype == self.wide else self.narrow_buffer[: tile.numel()].view_as(tile)

    @staticmethod
    def find(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
        """Return each target's index ``[r, 1]`` in ``columns``, clamped, and whether the target is in ``columns``."""
        index, last = targets - columns.start, columns.stop - columns.start - 1
        return index.clamp(0, last), (index >= 0) & (index <= last)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute ``total += left @ right``; on a CPU a half-precision product is rounded before it is added."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _takes_kernels(hidden: Tensor, bias: Tensor | None, softcap: float | None) -> bool:
    """Return whether :mod:`sota_grpo.functional.tile_kernels` can process the tiles of these logits."""
    takes = hidden.is_cuda and hidden.dtype != torch.float64 and bias is None and softcap is None
    return takes and builds_kernels()


def automatic_precision(chosen: str, device_type: str) -> str:
    """Return ``chosen``; for ``auto`` bf16 on CUDA, else fp32; ``native`` is also bf16 if :func:`multiplies_bf16`."""
    if chosen not in ("auto", "native"):
        return chosen
    return "bf16" if device_type == "cuda" or (chosen == "native" and multiplies_bf16()) else "fp32"


@cache
def multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether ``cpuinfo`` lists bf16 instructions that multiply faster than float32; the result is cached.

    False without the file (not Linux), and for Intel CPUs with AVX512_BF16 but no AMX, where bf16 can be slower.
    """
    try:
        words = {*cpuinfo.read_text().lower().split()}
    except OSError:  # no Linux; float32 is right everywhere
        return False
    return bool(words & {"amx_bf16", "bf16"}) or ("avx512_bf16" in words and "genuineintel" not in words)


@cache
def builds_kernels() -> bool:
    """Return (cached) whether GPU kernels can be built: with Triton, and a C compiler or the variable ``CC``."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    return find_spec("triton") is not None and compiler is not None


def _pieces(total: int, most: int, multiple: int = 1) -> list[slice]:
    """Split ``range(total)`` into nearly equal slices of at most ``most``, all but the last a ``multiple`` if possible.

    >>> [(piece.start, piece.stop) for piece in _pieces(1000, 400, 128)]
    [(0, 384), (384, 768), (768, 1000)]
    """
    most = most // multiple * multiple or most
    size = -(-total // max(1, -(-total // most)))
    size = min(-(-size // multiple) * multiple, most)
    return [slice(start, min(start + size, total)) for start in range(0, total, max(1, size))]


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logits_bytes: int | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    vocab_shard: VocabShard | None = None,
    copy: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return each target's log-prob under ``softmax((hidden weight^T + bias) / temperature)``, and the entropy.

    ``log_prob_m = z_m[target_m] - lse_m`` and ``entropy_m = -sum_v p_mv log p_mv``, with ``z`` the scaled logits. With
    a softcap ``c``, ``z = c tanh((hidden weight^T + bias) / c) / temperature`` (Gemma 2, arXiv:2408.00118, sec. 2).

    The backward pass recomputes the logits tile by tile and propagates their gradient ``(1[v = target] - p_v) g - p_v
    (log p_v + entropy) h``, with ``g`` and ``h`` the gradients of the log-prob and the entropy; on a CPU rows with
    ``g = h = 0`` are skipped. Without ``entropy_grad``, softcap and ``vocab_shard``, two cases recompute nothing: if
    only ``hidden`` needs a gradient (LoRA), the forward pass stores ``d log_prob_m / d hidden_m``; else on CUDA,
    without bias, it stores every logit's exponential if :func:`max_saved_bytes` allows.

    Matrices are multiplied in the dtype of ``hidden``, or under autocast in autocast's unless ``hidden`` is float64.
    Softmax and results, ``[M]`` in nats, are float32, or float64 if ``hidden`` is. Tile size changes rounding only.

    Args:
        hidden: ``[M, H]``, last hidden states at the positions that predict the targets.
        weight: ``[V, H]``, the output embedding; converted to the dtype of ``hidden``.
        targets: int64 ``[M]``, ids in ``[0, V)``.
        bias: ``[V]``, if the output layer has one.
        temperature: sampling temperature, by which the logits are divided.
        softcap: bound ``c`` of the model's logits; None: unbounded.
        logits_bytes: memory for tiles of logits; None: 8 MiB on a CPU, about its cache, else 1 GiB.
        with_entropy: also return the entropy of every row; else it is None.
        entropy_grad: compute gradients of the entropy too; otherwise it is detached.
        vocab_shard: under tensor parallelism, the shard of the output embedding in ``weight`` and ``bias``; all ranks
            must call this and the backward pass with the same ``hidden`` and ``targets``, ids of the full vocabulary.
        copy: ``weight`` in the dtype of the products, which are then computed from it; in another dtype it is ignored.

    Raises:
        ValueError: wrong shapes; temperature, softcap or memory not above 0; ``entropy_grad`` without ``with_entropy``.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 5.0], [0.0, -5.0]])
    >>> log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)
    >>> round(log_probs.item(), 4), round(entropy.item(), 4)  # three equal logits: -log 3 and log 3
    (-1.0986, 1.0986)
    """
    fits = hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not (fits and targets.shape == hidden.shape[:1] and (bias is None or bias.shape == weight.shape[:1])):
        shapes = f"{list(hidden.shape)}, {list(weight.shape)}, {list(targets.shape)}"
        raise ValueError(
            f"hidden, weight, targets must be [M, H], [V, H], [M] and bias [V], but they are {shapes} and "
            f"{None if bias is None else list(bias.shape)}."
        )
    for name, value in {"temperature": temperature, "softcap": softcap, "logits_bytes": logits_bytes}.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0.")
    if entropy_grad and not with_entropy:
        raise ValueError("entropy_grad=True needs with_entropy=True, because without it no entropy is computed.")
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    copy = None if copy is None or copy.dtype != hidden.dtype else copy
    options = _Options(temperature, softcap, logits_bytes, with_entropy, entropy_grad, vocab_shard, copy)
    sufficient = not entropy_grad and softcap is None and vocab_shard is None
    if torch.is_grad_enabled() and hidden.requires_grad and sufficient:
        frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
        fits = len(hidden) * len(weight) * hidden.element_size() <= max_saved_bytes(hidden.device)
        options = options._replace(keeps_slopes=frozen, keeps_tiles=not frozen and bias is None and fits)
    return _TiledLogProbs.apply(hidden, weight, bias, targets, options)


class VocabShard(NamedTuple):
    """The rows of the output embedding that this rank has under tensor parallelism: first id and process group."""

    first: int  # token id of the rank's first row
    group: dist.ProcessGroup  # the ranks that share the vocabulary, in the order of their rows

    def joined(self, local: _Scan, has_target: Tensor) -> _Scan:
        """Join all ranks' softmax sums ``[M]`` (two all-reduces); ``has_target``: this rank's shard has the target."""
        top = local.top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        drop = local.top - top
        scale = drop.exp2()
        target = torch.where(has_target, local.target + drop, 0.0)
        total = torch.stack((target, local.mass * scale, (local.moment + drop * local.mass) * scale))
        dist.all_reduce(total, group=self.group)
        return _Scan(top, *total)


class _Options(NamedTuple):
    temperature: float = 1.0
    softcap: float | None = None
    logits_bytes: int | None = None
    with_entropy: bool = False
    entropy_grad: bool = False
    vocab_shard: VocabShard | None = None
    copy: Tensor | None = None
    keeps_slopes: bool = False  # the forward pass stores d log_prob / d hidden for the backward pass
    keeps_tiles: bool = False  # the forward pass stores 2^(z - top) for the backward pass


class _Rows(NamedTuple):
    """Tensors of ``R`` rows that the backward pass reads; all but ``hidden [R, H]`` are ``[R, 1]``."""

    hidden: Tensor
    targets: Tensor
    top: Tensor  # largest logit, in base 2
    mass: Tensor  # sum of 2^(z - top)
    entropy: Tensor
    g: Tensor  # gradient of the loss by the log-prob
    h: Tensor | None  # gradient of the loss by the entropy

    def take(self, where: slice | Tensor) -> _Rows:
        taken: list[Any] = [None if x is None else x[where] for x in self]
        return _Rows(*taken)


class _TiledLogProbs(torch.autograd.Function):
    """Saves hidden, weight, bias and four ``[M]`` vectors, and stored tiles if any; or only the slopes ``[M, H]``."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor | None]:
        tiles = LogitTiles(hidden, weight, bias, options)
        targets = targets if options.vocab_shard is None else targets - options.vocab_shard.first
        scan, to_save = _score(tiles, hidden, targets.unsqueeze(1), options)
        scan = _Scan(*(column.squeeze(1) for column in scan))
        if options.vocab_shard is not None:
            scan = options.vocab_shard.joined(scan, (targets >= 0) & (targets < len(weight)))
        log_probs, entropy = scan.log_probs, (scan.mass.log2() - scan.moment / scan.mass) * LN2
        ctx.options = options
        saved = (hidden, weight, bias, targets, scan.top, scan.mass, entropy)
        if options.keeps_tiles:
            to_save = [log_probs, *to_save]
            tiles.buffers = tiles.narrow_buffer = hidden.new_empty(0)
            ctx.tiles = tiles
        ctx.save_for_backward(*(to_save if options.keeps_slopes else (*saved, *to_save)))
        if not options.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy if options.with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        g, h = grad_log_probs.unsqueeze(1), grad_entropy.unsqueeze(1) if ctx.options.entropy_grad else None
        if ctx.options.keeps_slopes:
            (slopes,) = ctx.saved_tensors
            return torch.where(g == 0, 0.0, g * slopes).to(slopes.dtype), None, None, None, None
        hidden, weight, bias, *vectors = ctx.saved_tensors
        targets, top, mass, entropy = (x.unsqueeze(1) for x in vectors[:4])
        every = _Rows(hidden, targets, top, mass, entropy, g, h)
        if ctx.options.keeps_tiles:
            return *_pull_saved(ctx.tiles, every, *vectors[4:]), None, None, None
        rows, active = every, None
        if not hidden.is_cuda:  # skipping a row saves three products; on a GPU it would cost a synchronization
            pulls = g if h is None else torch.cat((g, h), 1)
            active = (pulls != 0).any(1).nonzero().squeeze(1)
            rows = every if len(active) == len(hidden) else every.take(active)
        tiles = LogitTiles(rows.hidden, weight, bias, ctx.options)
        grad_hidden, grad_weight, grad_bias = _pull_back(tiles, rows, ctx.needs_input_grad)
        if grad_hidden is not None and ctx.options.vocab_shard is not None:
            dist.all_reduce(grad_hidden, group=ctx.options.vocab_shard.group)
        if grad_hidden is not None and active is not None and rows is not every:
            grad_hidden = torch.zeros_like(hidden).index_copy_(0, active, grad_hidden)
        return grad_hidden, grad_weight, grad_bias, None, None


def max_saved_bytes(device: torch.device) -> int:
    """Return the most bytes that the forward pass may store for the backward: 1/12 of a CUDA GPU's memory, else 0."""
    return torch.cuda.get_device_properties(device).total_memory // SAVED_SHARE if device.type == "cuda" else 0


def _score(tiles: LogitTiles, hidden: Tensor, targets: Tensor, options: _Options) -> tuple[_Scan, list[Tensor]]:
    """Return the softmax sums over all tiles, and the tensors for the backward pass: slopes, or tiles and their tops.

    Online softmax (arXiv:1805.02867), with ``top`` the largest base-2 logit so far: ``mass = sum_v 2^(z_v - top)``,
    ``moment = sum_v (z_v - top) 2^(z_v - top)`` and ``target = z_target - top``. Relative to ``top``, log-prob and
    entropy keep their digits for logits of any size.

    The slope is ``((1 - p_target) weight[target] - sum of p_v weight_v over the other v) / temperature``, with
    ``1 - p_target`` from the log-prob, so that bfloat16 does not round it away.
    """
    wide = hidden.new_zeros(4, len(hidden), 1, dtype=tiles.wide)
    scan = _Scan(wide[0].fill_(torch.finfo(tiles.wide).min), *wide[1:])
    others = torch.zeros_like(hidden, dtype=tiles.wide) if options.keeps_slopes else None
    num_tops = len(hidden) if options.keeps_tiles else 0
    tops = hidden.new_empty(len(tiles.columns), num_tops, 1, dtype=tiles.wide)
    saved = [tops] if options.keeps_tiles else []
    for columns, top in zip(tiles.columns, tops):
        weight = tiles.copy[columns].to(hidden.dtype)
        whole = hidden.new_empty(len(hidden), len(weight)) if options.keeps_tiles else None
        for rows in tiles.rows:
            so_far = _Scan(*(column[rows] for column in scan))
            raw, last = tiles.raw(hidden[rows], weight, columns), so_far.top if others is None else so_far.top.clone()
            p = whole[rows] if whole is not None else tiles.narrow(raw) if others is not None else None
            _scan(tiles, raw, targets[rows], columns, so_far, options.with_entropy, p, top[rows] if saved else None)
            if others is not None and p is not None:
                add_product(others[rows].mul_((last - so_far.top).exp2()), p, weight)
        if whole is not None:
            saved.append(whole)
    if others is not None:
        weight = tiles.weight[targets.squeeze(1)].to(hidden.dtype).to(tiles.wide)
        slopes = others.div_(scan.mass).addcmul_(scan.log_probs.expm1(), weight).mul_(-tiles.slope)
        saved = [slopes.to(hidden.dtype)]
    return scan, saved


class _Scan(NamedTuple):
    """Softmax sums of ``R`` rows over the tiles so far, each ``[R, 1]`` (in the end ``[M]``); see :func:`_score`."""

    top: Tensor
    target: Tensor
    mass: Tensor
    moment: Tensor

    @property
    def log_probs(self) -> Tensor:
        return (self.target - self.mass.log2()) * LN2


def _scan(
    tiles: LogitTiles,
    raw: Tensor,
    targets: Tensor,
    columns: slice,
    scan: _Scan,
    entropy: bool,
    weights: Tensor | None,
    tops: Tensor | None,
) -> None:
    """Add a tile to the sums ``scan``, in place.

    Fill ``weights [r, c]`` with ``2^(z - top)``, 0 at the target, and ``tops [r, 1]`` with ``top``; None: not needed.
    """
    if tiles.kernels:
        how = {"first": columns.start, "factor": tiles.factor, "with_entropy": entropy}
        _kernels().scan(raw, targets, *scan, **how, weights=weights, tops=tops)
        return
    last, target, mass, moment = scan
    index, inside = tiles.find(targets, columns)
    top = torch.maximum(last, raw.amax(1, keepdim=True) * tiles.factor)
    drop, scale = last - top, (last - top).exp2()
    z = tiles.minus(raw, top)
    target.copy_(torch.where(inside, z.gather(1, index), target + drop))
    p = torch.exp2(z, out=tiles.buffers[-1, : z.numel()].view_as(z))
    if entropy:
        moment.copy_((moment + drop * mass) * scale + z.mul_(p).sum(1, keepdim=True))
    mass.copy_(mass * scale + p.sum(1, keepdim=True))
    last.copy_(top)
    if weights is not None:
        weights.copy_(p.scatter_(1, index, p.gather(1, index).masked_fill_(inside, 0)))
    if tops is not None:
        tops.copy_(top)


def _kernels() -> ModuleType:
    """Import the GPU kernels late: only torch's builds for CUDA have Triton."""
    from sota_grpo.functional import tile_kernels

    return tile_kernels


def _pull_saved(
    tiles: LogitTiles, rows: _Rows, log_probs: Tensor, tops: Tensor, *saved: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``sum(g log_probs)`` by hidden and weight from each tile's ``top`` and ``2^(z - top)``.

    With ``s = -g 2^(top_tile - top) / mass`` a tile adds ``s (kept weight)`` and ``kept^T (s hidden)``. The target's
    ``g (1 - p)`` is added separately, ``1 - p`` from the log-prob, so that half precision does not round it away.
    """
    hidden, weight, g = rows.hidden, tiles.weight, tiles.slope * rows.g
    grad_hidden, grad_weight = torch.zeros_like(hidden, dtype=tiles.wide), torch.empty_like(weight)
    direct = grad_weight.dtype == tiles.wide and hidden.is_cuda
    pulled = torch.empty_like(hidden)
    scales = -g * (tops - rows.top).exp2() / rows.mass
    for columns, whole, scale in zip(tiles.columns, saved, scales):
        tile_weight = tiles.copy[columns].to(hidden.dtype)
        torch.mul(scale, hidden, out=pulled)
        if hidden.is_cuda:
            grad_hidden.addcmul_(torch.mm(whole, tile_weight, out_dtype=tiles.wide), scale)
        else:
            grad_hidden.addcmul_((whole @ tile_weight).to(tiles.wide), scale)
        if direct:
            torch.mm(whole.t(), pulled, out_dtype=tiles.wide, out=grad_weight[columns])
        else:
            grad_weight[columns] = whole.t() @ pulled
    at_target = -g * log_probs.unsqueeze(1).expm1()
    ids = rows.targets.squeeze(1)
    grad_hidden.addcmul_(at_target, weight[ids].to(hidden.dtype).to(tiles.wide))
    grad_weight.index_put_((ids,), (at_target * hidden).to(weight.dtype), accumulate=True)  # in one order on CUDA too
    return grad_hidden.to(hidden.dtype), grad_weight


def _pull_back(tiles: LogitTiles, rows: _Rows, needs_grad: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``sum(g log_probs + h entropy)`` by hidden, weight and bias; None if not needed.

    The outer loop is over columns, so that a tile of the weight's gradient is rounded once. The tile is summed
    transposed, which is faster in matrix libraries.
    """
    hidden, weight, bias = rows.hidden, tiles.weight, tiles.bias
    grad_hidden = torch.zeros_like(hidden, dtype=tiles.wide) if needs_grad[0] else None
    grad_weight = torch.empty_like(weight) if needs_grad[1] else None
    grad_bias = torch.empty_like(bias) if bias is not None and needs_grad[2] else None
    for columns in tiles.columns:
        tile_weight = tiles.copy[columns].to(hidden.dtype)
        to_weight = hidden.new_zeros(tile_weight.t().shape, dtype=tiles.wide)
        to_bias = to_weight.new_zeros(len(tile_weight))
        for piece in tiles.rows:
            grad_logits = _grad_logits(tiles, rows.take(piece), tile_weight, columns)
            if grad_bias is not None:
                to_bias += grad_logits.sum(0)
            if tiles.dtype != tiles.wide:
                grad_logits = tiles.narrow(grad_logits).copy_(grad_logits)
            if grad_hidden is not None:
                add_product(grad_hidden[piece], grad_logits, tile_weight)
            if grad_weight is not None:
                add_product(to_weight, hidden[piece].t(), grad_logits)
        if grad_weight is not None:
            grad_weight[columns] = to_weight.t()
        if grad_bias is not None:
            grad_bias[columns] = to_bias
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight, grad_bias


def _grad_logits(tiles: LogitTiles, rows: _Rows, weight: Tensor, columns: slice) -> Tensor:
    """Return ``(1[v = target] - p_v) g - p_v (log p_v + entropy) h`` of one tile, through a softcap if there is one.

    With ``p = 2^z / mass`` and ``log p = ln 2 (z - log2 mass)`` that is ``(by_p + by_zp z) 2^z``, plus g at the target.
    """
    raw = tiles.raw(rows.hidden, weight, columns)
    g, start, by_zp = tiles.slope * rows.g, tiles.slope * rows.g, None
    if rows.h is not None:
        h = tiles.slope * rows.h
        start, by_zp = g + h * (rows.entropy - LN2 * rows.mass.log2()), -LN2 * h / rows.mass
    by_p = -start / rows.mass
    if tiles.kernels:
        grad, at = tiles.narrow(raw), {"first": columns.start, "factor": tiles.factor}
        _kernels().pull(raw, rows.targets, rows.top, by_p, by_zp, g, grad, **at)
        return grad
    z = tiles.minus(raw, rows.top)
    if by_zp is None:
        grad = z.exp2_().mul_(by_p)
    else:
        p = torch.exp2(z, out=tiles.buffers[-1, : z.numel()].view_as(z))
        grad = torch.addcmul(by_p, z, by_zp, out=z).mul_(p)
    index, inside = tiles.find(rows.targets, columns)
    grad.scatter_add_(1, index, torch.where(inside, g, 0.0))
    return grad if tiles.softcap is None else grad.mul_(raw.addcmul_(raw, raw, value=-1))


class SupportSets(NamedTuple):
    """Sampling supports of ``M`` positions, concatenated: ``K`` tokens in all.

    >>> sets = SupportSets.of(torch.tensor([3, 5, 8]), torch.tensor([1, 2]), torch.tensor([3, 8]))
    >>> sets.ids[sets.drawn].tolist(), sets.rows.tolist(), sets.columns.tolist(), sets.largest
    ([3, 8], [0, 1, 1], [0, 0, 1], 2)
    """

    ids: Tensor  # int64 [K], token ids
    rows: Tensor  # int64 [K], position of each token, ascending
    columns: Tensor  # int64 [K], index of each token in its position's set
    drawn: Tensor  # int64 [M], index in ``ids`` of each position's sampled token
    largest: int  # number of tokens of the largest set

    @classmethod
    def of(cls, ids: Tensor, counts: Tensor, targets: Tensor) -> SupportSets:
        """Build the sets from token ids ``[K]``, the size of each set ``[M]``, and the sampled tokens, int64 ``[M]``.

        ValueError if a sampled token is missing or repeated in its set, or the sizes do not add up to K.
        """
        ids, counts = ids.long(), counts.long()
        if int(counts.sum()) != len(ids):
            raise ValueError(f"{len(ids)} token ids were passed, but the set sizes add up to {int(counts.sum())}.")
        every = torch.arange(len(counts), device=ids.device)
        rows = every.repeat_interleave(counts)
        columns = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[rows]
        drawn = (ids == targets[rows]).nonzero().squeeze(1)
        if not torch.equal(rows[drawn], every):
            wrong = every[torch.bincount(rows[drawn], minlength=len(counts)) != 1]
            raise ValueError(
                f"{len(wrong)} of {len(counts)} sampled tokens are missing or repeated in their sampling support "
                f"(the first is token {int(targets[wrong[0]])}): the engine's supports do not match its tokens."
            )
        return cls(ids, rows, columns, drawn, int(counts.max()) if len(counts) else 0)

    def to(self, device: torch.device) -> SupportSets:
        ids, rows, columns, drawn = (tensor.to(device) for tensor in self[:4])
        return SupportSets(ids, rows, columns, drawn, self.largest)


def support_log_probs(
    hidden: Tensor,
    weight: Tensor,
    sets: SupportSets,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logits_bytes: int | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return each sampled token's log-prob under the softmax over its sampling support, and that softmax's entropy.

    ``log q_m = z_m[target_m] - log sum_{v in S_m} exp z_m[v]`` and ``entropy_m = -sum_{v in S_m} q_m(v) log q_m(v)``,
    with ``z`` the scaled logits. If every set is the whole vocabulary, the result equals that of
    :func:`chunked_log_probs` up to rounding. For a set of one token the log-prob, the
    entropy and the gradients are exactly 0.

    Cost: ``K H`` multiply-adds for ``K`` tokens in all sets and the hidden size ``H``, and memory for ``M max |S|``
    numbers. On CUDA gradients are summed in no fixed order.

    Args:
        sets: sampling supports of the ``M`` tokens.
        hidden, weight, bias, temperature, softcap, with_entropy, entropy_grad: see ``chunked_log_probs``, for the dtype
            of the results too.
        logits_bytes: memory for gathered rows of ``hidden`` and ``weight``; default as in ``chunked_log_probs``.

    Source of importance sampling: Owen 2013, "Monte Carlo theory, methods and examples", section 9.1.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 5.0], [9.0, -5.0]])
    >>> sets = SupportSets.of(torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([1]))
    >>> log_probs, entropy = support_log_probs(hidden, weight, sets, with_entropy=True)
    >>> round(log_probs.item(), 4), round(entropy.item(), 4)  # a support of two equal logits: -log 2 and log 2
    (-0.6931, 0.6931)
    """
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if logits_bytes is None:
        logits_bytes = LOGITS_BYTES_ON_CPU if hidden.device.type == "cpu" else LOGITS_BYTES
    logits = _SupportLogits.apply(hidden, weight, bias, sets, logits_bytes)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    lowest = torch.finfo(logits.dtype).min  # finite, and its exp is 0: no infinity is ever multiplied
    z = logits.new_full((len(hidden), sets.largest), lowest).index_put((sets.rows, sets.columns), logits)
    top = z.detach().amax(1, keepdim=True) if z.numel() else z.detach().sum(1, keepdim=True)
    z = z - top
    p = z.exp()
    mass = p.sum(1)
    log_probs = logits.index_select(0, sets.drawn) - top.squeeze(1) - mass.log()
    if not with_entropy:
        return log_probs, None
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = mass.log() - (z * p).sum(1) / mass
    return log_probs, entropy


class _SupportLogits(torch.autograd.Function):
    """Compute ``hidden[rows_k] . weight[ids_k] + bias[ids_k]``, ``[K]``; the backward gathers the rows again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sets: SupportSets, num_bytes: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, sets.rows, sets.ids)
        ctx.num_bytes, ctx.bias_shape = num_bytes, None if bias is None else bias.shape
        logits = hidden.new_empty(len(sets.ids), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for piece in _gathered_pieces(len(logits), hidden, num_bytes):
            state, embedding = _gather(hidden, weight, sets.rows[piece], sets.ids[piece])
            logits[piece] = (state * embedding).sum(1)
        return logits if bias is None else logits + bias.index_select(0, sets.ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids = ctx.saved_tensors
        to_hidden, to_weight, to_bias = (None, None, None)
        if ctx.needs_input_grad[0]:
            to_hidden = torch.zeros_like(hidden, dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            to_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, grad.dtype))
        if ctx.needs_input_grad[2]:
            to_bias = grad.new_zeros(ctx.bias_shape).index_add_(0, ids, grad)
        for piece in _gathered_pieces(len(grad), hidden, ctx.num_bytes):
            state, embedding = _gather(hidden, weight, rows[piece], ids[piece])
            pull = grad[piece].unsqueeze(1)
            if to_hidden is not None:
                to_hidden.index_add_(0, rows[piece], embedding * pull)
            if to_weight is not None:
                to_weight.index_add_(0, ids[piece], (state * pull).to(to_weight.dtype))
        to_hidden = None if to_hidden is None else to_hidden.to(hidden.dtype)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), to_bias, None, None


def _gather(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and embeddings of some logits in float32 (64); embeddings rounded to ``hidden``'s dtype."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.index_select(0, rows).to(wide), weight.index_select(0, ids).to(hidden.dtype).to(wide)


def _gathered_pieces(total: int, hidden: Tensor, num_bytes: int) -> list[slice]:
    """Split ``range(total)`` into slices whose gathered rows and products take ``num_bytes``."""
    size = max(1, num_bytes // (3 * hidden.shape[1] * max(4, hidden.element_size())))
    return [slice(start, start + size) for start in range(0, total, size)]
