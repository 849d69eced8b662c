"""The plan of a training step: which rank computes which rows in which micro-batches.

:class:`Planner` splits the rows of a rollout batch, by lengths and masks, into optimizer steps, ranks (:class:`Share`)
and micro-batches (:class:`Pass`). Four rows of two prompts, two ranks and one optimizer step; under the aggregation
``sequence`` the loss weight of a token of row ``i`` is ``1 / (4 |o_i|)``::

    rows     0 1 (prompt A)   2 3 (prompt B)
    rank 0   rows 0 1         one micro-batch [0, 1]
    rank 1   rows 2 3         one micro-batch [2, 3]

The driver plans for all ranks, with loss weights (they depend on the whole step), and sends each rank its rows.

The unit of the split is the :class:`PromptGroup`: rows in one micro-batch compute their common prompt once. Three
prompts and a budget of 11 packed tokens::

    rows 0-3   prompt 3, responses 4 4 2 2   15 tokens, more than the budget: cut into 9 and 9
    rows 4-5   prompt 2, responses 2 1        5 tokens
    row  6     prompt 1, response  2          3 tokens

    micro-batches      [0 2] 9 tokens, [1 3] 9 tokens, [4 5 6] 8 tokens
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.functional.loss_terms import Aggregation, row_weights
from sota_grpo.policy.optimizers import Rates
from sota_grpo.policy.shared_prompt import tree_branches
from sota_grpo.rl.collate import NO_MASK, known_tokens
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import Row, RowTable, row_list

Size = tuple[int, int, int]  # numbers of packed tokens (a prompt once), of rows, and of the longest row's tokens
SLOTS_PER_TOKEN = 64  # see fill
EVEN_ENOUGH = 1.05  # largest cost of a rank over the mean cost at which rows are no longer moved


@dataclass(frozen=True, kw_only=True)
class LearnerSettings(Rates):
    """Settings of optimizer steps, rates included; most are the config's ``optimizer``, ``train`` and ``algorithm``.

    Args:
        clip_grad_norm: largest gradient norm; 0 disables clipping.
        schedule: ``constant``, or ``linear`` or ``cosine`` decay to 0 at optimizer step ``total_steps``; each after a
            linear rise over ``warmup_steps`` optimizer steps.
        optim_batch_size: rows per optimizer step.
        micro_batch_tokens: most tokens of a forward pass, padded or packed (a prompt once); a single row may be longer.
        forward_tokens: the same for a forward pass that only computes log-probs; None: ``micro_batch_tokens``.
        top_entropy_quantile: fraction of an optimizer step's tokens, those of highest entropy, that the surrogate is
            computed on; below 1, a forward pass before each optimizer step measures the entropies.
        entropy_target: the entropy that the coefficient is adapted to; None: the coefficient is constant.
        recompute: the learner recomputes the proximal log-probs of all rows at the start of a training step.
        precision: ``fp32``, or ``bf16`` or ``fp16`` autocast; fp16 scales the loss.
    """

    total_steps: int
    optim_batch_size: int
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
        rows = table.rows(keys.ADVANTAGE, keys.TRUNCATED, keys.REWARD_ERROR)
        lengths = table.lengths(keys.FULL_TOKENS)
        batches = [b for epoch in range(settings.epochs) for b in self.mini_batches(prompts, epoch, version)]
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

    def mini_batches(self, prompts: Sequence[RowPrompt], epoch: int, version: int) -> Iterator[list[int]]:
        """Yield the row indices of each optimizer step of ``epoch`` (from 0); later epochs shuffle whole groups.

        The shuffle is seeded by ``version``, that of the weights, and ``epoch``.
        A group may be split over steps, and the last step may be smaller.
        """
        order = list(range(len(prompts)))
        if epoch:
            generator = torch.Generator().manual_seed(sample_seed(self.seed, version, epoch))
            groups = groups_by_prompt(prompts, order)
            mixed = torch.randperm(len(groups), generator=generator).tolist()
            order = [index for group in mixed for index in groups[group].rows]
        for start in range(0, len(order), self.settings.optim_batch_size):
            yield order[start : start + self.settings.optim_batch_size]

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


class RowPrompt(NamedTuple):
    """A row's prompt: the tokens before its first assistant token; all tokens, if none is an assistant token.

    ``text``: its ids as bytes. Numbers of tokens: ``length`` of it, ``response`` after it, ``sampled`` to train on. For
    a tree: the prompt of the first path; ``response`` counts each other token as often as it is computed.
    """

    text: bytes
    length: int
    response: int
    sampled: int = 0

    @property
    def tokens(self) -> int:
        return self.length + self.response


def row_prompts(rows: RowTable | Sequence[TensorDictBase] | Sequence[Row]) -> list[RowPrompt]:
    """Return the :class:`RowPrompt` of each row."""
    names = keys.ASSISTANT_MASK, keys.FULL_TOKENS
    listed: Any = rows.rows(*names, keys.LOG_PROBS, keys.PARENTS) if isinstance(rows, RowTable) else rows
    prompts = []
    for row in listed:
        completion_mask, tokens = (row[name].cpu().numpy() for name in names)
        sampled = int(known_tokens(row).count_nonzero())
        length = int(completion_mask.argmax()) if completion_mask.any() else len(tokens)
        response = len(tokens) - length
        if (parents := row.get(keys.PARENTS, None)) is not None:
            branches = tree_branches(parents.cpu(), row[keys.ASSISTANT_MASK].cpu())
            length = branches[0].shared
            computed = {branch.path[0]: branch.shared for branch in branches}  # the prompt of each root
            response = sum(computed.values()) - length + sum(len(branch.path) - branch.shared for branch in branches)
            tokens = tokens[branches[0].path]
        prompts.append(RowPrompt(tokens[:length].tobytes(), length, response, sampled))
    return prompts


@dataclass(frozen=True)
class PromptGroup:
    """Rows of one prompt: indices in a list of rows, number of prompt tokens, and number of each response's tokens."""

    rows: tuple[int, ...]
    prompt: int
    responses: tuple[int, ...]

    @property
    def size(self) -> Size:
        return self.prompt + sum(self.responses), len(self.rows), self.prompt + max(self.responses, default=0)

    def subset(self, members: Iterable[int]) -> PromptGroup:
        """Return a group of the rows at the indices ``members`` (from 0) of this group's tuples, in ascending order."""
        chosen = sorted(members)
        rows, responses = ([values[member] for member in chosen] for values in (self.rows, self.responses))
        return PromptGroup(tuple(rows), self.prompt, tuple(responses))


