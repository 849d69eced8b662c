"""A dry run: where the parts of a run would stand, what they would hold, how long it would take. Nothing is trained."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sota_grpo.assembly.device_memory import (
    GIB,
    THRESHOLD,
    DeviceMemory,
    Facts,
    Machine,
    context_of,
    largest_sample,
    learning_of,
    plan_for,
    step_micro_batches,
)
from sota_grpo.assembly.devices import Plan
from sota_grpo.assembly.disk import Disk, disk_of
from sota_grpo.assembly.fits import TRAIN, Change, devices_of, smallest_change, worst_of
from sota_grpo.assembly.host_memory import HostMemory, host_memory_of
from sota_grpo.assembly.learning import make_settings
from sota_grpo.assembly.rollout import engine_dtype, engine_rows
from sota_grpo.assembly.tasks import task_of
from sota_grpo.config import Config, longest_response, model_name, turn_size
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.functional.flops import forward_flops, recomputed_flops, step_flops
from sota_grpo.placement import describe
from sota_grpo.policy.architecture import find_architecture
from sota_grpo.policy.load import load_tokenizer, resolve_model_path
from sota_grpo.tasks.base import Task
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.validators import validate

ASSUMED_GIB = 80  # of a GPU that is not here
ASSUMED_PROMPT = 512  # tokens of the longest prompt where neither tokenizer nor data are here
_BYTES_PER_TOKEN = 3  # of prompts whose tokenizer is not here; English text has four


@dataclass(frozen=True)
class Times:
    """Seconds of a turn of the loop at full length, and what they were computed from."""

    learn_s: float
    sample_s: float
    reference_s: float
    flops_per_s: float
    sampled_tokens_per_s: float

    @property
    def turn_s(self) -> float:
        return self.learn_s + self.sample_s + self.reference_s


@dataclass(frozen=True)
class Estimate:
    """What is known of a run before it starts.

    Args:
        places: where the facts come from: ``model``, ``prompt``, ``machine``, one phrase each.
        num_problems: of the training split; None where the data is not here.
        micro_batches: of an optimizer step, on one rank.
        turns, optimizer_steps: of the whole run.
        disk: what is written to the run's directory.
        host: memory beside the GPUs; None on a CPU.
        change: the smallest one that makes it fit; None where it fits, or where nothing helps.
        other_change: the smallest one that still trains all weights, where ``change`` does not.
        times: None where nothing was measured.
    """

    config: Config
    facts: Facts
    places: dict[str, str]
    num_problems: int | None
    machine: Machine
    plan: Plan
    devices: list[DeviceMemory]
    micro_batches: int
    turns: int
    optimizer_steps: int
    disk: Disk
    host: HostMemory | None
    change: Change | None = None
    other_change: Change | None = None
    times: Times | None = None

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def largest_sample(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest response behind it."""
        return largest_sample(self.config, self.facts)

    @property
    def refusal(self) -> str | None:
        """Why the run is not to be started, and what to change; None where it fits."""
        if self.fits:
            return None
        worst = worst_of(self.devices)
        reason = worst.problem or f"it needs {worst.peak / GIB:.1f} GiB and has {worst.capacity / GIB:.1f} GiB"
        if self.change is None:
            fix = "no change of memory options that is known here is enough; take a smaller model or larger devices"
        else:
            fix = f"use {self.change.overrides} ({self.change.worst.peak / GIB:.1f} GiB)"
        if self.other_change is not None:
            fix += f", or, to train all weights, {self.other_change.overrides}"
        if worst.moments.get(TRAIN, {}).get("lost in the heap"):
            fix += f" ({THRESHOLD}=1048576 in the environment saves memory too, and costs time)"
        return f"The run does not fit on {worst.name}: {reason}; {fix}."

    def as_dict(self) -> dict[str, Any]:
        """For JSON: plain values, sizes in bytes."""
        prompt, response = self.largest_sample
        return {
            "fits": self.fits,
            "refusal": self.refusal,
            "change": self.change.options if self.change else None,
            "model": {"name": model_name(self.config), "parameters": self.facts.model.parameters},
            "places": self.places,
            "placement": self.placement,
            "engine": self.plan.engine,
            "largest_sample": {"prompt_tokens": prompt, "response_tokens": response},
            "problems": self.num_problems,
            "responses_per_turn": turn_size(self.config),
            "turns": self.turns,
            "optimizer_steps": self.optimizer_steps,
            "micro_batches_per_step": self.micro_batches,
            "host_memory": dict(self.host.moments) if self.host else None,
            "disk": asdict(self.disk) | {"total": self.disk.total},
            "devices": [
                {
                    "name": device.name,
                    "roles": list(device.roles),
                    "capacity": device.capacity,
                    "peak": device.peak,
                    "problem": device.problem,
                    "moments": {moment: dict(parts) for moment, parts in device.moments.items()},
                }
                for device in self.devices
            ],
            "seconds": asdict(self.times) | {"turn_s": self.times.turn_s} if self.times else None,
        }

    @property
    def placement(self) -> str:
        """The device plan as one phrase."""
        return describe(self.plan.placement, self.plan.device_type)


