"""The objective of a preset, to be compared with TRL and verl; ``scripts/preset_table.py`` says which has which."""

from __future__ import annotations

from torch import nn

from sota_grpo.assembly.learning import surrogate_options
from sota_grpo.config import Config
from sota_grpo.rl.objectives import GRPOLoss


def loss_of(config: Config, actor: nn.Module, *, beta: float = 0.0) -> GRPOLoss:
    """The objective of a config, with a KL to the reference of its own coefficient."""
    algorithm = config.algorithm
    return GRPOLoss(
        actor,
        objective=algorithm.objective,
        ratio=algorithm.ratio,
        clip_epsilon=(algorithm.clip_low, algorithm.clip_high),
        dual_clip=algorithm.dual_clip,
        surrogate_options=surrogate_options(config),
        off_policy_threshold=algorithm.off_policy_threshold,
        kl_estimator=algorithm.kl_estimator,
        kl_unbiased=algorithm.kl_unbiased,
        kl_to_ref_coeff=beta,
        correction=None if algorithm.correction == "none" else algorithm.correction,
        correction_mode=algorithm.correction_mode,
        correction_cap=algorithm.correction_cap,
        correction_floor=algorithm.correction_floor,
        entropy_bonus=False,
    )
