"""From a config to the parts of a run, each room given plain values only; part of the one assembly with ``app.py``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from sota_grpo.assembly.cluster import visible_gpus
from sota_grpo.assembly.devices import make_plan, resolve_device
from sota_grpo.assembly.local import build_local
from sota_grpo.assembly.parts import Parts
from sota_grpo.assembly.rollout import make_env, task_of
from sota_grpo.config import Config
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer

__all__ = ["Parts", "build"]


def build(config: Config, run_dir: Path, should_stop: Callable[[], bool] = lambda: False) -> Parts:
    """Assemble the run. What is cheap and can be wrong (data, prompts, devices) comes before what is slow.

    Args:
        should_stop: asked while a batch is waited for; true ends the wait (``Interrupted``).
    """
    _require_wandb(config)
    plan = make_plan(config, resolve_device(config), lambda: visible_gpus(config))
    tokenizer = load_tokenizer(config.model.name, trust_remote_code=config.model.trust_remote_code)
    task = task_of(config)
    env = make_env(config, task, tokenizer)
    torch.manual_seed(config.seed)
    if not plan.workers:
        return build_local(config, plan, task, env, tokenizer, run_dir)
    from sota_grpo.assembly.workers import build_workers

    return build_workers(config, plan, task, env, tokenizer, run_dir, should_stop)


def _require_wandb(config: Config) -> None:
    if config.logging.wandb == "online" and find_spec("wandb") is None:
        raise UserError(
            "logging.wandb=online needs wandb, which is not installed: `pip install 'sota-grpo[wandb]'`, or set "
            "logging.wandb=disabled."
        )
