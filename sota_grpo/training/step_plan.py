"""Who computes what in a training step: optimizer steps, ranks and micro-batches, from lengths and masks alone.

Four rows of two prompts, two ranks, one optimizer step; a token of row ``i`` weighs ``1 / (4 |o_i|)`` (``sequence``)::

    rows            0 1 (prompt A)   2 3 (prompt B)
    share of rank 0 rows 0 1         one pass [0, 1]
    share of rank 1 rows 2 3         one pass [2, 3]

The plan of all ranks is one function of the rows, so it is made once, where the rows are, and each rank is sent its own
rows only. What its rows weigh is part of the plan, because it depends on the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sota_grpo import keys
from sota_grpo.functional.balance import PromptGroup, fill, rank_shares
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.functional.weighting import row_weights
from sota_grpo.rl.collate import Prompt, Row, groups_by_prompt, row_prompts
from sota_grpo.rl.records import sample_seed

if TYPE_CHECKING:  # it is among those that plan
    from sota_grpo.training.forward_passes import LearnerSettings


class Pass(NamedTuple):
    """One micro-batch of an optimizer step.

    Args:
        rows: places of the rows that go through the policy, in the list that was planned.
        weights: of a trained token of each; all 0 where the rows only keep this rank in step with the others.
        learns: whether a backward pass follows.
    """

    rows: list[int]
    weights: list[float]
    learns: bool


class Share(NamedTuple):
    """What one rank does in a training step.

    Args:
        rows: those that this rank reads, in the order of the whole; on their way to it one RowPack.
        steps: the passes of each optimizer step; their rows are places in ``rows``.
        scoring: micro-batches of ``rows`` whose log-probs are asked for before the first step, each with False where it
            only keeps this rank in step; empty where none are.
        places: where each of ``rows`` stands in the whole.
        lengths: tokens of every row of the whole.
    """

    rows: Any
    steps: list[list[Pass]]
    scoring: list[tuple[list[int], bool]]
    places: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class Planner:
    """Plans training steps; equal planners plan equal rows alike.

    Args:
        settings: those of the learner.
        seed: order of the groups in the second and later epochs.
        num_ranks: at least 1.
        shared_prompt: whether a prompt is computed once for its siblings of a micro-batch.
        advantage_only: rows without an advantage have no gradient (:func:`split_zero_advantage`).
        drops_out: adapters have dropout, so the first step's rows are scored without it.
        shape: what a row costs.
    """

    settings: LearnerSettings
    seed: int
    num_ranks: int
    shared_prompt: bool
    advantage_only: bool
    drops_out: bool
    shape: ModelShape

    def shares(self, rows: Sequence[Row], version: int) -> list[Share]:
        """The share of each rank in the training step that follows ``version``."""
        settings = self.settings
        prompts = row_prompts(rows)
        lengths = [prompt.tokens for prompt in prompts]
        batches = [
            batch for epoch in range(settings.epochs) for batch in self.mini_batches(rows, prompts, epoch, version)
        ]
        scored: Sequence[int] = ()
        if settings.recompute:
            scored = range(len(rows))
        elif self.drops_out:
            scored = batches[0]
        budget = settings.micro_batch_tokens
        scoring = self.micro_batches(scored, prompts, budget) if scored else [[] for _ in range(self.num_ranks)]
        steps = [self.passes(rows, batch, prompts, budget) for batch in batches]
        return [_share(rows, lengths, [step[rank] for step in steps], scoring[rank]) for rank in range(self.num_ranks)]

    def mini_batches(
        self, rows: Sequence[Row], prompts: Sequence[Prompt], epoch: int, version: int
    ) -> Iterator[list[int]]:
        """Rows of each optimizer step; the second and later epochs mix groups, so that siblings still share a prompt.

        Where the size of a step is no multiple of the groups' sizes, a group is cut at its edge; under ``optim_groups``
        none is, whatever its size.
        """
        order = list(range(len(rows)))
        if epoch:
            generator = torch.Generator().manual_seed(sample_seed(self.seed, version, epoch))
            groups = groups_by_prompt(prompts, order)
            mixed = torch.randperm(len(groups), generator=generator).tolist()
            order = [index for place in mixed for index in groups[place].rows]
        pieces, size = [[index] for index in order], self.settings.optim_batch_size
        if self.settings.optim_groups is not None:
            found: dict[int, list[int]] = {}
            for index in order:
                found.setdefault(int(rows[index][keys.GROUP_ID]), []).append(index)
            pieces, size = list(found.values()), self.settings.optim_groups
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
        """Each rank's passes over the rows ``batch`` of an optimizer step: those that learn come first."""
        settings = self.settings
        chosen = [rows[index] for index in batch]
        counts = torch.tensor([prompts[index].sampled for index in batch])
        if settings.drop_truncated and not keep_truncated:
            counts = torch.where(torch.stack([row[keys.TRUNCATED].any() for row in chosen]), 0, counts)
        weights = row_weights(counts, settings.aggregation, max_response_tokens=settings.max_response_tokens).tolist()
        moving = [True] * len(batch)
        if self.advantage_only:
            moving = torch.stack([row[keys.ADVANTAGE] for row in chosen]).flatten(1).any(1).tolist()
        live, still = split_zero_advantage(batch, weights, moving, prompts)
        weight = dict(zip(batch, weights))
        found: list[list[Pass]] = [[] for _ in range(self.num_ranks)]
        for part, learns in ((live, True), (still, False)):
            for passes, micros in zip(found, self.micro_batches(part, prompts, token_budget)):
                passes += [Pass(m, [weight[i] if real else 0.0 for i in m], learns) for m, real in micros]
        return found

    def micro_batches(
        self, chosen: Sequence[int], prompts: Sequence[Prompt], token_budget: int
    ) -> list[list[tuple[list[int], bool]]]:
        """Each rank's micro-batches of the rows ``chosen``, and whether they are its own.

        Ranks gather their layers together, so each must make as many passes as the busiest: one with fewer
        micro-batches goes through the shortest row again, which then counts for nothing.
        """
        if self.num_ranks == 1:
            return [[(micro, True) for micro in self._filled(chosen, prompts, token_budget)]]
        groups = groups_by_prompt(prompts, chosen)
        if not self.shared_prompt:
            groups = [group.part([member]) for group in groups for member in range(len(group.rows))]
        shares = rank_shares(groups, self.num_ranks, self._cost)
        parts = [
            self._filled([index for piece in share for index in piece.rows], prompts, token_budget) for share in shares
        ]
        most = max(map(len, parts))
        again = [min(chosen, key=lambda index: prompts[index].tokens)] if most else []
        return [[(micro, True) for micro in own] + [(again, False)] * (most - len(own)) for own in parts]

    def _filled(self, chosen: Sequence[int], prompts: Sequence[Prompt], token_budget: int) -> list[list[int]]:
        """As :func:`sota_grpo.rl.collate.micro_batches`."""
        if self.shared_prompt:
            batches = fill(groups_by_prompt(prompts, chosen), token_budget=token_budget)
        else:
            alone = (PromptGroup((index,), 0, (prompts[index].tokens,)) for index in chosen)
            batches = fill(alone, token_budget=token_budget, slots_per_token=1)
        return [[index for piece in batch for index in piece.rows] for batch in batches]

    def _cost(self, group: PromptGroup) -> int:
        return step_flops(self.shape, shared_load(group.prompt, group.responses))


