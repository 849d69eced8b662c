"""ms-swift: ``GRPOTrainer._compute_loss_and_metrics`` with given log-probs, loss type ``grpo``, its default.

Transformers' trainer divides the loss by the accumulation (rlhf_trainers/grpo_trainer.py:1230); the advantage is
broadcast to all tokens (grpo_trainer.py:283).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, DUAL_CLIP, Adapter, Rows, kl_of_step
from benchmarks.laws.wheels import members, root

OBJECTIVES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "dual_clip": {"delta": DUAL_CLIP},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + CISPO_CLIP},
    "gspo": {"level": "sequence"},
}

_MASKED = (
    "The loss is multiplied by the mask, and inf or NaN times 0 is NaN. In its own loop old and current log-probs "
    "come from the same model over the same tokens, so a masked slot is as finite and as near as any other. It is "
    "met if a plugin fills masked slots of the old log-probs with a sentinel such as -inf, NaN or -1e4."
)
_FAR = (
    "A ratio with a negative advantage has no upper bound by default; delta is the option that bounds it. In the "
    "first use of a batch the ratio is 1, since the old log-probs are the trainer's own, so it is met with several "
    "updates per batch."
)


def make(folder: Path) -> Adapter:
    package = root("ms_swift", folder) / "swift"
    typing = {"Any": Any, "Dict": dict, "List": list, "Optional": Optional, "Tuple": tuple}
    trainer = members(
        package / "rlhf_trainers/grpo_trainer.py",
        *("WINDOW_NORMALIZED_LOSS_TYPES", "GRPOTrainer._compute_loss_and_metrics"),
        "GRPOTrainer._undo_gradient_accumulation_scaling",
        profiling_decorator=lambda function: function,
        gather_object=lambda values: values,
        nanmin=lambda values: values.min(),
        nanmax=lambda values: values.max(),
        **typing,
    )
    core = members(package / "rl_core/advantage.py", "compute_advantages", nanstd=None, **typing)

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        options = {"loss_type": "grpo", "delta": None, "epsilon_high": CLIP, "level": "token"} | OBJECTIVES[objective]
        accelerator = SimpleNamespace(num_processes=1, gather_for_metrics=lambda value: value)
        this = SimpleNamespace(
            model=SimpleNamespace(training=True), accelerator=accelerator, compute_entropy=False, overlong_filter=False,
            args=SimpleNamespace(delta=options["delta"], gradient_accumulation_steps=len(split)),
            beta=0.0 if rows.ref is None else 1.0, kl_in_reward=False, rollout_importance_sampling_mode=None,
            log_rollout_offpolicy_metrics=False, disable_rollout_importance_sampling=False,
            importance_sampling_level=options["level"], _has_teacher=False, off_policy_sequence_mask_delta=None,
            loss_type=options["loss_type"], epsilon_low=CLIP, epsilon_high=options["epsilon_high"], sdar_loss_coef=0.0,
            chord_sft_iterator=None, model_accepts_loss_kwargs=False, compute_loss_func=None,
            current_gradient_accumulation_steps=len(split),
        )  # fmt: skip
        this._undo_gradient_accumulation_scaling = lambda loss: trainer._undo_gradient_accumulation_scaling(this, loss)
        total = rows.log_prob.new_zeros(())
        for part in rows.parts(split):
            this._get_per_token_logps_and_entropies = lambda *_, part=part, **__: (part.log_prob, None)
            batch = SimpleNamespace(
                completion_mask=part.mask, truncated_mask=torch.zeros(len(part.mask), dtype=torch.bool),
                old_per_token_logps=part.old, ref_per_token_logps=part.ref, rollout_per_token_logps=None,
                advantages=part.advantage[:, None].expand(part.mask.shape), num_items_in_batch=rows.mask.sum(),
                teacher_per_token_logps=None,
            )  # fmt: skip
            total = total + trainer._compute_loss_and_metrics(this, this.model, {}, batch)[0] / len(split)
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        if group_size < 2:
            raise ValueError("num_generations must be greater than 1 for GRPO")  # arguments/rlhf_args.py:409
        return core.compute_advantages(rewards.reshape(-1, 1), torch.ones(1), group_size)[0]

    return Adapter(
        step,
        weighting={"clipped": "sequence", "dual_clip": "sequence", "cispo": "token", "gspo": "sequence"},
        kl={"k3": kl_of_step(step)},
        kl_in_loss="k3",
        advantages=advantages,
        absent={
            "kl": "its KL in the loss is k3",
            "uneven_split": "all micro-batches have per_device_train_batch_size responses",
        },
        unmet=("masked_garbage", "masked_inf", "masked_nan"),
        notes={
            "kl_pull": "k3 is clamped at 10, where its gradient is 0: beyond d = -2.6 and d = +11. It is met with "
            "beta above 0 by tokens far from the reference. No option of the loss avoids it; kl_in_reward moves the "
            "KL to the reward.",
            "masked_garbage": _MASKED,
            "masked_inf": _MASKED,
            "masked_nan": _MASKED,
            "far_token": _FAR,
            "overflow": _FAR,
            "equal_rewards": "Mean and standard deviation of equal float32 rewards can differ from the reward and "
            "from 0 by rounding, which is divided by std + 1e-4. Rewards of 0 and 1 are exact, and with rewards of "
            "at most 1 the advantage stays below 0.002. dynamic_sample, which draws groups without variance again, "
            "or scale_rewards=none avoids it.",
        },
    )
