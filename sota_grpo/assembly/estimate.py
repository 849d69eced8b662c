"""Estimate the memory of every device and the disk space of a run, from its config and the shape of its model.

It assumes this package's training code: rows packed with each prompt once, attention that saves inputs, output and one
number per token and head, logits computed in chunks, an in-place update. Fragmentation of the heap is not included.

The peak of an optimizer step is the largest of these phases, computed for the first micro-batch, before which no
gradient is allocated, and for the second, before which all are (``G``). ``E`` is the gradient of the output head (bytes
per weight times vocabulary times hidden size). Weights and optimizer state are allocated in every phase::

    head        activations of all layers, chunks of logits, E, the gradient of the hidden states
    decoder     activations of all layers, E if it is new or awaits a tied embedding, the gradients of one MLP
    embedding   G, and a second E if head and embedding are tied: each has a dense gradient then
    step        G, and the memory of the optimizer's step (:mod:`sota_grpo.policy.optimizers`)
"""

from __future__ import annotations

import logging
import math
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, Self

import psutil
import torch

from sota_grpo.assembly import learning
from sota_grpo.assembly.devices import Plan, describe, make_plan, num_engines, reference_has_own_weights
from sota_grpo.assembly.sampling import engine_dtype, engine_rows, kwargs_of_tasks, start_instances, task_of
from sota_grpo.config import Config, has_reference, max_support, model_name, num_steps
from sota_grpo.config.memory_rules import micro_batch_tokens, wants_workers
from sota_grpo.config.mixture import has_agents, has_dialogs, longest_response, task_configs
from sota_grpo.config.spelling import overrides_of, with_options
from sota_grpo.config.validators import validate
from sota_grpo.engines import ENGINES
from sota_grpo.engines.transformers_engine import PREFILL_TOKENS
from sota_grpo.envs import PromptSource
from sota_grpo.envs.gateway import MOST_CONTEXTS
from sota_grpo.errors import UserError
from sota_grpo.functional.log_probs import LOGITS_BYTES, LOGITS_BYTES_ON_CPU, SAVED_SHARE
from sota_grpo.policy.decoder_layer import block_size
from sota_grpo.policy.load import find_architecture, load_tokenizer, resolve_model_path
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.optimizers import OPTIMIZERS, Trained
from sota_grpo.policy.shared_prompt import MOST_PIECES
from sota_grpo.recording.run_files import CHECKPOINTS
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.training.checkpoint import CheckpointStore

logger = logging.getLogger(__name__)

GIB = 2**30
MOST_GPUS = 128
VLLM_CPU_POOL = GIB  # KV cache of vLLM on a CPU, unless VLLM_CPU_KVCACHE_SPACE is set
CUDA_CONTEXT = 600 * 2**20  # per process on a GPU: driver, kernels, cuBLAS workspaces
SAMPLE, SCORE, TRAIN, AT_WORK = "sampling", "reference", "training", "at work"
FILLED = 0.9  # fraction of the memory free for training that train.micro_batch_tokens=auto may fill
_OF_LEARNER = ("weights", "gradients", "optimizer", "activations", "logits", "reference: pass")
ASSUMED_GIB = 80  # memory of a GPU that is not on this machine
ASSUMED_PROMPT = 512  # tokens of the longest prompt if the tokenizer or the data is not on this machine
_MOST_CHANGES = 3  # options that a proposal may change
SUPPORT_BYTES = 76  # per token of the sampling support: index, logit, softmax, entropy (60 if entropy has no gradient)
COMPILED = 0.6  # fraction of eager layers' saved float32 bytes under autocast: five H100 peaks within 6 %
SLOT_BYTES = 150  # per padded slot in the elementwise loss, see sota_grpo.rl.planner.fill
VLLM_PASS_TOKENS = 8192  # most tokens of one vLLM forward pass (max_num_batched_tokens), its default
ByteCounts = dict[str, int]  # bytes by component, e.g. {"weights": 5792}


