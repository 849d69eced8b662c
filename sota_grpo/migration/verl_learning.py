"""verl's options of the objective and the optimizer; see :mod:`sota_grpo.migration.verl`."""

from __future__ import annotations

import math
from typing import Any

from sota_grpo.config import Config, longest_response, turn_size
from sota_grpo.migration.account import Account

ACTOR = "actor_rollout_ref.actor"
NEVER_BINDS = 1e9  # verl's ratio is at most exp(20)

_AGGREGATIONS = {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
_KL_TYPES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_LOSSES = {
    ("clipped", "token"): "vanilla",
    ("clipped", "sequence"): "gspo",
    ("reinforce", "token"): "gpg",
    ("cispo", "token"): "cispo",
    ("cispo", "sequence"): "cispo",
}
_ESTIMATORS = {
    ("group_mean", "group_std"): "grpo",
    ("group_mean", "none"): "grpo",
    ("leave_one_out", "none"): "rloo",
    ("batch_mean", "batch_std"): "reinforce_plus_plus",
    ("group_mean", "batch_std"): "reinforce_plus_plus_baseline",
}


def advantage(config: Config, account: Account) -> dict[str, Any]:
    """The estimator, fresh groups for those without signal, and the penalty on length."""
    baseline, scale = account["algorithm.baseline"], account["algorithm.scale"]
    estimator = _ESTIMATORS.get((baseline, scale), "grpo")
    if (baseline, scale) not in _ESTIMATORS:
        account.remark(
            "algorithm.baseline", f"verl has none with algorithm.scale={scale}; this is grpo's, a group mean."
        )
    elif estimator.startswith("reinforce"):
        account.remark(
            "algorithm.scale", "verl whitens over tokens, so long responses weigh more; ours over responses."
        )
    found: dict[str, Any] = {
        "algorithm.adv_estimator": estimator,
        "algorithm.norm_adv_by_std_in_grpo": scale != "none",
    }
    if account["algorithm.dynamic_sampling"]:
        found |= {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "score"}
        account.remark("algorithm.dynamic_sampling_max_draws", "verl's trainer draws on without a limit.")
    buffer = account["algorithm.overlong_buffer"]
    if buffer:
        penalty = {"enable": True, "len": buffer, "penalty_factor": 1.0, "log": True}
        found |= {
            "reward.reward_manager.name": "dapo",
            "+reward.reward_kwargs.max_resp_len": longest_response(config),
            "+reward.reward_kwargs.overlong_buffer_cfg": penalty,
        }
    return found


def policy_loss(config: Config, account: Account) -> dict[str, Any]:
    """verl's loss of the same gradient. Its CISPO clips the ratio from below too: at 0 here, where it never is."""
    part = config.algorithm
    loss = _LOSSES[account["algorithm.objective"], account["algorithm.ratio"]]
    low, high = account["algorithm.clip_low"], account["algorithm.clip_high"]
    if (part.objective, part.ratio) == ("cispo", "sequence"):
        account.remark("algorithm.ratio", "verl's CISPO takes the ratio per token.")
    if loss == "gspo" and part.aggregation != "sequence":
        account.remark(
            "algorithm.aggregation", "verl 0.9.0's GSPO weighs by sequence whatever loss_agg_mode says; 0.9.1 heeds it."
        )
    if loss == "gspo" and part.dual_clip is not None:
        account.remark("algorithm.dual_clip", "verl's GSPO has no dual clip.")
    found = {
        f"{ACTOR}.policy_loss.loss_mode": loss,
        f"{ACTOR}.clip_ratio": low,
        f"{ACTOR}.clip_ratio_low": 1.0 if loss == "cispo" else low,
        f"{ACTOR}.clip_ratio_high": high,
        f"{ACTOR}.clip_ratio_c": account["algorithm.dual_clip"] or NEVER_BINDS,
        f"{ACTOR}.loss_agg_mode": _AGGREGATIONS[account["algorithm.aggregation"]],
        f"{ACTOR}.entropy_coeff": account["algorithm.entropy_coef"],
    }
    if part.aggregation == "constant":
        found[f"{ACTOR}.loss_scale_factor"] = longest_response(config)
    if part.drop_truncated:
        account.remark("algorithm.drop_truncated", "verl trains on truncated responses.")
    return found


def correction(config: Config, account: Account) -> dict[str, Any]:
    """Which log-probs the ratio is taken to, and how the engine's mismatch is weighed."""
    part, prefix = config.algorithm, "algorithm.rollout_correction"
    if account["algorithm.correction"] == "none":
        used_once = account["train.epochs"] == 1
        is_plain = _LOSSES[part.objective, part.ratio] == "vanilla"
        if used_once and not is_plain and part.objective != "reinforce":
            account.remark(
                "algorithm.correction",
                "the ratio is taken to log-probs that verl's learner computes again; ours are the engine's own, which "
                "verl offers for its plain clipped loss only (bypass_mode).",
            )
        return {f"{prefix}.bypass_mode": used_once and is_plain}
    cap = account["algorithm.correction_cap"]
    is_masked = account["algorithm.correction_mode"] == "mask"
    return {
        f"{prefix}.bypass_mode": False,
        f"{prefix}.rollout_is": part.correction,
        f"{prefix}.rollout_is_threshold": f"1e-9_{cap}" if is_masked else cap,  # a range: what lies outside becomes 0
    }


def reference(config: Config, account: Account) -> dict[str, Any]:
    """The KL to the reference, in the loss or in the reward; at coefficient 0 neither builds one."""
    coef, estimator = account["policy.kl_coef"], account["algorithm.kl_estimator"]
    in_loss = account["train.kl_coef_in_loss"]
    found = {f"{ACTOR}.use_kl_loss": coef > 0 and in_loss, "algorithm.use_kl_in_reward": coef > 0 and not in_loss}
    if coef > 0 and in_loss:
        found |= {f"{ACTOR}.kl_loss_coef": coef, f"{ACTOR}.kl_loss_type": _KL_TYPES[estimator]}
    elif coef > 0:
        found |= {"algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": coef}
        account.remark(
            "train.kl_coef_in_loss",
            "in a group that is graded alike, verl divides the differences of KL by their spread; ours leaves them.",
        )
    return found


def optimizer(config: Config, account: Account) -> dict[str, Any]:
    """AdamW; verl's schedule counts iterations, ours optimizer steps."""
    prefix = f"{ACTOR}.optim"
    steps_per_turn = config.train.epochs * turn_size(config) // config.train.optim_batch_size
    schedule, warmup = account["optimizer.schedule"], account["optimizer.warmup_steps"]
    if schedule == "linear":
        account.remark("optimizer.schedule", "verl's FSDP learner knows constant and cosine; this is constant.")
    if warmup:
        account.remark("optimizer.warmup_steps", "verl begins at 0 and counts iterations, not optimizer steps.")
    found: dict[str, Any] = {
        f"{prefix}.lr": account["optimizer.lr"],
        f"{prefix}.weight_decay": account["optimizer.weight_decay"],
        f"{prefix}.betas": [account["optimizer.beta1"], account["optimizer.beta2"]],
        f"{prefix}.clip_grad": account["optimizer.clip_grad_norm"] or NEVER_BINDS,
        f"{prefix}.lr_scheduler_type": "cosine" if schedule == "cosine" else "constant",
        f"{prefix}.lr_warmup_steps": math.ceil(warmup / max(1, steps_per_turn)) if warmup else -1,
    }
    eps = account["optimizer.eps"]
    if eps != 1e-8:  # torch's own default
        found[f"{prefix}.override_optimizer_config"] = {"eps": eps}
    return found
