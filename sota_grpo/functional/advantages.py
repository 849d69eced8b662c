"""Advantages of sampled responses: a reward compared with a baseline and divided by a scale, ``A = (r - b) / s``.

===================  ===================================================================================================
baseline ``b_i``
===================  ===================================================================================================
``group_mean``       mean of the group (Shao et al. 2024, arXiv:2402.03300, section 4.1.2)
``leave_one_out``    mean of the group's *other* members (Ahmadian et al. 2024, arXiv:2402.14740, section 3.4)
``length_weighted``  ``sum_j |o_j| r_j / sum_j |o_j|`` over the group; it minimizes the variance if the squared gradient
                     of a response grows with its length (Hao et al. 2025, arXiv:2505.23585)
``best_of_others``   ``r_i - b_i`` is ``max_j r_j - max_{j != i} r_j``, what the response adds to the group's maximum:
                     0 for all but a unique best response (Tang et al. 2025, arXiv:2503.19595)
``batch_mean``       mean of the batch (Hu 2025, arXiv:2501.03262)
``none``             0
===================  ===================================================================================================

===================  ===================================================================================================
scale ``s_i``
===================  ===================================================================================================
``group_std``        ``std + eps`` of the group's rewards (Shao et al. 2024)
``group_mean``       mean reward of the group (Tajwar et al. 2026, arXiv:2602.02710)
``batch_std``        ``std + eps`` of the batch's rewards (Liu et al. 2025, arXiv:2508.08221)
``advantage_std``    ``std + eps`` of ``r - b`` over the batch (Hu 2025, REINFORCE++-baseline)
``none``             1 (Liu et al. 2025, arXiv:2503.20783, eq. 2)
===================  ===================================================================================================

Two prompts with rewards (1, 0) and (1, 1), normalized by the mean and std (0.5) of all four rewards:

>>> import torch
>>> rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
>>> [round(a, 4) for a in group_advantages(rewards, ids, baseline="batch_mean", scale="batch_std").tolist()]
[0.5, -1.5, 0.5, 0.5]
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Baseline = Literal["group_mean", "leave_one_out", "length_weighted", "best_of_others", "batch_mean", "none"]
Scale = Literal["group_std", "group_mean", "batch_std", "advantage_std", "none"]
GROUP_TERMS = ("group_mean", "leave_one_out", "length_weighted", "best_of_others", "group_std")  # depend on the group


class UnusableValues(ValueError):
    """Raised if a formula cannot use rewards or log-probs of the data: not finite, negative, or too few."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Baseline | Tensor = "group_mean",
    scale: Scale = "group_std",
    eps: float = 1e-6,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the advantage of every response relative to its group or the batch: ``A_i = (r_i - b_i) / s_i``.

    The module's tables define the baselines and scales. Standard deviations have ddof=1; sums are computed in float64.
    The result has the dtype of the rewards (float32 for integer or boolean rewards).

    If the baseline or the scale is one of the group, every *group* of equal rewards (or of one response) gets exactly
    0; if one is of the batch, a *batch* of equal rewards does (under ``advantage_std`` also one of equal ``r - b``).
    Else rounding errors would be divided by ``eps``. A
    constant group in a varied batch keeps its signal under ``batch_mean`` with ``batch_std`` or ``none`` (REINFORCE++).

    Args:
        rewards: ``[N]``, one per response.
        group_ids: int64 ``[N]``, equal for the responses to one prompt; any values, in any order.
        baseline: a name; or a tensor ``[N]`` that is used as ``r - b`` itself.
        eps: added to the standard deviation, in units of reward.
        lengths: ``[N]``, number of tokens of each response; read by ``length_weighted`` only.

    Raises:
        UnusableValues: a reward is not finite, a group has one response under ``leave_one_out`` or ``best_of_others``,
            or a reward is negative under the scale ``group_mean``.
        ValueError: shapes other than ``[N]``, an unknown name, or ``length_weighted`` without ``lengths``.

    >>> rewards, ids = torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([7, 7, 3, 3])
    >>> group_advantages(rewards, ids, baseline="leave_one_out", scale="none").tolist()
    [1.0, -1.0, 0.0, 0.0]
    >>> [round(a, 4) for a in group_advantages(rewards, ids).tolist()]  # std of (1, 0) with ddof=1 is 0.7071
    [0.7071, -0.7071, 0.0, 0.0]
    """
    _check_rows(rewards, group_ids)
    chosen = "none" if isinstance(baseline, Tensor) else baseline
    for name, value, choices in (("baseline", chosen, get_args(Baseline)), ("scale", scale, get_args(Scale))):
        if value not in choices:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(choices)}.")
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    if rewards.numel() == 0:
        return rewards.to(dtype)
    values = rewards.double()
    alike = torch.zeros_like(values, dtype=torch.bool)
    if chosen in GROUP_TERMS or scale in GROUP_TERMS:
        alike |= zero_advantage_mask(values, group_ids)
    if chosen == "batch_mean" or scale in ("batch_std", "advantage_std"):
        alike |= values.max() == values.min()
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    sizes = counts[index]
    centred = torch.where(alike, 0.0, _centred(values, index, sizes, baseline, lengths))
    if scale == "advantage_std":
        alike |= centred.max() == centred.min()
    return torch.where(alike, 0.0, centred / _scale(values, centred, index, sizes, scale, eps)).to(dtype)


def decoupled_rewards(terms: Tensor, weights: Tensor, group_ids: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Return rewards whose terms are standardized within each group before they are summed (GDPO).

    ``r_i = sum_k w_k (t_ik - mean_k) / (std_k + eps)``, with mean and std (ddof=1) over the group's responses that have
    term k, so that a term with a wide spread does not dominate. To whiten the result over the batch, pass it to
    :func:`group_advantages` with the baseline ``none`` and the scale ``batch_std``.

    ``terms`` is ``[N, K]``, NaN for a term that does not apply to a response, which adds 0; ``weights`` is ``[K]``;
    ``group_ids`` as in :func:`group_advantages`. The result is float64 ``[N]``, exactly 0 in a group in which every
    term is constant. UnusableValues if a term is infinite, ValueError for other shapes.

    Source: Liu et al. 2026 (arXiv:2601.05242).

    >>> terms = torch.tensor([[1.0, 300.0], [0.0, 100.0], [1.0, 5.0]])
    >>> found = decoupled_rewards(terms, torch.tensor([1.0, 0.5]), torch.tensor([0, 0, 1]))
    >>> [round(x, 3) for x in found.tolist()]  # 0.7071 * (1 + 0.5)
    [1.061, -1.061, 0.0]
    """
    if terms.dim() != 2 or weights.shape != terms.shape[1:] or group_ids.shape != terms.shape[:1]:
        raise ValueError(
            f"terms, weights and group_ids must be [N, K], [K] and [N], but they are {list(terms.shape)}, "
            f"{list(weights.shape)} and {list(group_ids.shape)}."
        )
    total = torch.zeros(len(terms), dtype=torch.float64, device=terms.device)
    for term, weight in zip(terms.double().unbind(-1), weights.double()):
        there = (~term.isnan()).nonzero().squeeze(-1)
        total[there] += weight * group_advantages(term[there], group_ids[there], eps=eps)
    return total