@dataclass(frozen=True)
class Learning:
    """The training settings on which the memory of a learner or reference depends."""

    weight_bytes: int = 4  # per weight
    product_bytes: int = 4  # per number in matrix products: 2 under autocast to half precision, else weight_bytes
    rank: int = 0  # of a float32 LoRA adapter on every linear layer; 0: all weights are trained
    dropout: bool = False  # on the adapter's inputs
    checkpointing: bool = False  # of activations
    ranks: int = 1  # processes that shard weights, gradients and moments (FSDP2, tensor parallelism)
    parallel: int = 1  # tensor-parallel ranks, which gather no layers; activations are counted unsharded
    shard_gradients: bool = False  # reduce-scatter gradients after each micro-batch; else each rank holds all
    on_cpu: bool = True  # the chunks of logits are small
    repeats_keys: bool = False  # attention saves keys and values per query head (padded rows; CUDA in float32)
    support: int = 0  # most tokens of a sampling support, where sampling is truncated
    saved_bytes: int = 0  # most bytes of logits for the backward: sota_grpo.functional.log_probs.max_saved_bytes
    quantized: bool = False  # the matrices of layers are in 4 bits, under an adapter
    compiled: bool = False  # layers are compiled, on a GPU
    optimizer: str = "adamw"

    @property
    def casts(self) -> bool:
        return self.product_bytes != self.weight_bytes

    @property
    def tile_bytes(self) -> int:
        return LOGITS_BYTES_ON_CPU if self.on_cpu else LOGITS_BYTES

    def base_bytes(self, model: Architecture) -> int:
        """Bytes of the base weights; 4-bit weights include the scales of arXiv:2305.14314, section 3."""
        matrices = model.layers * model.layer_matrices if self.quantized else 0
        packed = matrices // 2 + matrices // 64 + matrices // (64 * 64)
        return (model.parameters - matrices) * self.weight_bytes + packed

    def optimizer_bytes(self, model: Architecture) -> int:
        """Bytes of the optimizer's state between steps, of all ranks together."""
        trained = Trained.of(model, rank=self.rank, weight_bytes=self.weight_bytes)
        return OPTIMIZERS[self.optimizer].state_bytes(trained)

    def trained_bytes(self, model: Architecture) -> int:
        """Bytes of the trainable weights; their gradients take as many."""
        return 4 * model.adapter_parameters(self.rank) if self.rank else self.weight_bytes * model.parameters


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of one micro-batch: packed tokens, sampled tokens, and slots if its rows are padded."""

    tokens: int  # packed, each prompt counted once
    predicted: int  # sampled tokens: those with logits
    slots: int  # rows times the longest row


def _norm_bytes(model: Architecture, how: Learning) -> int:
    """Return the bytes that a norm saves of each token: its input in float32, the inverse root, what it normed."""
    return 4 * model.hidden + 4 + (0 if how.rank else how.weight_bytes * model.hidden)


def _layer_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Return the bytes of activations that one layer saves for its backward pass."""
    hidden, width, inner, c = model.hidden, model.query_width, model.intermediate, how.product_bytes
    per_token = 2 * _norm_bytes(model, how)
    per_token += 2 * c * width + 4 * model.heads  # of attention queries, output and the log-sum of each head
    per_token += 4 * c * inner  # of the MLP gate, silu(gate), up, and their product
    if not how.rank:
        per_token += (5 if how.casts else 2) * c * hidden  # inputs of q, k, v and of gate, up; five where they are cast
    else:
        per_token += len(model.linear_layers) * c * how.rank
        if how.dropout:  # each layer drops for itself: noise (a bit in a byte on CUDA) and input; no product is kept
            per_token += ((4 if how.on_cpu else 1) + c) * (5 * hidden + width + inner) - c * inner
        else:
            per_token += c * (5 * hidden + width) if how.casts or c != 4 else 2 * c * hidden
    if model.qk_norm:
        per_token += (4 + (0 if how.rank else c)) * (width + model.kv_width) + 4 * (model.heads + model.kv_heads)
    return rows.tokens * (per_token + 2 * c * (width if how.repeats_keys else model.kv_width))


def decoder_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Return the bytes that the decoder saves for its backward pass: activations, rotary positions, any cast weights.

    >>> tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> rows = MicroBatch(tokens=10, predicted=6, slots=20)
    >>> decoder_bytes(tiny, Learning(), rows)  # 2 layers of 10 * 4 (48 + 16 + 8 + 64 + 2 + 2), positions 320, norm 680
    12200
    """
    if how.checkpointing:
        layers = model.layers * rows.tokens * how.weight_bytes * model.hidden
    else:
        cast = how.product_bytes * model.layer_matrices if how.casts and not how.quantized else 0
        share = COMPILED if how.compiled and how.casts and not how.rank else 1
        layers = model.layers * (round(share * _layer_bytes(model, how, rows)) + cast)
    return layers + rows.tokens * (2 * how.weight_bytes * model.head_dim + _norm_bytes(model, how))


def head_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Return the bytes that the head saves for backward: a hidden state and a few numbers per sampled token."""
    return rows.predicted * (how.product_bytes * model.hidden + 8 + (0 if how.rank else 20))


