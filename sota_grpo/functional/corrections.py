"""Correction weights from the behaviour policy that sampled to the proximal policy that the ratio is taken to."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    cap: float,
) -> Tensor:
    """Detached weight of every token: proximal over behaviour probability, bounded by ``cap``.

    With ``log_ratio = proximal_log_prob - behaviour_log_prob``, ``w_t = exp(log_ratio_t)`` per token, or per sequence
    the *product* over the row's trainable tokens, ``w = exp(sum_t log_ratio_t)``, on each of them. Then ``truncate``
    keeps ``min(w, cap)`` and ``mask`` keeps ``w`` where ``w <= cap`` and 0 elsewhere. Off the mask the weight is 0 and
    what stands there is not read. The product is a sum of logs, so a long row cannot overflow before it is bounded.

    Token weights are biased but tame; the product is the unbiased weight of a whole response, and its spread grows
    with the length: for long responses most rows end near 0 or at the cap.

    Args:
        log_ratio: ``[N, T]``, nats.
        mask: bool ``[N, T]``, the trainable tokens.
        level: one weight per token, or one per row.
        mode: what happens above the cap.
        cap: largest weight, positive.

    Returns:
        ``[N, T]``, no gradient.

    Raises:
        ValueError: on an unknown level or mode, or a cap that is not positive.

    Sources: truncation, Ionides 2008, "Truncated importance sampling", J. Comput. Graph. Stat. 17, and Espeholt et al.
    2018 (arXiv:1802.01561, section 4.1); decoupled proximal policy, Hilton et al. 2021 (arXiv:2110.00641, section 3).

    >>> log_ratio = torch.tensor([[4.0, 0.5, 9.0]]).log()
    >>> mask = torch.tensor([[True, True, False]])
    >>> importance_weights(log_ratio, mask, level="token", mode="truncate", cap=3.0).tolist()
    [[3.0, 0.5, 0.0]]
    >>> importance_weights(log_ratio, mask, level="token", mode="mask", cap=3.0).tolist()
    [[0.0, 0.5, 0.0]]
    >>> importance_weights(log_ratio, mask, level="sequence", mode="truncate", cap=3.0).tolist()  # 4 * 0.5
    [[2.0, 2.0, 0.0]]
    """
    if level not in ("token", "sequence"):
        raise ValueError(f"level is {level!r}; choose token or sequence.")
    if mode not in ("truncate", "mask"):
        raise ValueError(f"mode is {mode!r}; choose truncate or mask.")
    if not cap > 0:
        raise ValueError(f"cap is {cap}; the largest weight must be positive.")
    log_weight = torch.where(mask, log_ratio.detach(), 0.0)
    if level == "sequence":
        log_weight = log_weight.sum(-1, keepdim=True)
    weight = log_weight.exp()
    weight = weight.clamp(max=cap) if mode == "truncate" else torch.where(weight > cap, 0.0, weight)
    return torch.where(mask, weight, 0.0)
