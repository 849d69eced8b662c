"""The plan of a training step: which rank computes which rows in which micro-batches.

:class:`Planner` splits the rows of a rollout batch, by lengths and masks, into optimizer steps, ranks (:class:`Share`)
and micro-batches (:class:`Pass`). Four rows of two prompts, two ranks and one optimizer step; under the aggregation
``sequence`` the loss weight of a token of row ``i`` is ``1 / (4 |o_i|)``::

    rows     0 1 (prompt A)   2 3 (prompt B)
    rank 0   rows 0 1         one micro-batch [0, 1]
    rank 1   rows 2 3         one micro-batch [2, 3]

The driver plans for all ranks, with loss weights (they depend on the whole step), and sends each rank its rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from sota_grpo import keys
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.functional.micro_batches import Aggregation, rank_shares, row_weights
from sota_grpo.policy.optimizers import Rates
from sota_grpo.rl.collate import RowPrompt, filled, groups_by_prompt, row_prompts
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import Row, RowTable


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(Rates):
    """Settings of optimizer steps, rates included; most are options of the config (``optimizer``, ``train``).

    Args:
        clip_grad_norm: largest gradient norm; 0 disables clipping.
        schedule: ``constant``, or ``linear`` or ``cosine`` decay to 0 at optimizer step ``total_steps``; each after a
            linear rise over ``warmup_steps`` optimizer steps.
        optim_batch_size: rows per optimizer step.
        optim_groups: prompt groups per optimizer step, for groups of different sizes; None: use ``optim_batch_size``.
        micro_batch_tokens: most tokens of a forward pass, padded or packed (a prompt once); a single row may be longer.
        forward_tokens: the same for a forward pass that only computes log-probs; None: ``micro_batch_tokens``.
        aggregation, max_response_tokens, drop_truncated: see :func:`sota_grpo.rl.collate.set_loss_weights`.
        top_entropy_quantile: fraction of an optimizer step's tokens, those of highest entropy, that the surrogate is
            computed on; below 1, a forward pass before each optimizer step measures the entropies.
        entropy_target, entropy_coef_delta, entropy_coef_max: ``target``, ``delta`` and ``largest`` of
            :func:`sota_grpo.functional.divergences.adapted_entropy_coef`; target None: the coefficient is constant.
        recompute: the learner recomputes the proximal log-probs of all rows at the start of a training step.
        precision: ``fp32``, or ``bf16`` or ``fp16`` autocast; fp16 scales the loss.
    """

    total_steps: int
    optim_batch_size: int
    optim_groups: int | None = None
    optimizer: str = "adamw"
    clip_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    epochs: int = 1
    micro_batch_tokens: int = 16384
    forward_tokens: int | None = None
    aggregation: Aggregation = "sequence"
    max_response_tokens: int | None = None
    drop_truncated: bool = False
    top_entropy_quantile: float = 1.0
    entropy_target: float | None = None
    entropy_coef_delta: float = 0.005
    entropy_coef_max: float = 1.0
    recompute: bool = False
    precision: str = "fp32"

    @property
    def scoring_tokens(self) -> int:
        return self.forward_tokens or self.micro_batch_tokens


def learning_rate_factor(step: int, settings: LearnerSettings) -> float:
    """Return the learning rate at optimizer step ``step`` (0-based) as a fraction of the peak."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps))
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Pass(NamedTuple):
    """One micro-batch of an optimizer step: row indices, loss weights, and whether it has a backward pass."""

    rows: list[int]  # indices
    weights: list[float]  # loss weight per trained token of each row; all 0: filler, so that ranks run equally many
    learns: bool  # forward and backward; False: forward only, for metrics


class Share(NamedTuple):
    """One rank's rows and micro-batches of a training step; row indices refer to ``rows``."""

    rows: RowTable  # this rank's rows, in the order of the whole batch
    steps: list[list[Pass]]  # the micro-batches of each optimizer step
    scoring: list[tuple[list[int], bool]]  # micro-batches whose log-probs are computed first; False: filler
    positions: list[int]  # index of each of ``rows`` in the whole batch
    lengths: list[int]  # number of tokens of every row of the whole batch


