"""How rows become optimizer steps: the learner's settings and its learning rate over time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sota_grpo.functional.weighting import Aggregation


@dataclass(frozen=True)
class LearnerSettings:
    """How rows become optimizer steps.

    Args:
        lr, weight_decay, beta1, beta2, eps: AdamW.
        clip_grad_norm: largest gradient norm; 0 leaves the gradient as it is.
        schedule: ``constant``, or ``linear`` or ``cosine`` to 0 at ``total_steps``; each after ``warmup_steps``.
        optim_batch_size: rows per optimizer step.
        epochs: passes over a batch.
        micro_batch_tokens: packed tokens per forward pass: each prompt once for its group, and every response.
        aggregation: ``token``, ``sequence`` or ``constant`` (DESIGN 4.3).
        max_response_tokens: the constant of ``constant``.
        drop_truncated: truncated rows take no part in the loss.
        recompute: the proximal log-probs are recomputed by this learner before the first step on a batch.
        precision: ``fp32``, ``bf16`` or ``fp16`` autocast; fp16 scales the loss.
    """

    lr: float
    total_steps: int
    optim_batch_size: int
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    epochs: int = 1
    micro_batch_tokens: int = 16384
    aggregation: Aggregation = "sequence"
    max_response_tokens: int | None = None
    drop_truncated: bool = False
    recompute: bool = False
    precision: str = "fp32"


def learning_rate_factor(step: int, settings: LearnerSettings) -> float:
    """Share of the peak learning rate at optimizer step ``step`` (0-based).

    >>> settings = LearnerSettings(lr=1.0, total_steps=10, optim_batch_size=8, schedule="linear", warmup_steps=2)
    >>> [learning_rate_factor(step, settings) for step in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, done)
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
