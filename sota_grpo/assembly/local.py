"""A run in one process: learner, engine and source take turns (the reference may have a process of its own)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sota_grpo.assembly.devices import Plan, device_name
from sota_grpo.assembly.learning import (
    add_adapter,
    make_learner,
    make_model,
    make_policy,
    make_reference,
    make_transforms,
)
from sota_grpo.assembly.parts import (
    Parts,
    make_evaluator,
    make_publisher,
    make_rollouts,
    make_source,
    numerics_are_exact,
)
from sota_grpo.assembly.rollout import make_sampling, start_engine
from sota_grpo.config import Config, model_name
from sota_grpo.envs import TaskEnv
from sota_grpo.policy.export import save_hf
from sota_grpo.recording.heartbeat import starting
from sota_grpo.rl.task import Task


def build_local(config: Config, plan: Plan, task: Task, env: TaskEnv, tokenizer: Any, run_dir: Path) -> Parts:
    """Assemble the run. What was started is closed again when a later part fails."""
    device_type, placement = plan.device_type, plan.placement
    share_device = placement.colocated and device_type == "cuda"
    with ExitStack() as opened:
        starting(f"Loading the policy {model_name(config)}")
        base = make_model(config, torch.device(device_name(device_type, placement.train)))
        starting(f"Starting the engine {plan.engine}")
        # the engine copies the model while that has no adapter
        engine = start_engine(config, device_name(device_type, placement.inference), tokenizer, base, run_dir)
        opened.callback(engine.close)
        rollouts = make_rollouts(config, env, engine)
        starting("Putting the learner together")
        model = add_adapter(config, base)
        policy = make_policy(config, model, device_type)
        reference = make_reference(config, policy, placement, device_type)
        if reference is not None:
            opened.callback(reference.close)
        learner = make_learner(config, policy, tokenizer.pad_token_id, device_type, run_dir)
        transforms = make_transforms(config, reference, learner)
        parts = Parts(
            task=task,
            rollouts=rollouts,
            tokenizer=tokenizer,
            learner=learner,
            publisher=make_publisher(model, engine, share_device=share_device),
            source=make_source(config, rollouts, lockstep=True, sleep_engine=share_device, transforms=transforms),
            evaluator=make_evaluator(config, task, rollouts),
            sampling=make_sampling(config),
            transforms=transforms,
            export=lambda folder: save_hf(model, tokenizer, folder),
            exact=numerics_are_exact(config, device_type),
            opened=[engine] if reference is None else [engine, reference],
        )
        opened.pop_all()
    return parts
