"""OpenRLHF: ``PolicyLoss`` and ``compute_approx_kl`` as ``ActorPPOTrainer.training_step`` calls them.

Its guards: the actor multiplies log-probs by the action mask (models/actor.py:298), ``iter_grad_accum_global_norm``
divides by the tokens of the whole step and multiplies by the accumulation (utils/loss_utils.py:80), which DeepSpeed
divides by. Advantages are those of ``compute_advantages_and_returns`` with the estimator ``group_norm``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Optional, Union

import torch
from torch import Tensor

from benchmarks.laws.adapter import CLIP, DUAL_CLIP, Adapter, Rows
from benchmarks.laws.wheels import members, root

OBJECTIVES = {
    "clipped": {},
    "dual_clip": {"dual_clip": DUAL_CLIP},
    "gspo": {"policy_loss_type": "gspo"},
}

_MASKED = (
    "The actor multiplies log-probs by the mask, which makes every finite value 0; but inf or NaN times 0 is NaN. It "
    "is met only if a model's own log-probs of padding are not finite, since the old ones come from the same model."
)


def make(folder: Path) -> Adapter:
    package = root("openrlhf", folder) / "openrlhf"
    typing = {"Optional": Optional, "Tuple": tuple, "Union": Union}
    names = ("KL_IS_WEIGHT_CLIP", "compute_approx_kl", "compute_reward", "masked_mean")
    utils = members(package / "models/utils.py", *names, **typing)
    losses = members(
        package / "models/loss.py", "aggregate_loss", "PolicyLoss", masked_mean=utils.masked_mean, **typing
    )
    scaling = members(
        package / "utils/loss_utils.py",
        *("_optimizer_step_loss_norm", "iter_grad_accum_global_norm"),
        dist=torch.distributed,
        _get_dp_group=lambda strategy: None,
    )
    maker = members(
        package / "trainer/ppo_utils/experience_maker.py",
        *("RemoteExperienceMaker.compute_advantages_and_returns", "RemoteExperienceMaker.get_cumulative_returns"),
        itertools=itertools,
        apply_length_penalties=lambda experiences, args: None,
        compute_reward=utils.compute_reward,
        logger=None,
    )

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        policy_loss = losses.PolicyLoss(CLIP, CLIP, **OBJECTIVES[objective])
        total = rows.log_prob.new_zeros(())
        for part, info in scaling.iter_grad_accum_global_norm(
            rows.parts(split), None, len(split), lambda part: part.mask
        ):
            mask = part.mask.double()
            log_prob, old = part.log_prob * mask, part.old * mask
            loss = policy_loss(log_prob, old, part.advantage[:, None] * part.response, mask, **info)[0]
            if part.ref is not None:
                kl = utils.compute_approx_kl(log_prob, part.ref * mask, old, kl_estimator="k3")
                loss = loss + losses.aggregate_loss(kl, mask, **info)
            total = total + loss / len(split)  # DeepSpeed's
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        if group_size < 2:
            raise ValueError("group_norm requires n_samples_per_prompt > 1")  # cli/train_ppo_ray.py:656
        advantage = SimpleNamespace(estimator="group_norm", gamma=1.0, no_std_norm=False)
        args = SimpleNamespace(
            rollout=SimpleNamespace(n_samples_per_prompt=group_size),
            algo=SimpleNamespace(advantage=advantage),
            reward=SimpleNamespace(clip_range=None),
        )
        this = SimpleNamespace(strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0))
        this.advantage_estimator = "group_norm"
        this.get_cumulative_returns = lambda *given: maker.get_cumulative_returns(this, *given)
        ones = torch.ones(len(rewards), 1)
        experience = SimpleNamespace(index=list(range(len(rewards))), rewards=rewards, info={}, kl=0 * ones)
        experience.action_mask = ones
        maker.compute_advantages_and_returns(this, [experience])
        return experience.advantages

    def kl(name: str):
        return lambda log_prob, ref: utils.compute_approx_kl(log_prob, ref, kl_estimator=name)

    return Adapter(
        step,
        weighting={"clipped": "token", "dual_clip": "token", "gspo": "sequence"},
        kl={"k1": kl("k1"), "k2": kl("k2"), "k3": kl("k3")},
        kl_in_loss="k3",
        advantages=advantages,
        absent={"cispo": "it has no CISPO"},
        unmet=("masked_inf", "masked_nan"),
        notes={
            "kl_pull": "k2 and k3 are clamped at 10, where their gradient is 0: k3 beyond d = -2.6 and d = +11. It "
            "is met with kl.use_loss by tokens far from the reference. kl.unbiased_gradient, off by default, avoids "
            "it.",
            "masked_inf": _MASKED,
            "masked_nan": _MASKED,
            "equal_rewards": "Equal float32 rewards can have a mean that differs from them by rounding and a "
            "standard deviation of exactly 0, and the difference is divided by 1e-9. It is met with the estimator "
            "group_norm and rewards that are no sums of powers of 2 (0.1, 0.7, a model's score): 8 rewards of 0.1 "
            "give advantages of 7.5; 0 and 1 are exact. The estimators rloo, reinforce_baseline and dr_grpo avoid "
            "it; dynamic filtering goes by the mean and does not.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are, and with them the loss "
            "of the step. No check of the reward was found before it.",
        },
    )
