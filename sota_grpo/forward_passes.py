"""What a policy says about rows, micro-batch by micro-batch and on any number of ranks; nothing is trained here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.collate import micro_batches, pad_rows
from sota_grpo.functional.balance import balanced_shares, row_cost
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.lora import adapter_disabled
from sota_grpo.policy.sharding import Ranks
from sota_grpo.schedule import LearnerSettings


class ForwardPasses:
    """Forward passes of ``policy``; the arguments are those of :class:`sota_grpo.learner.Learner`."""

    def __init__(self, policy: CausalPolicy, settings: LearnerSettings, pad_token_id: int, ranks: Ranks | None):
        self.policy = policy
        self.settings = settings
        self.pad_token_id = pad_token_id
        self.ranks = ranks or Ranks()
        self.device = next(policy.parameters()).device

    def padded(self, rows: Sequence[TensorDictBase]) -> TensorDictBase:
        """Right-padded ``[N, T]`` batch on the learner's device."""
        return pad_rows(rows, pad_token_id=self.pad_token_id).to(self.device)

    @torch.no_grad()
    def log_probs(self, batch: TensorDictBase) -> torch.Tensor:
        """Log-probs ``[N, T]`` of a padded batch without dropout, 0 off the assistant mask."""
        training = self.policy.training
        self.policy.eval()
        with self.autocast():
            found = self.policy(batch.select(*self.policy.in_keys)).get(keys.LOG_PROBS)
        self.policy.train(training)
        return found

    def scored(self, rows: Sequence[TensorDictBase]) -> Iterator[tuple[TensorDictBase, torch.Tensor]]:
        """Each row, longest first, with its log-probs ``[T_i]`` (on the CPU) as :meth:`log_probs` gives them."""
        found = self._own_log_probs(rows)
        ordered = sorted(rows, key=lambda row: -row.get(keys.FULL_TOKENS).shape[-1])
        if self.ranks.size > 1:  # each rank fills in its rows; what the others scored is 0 there
            lengths = [row.get(keys.FULL_TOKENS).shape[-1] for row in ordered]
            flat = torch.cat([found.get(id(row), torch.zeros(length)) for row, length in zip(ordered, lengths)])
            found = {id(row): part for row, part in zip(ordered, self.ranks.sum(flat).cpu().split(lengths))}
        return ((row, found[id(row)]) for row in ordered)

    def _own_log_probs(self, rows: Sequence[TensorDictBase]) -> dict[int, torch.Tensor]:
        """Log-probs of this rank's share, by the identity of the row."""
        found: dict[int, torch.Tensor] = {}
        for micro, real in self.own_micro_batches(rows, self.settings.micro_batch_tokens):
            values = self.log_probs(self.padded(micro)).cpu()
            if real:
                found |= {
                    id(row): own[: row.get(keys.FULL_TOKENS).shape[-1]].clone() for row, own in zip(micro, values)
                }
        return found

    def base_log_probs(self, rows: Sequence[TensorDictBase]) -> list[torch.Tensor]:
        """Log-probs ``[T_i]`` of each row under the model without its adapter, in the order given.

        Raises:
            ValueError: the model has no adapter.
        """
        with adapter_disabled(self.policy.model):
            found = {id(row): values for row, values in self.scored(rows)}
        return [found[id(row)] for row in rows]

    def log_prob_gaps(self, rows: Sequence[TensorDictBase]) -> torch.Tensor:
        """Trainer's minus engine's log-prob of every sampled token, flat, in nats."""
        gaps = [(own - row.get(keys.LOG_PROBS))[row.get(keys.ASSISTANT_MASK)] for row, own in self.scored(rows)]
        return torch.cat(gaps)

    def own_micro_batches(
        self, rows: Sequence[TensorDictBase], token_budget: int
    ) -> list[tuple[list[TensorDictBase], bool]]:
        """This rank's share of ``rows``, and whether it is one.

        Ranks gather their layers together, so each must make as many passes as the busiest: one with fewer
        micro-batches goes through the shortest row again, which then counts for nothing.
        """
        if self.ranks.size == 1:
            return [(part, True) for part in micro_batches(rows, token_budget=token_budget)]
        lengths = [row.get(keys.FULL_TOKENS).shape[-1] for row in rows]
        shares = balanced_shares([row_cost(length, self.policy.hidden_size) for length in lengths], self.ranks.size)
        parts = [micro_batches([rows[index] for index in share], token_budget=token_budget) for share in shares]
        mine = [(part, True) for part in parts[self.ranks.rank]]
        shortest = rows[lengths.index(min(lengths))]
        return mine + [([shortest], False)] * (max(map(len, parts)) - len(mine))

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of every forward pass, the reference's included."""
        if self.settings.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.settings.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)