def estimate(
    config: Config, *, memory_gib: float | None = None, prompt_tokens: int | None = None, probe: bool = True
) -> Estimate:
    """Plan the run of ``config``, add up its memory, and time a few passes where its device is here.

    Args:
        memory_gib: of each GPU, or of the machine on a CPU; None measures it, or assumes :data:`ASSUMED_GIB` GiB for
            a GPU that is not here.
        prompt_tokens: of the longest prompt; None measures it.
        probe: whether to time anything, if it fits.

    Raises:
        UserError: the config breaks a rule, its devices cannot be shared out, its model or data cannot be read, or a
            prompt is longer than the context.
    """
    validate(config)
    model, model_place = find_architecture(model_name(config), trust_remote_code=config.model.trust_remote_code)
    longest, prompt_place, num_problems = _prompts(config, prompt_tokens, context_of(config, model))
    facts = Facts(model, longest)
    machine, machine_place = find_machine(config, memory_gib)
    plan = plan_for(config, machine)
    devices = devices_of(config, facts, machine)
    how = learning_of(config, plan)
    turns = config.train.total_dialog_turns // turn_size(config)
    change = other = None
    if not all(device.fits for device in devices):
        change = smallest_change(config, facts, machine)
        if change is not None and "train_model.lora.enabled" in change.options:
            other = smallest_change(config, facts, machine, with_lora=False)
    return Estimate(
        config=config,
        facts=facts,
        places={"model": model_place, "prompt": prompt_place, "machine": machine_place},
        num_problems=num_problems,
        machine=machine,
        plan=plan,
        devices=devices,
        micro_batches=len(step_micro_batches(config, facts, how.ranks)),
        turns=turns,
        optimizer_steps=make_settings(config, plan.device_type).total_steps,
        disk=disk_of(config, model),
        host=host_memory_of(config, facts, plan),
        change=change,
        other_change=other,
        times=_times(config, facts, plan) if probe and machine.is_here and all(d.fits for d in devices) else None,
    )


def find_machine(config: Config, memory_gib: float | None = None) -> tuple[Machine, str]:
    """Where the run would be, and how that is known.

    A config that says neither ``device`` nor a model of this machine is for GPUs, here or elsewhere.
    """
    given = None if memory_gib is None else int(memory_gib * GIB)
    is_local = Path(resolve_model_path(model_name(config))).is_dir()
    elsewhere = config.ray.address is not None
    has_gpu = torch.cuda.is_available() and not elsewhere
    if config.device == "cpu" or (config.device == "auto" and is_local and not has_gpu and not elsewhere):
        memory = given or _machine_bytes()
        return Machine("cpu", memory, None, _own_bytes()), "the CPU of this machine"
    if has_gpu:
        own = torch.cuda.get_device_properties(0)
        found = Machine("cuda", given or own.total_memory, torch.cuda.device_count(), 0)
        return found, f"{found.count} x {own.name} on this machine"
    size = memory_gib or ASSUMED_GIB
    source = "as --memory-gb says" if memory_gib else "assumed; --memory-gb says otherwise"
    return Machine("cuda", given or ASSUMED_GIB * GIB, None, 0), f"GPUs of {size:g} GiB, none of them here ({source})"


