"""What every device and the disk hold of a run before anything is built: arithmetic from config and shape of the model.

That of single parts is in :mod:`.memory`.
"""

from __future__ import annotations

import os
import platform
import shutil
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Self

from sota_grpo.assembly.devices import Plan, make_plan, num_engines, reference_has_own_weights, wants_workers
from sota_grpo.assembly.learning import (
    MOST_TOKENS,
    forward_tokens,
    make_settings,
    reference_dtype,
    trainer_precision,
    wants_fused_layers,
)
from sota_grpo.assembly.memory import (
    Learning,
    MicroBatch,
    Parts,
    embedded_engine_bytes,
    forward_bytes,
    gate_memory,
    kv_bytes_per_token,
    learner_memory,
    vllm_pool_bytes,
)
from sota_grpo.assembly.sampling import engine_dtype, engine_rows
from sota_grpo.config import Config, has_reference, model_name, most_kept, responses_per_step
from sota_grpo.config.memory_rules import micro_batch_tokens
from sota_grpo.config.mixture import group_sizes, longest_response
from sota_grpo.config.spelling import overrides_of, with_options
from sota_grpo.engines import ENGINES
from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import KEPT_SHARE
from sota_grpo.functional.micro_batches import PromptGroup, fill
from sota_grpo.policy.load import find_architecture
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.optimizers import OPTIMIZERS
from sota_grpo.recording.run_files import CHECKPOINTS
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.gate import NUM_COMPARED, compared_budgets
from sota_grpo.training.subject import NUM_SAMPLES

GIB = 2**30
MOST_GPUS = 128
VLLM_CPU_POOL = GIB  # keys and values of vLLM on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise
CUDA_CONTEXT = 600 * 2**20  # of a process on a GPU: driver, kernels, workspaces of the matrix library
SAMPLE, SCORE, TRAIN, AT_WORK, GATE = "sampling", "reference", "training", "at work", "checks"
FILLED = 0.9  # of what is free while training, by micro-batches of train.micro_batch_tokens=auto
_BY_MICRO_BATCHES = (SCORE, TRAIN, AT_WORK, GATE)  # moments that depend on their size
_OF_LEARNER = ("weights", "gradients", "optimizer", "activations", "logits", "lost in the heap", "reference: pass")


@dataclass(frozen=True)
class Machine:
    """Where the run is to fit."""

    device_type: str  # cuda or cpu
    memory: int  # bytes of each GPU, or of the whole machine
    process_bytes: int = CUDA_CONTEXT  # what a process holds on the device before any tensor
    count: int | None = None  # GPUs; None: as many as the config asks for
    is_here: bool = True


@dataclass(frozen=True)
class DeviceMemory:
    """Parts in bytes that a device holds at each moment of the run."""

    name: str  # cuda:0, or CPU for the whole machine
    roles: tuple[str, ...]  # who computes there
    moments: Mapping[str, Parts]
    capacity: int
    problem: str | None = None  # what keeps an engine from starting there whatever the sum, as one sentence

    @property
    def peak(self) -> int:
        """Bytes of the worst moment."""
        return max(sum(parts.values()) for parts in self.moments.values())

    @property
    def fits(self) -> bool:
        return self.problem is None and self.peak <= self.capacity

    @property
    def learning(self) -> tuple[int, int]:
        """Bytes of learner and reference when they fill most of what others leave them, and what these leave."""
        moments = [self.moments[moment] for moment in _BY_MICRO_BATCHES if moment in self.moments]
        sizes = [(sum(parts.get(part, 0) for part in _OF_LEARNER), sum(parts.values())) for parts in moments]
        left = [(own, self.capacity - (whole - own)) for own, whole in sizes if own]
        return max(left, key=lambda pair: pair[0] - FILLED * pair[1], default=(0, self.capacity))