def groups_by_prompt(prompts: Sequence[RowPrompt], chosen: Iterable[int] | None = None) -> list[PromptGroup]:
    """Group all rows, or those with indices ``chosen``, by prompt tokens; groups are in order of their first row."""
    members_of: dict[bytes, list[int]] = {}
    for index in range(len(prompts)) if chosen is None else chosen:
        members_of.setdefault(prompts[index].text, []).append(index)
    return [
        PromptGroup(tuple(members), prompts[members[0]].length, tuple(prompts[index].response for index in members))
        for members in members_of.values()
    ]


def micro_batches(
    rows: Sequence[TensorDictBase] | TensorDictBase, *, token_budget: int, shared_prompt: bool = True
) -> list[list[TensorDictBase]]:
    """Split rows into micro-batches of at most ``token_budget`` packed tokens, the largest first.

    A prompt counts once for all its rows in a micro-batch, and rows of a prompt stay together if the budget allows; see
    :func:`fill`. The largest comes first, so that out-of-memory errors occur early.
    A row above the budget becomes a separate micro-batch. KeyError if a row lacks its tokens or its assistant mask.

    Args:
        token_budget: maximum number of packed tokens per micro-batch; below 1 raises ``ValueError``.
        shared_prompt: False for a model that computes padded rows: ``n`` rows then count ``n`` times the longest.
    """
    if token_budget < 1:
        raise ValueError(f"token_budget is {token_budget}; a micro-batch needs room for at least 1 token.")
    listed = row_list(rows)
    try:
        prompts = row_prompts(listed)
    except KeyError as error:
        raise KeyError(NO_MASK) from error
    batches = filled(prompts, range(len(prompts)), token_budget=token_budget, shared_prompt=shared_prompt)
    return [[listed[index] for index in batch] for batch in batches]


