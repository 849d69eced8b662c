"""An optimizer step in micro-batches and over ranks: the weight of every token, and which rows are computed together.

With ``loss = sum_it w_it x_it`` the gradients of micro-batches and ranks add up to those of the step. Three rows of
2, 0 and 4 trainable tokens and ``max_response_tokens=8``:

===========  ======  ======  ======  ===============================================
aggregation  row 0   row 1   row 2   reading
===========  ======  ======  ======  ===============================================
token        1/6     0       1/6     mean over the 6 trainable tokens
sequence     1/4     0       1/8     mean over the 2 rows that have any, of row means
constant     1/24    0       1/24    sum over tokens / (3 rows * 8 tokens)
===========  ======  ======  ======  ===============================================

A row without trainable tokens counts under ``constant`` only, whose divisor no sampled response can change.

What is cut and moved are prompt groups (:class:`PromptGroup`): rows whose common prompt is computed once where they
stay together. Three prompts and a budget of 11 packed tokens::

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
EVEN_ENOUGH = 1.05  # the costliest rank over the mean at which no more rows are moved

Aggregation = Literal["token", "sequence", "constant"]


def row_weights(lengths: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Return the weight of each trainable token of row i, float32 ``[N]``; a row's tokens all weigh the same.

    ``token``: ``1 / sum_j |o_j|``. ``sequence``: ``1 / (M |o_i|)``, M the number of rows with ``|o_i| > 0``.
    ``constant``: ``1 / (N max_response_tokens)``. Rows of length 0 get 0.

    Args:
        lengths: int64 ``[N]``, trainable tokens of each row of the whole optimizer step.
        max_response_tokens: most tokens of one response; read by ``constant`` only.

    Raises:
        ValueError: an unknown aggregation, lengths that are not ``[N]``, or ``constant`` without a positive
            ``max_response_tokens``.

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
            "so give the most tokens that one response may have."
        )
    else:
        divisor = torch.full_like(counts, float(len(counts) * max_response_tokens))
    return torch.where(lengths > 0, divisor.reciprocal(), 0.0).float()


def loss_weights(mask: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Return the weight of every slot ``[N, T]``: :func:`row_weights` of the mask's row sums on the mask, 0 off it.

    >>> loss_weights(torch.tensor([[False, True, True], [True, False, False]]), "sequence").tolist()
    [[0.0, 0.25, 0.25], [0.5, 0.0, 0.0]]
    """
    weights = row_weights(mask.sum(-1), aggregation, max_response_tokens=max_response_tokens)
    return torch.where(mask, weights.unsqueeze(-1), 0.0)


