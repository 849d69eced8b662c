"""torchtitan: ``DAPOLoss``, of which its ``GRPOLoss`` is a case, and ``AdvantageEstimator`` divided by the std.

The trainer adds the losses of the micro-batches, each divided by the tokens of the whole step
(experiments/rl/actors/trainer.py:404). Groups whose rewards have a standard deviation of exactly 0 are dropped before
(experiments/rl/components/training_sample_builder.py:81), here an advantage of 0.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.laws.adapter import CLIP, Adapter, Rows
from benchmarks.laws.wheels import members, root


class _Configurable:
    """In place of torchtitan's base classes."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        pass


def make(folder: Path) -> Adapter:
    package = root("torchtitan", folder) / "torchtitan/experiments/rl"
    context = {"dataclass": dataclasses.dataclass, "BaseLoss": _Configurable, "Configurable": _Configurable}
    losses = members(
        package / "losses/dapo.py",
        *("_MAX_LOG_RATIO", "DAPOLoss"),
        compute_logprobs=lambda logits, labels, return_entropy: (logits, torch.zeros_like(logits)),
        **context,
    )
    estimators = members(package / "rollout/advantage.py", "AdvantageEstimator", statistics=statistics, **context)

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        del objective
        loss = losses.DAPOLoss(losses.DAPOLoss.Config(ratio_clip_low=CLIP, ratio_clip_high=CLIP))
        tokens = int((rows.mask & rows.old.isfinite()).sum())
        return sum(
            loss(
                part.log_prob,
                None,
                tokens,
                generator_logprobs=part.old,
                advantages=part.advantage[:, None] * part.mask,
                loss_mask=part.mask,
            )[0]
            for part in rows.parts(split)
        )  # type: ignore[return-value]

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        estimator = estimators.AdvantageEstimator(estimators.AdvantageEstimator.Config(should_std_normalize=True))
        found: list[float] = []
        for group in rewards.double().view(-1, group_size).tolist():
            rollouts = [SimpleNamespace(reward=reward) for reward in group]
            dropped = len(group) > 1 and statistics.pstdev(group) == 0.0
            found += [0.0] * len(group) if dropped else estimator(SimpleNamespace(rollouts=rollouts))
        return torch.tensor(found)

    return Adapter(
        step,
        weighting={"clipped": "token"},
        advantages=advantages,
        absent={"kl": "it has no KL", "dual_clip": "it has no dual clip", "cispo": "no CISPO", "gspo": "no GSPO"},
    )
