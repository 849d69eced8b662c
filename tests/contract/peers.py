"""The objective of a preset, to be compared with TRL and verl; ``scripts/preset_table.py`` says which has which."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from sota_grpo.assembly.learning import make_loss
from sota_grpo.config import Config
from sota_grpo.rl.objectives import GRPOLoss


def loss_of(config: Config, actor: nn.Module, *, beta: float = 0.0) -> GRPOLoss:
    """The objective of a config, with a KL to the reference of its own coefficient."""
    in_loss = replace(config.train, kl_coef_in_loss=True)
    return make_loss(replace(config, policy=replace(config.policy, kl_coef=beta), train=in_loss), actor)
