"""Rollout engine in this process: a causal language model of transformers, on a CPU or one GPU.

In this file: sampling of tokens (processed distribution, inversion of its CDF); KV caches and the attention of groups,
whose rows can share one copy of their prompt's keys and values; batched decoding of groups; the engine.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    Cache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sota_grpo.engines import EngineOptions
from sota_grpo.engines.stepping import (
    Flight,
    SteppingEngine,
    StopStrings,
    checked_weights,
    matrix_dtype,
    tied_names,
)
from sota_grpo.errors import UserError
from sota_grpo.policy.model_sizes import rotary_limit
from sota_grpo.policy.shared_prompt import SHARED_ATTENTION, UNKNOWN
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.rl.records import GroupOutput, Sample, Sampling, SamplingSupport, sample_seed
from sota_grpo.text import sentence

logger = logging.getLogger(__name__)
DECODE_ATTENTION = "sota_grpo_decode"
PREFILL_TOKENS = 2048  # padded tokens of one prefill pass: bounds its memory and the padding
_SHRINK_BELOW = 0.9  # the batch is compacted when less than this fraction of its rows is still sampled
_BITS = 24  # every multiple of 2^-24 in [0, 1) is a float32
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def require_cache(config: PretrainedConfig) -> None:
    """Raise UserError if the config lists a layer that keeps a state other than keys and values, or its model has one.

    Models that list no layers (RecurrentGemma, RWKV) declare in transformers that they are stateful.
    """
    listed = getattr(config.get_text_config(), "layer_types", None)
    is_stateful = getattr(MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None), "_is_stateful", False)
    others = sorted(set(listed or ("recurrent",) * is_stateful) - _SUPPORTED_LAYERS)
    if others:
        raise UserError(
            f"This model has layers of type {', '.join(others)}, and engine=transformers can cache only keys and "
            "values; use engine=vllm."
        )


def uniforms(seeds: torch.Tensor, num: int) -> torch.Tensor:
    """Return uniform random numbers by seed: ``u[n, t] = (splitmix64(seeds[n] + (t + 1) gamma) >> 40) / 2^24``.

    ``splitmix64`` is the source's mixing function, ``gamma`` its constant 0x9E3779B97F4A7C15; sums are modulo 2^64. For
    int64 seeds ``[N]`` the result is float32 ``[N, num]`` in ``[0, 1)``, on the device of the seeds; it does not depend
    on the device, because it is computed on the CPU.

    Source: splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    >>> u = uniforms(torch.tensor([3, 5]), 4)
    >>> u.shape, bool((u == torch.cat([uniforms(torch.tensor([3]), 4), uniforms(torch.tensor([5]), 4)])).all())
    (torch.Size([2, 4]), True)
    """
    x = seeds.cpu().numpy().astype(np.uint64)[:, None] + np.arange(1, num + 1, dtype=np.uint64) * _GAMMA
    for bits, multiplier in _MIX:
        x = (x ^ (x >> np.uint64(bits))) * multiplier
    x ^= x >> np.uint64(31)
    return torch.from_numpy((x >> np.uint64(64 - _BITS)).astype(np.float32) / (1 << _BITS)).to(seeds.device)


def sampled_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution that tokens are sampled from, ``softmax(keep(logits / temperature))``.

    ``keep`` sets to minus infinity the logits of tokens that min-p, then top-k, then top-p removes (vLLM's order).
    Tokens that tie with the last one of top-k are kept. At temperature 0 (greedy) the result is ``softmax(logits)``, as
    in vLLM. ``logits`` are ``[N, V]`` for a vocabulary of ``V``, of any float type; the result is float32, 0 for
    removed tokens.

    Source: Holtzman et al. 2020 (arXiv:1904.09751, section 3.1) for top-p, Fan et al. 2018 (arXiv:1805.04833) for
    top-k, Nguyen et al. 2024 (arXiv:2407.01082, section 3) for min-p.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0]])
    >>> sampled_probs(logits, Sampling(max_tokens=1, top_k=1)).tolist()
    [[0.0, 0.0, 1.0]]
    """
    scores = logits
    if sampling.temperature > 0:
        if sampling.temperature != 1:
            scores = scores.to(torch.float32) / sampling.temperature
        if sampling.min_p > 0:
            scores = scores.to(torch.float32)
            floor = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if 0 < sampling.top_k < scores.shape[-1]:
            floor = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if sampling.top_p < 1:
            scores = scores.to(torch.float32)
            ranked, order = scores.sort(dim=-1, descending=True)
            probs = ranked.softmax(-1)
            mass_before = probs.cumsum(-1) - probs  # 0 of the most likely token, which is always kept
            outside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, mass_before >= sampling.top_p)
            scores = scores.masked_fill(outside, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32)


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Sample tokens by inversion: the first whose cumulative probability exceeds ``u``; never one of probability 0.

    ``probs`` are float32 ``[N, V]``, ``u`` float32 ``[N]`` in ``[0, 1)``; the token ids are int64 ``[N]``; of a
    row with NaN any ids below ``V``.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]]).expand(3, 3), torch.tensor([0.0, 0.25, 0.99])).tolist()
    [0, 2, 2]
    """
    vocab = probs.shape[1]
    length = math.isqrt(vocab)  # u selects one of about sqrt(V) runs, then a token: a cumsum over V would take longer
    whole = vocab - vocab % length
    sums = probs[:, :whole].unflatten(1, (-1, length)).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    run, rest = _invert(sums, u * sums.sum(-1))
    tokens = run.unsqueeze(1) * length + torch.arange(length, device=probs.device)
    inside = probs.gather(1, tokens.clamp(max=vocab - 1)).masked_fill_(tokens >= vocab, 0.0)
    return (run * length + _invert(inside, rest)[0]).clamp(max=vocab - 1)  # no index is beyond it but of NaN


def _invert(mass: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index where the sum of ``mass`` ``[N, K]`` exceeds ``threshold`` ``[N]``, and the gap before it."""
    cdf = mass.cumsum(-1)
    total = cdf[:, -1]  # rounding may put the threshold above it, and then nothing would exceed the threshold
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(1)
    index = torch.searchsorted(cdf, threshold, right=True)
    entered = threshold - torch.where(index > 0, cdf.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index.squeeze(1), entered.squeeze(1)


class GrowingLayer(DynamicLayer):
    """KV cache of one layer, ``[rows, heads, columns, width]``; new tokens are written in place into spare columns.

    It copies the cache only when no spare column is left, and then reserves half as many as are used (at least 64).
    """

    keys: torch.Tensor  # type: ignore[assignment]
    values: torch.Tensor  # type: ignore[assignment]

    _length = 0

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        start, end = self._length, self._length + key_states.shape[2]
        if end > self.keys.shape[2]:
            columns = end + max(64, end // 2)
            self.keys, self.values = (
                torch.cat([old[:, :, :start], new.new_empty((*new.shape[:2], columns - start, new.shape[3]))], dim=2)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self) -> int:
        return self._length


class GroupCache(Cache):
    """Base of KV caches of rows that are decoded together; a group here is the rows that share a prompt.

    The prefill leaves out each prompt's last token, which is the first input token of its rows: the prefill needs no
    output layer, and all logits come from :meth:`next_logits`.

    Args:
        model: causal language model; it is run over the prompts here.
        prompts: token ids of each group's prompt, at least one.
        group_of_row: index into ``prompts`` of each row, int64 ``[rows]``, ascending.
        pad_token_id: fills unused cells of the prefill.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        group_of_row: torch.Tensor,
        *,
        pad_token_id: int,
    ):
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self.device = group_of_row.device
        self.lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        self.group_of_row = group_of_row
        self._positions = self.lengths[group_of_row].unsqueeze(1)
        self._prefill(model, prompts, pad_token_id)

    def next_logits(self, model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
        """Append one token to each row (``tokens`` ``[rows]``); return the next token's logits ``[rows, vocab]``."""
        logits = model(
            input_ids=tokens.unsqueeze(1),
            position_ids=self._positions,
            past_key_values=self,
            use_cache=True,
            **self._attention(),
        ).logits[:, -1]
        self._positions = self._positions + 1
        return logits

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows except those with the indices ``rows`` (int64, ascending), and prompts without rows."""
        self.reorder_cache(rows)  # type: ignore[arg-type]
        self._positions = self._positions[rows]
        groups, self.group_of_row = self.group_of_row[rows].unique(return_inverse=True)
        self.lengths = self.lengths[groups]
        self._arrange(groups)

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Run the decoder over the prompts without their last tokens."""
        raise NotImplementedError

    def _arrange(self, groups: torch.Tensor) -> None:
        """Prepare the next tokens' attention; only ``groups``, indices into the prompts before, still have rows."""

    def _attention(self) -> dict[str, Any]:
        """Return the arguments of the model's call that define which keys the next token attends to."""
        raise NotImplementedError


class RepeatedPrompts(GroupCache):
    """KV cache with a copy of the prompt for every row and transformers' own masks: correct for any attention.

    Worked example: for the prompts ``[7]`` and ``[8, 9]`` the prefill has the rows ``[pad]`` and ``[8]``, padded on the
    left, so that the next token of every row is in the same column.
    """

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        self._width = width = max(map(len, prompts)) - 1
        if width:
            mask = torch.arange(width, device=self.device) >= (width - self.lengths).unsqueeze(1)
            ids = [[pad_token_id] * (width + 1 - len(prompt)) + list(prompt[:-1]) for prompt in prompts]
            model.get_decoder()(
                input_ids=torch.tensor(ids, device=self.device),
                attention_mask=mask.long(),
                position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
                past_key_values=self,
                use_cache=True,
            )
            self.reorder_cache(self.group_of_row)  # type: ignore[arg-type]

    def _attention(self) -> dict[str, Any]:
        padding = (self._width - self.lengths[self.group_of_row]).unsqueeze(1)
        mask = torch.arange(self.get_seq_length() + 1, device=self.device) >= padding
        return {"attention_mask": mask.long()}


class SharedPrompts(GroupCache):
    """KV cache with one copy of each prompt (without its last token), which all rows of its group read.

    The model's attention must be :func:`decode_attention`. The prompts are padded on the right, ``[groups, heads, P,
    width]``; ``P`` is the longest prompt's length minus one. All rows have sampled equally many tokens, which need
    neither padding nor mask. :meth:`spread` puts the queries of each group into one matrix, for the attention over the
    prompts; :meth:`collect` takes the outputs apart. Worked example with one head: ``a0 a1 a2`` are the queries of one
    group, ``b0`` is that of the last unfinished row of another, ``-`` is zeros::

        rows  a0 a1 a2 b0   --spread-->   [[a0, a1, a2], [b0, -, -]]   --collect-->   a0 a1 a2 b0

    Attributes:
        held: keys and values ``[groups, heads, P, width]`` by layer; empty if every prompt is a single token.
        biases: by key heads, the mask ``[groups * heads, 1, P]`` to add to scores; empty if no prompt is padded.
        prefilled: int64 indices of the groups whose prompts the model is running over; None outside the prefill.
    """

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Run the decoder over the prompts, batched by similar length."""
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.prefilled: torch.Tensor | None = None
        order = sorted(range(len(prompts)), key=lambda group: -len(prompts[group]))
        while order and (width := len(prompts[order[0]]) - 1):
            count = max(1, PREFILL_TOKENS // width)
            batch, order = order[:count], order[count:]
            ids = [torch.tensor(prompts[group][:-1], dtype=torch.int64) for group in batch]
            self.prefilled = torch.tensor(batch, device=self.device)
            model.get_decoder()(
                input_ids=pad_sequence(ids, batch_first=True, padding_value=pad_token_id).to(self.device),
                position_ids=torch.arange(width, device=self.device).unsqueeze(0),
                past_key_values=self,
                use_cache=True,
                **self._attention(),
            )
        self.prefilled = None
        self._arrange(torch.arange(len(prompts), device=self.device))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the prefill store and return the states; later append them and return all that were appended."""
        if self.prefilled is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.held:
            # Zeros: the padding is read with weight 0, so it must be finite.
            room = (len(self.lengths), *key_states.shape[1:3])  # the first batch has the longest prompt
            self.held[layer_idx] = tuple(  # type: ignore[assignment]
                states.new_zeros((*room, states.shape[3])) for states in (key_states, value_states)
            )
        for cache, states in zip(self.held[layer_idx], (key_states, value_states)):
            cache[self.prefilled, :, : states.shape[2]] = states
        return key_states, value_states

    def spread(self, query: torch.Tensor) -> torch.Tensor:
        """Reshape ``[rows, heads, n, width]`` to ``[groups * heads, siblings * n, width]``; absent siblings are 0.

        ``siblings``: rows of the largest group; ``n``: query heads per key head.
        """
        _, heads, n, width = query.shape
        groups, siblings = len(self.lengths), self._siblings
        if self._slots is not None:
            query = query.new_zeros((groups * siblings, heads, n, width)).index_copy_(0, self._slots, query)
        query = query.reshape(groups, siblings, heads, n, width).transpose(1, 2)
        return query.reshape(groups * heads, siblings * n, width)

    def collect(self, out: torch.Tensor, n: int) -> torch.Tensor:
        """Undo :meth:`spread`: ``[groups * heads, siblings * n, width]`` to ``[rows, heads, n, width]``."""
        groups, siblings = len(self.lengths), self._siblings
        out = out.view(groups, -1, siblings, n, out.shape[-1]).transpose(1, 2)
        out = out.reshape(groups * siblings, *out.shape[2:])
        return out if self._slots is None else out[self._slots]

    def _arrange(self, groups: torch.Tensor) -> None:
        """Drop the keys of other prompts; compute each row's slot in the batch of :meth:`spread`, and the biases."""
        counts = torch.bincount(self.group_of_row, minlength=len(groups))
        longest, self._siblings = int(self.lengths.max()), int(counts.max())
        if not longest:  # every prompt has one token, which is in the rows: no keys to read
            self.held.clear()
        for layer, both in self.held.items():
            if len(groups) < len(both[0]):
                self.held[layer] = tuple(states[groups, :, :longest] for states in both)  # type: ignore[assignment]
        first = counts.cumsum(0) - counts
        row = torch.arange(len(self.group_of_row), device=self.device)
        slots = self.group_of_row * self._siblings + row - first[self.group_of_row]
        is_full = len(slots) == len(groups) * self._siblings
        self._slots = None if is_full else slots
        self.biases: dict[int, torch.Tensor] = {}
        hidden = torch.arange(longest, device=self.device) >= self.lengths.unsqueeze(1)
        forms = {(keys.shape[1], keys.dtype) for keys, _ in self.held.values()}
        for heads, dtype in forms if bool(hidden.any()) else ():
            bias = torch.zeros(hidden.shape, dtype=torch.promote_types(dtype, torch.float32), device=self.device)
            bias = bias.masked_fill(hidden, torch.finfo(torch.float32).min)
            self.biases[heads] = bias.repeat_interleave(heads, 0).unsqueeze(1)

    def _attention(self) -> dict[str, Any]:
        # transformers makes no mask of its own if it receives one of four dimensions
        return {"attention_mask": self.lengths.new_ones((1, 1, 1, 1), dtype=torch.bool), "prompts": self}


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
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention; return ``[rows, T, heads, width]`` and None, as transformers requires.

    With ``prompts``, after the prefill, ``key`` and ``value`` hold only the later tokens: the prompt's last one and the
    sampled ones. The attention over the prefilled tokens (a), one matrix product for all rows of a prompt, and over the
    later ones (b) is computed separately, and joined by the log-sum-exp of the scores (Dao et al. 2022,
    arXiv:2205.14135, section 3.1)::

        o = (1 - w) o_a + w o_b,    w = sigmoid(lse_b - lse_a),    lse = log sum exp(scores)

    NotImplementedError for a ``softcap``, and with ``prompts`` for a sliding window, position bias, sinks or ``cache``.

    Args:
        query: ``[rows, heads, T, width]``; ``T > 1`` only in the prefill.
        key: ``[rows, key heads, t, width]`` of ``t`` tokens; ``value`` has the same shape.
        attention_mask: ignored if ``prompts`` is set.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is not None:  # transformers' SDPA would leave it out without an error
        raise NotImplementedError("decode_attention cannot cap scores; use eager attention")
    if prompts is not None:
        unknown = [name for name in (*UNKNOWN, "sliding_window") if kwargs.get(name) is not None]
        if unknown:
            raise NotImplementedError(f"prompts cannot be shared by attention with {', '.join(unknown)}")
        attention_mask = None
    rows, heads = key.shape[:2]
    if prompts is not None and prompts.prefilled is None:
        folded = query.reshape(rows, heads, -1, query.shape[3])
        n = folded.shape[2]
        out, lse = attend(folded.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), None, scale)
        out = out.view(rows, heads, n, -1)
        if (held := prompts.held.get(module.layer_idx)) is not None:  # type: ignore[call-overload]
            keys, values = (states.flatten(0, 1) for states in held)
            of_prompt, prompt_lse = attend(prompts.spread(folded), keys, values, prompts.biases.get(heads), scale)
            weight = torch.sigmoid(lse.view(rows, heads, n, 1) - prompts.collect(prompt_lse, n))
            out = torch.lerp(prompts.collect(of_prompt, n), out, weight)
        out = out.to(value.dtype)
    elif query.shape[2] == 1 and query.shape[1] != heads and kwargs.get("position_bias") is None:
        # SDPA would copy keys and values for every query head that shares them
        folded = query.reshape(rows, heads, -1, query.shape[3])
        out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scale)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    return out.reshape(*query.shape[:3], -1).transpose(1, 2), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)

AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output ``[B, n, E]`` and the scores' log-sum-exp ``[B, n, 1]``.

    ``lse = max score - log(max probability)``; half-precision products are accumulated and returned in float32.

    Args:
        query, key, value: ``[B, n, D]``, ``[B, m, D]`` and ``[B, m, E]``.
        bias: ``[B, 1 or n, m]``, added to the scores; None: nothing is added.
        scale: factor of the scores.

    >>> query, key, value = torch.zeros(1, 1, 2), torch.randn(1, 3, 2), torch.tensor([[[1.0], [2.0], [6.0]]])
    >>> out, lse = attend(query, key, value, None, 1.0)  # equal scores: the mean of three, and log 3
    >>> round(out.item(), 4), round(lse.item(), 4)
    (3.0, 1.0986)
    """
    dtype, is_half = value.dtype, value.dtype.itemsize < 4
    options: dict[str, Any] = {"out_dtype": torch.float32} if is_half and value.is_cuda else {}
    if is_half and not value.is_cuda:
        query, key, value = query.float(), key.float(), value.float()
    if bias is None or is_half:
        scores = torch.bmm(query, key.mT, **options) * scale
        scores = scores if bias is None else scores + bias
    else:
        scores = torch.baddbmm(bias, query, key.mT, alpha=scale)
    probs = scores.softmax(-1)
    lse = scores.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
    return torch.bmm(probs.to(dtype).to(value.dtype), value, **options), lse


@torch.no_grad()
def use_decode_attention(model: PreTrainedModel) -> bool:
    """Switch ``model`` to :func:`decode_attention`; return whether its rows can share prompts; else log a warning.

    A model whose attention is not SDPA keeps its attention, and another model with capped scores gets transformers'
    eager attention; these and models with layers other than full attention cannot share prompts. Any other model can
    if two prompts have the same logits, up to rounding, with shared and with repeated keys and values.
    """
    config: Any = model.config.get_text_config()
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    reason: str | None
    if config._attn_implementation not in ("sdpa", SHARED_ATTENTION, DECODE_ATTENTION):
        reason = f"its attention is {config._attn_implementation}"
    else:
        model.set_attn_implementation("eager" if is_capped else DECODE_ATTENTION)
        layer_types = set(getattr(config, "layer_types", None) or ())
        if is_capped or layer_types - {"full_attention"} or getattr(config, "sliding_window", None):
            reason = "it has capped scores" if is_capped else "it has layers other than full attention"
        else:
            try:
                reason = _difference(model, config.vocab_size)
            except Exception as error:  # any model's own code runs here: a failure only rules out shared prompts
                reason = sentence(error).rstrip(".")
    if reason is not None:
        logger.warning(
            "Responses of %s cannot share their prompt's KV cache (%s): each gets a copy, which costs memory and time.",
            type(model).__name__,
            reason,
        )
    return reason is None


def _difference(model: PreTrainedModel, vocab_size: int) -> str | None:
    """Return a sentence if shared prompts change the logits of a few tokens by more than rounding, else None."""
    ids = torch.linspace(0, vocab_size - 1, 18).long()
    prompts = [tuple(ids[:6].tolist()), tuple(ids[6:9].tolist())]
    groups, tokens = torch.tensor([0, 0, 1], device=model.device), ids[9:].view(3, 3).to(model.device)
    caches = [kind(model, prompts, groups, pad_token_id=0) for kind in (SharedPrompts, RepeatedPrompts)]
    gaps = []
    for column in tokens.unbind(1):
        actual, expected = (cache.next_logits(model, column).float() for cache in caches)
        gaps.append(float((actual - expected).abs().max() / expected.abs().max()))
    close = 1e-4 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    is_close = all(gap <= close for gap in gaps)  # false if a gap is NaN
    return None if is_close else f"sharing them changes its logits by {max(gaps):.1g} of their size"


@dataclass
class Batch:
    """Groups to be decoded together, by ticket: their sampling is equal but for ``max_tokens``, which is 0 here."""

    sampling: Sampling
    num_rows: int = 0
    flights: dict[int, Flight] = field(default_factory=dict)


class GroupDecoder:
    """Decodes a batch of groups together; each :meth:`step` samples one token for every row that has not ended.

    Worked example: prompts ``[7]`` and ``[8, 9]`` with two samples each make four rows. The first input of a row is the
    prompt's last token; the tokens before that are computed once per prompt::

        prefill [] and [8]     rows 0, 1: samples 0, 1 of group 0, first input 7
                               rows 2, 3: samples 0, 1 of group 1, first input 9

    Args:
        batch: the groups; methods call a group by its index in the list :attr:`tickets`, from 0.
        eos_token_ids: int64 ``[E]``, the tokens that end a response, as do the strings ``stops``.
        pad_token_id: fills the unused cells of the prefill; no output depends on it.
        shared: whether the rows of a prompt share its keys and values; only if ``use_decode_attention`` returned True.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        eos_token_ids: torch.Tensor,
        pad_token_id: int,
        *,
        shared: bool,
        stops: StopStrings | None = None,
    ):
        device, sampling = model.device, batch.sampling
        self.tickets = list(batch.flights)
        requests = [flight.request for flight in batch.flights.values()]
        rooms = [flight.room for flight in batch.flights.values()]
        counts = torch.tensor([request.num_samples for request in requests])
        group_of_row = torch.repeat_interleave(torch.arange(len(requests)), counts)
        # consecutive groups of one prompt share it: a group may be requested sample by sample
        runs = [(prompt, len(list(equal))) for prompt, equal in itertools.groupby(r.prompt_ids for r in requests)]
        prompt_of_group = [index for index, (_, count) in enumerate(runs) for _ in range(count)]
        seeds = [
            sample_seed(request.seed, request.first_sample + i)
            for request in requests
            for i in range(request.num_samples)
        ]
        num_rows, horizon = len(seeds), max(rooms)
        self._model = model
        self._requests = requests
        self._stops = stops
        prompt_of_row = torch.tensor(prompt_of_group)[group_of_row].to(device)
        make_cache: type[GroupCache] = SharedPrompts if shared else RepeatedPrompts
        with torch.inference_mode():
            self._cache = make_cache(model, [prompt for prompt, _ in runs], prompt_of_row, pad_token_id=pad_token_id)
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids[: 0 if sampling.ignore_eos else None].to(device)
        self._group_of_row: list[int] = group_of_row.tolist()
        self._first_row = (counts.cumsum(0) - counts).tolist()
        self._open_samples: list[int] = counts.tolist()  # of each group; 0 once it has ended or was dropped
        self.num_open = num_rows  # samples that have not ended, of all groups
        self._versions: list[int] = []
        self._rooms = torch.tensor(rooms)[group_of_row].to(device)
        self._uniforms = uniforms(torch.tensor(seeds), horizon).to(device)
        # Results, one row per sample; `_rows` maps the batch's rows to them.
        self._tokens = torch.zeros((num_rows, horizon), dtype=torch.int64, device=device)
        self._log_probs = torch.zeros((num_rows, horizon), dtype=torch.float32, device=device)
        self._supports: list[list[torch.Tensor]] = [[] for _ in seeds]  # int32 ids of each token's set, if truncated
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._truncated = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self.num_rows = num_rows  # in the batch, including rows that ended since it was last compacted
        last_tokens = torch.tensor([request.prompt_ids[-1] for request in requests])
        self._last_tokens = last_tokens[group_of_row].to(device)
        self._living = torch.ones(num_rows, dtype=torch.bool, device=device)

    def drop(self, group: int) -> None:
        """Stop sampling the group with the index ``group``; its rows end at once, and it has no output."""
        self.num_open -= self._open_samples[group]
        self._open_samples[group] = 0
        dropped = torch.tensor([row for row, group_of_row in enumerate(self._group_of_row) if group_of_row == group])
        self._living = self._living & ~torch.isin(self._rows, dropped.to(self._rows.device))

    @torch.inference_mode()
    def step(self, version: int) -> list[int]:
        """Sample a token, labelled ``version``, of every unfinished row; return the indices of newly ended groups."""
        t = len(self._versions)
        if self.num_open < _SHRINK_BELOW * self.num_rows:  # counted here: no wait for the device
            keep = self._living.nonzero().squeeze(1)
            self._cache.keep(keep)
            self._last_tokens, self._rows, self._living = self._last_tokens[keep], self._rows[keep], self._living[keep]
            self.num_rows = len(keep)
        logits = self._cache.next_logits(self._model, self._last_tokens)
        probs = sampled_probs(logits, self._sampling)
        if self._sampling.temperature > 0:
            tokens = draw(probs, self._uniforms[self._rows, t])
        else:
            tokens = logits.argmax(-1)
        self._tokens[self._rows, t] = tokens
        self._log_probs[self._rows, t] = probs.gather(1, tokens[:, None]).squeeze(1).log()
        if self._sampling.is_truncated:
            ids = (in_support := probs > 0).nonzero()[:, 1].to(torch.int32).cpu()
            for row, support in zip(self._rows.tolist(), ids.split(in_support.sum(1).tolist())):
                self._supports[row].append(support)
        self._versions.append(version)
        self._last_tokens = tokens
        length = t + 1  # of the rows that end with this token
        at_eos = torch.isin(tokens, self._eos_token_ids)
        if self._stops is not None:
            tails = self._tokens[self._rows, max(0, length - self._stops.window) : length].tolist()
            at_eos |= torch.tensor([self._stops.is_complete(tail) for tail in tails], device=at_eos.device)
        stops = self._living & (at_eos | (self._rooms[self._rows] == length))
        rows = self._rows[stops]
        if not len(rows):
            return []
        self._lengths[rows] = length
        self._truncated[rows] = ~at_eos[stops]
        self._living = self._living & ~stops
        groups = [self._group_of_row[row] for row in rows.tolist()]
        self.num_open -= len(groups)
        for group in groups:
            self._open_samples[group] -= 1
        return [group for group in dict.fromkeys(groups) if self._open_samples[group] == 0]

    def output(self, group: int) -> GroupOutput:
        """Return the output, on the CPU, of the group with the index ``group``, which has ended."""
        first = self._first_row[group]
        rows = slice(first, first + self._requests[group].num_samples)
        lengths, truncated = self._lengths[rows].tolist(), self._truncated[rows].tolist()
        tokens, log_probs = (column[rows, : max(lengths)].cpu() for column in (self._tokens, self._log_probs))
        versions = torch.tensor(self._versions)
        # Clones: a sample must neither pin the whole batch nor be an inference tensor, which autograd refuses.
        samples = []
        for i, length in enumerate(lengths):
            sets = self._supports[first + i][:length]
            counts = torch.tensor([*map(len, sets)], dtype=torch.int32)
            ids, of_ids, of_weights = (column[:length].clone() for column in (tokens[i], log_probs[i], versions))
            support = SamplingSupport(torch.cat(sets), counts) if sets else None
            samples.append(Sample(ids, of_ids, of_weights, truncated[i], support=support))
        return GroupOutput(self._requests[group].group_id, tuple(samples))


