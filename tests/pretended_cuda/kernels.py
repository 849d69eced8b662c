"""Operations that CUDA has and the CPU has not, on CPU tensors: attention of variable lengths, products in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sota_grpo.policy.shared_prompt import Tables

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, tables: Tensor, sizes: list[int], options: list[float]
) -> tuple[Tensor, Tensor]:
    """``sota_grpo::packed_attention``: ``[tokens, heads, width]``, and log-sums ``[heads, tokens]`` in base 2.

    Raises:
        RuntimeError: what the kernels would compute wrongly, or read outside of.
    """
    (starts, query_tiles, _, _), (scale, softcap, window) = Tables(tables, sizes).split(), options
    _require_kernels(query, key, value, starts)
    scores, seen = _scores(query, key, scale, softcap), _seen_by_queries(starts, query_tiles, window)
    scores = scores.masked_fill(~seen, float("-inf"))
    probs = scores.softmax(-1).to(query.dtype).float()  # the kernel rounds them before the second product
    out = torch.einsum("hqk,khd->qhd", probs, _repeated(value, query)).to(query.dtype)
    return out.contiguous(), scores.logsumexp(-1) / math.log(2)


def packed_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    tables: Tensor,
    sizes: list[int],
    options: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """``sota_grpo::packed_attention_backward``; what sees which key is what the table of keys says."""
    (starts, _, key_tiles, _), (scale, softcap, window) = Tables(tables, sizes).split(), options
    _require_kernels(query, key, value, starts)
    if not grad.is_contiguous():
        raise RuntimeError("packed_attention: the gradient must be contiguous")
    scores = _scores(query, key, scale, softcap)
    seen = _seen_by_keys(starts, key_tiles, window)
    pull = grad.float()
    probs = torch.where(seen, (scores - log_sums.unsqueeze(-1) * math.log(2)).exp(), 0.0)
    by_probs = torch.einsum("qhd,khd->hqk", pull, _repeated(value, query))
    by_scores = probs * (by_probs - (pull * out.float()).sum(-1).T.unsqueeze(-1)) * scale
    if softcap:
        by_scores = by_scores * (1 - (scores / softcap).square())
    by_query = torch.einsum("hqk,khd->qhd", by_scores, _repeated(key, query))
    by_key = _folded(torch.einsum("hqk,qhd->khd", by_scores, query.float()), key)
    by_value = _folded(torch.einsum("hqk,qhd->khd", probs, pull), value)
    gradients = zip((by_query, by_key, by_value), (query, key, value))
    of_query, of_key, of_value = (each.to(like.dtype).contiguous() for each, like in gradients)
    return of_query, of_key, of_value


def unrotate(
    pulls: list[Tensor], states: Tensor, norms: list[Tensor], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """``sota_grpo::unrotate``."""
    pull, heads = torch.cat(list(pulls[:2]), 1).to(torch.promote_types(states.dtype, torch.float32)), pulls[0].shape[1]
    first, second = (pull * sin.unsqueeze(1)).chunk(2, -1)
    pull, by_norms = pull * cos.unsqueeze(1) + torch.cat((second, -first), -1), []
    if norms:
        wide = states[:, : pull.shape[1]].to(pull.dtype)
        factor = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        shares = pull * (wide * factor).to(states.dtype)
        by_norms = [each.sum((0, 1)) for each in shares.tensor_split([heads], 1)]
        pull = (pull * _of_heads(norms, heads, pull.shape[1])).to(states.dtype).to(pull.dtype)
        pull = pull * factor - wide * factor**3 * (pull * wide).mean(-1, keepdim=True)
    by_states = torch.cat((pull.to(states.dtype), pulls[2]), 1)
    return by_states, torch.stack(by_norms) if norms else pull.new_empty(0, states.shape[2])


def _of_heads(norms: list[Tensor], heads: int, total: int) -> Tensor:
    return torch.cat([norm.expand(count, -1) for norm, count in zip(norms, (heads, total - heads))])


def add_gradient(total: Tensor, grad: Tensor, states: Tensor) -> None:
    """``sota_grpo::add_gradient``, summed in float32."""
    total.addmm_(grad.t().to(total.dtype), states.to(total.dtype))


def _require_kernels(query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(f"packed_attention: {what}")

    require(query.dtype in HALF and query.dtype == key.dtype == value.dtype, "only fp16 or bf16, the same in all three")
    require(all(each[0].is_contiguous() for each in (query, key, value)), "the heads of a row must be contiguous")
    require(query.shape[-1] == key.shape[-1] <= 256 and query.shape[-1] % 8 == 0, "head width above 256 or not 8 n")
    require(query.shape[1] % key.shape[1] == 0, "heads of queries must be a multiple of those of keys")
    require(starts.dtype == torch.int32 and len(starts) == len(query), "a start for each token, in int32")


def _own(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Which key of its span each query sees, and how far each key is behind, ``[tokens, tokens]``."""
    place = torch.arange(len(starts))
    behind = place.unsqueeze(1) - place
    return (behind >= 0) & (place >= starts.unsqueeze(1)), behind


