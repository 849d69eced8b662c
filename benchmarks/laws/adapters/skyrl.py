"""SkyRL: its policy losses as ``PolicyWorker._forward_backward_micro`` calls them (workers/worker.py:1145-1244).

Before, the trainer divides the advantages by the tokens of the mini-batch (train/trainer.py:1527), so that losses of
micro-batches are added up; the KL in the loss is a mean per micro-batch, weighted by its fraction of the responses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, DUAL_CLIP, Adapter, Rows
from benchmarks.laws.wheels import members, root

FUNCTIONS = {
    "clipped": ("ppo_policy_loss", "regular"),
    "dual_clip": ("ppo_policy_loss", "dual_clip"),
    "cispo": ("compute_policy_loss_cispo", "cispo"),
    "gspo": ("gspo_policy_loss", "gspo"),
}

_MASKED = (
    "The loss is multiplied by the mask, and NaN times 0 is NaN; the KL is selected by the mask. Infinite gaps are "
    "clamped to 20 nats, so only -inf in both log-probs, or NaN, gets through. Old and current log-probs come from "
    "the same model over the same tokens, so it is met only if that gives such a value for a masked slot."
)


class _Names:
    """Any name of an enum."""

    def __getattr__(self, name: str) -> str:
        return name


def make(folder: Path) -> Adapter:
    package = root("skyrl", folder) / "skyrl/backends/skyrl_train/utils"
    torch_utils = members(package / "torch_utils.py", "masked_mean", "safe_exp_delta")
    helpers = {"masked_mean": torch_utils.masked_mean, "safe_exp_delta": torch_utils.safe_exp_delta}
    correction = members(package / "off_policy_correction_utils.py", "apply_off_policy_correction", **helpers)
    losses = members(
        package / "ppo_utils.py",
        *("compute_approx_kl", "reduce_loss", "ppo_policy_loss", "compute_policy_loss_cispo", "gspo_policy_loss"),
        *("apply_loss_reduction_to_advantages_minibatch", "compute_grpo_outcome_advantage"),
        register_policy_loss=lambda name: lambda function: function,
        register_advantage_estimator=lambda name: lambda function: function,
        PolicyLossType=_Names(),
        AdvantageEstimator=_Names(),
        apply_off_policy_correction=correction.apply_off_policy_correction,
        defaultdict=defaultdict,
        **helpers,
    )

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        function, kind = FUNCTIONS[objective]
        config = SimpleNamespace(
            policy_loss_type=kind, eps_clip_low=CLIP, eps_clip_high=CLIP, clip_ratio_c=DUAL_CLIP,
            off_policy_correction=SimpleNamespace(tis_ratio_type=None), loss_reduction="sequence_mean",
            cispo=SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=1.0, cispo_eps_clip_high=CISPO_CLIP),
        )  # fmt: skip
        mask = rows.mask.double()
        scaled = losses.apply_loss_reduction_to_advantages_minibatch(
            advantages=rows.advantage[:, None] * rows.response,
            loss_mask=mask,
            loss_reduction="sequence_mean" if objective == "gspo" else "token_mean",
            micro_batch_size=split[0],
            max_seq_len=mask.shape[1],
        )
        total, start = rows.log_prob.new_zeros(()), 0
        for part in rows.parts(split):
            index = slice(start, start := start + len(part.mask))
            loss = getattr(losses, function)(part.log_prob, part.old, scaled[index], config, mask[index])[0]
            if part.ref is not None:
                kl = losses.compute_approx_kl(part.log_prob, part.ref, mask[index], "k3")
                loss = loss + torch_utils.masked_mean(kl, mask[index], dim=-1).mean() * len(part.mask) / len(mask)
            total = total + loss
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        index = np.array([str(row // group_size) for row in range(len(rewards))])
        scores = rewards.reshape(-1, 1).clone()
        return losses.compute_grpo_outcome_advantage(scores, scores.new_ones(scores.shape), index)[0]

    def kl(name: str):
        return lambda log_prob, ref: losses.compute_approx_kl(log_prob, ref, kl_estimator_type=name)

    return Adapter(
        step,
        weighting={"clipped": "token", "dual_clip": "token", "cispo": "token", "gspo": "sequence"},
        kl={"k1": kl("k1"), "k2": kl("k2"), "k3": kl("k3")},
        kl_in_loss="k3",
        advantages=advantages,
        unmet=("masked_inf", "masked_nan"),
        notes={
            "kl_pull": "k3, the default of kl_estimator_type, is clamped at 10, where its gradient is 0: beyond d = "
            "-2.6 and d = +11. It is met by tokens far from the reference; the KL is in the loss by default. k2 "
            "avoids it.",
            "masked_inf": _MASKED,
            "masked_nan": _MASKED,
            "equal_rewards": "Mean and standard deviation of equal float32 rewards can differ from the reward and "
            "from 0 by rounding, which is divided by std + 1e-6. Rewards of 0 and 1 are exact; fractions and model "
            "scores are met. zero_variance_filter, off by default, or grpo_norm_by_std=False avoids it.",
            "group_of_one": "The code sets the mean to 0 and the standard deviation to 1, so with "
            "n_samples_per_prompt=1 the advantage is the reward: REINFORCE without a baseline, as in verl, from "
            "which it comes. Its RLOO gives 0.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are, and with them the loss "
            "of the step. The FSDP strategy then skips the step, since the gradient's norm is not finite.",
        },
    )