class TransformersEngine(SteppingEngine):
    """Rollout engine that samples with a transformers model: its own copy of ``model``, unless ``copy_model`` is False.

    Consecutive groups of equal sampling that were submitted together are decoded together, up to ``max_rows`` samples
    at a time. Later groups wait (FIFO) until they fit and at least as many samples wait as are being decoded. A prompt
    is computed once for consecutive groups that have it, and stored once if the model's attention supports that. Rows
    do not depend on each other, up to rounding.

    Weights may be pushed from another thread or between two steps: every row samples its next token with the new
    weights and records their version; cached keys and values of earlier tokens are not recomputed.

    Args:
        model: a causal language model without adapters.
        pad_token_id: fills unused cells; no output depends on it.
        max_model_len: context in tokens; None: the model's. At most its :func:`rotary_limit`.
        max_rows: most samples decoded at once; a request of more is decoded whole, alone.
        device, dtype: those of the engine's copy; None: the model's. Buffers keep their dtype.
        copy_model: False: use ``model`` itself without a copy; only if nothing else uses it.

    UserError if the model keeps a state other than keys and values, or its config has no context length.
    """

    name = "transformers"

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Collection[int],
        pad_token_id: int,
        max_model_len: int | None = None,
        max_rows: int = 256,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        copy_model: bool = True,
    ):
        super().__init__()
        require_cache(model.config)
        text = model.config.get_text_config()
        context = max_model_len or getattr(text, "max_position_embeddings", None)
        if not context:
            raise UserError("The model's config has no max_position_embeddings; set inference_model.max_model_len.")
        self.max_model_len = min(int(context), rotary_limit(text) or int(context))
        self._max_rows = max_rows
        self._eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64)
        self._pad_token_id = pad_token_id
        self._waiting: deque[Batch] = deque()
        self._running: list[GroupDecoder] = []
        engine_model: Any = copy.deepcopy(model) if copy_model else model
        buffers = dict(engine_model.named_buffers())
        self._model: Any = engine_model.to(device=device, dtype=dtype)
        engine_model.eval().requires_grad_(False)
        self.device = engine_model.device
        for name, buffer in buffers.items():  # rounded rotary frequencies would shift far positions
            owner, _, attribute = name.rpartition(".")
            setattr(engine_model.get_submodule(owner), attribute, buffer.to(self.device))
        self._can_sleep = self.device.type != "cpu"
        self.weight_dtype = matrix_dtype(engine_model.state_dict().values())
        self._tied = tied_names(engine_model)
        self._shares_prompts = use_decode_attention(engine_model)

    def _start(self, flights: Mapping[int, Flight]) -> None:
        batch = None  # consecutive groups with equal sampling, of at most max_rows samples together
        for ticket, flight in flights.items():
            sampling, num_rows = replace(flight.sampling, max_tokens=0), flight.request.num_samples
            if batch is None or batch.sampling != sampling or batch.num_rows + num_rows > self._max_rows:
                self._waiting.append(batch := Batch(sampling))
            batch.flights[ticket] = flight
            batch.num_rows += num_rows

    def _step(self) -> Iterable[tuple[int, GroupOutput]]:
        # A forward pass costs much and a row in it little, so later turns of dialogs should share forward passes:
        # waiting batches, as many as fit, start once they have at least as many rows as the running ones.
        num_rows = sum(decoder.num_rows for decoder in self._running)
        while self._waiting and num_rows <= sum(batch.num_rows for batch in self._waiting):
            if self._running and num_rows + self._waiting[0].num_rows > self._max_rows:
                break
            batch = self._waiting.popleft()
            num_rows += batch.num_rows
            while self._waiting and self._waiting[0].sampling == batch.sampling:
                if num_rows + self._waiting[0].num_rows > self._max_rows:
                    break
                following = self._waiting.popleft()
                batch.flights |= following.flights
                batch.num_rows += following.num_rows
                num_rows += following.num_rows
            ends, pad, shared = self._eos_token_ids, self._pad_token_id, self._shares_prompts
            self._running.append(GroupDecoder(self._model, batch, ends, pad, shared=shared, stops=self.stops))
        ended = []
        for decoder in self._running:
            for group in decoder.step(self.version):
                ended.append((decoder.tickets[group], decoder.output(group)))
        self._running = [decoder for decoder in self._running if decoder.num_open]
        return ended

    def may_start(self, num_rows: int) -> bool:
        """Return whether the next step starts a batch if ``num_rows`` more rows come; ``max_rows`` is not checked."""
        submitted = sum(flight.request.num_samples for flight in list(self._submitted))
        running = sum(decoder.num_rows for decoder in self._running)
        return running <= num_rows + submitted + sum(batch.num_rows for batch in self._waiting)

    def _drop(self, flights: Mapping[int, Flight]) -> None:
        for batch in self._waiting:
            for ticket in flights.keys() & batch.flights:
                batch.num_rows -= batch.flights.pop(ticket).request.num_samples
        self._waiting = deque(batch for batch in self._waiting if batch.flights)
        for decoder in self._running:
            for group, ticket in enumerate(decoder.tickets):
                if ticket in flights:
                    decoder.drop(group)
        self._running = [decoder for decoder in self._running if decoder.num_open]

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy every weight by name (an adapter is merged into :attr:`base`); tied names after the first are optional.

        ValueError, with nothing copied, if names, shapes or tied weights do not fit, or ``base`` is missing;
        RuntimeError if the engine is closed.
        """
        model = self._model  # before the check: another thread may close this at any time
        self._require_open()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        pushed = checked_weights(self.whole(weights), shapes, self._tied, tied_required=False)
        with self._between_steps():
            self._require_open()
            tensors = model.state_dict()  # sleep and wake replace them
            for name, tensor in pushed.items():
                if name not in self._tied:
                    tensors[name].copy_(tensor)
            self.version = version

    def weight_sums(self) -> dict[str, dict[str, Checksum]]:
        """Return ``{"transformers": {weight's name: checksum}}`` of every weight; RuntimeError if closed."""
        with self._between_steps():
            self._require_open()
            return {self.name: {name: Checksum.of(tensor) for name, tensor in self._model.state_dict().items()}}

    def _free_memory(self) -> None:
        self._model.cpu()
        torch.cuda.empty_cache()

    def _restore_memory(self) -> None:
        self._model.to(self.device)

    def _release(self) -> None:
        self._model = None


def transformers_engine(options: EngineOptions) -> TransformersEngine:
    """Build the engine from resolved options: copy ``model`` or load ``model_path``; UserError: unusable model."""
    from sota_grpo.policy.load import load_model

    model = options.model or load_model(
        options.model_path,
        dtype=options.dtype,  # type: ignore[arg-type]
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        load_kwargs=options.load_kwargs,
    )
    return TransformersEngine(
        model,
        eos_token_ids=options.eos_token_ids,
        pad_token_id=options.pad_token_id,
        max_model_len=options.max_model_len,
        max_rows=options.max_rows,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        copy_model=options.model is not None,
    )
