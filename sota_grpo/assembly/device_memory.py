"""What every device, the machine of the learner and its disk hold of a run, before anything is built.

Arithmetic from the config and the shape of the model alone; that of single parts is in :mod:`.memory`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sota_grpo.assembly.devices import Plan, make_plan, reference_has_own_weights, wants_workers
from sota_grpo.assembly.learning import reference_dtype, trainer_precision
from sota_grpo.assembly.memory import (
    LearnerMemory,
    Learning,
    MicroBatch,
    embedded_engine_bytes,
    forward_bytes,
    gate_memory,
    kv_bytes_per_token,
    learner_memory,
    vllm_pool_bytes,
)
from sota_grpo.assembly.sampling import engine_dtype, engine_rows
from sota_grpo.config import Config, longest_response, model_name, overrides_of, responses_per_step, with_options
from sota_grpo.engines import ENGINES, is_server
from sota_grpo.errors import UserError
from sota_grpo.functional.balance import PromptGroup, fill
from sota_grpo.policy.load import find_architecture
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.recording.run_files import CHECKPOINTS
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.gate import NUM_COMPARED, NUM_SAMPLES, compared_budgets

GIB = 2**30
MOST_GPUS = 128
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"  # of glibc: see sota_grpo.assembly.memory
VLLM_CPU_POOL = GIB  # keys and values of vLLM on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise
CUDA_CONTEXT = 600 * 2**20  # of a process on a GPU: driver, kernels, workspaces of the matrix library
GRADER_BYTES = 60 * 2**20  # of a reward worker
Parts = dict[str, int]
# of a state that several ranks save: gathered, packed for its way, in the store, and in the process that writes it
COPIES_OF_RANKS = 4


@dataclass(frozen=True)
class Machine:
    """Where the run is to fit.

    Args:
        device_type: ``cuda`` or ``cpu``.
        memory: bytes of each GPU, or of the whole machine.
        count: GPUs; None where none is here: as many as the config asks for.
        process_bytes: what a process holds on the device before any tensor.
    """

    device_type: str
    memory: int
    count: int | None
    process_bytes: int

    @property
    def is_here(self) -> bool:
        """Whether it can be measured on."""
        return self.device_type == "cpu" or self.count is not None


@dataclass(frozen=True)
class Facts:
    """What memory depends on beside the config.

    Args:
        model: shape of the policy.
        prompt_tokens: of the longest prompt.
    """

    model: Architecture
    prompt_tokens: int


@dataclass(frozen=True)
class DeviceMemory:
    """Parts in bytes that a device holds at each moment of the run.

    Args:
        name: ``cuda:0``, or ``CPU`` for the whole machine.
        roles: who computes there.
        moments: parts by moment.
        capacity: bytes there are.
        problem: what keeps an engine from starting there whatever the sum, as one sentence.
    """

    name: str
    roles: tuple[str, ...]
    moments: Mapping[str, Parts]
    capacity: int
    problem: str | None = None

    @property
    def peak(self) -> int:
        """Bytes of the worst moment."""
        return max(sum(parts.values()) for parts in self.moments.values())

    @property
    def fits(self) -> bool:
        return self.problem is None and self.peak <= self.capacity


SAMPLE, SCORE, TRAIN, AT_WORK, GATE = "sampling", "reference", "training", "at work", "checks"


def devices_of(config: Config, facts: Facts, machine: Machine) -> list[DeviceMemory]:
    """Every device of the run with what it holds at each moment.

    In lockstep on one device its parts take turns: sampling, the reference's pass, training; an engine that shares a
    GPU with the learner sleeps through the latter two. With workers all are at work at once. Before the first step come
    the checks, where the learner compares two gradients.

    Raises:
        UserError: the devices cannot be shared out.
    """
    plan = plan_for(config, machine)
    learner = {AT_WORK if plan.workers else TRAIN: _learner_parts(learner_of(config, facts, plan))}
    if config.check.mode != "off":
        learner[GATE] = _learner_parts(gate_of(config, facts, plan))
    if plan.device_type == "cpu":
        return [_whole_machine(config, facts, machine, plan, learner)]
    place = plan.placement
    indices = sorted({*place.train, *place.inference, *place.ref})
    return [_gpu(config, facts, machine, plan, learner, index) for index in indices]


def _gpu(
    config: Config, facts: Facts, machine: Machine, plan: Plan, learner: Mapping[str, Parts], index: int
) -> DeviceMemory:
    place = plan.placement
    trains, samples, refers = index in place.train, index in place.inference, index in place.ref
    roles = [name for name, here in (("learner", trains), ("engine", samples), ("reference", refers)) if here]
    own, passing = reference_of(config, facts, plan)
    engine, problem = engine_of(config, facts, plan, machine.memory) if samples else ({}, None)
    learner = learner if trains else {}
    reference: Parts = {"reference: weights": own} if refers else {}
    if plan.workers:
        beside = samples and ENGINES[plan.engine].memory != "vllm"  # vLLM counts its context to its share of the device
        base = {"context": CUDA_CONTEXT * (trains + refers + beside)} | reference
        base |= {"reference: pass": passing} if refers else {}
        moments = {AT_WORK: base | engine} | {moment: base | engine | parts for moment, parts in learner.items()}
    else:
        base = {"context": CUDA_CONTEXT * (1 + (refers and config.ref_model.process))} | reference
        moments = _one_at_a_time(
            base,
            learner,
            engine if samples else None,
            asleep={} if place.colocated else engine,
            passing=passing if refers or (trains and not own) else 0,
        )
    return DeviceMemory(f"cuda:{index}", tuple(roles), moments, machine.memory, problem)


def _whole_machine(
    config: Config, facts: Facts, machine: Machine, plan: Plan, learner: Mapping[str, Parts]
) -> DeviceMemory:
    """All processes of a CPU run share its memory; nothing sleeps."""
    own, passing = reference_of(config, facts, plan)
    engine, problem = engine_of(config, facts, plan, machine.memory)
    roles = ("learner", "engine", *(["reference"] if own or passing else []))
    graders = GRADER_BYTES * config.env.reward_workers
    if plan.workers:
        place = plan.placement
        ranks, engines, references = len(place.train), len(place.inference), len(place.ref)
        processes = 1 + (ranks if ranks > 1 else 0) + (0 if is_server(plan.engine) else engines) + references
        libraries = {"libraries": processes * machine.process_bytes + graders}
        others = {name: engines * size for name, size in engine.items()}
        others["weights on their way"] = facts.model.parameters * 4  # in the store that the workers read
        others |= {"reference: weights": references * own, "reference: pass": references * passing} if own else {}
        moments = {
            moment: libraries | {name: ranks * size for name, size in parts.items()} | others
            for moment, parts in learner.items()
        }
    else:
        base = {"libraries": (1 + (own > 0 and config.ref_model.process)) * machine.process_bytes + graders}
        base |= {"reference: weights": own} if own else {}
        keeps_pool = ENGINES[plan.engine].memory == "vllm"
        kept = {name: size for name, size in engine.items() if name == "engine: weights" or keeps_pool}
        moments = _one_at_a_time(base, learner, engine, asleep=kept, passing=passing)
    return DeviceMemory("CPU", roles, moments, machine.memory, problem)


def _one_at_a_time(
    base: Parts, learner: Mapping[str, Parts], engine: Parts | None, *, asleep: Parts, passing: int
) -> dict[str, Parts]:
    """The moments of a device whose parts take turns.

    Args:
        learner: its parts in training and in the gate; empty where it is on another device.
        engine: None where it is on another device.
        asleep: what the engine keeps while others compute.
        passing: bytes of the reference's pass, 0 for none here.
    """
    resting = {name: size for name, size in learner.get(TRAIN, {}).items() if name in ("weights", "optimizer")}
    moments = {}
    if engine is not None:
        moments[SAMPLE] = base | resting | engine
    if passing:
        moments[SCORE] = base | resting | asleep | {"reference: pass": passing}
    return moments | {moment: base | parts | asleep for moment, parts in learner.items()}


def _learner_parts(learner: LearnerMemory) -> Parts:
    parts = asdict(learner)
    heap = parts.pop("heap")
    return parts | ({"lost in the heap": heap} if heap else {})


def plan_for(config: Config, machine: Machine) -> Plan:
    """The device plan of the run; where no GPU is here, on the fewest that it stands on, with vLLM installed there.

    Raises:
        UserError: as :func:`~sota_grpo.assembly.devices.make_plan`.
    """
    if machine.is_here:
        return make_plan(config, machine.device_type, lambda: machine.count or 0)
    asked = config
    if config.engine.name in ("auto", "vllm") and find_spec("vllm") is None:
        asked = with_options(config, {"engine.name": "transformers"})
    fewest = 2 if wants_workers(config) else 1
    for count in range(fewest, MOST_GPUS):
        try:
            plan = make_plan(asked, "cuda", lambda count=count: count)  # type: ignore[misc]
            return plan if asked is config else replace(plan, engine="vllm")
        except UserError:
            continue
    return make_plan(asked, "cuda", lambda: MOST_GPUS)


def learning_of(config: Config, plan: Plan) -> Learning:
    """How the learner of ``config`` trains, in the terms of :mod:`sota_grpo.assembly.memory`."""
    part = config.train_model
    weight_bytes = dtype_bytes(part.torch_dtype)
    on_cpu = plan.device_type == "cpu"
    product_bytes = weight_bytes if trainer_precision(config, plan.device_type) == "fp32" else 2
    return Learning(
        weight_bytes=weight_bytes,
        product_bytes=product_bytes,
        rank=part.lora.r if part.lora.enabled else 0,
        dropout=part.lora.dropout > 0,
        checkpointing=part.gradient_checkpointing,
        ranks=len(plan.placement.train),
        shard_gradients=part.shard_gradients,
        on_cpu=on_cpu,
        repeats_keys=config.model.attn_implementation is not None or not (on_cpu or product_bytes == 2),
        heap=on_cpu and platform.libc_ver()[0] == "glibc" and THRESHOLD not in os.environ,
    )


def context_of(config: Config, model: Architecture) -> int:
    """Tokens of prompt and response together: what the config says, at most what the model allows."""
    return min(config.inference_model.max_model_len or model.context, model.context)


def largest_sample(config: Config, facts: Facts) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response that fits behind it."""
    context = context_of(config, facts.model)
    prompt = min(facts.prompt_tokens, context - 1)
    return prompt, min(longest_response(config), context - prompt)


