"""The plan of a training step: which rank computes which rows in which micro-batches.

The plan (:class:`Planner`) follows from lengths and masks: optimizer steps, ranks and micro-batches. For four rows of
two prompts, two ranks and one optimizer step, where a token of row ``i`` weighs ``1 / (4 |o_i|)`` (``sequence``)::

    rows            0 1 (prompt A)   2 3 (prompt B)
    share of rank 0 rows 0 1         one pass [0, 1]
    share of rank 1 rows 2 3         one pass [2, 3]

The plan of all ranks is made once, where the rows are, and each rank receives its own rows only. Their weights are part
of the plan, because they depend on the whole optimizer step.
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
from sota_grpo.rl.collate import Prompt, filled, groups_by_prompt, row_prompts
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import Row, RowTable


@dataclass(frozen=True)
class LearnerSettings:
    """Settings of optimizer steps; most are options of the config (``optimizer``, ``train``).

    Args:
        lr, weight_decay, betas, eps: AdamW; ``momentum`` is Muon's, of the gradients of matrices.
        clip_grad_norm: largest gradient norm; 0 leaves the gradient as it is.
        schedule: ``constant``, or ``linear`` or ``cosine`` to 0 at ``total_steps``; each after ``warmup_steps``.
        optim_batch_size: rows per optimizer step.
        optim_groups: prompts per optimizer step instead, where groups differ in size; None: rows are counted.
        micro_batch_tokens: packed tokens per forward pass: each prompt once for its group, and every response.
        forward_tokens: the same of a pass without a gradient; None: ``micro_batch_tokens``.
        top_entropy_quantile: share of the tokens of an optimizer step, those of highest entropy, that the surrogate
            keeps; below 1 a forward pass before each optimizer step measures them.
        entropy_target, entropy_coef_delta, entropy_coef_max: of
            :func:`sota_grpo.functional.divergences.adapted_entropy_coef`; without a target the coefficient stays.
        recompute: this learner recomputes the proximal log-probs before the first step on a batch.
        precision: ``fp32``, ``bf16`` or ``fp16`` autocast; fp16 scales the loss.
    """

    lr: float
    total_steps: int
    optim_batch_size: int
    optim_groups: int | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.95
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

    @property
    def rates(self) -> Rates:
        return Rates(self.lr, self.weight_decay, self.betas, self.eps, self.momentum)


def learning_rate_factor(step: int, settings: LearnerSettings) -> float:
    """Return the share of the peak learning rate at optimizer step ``step`` (0-based)."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps))
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Pass(NamedTuple):
    """One micro-batch of an optimizer step."""

    rows: list[int]  # their positions
    weights: list[float]  # of a trained token of each; all 0 where the rows only keep this rank in step with the others
    learns: bool  # a backward pass follows


class Share(NamedTuple):
    """The work of one rank in a training step; the rows of its passes are positions in ``rows``."""

    rows: RowTable  # of this rank, in the order of the whole
    steps: list[list[Pass]]  # the passes of each optimizer step
    scoring: list[tuple[list[int], bool]]  # micro-batches to score before the first step; False: only to keep in step
    positions: list[int]  # the position of each of ``rows`` in the whole
    lengths: list[int]  # tokens of every row of the whole


@dataclass(frozen=True)
class Planner:
    """A planner of training steps; equal planners plan equal rows alike."""

    settings: LearnerSettings
    seed: int  # of the learner
    num_ranks: int
    shared_prompt: bool  # a prompt is computed once for its siblings of a micro-batch
    advantage_only: bool  # rows without an advantage have no gradient
    drops_out: bool  # adapters have dropout, so the first step's rows are scored without it
    shape: ModelShape  # the cost of a row follows from it

    def shares(self, table: RowTable, version: int) -> list[Share]:
        """Return the share of each rank in the training step that follows ``version``."""
        settings = self.settings
        prompts = row_prompts(table)
        rows = table.rows(keys.GROUP_ID, keys.ADVANTAGE, keys.TRUNCATED, keys.REWARD_ERROR)
        lengths = [prompt.tokens for prompt in prompts]
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
            new = {position: index for index, position in enumerate(positions)}  # rows are counted anew
            passes = [[one._replace(rows=[new[index] for index in one.rows]) for one in step] for step in step_micros]
            micros = [([new[index] for index in micro], real) for micro, real in scored]
            shares.append(Share(table.take(positions), passes, micros, positions, lengths))
        return shares

    def mini_batches(
        self, rows: Sequence[Row], prompts: Sequence[Prompt], epoch: int, version: int
    ) -> Iterator[list[int]]:
        """Yield the rows of each optimizer step; the second and later epochs mix whole groups.

        A step whose size is no multiple of the groups' sizes cuts a group; under ``optim_groups`` none is cut.
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
        prompts: Sequence[Prompt],
        token_budget: int,
        *,
        keep_truncated: bool = False,
    ) -> list[list[Pass]]:
        """Return each rank's passes over the rows ``batch`` of an optimizer step: those that learn come first.

        Under ``advantage_only`` zero-advantage groups are only measured; a row of weight 0 is skipped. At least one row
        learns: with a gradient of zeros, an optimizer with momentum moves.
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
        self, chosen: Sequence[int], prompts: Sequence[Prompt], token_budget: int
    ) -> list[list[tuple[list[int], bool]]]:
        """Return each rank's micro-batches of the rows ``chosen``, and whether they count.

        Ranks gather their layers together, so each makes as many passes as the busiest: the shortest row fills up.
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