def zero_advantage_mask(rewards: Tensor, group_ids: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return a bool mask ``[N]`` of all responses of the groups whose rewards are exactly equal.

    ``counted``, bool ``[N]``, selects the rewards that are compared; None: all. A group with fewer than two of them is
    True. UnusableValues if a reward is not finite, counted or not; ValueError for shapes other than ``[N]``.

    >>> zero_advantage_mask(torch.tensor([1.0, 0.0, 0.5, 0.5]), torch.tensor([7, 7, 3, 3])).tolist()
    [False, False, True, True]
    """
    _check_rows(rewards, group_ids)
    values = rewards.double()
    groups, index = torch.unique(group_ids, return_inverse=True)
    shown = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    empty = torch.zeros_like(groups, dtype=values.dtype)
    highest = empty.scatter_reduce(0, index, values.where(shown, -torch.inf), "amax", include_self=False)
    lowest = empty.scatter_reduce(0, index, values.where(shown, torch.inf), "amin", include_self=False)
    return (highest <= lowest)[index]


def distilled_advantages(
    advantage: Tensor, log_prob: Tensor, teacher: Tensor, *, distill_coeff: float, advantage_coeff: float = 1.0
) -> Tensor:
    """Return the advantage ``[N, T]`` of every token from the task's advantage and a teacher's log-probs, detached.

    ``A_t = advantage_coeff * A + distill_coeff * (log q_t - log p_t)``, with the sampled token's probability under the
    teacher, ``q_t``, and under the policy being trained, ``p_t``. In a loss that weights tokens by ``p_t / mu_t``
    without a clip (``mu_t``: under the policy that sampled), the expected gradient of the second term is that of
    ``distill_coeff * KL(p, q)`` in the visited states, each token for its own state only (a discount of 0).

    Args:
        advantage: ``[N, T]`` or ``[N, 1]``, the task's advantage.
        log_prob: ``[N, T]``, nats, under the current policy, not the one that sampled, so that several steps on the
            same tokens converge to the teacher instead of overshooting.
        teacher: ``[N, T]``, nats, under the teacher at the temperature of ``log_prob``.

    Sources: Agarwal et al. 2023 (arXiv:2306.13649, on-policy data, reverse KL); Lu and Thinking Machines Lab 2025
    ("On-Policy Distillation", reverse KL per token as the advantage, discount 0).

    >>> log_prob, teacher = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -0.5]])
    >>> distilled_advantages(torch.ones(1, 1), log_prob, teacher, distill_coeff=2.0, advantage_coeff=0.5).tolist()
    [[-0.5, 3.5]]
    """
    return advantage_coeff * advantage.detach() + distill_coeff * (teacher.detach() - log_prob.detach())


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Return DAPO's length penalty, float32 ``[N]``, to be added to the reward.

    The penalty is 0 for up to ``max_tokens - buffer_tokens`` tokens, then
    ``(max_tokens - buffer_tokens - length) / buffer_tokens``, and -1 from ``max_tokens`` on. ``lengths``, int64
    ``[N]``: tokens of each response. ``ValueError`` unless ``1 <= buffer_tokens <= max_tokens``.

    Source: Yu et al. 2025 (arXiv:2503.14476, eq. 13).

    >>> soft_overlong_penalty(torch.tensor([10, 80, 85, 100, 120]), max_tokens=100, buffer_tokens=20).tolist()
    [0.0, 0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens is {buffer_tokens} and max_tokens is {max_tokens}; the penalty needs "
            "1 <= buffer_tokens <= max_tokens."
        )
    left = (max_tokens - buffer_tokens - lengths).clamp(min=-buffer_tokens, max=0)
    return (left.double() / buffer_tokens).float()


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Return for each response ``[N]`` the sum of the values of its group; ``index``: the group's, from 0."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _centred(
    values: Tensor, index: Tensor, sizes: Tensor, baseline: Baseline | Tensor, lengths: Tensor | None
) -> Tensor:
    """Return ``r - b`` ``[N]`` for the baseline; ``sizes [N]``: number of responses in each response's group."""
    if isinstance(baseline, Tensor):
        if baseline.shape != values.shape:
            raise ValueError(f"baseline has shape {list(baseline.shape)}; pass one of shape {list(values.shape)}.")
        return baseline.double()
    if baseline == "group_mean":
        return values - _group_sum(values, index) / sizes
    if baseline == "batch_mean":
        return values - values.mean()
    if baseline == "none":
        return values
    if baseline == "length_weighted":
        if lengths is None or lengths.shape != values.shape:
            raise ValueError("baseline 'length_weighted' needs lengths [N], the number of tokens of each response.")
        weights = lengths.double()
        return values - _group_sum(weights * values, index) / _group_sum(weights, index).clamp(min=1)
    singles = int((sizes == 1).sum())
    if singles:
        raise UnusableValues(
            f"{baseline} needs at least 2 responses in every group, but {singles} of {int(index.max()) + 1} groups "
            "have 1; sample more responses per prompt or choose baseline='group_mean'."
        )
    if baseline == "best_of_others":
        lowest = torch.full_like(values, -torch.inf)
        is_best = values == lowest.scatter_reduce(0, index, values, "amax")[index]
        alone = _group_sum(is_best.double(), index) == 1
        second = lowest.scatter_reduce(0, index, values.masked_fill(is_best, -torch.inf), "amax")[index]
        return torch.where(is_best & alone, values - second, 0.0)
    return values - (_group_sum(values, index) - values) / (sizes - 1)


