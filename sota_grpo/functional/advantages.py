"""Advantages of sampled responses: a reward compared with a baseline and divided by a scale."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out", "batch_mean", "none"]
Scale = Literal["group_std", "batch_std", "none"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline = "group_mean",
    scale: Scale = "group_std",
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of every response over its siblings, or over the batch.

    ``A_i = (r_i - b_i) / s_i``, where the baseline ``b`` is the mean of the group, the mean of the *other* members of
    the group, the mean of the batch, or 0, and the scale ``s`` is ``std(group) + eps``, ``std(batch) + eps`` (both of
    the rewards, with ddof=1) or 1. Sums run in float64, so the order of the rows does not show in float32.

    Constant rewards give exactly 0, found by comparing the largest with the smallest reward, never by dividing rounding
    error by ``eps``. What must be constant is the set that the formula looks at:

    - the *group*, when the baseline or the scale is one of the group (one alone is constant);
    - the *batch*, when the baseline or the scale is one of the batch. A constant group inside a varied batch keeps its
      signal under ``batch_mean`` with ``batch_std`` or ``none``: it was better or worse than the others (REINFORCE++);
    - nothing, for ``none`` with ``none``: the advantage is the reward itself.

    Args:
        rewards: ``[N]``, one per response.
        group_ids: int64 ``[N]``, equal for the responses to one prompt; any values, in any order.
        baseline: what the reward is compared with.
        scale: what the difference is divided by.
        eps: added to the standard deviation, in units of reward.

    Returns:
        ``[N]`` in the dtype of the rewards (float32 for integer or boolean rewards).

    Raises:
        ValueError: on shapes other than ``[N]``, an unknown choice, a reward that is not finite, or a group of one
            under ``leave_one_out``, which has no other member to compare with.

    Sources: group mean and std, Shao et al. 2024 (arXiv:2402.03300, section 4.1.2); scale none, Liu et al. 2025
    (arXiv:2503.20783, eq. 2); leave-one-out, Ahmadian et al. 2024 (arXiv:2402.14740, section 3.4); batch mean and std,
    Hu 2025 (arXiv:2501.03262).

    >>> rewards, ids = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([7, 7, 3, 3])
    >>> group_advantages(rewards, ids, scale="none").tolist()
    [0.5, -0.5, 0.0, 0.0]
    >>> group_advantages(rewards, ids, baseline="leave_one_out", scale="none").tolist()
    [1.0, -1.0, 0.0, 0.0]
    >>> [round(a, 4) for a in group_advantages(rewards, ids).tolist()]  # std of (1, 0) with ddof=1 is 0.7071
    [0.7071, -0.7071, 0.0, 0.0]
    """
    _check_rows(rewards, group_ids)
    for name, value, choices in (("baseline", baseline, get_args(Baseline)), ("scale", scale, get_args(Scale))):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return rewards.to(dtype)
    values = rewards.double()
    index, counts = _group_index(group_ids)
    centred = values - _baseline(values, index, counts, baseline)
    alike = _told_apart_by_nothing(values, index, counts, baseline, scale)
    return torch.where(alike, 0.0, centred / _scale(values, index, counts, scale, eps)).to(dtype)


def constant_groups(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """True for every response whose group carries no signal: all its rewards are equal, bit for bit.

    Args:
        rewards: ``[N]``.
        group_ids: int64 ``[N]``.

    Returns:
        bool ``[N]``; a group of one is constant.

    Raises:
        ValueError: on shapes other than ``[N]`` or a reward that is not finite.

    >>> constant_groups(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([7, 7, 3, 3])).tolist()
    [False, False, True, True]
    """
    _check_rows(rewards, group_ids)
    index, counts = _group_index(group_ids)
    return _constant_rows(rewards.double(), index, counts)


def _told_apart_by_nothing(values: Tensor, index: Tensor, counts: Tensor, baseline: str, scale: str) -> Tensor:
    """Rows of a constant set ``[N]``, the set being the one that the formula looks at."""
    constant = torch.zeros_like(values, dtype=torch.bool)
    if baseline in ("group_mean", "leave_one_out") or scale == "group_std":
        constant |= _constant_rows(values, index, counts)
    if baseline == "batch_mean" or scale == "batch_std":
        constant |= values.max() == values.min()
    return constant


def _group_index(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each row's group among the G distinct ids ``[N]``, and the size of each group ``[G]``."""
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    return index, counts


def _group_sum(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return torch.zeros_like(counts, dtype=values.dtype).index_add(0, index, values)


def _group_mean(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    return (_group_sum(values, index, counts) / counts)[index]


def _constant_rows(values: Tensor, index: Tensor, counts: Tensor) -> Tensor:
    empty = torch.zeros_like(counts, dtype=values.dtype)
    highest = empty.scatter_reduce(0, index, values, "amax", include_self=False)
    lowest = empty.scatter_reduce(0, index, values, "amin", include_self=False)
    return (highest == lowest)[index]


def _baseline(values: Tensor, index: Tensor, counts: Tensor, baseline: Baseline) -> Tensor:
    if baseline == "group_mean":
        return _group_mean(values, index, counts)
    if baseline == "batch_mean":
        return values.mean()
    if baseline == "none":
        return torch.zeros_like(values)
    singles = int((counts == 1).sum())
    if singles:
        raise ValueError(
            f"leave_one_out needs at least 2 responses in every group, but {singles} of {len(counts)} groups "
            "have 1; sample more responses per prompt or choose baseline='group_mean'."
        )
    return (_group_sum(values, index, counts)[index] - values) / (counts[index] - 1)


def _scale(values: Tensor, index: Tensor, counts: Tensor, scale: Scale, eps: float) -> Tensor:
    if scale == "none":
        return torch.ones_like(values)
    if scale == "group_std":
        squares = (values - _group_mean(values, index, counts)).square()
        variance = _group_sum(squares, index, counts) / (counts - 1).clamp(min=1)
        return variance.sqrt()[index] + eps
    variance = (values - values.mean()).square().sum() / max(values.numel() - 1, 1)
    return variance.sqrt() + eps


def _check_rows(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"rewards and group_ids must both be [N], but they are {list(rewards.shape)} and "
            f"{list(group_ids.shape)}; flatten them to one value per response."
        )
    finite = rewards.isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise ValueError(f"the reward of row {row} is {rewards[row].item()}; a reward must be a finite number.")
