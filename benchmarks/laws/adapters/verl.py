"""verl: ``ppo_loss`` of its engine workers (workers/utils/losses.py:54), once per micro-batch, and the GRPO advantages.

The engine sums the micro-batches' gradients without a division (workers/engine/fsdp/transformer_impl.py:768), because
each loss is divided by the tokens of the whole step. Log-probs are padded here, as ``no_padding_2_padding`` gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from tensordict import TensorDict
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, Adapter, Rows
from benchmarks.laws.wheels import NotInstalled

MODES: dict[str, dict[str, Any]] = {
    "dual_clip": {"policy_loss": "vanilla"},
    "cispo": {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": CISPO_CLIP},
    "gspo": {"policy_loss": "gspo", "loss_agg_mode": "seq-mean-token-mean"},
}


def make(folder: Path) -> Adapter:
    del folder
    try:
        from verl.trainer.config import AlgoConfig
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig, PolicyLossConfig
        from verl.workers.utils import losses
    except ImportError as error:
        raise NotInstalled(f"verl: {error}") from error

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        options = dict(MODES[objective])
        policy_loss = PolicyLossConfig(loss_mode=options.pop("policy_loss"))
        config = ActorConfig(
            strategy="fsdp", rollout_n=2, use_dynamic_bsz=True, ppo_mini_batch_size=len(rows.mask),
            policy_loss=policy_loss, use_kl_loss=rows.ref is not None, kl_loss_coef=1.0, **options,
        )  # fmt: skip
        total = rows.log_prob.new_zeros(())
        for part in rows.parts(split):
            entries = {
                "response_mask": part.mask,
                "old_log_probs": part.old,
                "advantages": part.advantage[:, None] * part.response,  # core_algos.py:329
            }
            if part.ref is not None:
                entries["ref_log_prob"] = part.ref
            data = Step(entries, int(rows.mask.sum()), len(rows.mask))
            with patch.object(losses, "no_padding_2_padding", lambda values, _: values):
                total = total + losses.ppo_loss(config, {"log_probs": part.log_prob}, data)[0]
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        index = np.array([str(row // group_size) for row in range(len(rewards))])
        scores, mask = rewards.reshape(-1, 1).clone(), rewards.new_ones(len(rewards), 1)
        estimator = core_algos.get_adv_estimator_fn("grpo")
        return estimator(token_level_rewards=scores, response_mask=mask, index=index, config=AlgoConfig())[0]

    def kl(name: str):
        return lambda log_prob, ref: core_algos.kl_penalty(log_prob, ref, name)

    return Adapter(
        step,
        weighting={"dual_clip": "token", "cispo": "token", "gspo": "sequence"},
        default="dual_clip",
        kl={"k1": kl("k1"), "k2": kl("k2"), "k3": kl("k3"), "low_var_kl": kl("low_var_kl")},
        kl_in_loss="low_var_kl",  # the default of kl_loss_type
        advantages=advantages,
        absent={"clipped": "its dual clip, c = 3, is always on: see the law dual_clip"},
        notes={
            "kl_pull": "low_var_kl, the default of kl_loss_type, and k3 are clamped at 10, where their gradient is "
            "0: beyond d = -2.6 and d = +11. It is met with use_kl_loss=True by tokens whose probability has drifted "
            "far from the reference, the ones that a KL is for. kl_loss_type=k2, or k3+, whose gradient is k2's, "
            "avoids it.",
            "equal_rewards": "Mean and standard deviation of equal float32 rewards can differ from the reward and "
            "from 0 by rounding, which is divided by std + 1e-6. Rewards of 0 and 1 are exact; fractions and model "
            "scores are met. Filtering of groups without variance (DAPO's recipe), or norm_adv_by_std_in_grpo=False, "
            "avoids it.",
            "group_of_one": "The code sets the mean to 0 and the standard deviation to 1, so that with rollout.n=1 "
            "GRPO is REINFORCE without a baseline. The code does so on purpose; no check of rollout.n=1 in the "
            "config was found.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are, and with them the loss "
            "of the step. The FSDP engine then skips the step, since the gradient's norm is not finite.",
        },
    )


class Step(dict):
    """A micro-batch as ``ppo_loss`` reads one: tensors, and the numbers of the whole step."""

    def __init__(self, entries: dict[str, Tensor], tokens: int, responses: int):
        super().__init__(entries, dp_size=1, batch_num_tokens=tokens, global_batch_size=responses)
        self.tensors = TensorDict(entries, [len(entries["response_mask"])])

    def select(self, *names: str) -> Step:
        del names
        return self

    def to_padded_tensor(self) -> TensorDict:
        return self.tensors