def _share(
    rows: Sequence[Row], lengths: list[int], steps: list[list[Pass]], scoring: list[tuple[list[int], bool]]
) -> Share:
    """A rank's part, whose rows are counted anew."""
    read = {index for step in steps for one in step for index in one.rows} | {i for micro, _ in scoring for i in micro}
    places = sorted(read)
    new = {place: index for index, place in enumerate(places)}
    own = [[one._replace(rows=[new[index] for index in one.rows]) for one in step] for step in steps]
    scored = [([new[index] for index in micro], real) for micro, real in scoring]
    return Share([rows[place] for place in places], own, scored, places, lengths)


def split_zero_advantage(
    batch: Sequence[int], weights: Sequence[float], moving: Sequence[bool], prompts: Sequence[Prompt]
) -> tuple[list[int], list[int]]:
    """Weighted rows that have a gradient, and those that are only measured; a row of weight 0 is neither.

    Where the loss of a token is a multiple of its advantage, groups whose advantages are all exactly 0 (all right, all
    wrong) have no gradient. At least one row is among the first, since a gradient of zeros is a gradient: an optimizer
    with momentum moves.

    Args:
        batch: places of the rows.
        weights: of each of them.
        moving: whether each has an advantage, or a term of the loss that is no multiple of it.
        prompts: of all rows.

    >>> prompts = [Prompt(text, 1, 1) for text in (b"a", b"a", b"b", b"c")]
    >>> split_zero_advantage([0, 1, 2, 3], [1.0, 1.0, 1.0, 0.0], [False, True, False, True], prompts)
    ([0, 1], [2])
    """
    weighted = [(index, moves) for index, weight, moves in zip(batch, weights, moving, strict=True) if weight]
    moved = {prompts[index].text for index, moves in weighted if moves}
    live = [index for index, _ in weighted if prompts[index].text in moved]
    still = [index for index, _ in weighted if prompts[index].text not in moved]
    return (live, still) if live else (still[:1] or list(batch[:1]), still[1:])


def as_weights(values: Sequence[float], mask: Tensor) -> Tensor:
    """The weight of every slot ``[N, T]``, from that of each row: 0 off the mask.

    >>> as_weights([0.5], torch.tensor([[False, True]])).tolist()
    [[0.0, 0.5]]
    """
    return torch.where(mask, torch.tensor(values, dtype=torch.float32).unsqueeze(-1), 0.0)
