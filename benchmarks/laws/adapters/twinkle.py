"""twinkle: ``GRPOLoss`` and its heirs, and ``GRPOAdvantage``.

The gradients of the micro-batches are added up and divided by their number
(model/transformers/transformers.py:687-707, utils/grad_clip.py:57), because each loss is a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

import numpy as np
import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, Adapter, Rows, kl_of_step
from benchmarks.laws.wheels import members, root

_MASKED = (
    "The loss is multiplied by the mask, and NaN times 0 is NaN. Infinite gaps are clamped to 20 nats, so only -inf "
    "in both log-probs, or NaN, gets through. Old log-probs of responses alone are put into the trained slots, 0 "
    "elsewhere, so it is met with old log-probs of whole rows, or if the model gives such a value for a masked slot."
)


def make(folder: Path) -> Adapter:
    package = root("twinkle", folder) / "twinkle"
    typing = {"Any": Any, "Dict": dict, "List": list, "Literal": Literal, "Optional": Optional, "Union": Union}
    losses = members(
        package / "loss/grpo.py", "GRPOLoss", "GSPOLoss", "CISPOLoss", Loss=object, LossOutput=SimpleNamespace, np=np,
        selective_log_softmax=None, **typing,
    )  # fmt: skip
    estimator = members(package / "advantage/grpo.py", "GRPOAdvantage", Advantage=object, **typing)

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        kind = {"clipped": losses.GRPOLoss, "gspo": losses.GSPOLoss, "cispo": losses.CISPOLoss}[objective]
        loss = kind(epsilon=CISPO_CLIP if objective == "cispo" else CLIP, beta=0.0 if rows.ref is None else 1.0)
        total = rows.log_prob.new_zeros(())
        for part in rows.parts(split):
            labels = torch.where(part.mask, 1, -100)
            given = {"old_logps": part.old, "ref_logps": part.ref, "advantages": part.advantage}
            total = total + loss({"labels": labels}, {"logps": part.log_prob}, **given).loss / len(split)
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        return estimator.GRPOAdvantage()(rewards, num_generations=group_size)

    return Adapter(
        step,
        weighting={"clipped": "sequence", "cispo": "token", "gspo": "sequence"},
        kl={"k3": kl_of_step(step)},
        kl_in_loss="k3",
        advantages=advantages,
        absent={"dual_clip": "it has no dual clip", "kl": "its KL in the loss is k3"},
        unjudged={"uneven_split": "its user chooses the micro-batches, by default of one size"},
        unmet=("masked_inf", "masked_nan"),
        notes={
            "masked_inf": _MASKED,
            "masked_nan": _MASKED,
            "equal_rewards": "Equal float32 rewards can have a mean that differs from them by rounding and a "
            "standard deviation of exactly 0, and the difference is divided by 1e-8. It is met with rewards that are "
            "no sums of powers of 2 (0.1, 0.7, a model's score); 0 and 1 are exact. scale=none avoids it.",
            "group_of_one": "With num_generations=1, the default of the call, the rewards are returned as they are: "
            "REINFORCE without a baseline.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are, and with them the loss.",
        },
    )
