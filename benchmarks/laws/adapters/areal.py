"""AReaL: ``grpo_loss_fn`` on packed rows, with the weight of each micro-batch (engine/fsdp_engine.py:2120).

Settings are its defaults: the old log-probs are the inference engine's. Its guards: they are multiplied by the loss
mask (trainer/ppo/actor.py, ``_compute_advantages``), and ``_resolve_proximal_logp`` refuses what is not finite. Rewards
are normalized by group as in its examples (``reward_norm`` of mean and std by group), after a clip to +-20.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor

from benchmarks.laws.adapter import CLIP, DUAL_CLIP, Adapter, Rows
from benchmarks.laws.wheels import members, root

_FAR = (
    "A ratio with a negative advantage has no upper bound by default; c_clip=3 is the option that bounds it. By "
    "default the old log-probs are the inference engine's, so a stale or faulty one is met in the first step on a "
    "batch; with use_decoupled_loss or recompute_logprob the ratio starts at 1. An infinite gradient norm skips the "
    "step."
)


def make(folder: Path) -> Adapter:
    package = root("areal", folder) / "areal"
    functional = members(
        package / "utils/functional/functional.py", "_compute_sequence_level_ratio_and_advantages", "ppo_actor_loss_fn"
    )
    actor = members(
        package / "trainer/ppo/actor.py",
        *("_resolve_proximal_logp", "grpo_loss_fn", "PPOActor._compute_advantages"),
        ppo_actor_loss_fn=functional.ppo_actor_loss_fn,
        PROX_LOGP_METHOD_RECOMPUTE="recompute",
        PROX_LOGP_METHOD_LOGLINEAR="loglinear",
        PROX_LOGP_METHOD_METRICS="metrics",
        stats_tracker=MagicMock(),
        infer_token_denominator=MagicMock(),
        _log_proximal_approximation_stats=MagicMock(),
    )
    data = members(
        package / "utils/data.py",
        "Normalization",
        "KLEstimator",
        Any=Any,
        np=np,
        dist=torch.distributed,
        NormConfig=Any,
    )

    def step(rows: Rows, objective: str, split: Sequence[int]) -> Tensor:
        total = rows.log_prob.new_zeros(())
        for part in rows.parts(split):
            old = (part.old * part.mask).flatten()
            size, count = part.mask.shape
            entries = {
                "logprobs": old,
                "prox_logp": old,
                "advantages": part.advantage[:, None].expand(size, count).flatten(),
                "loss_mask": part.mask.flatten(),
                "cu_seqlens": torch.arange(size + 1) * count,
            }
            loss = actor.grpo_loss_fn(
                part.log_prob.flatten(),
                torch.zeros_like(old),
                entries,
                eps_clip=CLIP,
                eps_clip_higher=None,
                c_clip=DUAL_CLIP if objective == "dual_clip" else None,
                importance_sampling_level="sequence" if objective == "gspo" else "token",
            )
            total = total + loss * part.mask.sum() / rows.mask.sum()
        return total

    def advantages(rewards: Tensor, group_size: int) -> Tensor:
        norm = SimpleNamespace(mean_level="group", mean_leave1out=False, std_level="group", std_unbiased=True, eps=1e-5)
        norm.group_size = group_size
        config = SimpleNamespace(overlong_reward_penalty=False, use_decoupled_loss=False, recompute_logprob=False)
        this = SimpleNamespace(
            config=config, reward_bias=0.0, reward_scaling=1.0, reward_clip=20.0, reward_norm=data.Normalization(norm),
            kl_ctl=0.0, kl_estimator=data.KLEstimator("k1"), mask_no_eos_with_zero=False, discount=1.0, gae_lambda=1.0,
            adv_norm=None,
        )  # fmt: skip
        shape = (len(rewards), 3)
        batch = {"input_ids": torch.zeros(shape, dtype=torch.int64), "attention_mask": torch.ones(shape)}
        batch |= {"loss_mask": torch.tensor([0.0, 1.0, 1.0]).expand(shape), "logprobs": torch.zeros(shape)}
        return actor._compute_advantages(this, batch | {"rewards": rewards})["advantages"][:, 0]

    def kl(name: str):
        return lambda log_prob, ref: data.KLEstimator(name)(log_prob, ref)

    return Adapter(
        step,
        weighting={"clipped": "token", "dual_clip": "token", "gspo": "token"},
        kl={"k1": kl("k1"), "k2": kl("k2"), "k3": kl("k3")},
        advantages=advantages,
        absent={"cispo": "it has no CISPO", "kl_in_loss": "its KL is a part of the reward"},
        unmet=("masked_nan",),
        notes={
            "masked_nan": "The ratio of a masked slot is selected away after the exponential, so the loss is right "
            "but the gradient at a slot with a current log-prob of NaN is NaN. It is met only if the model itself "
            "gives NaN for a prompt's or a tool's token. Old log-probs that are not finite, in any slot, are refused "
            "with a message.",
            "far_token": _FAR,
            "overflow": _FAR,
            "nan_reward": "The mean of a group with a NaN is NaN, so all its advantages are, and with them the loss "
            "of the step. The engine then skips the step, since the gradient's norm is not finite.",
        },
    )
