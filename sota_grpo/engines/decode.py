"""Batched decoding of groups with a key/value cache: every prompt is computed once, finished rows leave the batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from sota_grpo.engines.prompt_cache import GroupCache, RepeatedPrompts, SharedPrompts
from sota_grpo.engines.sampling import draw, sampled_probs, uniforms
from sota_grpo.records import GroupOutput, GroupRequest, Sample, Sampling, sample_seed

_SHRINK_BELOW = 0.9  # the batch is compacted when less than this share of its rows is still alive


class GroupDecoder:
    """Samples several groups together, one token of every living row per :meth:`step`.

    Worked example: prompts ``[7]`` and ``[8, 9]``, two samples each, are four rows, each of which is first shown the
    last token of its prompt; what stands before that is computed once per prompt::

        prefill   [], [8]      rows 0, 1 = samples 0, 1 of group 0      first tokens  7  7
                               rows 2, 3 = samples 0, 1 of group 1                    9  9

    A step runs the model first and samples then, so every token comes from the weights that the model has at its step.

    Args:
        model: the causal language model.
        requests: the groups.
        sampling: how tokens are drawn.
        rooms: most response tokens of each group.
        eos_token_ids: int64 ``[E]``, the tokens that end a response.
        pad_token_id: fills the unused cells of the prefill; no output depends on it.
        shared: keep each prompt's keys and values once per group; the model's attention is then
            :data:`~sota_grpo.engines.decode_attention.DECODE_ATTENTION`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        requests: Sequence[GroupRequest],
        sampling: Sampling,
        rooms: Sequence[int],
        eos_token_ids: torch.Tensor,
        pad_token_id: int,
        *,
        shared: bool,
    ):
        device = model.device
        counts = torch.tensor([request.num_samples for request in requests])
        group_of_row = torch.repeat_interleave(torch.arange(len(requests)), counts)
        seeds = [sample_seed(request.seed, i) for request in requests for i in range(request.num_samples)]
        num_rows, horizon = len(seeds), max(rooms)
        self._model = model
        self._requests = list(requests)
        self._cache: GroupCache | None = None
        self._make_cache = functools.partial(
            SharedPrompts if shared else RepeatedPrompts,
            prompts=[request.prompt_ids for request in requests],
            group_of_row=group_of_row.to(device),
            pad_token_id=pad_token_id,
        )
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
        last_tokens = torch.tensor([request.prompt_ids[-1] for request in requests])
        self._last_tokens = last_tokens[group_of_row].to(device)
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

    @torch.inference_mode()
    def step(self, version: int) -> list[int]:
        """Sample one token of every living row from the weights called ``version``; return the groups that ended."""
        t = len(self._versions)
        if self._dropped:
            self._end_dropped_rows()
        self._leave_ended_rows()
        if self._cache is None:
            self._cache = self._make_cache(self._model)
        logits = self._cache.next_logits(self._model, self._last_tokens)
        probs = sampled_probs(logits, self._sampling)
        if self._sampling.temperature > 0:
            tokens = draw(probs, self._uniforms[self._rows, t])
        else:
            tokens = logits.argmax(-1)
        self._tokens[self._rows, t] = tokens
        self._log_probs[self._rows, t] = probs.gather(1, tokens[:, None]).squeeze(1).log()
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

    def _leave_ended_rows(self) -> None:
        """Take the rows that have ended out of the batch, once those are many."""
        if self._cache is None or self._num_living >= _SHRINK_BELOW * len(self._rows):
            return
        keep = self._living.nonzero().squeeze(1)
        self._cache.keep(keep)
        self._last_tokens, self._rows, self._living = self._last_tokens[keep], self._rows[keep], self._living[keep]

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
