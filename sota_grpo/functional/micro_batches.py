"""Loss weights of the tokens of an optimizer step, and its split into micro-batches and over ranks.

With ``loss = sum_it w_it x_it`` the gradients of micro-batches and ranks add up to those of the step. Three rows of
2, 0 and 4 trainable tokens and ``max_response_tokens=8``:

===========  ======  ======  ======  ===============================================
aggregation  row 0   row 1   row 2   reading
===========  ======  ======  ======  ===============================================
token        1/6     0       1/6     mean over the 6 trainable tokens
sequence     1/4     0       1/8     mean over the 2 rows that have any, of row means
constant     1/24    0       1/24    sum over tokens / (3 rows * 8 tokens)
===========  ======  ======  ======  ===============================================

A row without trainable tokens counts only under ``constant``, whose divisor does not depend on the responses.

The unit of the split is the :class:`PromptGroup`: rows in one micro-batch compute their common prompt once. Three
prompts and a budget of 11 packed tokens::

    rows 0-3   prompt 3, responses 4 4 2 2   15 tokens, more than the budget: cut into 9 and 9
    rows 4-5   prompt 2, responses 2 1        5 tokens
    row  6     prompt 1, response  2          3 tokens

    micro-batches      [0 2] 9 tokens, [1 3] 9 tokens, [4 5 6] 8 tokens
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

SLOTS_PER_TOKEN = 64  # see fill
EVEN_ENOUGH = 1.05  # largest cost of a rank over the mean cost at which rows are no longer moved

Aggregation = Literal["token", "sequence", "constant"]


def row_weights(lengths: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Return the loss weight of a trainable token of each row, float32 ``[N]``; a row's tokens have equal weights.

    With ``|o_i|`` the length of row i: ``token`` is ``1 / sum_j |o_j|``; ``sequence`` is ``1 / (M |o_i|)``, M the count
    of rows with ``|o_i| > 0``; ``constant`` is ``1 / (N max_response_tokens)``. Rows of length 0 get 0.

    Args:
        lengths: int64 ``[N]``, number of trainable tokens of each row of the whole optimizer step.
        max_response_tokens: maximum tokens of one response; read by ``constant`` only.

    Raises:
        ValueError: other shapes, an unknown aggregation, or ``constant`` without a positive ``max_response_tokens``.

    Sources: sequence, Shao et al. 2024 (arXiv:2402.03300, eq. 3); token, Yu et al. 2025 (arXiv:2503.14476, section
    3.3); constant, Liu et al. 2025 (arXiv:2503.20783, section 3.2).

    >>> row_weights(torch.tensor([2, 0, 4]), "sequence").tolist()
    [0.25, 0.0, 0.125]
    """
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be [N], one per row, but it is {list(lengths.shape)}.")
    counts = lengths.double()
    if aggregation == "token":
        divisor = counts.sum().expand_as(counts)
    elif aggregation == "sequence":
        divisor = (counts > 0).sum() * counts
    elif aggregation != "constant":
        raise ValueError(f"aggregation is {aggregation!r}; choose one of {', '.join(get_args(Aggregation))}.")
    elif max_response_tokens is None or max_response_tokens < 1:
        raise ValueError(
            f"max_response_tokens is {max_response_tokens}; aggregation 'constant' divides by it, "
            "so set it to the maximum tokens of one response."
        )
    else:
        divisor = torch.full_like(counts, float(len(counts) * max_response_tokens))
    return torch.where(lengths > 0, divisor.reciprocal(), 0.0).float()


def loss_weights(mask: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Return the loss weight of each token of a step, ``[N, T]``: its row's :func:`row_weights`; 0 outside ``mask``.

    >>> loss_weights(torch.tensor([[False, True, True], [True, False, False]]), "sequence").tolist()
    [[0.0, 0.25, 0.25], [0.5, 0.0, 0.0]]
    """
    weights = row_weights(mask.sum(-1), aggregation, max_response_tokens=max_response_tokens)
    return torch.where(mask, weights.unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class PromptGroup:
    """Rows of one prompt: indices in a list of rows, number of prompt tokens, and number of each response's tokens."""

    rows: tuple[int, ...]
    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Number of packed tokens: the prompt once, and every response."""
        return self.prompt + sum(self.responses)

    def subset(self, members: Iterable[int]) -> PromptGroup:
        """Return a group of the rows at the indices ``members`` (from 0) of this group's tuples, in ascending order."""
        chosen = sorted(members)
        rows, responses = ([values[member] for member in chosen] for values in (self.rows, self.responses))
        return PromptGroup(tuple(rows), self.prompt, tuple(responses))


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
    full, even = [], []
    for group in groups:
        if _Batch(0).weight(slots_per_token, *_size(group)) <= token_budget:
            full.append(group)
            even.append(group)
            continue
        lengths = [(length, 1, group.prompt + length) for length in group.responses]
        cuts = _first_fit(lengths, token_budget, slots_per_token, tokens=group.prompt)
        full += [group.subset(cut.members) for cut in cuts]
        shares = balanced_shares(group.responses, len(cuts))
        batches = [group.subset(share) for share in shares]
        fits = all(_Batch(0).weight(slots_per_token, *_size(batch)) <= token_budget for batch in batches)
        even += batches if len(cuts) > 1 and fits else full[-len(cuts) :]
    packed = []
    for pieces in (even, full):
        micros = _first_fit([_size(piece) for piece in pieces], token_budget, slots_per_token)
        micros.sort(key=lambda micro: -micro.weight(slots_per_token))
        packed.append([[pieces[member] for member in micro.members] for micro in micros])
    return min(packed, key=len)


def _size(piece: PromptGroup) -> tuple[int, int, int]:
    """Return (packed tokens, number of rows, tokens of the longest row)."""
    return piece.tokens, len(piece.rows), piece.prompt + max(piece.responses)


@dataclass
class _Batch:
    """Sizes of one micro-batch, on which its weight depends, and the indices of its members."""

    tokens: int
    rows: int = 0
    longest: int = 0
    members: list[int] = field(default_factory=list)

    def weight(self, slots_per_token: int, tokens: int = 0, rows: int = 0, longest: int = 0) -> float:
        """Return the micro-batch's weight after adding ``tokens`` and ``rows`` of at most ``longest`` tokens."""
        slots = (self.rows + rows) * max(self.longest, longest)
        return max(self.tokens + tokens, slots / slots_per_token)


def _first_fit(
    sizes: Sequence[tuple[int, int, int]], budget: int, slots_per_token: int, *, tokens: int = 0
) -> list[_Batch]:
    """Pack ``sizes`` (tokens, rows, longest row), heaviest first, into batches that start with ``tokens``."""
    batches: list[_Batch] = []
    for index in sorted(range(len(sizes)), key=lambda index: -_Batch(0).weight(slots_per_token, *sizes[index])):
        more, rows, longest = sizes[index]
        batch = next((b for b in batches if b.weight(slots_per_token, more, rows, longest) <= budget), None)
        if batch is None:
            batch = _Batch(tokens)
            batches.append(batch)
        batch.tokens += more
        batch.rows += rows
        batch.longest = max(batch.longest, longest)
        batch.members.append(index)
    return batches


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
    >>> [[piece.rows for piece in share] for share in rank_shares(groups, 2, lambda group: group.tokens)]
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
