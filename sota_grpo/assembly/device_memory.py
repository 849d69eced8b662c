"""What every device of a run holds, moment by moment, before anything is built: arithmetic from the config alone."""

from __future__ import annotations

import copy
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec

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
from sota_grpo.assembly.rollout import engine_dtype, engine_rows
from sota_grpo.config import Config, longest_response
from sota_grpo.engines import ENGINES
from sota_grpo.errors import UserError
from sota_grpo.functional.balance import PromptGroup, fill
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.training.gate import NUM_COMPARED, NUM_SAMPLES, compared_budgets

GIB = 2**30
MOST_GPUS = 128
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"  # of glibc: see sota_grpo.assembly.memory
VLLM_CPU_POOL = GIB  # keys and values of vLLM on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise
CUDA_CONTEXT = 600 * 2**20  # of a process on a GPU: driver, kernels, workspaces of the matrix library
GRADER_BYTES = 60 * 2**20  # of a reward worker
Parts = dict[str, int]


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


def plan_for(config: Config, machine: Machine) -> Plan:
    """The device plan of the run; where no GPU is here, on the fewest that it stands on, with vLLM installed there.

    Raises:
        UserError: as :func:`~sota_grpo.assembly.devices.make_plan`.
    """
    if machine.is_here:
        return make_plan(config, machine.device_type, lambda: machine.count or 0)
    asked = config
    if config.engine.name in ("auto", "vllm") and find_spec("vllm") is None:
        asked = copy.deepcopy(config)
        asked.engine.name = "transformers"
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
    found = []
    for batch in batches:
        tokens = sum(piece.tokens for piece in batch)
        scale = max(tokens, min(budget, whole)) / tokens
        whole -= tokens
        count = sum(len(piece.rows) for piece in batch)
        slots, completion_tokens = count * (prompt + response), count * response
        packed = tokens if shared else slots
        found.append(
            MicroBatch(
                tokens=round(scale * packed),
                predicted=round(scale * completion_tokens),
                slots=round(scale * slots),
                keys=round(scale * (tokens + count * prompt)) if shared else 0,
            )
        )
    return found


def learner_of(config: Config, facts: Facts, plan: Plan) -> LearnerMemory:
    """Peak of one rank of the learner."""
    how = learning_of(config, plan)
    batches = step_micro_batches(config, facts, how.ranks)[:2]
    if how.on_cpu:  # there keys are read where they stand
        batches = [replace(batch, keys=0) for batch in batches]
    return learner_memory(facts.model, how, batches)


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
    cuts = [_cut(prompt, response, rows, group, budget, shared)[:2] for budget in budgets]
    if how.on_cpu:
        cuts = [[replace(batch, keys=0) for batch in batches] for batches in cuts]
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
    part, model = config.inference_model, facts.model
    if ENGINES[plan.engine].memory == "none" or config.engine.url is not None:
        return {}, None
    number_bytes = dtype_bytes(engine_dtype(part.torch_dtype, plan.device_type))
    engines = max(1, len(plan.placement.inference) // part.tensor_parallel_size)
    rows = engine_rows(config, plan.engine, plan.device_type, engines if plan.workers else 1)
    prompt, response = largest_sample(config, facts)
    weights = model.parameters * number_bytes // part.tensor_parallel_size
    if ENGINES[plan.engine].memory == "transformers":
        groups = -(-rows // config.env.repeats)
        kept, passing = embedded_engine_bytes(
            model,
            number_bytes=number_bytes,
            prompts=groups,
            rows=rows,
            prompt_tokens=prompt,
            response_tokens=response,
        )
        return {"engine: weights": weights, "engine: keys and values": kept, "engine: one token": passing}, None
    if plan.device_type == "cpu":
        return {"engine: weights": weights, "engine: keys and values": VLLM_CPU_POOL}, None
    share = int(part.gpu_memory_utilization * capacity)
    pool = vllm_pool_bytes(
        model, share_bytes=share, number_bytes=number_bytes, rows=rows, tensor_parallel=part.tensor_parallel_size
    )
    context = context_of(config, model)
    parallel = part.tensor_parallel_size
    needed = kv_bytes_per_token(model, number_bytes) * context // min(parallel, model.kv_heads)  # heads are not split
    problem = None
    if model.heads % parallel:
        problem = f"vLLM cannot share {model.heads} attention heads among tensor_parallel_size={parallel}"
    elif pool < needed:
        problem = (
            f"vLLM's share of {share / GIB:.1f} GiB leaves {max(0, pool) / GIB:.1f} GiB for keys and values, and one "
            f"sequence of {context} tokens needs {needed / GIB:.1f} GiB"
        )
    left = max(0, pool)
    return {
        "engine: weights": weights,
        "engine: keys and values": left,
        "engine: rest": max(0, share - weights - left),
    }, problem


def dtype_bytes(dtype: str) -> int:
    """Of a number in a dtype as options name it; ``auto`` stands for float32.

    >>> dtype_bytes("auto"), dtype_bytes("bfloat16")
    (4, 2)
    """
    return 4 if dtype in ("auto", "float32") else 2
