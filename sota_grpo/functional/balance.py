"""How the rows of one optimizer step are shared out over ranks that wait for each other."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def row_cost(num_tokens: int, hidden_size: int) -> int:
    """Relative cost of one row of ``T`` tokens in a decoder of width ``H``: ``T (6 H + T)``.

    A decoder layer has about ``12 H^2`` weights, so its matrix products take ``24 H^2 T`` floating-point operations,
    and attention ``4 H T^2``; the ratio of the two is ``6 H : T``. Depth and constants cancel in a comparison.

    Source: Kaplan et al. 2020 (arXiv:2001.08361, table 1).

    >>> row_cost(100, 1000), row_cost(12_000, 1000) // row_cost(6_000, 1000)
    (610000, 3)
    """
    return num_tokens * (6 * hidden_size + num_tokens)


def balanced_shares(costs: Sequence[float], num_shares: int) -> list[list[int]]:
    """Indices of ``costs`` in ``num_shares`` parts of nearly equal sums: the costliest first, to the least loaded.

    The largest sum exceeds the smallest by at most the largest cost: a part that receives cost ``c`` was the smallest,
    so afterwards it exceeds every other by at most ``c``. The largest sum is at most ``4/3 - 1/(3 n)`` of the best
    possible one (Graham 1969, "Bounds on multiprocessing timing anomalies", theorem 2). Ties keep their order, so the
    shares are a function of the costs alone and every rank finds the same.

    Args:
        costs: not negative.
        num_shares: at least 1; some shares are empty when there are fewer costs.

    Raises:
        ValueError: ``num_shares`` is below 1.

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