@dataclass(frozen=True)
class PromptGroup:
    """Rows of one prompt: their places in a list of rows, and how many tokens each has after the ``prompt`` ones."""

    rows: tuple[int, ...]
    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Packed tokens: the prompt once, and every response."""
        return self.prompt + sum(self.responses)

    def subset(self, members: Iterable[int]) -> PromptGroup:
        """Return some of the rows, in their order."""
        chosen = sorted(members)
        rows, responses = ([values[member] for member in chosen] for values in (self.rows, self.responses))
        return PromptGroup(tuple(rows), self.prompt, tuple(responses))


def fill(
    groups: Iterable[PromptGroup], *, token_budget: int, slots_per_token: int = SLOTS_PER_TOKEN
) -> list[list[PromptGroup]]:
    """Return micro-batches within the budget, few and full, the heaviest first.

    A micro-batch weighs ``max(packed tokens, padded slots / slots_per_token)``: the decoder runs over the packed
    tokens, the elementwise loss over ``rows * longest row`` slots of about 150 bytes, so 64 of them stay small against
    the activations of one token. A budget of padded tokens is ``slots_per_token=1``.

    First fit, decreasing (Johnson 1973). A group within the budget is never cut. One above it is cut into as few parts
    as first fit needs, each of which computes the prompt again, and so evenly that they differ by at most one response,
    which makes the heaviest micro-batch the smallest. Where full parts and a rest make fewer micro-batches in all,
    groups are cut so. A row above the budget is a micro-batch of its own. The result depends on the groups alone.

    >>> first, second = PromptGroup((0, 1, 2, 3), 3, (4, 4, 2, 2)), PromptGroup((4, 5), 2, (2, 1))
    >>> groups = [first, second, PromptGroup((6,), 1, (2,))]
    >>> [[piece.rows for piece in batch] for batch in fill(groups, token_budget=11)]
    [[(0, 2)], [(1, 3)], [(4, 5), (6,)]]
    """
    full, even = [], []
    for group in groups:
        lengths = [(length, 1, group.prompt + length) for length in group.responses]
        cuts = _first_fit(lengths, token_budget, slots_per_token, tokens=group.prompt)
        full += [group.subset(cut.members) for cut in cuts]
        shares = balanced_shares(group.responses, len(cuts))
        batches = [group.subset(share) for share in shares]
        fits = all(_Batch(0).weight(slots_per_token, *_size(batch)) <= token_budget for batch in batches)
        even += batches if len(cuts) > 1 and fits else full[-len(cuts) :]
    return min((_packed(pieces, token_budget, slots_per_token) for pieces in (even, full)), key=len)


def _packed(pieces: Sequence[PromptGroup], token_budget: int, slots_per_token: int) -> list[list[PromptGroup]]:
    """Return the pieces in micro-batches, the heaviest first."""
    sizes = [_size(piece) for piece in pieces]
    batches = _first_fit(sizes, token_budget, slots_per_token)
    batches.sort(key=lambda batch: -batch.weight(slots_per_token))
    return [[pieces[member] for member in batch.members] for batch in batches]


def _size(piece: PromptGroup) -> tuple[int, int, int]:
    """Tokens, rows, and the longest row."""
    return piece.tokens, len(piece.rows), piece.prompt + max(piece.responses)


@dataclass
class _Batch:
    """What is computed together, as far as its weight depends on it."""

    tokens: int
    rows: int = 0
    longest: int = 0
    members: list[int] = field(default_factory=list)

    def weight(self, slots_per_token: int, tokens: int = 0, rows: int = 0, longest: int = 0) -> float:
        """The weight, with so much more."""
        slots = (self.rows + rows) * max(self.longest, longest)
        return max(self.tokens + tokens, slots / slots_per_token)


def _first_fit(
    sizes: Sequence[tuple[int, int, int]], budget: int, slots_per_token: int, *, tokens: int = 0
) -> list[_Batch]:
    """Indices of ``sizes`` (tokens, rows, longest row) in batches that begin with ``tokens``; the heaviest first."""
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
    """Return the groups of each rank, of nearly equal cost, cutting as few rows off as that takes.

    Whole groups are shared out first (:func:`balanced_shares`). While the costliest rank is above ``EVEN_ENOUGH`` times
    the mean, the one of its groups that helps most gives some rows, or all, to the cheapest rank, so that the two come
    out alike; the part computes its prompt again, which its cost counts. A move that lowers the higher of the two by
    less than 1 % of the mean is not made. So the costliest rank is at most ``EVEN_ENOUGH`` times the mean, or exceeds
    the cheapest by no more than one row with its prompt and that 1 %.

    ``cost`` is that of a group, of some of its rows, and of its prompt alone.

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
    """Return rows of cost ``price`` at most, longest first, else the shortest row alone; and the rest, if any."""
    order = sorted(range(len(piece.rows)), key=lambda member: -piece.responses[member])
    moved: list[int] = []
    for member in order:
        if cost(piece.subset([*moved, member])) <= price:
            moved.append(member)
    moved = moved or order[-1:]
    remaining = [member for member in order if member not in moved]
    return piece.subset(moved), [piece.subset(remaining)] if remaining else []


def balanced_shares(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Return indices of ``costs`` in ``num_shares`` parts of nearly equal sums: the costliest to the least loaded.

    The largest sum exceeds the smallest by at most the largest cost, and is at most ``4/3 - 1/(3 n)`` of the best
    possible one (Graham 1969, "Bounds on multiprocessing timing anomalies", theorem 2). The result is a function of the
    costs alone, so every rank computes the same. ``num_shares`` below 1 raises ``ValueError``.

    >>> balanced_shares([1, 7, 3, 4], 2)
    [[1, 0], [3, 2]]
    """
    if num_shares < 1:
        raise ValueError(f"num_shares is {num_shares}; there must be at least 1.")
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    loads: list[tuple[float, int]] = [(0, share) for share in range(num_shares)]
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, share = loads[0]
        shares[share].append(index)
        heapq.heapreplace(loads, (load + costs[index], share))
    return shares
