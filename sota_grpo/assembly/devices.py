"""Where the parts of a run stand: the kind of device, the index of each role, this process or others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sota_grpo.assembly.cuda import needs_a_gpu
from sota_grpo.assembly.rollout import engine_rows
from sota_grpo.config import Config, longest_response, model_name, turn_size
from sota_grpo.config.placement import Placement, Role, describe, place
from sota_grpo.engines import resolve_engine_name
from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import builds_kernels
from sota_grpo.policy.load import resolve_model_path

FEW_ROWS = 64  # of an engine on a GPU: reading its weights takes longer than what is computed with them


@dataclass(frozen=True)
class Plan:
    """What stands where.

    Args:
        workers: collection, reference and several ranks live in processes of their own.
        notes: what a run says of it when it starts, one sentence each.
    """

    device_type: str
    placement: Placement
    engine: str
    workers: bool
    notes: tuple[str, ...] = ()


def resolve_device(config: Config) -> str:
    """``cuda`` or ``cpu``.

    Raises:
        UserError: no such model folder, no GPU where one is asked for, or no GPU and a model from the hub that nobody
            asked to train on the CPU. Where there is one that torch does not see, it says why.
    """
    model = resolve_model_path(model_name(config))  # a mistyped folder is not a model from the hub
    if config.device == "cuda" and config.ray.address is not None:
        return "cuda"  # of the cluster; this machine may have none
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise UserError(needs_a_gpu(config))
        return "cuda"
    if config.device == "auto" and not Path(model).is_dir():
        raise UserError(needs_a_gpu(config))
    return "cpu"


def reference_has_own_weights(config: Config) -> bool:
    """Whether the KL term needs weights beside the learner's.

    It does not at coefficient 0, nor under LoRA, where the reference is the base model with the adapter off, unless it
    is asked to stand apart: in a process or on a device of its own.
    """
    part = config.ref_model
    stands_apart = part.process or part.num_devices is not None or part.devices is not None or wants_workers(config)
    return config.policy.kl_coef > 0 and (stands_apart or not config.train_model.lora.enabled)


def wants_workers(config: Config) -> bool:
    """Whether the run needs other processes: concurrent collection, several devices for a role, or a cluster."""
    ref = Role("ref_model", config.ref_model.num_devices, config.ref_model.devices)
    several = any(role.count > role.default for role in (*_roles(config), ref))
    return several or config.mode == "async" or config.ray.address is not None


def _roles(config: Config) -> list[Role]:
    train, inference = config.train_model, config.inference_model
    return [
        Role("train_model", train.num_devices, train.devices),
        Role("inference_model", inference.num_devices, inference.devices, default=inference.tensor_parallel_size),
    ]


def make_plan(config: Config, device_type: str, num_gpus: Callable[[], int] | None = None) -> Plan:
    """A device for everything, or for lockstep on one machine this process with one device for each role.

    With one GPU collection and training take turns on it, whatever the mode.

    Args:
        num_gpus: GPUs that there are, asked only where the device is CUDA; None: those of this machine.

    Raises:
        UserError: what :func:`place` refuses, or an engine that is not installed or cannot reach its device.
    """
    learner, engines = _roles(config)
    ref = Role("ref_model", config.ref_model.num_devices, config.ref_model.devices)
    reference = ref if reference_has_own_weights(config) else None
    engine = resolve_engine_name(config.engine.name, device=device_type)
    workers = wants_workers(config)
    notes = []
    available = (num_gpus or torch.cuda.device_count)() if device_type == "cuda" else 0
    found = place(learner, engines, reference, available=available, concurrent=workers)
    if engines.default > 1 and device_type == "cpu":
        raise UserError(
            f"inference_model.tensor_parallel_size={engines.default} needs GPUs; use inference_model.num_devices="
            f"{engines.default} engines on the CPU."
        )
    if config.ray.address is not None and device_type == "cuda":
        _require_disjoint(found, available)
    if workers and device_type == "cuda" and found.colocated:
        notes.append("One GPU: collection and training take turns on it, in lockstep.")
        workers = False
    if not workers and device_type == "cuda" and found.inference[0] and engine == "vllm":
        raise UserError(
            f"engine=vllm runs in this process, where it can only take the first visible GPU (0), and inference_model "
            f"is placed on GPU {found.inference[0]}; use inference_model.devices=[0] with CUDA_VISIBLE_DEVICES in "
            f"another order, or engine=transformers."
        )
    if ref.asked and config.policy.kl_coef == 0:
        notes.append(f"{ref.option} has no effect: with policy.kl_coef=0 no reference is built.")
    if workers:
        notes.append(f"Placement: {describe(found, device_type)}.")
    if device_type == "cuda":
        notes += _idle_notes(config, found, engine, workers)
    return Plan(device_type, found, engine, workers, tuple(notes))


def _idle_notes(config: Config, found: Placement, engine: str, workers: bool) -> list[str]:
    """What leaves GPUs idle: few rows to sample at once, one micro-batch a step, layers that cannot be compiled."""
    notes, turn, ranks = [], turn_size(config), len(found.train)
    if config.train_model.compile is None and not builds_kernels():
        notes.append("Layers are not compiled, which is slow: that needs Triton and a C compiler (gcc).")
    engines = max(1, len(found.inference) // config.inference_model.tensor_parallel_size) if workers else 1
    asked = turn * (1 + config.train.max_policy_age) // engines
    rows = min(asked, engine_rows(config, engine, "cuda", engines))
    if rows < FEW_ROWS:
        each = "The engine samples" if engines == 1 else f"Each of {engines} engines samples"
        width = "inference_model.max_num_seqs" if config.inference_model.max_num_seqs else "env.num_envs"
        fix = "train.dialog_turns_per_batch" if rows == asked else width
        notes.append(f"{each} at most {rows} responses at once; a GPU is idle below {FEW_ROWS}: raise {fix}.")
    of_rank = config.train.optim_batch_size // ranks
    if ranks > 1 and of_rank * longest_response(config) <= config.train.micro_batch_tokens:
        notes.append(
            f"Each of {ranks} learner ranks has {of_rank} responses of an optimizer step, one micro-batch at most: "
            "raise train.optim_batch_size, or lower train_model.num_devices."
        )
    return notes


def _require_disjoint(found: Placement, available: int) -> None:
    """On a cluster Ray gives each GPU to one process."""
    taken = [*found.train, *found.inference, *found.ref]
    if len(set(taken)) < len(taken):
        raise UserError(
            f"On a cluster every role needs GPUs of its own: {len(taken)} in all, and this one has {available}; add "
            "nodes, set policy.kl_coef=0 for a run without reference, or leave ray.address out."
        )


def device_name(device_type: str, indices: tuple[int, ...]) -> str:
    """torch's name of a role's first device.

    >>> device_name("cuda", (1,)), device_name("cpu", (0,))
    ('cuda:1', 'cpu')
    """
    return device_type if device_type == "cpu" else f"{device_type}:{indices[0]}"