@dataclass(frozen=True)
class RunMemory:
    """A run that is planned: its parts, and the devices that hold them.

    Args:
        model: shape of the policy.
        prompt_tokens: of the longest prompt.
        teacher: shape of the reference; None: that of the policy.
    """

    config: Config
    model: Architecture
    prompt_tokens: int
    machine: Machine
    teacher: Architecture | None = field(default=None, kw_only=True)

    def with_options(self, options: dict[str, Any]) -> Self:
        """The same with other values in its config, by dotted name."""
        return replace(self, config=with_options(self.config, options))

    @cached_property
    def plan(self) -> Plan:
        """Of the devices; without their number, on the fewest GPUs that the run takes. vLLM is installed elsewhere.

        Raises:
            UserError: as :func:`~sota_grpo.assembly.devices.make_plan`; so does everything below.
        """
        config, machine = self.config, self.machine
        if machine.is_here:
            return make_plan(config, machine.device_type, machine.count or 0)
        engine = "vllm" if config.engine.name == "auto" else config.engine.name
        if machine.count is not None:
            return make_plan(config, "cuda", machine.count, engine)
        for count in range(2 if wants_workers(config) else 1, MOST_GPUS):
            with suppress(UserError):
                return make_plan(config, "cuda", count, engine)
        return make_plan(config, "cuda", MOST_GPUS, engine)

    @cached_property
    def devices(self) -> list[DeviceMemory]:
        """Every device with what it holds at each moment.

        Parts that take turns on a device do so in synchronous mode on one device and on GPUs that engines and learner
        share; an engine sleeps while its GPU's learner trains. Before the first step come the checks, where the learner
        compares two gradients. On a CPU all processes share the memory of the machine, and nothing sleeps.
        """
        roles = self.plan.placement.train, self.plan.placement.inference, self.plan.placement.ref
        if self.plan.device_type == "cpu":
            return [self._device("CPU", *map(len, roles))]
        indices = sorted({index for role in roles for index in role})
        return [self._device(f"cuda:{index}", *(int(index in role) for role in roles)) for index in indices]

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    @property
    def worst(self) -> DeviceMemory:
        """The device that lacks most, one whose engine cannot start before all others."""
        return max(self.devices, key=lambda device: (device.problem is not None, device.peak / device.capacity))

    def _device(self, name: str, ranks: int, engines: int, references: int) -> DeviceMemory:
        """A GPU, or a machine without one, on which there are so many of each role."""
        plan, on_cpu, kind = self.plan, self.plan.device_type == "cpu", ENGINES[self.plan.engine].memory
        own, passing = self.reference
        engine, problem = self.engine if engines else ({}, None)
        learner = self.learner if ranks else {}
        # vLLM's share of a GPU has its own context, which does not sleep
        own_context = 0 if kind == "vllm" and not (plan.shared or on_cpu) else engines
        processes = ranks + references + own_context if plan.workers else 1
        base = {"libraries" if on_cpu else "context": processes * self.machine.process_bytes}
        base |= {"reference: weights": own * references} if references else {}
        if plan.workers and references:  # a process of its own keeps what a pass took
            base |= {"reference: pass": passing * references}
        if not self._take_turns:
            base |= {part: engines * size for part, size in engine.items()}
            moments = {AT_WORK: base}
            for moment, parts in learner.items():
                moments[moment] = base | {part: ranks * size for part, size in parts.items()}
        else:
            asleep = {} if plan.placement.colocated else engine
            if on_cpu:  # nothing sleeps, and the embedded engine keeps its weights alone
                asleep = {part: size for part, size in engine.items() if kind == "vllm" or part == "engine: weights"}
            resting = {part: learner[TRAIN][part] for part in ("weights", "optimizer") if learner}
            moments = {SAMPLE: base | resting | engine} if engines else {}
            if passing and (references or (ranks and not own)):
                moments[SCORE] = base | resting | asleep | {"reference: pass": passing}
            moments |= {moment: base | parts | asleep for moment, parts in learner.items()}
        present = {"learner": ranks, "engine": engines, "reference": references or (on_cpu and passing)}
        roles = tuple(role for role, count in present.items() if count)
        return DeviceMemory(name, roles, moments, self.machine.memory, problem)

    @property
    def _take_turns(self) -> bool:
        """Whether sampling and training are never at work on a device at once; without GPUs no engine sleeps."""
        return not self.plan.workers or (self.plan.shared and self.plan.device_type != "cpu")

    @cached_property
    def how(self) -> Learning:
        model, device_type = self.config.train_model, self.plan.device_type
        weight_bytes, on_cpu = dtype_bytes(model.torch_dtype), device_type == "cpu"
        product_bytes = weight_bytes if trainer_precision(self.config, device_type) == "fp32" else 2
        return Learning(
            weight_bytes=weight_bytes,
            product_bytes=product_bytes,
            rank=model.lora.r if model.lora.enabled else 0,
            dropout=model.lora.dropout > 0,
            checkpointing=model.gradient_checkpointing,
            ranks=len(self.plan.placement.train)
            if model.fsdp_size is None
            else model.fsdp_size * model.tensor_parallel_size,
            parallel=model.tensor_parallel_size,
            shard_gradients=model.shard_gradients,
            quantized=self.config.model.quantization is not None,
            compiled=not on_cpu and wants_fused_layers(self.config, device_type),
            optimizer=self.config.optimizer.name,
            on_cpu=on_cpu,
            repeats_keys=self.config.model.attn_implementation is not None or not (on_cpu or product_bytes == 2),
            kept=min(most_kept(self.config), self.model.vocab),
            kept_tiles=0 if on_cpu else self.machine.memory // KEPT_SHARE,
            heap=on_cpu and platform.libc_ver()[0] == "glibc" and "MALLOC_MMAP_THRESHOLD_" not in os.environ,
        )

    @property
    def row_shares(self) -> int:
        """Shares of a step's rows, one for each rank, or for those that divide matrices among them."""
        return max(1, len(self.plan.placement.train) // self.config.train_model.tensor_parallel_size)

    @property
    def context(self) -> int:
        """Tokens of prompt and response together: what the config says, at most what the model allows."""
        return min(self.config.inference_model.max_model_len or self.model.context, self.model.context)

    @property
    def largest_sample(self) -> tuple[int, int]:
        """Tokens of the longest prompt and of the longest response that fits behind it."""
        prompt = min(self.prompt_tokens, self.context - 1)
        return prompt, min(longest_response(self.config), self.context - prompt)

    def micro_batches(self, shares: int, budget: int | None = None) -> list[MicroBatch]:
        """Those of an optimizer step in one of so many shares, if every sample is the largest; the heaviest first.

        Ragged samples fill a micro-batch better, so the heaviest is taken to be full.
        """
        train, largest = self.config.train, max(group_sizes(self.config).values())
        rows = train.optim_batch_size * largest // self.config.env.repeats  # if all groups are as large as the largest
        return self._cut(rows // shares, largest, self.micro_batch_tokens if budget is None else budget)

    @cached_property
    def micro_batch_tokens(self) -> int:
        """``train.micro_batch_tokens``; of ``auto`` on a GPU the most with which learner and reference fill at most
        :data:`FILLED` of what is free while they compute, on every device: at most ``MOST_TOKENS``, or one share of a
        step, and at least the longest sample, which is computed whole in any case.
        """
        if isinstance(self.config.train.micro_batch_tokens, int) or self.plan.device_type == "cpu":
            return micro_batch_tokens(self.config)
        least = sum(self.largest_sample)
        most = max(least, min(MOST_TOKENS, sum(one.tokens for one in self.micro_batches(self.row_shares, 2**62))))
        if self._leaves_room(most) or not self._leaves_room(least):
            return most if self._leaves_room(most) else least
        finest = max(1, min(least, (most - least) // 256))
        sizes = range(least, most, finest)
        return sizes[bisect_left(sizes, True, key=lambda tokens: not self._leaves_room(tokens)) - 1]

    def with_micro_batches(self, tokens: int) -> Self:
        """The same with so many tokens in a micro-batch, of which no placement depends."""
        other = self.with_options({"train.micro_batch_tokens": tokens})
        vars(other)["plan"] = self.plan
        return other

    def _leaves_room(self, tokens: int) -> bool:
        return all(own <= FILLED * left for own, left in (d.learning for d in self.with_micro_batches(tokens).devices))

    @property
    def micro_batches_sentence(self) -> str:
        """What ``auto`` is here, what it fills, and what is cut."""
        planned = self.with_micro_batches(self.micro_batch_tokens)
        own, left = max((d.learning for d in planned.devices), key=lambda pair: pair[0] - FILLED * pair[1])
        (prompt, response), size = self.largest_sample, max(group_sizes(self.config).values())
        fills = "fills at most" if own <= FILLED * left else "is the longest sample, and would fill"
        text = f"train.micro_batch_tokens=auto is {self.micro_batch_tokens:,}, which {fills} {own / GIB:.1f}"
        text += f" of the {left / GIB:.1f} GiB that are free while training"
        if (longest := prompt + size * response) > self.micro_batch_tokens:
            text += f"; a group of {size} such samples ({longest:,} tokens) is cut"
        return f"{text}."

    def _cut(self, rows: int, group: int, budget: int) -> list[MicroBatch]:
        rows, shared = max(1, rows), self.config.model.attn_implementation is None
        return _micro_batches(*self.largest_sample, rows, min(rows, group) if shared else 1, budget, shared)

    @cached_property
    def learner(self) -> dict[str, Parts]:
        """Peaks of one rank: in a step, and in the gate of a resumed run, in float32 on a CPU."""
        how = self.how
        step = learner_memory(self.model, how, self.micro_batches(self.row_shares))
        if make_settings(self.config, self.plan.device_type).recompute or how.dropout:
            scored = self._forward_bytes(self.model, how, self.row_shares)
            scoring = {part: step[part] for part in ("weights", "optimizer")} | {"activations": scored}
            step = max(step, scoring, key=lambda parts: sum(parts.values()))
        moments = {TRAIN if self._take_turns else AT_WORK: step}
        if self.config.check.mode != "off":
            how = replace(how, product_bytes=how.weight_bytes) if how.on_cpu else how
            budgets = compared_budgets(self.micro_batch_tokens, sum(self.largest_sample))
            cuts = [self._cut(NUM_COMPARED // self.row_shares, NUM_SAMPLES, budget) for budget in budgets]
            moments[GATE] = gate_memory(self.model, how, *cuts)
        return moments

    @cached_property
    def reference(self) -> tuple[int, int]:
        """Bytes of the reference's own weights (0 where it has none), and of a pass through it (0 without one)."""
        if not has_reference(self.config):
            return 0, 0
        model, weight_bytes = self.teacher or self.model, dtype_bytes(reference_dtype(self.config))
        how = replace(self.how, weight_bytes=weight_bytes, product_bytes=min(weight_bytes, self.how.product_bytes))
        own = model.parameters * weight_bytes if reference_has_own_weights(self.config) else 0
        return own, self._forward_bytes(model, how, 1)

    def _forward_bytes(self, model: Architecture, how: Learning, shares: int) -> int:
        tokens = forward_tokens(self.micro_batch_tokens, self.plan.device_type)
        return forward_bytes(model, how, self.micro_batches(shares, tokens)[0])

    @cached_property
    def engine(self) -> tuple[Parts, str | None]:
        """What one engine holds on each of its devices, and what keeps it from starting there."""
        options, model, device_type = self.config.inference_model, self.model, self.plan.device_type
        rows = engine_rows(self.config, self.plan.engine, device_type, num_engines(self.config, self.plan))
        kind, parallel = ENGINES[self.plan.engine].memory, options.tensor_parallel_size
        if kind == "none" or self.config.engine.url is not None:
            return {}, None
        number_bytes = dtype_bytes(engine_dtype(options.torch_dtype, device_type))
        weights, pool = "engine: weights", "engine: keys and values"
        parts = {weights: model.parameters * number_bytes // parallel}
        if kind == "transformers":
            prompts = -(-rows // min(group_sizes(self.config).values()))
            sizes = {"number_bytes": number_bytes, "prompts": prompts, "rows": rows}
            kept, passing = embedded_engine_bytes(model, self.largest_sample, **sizes)
            return parts | {pool: kept, "engine: one token": passing}, None
        if device_type == "cpu":
            return parts | {pool: VLLM_CPU_POOL}, None
        share = int(options.gpu_memory_utilization * self.machine.memory)
        left = vllm_pool_bytes(model, share, number_bytes=number_bytes, rows=rows, parallel=parallel)
        parts[pool] = max(0, left)
        parts["engine: rest"] = max(0, share - parts[weights] - parts[pool])
        # heads are not split
        needed = kv_bytes_per_token(model, number_bytes) * self.context // min(parallel, model.kv_heads)
        if model.heads % parallel:
            return parts, f"vLLM cannot share {model.heads} attention heads among tensor_parallel_size={parallel}"
        if left < needed:
            return parts, (
                f"vLLM's share of {share / GIB:.1f} GiB leaves {parts[pool] / GIB:.1f} GiB for keys and values, and "
                f"one sequence of {self.context} tokens needs {needed / GIB:.1f} GiB"
            )
        return parts, None


@lru_cache(maxsize=1024)
def _micro_batches(prompt: int, response: int, rows: int, group: int, budget: int, shared: bool) -> list[MicroBatch]:
    sizes = [group] * (rows // group) + ([rows % group] if rows % group else [])
    groups = [PromptGroup(tuple(range(size)), prompt, (response,) * size) for size in sizes]
    batches = fill(groups, token_budget=budget, **({} if shared else {"slots_per_token": 1}))
    whole = sum(piece.tokens for batch in batches for piece in batch)
    micro_batches = []
    for batch in batches:
        tokens, count = sum(piece.tokens for piece in batch), sum(len(piece.rows) for piece in batch)
        scale = max(tokens, min(budget, whole)) / tokens
        whole -= tokens
        slots = count * (prompt + response)
        numbers = tokens if shared else slots, count * response, slots
        micro_batches.append(MicroBatch(*(round(scale * number) for number in numbers)))
    return micro_batches


def dtype_bytes(dtype: str) -> int:
    """Of a number in a dtype as options name it; ``auto`` stands for float32."""
    return 4 if dtype in ("auto", "float32") else 2


@dataclass(frozen=True)
class Disk:
    """What a run writes, in bytes: checkpoints of the trained weights and the optimizer's state, and the model."""

    checkpoint: int
    checkpoints: int  # that are there at once: those that are kept and the one that is being written
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

    >>> model = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> model.parameters, disk_of(Config(), model)
    (1448, Disk(checkpoint=17376, checkpoints=4, export=5792))
    """
    options, train = config.train_model, config.train
    weight_bytes, rank = dtype_bytes(options.torch_dtype), options.lora.r if options.lora.enabled else 0
    how = Learning(weight_bytes=weight_bytes, rank=rank, optimizer=config.optimizer.name)
    trained = how.trained_bytes(model) + how.optimizer_bytes(model)
    steps = train.total_dialog_turns // responses_per_step(config)
    saves = -(-steps // train.checkpoint_frequency) if train.checkpoint_frequency else 1
    return Disk(trained, min(train.keep_checkpoints + 1, saves), weight_bytes * model.parameters * train.export_hf)


def require_disk(config: Config, run_dir: Path) -> None:
    """Refuse a run that the disk will end later, hours after it began.

    Raises:
        UserError: too little is free, with the smallest change that helps.
    """
    model, _ = find_architecture(model_name(config), trust_remote_code=config.model.trust_remote_code)
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    saved = CheckpointStore(run_dir / CHECKPOINTS).num_bytes  # they make room
    free = shutil.disk_usage(there).free + saved
    needed = disk_of(config, model)
    if needed.total <= free:
        return
    counts = range(config.train.keep_checkpoints - 1, 0, -1)
    fewer: list[dict[str, Any]] = [{"train.keep_checkpoints": count} for count in counts]
    least = (fewer[-1] if fewer else {}) | ({"train.export_hf": False} if config.train.export_hf else {})
    adapter = {"train_model.lora.enabled": True}
    has_other = not config.train_model.lora.enabled and OPTIMIZERS[config.optimizer.name].trains_adapters
    fix = "free space there, or choose another hydra.run.dir"
    for options in (*fewer, least, *([adapter, least | adapter] if has_other else [])):
        changed = disk_of(with_options(config, options), model)
        if changed.total <= free:  # the mildest change comes first
            fix = f"use {' '.join(overrides_of(options))} ({changed.total / GIB:.3g} GiB), or {fix}"
            break
    raise UserError(f"The run writes {needed.sentence}; {run_dir} has {free / GIB:.3g} GiB for it; {fix}.")