def _machine_bytes() -> int:
    """Memory of this machine, or what its container may take of it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    return min(found)


def _own_bytes() -> int:
    """Resident memory of this process, which has the libraries of a run loaded and nothing else."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return GIB


def _prompts(config: Config, given: int | None, context: int) -> tuple[int, str, int | None]:
    """Tokens of the longest prompt, how they are known, and the number of training problems where it is known.

    What cannot be reached is assumed, but only of a hub: a path that is wrong is a mistake.
    """
    task: Task | None = None
    try:
        task = task_of(config)
    except DatasetError:
        if config.env.dataset_path is not None or config.env.eval_path is not None:
            raise
    count = None if task is None else len(task.train)
    if given is not None:
        if given >= context:
            raise UserError(f"A prompt of {given:,} tokens leaves no room for a response in a context of {context:,}.")
        return given, "as --prompt-tokens says", count
    if task is None:
        guess = min(ASSUMED_PROMPT, max(context - longest_response(config), context // 2))
        return guess, "assumed, the data is not here; --prompt-tokens says otherwise", None
    try:
        tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    except UserError:
        if Path(resolve_model_path(model_name(config))).is_dir():
            raise
        texts = ("".join(turn["content"] for turn in task.messages(e)) for e in [*task.train, *task.heldout])
        guess = max(len(text.encode()) for text in texts) // _BYTES_PER_TOKEN + 32
        return guess, "from the length of its text, the tokenizer is not here", count
    repeats = config.env.repeats
    several = config.env.max_steps > 1
    env = TaskEnv(task, tokenizer, num_envs=repeats, repeats=repeats, multi_turn=several, max_prompt_tokens=context - 1)
    return env.check_prompts(), f"the longest of {len(task.train) + len(task.heldout):,} prompts", count


def _times(config: Config, facts: Facts, plan: Plan) -> Times:
    from sota_grpo.assembly.probe import measure_rates, shape_of, turn_load

    how = learning_of(config, plan)
    inference = config.inference_model
    engines = max(1, len(plan.placement.inference) // inference.tensor_parallel_size) if plan.workers else 1
    rows = min(turn_size(config), engine_rows(config, plan.engine, plan.device_type, engines))
    dtype = engine_dtype(inference.torch_dtype, plan.device_type)
    rates = measure_rates(
        facts.model, how, device=plan.device_type, engine_bytes=4 if dtype == "float32" else 2, rows=rows
    )
    prompt, response = largest_sample(config, facts)
    shape = shape_of(facts.model, how.rank)
    load = turn_load(prompt, response, config.env.repeats, turn_size(config))
    settings = make_settings(config, plan.device_type)
    learn = settings.epochs * (step_flops(shape, load) + recomputed_flops(shape, load, checkpointing=how.checkpointing))
    learn += forward_flops(shape, load) if settings.recompute else 0
    passes = turn_size(config) / (rates.rows * engines)
    sample_s = passes * response * rates.token_s
    return Times(
        learn_s=learn / rates.flops_per_s / how.ranks,
        sample_s=sample_s,
        reference_s=forward_flops(shape, load) / rates.flops_per_s if config.policy.kl_coef else 0.0,
        flops_per_s=rates.flops_per_s,
        sampled_tokens_per_s=turn_size(config) * response / sample_s,
    )
