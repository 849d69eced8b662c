"""Attention over a packed sequence: responses see their prompt, which is there once, and themselves.

Every distinct prompt's keys and values are computed once and read by all of its responses; nothing is padded or copied
on a CPU. With the scores of a response's token ``t`` split into those of the prompt (a) and of the response itself (b),

    o_t = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b,    lse = log(exp lse_a + exp lse_b),

so two calls of the flash kernel and this sum are one softmax over both (Dao et al. 2022, arXiv:2205.14135, section
3.1). The backward pass calls the kernel's own for each part with ``o`` and ``lse`` of the whole: the probabilities it
computes again, ``exp(score - lse)``, are then those of the whole, and the parts' gradients add.

On CUDA in half precision it is one variable-length flash call over gathered keys. Layers with a sliding window that is
shorter than the longest row, capped scores, and CUDA in float32 go response by response through a plain form.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sota_grpo.policy.layout import Layout

SHARED_ATTENTION = "sota_grpo_shared"
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
View = Callable[[Tensor], Tensor]
UNKNOWN = ("position_bias", "s_aux", "sinks", "cache")  # what would change scores, and is not known here


def shared_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; without ``layout`` it is transformers' own SDPA attention.

    Args:
        query: ``[1, heads, L, width]``; ``key`` and ``value`` have a divisor of its heads.
        attention_mask: of the padded form; with a layout it is not read.
        dropout: of the probabilities; 0 with a layout.
        scaling: of the scores; None is ``width ** -0.5``.
        layout: how the ``L`` tokens are packed.
        sliding_window: tokens that a token sees, itself included.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[1, L, heads, width]`` and None.

    Raises:
        NotImplementedError: something asks for another attention than this.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if layout is None:
        if softcap is not None:  # torch's SDPA knows no cap, and transformers leaves it out in silence
            return _attend(query, key, value, scale, softcap, seen=attention_mask).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    asked = [name for name in UNKNOWN if kwargs.get(name) is not None]
    if dropout or asked or kwargs.get("is_causal") is False:
        raise NotImplementedError(f"a packed sequence has no attention with {asked or 'dropout, or not causal'}")
    layout.windows.append(sliding_window)
    query, key = query.to(value.dtype), key.to(value.dtype)  # under autocast positions make them wider
    window = sliding_window if sliding_window and sliding_window < layout.longest else None
    if softcap is None and _takes_varlen(query, value):
        return _varlen(query, key, value, layout, scale, window), None
    if softcap is None and window is None and not query.is_cuda and query.shape[-1] == value.shape[-1]:
        return _FlashShared.apply(query, key, value, layout, scale).transpose(1, 2), None
    return _plain(query, key, value, layout, scale, window, softcap).transpose(1, 2), None


AttentionInterface.register(SHARED_ATTENTION, shared_attention)
AttentionMaskInterface.register(SHARED_ATTENTION, sdpa_mask)


class _FlashShared(torch.autograd.Function):
    """``[1, heads, L, width]`` from CPU flash kernels; saves its inputs, its output and the ``[1, heads, L]`` lse."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        out = _like_rows(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in layout.blocks:
            prompt, behind = _cut(block.start, block.end), _cut(block.end, block.stop)
            for queries, causal in ((prompt, True), (behind, False))[: 2 if block.runs else 1]:
                found, found_lse = _flash(queries(query), prompt(key), prompt(value), 0.0, causal, scale=scale)
                queries(out).copy_(found)
                queries(lse).copy_(found_lse)
            for run in block.runs:
                _add_own(out, lse, query, key, value, _cut(run.start, run.end, run.count), scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, lse = ctx.saved_tensors
        wide = lse.dtype  # torch's kernel takes two to seven times as long in half precision
        query, key, value, out, grad = (each.to(wide) for each in (*saved, grad))
        totals = [_like_rows(each).zero_() for each in (query, key, value)]

        def add(queries: View, keys: View, causal: bool) -> None:
            asked = [queries(each) for each in (grad, query, out, lse)]
            held = [keys(each) for each in (key, value)]
            found = _flash_backward(*asked[:2], *held, *asked[2:], 0.0, causal, scale=ctx.scale)
            for view, total, each in zip((queries, keys, keys), totals, found):
                view(total).add_(each)

        for block in ctx.layout.blocks:
            prompt = _cut(block.start, block.end)
            add(prompt, prompt, True)
            if block.runs:
                add(_cut(block.end, block.stop), prompt, False)
            for run in block.runs:
                own = _cut(run.start, run.end, run.count)
                add(own, own, True)
        return *(total.to(each.dtype) for total, each in zip(totals, saved)), None, None


def _add_own(out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, own: View, scale: float) -> None:
    """Join what responses see of themselves to what ``out`` and ``lse`` have of their prompt."""
    found, found_lse = _flash(own(query), own(key), own(value), 0.0, True, scale=scale)
    whole = torch.logaddexp(own(lse), found_lse)
    of_prompt, of_own = ((each - whole).exp_().unsqueeze(-1) for each in (own(lse), found_lse))
    own(out).copy_(own(out) * of_prompt + found * of_own)
    own(lse).copy_(whole)


def _cut(start: int, end: int, count: int = 1) -> View:
    """A view of ``[1, heads, L, ...]`` between two places, as a batch ``[count, heads, -1, ...]``."""

    def view(tensor: Tensor) -> Tensor:
        return tensor[0, :, start:end].unflatten(1, (count, -1)).transpose(0, 1)

    return view


def _like_rows(tensor: Tensor) -> Tensor:
    """Uninitialised ``[1, heads, L, width]`` whose memory is ``[1, L, heads, width]``, as the layers around want it."""
    return tensor.new_empty(tensor.transpose(1, 2).shape).transpose(1, 2)


def _takes_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel can: Ampere or newer, half precision, one width of keys and values, 8 n up to 256."""
    width, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    if not (query.is_cuda and half and width == value.shape[-1] and width % 8 == 0 and width <= 256):
        return False
    return torch.cuda.get_device_capability(query.device) >= (8, 0)


def _varlen(query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None) -> Tensor:
    """One flash call on CUDA, ``[1, L, heads, width]``. Its causal mask is aligned to the ends of queries and keys."""
    from torch.nn.attention.varlen import varlen_attn

    spans = layout.spans
    # index_select: the gradient of [..] would sort the indices in every layer
    keys, values = (each[0].transpose(0, 1).index_select(0, spans.key_index) for each in (key, value))
    # torch 2.11's takes key heads that several query heads share without being told
    takes_gqa = "enable_gqa" in signature(varlen_attn).parameters
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if takes_gqa else {}
    out: Any = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        keys,
        values,
        spans.query_ends,
        spans.key_ends,
        spans.longest_query,
        spans.longest_key,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    return out.unsqueeze(0)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """``[1, heads, L, width]``, response by response, through torch's own autograd."""
    parts = []
    for block in layout.blocks:
        prompt = _cut(block.start, block.end)
        keys, values = prompt(key), prompt(value)
        parts.append(_attend(prompt(query), keys, values, scale, softcap, window=window))
        for run in block.runs:
            own, many = _cut(run.start, run.end, run.count), (run.count, -1, -1, -1)
            whole = torch.cat([keys.expand(many), own(key)], dim=2)
            held = torch.cat([values.expand(many), own(value)], dim=2)
            found = _attend(own(query), whole, held, scale, softcap, window=window)
            parts.append(found.transpose(0, 1).flatten(1, 2).unsqueeze(0))
    return torch.cat(parts, dim=2)


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
    """Plain attention of the last ``T`` of ``K`` positions: ``seen`` (bool ``[.., T, K]``), or causal and windowed."""
    if seen is None:
        queries, keys = query.shape[2], key.shape[2]
        place = torch.arange(keys, device=query.device)
        distance = place[keys - queries :].unsqueeze(1) - place
        seen = (distance >= 0) & (distance < (window or keys))
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * (scale / softcap))
    wide = torch.promote_types(query.dtype, torch.float32)
    lowest = torch.finfo(scores.dtype).min  # finite: a token of padding sees nothing at all
    return scores.masked_fill(~seen, lowest).softmax(-1, dtype=wide).to(value.dtype) @ value
