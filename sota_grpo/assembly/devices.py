"""Where the parts of a run stand: the kind of device, and the index of each role."""

from __future__ import annotations

from pathlib import Path

import torch

from sota_grpo.config import Config
from sota_grpo.engines import resolve_engine_name
from sota_grpo.errors import UserError
from sota_grpo.placement import Placement, Role, place
from sota_grpo.policy.load import resolve_model_path


def resolve_device(config: Config) -> str:
    """``cuda`` or ``cpu``.

    Raises:
        UserError: no such model folder, no GPU where one is asked for, or no GPU and a model from the hub that nobody
            asked to train on the CPU.
    """
    model = resolve_model_path(config.model.name)  # a mistyped folder is not a model from the hub
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise UserError("device=cuda, and this machine has no CUDA device; use device=cpu.")
        return "cuda"
    if config.device == "auto" and not Path(model).is_dir():
        raise UserError(
            f"Training {config.model.name} needs a CUDA GPU and this machine has none; "
            "`python grpo.py --config-name grpo_cpu` trains the embedded policy here (device=cpu insists)."
        )
    return "cpu"


def reference_has_own_weights(config: Config) -> bool:
    """Whether the KL term needs weights beside the learner's.

    It does not at coefficient 0, nor under LoRA, where the reference is the base model with the adapter off, unless it
    is asked to stand apart: in a process or on a device of its own.
    """
    part = config.ref_model
    stands_apart = part.process or part.num_devices is not None or part.devices is not None
    return config.policy.kl_coef > 0 and (stands_apart or not config.train_model.lora.enabled)


def make_placement(config: Config, device_type: str) -> Placement:
    """One device for each role of the lockstep mode.

    Raises:
        UserError: more than one device for a role, what :func:`place` refuses, or an engine that is not installed or
            cannot reach its device.
    """
    train, inference, ref = config.train_model, config.inference_model, config.ref_model
    learner = Role("train_model", train.num_devices, train.devices)
    engine = Role("inference_model", inference.num_devices, inference.devices)
    reference = Role("ref_model", ref.num_devices, ref.devices) if reference_has_own_weights(config) else None
    for role in (learner, engine, reference):
        if role is not None and role.count > 1:
            raise UserError(
                f"{role.option} asks for {role.count} devices, and the lockstep mode gives every role 1; "
                f"use {role.name}.num_devices=1 or leave both options out."
            )
    engine_name = resolve_engine_name(config.engine.name, device=device_type)
    available = torch.cuda.device_count() if device_type == "cuda" else 0
    found = place(learner, engine, reference, available=available)
    index = found.inference[0]
    if index and engine_name == "vllm":
        raise UserError(
            f"engine=vllm runs in this process, where it can only take the first visible GPU (0), and inference_model "
            f"is placed on GPU {index}; use inference_model.devices=[0] with CUDA_VISIBLE_DEVICES in another order, or "
            f"engine=transformers."
        )
    return found


def device_name(device_type: str, indices: tuple[int, ...]) -> str:
    """torch's name of a role's first device.

    >>> device_name("cuda", (1,)), device_name("cpu", (0,))
    ('cuda:1', 'cpu')
    """
    return device_type if device_type == "cpu" else f"{device_type}:{indices[0]}"
