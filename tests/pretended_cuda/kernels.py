"""Operations that CUDA has and the CPU has not, on CPU tensors: attention of variable lengths, products in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool = False,
    scale: float | None = None,
    window: list[int] | None = None,
    *unused: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch_attn::_varlen_attn``: ``[tokens, heads, width]``, log-sums ``[heads, tokens]``, a random state of zeros.

    Raises:
        RuntimeError: what FlashAttention-2 would refuse, or would read outside of.
    """
    _require_flash(query, key, value, query_ends, key_ends, longest_query, longest_key)
    if any(each is not None and each is not False and each is not True for each in unused):
        raise NotImplementedError(f"the stand-in of varlen_attn does not know {unused}")
    out = torch.zeros_like(query)
    log_sums = torch.full((query.shape[1], query.shape[0]), float("inf"))
    for queries, keys, seen in _spans(query_ends, key_ends, is_causal, window):
        scores = _scores(query[queries], key[keys], seen, scale)
        log_sums[:, queries] = scores.logsumexp(-1)
        probs = scores.softmax(-1).to(query.dtype).float()  # the kernel rounds them before the second product
        out[queries] = torch.einsum("hqk,khd->qhd", probs, _repeated(value[keys], query)).to(query.dtype)
    return out, log_sums, torch.zeros(2, dtype=torch.uint64)


def varlen_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool,
    random_state: Tensor,
    scale: float | None = None,
    window: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``torch_attn::_varlen_attn_backward``: gradients by query, key and value from the forward's log-sums."""
    _require_flash(query, key, value, query_ends, key_ends, longest_query, longest_key)
    factor = scale or query.shape[-1] ** -0.5
    by_query, by_key, by_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
    for queries, keys, seen in _spans(query_ends, key_ends, is_causal, window):
        asked, pull = query[queries], grad[queries].float()
        probs = (_scores(asked, key[keys], seen, scale) - log_sums[:, queries].unsqueeze(-1)).exp()
        by_probs = torch.einsum("qhd,khd->hqk", pull, _repeated(value[keys], query))
        mean = (pull * out[queries].float()).sum(-1).T.unsqueeze(-1)
        by_scores = probs * (by_probs - mean) * factor
        by_query[queries] = torch.einsum("hqk,khd->qhd", by_scores, _repeated(key[keys], query))
        by_key[keys] += _folded(torch.einsum("hqk,qhd->khd", by_scores, asked.float()), key)
        by_value[keys] += _folded(torch.einsum("hqk,qhd->khd", probs, pull), value)
    return by_query.to(query.dtype), by_key.to(key.dtype), by_value.to(value.dtype)


def _require_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
) -> None:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise RuntimeError(f"varlen_attn: {what}")

    require(query.dtype in HALF and query.dtype == key.dtype == value.dtype, "only fp16 or bf16, the same in all three")
    require(all(each.stride(-1) == 1 for each in (query, key, value)), "the last dimension must be contiguous")
    require(query.shape[-1] == key.shape[-1] <= 256 and query.shape[-1] % 8 == 0, "head width above 256 or not 8 n")
    require(query.shape[1] % key.shape[1] == 0, "heads of queries must be a multiple of those of keys")
    require(len(query_ends) == len(key_ends) > 1, "as many spans of keys as of queries, and at least one")
    for ends, tensor, longest in ((query_ends, query, longest_query), (key_ends, key, longest_key)):
        require(ends.dtype == torch.int32 and ends.is_contiguous(), "ends must be contiguous int32")
        require(int(ends[0]) == 0 and int(ends[-1]) == len(tensor), "ends do not cover the tokens")
        require(int(ends.diff().max()) <= longest, "a span is longer than the longest")


def _spans(
    query_ends: Tensor, key_ends: Tensor, is_causal: bool, window: list[int] | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Slices of queries and keys that belong together, and which see which: the last query is at the last key."""
    left, right = window or (-1, -1)
    right = 0 if is_causal else right
    ends = zip(query_ends.tolist(), query_ends[1:].tolist(), key_ends.tolist(), key_ends[1:].tolist())
    for query_start, query_end, key_start, key_end in ends:
        queries, keys = query_end - query_start, key_end - key_start
        if queries > keys:
            raise RuntimeError("varlen_attn: queries before the first key would see nothing")
        place = torch.arange(keys)
        distance = place[keys - queries :].unsqueeze(1) - place
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if right >= 0:
            seen &= distance >= -right
        if left >= 0:
            seen &= distance <= left
        yield slice(query_start, query_end), slice(key_start, key_end), seen


def _scores(query: Tensor, key: Tensor, seen: Tensor, scale: float | None) -> Tensor:
    factor = scale or query.shape[-1] ** -0.5
    scores = torch.einsum("qhd,khd->hqk", query.float(), _repeated(key, query)) * factor
    return scores.masked_fill(~seen, float("-inf"))


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
        found = product(*(each.to(dtype) for each in tensors), **factors)
        return found if out is None else out.copy_(found)

    return computed


STAND_INS: dict[str, Callable[..., Any]] = {
    "torch_attn::_varlen_attn": varlen_attention,
    "torch_attn::_varlen_attn_backward": varlen_attention_backward,
    "aten::mm.dtype": _wide_product(aten.mm.default),
    "aten::bmm.dtype": _wide_product(aten.bmm.default),
    "aten::addmm.dtype": _wide_product(aten.addmm.default),
    "aten::baddbmm.dtype": _wide_product(aten.baddbmm.default),
    "aten::mm.dtype_out": _wide_product(aten.mm.default),
    "aten::bmm.dtype_out": _wide_product(aten.bmm.default),
    "aten::addmm.dtype_out": _wide_product(aten.addmm.default),
    "aten::baddbmm.dtype_out": _wide_product(aten.baddbmm.default),
}