def filled(
    prompts: Sequence[RowPrompt], chosen: Iterable[int], *, token_budget: int, shared_prompt: bool
) -> list[list[int]]:
    """Split the rows with indices ``chosen`` as :func:`micro_batches` does; return the row indices of each batch."""
    if shared_prompt:
        batches = fill(groups_by_prompt(prompts, chosen), token_budget=token_budget)
    else:
        alone = (PromptGroup((index,), 0, (prompts[index].tokens,)) for index in chosen)
        batches = fill(alone, token_budget=token_budget, slots_per_token=1)
    return [[index for piece in batch for index in piece.rows] for batch in batches]


def fill(
    groups: Iterable[PromptGroup], *, token_budget: int, slots_per_token: int = SLOTS_PER_TOKEN
) -> list[list[PromptGroup]]:
    """Split prompt groups into few, full micro-batches within the token budget; return the heaviest first.

    A micro-batch weighs ``max(packed tokens, padded slots / slots_per_token)``: the decoder runs over the packed
    tokens, the elementwise loss over ``rows * longest row`` slots of about 150 bytes, so 64 slots are small compared
    with the activations of one token. ``slots_per_token=1`` makes the budget one of padded tokens.

    First fit, decreasing (Johnson 1973). A group within the budget is never cut. A larger group is cut into as few
    pieces as first fit needs; each computes the prompt again. The pieces are balanced: their response tokens differ by
    at most those of one response. First fit's unbalanced pieces are used if a balanced one exceeds the budget, or if
    they make fewer micro-batches in all. A row above the budget is alone in a micro-batch. Deterministic.

    >>> first, second = PromptGroup((0, 1, 2, 3), 3, (4, 4, 2, 2)), PromptGroup((4, 5), 2, (2, 1))
    >>> groups = [first, second, PromptGroup((6,), 1, (2,))]
    >>> [[piece.rows for piece in batch] for batch in fill(groups, token_budget=11)]
    [[(0, 2)], [(1, 3)], [(4, 5), (6,)]]
    """

    def weight(size: Size) -> float:
        tokens, rows, longest = size
        return max(tokens, rows * longest / slots_per_token)

    def first_fit(sizes: Sequence[Size], before: int = 0) -> list[list[int]]:
        """Return the indices of ``sizes`` in each batch, the heaviest first; ``before``: tokens of an empty batch."""
        batches: list[tuple[Size, list[int]]] = []
        for index in sorted(range(len(sizes)), key=lambda index: -weight(sizes[index])):
            tokens, rows, longest = sizes[index]
            for at, ((has, count, widest), members) in enumerate([*batches, ((before, 0, 0), [])]):
                size = (has + tokens, count + rows, max(widest, longest))
                if weight(size) <= token_budget or at == len(batches):
                    batches[at : at + 1] = [(size, members)]
                    members.append(index)
                    break
        return [members for _, members in sorted(batches, key=lambda batch: -weight(batch[0]))]

    full, even = [], []
    for group in groups:
        cuts = shares = [group]
        if weight(group.size) > token_budget:
            lengths = [(length, 1, group.prompt + length) for length in group.responses]
            cuts = [group.subset(members) for members in first_fit(lengths, before=group.prompt)]
            shares = [group.subset(share) for share in balanced_shares(group.responses, len(cuts))]
        full += cuts
        even += shares if len(cuts) > 1 and all(weight(share.size) <= token_budget for share in shares) else cuts
    packings = (
        [[pieces[at] for at in batch] for batch in first_fit([p.size for p in pieces])] for pieces in (even, full)
    )
    return min(packings, key=len)