def step_micro_batches(config: Config, facts: Facts, ranks: int) -> list[MicroBatch]:
    """The micro-batches of an optimizer step on one rank, if every sample is the largest; the heaviest first.

    Ragged samples fill a micro-batch better, up to ``train.micro_batch_tokens``: the heaviest is taken to be full.
    """
    prompt, response = largest_sample(config, facts)
    rows = max(1, config.train.optim_batch_size // ranks)
    shared = config.model.attn_implementation is None
    group = min(rows, config.env.repeats) if shared else 1
    return _cut(prompt, response, rows, group, config.train.micro_batch_tokens, shared)


@lru_cache(maxsize=1024)
def _cut(prompt: int, response: int, rows: int, group: int, budget: int, shared: bool) -> list[MicroBatch]:
    sizes = [group] * (rows // group) + ([rows % group] if rows % group else [])
    groups = [PromptGroup(tuple(range(size)), prompt, (response,) * size) for size in sizes]
    batches = fill(groups, token_budget=budget, **({} if shared else {"slots_per_token": 1}))
    whole = sum(piece.tokens for batch in batches for piece in batch)
    micro_batches = []
    for batch in batches:
        tokens = sum(piece.tokens for piece in batch)
        scale = max(tokens, min(budget, whole)) / tokens
        whole -= tokens
        count = sum(len(piece.rows) for piece in batch)
        slots, completion_tokens = count * (prompt + response), count * response
        packed = tokens if shared else slots
        micro_batches.append(
            MicroBatch(
                tokens=round(scale * packed),
                predicted=round(scale * completion_tokens),
                slots=round(scale * slots),
                keys=round(scale * (tokens + count * prompt)) if shared else 0,
            )
        )
    return micro_batches


def learner_of(config: Config, facts: Facts, plan: Plan) -> LearnerMemory:
    """Peak of one rank of the learner."""
    how = learning_of(config, plan)
    return learner_memory(facts.model, how, step_micro_batches(config, facts, how.ranks))


def gate_of(config: Config, facts: Facts, plan: Plan) -> LearnerMemory:
    """Peak of one rank in the gate, of a run that is resumed: a fresh one has no moments of the optimizer yet.

    Its rows are few, but cut by another budget than a step's, and computed in float32 on a CPU.
    """
    how = learning_of(config, plan)
    how = replace(how, product_bytes=how.weight_bytes) if how.on_cpu else how
    prompt, response = largest_sample(config, facts)
    rows, shared = max(1, NUM_COMPARED // how.ranks), config.model.attn_implementation is None
    group = min(rows, NUM_SAMPLES) if shared else 1
    budgets = compared_budgets(config.train.micro_batch_tokens, prompt + response)
    cuts = [_cut(prompt, response, rows, group, budget, shared) for budget in budgets]
    return gate_memory(facts.model, how, *cuts)


def reference_of(config: Config, facts: Facts, plan: Plan) -> tuple[int, int]:
    """Bytes of the reference's own weights (0 where it has none), and of a pass through it (0 without reference)."""
    if config.policy.kl_coef == 0:
        return 0, 0
    weight_bytes = dtype_bytes(reference_dtype(config))
    how = learning_of(config, plan)
    how = replace(how, weight_bytes=weight_bytes, product_bytes=min(weight_bytes, how.product_bytes))
    batch = step_micro_batches(config, facts, 1)[0]
    own = facts.model.parameters * weight_bytes if reference_has_own_weights(config) else 0
    return own, forward_bytes(facts.model, how, batch)


def engine_of(config: Config, facts: Facts, plan: Plan, capacity: int) -> tuple[Parts, str | None]:
    """What one engine holds on each of its devices, and what keeps it from starting there."""
    part, model, kind = config.inference_model, facts.model, ENGINES[plan.engine].memory
    if kind == "none" or config.engine.url is not None:
        return {}, None
    parallel = part.tensor_parallel_size
    number_bytes = dtype_bytes(engine_dtype(part.torch_dtype, plan.device_type))
    engines = max(1, len(plan.placement.inference) // parallel)
    rows = engine_rows(config, plan.engine, plan.device_type, engines if plan.workers else 1)
    weights = model.parameters * number_bytes // parallel
    if kind == "transformers":
        prompt, response = largest_sample(config, facts)
        kept, passing = embedded_engine_bytes(
            model,
            number_bytes=number_bytes,
            prompts=-(-rows // config.env.repeats),
            rows=rows,
            prompt_tokens=prompt,
            response_tokens=response,
        )
        return {"engine: weights": weights, "engine: keys and values": kept, "engine: one token": passing}, None
    if plan.device_type == "cpu":
        return {"engine: weights": weights, "engine: keys and values": VLLM_CPU_POOL}, None
    share = int(part.gpu_memory_utilization * capacity)
    left = vllm_pool_bytes(model, share_bytes=share, number_bytes=number_bytes, rows=rows, tensor_parallel=parallel)
    pool, context = max(0, left), context_of(config, model)
    needed = kv_bytes_per_token(model, number_bytes) * context // min(parallel, model.kv_heads)  # heads are not split
    problem = None
    if model.heads % parallel:
        problem = f"vLLM cannot share {model.heads} attention heads among tensor_parallel_size={parallel}"
    elif left < needed:
        problem = (
            f"vLLM's share of {share / GIB:.1f} GiB leaves {pool / GIB:.1f} GiB for keys and values, and one "
            f"sequence of {context} tokens needs {needed / GIB:.1f} GiB"
        )
    rest = max(0, share - weights - pool)
    return {"engine: weights": weights, "engine: keys and values": pool, "engine: rest": rest}, problem


def dtype_bytes(dtype: str) -> int:
    """Of a number in a dtype as options name it; ``auto`` stands for float32.

    >>> dtype_bytes("auto"), dtype_bytes("bfloat16")
    (4, 2)
    """
    return 4 if dtype in ("auto", "float32") else 2


@dataclass(frozen=True)
class Disk:
    """What a run writes.

    Args:
        checkpoint: bytes of one: the trained weights and the optimizer's two moments of each.
        checkpoints: that are there at once: those that are kept and the one that is being written.
        export: bytes of the trained model at the end.
    """

    checkpoint: int
    checkpoints: int
    export: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export

    @property
    def sentence(self) -> str:
        """For people, in GiB."""
        several = f"{self.checkpoints} checkpoints" if self.checkpoints > 1 else "1 checkpoint"
        text = f"{self.total / GIB:.3g} GiB: {several} of {self.checkpoint / GIB:.3g} GiB"
        text += ", one of them being written" if self.checkpoints > 1 else ""
        return text + (f", and {self.export / GIB:.3g} GiB of the trained model" if self.export else "")


def disk_of(config: Config, model: Architecture) -> Disk:
    """What the run of ``config`` writes, but for its logs and its stored steps.

    >>> config = Config()
    >>> model = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> model.parameters, disk_of(config, model)
    (1448, Disk(checkpoint=17376, checkpoints=4, export=5792))
    """
    part, train = config.train_model, config.train
    own = dtype_bytes(part.torch_dtype)
    trained = 4 * model.adapter_parameters(part.lora.r) if part.lora.enabled else own * model.parameters
    steps = train.total_dialog_turns // responses_per_step(config)
    saves = -(-steps // train.checkpoint_frequency) if train.checkpoint_frequency else 1
    return Disk(3 * trained, min(train.keep_checkpoints + 1, saves), own * model.parameters * train.export_hf)


def require_disk(config: Config, run_dir: Path) -> None:
    """Refuse a run that the disk will end later, hours after it began.

    Raises:
        UserError: too little is free, with the smallest change that helps.
    """
    model, _ = find_architecture(model_name(config), trust_remote_code=config.model.trust_remote_code)
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    saved = sum(path.stat().st_size for _, path in CheckpointStore(run_dir / CHECKPOINTS).paths())  # they make room
    free = shutil.disk_usage(there).free + saved
    needed = disk_of(config, model)
    if needed.total <= free:
        return
    fix = "free space there, or choose another hydra.run.dir"
    for options in _changes(config):
        changed = disk_of(with_options(config, options), model)
        if changed.total <= free:
            fix = f"use {' '.join(overrides_of(options))} ({changed.total / GIB:.3g} GiB), or {fix}"
            break
    raise UserError(f"The run writes {needed.sentence}; {run_dir} has {free / GIB:.3g} GiB for it; {fix}.")


def _changes(config: Config) -> Iterator[dict[str, Any]]:
    """Options that write less, the mildest first."""
    fewer = [{"train.keep_checkpoints": count} for count in range(config.train.keep_checkpoints - 1, 0, -1)]
    yield from fewer
    least = (fewer[-1] if fewer else {}) | ({"train.export_hf": False} if config.train.export_hf else {})
    yield least
    if not config.train_model.lora.enabled:
        yield {"train_model.lora.enabled": True}
        yield least | {"train_model.lora.enabled": True}


def host_memory_of(config: Config, facts: Facts, plan: Plan) -> dict[str, int] | None:
    """Bytes by moment on the machine of the learner, beside the programs and their data; None on a CPU.

    Of several ranks only rank 0 loads the model, and its machine is counted as if the others were there too.
    """
    if plan.device_type == "cpu":
        return None
    how, model = learning_of(config, plan), facts.model
    trained = how.trainable(model) * how.trained_bytes
    engine = model.parameters * dtype_bytes(engine_dtype(config.inference_model.torch_dtype, "cuda"))
    asleep = engine if plan.placement.colocated and not plan.workers else 0
    return {
        "loading the model": model.parameters * how.weight_bytes,
        "the checks": asleep + (trained if config.check.mode != "off" else 0),
        "a checkpoint on its way to the disk": asleep + 3 * trained * (COPIES_OF_RANKS if how.ranks > 1 else 1),
    }
