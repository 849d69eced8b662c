"""The rollout side of a run: device, task, env, engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from sota_grpo.config import Config
from sota_grpo.engines import make_engine, resolve_engine_name
from sota_grpo.engines.base import Engine
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.placement import Placement, Role, place
from sota_grpo.policy.load import resolve_model_path
from sota_grpo.records import Sampling
from sota_grpo.tasks import make_task
from sota_grpo.tasks.base import Task


def resolve_device(config: Config) -> str:
    """``cuda`` or ``cpu``.

    Raises:
        UserError: no GPU, and a model from the hub that nobody asked to train on the CPU.
    """
    if config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available()):
        if not torch.cuda.is_available():
            raise UserError("device=cuda, and this machine has no CUDA device; use device=cpu.")
        return "cuda"
    local = config.model.name == "tiny" or Path(config.model.name).is_dir()
    if config.device == "auto" and not local:
        raise UserError(
            f"Training {config.model.name} needs a CUDA GPU and this machine has none; "
            "`python grpo.py --config-name grpo_cpu` trains the embedded policy here (device=cpu insists)."
        )
    return "cpu"


def make_placement(config: Config, device_type: str) -> Placement:
    shares_weights = config.train_model.lora.enabled and config.ref_model.devices is None
    wants_reference = config.policy.kl_coef > 0 and not shares_weights
    roles = [
        Role(name, part.num_devices, part.devices)
        for name, part in (
            ("train_model", config.train_model),
            ("inference_model", config.inference_model),
            ("ref_model", config.ref_model),
        )
    ]
    several = [role for role in roles if role.count > 1]
    if several:
        raise UserError(
            f"{several[0].name} asks for {several[0].count} devices; the lockstep mode gives every role one device."
        )
    available = torch.cuda.device_count() if device_type == "cuda" else 0
    return place(roles[0], roles[1], roles[2] if wants_reference else None, available=available)


def task_of(config: Config) -> Task:
    env = config.env
    if env.dataset == "arithmetic":
        return make_task("arithmetic", seed=config.seed, max_steps=env.difficulty, num_heldout=env.num_heldout)
    return make_task(
        env.dataset,
        path=env.dataset_path,
        num_heldout=env.num_heldout,
        max_samples=env.max_samples,
        answer_format=env.answer_format,
        format_weight=env.format_weight,
        system_prompt=env.system_prompt,
        seed=config.seed,
    )


def make_env(config: Config, task: Task, tokenizer: Any) -> TaskEnv:
    env = TaskEnv(
        task,
        tokenizer,
        num_envs=config.env.num_envs,
        repeats=config.env.repeats,
        shuffle=config.env.shuffle,
        seed=config.seed,
        max_prompt_tokens=max_model_len(config) - 1,
    )
    env.check_prompts()
    return env


def max_model_len(config: Config) -> int:
    """Context of the run: what the config says, at most what the model allows."""
    name, trust = resolve_model_path(config.model.name), config.model.trust_remote_code
    allowed = AutoConfig.from_pretrained(name, trust_remote_code=trust).max_position_embeddings
    return min(config.inference_model.max_model_len or allowed, allowed)


def make_sampling(config: Config) -> Sampling:
    part = config.inference_model
    return Sampling(
        max_tokens=part.max_tokens,
        temperature=part.temperature,
        top_p=part.top_p,
        top_k=part.top_k,
        ignore_eos=part.ignore_eos,
    )


def engine_dtype(name: str, device_type: str) -> str:
    return name if name != "auto" else ("bfloat16" if device_type == "cuda" else "float32")


def start_engine(config: Config, device_type: str, tokenizer: Any, model: PreTrainedModel) -> Engine:
    part = config.inference_model
    return make_engine(
        resolve_engine_name(config.engine.name),
        model=model,
        model_path=resolve_model_path(config.model.name),
        dtype=engine_dtype(part.torch_dtype, device_type),
        device=device_type,
        max_model_len=max_model_len(config),
        max_rows=config.env.num_envs,
        eos_token_ids=(tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        gpu_memory_utilization=part.gpu_memory_utilization,
        enforce_eager=part.enforce_eager,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.seed,
    )
