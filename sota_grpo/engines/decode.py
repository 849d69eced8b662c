"""Batched decoding of groups with a key/value cache: every prompt is computed once, finished rows leave the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sota_grpo.engines.sampling import draw, sampled_log_probs, uniforms
from sota_grpo.records import GroupOutput, GroupRequest, Sample, Sampling, sample_seed

DECODE_ATTENTION = "sota_grpo_decode"
_SHRINK_BELOW = 0.75  # the batch is compacted when less than this share of its rows is still alive


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


def decode_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one query token per row, with the query heads that share a key head read as query positions.

    A masked call of transformers' SDPA repeats keys and values for every query head; at 400 cached tokens, 14 query
    and 2 key heads that copy is 20 times as slow as this on CPU. Everything but the one-token case is passed on.

    Returns:
        ``[rows, 1, heads, width]`` and None, as transformers' attention interface asks.
    """
    rows, heads, queries, width = query.shape
    key_heads = key.shape[1]
    if queries > 1 or heads == key_heads or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    folded = query.reshape(rows, key_heads, heads // key_heads, width)
    out = torch.nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, value.shape[-1]), None


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


class GroupDecoder:
    """Samples several groups together, one token of every living row per :meth:`step`.

    Worked example: prompts ``[7]`` and ``[8, 9]``, two samples each, are one prefill of two rows, left-padded::

        [pad, 7]   ->   rows 0, 1 = samples 0, 1 of group 0
        [8,   9]   ->   rows 2, 3 = samples 0, 1 of group 1

    after which every row owns a copy of its prompt's keys and values and all rows are at the same column. A step runs
    the model first and samples then, so every token comes from the weights that the model has at its step.

    Args:
        model: the causal language model.
        requests: the groups.
        sampling: how tokens are drawn.
        rooms: most response tokens of each group.
        eos_token_ids: int64 ``[E]``, the tokens that end a response.
        pad_token_id: fills the unused cells of the prefill; no output depends on it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        rooms: Sequence[int],
        eos_token_ids: torch.Tensor,
        pad_token_id: int,
    ):
        device = model.device
        counts = torch.tensor([request.num_samples for request in requests])
        group_of_row = torch.repeat_interleave(torch.arange(len(requests)), counts)
        seeds = [sample_seed(request.seed, i) for request in requests for i in range(request.num_samples)]
        num_rows, horizon = len(seeds), max(rooms)
        self._model = model
        self._requests = list(requests)
        self._pad_token_id = pad_token_id
        self._sampling = sampling
        self._eos_token_ids = eos_token_ids.to(device)
        self._group_of_row: list[int] = group_of_row.tolist()
        self._first_row = (counts.cumsum(0) - counts).tolist()
        self._open_samples: list[int] = counts.tolist()  # of each group; 0 once it has ended or was dropped
        self._dropped: list[int] = []
        self._versions: list[int] = []
        self._rooms = torch.tensor(rooms)[group_of_row].to(device)
        self._uniforms = uniforms(torch.tensor(seeds), horizon).to(device)
        # Results, one row per sample; `_rows` maps the batch's rows to them.
        self._tokens = torch.zeros((num_rows, horizon), dtype=torch.int64, device=device)
        self._log_probs = torch.zeros((num_rows, horizon), dtype=torch.float32, device=device)
        self._lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._truncated = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self._rows = torch.arange(num_rows, device=device)
        self._living = torch.ones(num_rows, dtype=torch.bool, device=device)
        self._num_living = num_rows

    @property
    def active(self) -> bool:
        """True while a group is still being sampled."""
        return any(self._open_samples)

    @property
    def num_rows(self) -> int:
        """Rows that the batch holds now: those still sampled, and those that ended since it was last compacted."""
        return len(self._rows)

    def drop(self, group: int) -> None:
        """Stop sampling a group that nobody waits for; its rows leave the batch at the next step."""
        self._open_samples[group] = 0
        self._dropped.append(group)

    def _prefill(self) -> torch.Tensor:
        """Compute every prompt once; the logits of every row's first token."""
        requests, device, pad = self._requests, self._rows.device, self._pad_token_id
        group_of_row = torch.tensor(self._group_of_row, device=device)[self._rows]
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        width = int(lengths.max())
        ids = torch.tensor([[pad] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests])
        mask = (torch.arange(width) >= (width - lengths)[:, None]).long()
        self._cache = Cache(layer_class_to_replicate=GrowingLayer)
        logits = self._model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=(mask.cumsum(-1) - 1).clamp_min(0).to(device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self._cache.reorder_cache(group_of_row)  # type: ignore[arg-type]
        self._column = width
        self._positions = lengths.to(device)[group_of_row][:, None]
        responses = torch.ones((len(group_of_row), self._tokens.shape[1]), dtype=torch.int64, device=device)
        self._mask = torch.cat([mask.to(device)[group_of_row], responses], dim=1)
        return logits[group_of_row]

    @torch.inference_mode()
    def step(self, version: int) -> list[int]:
        """Sample one token of every living row from the weights called ``version``; return the groups that ended."""
        t = len(self._versions)
        if self._dropped:
            self._end_dropped_rows()
        logits = self._advance() if t else self._prefill()
        log_probs = sampled_log_probs(logits, self._sampling)
        if self._sampling.temperature > 0:
            tokens = draw(log_probs, self._uniforms[self._rows, t])
        else:
            tokens = log_probs.argmax(-1)
        self._tokens[self._rows, t] = tokens
        self._log_probs[self._rows, t] = log_probs.gather(1, tokens[:, None]).squeeze(1)
        self._versions.append(version)
        self._last_tokens = tokens
        return self._end_rows(tokens, t + 1)

    def _end_dropped_rows(self) -> None:
        dropped = [row for row, group in enumerate(self._group_of_row) if group in self._dropped]
        self._living = self._living & ~torch.isin(self._rows, torch.tensor(dropped, device=self._rows.device))
        self._num_living = int(self._living.sum())
        self._dropped = []

    def _end_rows(self, tokens: torch.Tensor, length: int) -> list[int]:
        at_eos = torch.isin(tokens, self._eos_token_ids)
        if self._sampling.ignore_eos:
            at_eos = torch.zeros_like(at_eos)
        stops = self._living & (at_eos | (self._rooms[self._rows] == length))
        rows = self._rows[stops]
        if not len(rows):
            return []
        self._lengths[rows] = length
        self._truncated[rows] = ~at_eos[stops]
        self._living = self._living & ~stops
        self._num_living -= len(rows)
        ended_groups = []
        for row in rows.tolist():
            group = self._group_of_row[row]
            self._open_samples[group] -= 1
            if self._open_samples[group] == 0:
                ended_groups.append(group)
        return ended_groups

    def _advance(self) -> torch.Tensor:
        """Feed the last tokens to the model, without the rows that have ended once those are many."""
        tokens = self._last_tokens
        if self._num_living < _SHRINK_BELOW * len(self._rows):
            keep = self._living.nonzero().squeeze(1)
            self._cache.reorder_cache(keep)  # type: ignore[arg-type]
            tokens, self._rows, self._living = tokens[keep], self._rows[keep], self._living[keep]
            self._mask, self._positions = self._mask[keep], self._positions[keep]
        self._column += 1
        logits = self._model(
            input_ids=tokens[:, None],
            attention_mask=self._mask[:, : self._column],
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        self._positions = self._positions + 1
        return logits

    def output(self, group: int) -> GroupOutput:
        """A group that has ended, its samples on CPU."""
        first = self._first_row[group]
        last = self._first_row[group + 1] if group + 1 < len(self._first_row) else len(self._group_of_row)
        lengths = self._lengths[first:last].tolist()
        truncated = self._truncated[first:last].tolist()
        longest = max(lengths)
        tokens = self._tokens[first:last, :longest].cpu()
        log_probs = self._log_probs[first:last, :longest].cpu()
        versions = torch.tensor(self._versions[:longest])
        # Clones: a sample must neither pin the whole batch nor be an inference tensor, which autograd refuses.
        samples = tuple(
            Sample(
                token_ids=tokens[i, :length].clone(),
                log_probs=log_probs[i, :length].clone(),
                versions=versions[:length].clone(),
                truncated=truncated[i],
            )
            for i, length in enumerate(lengths)
        )
        return GroupOutput(self._requests[group].group_id, samples)
