"""twinkle: ``GRPOLoss`` and its heirs, and ``GRPOAdvantage``.

The gradients of the micro-batches are added up and divided by their number
(model/transformers/transformers.py:687-707, utils/grad_clip.py:57), because each loss is a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, List, Literal, Optional, Union

import numpy as np
import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, Adapter, Rows, kl_of_step
from benchmarks.laws.wheels import members, root


def make(folder: Path) -> Adapter:
    package = root("twinkle", folder) / "twinkle"
    typing = {"Any": Any, "Dict": Dict, "List": List, "Literal": Literal, "Optional": Optional, "Union": Union}
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
    )