def _head_working_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Return the working bytes of the head's backward pass: chunks of logits and weights, hidden states' gradient."""
    wide = 4 * rows.predicted * model.hidden
    if how.support:
        return how.tile_bytes + 2 * wide + rows.predicted * how.support * SUPPORT_BYTES
    if how.rank:
        return how.tile_bytes + 2 * wide
    half = how.product_bytes if how.product_bytes < 4 else 0
    columns = math.isqrt(how.tile_bytes // (8 + half))
    probabilities = rows.predicted * model.vocab * how.product_bytes  # kept for the backward pass where they are few
    saved = probabilities if probabilities <= how.saved_bytes and how.parallel == 1 else 0
    tile = how.tile_bytes + 4 * model.hidden * min(columns, model.vocab) + saved
    return tile + wide + half * rows.predicted * model.hidden


def learner_memory(model: Architecture, how: Learning, micro_batches: Sequence[MicroBatch]) -> ByteCounts:
    """Return the peak bytes of an optimizer step on one rank, by component; ``micro_batches`` has the largest first.

    >>> tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)  # of 1448 parameters
    >>> parts = learner_memory(tiny, Learning(), [MicroBatch(tokens=10, predicted=6, slots=20)])
    >>> parts | {"logits": parts["logits"] - 8 * 2**20}  # the tiles decide: the head's moment, 12200 + 20 * 150 + 360
    {'weights': 5792, 'gradients': 1024, 'optimizer': 11584, 'activations': 15560, 'logits': 1216}
    """
    whole, optimizer = how.trained_bytes(model), how.optimizer_bytes(model)
    weights = how.base_bytes(model) + (whole if how.rank else 0)
    if how.ranks > 1:  # each gathers embedding, head and two layers
        replicated = (model.embedding_parameters + 2 * model.layer_parameters) * how.weight_bytes // how.parallel
        passing = 0 if how.rank else replicated - model.layer_parameters * how.weight_bytes // how.parallel
        weights, optimizer = -(-weights // how.ranks) + replicated, -(-optimizer // how.ranks)
        whole = -(-whole // how.ranks) + passing if how.shard_gradients else -(-whole // how.parallel)
    c, w, moments = how.product_bytes, how.weight_bytes, []
    head = 0 if how.rank else w * model.head_weights
    joined = how.compiled and how.casts and how.ranks == 1 and not (how.rank or how.quantized or how.on_cpu)
    # in half precision, to the last micro-batch
    copies, head_copy = (c * model.layers * model.layer_matrices, c * model.head_weights) if joined else (0, 0)
    for accumulated, rows in zip((0, whole), micro_batches):
        saved = decoder_bytes(model, how, rows) + rows.slots * SLOT_BYTES + head_copy
        saved += copies if how.checkpointing else 0
        of_head = head_bytes(model, how, rows)
        one_layer = rows.tokens * 2 * (c * model.intermediate + w * model.hidden)  # what its MLP works with
        if how.quantized:  # the largest matrix as it is computed with, and its copy in half precision
            one_layer += model.hidden * max(model.intermediate, model.query_width) * (w + (c if how.casts else 0))
        if not how.on_cpu:  # sums of the gradients of prompts' keys and values: sota_grpo.policy.shared_prompt
            one_layer += MOST_PIECES * 2 * 4 * model.kv_width * max(0, rows.tokens - rows.predicted)
        if joined and not how.checkpointing:  # gradients of the copies of a block, until they are added
            one_layer += block_size(model.layers) * c * model.layer_matrices
        cast = c * model.layer_matrices if how.checkpointing and how.casts and not (how.quantized or joined) else 0
        if how.checkpointing:
            one_layer += _layer_bytes(model, how, rows) + cast
        moments.append((accumulated + head, saved + of_head, _head_working_bytes(model, how, rows)))
        waiting = head if model.tied or not accumulated else 0
        moments.append((accumulated + waiting, saved - rows.tokens * _norm_bytes(model, how) + one_layer, 0))
        if cast and not how.rank and how.ranks == 1:
            # autocast keeps what it cast until the forward pass ends; with several ranks it keeps nothing
            moments.append((accumulated, saved + of_head + model.layers * cast, how.tile_bytes))
    made_anew = head * (int(model.tied) + int(len(micro_batches) > 1))
    moments.append((whole + made_anew, copies + head_copy, 0))
    trained = Trained.of(model, rank=how.rank, weight_bytes=how.weight_bytes)
    moments.append((whole, 0, OPTIMIZERS[how.optimizer].step_bytes(trained, how.on_cpu)))
    gradients, activations, logits = max(moments, key=sum)
    sizes = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
    return sizes | {"activations": activations, "logits": logits}


def forward_bytes(model: Architecture, how: Learning, rows: MicroBatch) -> int:
    """Return the bytes of a forward pass without gradients, besides weights: one MLP, any cast matrix, head, loss."""
    c, w = how.product_bytes, how.weight_bytes
    layer = rows.tokens * 3 * (c * model.intermediate + w * model.hidden)
    cast = c * model.hidden * max(model.intermediate, model.query_width) if how.casts else 0
    hidden = rows.predicted * (model.hidden * (w + (c if how.casts else 0)) + how.support * SUPPORT_BYTES)
    return layer + cast + hidden + rows.slots * SLOT_BYTES + how.tile_bytes


def kv_bytes_per_token(model: Architecture, number_bytes: int) -> int:
    """Return the KV cache bytes of one token over all layers; ``number_bytes``: bytes of one number in the cache."""
    return 2 * model.layers * model.kv_width * number_bytes


def vllm_pool_bytes(model: Architecture, share: int, *, number_bytes: int, rows: int, parallel: int = 1) -> int:
    """Return the bytes of ``share`` left for vLLM's KV cache on each of ``parallel`` devices; negative: too small.

    Subtracted are weights of ``number_bytes`` each, a pass of 8192 tokens and two float32 copies of all rows' logits.
    """
    passing = VLLM_PASS_TOKENS * 3 * (model.intermediate + model.hidden)
    return share - (model.parameters + passing) * number_bytes // parallel - rows * model.vocab * 8


@dataclass(frozen=True)
class Machine:
    """The devices and memory that the run has."""

    device_type: str  # cuda or cpu
    memory: int  # bytes of each GPU, or of the whole machine
    process_bytes: int = CUDA_CONTEXT  # of each process on the device before it allocates a tensor
    count: int | None = None  # number of GPUs; None: as many as the config needs
    is_here: bool = True


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes allocated on a device by phase: sampling, reference, training, or ``at work`` if all run at once."""

    name: str  # cuda:0, or CPU for the whole machine
    roles: tuple[str, ...]
    moments: Mapping[str, ByteCounts]
    capacity: int
    problem: str | None = None  # sentence: why an engine cannot start on the device

    @property
    def peak(self) -> int:
        """Bytes in the phase that needs most."""
        return max(sum(sizes.values()) for sizes in self.moments.values())

    @property
    def fits(self) -> bool:
        return self.problem is None and self.peak <= self.capacity

    @property
    def learning(self) -> tuple[int, int]:
        """Bytes of learner and reference pass, and those that others leave them, in the tightest phase but sampling."""
        moments = [entries for moment, entries in self.moments.items() if moment != SAMPLE]
        sizes = [(sum(entries.get(name, 0) for name in _OF_LEARNER), sum(entries.values())) for entries in moments]
        left = [(learner, self.capacity - (whole - learner)) for learner, whole in sizes if learner]
        return max(left, key=lambda pair: pair[0] - FILLED * pair[1], default=(0, self.capacity))


