"""A dry run: where the parts of a run would stand, what they would hold, how long it would take. Nothing is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch

from sota_grpo.assembly.device_memory import (
    CUDA_CONTEXT,
    GIB,
    GRADER_BYTES,
    THRESHOLD,
    DeviceMemory,
    Facts,
    Machine,
    Parts,
    context_of,
    engine_of,
    gate_of,
    largest_sample,
    learner_of,
    learning_of,
    plan_for,
    reference_of,
    step_micro_batches,
)
from sota_grpo.assembly.devices import Plan
from sota_grpo.assembly.disk import Disk, HostMemory, disk_of, host_memory_of
from sota_grpo.assembly.learning import make_settings
from sota_grpo.assembly.memory import LearnerMemory
from sota_grpo.assembly.rollout import engine_dtype, engine_rows
from sota_grpo.assembly.tasks import task_of
from sota_grpo.config import Config, longest_response, model_name, turn_size, with_options
from sota_grpo.config.placement import describe
from sota_grpo.config.validators import validate
from sota_grpo.engines import ENGINES, is_server
from sota_grpo.envs import TaskEnv
from sota_grpo.errors import UserError
from sota_grpo.functional.flops import forward_flops, recomputed_flops, step_flops
from sota_grpo.policy.load import find_architecture, load_tokenizer, resolve_model_path
from sota_grpo.rl.task import Task
from sota_grpo.tasks.dataset import DatasetError

_MOST_CHANGES = 3  # options that a proposal may touch
SAMPLE, SCORE, TRAIN, AT_WORK, GATE = "sampling", "reference", "training", "at work", "checks"


def devices_of(config: Config, facts: Facts, machine: Machine) -> list[DeviceMemory]:
    """Every device of the run with what it holds at each moment.

    In lockstep on one device its parts take turns: sampling, the reference's pass, training; an engine that shares a
    GPU with the learner sleeps through the latter two. With workers all are at work at once. Before the first turn come
    the checks, where the learner compares two gradients.

    Raises:
        UserError: the devices cannot be shared out.
    """
    plan = plan_for(config, machine)
    learner, gate = learner_of(config, facts, plan), gate_of(config, facts, plan)
    if plan.device_type == "cpu":
        return [_whole_machine(config, facts, machine, plan, learner, gate)]
    place = plan.placement
    return [
        _gpu(config, facts, machine, plan, learner, gate, index)
        for index in sorted({*place.train, *place.inference, *place.ref})
    ]


def _gpu(
    config: Config,
    facts: Facts,
    machine: Machine,
    plan: Plan,
    learner: LearnerMemory,
    gate: LearnerMemory,
    index: int,
) -> DeviceMemory:
    place = plan.placement
    trains, samples, refers = index in place.train, index in place.inference, index in place.ref
    roles = [name for name, here in (("learner", trains), ("engine", samples), ("reference", refers)) if here]
    own, passing = reference_of(config, facts, plan)
    engine, problem = engine_of(config, facts, plan, machine.memory) if samples else ({}, None)
    reference: Parts = {"reference: weights": own} if refers else {}
    scoring: Parts = {"reference: pass": passing} if refers else {}
    checked = config.check.mode != "off"
    if plan.workers:
        beside = ENGINES[plan.engine].memory != "vllm"  # others count their context to their share of the device
        contexts = CUDA_CONTEXT * (trains + refers + (samples and beside))
        others = {"context": contexts, **reference, **scoring, **engine}
        moments = {AT_WORK: others | (_training(learner) if trains else {})}
        if trains and checked:
            moments[GATE] = others | _training(gate)
        return DeviceMemory(f"cuda:{index}", tuple(roles), moments, machine.memory, problem)
    base: Parts = {"context": CUDA_CONTEXT * (1 + (refers and config.ref_model.process))} | reference
    resting = _resting(learner) if trains else {}
    moments = {}
    if samples:
        moments[SAMPLE] = base | resting | engine
    asleep = engine if samples and not place.colocated else {}
    if passing and (refers or (trains and not own)):
        moments[SCORE] = base | resting | {"reference: pass": passing} | asleep
    if trains:
        moments[TRAIN] = base | _training(learner) | asleep
    if trains and checked:
        moments[GATE] = base | _training(gate) | asleep
    return DeviceMemory(f"cuda:{index}", tuple(roles), moments, machine.memory, problem)


def _whole_machine(
    config: Config, facts: Facts, machine: Machine, plan: Plan, learner: LearnerMemory, gate: LearnerMemory
) -> DeviceMemory:
    """All processes of a CPU run share its memory; nothing sleeps."""
    place, checked = plan.placement, config.check.mode != "off"
    own, passing = reference_of(config, facts, plan)
    engine, problem = engine_of(config, facts, plan, machine.memory)
    roles = ("learner", "engine", *(["reference"] if own or passing else []))
    graders = GRADER_BYTES * config.env.reward_workers
    if plan.workers:
        ranks, engines, references = len(place.train), len(place.inference), len(place.ref)
        processes = 1 + (ranks if ranks > 1 else 0) + (0 if is_server(plan.engine) else engines) + references
        everything = {
            "libraries": processes * machine.process_bytes + graders,
            **{name: ranks * size for name, size in _training(learner).items()},
            **{name: engines * size for name, size in engine.items()},
            "weights on their way": facts.model.parameters * 4,  # in the store that the workers read
        }
        everything |= {"reference: weights": references * own, "reference: pass": references * passing} if own else {}
        moments = {AT_WORK: everything}
        if checked:
            moments[GATE] = everything | {name: ranks * size for name, size in _training(gate).items()}
        return DeviceMemory("CPU", roles, moments, machine.memory, problem)
    processes = 1 + (own > 0 and config.ref_model.process)
    base: Parts = {"libraries": processes * machine.process_bytes + graders}
    base |= {"reference: weights": own} if own else {}
    keeps_pool = ENGINES[plan.engine].memory == "vllm"
    kept = {name: size for name, size in engine.items() if name == "engine: weights" or keeps_pool}
    moments = {SAMPLE: base | _resting(learner) | engine}
    if passing:
        moments[SCORE] = base | _resting(learner) | kept | {"reference: pass": passing}
    moments[TRAIN] = base | _training(learner) | kept
    if checked:
        moments[GATE] = base | _training(gate) | kept
    return DeviceMemory("CPU", roles, moments, machine.memory, problem)


def _training(learner: LearnerMemory) -> Parts:
    return {
        "weights": learner.weights,
        "gradients": learner.gradients,
        "optimizer": learner.optimizer,
        "activations": learner.activations,
        "logits": learner.logits,
    } | ({"lost in the heap": learner.heap} if learner.heap else {})


def _resting(learner: LearnerMemory) -> Parts:
    return {"weights": learner.weights, "optimizer": learner.optimizer}


@dataclass(frozen=True)
class _Lever:
    """One thing that can be changed: how much it asks of the user, and its settings, the mildest first."""

    price: int
    settings: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Change:
    """Options that make a run fit, and the worst device under them."""

    options: dict[str, Any]
    worst: DeviceMemory

    @property
    def overrides(self) -> str:
        """As on the command line."""
        return " ".join(f"{name}={_written(value)}" for name, value in self.options.items())


def smallest_change(config: Config, facts: Facts, machine: Machine, *, with_lora: bool = True) -> Change | None:
    """The change that asks least among those with which every device has room; None where none does.

    Each candidate is judged by the same arithmetic as the run itself, and must keep the rules of a config. What
    changes nothing but memory and time comes before what trains other weights, and that before more devices.

    Args:
        with_lora: whether training an adapter instead of all weights may be proposed.
    """
    levers = _levers(config, facts, machine, with_lora)
    sets = [chosen for count in range(1, _MOST_CHANGES + 1) for chosen in combinations(levers, count)]
    for chosen in sorted(sets, key=lambda chosen: sum(lever.price for lever in chosen)):
        for options in _settings(chosen):
            changed = with_options(config, options)
            found = _fitting(changed, facts, machine)
            if found is not None:
                return Change(options, found)
    return None


def worst_of(devices: Sequence[DeviceMemory]) -> DeviceMemory:
    """The device that lacks most, one whose engine cannot start before all others."""
    return max(devices, key=lambda device: (device.problem is not None, device.peak / device.capacity))


def _fitting(config: Config, facts: Facts, machine: Machine) -> DeviceMemory | None:
    try:
        devices = devices_of(config, facts, machine)
        if not all(device.fits for device in devices):
            return None
        validate(config)
    except UserError:
        return None
    return worst_of(devices)


def _settings(levers: Sequence[_Lever]) -> Iterator[dict[str, Any]]:
    """Every combination, those that move least in all first."""
    places = product(*(range(len(lever.settings)) for lever in levers))
    for chosen in sorted(places, key=sum):
        options: dict[str, Any] = {}
        for lever, index in zip(levers, chosen):
            options |= lever.settings[index]
        yield options


def _levers(config: Config, facts: Facts, machine: Machine, with_lora: bool) -> list[_Lever]:
    train, inference = config.train_model, config.inference_model
    longest = sum(largest_sample(config, facts))
    found = [_Lever(1, [{"train.micro_batch_tokens": size} for size in _halves(config, longest)])]
    if not train.gradient_checkpointing:
        found.append(_Lever(2, [{"train_model.gradient_checkpointing": True}]))
    if machine.device_type == "cuda":
        found += [
            _Lever(2, [{"inference_model.gpu_memory_utilization": share} for share in _shares(config)]),
            _Lever(3, _contexts(config, facts, longest)),
            _Lever(16, [{"train_model.num_devices": n} for n in (2, 4, 8) if n > (train.num_devices or 1)]),
            _Lever(16, [{"inference_model.num_devices": 1}] if inference.num_devices is None else []),
            _Lever(
                18, [{"inference_model.tensor_parallel_size": n, "inference_model.num_devices": n} for n in (2, 4, 8)]
            ),
            _Lever(3, [] if train.shard_gradients else [{"train_model.shard_gradients": True}]),
        ]
    adapter = {"train_model.lora.enabled": True}
    half = {"train_model.torch_dtype": "bfloat16"}  # for frozen weights: trained ones should not be in it
    halves = [half] if train.torch_dtype in ("auto", "float32") else []
    if train.lora.enabled:
        found.append(_Lever(4, halves))
    elif with_lora:
        found.append(_Lever(8, [adapter, *(adapter | each for each in halves)]))
    return [lever for lever in found if lever.settings]


def _halves(config: Config, longest: int) -> list[int]:
    """Smaller micro-batches, down to one that holds the longest sample: below that nothing changes."""
    size, found = config.train.micro_batch_tokens, []
    while size > longest:
        size //= 2
        found.append(size)
    return found


def _shares(config: Config) -> list[float]:
    """Of vLLM, in steps of 0.05: the nearest first, smaller before larger."""
    now = config.inference_model.gpu_memory_utilization
    every = [round(0.05 * step, 2) for step in range(2, 19)]
    return sorted((share for share in every if share != now), key=lambda share: (abs(share - now), share))


def _contexts(config: Config, facts: Facts, longest: int) -> list[dict[str, Any]]:
    """A context that holds the largest sample and little more, where the one that there is holds much more."""
    context = context_of(config, facts.model)
    tight = -(-longest // 256) * 256
    return [{"inference_model.max_model_len": tight}] if tight < context else []


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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