def rank_shares(
    groups: Sequence[PromptGroup], num_ranks: int, cost: Callable[[PromptGroup], float]
) -> list[list[PromptGroup]]:
    """Split prompt groups over ranks with nearly equal cost, cutting few groups; return the groups of each rank.

    Whole groups are distributed first (:func:`balanced_shares`). While the costliest rank is above ``EVEN_ENOUGH``
    times the mean cost, rows of one of its groups, or a whole group, are moved to the cheapest rank so that the two
    ranks become more equal; moved rows compute their prompt again, which is counted. A move that lowers the higher cost
    of the two by less than 1 % of the mean is not made, and ends the search.

    ``cost`` is also called with groups of some or none of their rows. ``num_ranks`` below 1 raises ``ValueError``.

    >>> groups = [PromptGroup((0, 1, 2, 3), 1, (5, 5, 5, 5)), PromptGroup((4, 5), 1, (4, 4))]
    >>> [[piece.rows for piece in share] for share in rank_shares(groups, 2, lambda group: 1 + sum(group.responses))]
    [[(1, 2, 3)], [(4, 5), (0,)]]
    """
    whole = balanced_shares([cost(group) for group in groups], num_ranks)
    shares = [[groups[index] for index in share] for share in whole]
    loads = [sum(map(cost, share)) for share in shares]
    mean = sum(loads) / num_ranks
    while max(loads) > EVEN_ENOUGH * mean:
        source, target = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[source] - loads[target]
        pieces = shares[source]
        cuts = [_moved_and_remaining(piece, (gap + cost(piece.subset([]))) / 2, cost) for piece in pieces]
        after = [
            (loads[source] - cost(piece) + sum(map(cost, remaining)), loads[target] + cost(moved))
            for piece, (moved, remaining) in zip(pieces, cuts)
        ]
        best = min(range(len(pieces)), key=lambda index: max(after[index]))
        if max(after[best]) > loads[source] - 0.01 * mean:
            break
        moved, remaining = cuts[best]
        pieces[best : best + 1] = remaining
        shares[target].append(moved)
        loads[source], loads[target] = after[best]
    return shares


def _moved_and_remaining(
    piece: PromptGroup, price: float, cost: Callable[[PromptGroup], float]
) -> tuple[PromptGroup, list[PromptGroup]]:
    """Split off rows of cost at most ``price``, longest first, or the shortest row; return them and the rest."""
    order = sorted(range(len(piece.rows)), key=lambda member: -piece.responses[member])
    moved: list[int] = []
    for member in order:
        if cost(piece.subset([*moved, member])) <= price:
            moved.append(member)
    moved = moved or order[-1:]
    remaining = [member for member in order if member not in moved]
    return piece.subset(moved), [piece.subset(remaining)] if remaining else []


def balanced_shares(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Split the indices of ``costs`` into ``num_shares`` lists with nearly equal sums of costs.

    Each index, the costliest first, goes to the list with the least sum. If no cost is negative, the largest sum
    exceeds the smallest by at most the largest cost, and is at most ``4/3 - 1/(3 num_shares)`` times the optimum
    (Graham 1969, "Bounds on multiprocessing timing anomalies", theorem 2). ``num_shares`` below 1 raises
    ``ValueError``.

    >>> balanced_shares([1, 7, 3, 4], 2)
    [[1, 0], [3, 2]]
    """
    if num_shares < 1:
        raise ValueError(f"num_shares is {num_shares}; it must be at least 1.")
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads: list[tuple[float, int]] = [(0, share) for share in range(num_shares)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, share = loads[0]
        shares[share].append(index)
        heapq.heapreplace(loads, (load + costs[index], share))
    return shares
