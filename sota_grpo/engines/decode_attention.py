"""Decoding groups whose rows share their prompts: a prompt is computed once, and its keys and values are kept once.

The caches of the rows, and the attention of one new token per row: over its prompt, and over what its row sampled.
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

from sota_grpo.policy.causal import LAYER_TYPES
from sota_grpo.policy.shared_prompt import SHARED_ATTENTION, UNKNOWN

logger = logging.getLogger(__name__)
DECODE_ATTENTION = "sota_grpo_decode"
PREFILL_TOKENS = 2048  # padded tokens of one pass over prompts: bounds its memory, and the padding of ragged ones


class GrowingLayer(DynamicLayer):
    """One layer's keys and values ``[rows, heads, columns, width]``, written in place into spare columns.

    transformers' own dynamic layer copies the whole cache at every token; this one copies when the spare columns are
    used up, and then takes half as many again (at least 64), so the copies per token stay bounded.
    """

    keys: torch.Tensor  # type: ignore[assignment]
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self, **_: Any):
        super().__init__()
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys = key_states[:, :, :0]
        self.values = value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self._length + key_states.shape[2]
        if end > self.keys.shape[2]:
            columns = end + max(64, end // 2)
            self.keys = self._grown(self.keys, key_states, columns)
            self.values = self._grown(self.values, value_states, columns)
        self.keys[:, :, self._length : end] = key_states
        self.values[:, :, self._length : end] = value_states
        self._length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _grown(self, old: torch.Tensor, like: torch.Tensor, columns: int) -> torch.Tensor:
        new = like.new_empty((like.shape[0], like.shape[1], columns, like.shape[3]))
        new[:, :, : self._length] = old[:, :, : self._length]
        return new

    def get_seq_length(self) -> int:
        return self._length


class GroupCache(Cache):
    """What the rows of several groups have seen so far; :meth:`next_logits` shows each its next token.

    A prompt's last token is not part of the prefill: it is the first token that every row is shown. So the decoder
    alone runs over the prompts, and all rows' logits come from the same kind of call.

    Args:
        model: runs over the prompts.
        prompts: token ids of each prompt, at least one; here a group is the rows that share one.
        group_of_row: int64 ``[rows]``, ascending.
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
        """Logits ``[rows, V]`` of what follows ``tokens`` ``[rows]``, which are appended to the rows."""
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
        """Forget all rows but these (int64, ascending)."""
        self.reorder_cache(rows)  # type: ignore[arg-type]
        self._positions, self.group_of_row = self._positions[rows], self.group_of_row[rows]

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Run the decoder over the prompts without their last tokens."""
        raise NotImplementedError

    def _attention(self) -> dict[str, Any]:
        """Arguments of the model's call that say what the next token sees."""
        raise NotImplementedError


