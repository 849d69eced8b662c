"""Divergences of two policies from the log-probs of sampled tokens, correction weights, and entropy control.

**KL estimators** return one value per token, without a reduction. All three use only the sampled token's log-probs;
with ``d = log_prob - ref_log_prob``, both ``[N, T]`` in nats, and tokens sampled from the policy:

====  ======================  ==================================  ======================================================
name  value                   mean of the value                   mean of the gradient, as a term of the loss
====  ======================  ==================================  ======================================================
k1    ``d``                   ``KL(policy, ref)``                 0: no effect in a loss, use it in the reward
k2    ``d^2 / 2``             ``KL(policy, ref)`` + O(d^3)        that of ``KL(policy, ref)``, exactly
k3    ``exp(-d) + d - 1``     ``KL(policy, ref)``                 that of ``KL(ref, policy)``, the *forward* divergence
====  ======================  ==================================  ======================================================

The gradients of one token are ``1``, ``d`` and ``1 - exp(-d)`` times that of ``log_prob``. The last column follows from
``E[grad log_prob] = 0``, ``grad KL(policy, ref) = E[d grad log_prob]`` and ``E[exp(-d) grad log_prob] =
-grad KL(ref, policy)``. For small ``d`` k2 and k3 agree; k3's gradient grows exponentially for a token
that is much likelier under the reference, and saturates at 1 for one that is much less likely.

Sources: Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html); k3 in the loss, Shao et al. 2024
(arXiv:2402.03300, eq. 4); gradients, Tang and Munos 2025 (arXiv:2506.09477).

**Correction weights** are the ratio of the proximal policy (the denominator of the loss's ratio) to the behaviour
policy (which sampled); "inside" means ``floor <= w <= cap``:

============  ====================================  ====================================================================
mode          weight                                source
============  ====================================  ====================================================================
``truncate``  ``min(max(w, floor), cap)``           Ionides 2008, "Truncated importance sampling", J. Comput. Graph.
                                                    Stat. 17; Espeholt et al. 2018 (arXiv:1802.01561, section 4.1)
``mask``      ``w`` inside, 0 outside               IcePop, Ling Team 2025 (arXiv:2510.18855)
``reject``    1 inside, 0 outside                   verl's rollout correction (for the geometric mean of a row:
                                                    ``seq_mean_k1``)
============  ====================================  ====================================================================

:func:`mean_ratio` and :func:`temperature_slope` detect differences between the log-probs of engine and trainer other
than rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

_ROUNDING = 1e-9  # tolerance of a rank: a product such as 0.8 * 5 may be computed slightly above 4


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ``log_prob - ref_log_prob``, of either sign; its mean over the policy's tokens is ``KL(policy, ref)``.

    >>> kl_k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return log_prob - ref_log_prob


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ``(log_prob - ref_log_prob)^2 / 2``, never negative; its mean gradient is that of ``KL(policy, ref)``.

    >>> kl_k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return 0.5 * (log_prob - ref_log_prob).square()


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor) -> Tensor:
    """Return ``exp(ref - log_prob) - (ref - log_prob) - 1``, never negative; the KL term of GRPO.

    Its mean over the policy's tokens is ``KL(policy, ref)``. ``expm1`` keeps digits that small log-ratios would lose.

    >>> round(kl_k3(torch.tensor([-1.0]), torch.tensor([-3.0])).item(), 4)  # exp(-2) + 2 - 1
    1.1353
    """
    difference = ref_log_prob - log_prob
    return torch.expm1(difference) - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence", "geometric"],
    mode: Literal["truncate", "mask", "reject"],
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Return the correction weight of every token ``[N, T]``: proximal over behaviour probability, bounded, detached.

    With ``log_ratio = proximal_log_prob - behaviour_log_prob``, the weight is ``exp(log_ratio_t)`` per token
    (``token``); or, for all trainable tokens of a row, the *product* ``exp(sum_t log_ratio_t)`` (``sequence``) or the
    *geometric mean* ``exp(mean_t log_ratio_t)`` (``geometric``) of the ratios. The weight is 0 where the mask is False.

    Token weights are biased but of low variance. The product, before it is bounded, is the unbiased weight of a whole
    response, but varies widely in long rows. The geometric mean varies little; it measures how off-policy the row is.

    Args:
        log_ratio: ``[N, T]``, nats; values where the mask is False are ignored.
        mask: bool ``[N, T]``, the trainable tokens.
        level: ``token``, ``sequence`` or ``geometric``, else ``ValueError``.
        mode: treatment of weights outside the bounds, see the module's table; another name raises ``ValueError``.
        cap, floor: largest and smallest weight (0: no lower bound); ``ValueError`` unless ``0 <= floor < cap``.

    Source: decoupled proximal policy, Hilton et al. 2021 (arXiv:2110.00641, section 3); see the module's table.

    >>> log_ratio = torch.tensor([[4.0, 0.5, 9.0]]).log()
    >>> mask = torch.tensor([[True, True, False]])
    >>> importance_weights(log_ratio, mask, level="token", mode="truncate", cap=3.0).tolist()
    [[3.0, 0.5, 0.0]]
    >>> importance_weights(log_ratio, mask, level="sequence", mode="truncate", cap=3.0).tolist()  # 4 * 0.5
    [[2.0, 2.0, 0.0]]
    """
    if mode not in ("truncate", "mask", "reject"):
        raise ValueError(f"mode is {mode!r}; choose truncate, mask or reject.")
    if not cap > 0:
        raise ValueError(f"cap is {cap}; it bounds the weights from above and must be greater than 0.")
    if not 0 <= floor < cap:
        raise ValueError(f"floor is {floor} and cap is {cap}; the bounds of the weights must satisfy 0 <= floor < cap.")
    weight = raw_weights(log_ratio, mask, level=level)
    if mode == "truncate":
        weight = weight.clamp(floor, cap)
    else:
        inside = (weight >= floor) & (weight <= cap)
        weight = (weight if mode == "mask" else torch.ones_like(weight)).where(inside, 0.0)
    return torch.where(mask, weight, 0.0)


