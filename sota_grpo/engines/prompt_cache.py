"""Keys and values of groups that are decoded together: a prompt is computed once, and kept once where that works."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

_PREFILL_TOKENS = 2048  # padded tokens of one pass over prompts: bounds its memory, and the padding of ragged ones


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
        prompts: token ids of each group's prompt, at least one.
        group_of_row: int64 ``[rows]``, ascending.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], group_of_row: torch.Tensor):
        super().__init__(layer_class_to_replicate=GrowingLayer)
        self.device = group_of_row.device
        self.lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        self.group_of_row = group_of_row
        self._positions = self.lengths[group_of_row].unsqueeze(1)

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

    def _attention(self) -> dict[str, Any]:
        """Arguments of the model's call that say what the next token sees."""
        raise NotImplementedError


class RepeatedPrompts(GroupCache):
    """Every row owns a copy of its prompt, and masks of transformers' own say what it sees: right for any attention.

    Worked example: the prompts ``[7]`` and ``[8, 9]`` are one prefill of ``[pad]`` and ``[8]``, left-padded, so that
    all rows stand at the same column when their next token comes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        group_of_row: torch.Tensor,
        *,
        pad_token_id: int,
    ):
        super().__init__(prompts, group_of_row)
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
            self.reorder_cache(group_of_row)  # type: ignore[arg-type]
        self._mask = mask[group_of_row]

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

    The model's attention is :func:`~sota_grpo.engines.decode_attention.decode_attention`, which is handed this object.

    Attributes:
        prefilling: True while the model runs over prompts.
        told_windows: number of calls, of the last pass over prompts, that came with a sliding window.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        group_of_row: torch.Tensor,
        *,
        pad_token_id: int,
    ):
        super().__init__(prompts, group_of_row)
        self._prompts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by layer
        self._biases: dict[tuple[int, int | None], torch.Tensor | None] = {}
        self._part: torch.Tensor | None = None  # the groups whose prompts the model runs over
        self.told_windows = 0
        self._arrange()
        self._prefill(model, prompts, pad_token_id)

    @property
    def prefilling(self) -> bool:
        return self._part is not None

    def _prefill(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_token_id: int) -> None:
        """Run the decoder over the prompts without their last tokens, those of similar length together."""
        order = sorted(range(len(prompts)), key=lambda group: -len(prompts[group]))
        while order and (width := len(prompts[order[0]]) - 1):
            count = max(1, _PREFILL_TOKENS // width)
            part, order = order[:count], order[count:]
            ids = [torch.tensor(prompts[group][:-1], dtype=torch.int64) for group in part]
            self._part, self.told_windows = torch.tensor(part, device=self.device), 0
            model.get_decoder()(
                input_ids=pad_sequence(ids, batch_first=True, padding_value=pad_token_id).to(self.device),
                position_ids=torch.arange(width, device=self.device).unsqueeze(0),
                past_key_values=self,
                use_cache=True,
                **self._attention(),
            )
        self._part = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the prompts' keys and values, or append a token's to those of the rows, which are returned."""
        if self._part is None:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx not in self._prompts:
            # Zeros: the padding is read with weight 0, so it must be finite.
            room = (len(self.lengths), key_states.shape[1], self._longest)
            self._prompts[layer_idx] = tuple(  # type: ignore[assignment]
                states.new_zeros((*room, states.shape[3])) for states in (key_states, value_states)
            )
        for kept, states in zip(self._prompts[layer_idx], (key_states, value_states)):
            kept[self._part, :, : states.shape[2]] = states
        return key_states, value_states

    def prompt(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values ``[groups, heads, P, width]``; None where every prompt is a single token."""
        return self._prompts.get(layer_idx)

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

    def collect(self, found: torch.Tensor, n: int) -> torch.Tensor:
        """The inverse of :meth:`spread`: ``[groups * heads, siblings * n, width]`` to ``[rows, heads, n, width]``."""
        groups, siblings = len(self.lengths), self._siblings
        found = found.view(groups, -1, siblings, n, found.shape[-1]).transpose(1, 2)
        found = found.reshape(groups * siblings, *found.shape[2:])
        return found if self._slots is None else found[self._slots]

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        groups, self.group_of_row = self.group_of_row.unique(return_inverse=True)
        if len(groups) < len(self.lengths):
            self.lengths = self.lengths[groups]
            longest = int(self.lengths.max())
            if not longest:  # prompts of one token, which is the first that is decoded: nothing to read
                self._prompts.clear()
            for layer, both in self._prompts.items():
                self._prompts[layer] = tuple(states[groups, :, :longest] for states in both)  # type: ignore[assignment]
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