def _seen_by_queries(starts: Tensor, tiles: Tensor, window: float) -> Tensor:
    seen, behind = _own(starts)
    computed = torch.zeros(len(starts), dtype=torch.int64)
    for first, end, prompt, prompt_end in tiles.tolist():
        computed[first:end] += 1
        seen[first:end, prompt:prompt_end] = True
        behind[first:end, prompt:prompt_end] += (prompt_end - starts[first:end]).unsqueeze(1)
    if not bool((computed == 1).all()):
        raise RuntimeError("packed_attention: a query is in no tile, or in several")
    return seen & (behind < (window or len(starts)))


def _seen_by_keys(starts: Tensor, tiles: Tensor, window: float) -> Tensor:
    (own, behind), counted = _own(starts), torch.zeros(len(starts), len(starts), dtype=torch.int64)
    for first, end, unmasked, masked, last, _, prompt_end in tiles.tolist():
        counted[unmasked:masked, first:end] += own[unmasked:masked, first:end]
        counted[masked:last, first:end] += 1
        behind[unmasked:last, first:end] += (prompt_end - starts[unmasked:last]).clamp(max=0).unsqueeze(1)
    if int(counted.max()) > 1:
        raise RuntimeError("packed_attention: a query is computed twice for a key")
    return (counted > 0) & (behind < (window or len(starts)))


def _scores(query: Tensor, key: Tensor, scale: float, softcap: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", query.float(), _repeated(key, query)) * scale
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def _repeated(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.float().repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _folded(gradient: Tensor, like: Tensor) -> Tensor:
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _wide_product(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Products of half precision that are summed and given in float32 (``out_dtype=``), as cuBLAS has them."""

    def computed(*operands: Any, out: Tensor | None = None, **factors: Any) -> Tensor:
        *tensors, dtype = operands
        narrow = tensors[-1].dtype
        if dtype != narrow and not (dtype == torch.float32 and narrow in HALF):
            raise RuntimeError(f"out_dtype must be that of the operands, or float32 for fp16 and bf16; not {dtype}")
        actual = product(*(each.to(dtype) for each in tensors), **factors)
        return actual if out is None else out.copy_(actual)

    return computed


STAND_INS: dict[str, Callable[..., Any]] = {
    "sota_grpo::packed_attention": packed_attention,
    "sota_grpo::packed_attention_backward": packed_attention_backward,
    "sota_grpo::add_gradient": add_gradient,
    "sota_grpo::unrotate": unrotate,
    "aten::mm.dtype": _wide_product(aten.mm.default),
    "aten::bmm.dtype": _wide_product(aten.bmm.default),
    "aten::addmm.dtype": _wide_product(aten.addmm.default),
    "aten::baddbmm.dtype": _wide_product(aten.baddbmm.default),
    "aten::mm.dtype_out": _wide_product(aten.mm.default),
    "aten::bmm.dtype_out": _wide_product(aten.bmm.default),
    "aten::addmm.dtype_out": _wide_product(aten.addmm.default),
    "aten::baddbmm.dtype_out": _wide_product(aten.baddbmm.default),
}
