"""Unsloth: ``grpo_compute_loss``, which replaces TRL's loss and computes what its memory-saving kernel splits.

It selects by the mask before the exponentials (unsloth_zoo/rl_replacements.py:997). ``use_bias_correction_kl`` and the
loss type are TRL's defaults; the advantages are computed by the TRL that is installed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, DUAL_CLIP, Adapter, Rows, kl_of_step
from benchmarks.laws.wheels import members, root

OBJECTIVES: dict[str, dict[str, Any]] = {
    "clipped": {"loss_type": "dapo"},
    "dual_clip": {"loss_type": "dapo", "delta": DUAL_CLIP},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + CISPO_CLIP},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}

_FAR = (
    "A ratio with a negative advantage has no upper bound by default; delta=3 is the option that bounds it, and it "
    "is set, with a clamp of the gap at 20 nats, if the engine's log-probs are used as the old ones. Otherwise the "
    "ratio of the first use of a batch is 1, so it is met with several updates per batch."
)


def make(folder: Path) -> Adapter:
    zoo = members(root("unsloth", folder) / "unsloth_zoo/rl_replacements.py", "grpo_compute_loss", math=math)

    def with_options(**options: object):
        def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
            beta = 0.0 if rows.ref is None else 1.0
            settings = {"epsilon_low": CLIP, "epsilon_high": CLIP, "num_items_in_batch": rows.mask.sum()}
            settings |= {"current_gradient_accumulation_steps": len(split), "steps_per_generation": len(split)}
            settings |= OBJECTIVES[objective] | options
            total = rows.log_prob.new_zeros(())
            for part in rows.parts(split):
                tokens, mask = torch.zeros(part.mask.shape, dtype=torch.int64), part.mask.long()
                given = (part.ref, part.log_prob, part.old, None, tokens, mask, beta, part.advantage)
                total = total + zoo.grpo_compute_loss(*given, **settings)[0]
            return total

        return step

    step = with_options(use_bias_correction_kl=True)
    return Adapter(
        step,
        weighting={"clipped": "token", "dual_clip": "token", "cispo": "token", "gspo": "sequence"},
        kl={"k3": kl_of_step(with_options(use_bias_correction_kl=False)), "default": kl_of_step(step)},
        kl_in_loss="default",
        absent={
            "advantages": "its advantages are TRL's",
            "kl": "its KL in the loss is k3, by default times the ratio, as in TRL",
            "uneven_split": "all micro-batches have per_device_train_batch_size responses",
        },
        notes={
            "kl_pull": "Its KL is clamped at 10, where the gradient is 0: beyond d = -2.6 and d = +11; TRL's is not "
            "clamped. It is met with beta above 0 by tokens far from the reference.",
            "far_token": _FAR,
            "overflow": _FAR,
        },
    )
