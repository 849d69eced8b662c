"""Attention of one new token per row: over its prompt, which is there once per group, and over what its row sampled."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sota_grpo.engines.prompt_cache import RepeatedPrompts, SharedPrompts
from sota_grpo.policy.packed import LAYER_TYPES
from sota_grpo.policy.shared_attention import SHARED_ATTENTION, UNKNOWN

logger = logging.getLogger(__name__)

DECODE_ATTENTION = "sota_grpo_decode"


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    prompts: SharedPrompts | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; with ``prompts``, ``key`` and ``value`` are what the rows sampled.

    The softmax of a row over the keys of its prompt (a) and its own (b) is computed as two, joined by their log-sums
    (Dao et al. 2022, arXiv:2205.14135, section 3.1)::

        o = (1 - w) o_a + w o_b,    w = sigmoid(lse_b - lse_a),    lse = log sum exp(scores)

    so that the queries of all siblings meet the prompt in one matrix product and no prompt is ever copied.

    Without ``prompts`` the query heads that share a key head are read as query positions: a masked call of
    transformers' SDPA repeats keys and values for every query head instead; at 400 cached tokens, 14 query and 2 key
    heads that copy is 20 times as slow as this on CPU.

    Args:
        query: ``[rows, heads, T, width]``; ``T > 1`` only over a prompt.
        key: ``[rows, key heads, t, width]``, and ``value`` likewise.
        attention_mask: what is seen; not read with ``prompts``.
        dropout: passed on; 0 in an engine.
        scaling: of the scores; None is ``width ** -0.5``.
        prompts: the cache that holds the prompts.
        sliding_window: tokens that a token sees, itself included.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[rows, T, heads, width]`` and None, as transformers' attention interface asks.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if prompts is not None and (asked := [name for name in UNKNOWN if kwargs.get(name) is not None]):
        raise NotImplementedError(f"prompts cannot be shared by attention with {', '.join(asked)}")
    if prompts is not None and not prompts.prefilling:
        return _over_both(query, key, value, prompts, module.layer_idx, scale, sliding_window, softcap), None  # type: ignore[arg-type]
    if prompts is not None:
        prompts.told_windows += sliding_window is not None
        is_plain = sliding_window is None or sliding_window >= query.shape[2]  # which is left to its fast kernel
        attention_mask = None if is_plain else _seen(query, key, sliding_window)
    if softcap is not None:
        seen = _seen(query, key, None) if attention_mask is None else attention_mask
        return _capped(query, key, value, seen, scale, softcap), None
    if query.shape[2] == 1 and query.shape[1] != key.shape[1] and kwargs.get("position_bias") is None:
        folded = _folded(query, key)
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scale)
        return _unfolded(out, query), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


def _folded(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, T, width]`` to ``[rows, key heads, n * T, width]``: the ``n`` heads that share a key head."""
    return query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])


