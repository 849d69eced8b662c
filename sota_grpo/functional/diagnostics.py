"""Detached scalars that say how an update is going. Over an empty mask each is NaN: there was nothing to measure."""

from __future__ import annotations

import torch
from torch import Tensor

from sota_grpo.functional.divergences import kl_k3


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``x`` over the True slots of ``mask``; the other slots are not read.

    ``x`` is ``[N, T]`` (booleans count as 0 and 1), ``mask`` bool ``[N, T]``; the result is a detached scalar.

    >>> masked_mean(torch.tensor([[1.0, 3.0, float("nan")]]), torch.tensor([[True, True, False]])).item()
    2.0
    """
    values = x.detach() if x.is_floating_point() else x.float()
    return torch.where(mask, values, 0.0).sum() / mask.sum()


def effective_sample_size(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Share of the tokens that importance weighting leaves in effect.

    ``(sum w)^2 / (n sum w^2)`` with ``w = exp(log_ratio)`` over the n masked tokens: 1 when all weights are equal, 1/n
    when one token has all the weight. Computed with the largest weight scaled to 1, so that it cannot overflow.

    Args:
        log_ratio: ``[N, T]``, nats.
        mask: bool ``[N, T]``.

    Returns:
        detached scalar in (0, 1].

    Source: Kong 1992, "A note on importance sampling using standardized weights"; Owen 2013, "Monte Carlo theory,
    methods and examples", section 9.3.

    >>> log_ratio = torch.tensor([[3.0, 1.0, 100.0]]).log()
    >>> round(effective_sample_size(log_ratio, torch.tensor([[True, True, False]])).item(), 4)  # 16 / (2 * 10)
    0.8
    """
    log_weight = torch.where(mask, log_ratio.detach(), -torch.inf)
    if log_weight.numel() == 0:
        return log_ratio.new_full((), torch.nan)
    weight = (log_weight - log_weight.max()).exp()
    return weight.sum().square() / weight.square().sum() / mask.sum()


def mismatch_kl(trainer_log_prob: Tensor, engine_log_prob: Tensor, mask: Tensor) -> Tensor:
    """How far the trainer's distribution is from the engine's that sampled: ``KL(engine, trainer)`` per token.

    The mean of k3, ``exp(d) - d - 1`` with ``d = trainer - engine``, over the sampled tokens; 0 when the two compute
    the same log-probs, and unbiased because the tokens were drawn from the engine.

    Args:
        trainer_log_prob: ``[N, T]``, nats, of the weights that the engine served, computed by the trainer.
        engine_log_prob: ``[N, T]``, nats, as reported by the engine.
        mask: bool ``[N, T]``, the sampled tokens.

    Returns:
        detached scalar, nats per token.

    >>> same = torch.tensor([[-1.0, -2.0]])
    >>> mismatch_kl(same, same, torch.tensor([[True, True]])).item()
    0.0
    """
    return masked_mean(kl_k3(engine_log_prob, trainer_log_prob), mask)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of each categorical distribution, ``-sum_v p_v log p_v``, in nats; differentiable.

    Args:
        logits: ``[..., V]``; float16 and bfloat16 are computed in float32. A logit of -inf is a symbol of
            probability 0.

    Returns:
        ``[...]``, between 0 and log V.

    >>> round(token_entropy(torch.zeros(1, 4)).item(), 4)  # log 4
    1.3863
    """
    values = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    log_p = values.log_softmax(-1)
    finite = torch.where(log_p == -torch.inf, 0.0, log_p)
    return -(log_p.exp() * finite).sum(-1)
