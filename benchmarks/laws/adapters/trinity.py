"""Trinity-RFT: its policy losses and KL as ``TrinityPolicyLoss`` calls them (trainer/verl/losses.py:68-88).

Advantages are those of ``GRPOGroupedAdvantage``; the KL of its GRPO is k2 (algorithm/algorithm.py:137).
"""

from __future__ import annotations

import inspect
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, Adapter, Rows
from benchmarks.laws.wheels import members, root


def make(folder: Path) -> Adapter:
    package = root("trinity", folder) / "trinity/algorithm"
    typing = {"Any": Any, "Dict": dict, "List": list, "Optional": Optional, "Tuple": tuple}
    bases = {"ABC": ABC, "ABCMeta": ABCMeta, "abstractmethod": abstractmethod, "inspect": inspect}
    mapper = members(package / "key_mapper.py", "KeyMapper", "ALL_MAPPERS", **typing)
    utils = members(package / "utils.py", "masked_sum", "masked_mean", "aggregate_loss")
    tools = {"aggregate_loss": utils.aggregate_loss, "masked_mean": utils.masked_mean} | typing
    folder_of_losses = package / "policy_loss_fn"
    base = members(
        folder_of_losses / "policy_loss_fn.py", "PolicyLossFnMeta", "PolicyLossFn", ALL_MAPPERS=mapper.ALL_MAPPERS,
        **bases, **typing,
    )  # fmt: skip

    def loss_class(file: str, name: str) -> Any:
        return getattr(members(folder_of_losses / file, name, PolicyLossFn=base.PolicyLossFn, **tools), name)

    objectives = {
        "dual_clip": loss_class("ppo_policy_loss.py", "PPOPolicyLossFn")(clip_range=CLIP),
        "cispo": loss_class("cispo_policy_loss.py", "CISPOPolicyLossFn")(clip_range_high=CISPO_CLIP),
        "gspo": loss_class("gspo_policy_loss.py", "GSPOLossFn")(clip_range=CLIP),
    }
    kls = members(package / "kl_fn/kl_fn.py", "KLFn", "K1Fn", "K2Fn", "K3Fn", "LowVarKLFn", **bases, **tools)
    grouped = members(
        package / "advantage_fn/grpo_advantage.py",
        "GRPOGroupedAdvantage",
        GroupAdvantage=object,
        Experience=Any,
        **typing,
    )

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        del split
        given = {"old_log_probs": rows.old, "response_mask": rows.mask, "log_prob": rows.log_prob}
        given["advantages"] = rows.advantage[:, None] * rows.mask  # grpo_advantage.py:171
        loss = objectives[objective](**given)[0]
        if rows.ref is not None:
            kl = kls.K2Fn(kl_coef=1.0)
            loss = loss + kl.calculate_kl_loss(rows.log_prob, rows.ref, rows.mask, "token-mean", rows.old)[0]
        return loss

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        samples = [SimpleNamespace(reward=reward, action_mask=torch.ones(1)) for reward in rewards.tolist()]
        estimator = grouped.GRPOGroupedAdvantage()
        for start in range(0, len(samples), group_size):
            estimator.calculate_group_advantage("", samples[start : start + group_size])
        return torch.cat([sample.advantages for sample in samples])

    def kl(name: str):
        return lambda log_prob, ref: getattr(kls, name)().calculate_kl(log_prob, ref)

    unjudged = "the divisor of a micro-batch depends on the engine that is configured (verl's new or its legacy one)"
    return Adapter(
        step,
        weighting={"dual_clip": "token", "cispo": "token", "gspo": "sequence"},
        default="dual_clip",
        kl={"k1": kl("K1Fn"), "k2": kl("K2Fn"), "k3": kl("K3Fn"), "low_var_kl": kl("LowVarKLFn")},
        kl_in_loss="k2",
        advantages=advantages,
        absent={"clipped": "its dual clip, c = 3, is always on: see the law dual_clip"},
        notes={
            "equal_rewards": "Mean and standard deviation of equal float32 rewards can differ from the reward and "
            "from 0 by rounding, which is divided by std + 1e-6. Rewards of 0 and 1 are exact. std_threshold, unset "
            "by default, skips groups without variance.",
            "group_of_one": "The code sets the mean to 0 and the standard deviation to 1, so with repeat_times=1 the "
            "advantage is the reward: REINFORCE without a baseline. With std_threshold such a group is dropped.",
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are, and with them the loss.",
        },
        unjudged={"equal_split": unjudged, "uneven_split": unjudged, "kl_split": unjudged},
    )