@dataclass(frozen=True)
class Estimate:
    """The memory that a run needs on each of its devices and, if it does not fit, options with which it does."""

    config: Config
    model: Architecture  # of the policy
    prompt_tokens: int  # of the longest prompt
    machine: Machine
    sources: Mapping[str, str] = field(default_factory=dict)  # of "model", "prompt" and "machine": in words
    num_problems: int | None = None  # of the training split; None if the data is not on this machine
    teacher: Architecture | None = None  # of the reference; None: the policy's
    change: dict[str, Any] | None = None  # options with which the run fits; None: it fits, or no change helps
    other_change: dict[str, Any] | None = None  # options that train all weights, if change uses LoRA

    def with_options(self, options: dict[str, Any]) -> Self:
        """Return the run with ``options``, {dotted name: value}; a change of micro-batches alone keeps the plan."""
        other = replace(self, config=with_options(self.config, options))
        if options.keys() == {"train.micro_batch_tokens"}:
            vars(other)["plan"] = self.plan
        return other

    @cached_property
    def plan(self) -> Plan:
        """The devices and processes of the run; UserError if a request cannot be met.

        On another machine ``engine=auto`` is vLLM, and ``machine.count=None`` the fewest GPUs that suffice.
        """
        config, machine = self.config, self.machine
        if machine.is_here:
            return make_plan(config, machine.device_type, machine.count or 0)
        engine = "vllm" if config.engine.name == "auto" else config.engine.name
        for count in range(2 if wants_workers(config) else 1, MOST_GPUS) if machine.count is None else ():
            with suppress(UserError):
                return make_plan(config, "cuda", count, engine)
        return make_plan(config, "cuda", machine.count or MOST_GPUS, engine)

    @cached_property
    def devices(self) -> list[DeviceMemory]:
        """The memory that the run needs on each device; on a CPU one entry for all roles."""
        roles = self.plan.placement.train, self.plan.placement.inference, self.plan.placement.ref
        if self.plan.device_type == "cpu":
            return [self._device("CPU", *map(len, roles))]
        indices = sorted({index for role in roles for index in role})
        return [self._device(f"cuda:{index}", *(int(index in role) for role in roles)) for index in indices]

    @property
    def fits(self) -> bool:
        return all(device.fits for device in self.devices)

    def _device(self, name: str, ranks: int, engines: int, references: int) -> DeviceMemory:
        """Return the memory of a device that hosts this many learner ranks, engines and references."""
        # in one process, and on GPUs that they share, where an engine sleeps while the learner trains
        take_turns = not self.plan.workers or (self.plan.shared and self.plan.device_type != "cpu")
        plan, on_cpu, kind = self.plan, self.plan.device_type == "cpu", ENGINES[self.plan.engine].memory
        reference, passing = self.reference
        engine, problem = self.engine if engines else ({}, None)
        learner = self.learner if ranks else {}
        # vLLM's share of a GPU has its own context, which does not sleep
        contexts = 0 if kind == "vllm" and not (plan.shared or on_cpu) else engines
        processes = ranks + references + contexts if plan.workers else 1
        base = {"libraries" if on_cpu else "context": processes * self.machine.process_bytes}
        base |= {"reference: weights": reference * references} if references else {}
        if plan.workers and references:  # a process of its own keeps what a pass took
            base |= {"reference: pass": passing * references}
        if not take_turns:
            base |= {entry: engines * size for entry, size in engine.items()}
            moments = {AT_WORK: base | {entry: ranks * size for entry, size in learner.items()}}
        else:
            asleep = {} if plan.placement.colocated else engine
            if on_cpu:  # nothing sleeps, and the embedded engine keeps its weights alone
                asleep = {entry: size for entry, size in engine.items() if kind == "vllm" or entry == "engine: weights"}
            resting = {entry: learner[entry] for entry in ("weights", "optimizer") if learner}
            moments = {SAMPLE: base | resting | engine} if engines else {}
            if passing and (references or (ranks and not reference)):
                moments[SCORE] = base | resting | asleep | {"reference: pass": passing}
            moments |= {TRAIN: base | learner | asleep} if learner else {}
        present = {"learner": ranks, "engine": engines, "reference": references or (on_cpu and passing)}
        roles = tuple(role for role, count in present.items() if count)
        return DeviceMemory(name, roles, moments, self.machine.memory, problem)

    @cached_property
    def how(self) -> Learning:
        model, device_type = self.config.train_model, self.plan.device_type
        weight_bytes, on_cpu = dtype_bytes(model.torch_dtype), device_type == "cpu"
        product_bytes = weight_bytes if learning.trainer_precision(self.config, device_type) == "fp32" else 2
        return Learning(
            weight_bytes=weight_bytes,
            product_bytes=product_bytes,
            rank=model.lora.r if model.lora.enabled else 0,
            dropout=model.lora.dropout > 0,
            checkpointing=model.gradient_checkpointing,
            ranks=(model.fsdp_size or 0) * model.tensor_parallel_size or len(self.plan.placement.train),
            parallel=model.tensor_parallel_size,
            shard_gradients=model.shard_gradients,
            quantized=self.config.model.quantization is not None,
            compiled=not on_cpu and learning.wants_fused_layers(self.config, device_type),
            optimizer=self.config.optimizer.name,
            on_cpu=on_cpu,
            repeats_keys=self.config.model.attn_implementation is not None or not (on_cpu or product_bytes == 2),
            support=min(max_support(self.config), self.model.vocab),
            saved_bytes=0 if on_cpu else self.machine.memory // SAVED_SHARE,
        )

    @property
    def row_shares(self) -> int:
        """Number of data-parallel ranks (tensor-parallel groups count once), among which a step's rows are divided."""
        return max(1, len(self.plan.placement.train) // self.config.train_model.tensor_parallel_size)

    @property
    def context(self) -> int:
        """Most tokens of prompt plus response: the smaller of the config's and the model's limit."""
        return min(self.config.inference_model.max_model_len or self.model.context, self.model.context)

    @property
    def largest_sample(self) -> tuple[int, int]:
        """Return (tokens of the longest prompt, most tokens that a response to it can have)."""
        prompt = min(self.prompt_tokens, self.context - 1)
        most = self.context * (MOST_CONTEXTS if has_agents(self.config) else 1)  # an agent's requests fork
        return prompt, min(longest_response(self.config), most - prompt)

    def micro_batches(self, shares: int, budget: int | None = None) -> list[MicroBatch]:
        """Return the micro-batches of an optimizer step on one of ``shares`` data-parallel ranks, the largest first.

        All samples have the largest size; a micro-batch has up to ``budget`` tokens (None: the run's) or one sample.
        """
        (prompt, response), repeats = self.largest_sample, self.config.env.repeats
        rows = max(1, self.config.train.optim_batch_size // shares)
        shared, longest = self.config.model.attn_implementation is None, prompt + response
        budget = max(longest, self.micro_batch_tokens if budget is None else budget)
        together = min(rows, repeats, max(1, (budget - prompt) // response)) if shared else 1
        piece = prompt + together * response
        size, left = budget // piece * piece, -(-rows // together) * piece
        batches: list[MicroBatch] = []
        while left > 0:
            tokens = min(budget, left)
            left -= size
            of_piece = (together * response, together * longest)
            batches.append(MicroBatch(tokens, *(tokens * number // piece for number in of_piece)))
        return batches

    @cached_property
    def micro_batch_tokens(self) -> int:
        """Tokens per micro-batch: ``train.micro_batch_tokens``; for ``auto`` the most that fit, on a CPU 16384.

        That is at most ``MOST_TOKENS``, a rank's share of a step and :data:`FILLED` of memory; at least one sample.
        """
        if isinstance(self.config.train.micro_batch_tokens, int) or self.plan.device_type == "cpu":
            return micro_batch_tokens(self.config)

        def leaves_room(tokens: int) -> bool:
            devices = self.with_options({"train.micro_batch_tokens": tokens}).devices
            return all(learner <= FILLED * left for learner, left in (device.learning for device in devices))

        least = sum(self.largest_sample)
        most = max(
            least, min(learning.MOST_TOKENS, sum(batch.tokens for batch in self.micro_batches(self.row_shares, 2**62)))
        )
        if leaves_room(most) or not leaves_room(least):
            return most if leaves_room(most) else least
        sizes = range(least, most, max(1, min(least, (most - least) // 256)))
        return sizes[bisect_left(sizes, True, key=lambda tokens: not leaves_room(tokens)) - 1]

    @cached_property
    def learner(self) -> ByteCounts:
        """Peak bytes of one learner rank in a training step, by component."""
        step = learner_memory(self.model, self.how, self.micro_batches(self.row_shares))
        if learning.make_settings(self.config, self.plan.device_type).recompute or self.how.dropout:
            scored = self._forward_bytes(self.model, self.how, self.row_shares)
            scoring = {name: step[name] for name in ("weights", "optimizer")} | {"activations": scored}
            step = max(step, scoring, key=lambda sizes: sum(sizes.values()))
        return step

    @cached_property
    def reference(self) -> tuple[int, int]:
        """Return (bytes of the reference's weights, 0 if they are the policy's; bytes of its forward pass)."""
        if not has_reference(self.config):
            return 0, 0
        model, weight_bytes = self.teacher or self.model, dtype_bytes(learning.reference_dtype(self.config))
        how = replace(self.how, weight_bytes=weight_bytes, product_bytes=min(weight_bytes, self.how.product_bytes))
        weights = model.parameters * weight_bytes if reference_has_own_weights(self.config) else 0
        return weights, self._forward_bytes(model, how, 1)

    def _forward_bytes(self, model: Architecture, how: Learning, shares: int) -> int:
        tokens = learning.forward_tokens(self.micro_batch_tokens, self.plan.device_type)
        return forward_bytes(model, how, self.micro_batches(shares, tokens)[0])

    @cached_property
    def engine(self) -> tuple[ByteCounts, str | None]:
        """Return (bytes of one engine on each of its devices, by component; why it cannot start, or None)."""
        options, model, device_type = self.config.inference_model, self.model, self.plan.device_type
        rows = engine_rows(self.config, self.plan.engine, device_type, num_engines(self.config, self.plan))
        kind, parallel = ENGINES[self.plan.engine].memory, options.tensor_parallel_size
        if kind == "none" or self.config.engine.url is not None:
            return {}, None
        number_bytes = dtype_bytes(engine_dtype(options.torch_dtype, device_type))
        weights, pool = "engine: weights", "engine: keys and values"
        sizes = {weights: model.parameters * number_bytes // parallel}
        if kind == "transformers":
            # each prompt is there once, a row's own keys and values grow by half, at least by 64
            (prompt, response), groups = self.largest_sample, -(-rows // self.config.env.repeats)
            response = min(max(response, self.config.eval.max_tokens or 0), self.context - prompt)
            tokens = groups * prompt + rows * (response + max(64, response // 2))
            token = rows * (model.vocab * (number_bytes + 8) + 16 * response)  # logits, twice in float32, too
            passing = max(token, PREFILL_TOKENS * 3 * number_bytes * (model.intermediate + model.hidden))
            return sizes | {pool: kv_bytes_per_token(model, number_bytes) * tokens, "engine: pass": passing}, None
        if device_type == "cpu":
            return sizes | {pool: VLLM_CPU_POOL}, None
        share = int(options.gpu_memory_utilization * self.machine.memory)
        left = vllm_pool_bytes(model, share, number_bytes=number_bytes, rows=rows, parallel=parallel)
        sizes[pool] = max(0, left)
        sizes["engine: rest"] = max(0, share - sizes[weights] - sizes[pool])
        # heads are not split
        needed = kv_bytes_per_token(model, number_bytes) * self.context // min(parallel, model.kv_heads)
        if model.heads % parallel:
            return sizes, f"vLLM cannot divide {model.heads} attention heads by tensor_parallel_size={parallel}"
        if left < needed:
            return sizes, (
                f"the {share / GIB:.1f} GiB for vLLM leave {sizes[pool] / GIB:.1f} GiB for its KV cache, and "
                f"one sequence of {self.context} tokens needs {needed / GIB:.1f} GiB"
            )
        return sizes, None

    @property
    def refusal(self) -> str | None:
        """The error message: why the run does not fit, and which options to change; None if it fits."""
        worst = max(self.devices, key=lambda device: (device.problem is not None, device.peak))
        reason = worst.problem or f"it needs {worst.peak / GIB:.1f} GiB and has {worst.capacity / GIB:.1f} GiB"
        fix = "no change of memory options is enough; use a smaller model or devices with more memory"
        if self.change is not None:
            peak = max(device.peak for device in self.with_options(self.change).devices)
            fix = f"use {' '.join(overrides_of(self.change))} ({peak / GIB:.1f} GiB)"
        if self.other_change is not None:
            fix += f", or, to train all weights, {' '.join(overrides_of(self.other_change))}"
        return None if self.fits else f"The run does not fit on {worst.name}: {reason}; {fix}."

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate as JSON-serializable values, sizes in bytes."""
        (prompt, response), plan, disk = self.largest_sample, self.plan, disk_of(self.config, self.model)
        return {
            "fits": self.fits,
            "refusal": self.refusal,
            "change": self.change,
            "model": {"name": model_name(self.config), "parameters": self.model.parameters},
            "places": self.sources,
            "placement": describe(plan.placement, plan.device_type),
            "engine": plan.engine,
            "largest_sample": {"prompt_tokens": prompt, "response_tokens": response},
            "problems": self.num_problems,
            "responses_per_step": self.config.train.dialog_turns_per_batch,
            "steps": num_steps(self.config),
            "optimizer_steps": learning.make_settings(self.config, plan.device_type).total_steps,
            "micro_batch_tokens": self.micro_batch_tokens,
            "micro_batches_per_step": len(self.micro_batches(self.row_shares)),
            "disk": asdict(disk) | {"total": disk.total},
            "devices": [asdict(device) | {"peak": device.peak} for device in self.devices],
        }


def estimate(
    config: Config, *, memory_gib: float | None = None, gpus: int | None = None, prompt_tokens: int | None = None
) -> Estimate:
    """Estimate the memory and disk space of a run; if it does not fit, find options with which it does.

    Args:
        config: a validated config; UserError if its devices, model or data cannot be used.
        memory_gib: GiB of each GPU, or of a machine without GPUs; None: this machine's, or 80 for GPUs elsewhere.
        gpus: number of GPUs; None: this machine's, or elsewhere as many as the config needs.
        prompt_tokens: tokens of the longest prompt; None: measured (which starts the run's tools and environments), or
            assumed if data or tokenizer is not on this machine.
    """
    (model, model_source), teacher = _architectures(config)
    machine, machine_source = _machine(config, memory_gib, gpus)
    context = Estimate(config, model, prompt_tokens or 0, machine).context
    longest, prompt_source, problems = _prompts(config, prompt_tokens, context)
    sources = {"model": model_source, "prompt": prompt_source, "machine": machine_source}
    run = Estimate(config, model, longest, machine, sources, problems, teacher)
    change = None if run.fits else _smallest_change(run)
    trains_less = change is not None and "train_model.lora.enabled" in change
    return replace(run, change=change, other_change=_smallest_change(run, with_lora=False) if trains_less else None)


def _architectures(config: Config) -> tuple[tuple[Architecture, str], Architecture | None]:
    """Return ((architecture of the policy, its source), that of a reference which is another model, else None)."""
    find = partial(find_architecture, trust_remote_code=config.model.trust_remote_code)
    return find(model_name(config)), find(config.ref_model.name)[0] if config.ref_model.name is not None else None


def _machine(config: Config, memory_gib: float | None = None, gpus: int | None = None) -> tuple[Machine, str]:
    """Return (machine of the run, its source); a model that is not on this machine is assumed to need GPUs."""
    memory, nearby = None if memory_gib is None else int(memory_gib * GIB), config.ray.address is None
    has_gpu = nearby and torch.cuda.is_available()
    is_local = nearby and Path(resolve_model_path(model_name(config))).is_dir()
    if config.device == "cpu" or (config.device == "auto" and is_local and not has_gpu):
        libraries = psutil.Process().memory_info().rss  # this process has those of a run loaded and nothing else
        return Machine("cpu", memory or machine_bytes(), libraries), "the CPU of this machine"
    if has_gpu:
        gpu, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        machine = Machine("cuda", memory or gpu.total_memory, count=gpus or count)
        return machine, f"{machine.count} x {gpu.name}, of {count} on this machine"
    size, source = memory_gib or ASSUMED_GIB, "as --memory-gb says" if memory_gib else "assumed; set --memory-gb"
    machine = Machine("cuda", int(size * GIB), count=gpus, is_here=False)
    return machine, f"GPUs of {size:g} GiB, none of them on this machine, {source}"


def with_micro_batches(config: Config, plan: Plan, prompt_tokens: int) -> Config:
    """Return a copy of ``config`` with a number for ``micro_batch_tokens=auto``: what local GPUs hold, else 16384."""
    tokens = micro_batch_tokens(config)
    if config.train.micro_batch_tokens == "auto" and plan.device_type == "cuda":
        machine, _ = _machine(config)
        sentence = f"train.micro_batch_tokens=auto is {tokens:,}: the learner's GPUs are not on this machine, so their "
        sentence += "memory is not known; sota-grpo estimate --memory-gb=GIB shows how many tokens fit."
        if machine.is_here:
            (model, _), teacher = _architectures(config)
            run = Estimate(config, model, prompt_tokens, machine, teacher=teacher)
            vars(run)["plan"] = plan
            tokens = run.micro_batch_tokens
            of_devices = (device.learning for device in run.devices)
            learner, left = max(of_devices, key=lambda pair: pair[0] - FILLED * pair[1])
            fills = f"which fills {learner / GIB:.1f} of the {left / GIB:.1f} GiB that are free while training"
            sentence = f"train.micro_batch_tokens=auto is {tokens:,}, {fills}."
        logger.info(sentence)
    return with_options(config, {"train.micro_batch_tokens": tokens})


def machine_bytes() -> int:
    """Return the bytes of memory of this machine, or of its container if that has a lower limit."""
    limits = [psutil.virtual_memory().total]
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such limit
            limits.append(int(Path(name).read_text()))
    return min(limits)


def _prompts(config: Config, prompt_tokens: int | None, context: int) -> tuple[int, str, int | None]:
    """Return (tokens of the longest prompt, their source in words, number of training problems or None)."""
    task, tokenizer, name = None, None, model_name(config)
    try:
        task = task_of(config)
    except DatasetError:
        if any(each.env.dataset_path or each.env.eval_path for each in task_configs(config).values()):
            raise
    count = None if task is None else len(task.train)
    if prompt_tokens is not None:
        if prompt_tokens >= context:
            text = f"--prompt-tokens {prompt_tokens} leaves no room for a response in a context of {context}"
            raise UserError(f"{text}; lower it.")
        return prompt_tokens, "as --prompt-tokens says", count
    try:
        tokenizer = load_tokenizer(name, trust_remote_code=config.model.trust_remote_code)
    except UserError:
        if Path(resolve_model_path(name)).is_dir():
            raise
    if task is None or tokenizer is None:
        guess = min(ASSUMED_PROMPT, max(context - longest_response(config), context // 2))
        missing = "data" if task is None else "tokenizer"
        return guess, f"assumed, as the {missing} is not on this machine; set --prompt-tokens", count
    instances, lacks = {}, ""
    with ExitStack() as opened:  # the prompts say which tools there are, and what they are for
        try:
            instances = start_instances(config, opened)
        except UserError as error:  # a server that is not up yet, or runs where training will
            lacks = f", without their tools: {error}"
        kwargs = kwargs_of_tasks(config, instances)
    env = PromptSource(task, tokenizer, multi_turn=has_dialogs(config), max_prompt_tokens=context - 1, **kwargs)
    longest = env.check_prompts(skip=config.env.skip_unreadable)
    return longest, f"the longest of {len(task.train) + len(task.heldout):,} prompts{lacks}", count


def _smallest_change(run: Estimate, *, with_lora: bool = True) -> dict[str, Any] | None:
    """Return the cheapest change of options with which the run fits on every device; None if there is none."""
    levers = [lever for lever in _levers(run, with_lora) if lever[1]]
    sets = [chosen for count in range(1, _MOST_CHANGES + 1) for chosen in combinations(levers, count)]
    for chosen in sorted(sets, key=lambda chosen: sum(price for price, _ in chosen)):
        moves = product(*(enumerate(settings) for _, settings in chosen))
        for move in sorted(moves, key=lambda move: sum(index for index, _ in move)):  # that move least in all first
            options = {name: value for _, setting in move for name, value in setting.items()}
            with suppress(UserError):  # it breaks a rule, or its devices cannot be shared out
                if (changed := run.with_options(options)).fits:
                    validate(changed.config)
                    return options
    return None


def _levers(run: Estimate, with_lora: bool) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield (price, settings, mildest first) per memory option; slower training is cheapest, more devices dearest."""
    train, inference = run.config.train_model, run.config.inference_model
    kind = OPTIMIZERS[run.config.optimizer.name]
    longest, sizes = sum(run.largest_sample), [run.micro_batch_tokens]
    while sizes[-1] > longest:  # halved down to one that holds the longest sample: below that nothing changes
        sizes.append(sizes[-1] // 2)
    yield 1, [{"train.micro_batch_tokens": size} for size in sizes[1:]]
    yield 2, [] if train.gradient_checkpointing else [{"train_model.gradient_checkpointing": True}]
    if run.machine.device_type == "cuda":
        now = inference.gpu_memory_utilization
        shares = [share for share in (round(0.05 * step, 2) for step in range(2, 19)) if share != now]
        shares.sort(key=lambda share: (abs(share - now), share))
        yield 2, [{"inference_model.gpu_memory_utilization": share} for share in shares]
        tight = -(-longest // 256) * 256  # a context that holds the largest sample and little more
        yield 3, [{"inference_model.max_model_len": tight}] if tight < run.context else []
        divides = kind.over_ranks and run.config.model.quantization is None
        yield 16, [{"train_model.num_devices": n} for n in (2, 4, 8) if divides and n > (train.num_devices or 1)]
        yield 16, [{"inference_model.num_devices": 1}] if inference.num_devices is None else []
        yield 18, [{"inference_model.tensor_parallel_size": n, "inference_model.num_devices": n} for n in (2, 4, 8)]
        yield 3, [] if train.shard_gradients else [{"train_model.shard_gradients": True}]
    # for frozen weights: trained ones should not be in half precision
    halves = [{"train_model.torch_dtype": "bfloat16"}] if train.torch_dtype in ("auto", "float32") else []
    if train.lora.enabled:
        yield 4, halves
    elif with_lora and kind.trains_adapters:
        adapter = {"train_model.lora.enabled": True}
        yield 8, [adapter, *(adapter | half for half in halves)]


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one number of a dtype option: 4 for ``auto`` and ``float32``, else 2."""
    return 4 if dtype in ("auto", "float32") else 2


@dataclass(frozen=True)
class Disk:
    """The bytes that a run writes: checkpoints (trained weights and optimizer state) and the exported model."""

    checkpoint: int
    checkpoints: int  # most that exist at once: those kept, and one being written
    export: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.export

    @property
    def sentence(self) -> str:
        several = f"{self.checkpoints} checkpoint{'s' * (self.checkpoints > 1)} of {self.checkpoint / GIB:.3g} GiB"
        return f"{self.total / GIB:.3g} GiB: {several}, and {self.export / GIB:.3g} GiB of the trained model"


def disk_of(config: Config, model: Architecture) -> Disk:
    """Return the bytes that a run of ``config`` writes, without logs and stored steps.

    >>> model = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    >>> model.parameters, disk_of(Config(), model)
    (1448, Disk(checkpoint=17376, checkpoints=4, export=5792))
    """
    options, train = config.train_model, config.train
    weight_bytes, rank = dtype_bytes(options.torch_dtype), options.lora.r if options.lora.enabled else 0
    how = Learning(weight_bytes=weight_bytes, rank=rank, optimizer=config.optimizer.name)
    trained = how.trained_bytes(model) + how.optimizer_bytes(model)
    steps = num_steps(config)
    saves = -(-steps // train.checkpoint_frequency) if train.checkpoint_frequency else 1
    kept = min(train.keep_checkpoints + 1, saves) if train.keep_best is None else train.keep_checkpoints + 2
    return Disk(trained, kept, weight_bytes * model.parameters * train.export_hf)


def require_disk(config: Config, run_dir: Path) -> None:
    """Raise UserError if the disk of ``run_dir`` has too little space for the run, old checkpoints counted as free."""
    model, _ = find_architecture(model_name(config), trust_remote_code=config.model.trust_remote_code)
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    saved = CheckpointStore(run_dir / CHECKPOINTS).num_bytes  # they make room
    free, needed = shutil.disk_usage(there).free + saved, disk_of(config, model)
    if needed.total > free:
        raise UserError(
            f"The run writes {needed.sentence}; {run_dir} has {free / GIB:.3g} GiB for it; free space there, choose "
            "another hydra.run.dir, or use train.keep_checkpoints=1 or train.export_hf=false."
        )