def _unfolded(out: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """What :func:`_folded` queries found, ``[rows, T, heads, width]``."""
    return out.reshape(*query.shape[:3], -1).transpose(1, 2)


def _over_both(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prompts: SharedPrompts,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """``[rows, 1, heads, width]`` of one token per row, over its prompt and over what its row sampled."""
    folded = _folded(query, key)
    rows, heads, n, _ = folded.shape
    own_keys, own_values = ((each if window is None else each[:, :, -window:]).flatten(0, 1) for each in (key, value))
    out, own_lse = attend(folded.flatten(0, 1), own_keys, own_values, None, scale, softcap)
    out = out.view(rows, heads, n, -1)
    held = prompts.prompt(layer)
    if held is not None:
        bias = prompts.bias(held[0], window)
        asked = prompts.spread(folded)
        found, lse = attend(asked, held[0].flatten(0, 1), held[1].flatten(0, 1), bias, scale, softcap)
        weight = torch.sigmoid(own_lse.view(rows, heads, n, 1) - prompts.collect(lse, n))
        out = torch.lerp(prompts.collect(found, n), out, weight)
    return _unfolded(out, query).to(value.dtype)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and the logarithm of the sum of its exponentials: ``lse = max score - log(max probability)``.

    Half precision is multiplied as it is and summed in float32.

    Args:
        query: ``[B, n, D]``.
        key: ``[B, m, D]``; ``value`` ``[B, m, E]``.
        bias: ``[B, 1 or n, m]``, added to the scores.
        scale: of the scores.
        softcap: see :func:`decode_attention`.

    Returns:
        ``[B, n, E]`` and ``[B, n, 1]``.

    >>> query, key, value = torch.zeros(1, 1, 2), torch.randn(1, 3, 2), torch.tensor([[[1.0], [2.0], [6.0]]])
    >>> out, lse = attend(query, key, value, None, 1.0)  # equal scores: the mean of three, and log 3
    >>> round(out.item(), 4), round(lse.item(), 4)
    (3.0, 1.0986)
    """
    if bias is None or softcap is not None or query.dtype.itemsize < 4:
        scores = _product(query, key.mT) * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores if bias is None else scores + bias
    else:
        scores = torch.baddbmm(bias, query, key.mT, alpha=scale)
    probs = scores.softmax(-1)
    lse = scores.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
    return _product(probs.to(value.dtype), value), lse


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype.itemsize >= 4:
        return torch.bmm(a, b)
    if a.is_cuda:  # never run: there was no GPU
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def _seen(query: torch.Tensor, key: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which of ``K`` keys the last ``T`` tokens see, bool ``[1, 1, T, K]``."""
    queries, keys = query.shape[2], key.shape[2]
    position = torch.arange(keys, device=query.device)
    distance = position[keys - queries :].unsqueeze(1) - position
    return ((distance >= 0) & (distance < (window or keys))).view(1, 1, queries, keys)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """``[rows, T, heads, width]`` under a bool mask. torch's SDPA knows no cap, and transformers then leaves it out."""
    rows, heads, queries, _ = query.shape
    folded = _folded(query, key).flatten(0, 1)
    lowest = torch.finfo(torch.float32).min  # finite: a token of padding sees nothing at all
    bias = torch.zeros(seen.shape, dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    bias = bias.masked_fill(~seen, lowest).expand(rows, heads, queries, -1).reshape(*folded.shape[:2], -1)
    out, _ = attend(folded, key.flatten(0, 1), value.flatten(0, 1), bias, scale, softcap)
    return _unfolded(out, query).to(value.dtype)


def use_decode_attention(model: PreTrainedModel) -> bool:
    """Switch ``model`` to :func:`decode_attention`; whether it can be handed shared prompts, which is said once if not.

    A model that computes its attention in another way than transformers' SDPA is left as it is. What the others can do
    is measured: two prompts are decoded both ways.
    """
    config: Any = model.config.get_text_config()
    if config._attn_implementation not in ("sdpa", SHARED_ATTENTION, DECODE_ATTENTION):
        reason: str | None = f"its attention is {config._attn_implementation}"
    else:
        model.set_attn_implementation(DECODE_ATTENTION)
        try:
            reason = _difference(model, config)
        except Exception as error:  # any model's own code runs here: what it cannot do is no reason to end
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("Every row of %s carries its own copy of its prompt: %s.", type(model).__name__, reason)
    return reason is None


@torch.no_grad()
def _difference(model: PreTrainedModel, config: Any) -> str | None:
    """What shared prompts change in the logits of a few tokens; None where they change rounding only."""
    layer_types = list(getattr(config, "layer_types", None) or ())
    if other := set(layer_types) - LAYER_TYPES:
        return f"it has layers of type {', '.join(sorted(other))}"
    ids = torch.linspace(0, config.vocab_size - 1, 18).long()
    prompts = [tuple(ids[:6].tolist()), tuple(ids[6:9].tolist())]
    groups, tokens = torch.tensor([0, 0, 1], device=model.device), ids[9:].view(3, 3).to(model.device)
    shared = SharedPrompts(model, prompts, groups, pad_token_id=0)
    repeated = RepeatedPrompts(model, prompts, groups, pad_token_id=0)
    has_window = bool(getattr(config, "sliding_window", None))  # older configs do not say which layers have it
    if shared.told_windows < (layer_types.count("sliding_attention") if layer_types else has_window):
        return "its sliding layers do not tell their window"
    gaps = []
    for column in tokens.unbind(1):
        found, expected = (cache.next_logits(model, column).float() for cache in (shared, repeated))
        gaps.append(float((found - expected).abs().max() / expected.abs().max()))
    close = 1e-4 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    is_close = all(gap <= close for gap in gaps)  # false where one is not a number
    return None if is_close else f"sharing them changes its logits by {max(gaps):.1g} of their size"
