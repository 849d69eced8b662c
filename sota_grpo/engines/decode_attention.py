"""KV caches and attention for decoding groups, whose rows can share one copy of their prompt's keys and values.

The attention of one new token per row is computed over the shared prompt and over the tokens that the row has sampled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sota_grpo.policy.shared_prompt import SHARED_ATTENTION, UNKNOWN
from sota_grpo.text import sentence

logger = logging.getLogger(__name__)
DECODE_ATTENTION = "sota_grpo_decode"
PREFILL_TOKENS = 2048  # padded tokens of one prefill pass: bounds its memory and the padding


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
        """Drop all rows except those with the indices ``rows`` (int64, ascending)."""
        self.reorder_cache(rows)  # type: ignore[arg-type]
        self._positions, self.group_of_row = self._positions[rows], self.group_of_row[rows]

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Run the decoder over the prompts without their last tokens."""
        raise NotImplementedError

    def _attention(self) -> dict[str, Any]:
        """Return the arguments of the model's call that define which keys the next token attends to."""
        raise NotImplementedError


class RepeatedPrompts(GroupCache):
    """KV cache with a copy of the prompt for every row and transformers' own masks: correct for any attention.

    Worked example: for the prompts ``[7]`` and ``[8, 9]`` the prefill has the rows ``[pad]`` and ``[8]``, padded on the
    left, so that the next token of every row is in the same column.
    """

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        width = max(len(prompt) for prompt in prompts) - 1
        mask = torch.arange(width, device=self.device) >= (width - self.lengths).unsqueeze(1)
        if width:
            ids = [[pad_token_id] * (width + 1 - len(prompt)) + list(prompt[:-1]) for prompt in prompts]
            model.get_decoder()(
                input_ids=torch.tensor(ids, device=self.device),
                attention_mask=mask.long(),
                position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
                past_key_values=self,
                use_cache=True,
            )
            self.reorder_cache(self.group_of_row)  # type: ignore[arg-type]
        self._mask = mask[self.group_of_row]

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        self._mask = self._mask[rows]

    def _attention(self) -> dict[str, Any]:
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)
        return {"attention_mask": self._mask.long()}


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
        prefilled: int64 indices of the groups whose prompts the model is running over; None outside the prefill.
    """

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Run the decoder over the prompts, batched by similar length."""
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._biases: dict[int, torch.Tensor | None] = {}  # by heads
        self.prefilled: torch.Tensor | None = None
        self._arrange()
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the prefill store and return the states; later append them and return all that were appended."""
        if self.prefilled is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.held:
            # Zeros: the padding is read with weight 0, so it must be finite.
            room = (len(self.lengths), key_states.shape[1], self._longest)
            self.held[layer_idx] = tuple(  # type: ignore[assignment]
                states.new_zeros((*room, states.shape[3])) for states in (key_states, value_states)
            )
        for cache, states in zip(self.held[layer_idx], (key_states, value_states)):
            cache[self.prefilled, :, : states.shape[2]] = states
        return key_states, value_states

    def bias(self, keys: torch.Tensor) -> torch.Tensor | None:
        """Return the mask ``[groups * heads, 1, P]`` to add for padded prompts' ``keys``; None without padding."""
        heads = keys.shape[1]
        if heads not in self._biases:
            hidden = torch.arange(self._longest, device=self.device) >= self.lengths.unsqueeze(1)
            dtype = torch.promote_types(keys.dtype, torch.float32)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            bias = bias.masked_fill(hidden, torch.finfo(torch.float32).min).repeat_interleave(heads, 0).unsqueeze(1)
            self._biases[heads] = bias if bool(hidden.any()) else None
        return self._biases[heads]

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

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        groups, self.group_of_row = self.group_of_row.unique(return_inverse=True)
        if len(groups) < len(self.lengths):
            self.lengths = self.lengths[groups]
            longest = int(self.lengths.max())
            if not longest:  # every prompt has one token, which is in the rows: no keys to read
                self.held.clear()
            for layer, both in self.held.items():
                self.held[layer] = tuple(states[groups, :, :longest] for states in both)  # type: ignore[assignment]
        self._arrange()

    def _arrange(self) -> None:
        """Compute each row's slot in the batch of :meth:`spread`."""
        counts = torch.bincount(self.group_of_row, minlength=len(self.lengths))
        self._longest, self._siblings = int(self.lengths.max()), int(counts.max())
        first = counts.cumsum(0) - counts
        row = torch.arange(len(self.group_of_row), device=self.device)
        slots = self.group_of_row * self._siblings + row - first[self.group_of_row]
        is_full = len(slots) == len(self.lengths) * self._siblings
        self._slots = None if is_full else slots
        self._biases.clear()

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
    over_both = prompts is not None and prompts.prefilled is None
    # SDPA would copy keys and values for every query head that shares them
    is_grouped = query.shape[2] == 1 and query.shape[1] != key.shape[1] and kwargs.get("position_bias") is None
    if over_both or is_grouped:
        folded = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
        if over_both:
            out = _over_both(folded, key, value, prompts, module.layer_idx, scale)  # type: ignore[arg-type]
        else:
            out = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scale)
        return out.reshape(*query.shape[:3], -1).transpose(1, 2), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


AttentionInterface.register(DECODE_ATTENTION, decode_attention)

AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


def _over_both(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prompts: SharedPrompts, layer: int, scale: float
) -> torch.Tensor:
    """Return each row's attention over prompt and later tokens, ``[rows, key heads, n, width]`` like ``query``."""
    rows, heads, n, _ = query.shape
    out, response_lse = attend(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), None, scale)
    out = out.view(rows, heads, n, -1)
    if (held := prompts.held.get(layer)) is not None:
        bias = prompts.bias(held[0])
        of_prompt, lse = attend(prompts.spread(query), held[0].flatten(0, 1), held[1].flatten(0, 1), bias, scale)
        weight = torch.sigmoid(response_lse.view(rows, heads, n, 1) - prompts.collect(lse, n))
        out = torch.lerp(prompts.collect(of_prompt, n), out, weight)
    return out.to(value.dtype)


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
    if bias is None or query.dtype.itemsize < 4:
        scores = _product(query, key.mT) * scale
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
