"""How often each level, or each example, is drawn by what its responses earned."""

from __future__ import annotations

import torch
from torch import Tensor


def signal_shares(passes: Tensor, trials: Tensor, floor: float) -> Tensor:
    """The share of the draws that each of ``K`` levels gets: in proportion to the variance of its success, and a floor.

    With the pass rate ``p_k = passes_k / trials_k``, 1/2 where there were no trials, and ``w_k = p_k (1 - p_k)``::

        share_k = floor / K + (1 - floor) w_k / sum_j w_j,        1 / K where every w_j is 0.

    ``w_k`` is the variance of one response's success: what a group of siblings differs by, and so what its advantages
    are made of. It is 0 for what is solved (p = 1) and for what is out of reach (p = 0): both are left with the floor,
    ``floor / K``, by which they are looked at again. What was never tried counts as p = 1/2, the most of all.
    From ``n`` trials ``p (1 - p)`` is estimated as ``(1 - 1 / n)`` times itself on average, so no prior is needed.

    Args:
        passes, trials: ``[K]`` float64, ``0 <= passes <= trials``; decayed sums need not be whole.
        floor: share of the draws that is spread evenly, in (0, 1].

    Returns:
        ``[K]`` float64, above 0, of sum 1.

    Source: Bae et al. 2025 (arXiv:2504.03380): ``p (1 - p)`` bounds the expected improvement from below; Foster et al.
    2025 (arXiv:2502.12272) draw by it, under the name of learnability; Chen et al. 2025 (arXiv:2505.14970) draw levels.

    >>> signal_shares(torch.tensor([8.0, 4.0, 0.0, 0.0]), torch.tensor([8.0, 8.0, 8.0, 0.0]), floor=0.2).tolist()
    [0.05, 0.45, 0.05, 0.45]
    """
    rates = torch.where(trials > 0, passes / trials.clamp(min=torch.finfo(torch.float64).tiny), 0.5).double()
    weights = rates * (1 - rates)
    total = weights.cumsum(0)[-1]  # of the same bits under any number of threads
    even = torch.full_like(weights, 1 / len(weights))
    return torch.where(total > 0, floor * even + (1 - floor) * weights / total, even)
