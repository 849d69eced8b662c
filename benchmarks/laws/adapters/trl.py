"""TRL: ``GRPOTrainer._compute_loss`` and the advantages of ``_generate_and_score_completions``, with given log-probs.

Settings are the defaults of ``GRPOConfig`` (loss type ``dapo``, no vLLM) but for CISPO and GSPO, which take the loss
types that TRL's paper index gives them. The loss divides by the accumulation itself (grpo_trainer.py:3153-3174).
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, DUAL_CLIP, Adapter, Rows, kl_of_step
from benchmarks.laws.wheels import NotInstalled, statements

OBJECTIVES = {
    "clipped": {"loss_type": "dapo"},
    "dual_clip": {"loss_type": "dapo", "delta": DUAL_CLIP},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1 + CISPO_CLIP},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
}

_MASKED = (
    "The loss is multiplied by the mask, and inf or NaN times 0 is NaN. In its own loop old and current log-probs "
    "come from the same model over the same tokens, so a masked slot is as finite and as near as any other, and the "
    "engine's log-probs, which may be missing, are treated apart. It is met if a subclass or a custom rollout fills "
    "masked slots of the old log-probs with a sentinel such as -inf, NaN or -1e4."
)
_FAR = (
    "A ratio with a negative advantage has no upper bound by default; delta=3 is the option that bounds it. In the "
    "first use of a batch the ratio is 1, since the old log-probs are the trainer's own, and the gap to the engine is "
    "corrected apart with vLLM. So it is met with several updates per batch (num_iterations, steps_per_generation) "
    "after the policy has moved by several nats at one token."
)


def make(folder: Path) -> Adapter:
    del folder
    try:
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer.utils import nanstd
    except ImportError as error:
        raise NotInstalled(f"trl: {error}") from error
    defaults = {item.name: item.default for item in fields(GRPOConfig)}

    def trainer(rows: Rows, objective: str, steps: int, **options: object) -> SimpleNamespace:
        args = SimpleNamespace(**defaults | OBJECTIVES[objective] | options)
        args.steps_per_generation = steps
        accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x)
        accelerator.gather_for_metrics = accelerator.gather
        return SimpleNamespace(
            args=args,
            model=SimpleNamespace(training=True),
            accelerator=accelerator,
            loss_type=args.loss_type,
            importance_sampling_level=args.importance_sampling_level,
            epsilon_low=CLIP,
            epsilon_high=args.epsilon_high or CLIP,
            beta=0.0 if rows.ref is None else 1.0,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            use_vllm=False,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=steps,
            max_completion_length=args.max_completion_length,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )

    def with_options(**options: object):
        def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
            this = trainer(rows, objective, len(split), **options)
            total = rows.log_prob.new_zeros(())
            for part in rows.parts(split):
                this._get_per_token_logps_and_entropies = lambda *_, part=part, **__: (
                    part.log_prob,
                    torch.zeros_like(part.log_prob),
                    None,
                )
                empty = torch.zeros(len(part.mask), 0, dtype=torch.int64)
                inputs = {
                    "prompt_ids": empty,
                    "prompt_mask": empty,
                    "completion_ids": torch.zeros(part.mask.shape, dtype=torch.int64),
                    "completion_mask": part.response.long(),
                    "tool_mask": part.mask.long(),
                    "advantages": part.advantage,
                    "old_per_token_logps": part.old,
                    "ref_per_token_logps": part.ref,
                    "num_items_in_batch": rows.mask.sum(),
                }
                total = total + GRPOTrainer._compute_loss(this, this.model, inputs)
            return total

        return step

    run = statements(
        Path(inspect.getfile(GRPOTrainer)),
        "GRPOTrainer._generate_and_score_completions",
        "unscorable_mask = torch.isnan",
        "advantages = torch.nan_to_num(advantages",
    )

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        if group_size < 2:
            GRPOConfig(num_generations=group_size, report_to="none", use_cpu=True, bf16=False)  # refuses it
        this = SimpleNamespace(
            multi_objective_aggregation=defaults["multi_objective_aggregation"],
            scale_rewards=defaults["scale_rewards"],
            reward_weights=torch.ones(1),
        )
        values = {"self": this, "device": "cpu", "nanstd": nanstd, "num_generations": group_size}
        return run(rewards_per_func=rewards.reshape(-1, 1), **values)["advantages"]

    step = with_options()
    return Adapter(
        step,
        weighting={"clipped": "token", "dual_clip": "token", "cispo": "token", "gspo": "sequence"},
        kl={"k3": kl_of_step(with_options(use_bias_correction_kl=False)), "default": kl_of_step(step)},
        kl_in_loss="default",
        advantages=advantages,
        absent={
            "kl": "its KL in the loss is k3, by default times the ratio, whose gradient on policy is that of k2",
            "uneven_split": "all micro-batches have per_device_train_batch_size responses",
        },
        unmet=("masked_garbage", "masked_inf", "masked_nan"),
        notes={
            "masked_garbage": _MASKED,
            "masked_inf": _MASKED,
            "masked_nan": _MASKED,
            "far_token": _FAR,
            "overflow": _FAR,
            "equal_rewards": "Mean and standard deviation of equal float32 rewards can differ from the reward and "
            "from 0 by rounding, which is divided by std + 1e-4. Rewards of 0 and 1 are exact, and with rewards of "
            "at most 1 the advantage stays below 0.002; larger ones, such as sums of weighted terms and model "
            "scores, are met. frac_reward_zero_std shows how many groups are concerned. scale_rewards=none avoids it.",
        },
    )