class RepeatedPrompts(GroupCache):
    """Every row owns a copy of its prompt, and masks of transformers' own say what it sees: right for any attention.

    Worked example: the prompts ``[7]`` and ``[8, 9]`` are one prefill of ``[pad]`` and ``[8]``, left-padded, so that
    all rows stand at the same column when their next token comes.
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
    """A prompt's keys and values are there once, however many rows of its group read them.

    The prompts are padded on the right, ``[groups, heads, P, width]``; what the rows sampled themselves is as long in
    every row and needs neither padding nor mask. To read a prompt, the queries of its group become one matrix. Worked
    example with one head: the rows ``a0 a1 a2`` of one group and ``b0`` of another, whose siblings have ended, are
    spread over a batch of two, and what comes back is collected::

        rows  a0 a1 a2 b0   --spread-->   [[a0, a1, a2], [b0, -, -]]   --collect-->   a0 a1 a2 b0

    The model's attention is :func:`decode_attention`, which is handed this object.

    Attributes:
        held: keys and values ``[groups, heads, P, width]`` by layer; empty where every prompt is a single token.
        part: the groups over whose prompts the model runs just now; None between such passes.
        told_windows: number of calls, of the last pass over prompts, that came with a sliding window.
    """

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Those of similar length together."""
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._biases: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self.part: torch.Tensor | None = None
        self.told_windows = 0
        self._arrange()
        order = sorted(range(len(prompts)), key=lambda group: -len(prompts[group]))
        while order and (width := len(prompts[order[0]]) - 1):
            count = max(1, PREFILL_TOKENS // width)
            batch, order = order[:count], order[count:]
            ids = [torch.tensor(prompts[group][:-1], dtype=torch.int64) for group in batch]
            self.part, self.told_windows = torch.tensor(batch, device=self.device), 0
            model.get_decoder()(
                input_ids=pad_sequence(ids, batch_first=True, padding_value=pad_token_id).to(self.device),
                position_ids=torch.arange(width, device=self.device).unsqueeze(0),
                past_key_values=self,
                use_cache=True,
                **self._attention(),
            )
        self.part = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the prompts' keys and values, or append a token's to those of the rows, which are returned."""
        if self.part is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self.held:
            # Zeros: the padding is read with weight 0, so it must be finite.
            room = (len(self.lengths), key_states.shape[1], self._longest)
            self.held[layer_idx] = tuple(  # type: ignore[assignment]
                states.new_zeros((*room, states.shape[3])) for states in (key_states, value_states)
            )
        for kept, states in zip(self.held[layer_idx], (key_states, value_states)):
            kept[self.part, :, : states.shape[2]] = states
        return key_states, value_states

    def bias(self, keys: torch.Tensor, window: int | None) -> torch.Tensor | None:
        """What is added to the scores of the prompts' ``keys``: ``[groups * heads, 1, P]``; None where that is 0.

        Args:
            keys: ``[groups, heads, P, width]``.
            window: tokens that a token sees, itself included; None sees all.
        """
        heads, own = keys.shape[1], self.get_seq_length()
        if window is not None and window >= self._longest + own:
            window = None
        if (heads, window) not in self._biases:
            column = torch.arange(self._longest, device=self.device)
            hidden = column >= self.lengths.unsqueeze(1)
            if window is not None:  # the token stands at position length + own - 1
                hidden = hidden | (column <= (self.lengths + own - 1 - window).unsqueeze(1))
            dtype = torch.promote_types(keys.dtype, torch.float32)
            bias = torch.zeros(hidden.shape, dtype=dtype, device=self.device)
            bias = bias.masked_fill(hidden, torch.finfo(torch.float32).min).repeat_interleave(heads, 0).unsqueeze(1)
            self._biases[heads, window] = bias if bool(hidden.any()) else None
        return self._biases[heads, window]

    def spread(self, query: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, n, width]`` to ``[groups * heads, siblings * n, width]``, zeros where a sibling has ended."""
        _, heads, n, width = query.shape
        groups, siblings = len(self.lengths), self._siblings
        if self._slots is not None:
            query = query.new_zeros((groups * siblings, heads, n, width)).index_copy_(0, self._slots, query)
        query = query.reshape(groups, siblings, heads, n, width).transpose(1, 2)
        return query.reshape(groups * heads, siblings * n, width)

    def collect(self, out: torch.Tensor, n: int) -> torch.Tensor:
        """The inverse of :meth:`spread`: ``[groups * heads, siblings * n, width]`` to ``[rows, heads, n, width]``."""
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
            if not longest:  # prompts of one token, which is the first that is decoded: nothing to read
                self.held.clear()
            for layer, both in self.held.items():
                self.held[layer] = tuple(states[groups, :, :longest] for states in both)  # type: ignore[assignment]
        self._arrange()

    def _arrange(self) -> None:
        """Where each row stands among its siblings, once it is known which rows there are."""
        counts = torch.bincount(self.group_of_row, minlength=len(self.lengths))
        self._longest, self._siblings = int(self.lengths.max()), int(counts.max())
        first = counts.cumsum(0) - counts
        row = torch.arange(len(self.group_of_row), device=self.device)
        slots = self.group_of_row * self._siblings + row - first[self.group_of_row]
        is_full = len(slots) == len(self.lengths) * self._siblings
        self._slots = None if is_full else slots
        self._biases.clear()

    def _attention(self) -> dict[str, Any]:
        if any(window is not None for _, window in self._biases):
            self._biases.clear()  # what a window hides moves on with every token
        # transformers makes no mask where it is given one of four dimensions
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
        attention_mask: not read with ``prompts``.
        sliding_window: tokens that a token sees, itself included.
        softcap: scores become ``softcap * tanh(score / softcap)``.

    Returns:
        ``[rows, T, heads, width]`` and None, as transformers' attention interface asks.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if prompts is not None and (unknown := [name for name in UNKNOWN if kwargs.get(name) is not None]):
        raise NotImplementedError(f"prompts cannot be shared by attention with {', '.join(unknown)}")
    if prompts is not None and prompts.part is None:
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
    """The inverse of :func:`_folded` for what its queries gave, ``[rows, T, heads, width]``."""
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
    if (held := prompts.held.get(layer)) is not None:
        bias = prompts.bias(held[0], window)
        spread = prompts.spread(folded)
        of_prompt, lse = attend(spread, held[0].flatten(0, 1), held[1].flatten(0, 1), bias, scale, softcap)
        weight = torch.sigmoid(own_lse.view(rows, heads, n, 1) - prompts.collect(lse, n))
        out = torch.lerp(prompts.collect(of_prompt, n), out, weight)
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
        actual, expected = (cache.next_logits(model, column).float() for cache in (shared, repeated))
        gaps.append(float((actual - expected).abs().max() / expected.abs().max()))
    close = 1e-4 if next(model.parameters()).dtype in (torch.float32, torch.float64) else 5e-2
    is_close = all(gap <= close for gap in gaps)  # false where one is not a number
    return None if is_close else f"sharing them changes its logits by {max(gaps):.1g} of their size"