def _scale(values: Tensor, centred: Tensor, index: Tensor, sizes: Tensor, scale: Scale, eps: float) -> Tensor:
    if scale == "none":
        return torch.ones_like(values)
    if scale == "group_mean":
        negative = (values < 0).nonzero()
        if len(negative):
            row = int(negative[0])
            raise UnusableValues(
                f"the reward of row {row} is {values[row].item()}; scale 'group_mean' divides by the mean reward of "
                "the group, so no reward may be negative; use scale 'group_std', or rewards of 0 and more."
            )
        return _group_sum(values, index) / sizes
    if scale == "group_std":
        squares = (values - _group_sum(values, index) / sizes).square()
        variance = _group_sum(squares, index) / (sizes - 1).clamp(min=1)
        return variance.sqrt() + eps
    spread = values if scale == "batch_std" else centred
    variance = (spread - spread.mean()).square().sum() / max(spread.numel() - 1, 1)
    return variance.sqrt() + eps


def _check_rows(rewards: Tensor, group_ids: Tensor) -> None:
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"rewards and group_ids must both be [N], but they are {list(rewards.shape)} and "
            f"{list(group_ids.shape)}; pass one value of each per response."
        )
    finite = rewards.isfinite()
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise UnusableValues(f"the reward of row {row} is {rewards[row].item()}; a reward must be a finite number.")
