"""What differs between engine and trainer, from the log-probs of sampled tokens: laws that rounding obeys."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Estimate(NamedTuple):
    """A mean over tokens and its standard error."""

    value: float
    error: float


def mean_ratio(gap: Tensor) -> Estimate:
    """Mean of ``p_trainer(x) / p_engine(x)`` over sampled tokens ``x``.

    ``E_engine[p_trainer / p_engine]`` is the trainer's mass where the engine samples at all: 1 for any two policies,
    however far apart, unless the engine leaves tokens out (top-p, top-k) or reports another distribution than it
    samples from. Under top-p it is about the p.

    Args:
        gap: ``[n]``, log-prob of the trainer minus that of the engine, nats.

    >>> import torch
    >>> round(mean_ratio(torch.tensor([0.9, 0.9, 0.9]).log()).value, 4)
    0.9
    """
    ratio = gap.double().exp()
    return Estimate(float(ratio.mean()), float(ratio.std() / len(ratio) ** 0.5) if len(ratio) > 1 else 0.0)


def temperature_slope(gap: Tensor, log_prob: Tensor, entropy: Tensor) -> Estimate:
    """``1 - T_trainer / T_engine``, from log-probs alone.

    With ``p_b(x) = exp(b z_x) / Z`` the score of the inverse temperature is ``s = d log p_b(x) / d log b = log p_b(x)
    + H``, whose mean under ``p_b`` is 0. Two temperatures give ``gap = (1 - T_trainer / T_engine) s`` to first order;
    the slope of least squares through the origin, ``sum(gap s) / sum(s^2)``, is that share. Rounding moves a token
    whichever its score, so that its slope is 0. The standard error allows each token a variance of its own:
    ``sqrt(sum (gap - slope s)^2 s^2) / sum(s^2)``.

    Args:
        gap: ``[n]``, log-prob of the trainer minus that of the engine, nats.
        log_prob: ``[n]``, of the trainer.
        entropy: ``[n]``, of the trainer where the token was sampled.

    Returns:
        0 with error 0 where every token is certain: nothing can be seen there.

    Source: White 1980, "A heteroskedasticity-consistent covariance matrix estimator", Econometrica 48.

    Two symbols at odds of 3 to 1, sampled as often; the trainer's logits are 1.25 times the engine's:

    >>> import torch
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
