"""Whether a run fits its devices, and where it does not, the smallest change with which it would."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from sota_grpo.assembly.device_memory import (
    CUDA_CONTEXT,
    GRADER_BYTES,
    DeviceMemory,
    Facts,
    Machine,
    Parts,
    context_of,
    engine_of,
    gate_of,
    largest_sample,
    learner_of,
    plan_for,
    reference_of,
)
from sota_grpo.assembly.devices import Plan
from sota_grpo.config import Config
from sota_grpo.engines import SERVERS
from sota_grpo.errors import UserError
from sota_grpo.functional.memory import LearnerMemory
from sota_grpo.validators import validate

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
        contexts = CUDA_CONTEXT * (trains + refers + (samples and not _within_share(plan)))
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
        processes = 1 + (ranks if ranks > 1 else 0) + (0 if plan.engine in SERVERS else engines) + references
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
    kept = {name: size for name, size in engine.items() if name == "engine: weights" or plan.engine == "vllm"}
    moments = {SAMPLE: base | _resting(learner) | engine}
    if passing:
        moments[SCORE] = base | _resting(learner) | kept | {"reference: pass": passing}
    moments[TRAIN] = base | _training(learner) | kept
    if checked:
        moments[GATE] = base | _training(gate) | kept
    return DeviceMemory("CPU", roles, moments, machine.memory, problem)


def _within_share(plan: Plan) -> bool:
    """Whether the engine counts its own context to its share of the device."""
    return plan.engine not in ("transformers", "scripted")


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


def with_options(config: Config, options: dict[str, Any]) -> Config:
    """A copy of ``config`` with other values, by dotted name."""
    changed = copy.deepcopy(config)
    for name, value in options.items():
        *sections, leaf = name.split(".")
        part: Any = changed
        for section in sections:
            part = getattr(part, section)
        setattr(part, leaf, value)
    return changed


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