def raw_weights(log_ratio: Tensor, mask: Tensor, *, level: Literal["token", "sequence", "geometric"]) -> Tensor:
    """Return the weights of :func:`importance_weights` without bounds; ValueError for an unknown level.

    Where the mask is False, the weight is 1 (``token``) or that of the row.
    """
    if level not in ("token", "sequence", "geometric"):
        raise ValueError(f"level is {level!r}; choose token, sequence or geometric.")
    log_weight = torch.where(mask, log_ratio.detach(), 0.0)
    if level != "token":
        total = log_weight.sum(-1, keepdim=True)
        count = mask.sum(-1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        log_weight = (total / count).expand_as(log_weight)
    return log_weight.exp()


def off_policy_tokens(
    log_prob: Tensor, behaviour: Tensor, advantage: Tensor, mask: Tensor, *, threshold: float
) -> Tensor:
    """Return a bool mask ``[N, T]`` of the tokens to drop from the loss: trainable, with ``A < 0``, in off-policy rows.

    A row is off-policy if ``mean_t (behaviour_t - log_prob_t) > threshold``, the mean over its trainable tokens. With
    ``A < 0`` the policy has then already moved away from a bad response.

    Args:
        log_prob: ``[N, T]``, nats, log-probs of the policy being trained; detached.
        behaviour: ``[N, T]``, nats, log-probs of the policy that sampled.
        advantage: ``[N, T]`` or ``[N, 1]``.
        mask: bool ``[N, T]``, all trainable tokens of each row.
        threshold: nats per token; ``ValueError`` below 0.

    Source: DeepSeek-AI 2025, "DeepSeek-V3.2" (arXiv:2512.02556, eq. 9 by TRL's count, off-policy sequence masking).

    >>> log_prob, behaviour = torch.tensor([[-3.0, -1.0], [-3.0, -1.0]]), torch.full((2, 2), -1.0)
    >>> mask, advantage = torch.ones(2, 2, dtype=torch.bool), torch.tensor([[-1.0], [1.0]])
    >>> off_policy_tokens(log_prob, behaviour, advantage, mask, threshold=0.5).tolist()  # the mean is 1
    [[True, True], [False, False]]
    """
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; it must be 0 or more.")
    gap = torch.where(mask, behaviour - log_prob.detach(), 0.0)
    mean = gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (mean > threshold) & (advantage < 0) & mask


class Estimate(NamedTuple):
    """An estimate from sampled tokens, and the estimate's standard error."""

    value: float
    error: float


def mean_ratio(gap: Tensor) -> Estimate:
    """Return the mean of ``p_trainer(x) / p_engine(x)`` over sampled tokens ``x``, and its standard error.

    If the engine samples from the distribution that it reports, this estimates the trainer's probability mass on the
    tokens that the engine can sample: 1, or less if the engine excludes tokens (about ``p`` with top-p). ``gap [n]`` is
    the trainer's minus the engine's log-probs, in nats. The error of one token is 0; the mean of none is NaN.

    >>> round(mean_ratio(torch.tensor([0.9, 0.9, 0.9]).log()).value, 4)
    0.9
    """
    ratio = gap.double().exp()
    return Estimate(float(ratio.mean()), float(ratio.std() / len(ratio) ** 0.5) if len(ratio) > 1 else 0.0)


def temperature_slope(gap: Tensor, log_prob: Tensor, entropy: Tensor) -> Estimate:
    """Estimate ``1 - T_trainer / T_engine`` from log-probs; return the estimate and its standard error.

    At inverse temperature ``b``, logits ``z`` give ``p(x) = exp(b z_x) / Z``, with the entropy ``H`` and the score
    ``s = d log p(x) / d log b = log p(x) + H``, of mean 0. To first order ``gap = (1 - T_trainer / T_engine) s``;
    the estimate is the slope of least squares through the origin, ``sum(gap s) / sum(s^2)``. Rounding errors are
    uncorrelated with ``s`` and give a slope of 0 on average. The standard error is heteroskedasticity-robust:
    ``sqrt(sum (gap - slope s)^2 s^2) / sum(s^2)``.

    ``gap [n]`` is the trainer's minus the engine's log-prob of each sampled token; ``log_prob`` and ``entropy`` ``[n]``
    are the trainer's, all in nats. If all ``s`` are 0 (as for tokens of probability 1), both results are 0.

    Source: White 1980, "A heteroskedasticity-consistent covariance matrix estimator", Econometrica 48.

    Two tokens of probability 3/4 and 1/4, sampled in that proportion; the trainer's logits are 1.25 times the engine's:

    >>> logits, sampled = torch.tensor([3.0, 1.0]).log(), torch.tensor([0, 0, 0, 1])
    >>> engine, trainer = (torch.log_softmax(b * logits, 0) for b in (1.0, 1.25))
    >>> entropy = -(trainer.exp() * trainer).sum().expand(4)
    >>> round(temperature_slope((trainer - engine)[sampled], trainer[sampled], entropy).value, 3)  # 1 - 1 / 1.25
    0.199
    """
    gap, score = gap.double(), (log_prob + entropy).double()
    total = score.square().sum()
    if not total > 0:
        return Estimate(0.0, 0.0)
    slope = (gap * score).sum() / total
    error = ((gap - slope * score).square() * score.square()).sum().sqrt() / total
    return Estimate(float(slope), float(error))


def top_entropy_tokens(entropy: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """Return a bool mask of the fraction ``share`` of the trained tokens with the highest entropy.

    These have ``H_t >= tau``, with ``tau`` the quantile ``1 - share`` of ``H`` over the ``n`` tokens of ``mask``: the
    value of ascending rank ``ceil((1 - share) (n - 1))``, counted from 0. Ties may make the fraction larger.

    Args:
        entropy: ``[N, T]`` or ``[n]``, nats; values where the mask is False are ignored.
        mask: bool, all trained tokens of an optimizer step; ``entropy``, ``mask`` and the result have one shape.
        share: fraction above 0 and up to 1 (all tokens), else ``ValueError``; 0.2 in the paper.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939), rho and tau of its objective; the rank is
    that of a linear quantile, as in TRL's ``top_entropy_quantile``.

    >>> entropy = torch.tensor([[0.1, 2.0, 0.3], [0.0, 1.0, 9.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> top_entropy_tokens(entropy, mask, share=0.4).tolist()  # (1 - 0.4) * 4 = 2.4, rank 3
    [[False, True, False], [False, True, False]]
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; the fraction of tokens must be above 0 and at most 1.")
    values = entropy[mask]
    if len(values) == 0:
        return torch.zeros_like(mask)
    rank = math.ceil((1 - share) * (len(values) - 1) - _ROUNDING)
    return (entropy >= values.sort().values[rank]) & mask


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float, largest: float
) -> tuple[float, float]:
    """Return the entropy bonus's adapted coefficient ``c'``, and its weight ``alpha`` in the next step's loss.

    ``c' = min(c + delta, c_max)`` if ``H <= H*``, else ``max(c - delta, 0)``; ``alpha = c' 1[H <= H*]``: the bonus acts
    only while the mean entropy ``H`` of a step is too low. ``coef`` is ``c``, ``largest`` is ``c_max``, ``entropy`` is
    ``H`` and ``target`` is ``H*``, both in nats.

    Source: He et al. 2025, "Skywork Open Reasoner 1" (arXiv:2505.22312), adaptive entropy control. The paper uses
    the entropy of the same step; here and in TRL 1.16 (``use_adaptive_entropy``) it is the previous step's, which is
    already known.

    >>> adapted_entropy_coef(0.25, 0.1, target=0.2, delta=0.125, largest=1.0)
    (0.375, 0.375)
    >>> adapted_entropy_coef(0.25, 0.3, target=0.2, delta=0.125, largest=1.0)
    (0.125, 0.0)
    """
    low = entropy <= target
    moved = min(coef + delta, largest) if low else max(coef - delta, 0.0)
    return moved, moved if low else 0.0
