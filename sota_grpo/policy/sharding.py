"""Sharding of a policy over processes (FSDP2): each rank keeps a shard of parameters, gradients and optimizer moments.

Ranks form a mesh of up to three dimensions, in row-major order. Eight ranks as 2 x 2 x 2::

    replicate   copies of the weights, whose gradients are summed (hybrid sharding); size / fsdp_size / tensor_parallel
    shard       ranks that shard one copy, and gather it layer by layer; fsdp_size
    tensor      ranks that compute the same rows and shard every matrix; tensor_parallel

Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) follows the model's plan in transformers
(``base_model_tp_plan``); FSDP2 then shards each rank's matrices over the ranks that compute other rows::

    q k v, gate up     by outputs ("colwise"): each rank has some of the heads and some of the MLP's width
    o, down            by inputs ("rowwise"): each rank has a partial sum, which is added over the ranks
    embedding, head    by token ids: each rank has some of the rows; log-probs are combined
                       (:class:`sota_grpo.functional.log_probs.VocabShard`)
    norms              whole on every rank

The same code runs on one rank: :class:`Ranks` of size 1 calls no collective.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedConfig, PreTrainedModel

from sota_grpo.errors import UserError
from sota_grpo.policy.causal import base_model, decoder_layers, fuse_layers, kernel_difference, takes_packed_rows
from sota_grpo.policy.shared_prompt import SHARED_ATTENTION
from sota_grpo.policy.tensor_files import StoredTensor, in_memory

if TYPE_CHECKING:
    from sota_grpo.policy.causal import CausalPolicy


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, sharing memory; a tensor that is not sharded is returned as is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(tensor: torch.Tensor) -> torch.Tensor | None:
    """Gather a sharded tensor to rank 0's CPU; None on other ranks; collective. Return any other tensor as is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if tensor.device_mesh.get_rank() == 0 else None


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on every rank; collective. Return any other tensor as is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_first_holder(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Return whether this rank is the first that holds its shard of a tensor; rank 0 is, if there are no shards."""
    if not isinstance(tensor, DTensor):
        return ranks.leads
    coordinate: Any = tensor.device_mesh.get_coordinate()
    return not any(index for index, how in zip(coordinate, tensor.placements) if how.is_replicate())


def local_shard(tensor: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return a view of the shard that this rank must save and its offset per dimension; None if it saves nothing."""
    if not is_first_holder(tensor, ranks):
        return None
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    local = tensor.to_local()
    return (local, _bounds(tensor)[1]) if local.numel() else None


def _bounds(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's shard and its offset in the whole tensor."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def divided(whole: torch.Tensor | StoredTensor, like: torch.Tensor) -> torch.Tensor:
    """Shard ``whole``, which every rank has or can read, as ``like`` is sharded: the inverse of :func:`gather`.

    Not collective. Of a stored tensor, each rank reads only its shard. The shard is a copy; if ``like`` is not sharded,
    a ``whole`` in memory is returned itself. ValueError if a sharded ``like`` has another shape.
    """
    if not isinstance(like, DTensor):
        return in_memory(whole)
    if whole.shape != like.shape:
        raise ValueError(f"the tensor has shape {tuple(whole.shape)}, and {tuple(like.shape)} is needed")
    cut = tuple(slice(start, start + size) for size, start in zip(*_bounds(like)))
    contiguous = torch.contiguous_format
    shard = whole.block(cut) if isinstance(whole, StoredTensor) else whole[cut].clone(memory_format=contiguous)
    layout = like.device_mesh, like.placements
    return DTensor.from_local(shard.to(like.device), *layout, run_check=False, shape=like.shape, stride=like.stride())


def optimizer_state(
    optimizer: torch.optim.Optimizer, whole: Callable[[torch.Tensor], torch.Tensor | None] = gather
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with ``whole(tensor)`` for each state tensor; collective if ``whole`` is."""
    state = optimizer.state_dict()
    entries = {
        index: {name: whole(value) if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return state | {"state": entries}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a result of :func:`optimizer_state` on any number of ranks; the optimizer may share memory with it.

    ValueError if the result is of other parameter groups.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def local(value: Any, parameter: torch.Tensor) -> Any:
        if isinstance(value, Mapping):  # quantised by bitsandbytes: nested, and never sharded
            return {name: in_memory(part) if isinstance(part, StoredTensor) else part for name, part in value.items()}
        if not isinstance(value, (torch.Tensor, StoredTensor)):
            return value
        # moments have the shape of their parameter; the step count is a scalar on every rank
        return divided(value, parameter) if value.shape == parameter.shape else in_memory(value).clone()

    entries = {
        index: {name: local(value, parameters[index]) for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Ranks:
    """Process layout of one policy's training (ranks, sharding), and this process's rank in it."""

    rank: int = 0  # of this process
    size: int = 1  # number of ranks
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # device of this rank
    #: True: sum the gradients over the ranks once per optimizer step, after its last micro-batch; every rank then holds
    #: the gradient of the whole model (4 bytes per float32 parameter). False: sum after every micro-batch, which needs
    #: more communication, and each rank holds only its shard.
    reduce_once: bool = True
    tensor_parallel: int = 1  # ranks that compute the same rows and shard every matrix
    fsdp_size: int | None = None  # ranks that shard one copy of the weights; None: size / tensor_parallel
    timeout_s: float = 1800.0  # timeout of every collective

    @property
    def num_shares(self) -> int:
        """Number of data-parallel shares into which rows are split."""
        return self.size // self.tensor_parallel

    @property
    def share(self) -> int:
        """Index of the share that this rank and its tensor-parallel peers compute."""
        return self.rank // self.tensor_parallel

    @property
    def leads(self) -> bool:
        """Whether this rank is rank 0, which has gathered values and writes files."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the shares, on every rank; collective. Only the first tensor-parallel peer is counted."""
        return self.total(values if self.rank % self.tensor_parallel == 0 else torch.zeros_like(values))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, tensor-parallel peers too, on every rank; collective."""
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def sums(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return each scalar summed over the shares, in float64; on one rank, the scalars themselves.

        Collective: all ranks must pass the same names in the same order.
        """
        if self.size == 1:
            return dict(values)
        total = self.sum(torch.stack([value.detach().double() for value in values.values()]))
        return dict(zip(values, total.unbind()))

    def joined(self, values: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return the concatenated flat ``values`` of all shares, on the CPU, and this share's slice; collective."""
        counts = torch.zeros(self.num_shares, dtype=torch.int64)
        counts[self.share] = len(values)
        ends = self.sum(counts).cumsum(0).tolist()
        local = slice(ends[self.share] - len(values), ends[self.share])
        every = torch.zeros(ends[-1], dtype=values.dtype)
        every[local] = values
        return self.sum(every).cpu(), local

    def mesh(self) -> DeviceMesh:
        """Create the device mesh (see the module) without dimensions of size 1, except ``shard``; collective."""
        shards = self.fsdp_size or self.num_shares
        sizes = {"replicate": self.num_shares // shards, "shard": shards, "tensor": self.tensor_parallel}
        used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(self.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        groups = mesh.get_all_groups()
        if self.tensor_parallel > 1:
            groups.append(mesh["shard", "tensor"]._flatten().get_group())  # sums norms of gradients in one message
            # torch warns at each gathering of a matrix that it takes two messages
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        for group in groups:
            _set_pg_timeout(timedelta(seconds=self.timeout_s), group)
        return mesh


def join_ranks(
    rank: int,
    size: int,
    *,
    init_method: str,
    device: torch.device | str,
    timeout_s: float = 1800.0,
    start_timeout_s: float | None = None,
    **layout: Any,
) -> Ranks:
    """Initialize torch.distributed in this process, once, as rank ``rank`` of ``size``; return after all have joined.

    The backend is gloo on CPUs, NCCL on GPUs. For a loopback address or a file, gloo on Linux uses loopback only.
    DistError if other ranks do not join in time; ValueError if this process has already joined.

    Args:
        init_method: ``tcp://host:port``; or, for processes of one machine, ``file:///path`` of a new file.
        device: device of this rank; if it is a GPU, it becomes the current one.
        start_timeout_s: timeout of joining, if longer than ``timeout_s`` (rank 0 may load a model meanwhile).
        layout: ``reduce_once``, ``tensor_parallel`` and ``fsdp_size`` of :class:`Ranks`.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    host = init_method.removeprefix("tcp://").rpartition(":")[0]
    if sys.platform == "linux" and (init_method.startswith("file://") or host in _LOOPBACK):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=max(timeout_s, start_timeout_s or 0.0)),
    )
    _set_pg_timeout(timedelta(seconds=timeout_s))
    return Ranks(rank, size, device, timeout_s=timeout_s, **layout)


def shard(policy: CausalPolicy, ranks: Ranks) -> None:
    """Shard the parameters of ``policy`` over the ranks, in place; the forward pass gathers one layer at a time.

    Rank 0 broadcasts its parameters (others: ``load_model(weights=False)``) and decides whether rows are packed.
    Parameters may be on the CPU: each layer is moved to the ranks' device by itself. Gradients are sums over the ranks,
    not means. All ranks must call this, before they build an optimizer. RuntimeError if their models differ in shape;
    NotImplementedError if tensor parallelism does not support its ``base_model_tp_plan``.
    """
    mesh = ranks.mesh()
    names = mesh.mesh_dim_names or ()
    by_rows = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
    scorer = policy.scorer
    model = base_model(policy.model)
    if policy.shared_prompt and ranks.leads and ranks.device.type != "cpu":
        # rank 0 tested packing where it loaded the model, on the CPU; the ranks' device must support it too
        policy.shared_prompt = takes_packed_rows(model, kernel_difference(model, ranks.device))
    policy.shared_prompt = _of_rank_0(policy.shared_prompt, ranks)
    if policy.shared_prompt:
        model.set_attn_implementation(SHARED_ATTENTION)
        if policy.fused:
            fuse_layers(model)
    plan: Any = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    for module in [*decoder_layers(model), scorer]:
        _send(module, ranks)
        if "tensor" in names:
            divide_ends(model, mesh["tensor"]) if module is scorer else divide_layer(module, mesh["tensor"], plan)
        # the outermost module too: gathered parameters would be used after the weights have changed
        fully_shard(module, mesh=by_rows, reshard_after_forward=True)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum


@torch.no_grad()
def _send(module: nn.Module, ranks: Ranks) -> None:
    """Broadcast rank 0's parameters and buffers to the ranks' devices, except tensors that are already sharded."""
    tensors = [value for value in [*module.parameters(), *module.buffers()] if not isinstance(value, DTensor)]
    sent = _of_rank_0([(value.shape, value.dtype) for value in tensors], ranks)
    if [shape for shape, _ in sent] != [value.shape for value in tensors]:
        raise RuntimeError(
            f"{type(module).__name__} differs in shape on rank {ranks.rank} and rank 0; load the same model on all."
        )
    for value, (_, dtype) in zip(tensors, sent):
        empty = torch.empty(value.shape, dtype=dtype, device=ranks.device)
        whole = empty.copy_(value) if ranks.leads else empty
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        value.data = whole


def _of_rank_0(value: Any, ranks: Ranks) -> Any:
    """Return rank 0's ``value`` on every rank; collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=ranks.device)
    return values[0]


def reduce_gradients(policy: CausalPolicy, now: bool) -> None:
    """Set whether backward passes from now on sum gradients over the ranks (no effect if not sharded)."""
    if isinstance(policy.scorer, FSDPModule):
        policy.scorer.set_requires_gradient_sync(now)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # tested: gradients equal those of one rank


def require_divisible(name: str, config: PreTrainedConfig, size: int) -> None:
    """Raise UserError unless a model is of :data:`FAMILIES` and ``size`` divides heads, key heads, MLP and vocabulary.

    >>> from transformers import LlamaConfig
    >>> require_divisible("m", LlamaConfig(num_attention_heads=32, num_key_value_heads=8), 16)
    Traceback (most recent call last):
    sota_grpo.errors.UserError: train_model.tensor_parallel_size=16 does not divide num_key_value_heads=8 of \
model.name=m; use train_model.tensor_parallel_size=8.
    """
    text: Any = config.get_text_config()
    if text.model_type not in FAMILIES:
        raise UserError(
            f"train_model.tensor_parallel_size={size} supports only {', '.join(FAMILIES)}, and model.name={name} is "
            f"{text.model_type}; use train_model.tensor_parallel_size=1."
        )
    heads = text.num_attention_heads
    numbers = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "intermediate_size": text.intermediate_size,
        "vocab_size": text.vocab_size,
    }
    for key, number in numbers.items():
        if number % size:
            fits = max(n for n in range(1, size) if not any(each % n for each in numbers.values()))
            raise UserError(
                f"train_model.tensor_parallel_size={size} does not divide {key}={number} of model.name={name}; use "
                f"train_model.tensor_parallel_size={fits}."
            )


class WholeWeights(ParallelStyle):
    """Parallel style of a module whose weights are replicated; its input is replicated or sharded by heads.

    With a sharded input each rank has a partial gradient of the weights (norms of queries and keys), which is summed.
    ``layout`` is the placement of the module's one input, if that is a plain tensor; a DTensor keeps its placement.
    """

    def __init__(self, layout: Placement):
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(_name: str, inner: nn.Module, mesh: DeviceMesh) -> None:
            for name, parameter in list(inner.named_parameters(recurse=False)):
                setattr(inner, name, _cut(parameter, mesh, Replicate()))

        def annotated(_module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            known = isinstance(inputs[0], DTensor)
            return inputs[0] if known else DTensor.from_local(inputs[0], mesh, [self.layout], run_check=False)

        return distribute_module(module, device_mesh, replicate, annotated, lambda _, outputs, mesh: outputs.to_local())


def _cut(parameter: nn.Parameter, mesh: DeviceMesh, placement: Placement) -> nn.Parameter:
    """Return this rank's shard of a parameter that every rank has whole; no message is sent."""
    local = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def divide_layer(layer: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Apply ``base_model_tp_plan`` to a decoder layer and its LoRA, in place; NotImplementedError if not supported."""
    styles: dict[str, ParallelStyle] = {}
    for path, kind in plan.items():
        name = path.removeprefix("layers.*.")
        if name != path:
            styles |= _styles(name, kind, layer)
    whole = {
        name: WholeWeights(Replicate())
        for name, module in layer.named_modules()
        if name not in styles and next(module.parameters(recurse=False), None) is not None
    }
    parallelize_module(layer, mesh, {**styles, **whole, **_INPUTS}, src_data_rank=None)


#: The common input of several matrices is annotated once, so that its gradient is summed over the ranks only once.
_WHOLE: dict[str, Placement] = {"hidden_states": Replicate()}
_INPUTS: dict[str, ParallelStyle] = {
    "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "self_attn": PrepareModuleInput(input_kwarg_layouts=_WHOLE, desired_input_kwarg_layouts=_WHOLE),
}


def _styles(name: str, kind: str, layer: nn.Module) -> dict[str, ParallelStyle]:
    """Return the parallel style of one module in the plan; with LoRA, those of its matrix and its two factors."""
    if kind == "replicated_with_grad_allreduce":
        return {name: WholeWeights(Shard(2))}  # [1, L, heads, width]
    if kind not in ("colwise", "rowwise"):
        raise NotImplementedError(
            f"The model's plan shards {name} as {kind}, which is not supported; use train_model.tensor_parallel_size=1."
        )
    parallel = ColwiseParallel if kind == "colwise" else RowwiseParallel
    module: Any = layer.get_submodule(name)
    if not hasattr(module, "lora_A"):
        return {name: parallel()}
    (adapter,) = module.active_adapters
    first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
    divided, whole = (second, first) if kind == "colwise" else (first, second)
    return {f"{name}.base_layer": parallel(), divided: parallel(), whole: WholeWeights(Replicate())}


def divide_ends(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Shard embedding and output layer by token ids, in place (tied ones stay tied); replicate unsharded weights."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    tied = head.weight is embedding.weight
    by_ids = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(embedding, mesh, by_ids, src_data_rank=None)
    head.weight = embedding.weight if tied else _cut(head.weight, mesh, Shard(0))
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if any(not isinstance(parameter, DTensor) for parameter in parameters):
            parallelize_module(module, mesh, WholeWeights(Replicate()), src_data_rank=None)