@dataclass(frozen=True)
class Planner:
    """Splits rows into optimizer steps, ranks and micro-batches; equal fields, rows and version: equal splits."""

    settings: LearnerSettings
    seed: int  # of the learner
    num_ranks: int
    shared_prompt: bool  # a micro-batch computes a prompt once for all of its responses
    advantage_only: bool  # rows with advantage 0 have no gradient
    drops_out: bool  # adapters have dropout: the first step's log-probs are computed without it first
    shape: ModelShape  # model sizes, from which the FLOPs of a row follow

    def shares(self, table: RowTable, version: int) -> list[Share]:
        """Return each rank's rows and micro-batches of a training step; the weights' ``version`` seeds the shuffles."""
        settings = self.settings
        prompts = row_prompts(table)
        rows = table.rows(keys.GROUP_ID, keys.ADVANTAGE, keys.TRUNCATED, keys.REWARD_ERROR)
        lengths = table.lengths(keys.FULL_TOKENS)
        batches = [b for epoch in range(settings.epochs) for b in self.mini_batches(rows, prompts, epoch, version)]
        scoring: list[list[tuple[list[int], bool]]] = [[] for _ in range(self.num_ranks)]
        if settings.recompute or self.drops_out:
            chosen = range(len(rows)) if settings.recompute else batches[0]
            scoring = self.micro_batches(chosen, prompts, settings.scoring_tokens)
        steps = [self.passes(rows, batch, prompts, settings.micro_batch_tokens) for batch in batches]
        shares = []
        for step_micros, scored in zip(map(list, zip(*steps)), scoring):
            read = {index for step in step_micros for one in step for index in one.rows}
            positions = sorted(read.union(*(micro for micro, _ in scored)))
            new = {position: index for index, position in enumerate(positions)}  # index in the rank's rows
            passes = [[one._replace(rows=[new[index] for index in one.rows]) for one in step] for step in step_micros]
            micros = [([new[index] for index in micro], real) for micro, real in scored]
            shares.append(Share(table.take(positions), passes, micros, positions, lengths))
        return shares

    def mini_batches(
        self, rows: Sequence[Row], prompts: Sequence[RowPrompt], epoch: int, version: int
    ) -> Iterator[list[int]]:
        """Yield the row indices of each optimizer step of ``epoch`` (from 0); later epochs shuffle whole groups.

        The shuffle is seeded by ``version``, that of the weights, and ``epoch``.
        ``optim_batch_size`` may split a group over steps; ``optim_groups`` never does. The last step may be smaller.
        """
        order = list(range(len(rows)))
        if epoch:
            generator = torch.Generator().manual_seed(sample_seed(self.seed, version, epoch))
            groups = groups_by_prompt(prompts, order)
            mixed = torch.randperm(len(groups), generator=generator).tolist()
            order = [index for group in mixed for index in groups[group].rows]
        pieces, size = [[index] for index in order], self.settings.optim_batch_size
        if self.settings.optim_groups is not None:
            groups_of: dict[int, list[int]] = {}
            for index in order:
                groups_of.setdefault(int(rows[index][keys.GROUP_ID]), []).append(index)
            pieces, size = list(groups_of.values()), self.settings.optim_groups
        for start in range(0, len(pieces), size):
            yield [index for piece in pieces[start : start + size] for index in piece]

    def passes(
        self,
        rows: Sequence[Row],
        batch: Sequence[int],
        prompts: Sequence[RowPrompt],
        token_budget: int,
        *,
        keep_truncated: bool = False,
    ) -> list[list[Pass]]:
        """Return each rank's micro-batches for rows ``batch`` of one optimizer step; those with a backward pass first.

        Rows without trained tokens are skipped; unless ``keep_truncated``, also those with a grader error and, under
        ``drop_truncated``, truncated ones. Under ``advantage_only``, zero-advantage groups get a forward pass only. If
        no row has a gradient, one row still has a backward pass: momentum moves the weights on zero gradients too.
        """
        settings = self.settings
        chosen = [rows[index] for index in batch]
        counts = torch.tensor([prompts[index].sampled for index in batch])
        if not keep_truncated:
            left_out = [keys.REWARD_ERROR, *([keys.TRUNCATED] if settings.drop_truncated else [])]
            flags = [[row.get(key, None) for key in left_out] for row in chosen]
            counts[[any(flag is not None and bool(flag.any()) for flag in row_flags) for row_flags in flags]] = 0
        weights = row_weights(counts, settings.aggregation, max_response_tokens=settings.max_response_tokens).tolist()
        moving = [True] * len(batch)
        if self.advantage_only:
            moving = torch.stack([row[keys.ADVANTAGE] for row in chosen]).flatten(1).any(1).tolist()
        weight = dict(zip(batch, weights))
        weighted = [(index, moves) for index, moves in zip(batch, moving, strict=True) if weight[index]]
        moved = {prompts[index].text for index, moves in weighted if moves}
        live = [index for index, _ in weighted if prompts[index].text in moved]
        still = [index for index, _ in weighted if prompts[index].text not in moved]
        if not live:
            live, still = still[:1] or list(batch[:1]), still[1:]
        by_rank: list[list[Pass]] = [[] for _ in range(self.num_ranks)]
        for indices, learns in ((live, True), (still, False)):
            for passes, micros in zip(by_rank, self.micro_batches(indices, prompts, token_budget)):
                passes += [Pass(m, [weight[i] if real else 0.0 for i in m], learns) for m, real in micros]
        return by_rank

    def micro_batches(
        self, chosen: Sequence[int], prompts: Sequence[RowPrompt], token_budget: int
    ) -> list[list[tuple[list[int], bool]]]:
        """Return each rank's micro-batches of the rows ``chosen``, as (row indices, True; False for a filler).

        All ranks must run equally many forward passes: ranks with fewer get fillers, each of the shortest row.
        """
        fitting = partial(filled, prompts, token_budget=token_budget, shared_prompt=self.shared_prompt)
        if self.num_ranks == 1:
            return [[(micro, True) for micro in fitting(chosen)]]
        groups = groups_by_prompt(prompts, chosen)
        if not self.shared_prompt:
            groups = [group.subset([member]) for group in groups for member in range(len(group.rows))]

        shares = rank_shares(
            groups, self.num_ranks, lambda group: step_flops(self.shape, shared_load(group.prompt, group.responses))
        )
        by_rank = [fitting([index for piece in share for index in piece.rows]) for share in shares]
        most = max(map(len, by_rank))
        again = [min(chosen, key=lambda index: prompts[index].tokens)] if most else []
        return [[(micro, True) for micro in micros] + [(again, False)] * (most - len(micros)) for micros in by_rank]
