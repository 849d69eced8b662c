"""Learner, engine and reference in one process, taking turns (the reference may have a process of its own)."""

from __future__ import annotations

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
from sota_grpo.assembly.parts import Crew, Roles, make_publisher
from sota_grpo.assembly.rollout import start_engine
from sota_grpo.config import Config, model_name
from sota_grpo.policy.load import save_hf
from sota_grpo.recording.heartbeat import starting


def roles_here(config: Config, plan: Plan, tokenizer: Any, run_dir: Path, crew: Crew) -> Roles:
    """Load and start what the run needs."""
    device_type, placement = plan.device_type, plan.placement
    share_device = placement.colocated and device_type == "cuda"
    starting(f"Loading the policy {model_name(config)}")
    base = make_model(config, torch.device(device_name(device_type, placement.train)))
    starting(f"Starting the engine {plan.engine}")
    # the engine copies the model while that has no adapter
    engine = crew.add(start_engine(config, device_name(device_type, placement.inference), tokenizer, base, run_dir))
    starting("Putting the learner together")
    model = add_adapter(config, base)
    policy = make_policy(config, model, device_type)
    reference = make_reference(config, policy, placement, device_type)
    if reference is not None:
        crew.add(reference)
    learner = make_learner(config, policy, tokenizer.pad_token_id, device_type, run_dir)
    transforms = make_transforms(config, reference, learner)
    return Roles(
        engine=engine,
        learner=learner,
        publisher=make_publisher(model, engine, share_device=share_device),
        source={"lockstep": True, "sleep_engine": share_device, "transforms": transforms},
        transforms=transforms,
        export=lambda folder: save_hf(model, tokenizer, folder),
    )
