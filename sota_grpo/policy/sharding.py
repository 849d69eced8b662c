"""A policy over several processes (FSDP2): each rank keeps a shard of every parameter, gradient and optimizer moment.

Ranks form a mesh of up to three dimensions, the last one counted fastest. Eight of them as 2 x 2 x 2::

    replicate   copies of the weights, whose gradients are added (hybrid sharding); size / fsdp_size / tensor_parallel
    shard       ranks that divide a copy, and gather it layer by layer; fsdp_size
    tensor      ranks that see the same rows and divide every matrix; tensor_parallel

Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) follows transformers' plan of the model
(``base_model_tp_plan``); FSDP2 then divides what a rank has left among those that see other rows::

    q k v, gate up     by outputs ("colwise"): each rank has some of the heads, some of the MLP's width
    o, down            by inputs ("rowwise"): each rank has a part of the sum, which is added over the ranks
    embedding, head    by ids: a token's embedding is one rank's; log-probs are joined
                       (:class:`sota_grpo.functional.log_probs.VocabShard`)
    norms              whole on every rank

One rank is the same code with nothing to share: :class:`Ranks` of size 1 calls no collective.
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
    """This rank's shard of a tensor, sharing its memory; a tensor that is not sharded is its own shard."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gather(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole of a sharded tensor on rank 0's CPU and None on the others; collective. Any other tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if tensor.device_mesh.get_rank() == 0 else None


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor on every rank; collective. Any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_first_holder(tensor: torch.Tensor, ranks: Ranks) -> bool:
    """Whether this rank is the first of those that hold the same shard of a tensor; rank 0 is, of a whole one."""
    if not isinstance(tensor, DTensor):
        return ranks.leads
    coordinate: Any = tensor.device_mesh.get_coordinate()
    return not any(index for index, how in zip(coordinate, tensor.placements) if how.is_replicate())


def local_shard(tensor: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return this rank's shard to write, uncopied, and its offset in the whole tensor; None: nothing."""
    if not is_first_holder(tensor, ranks):
        return None
    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.ndim
    local = tensor.to_local()
    return (local, _bounds(tensor)[1]) if local.numel() else None


def _bounds(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of this rank's shard, and where it begins in the whole."""
    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def divided(whole: torch.Tensor | StoredTensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``whole``, which every rank can read, cut as ``like`` is: the inverse of :func:`gather`.

    No message is sent. Of a stored tensor this rank reads its own rows. A shard is a copy.
    """
    if not isinstance(like, DTensor):
        return in_memory(whole)
    if whole.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} is given for one of {tuple(like.shape)}")
    cut = tuple(slice(start, start + size) for size, start in zip(*_bounds(like)))
    contiguous = torch.contiguous_format
    shard = whole.block(cut) if isinstance(whole, StoredTensor) else whole[cut].clone(memory_format=contiguous)
    layout = like.device_mesh, like.placements
    return DTensor.from_local(shard.to(like.device), *layout, run_check=False, shape=like.shape, stride=like.stride())


def optimizer_state(
    optimizer: torch.optim.Optimizer, whole: Callable[[torch.Tensor], torch.Tensor | None] = gather
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with whole tensors, on rank 0; collective, one tensor at a time."""
    state = optimizer.state_dict()
    entries = {
        index: {name: whole(value) if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return state | {"state": entries}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load an :func:`optimizer_state` on any number of ranks; the moments are copied."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def local(value: Any, parameter: torch.Tensor) -> Any:
        if isinstance(value, Mapping):  # what bitsandbytes quantised is a level deeper, and whole: one process has it
            return {name: in_memory(part) if isinstance(part, StoredTensor) else part for name, part in value.items()}
        if not isinstance(value, (torch.Tensor, StoredTensor)):
            return value
        # moments have the shape of their parameter; the count of steps is a scalar that every rank keeps
        return divided(value, parameter) if value.shape == parameter.shape else in_memory(value).clone()

    entries = {
        index: {name: local(value, parameters[index]) for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True)
class Ranks:
    """The processes that train one policy together, as one of them sees them."""

    rank: int = 0  # this process
    size: int = 1  # how many there are
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))  # where this rank computes
    #: The gradient of an optimizer step is summed over the ranks once, after its last micro-batch, which needs room for
    #: the gradient of the whole model on every rank (4 bytes per float32 parameter). False sums after every
    #: micro-batch: more traffic, and each rank holds its own part only.
    reduce_once: bool = True
    tensor_parallel: int = 1  # ranks that see the same rows and divide every matrix among them
    fsdp_size: int | None = None  # ranks that divide one copy of what is left of the weights; None: all others
    timeout_s: float = 1800.0  # longest wait for the others in every collective

    @property
    def num_shares(self) -> int:
        """Shares into which rows are divided."""
        return self.size // self.tensor_parallel

    @property
    def share(self) -> int:
        """The share of this rank and its peers."""
        return self.rank // self.tensor_parallel

    @property
    def leads(self) -> bool:
        """Whether this rank has the gathered values and writes files."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over the shares, on every rank; collective. Peers have the same values, and the first's count."""
        return self.total(values if self.rank % self.tensor_parallel == 0 else torch.zeros_like(values))

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, peers too, on each of them; collective."""
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def sums(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each scalar summed over the shares, in float64 and one message; every rank gives the same names."""
        if self.size == 1:
            return dict(values)
        total = self.sum(torch.stack([value.detach().double() for value in values.values()]))
        return dict(zip(values, total.unbind()))

    def joined(self, values: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Return every share's flat ``values`` concatenated on the CPU, and this rank's slice; collective."""
        counts = torch.zeros(self.num_shares, dtype=torch.int64)
        counts[self.share] = len(values)
        ends = self.sum(counts).cumsum(0).tolist()
        local = slice(ends[self.share] - len(values), ends[self.share])
        every = torch.zeros(ends[-1], dtype=values.dtype)
        every[local] = values
        return self.sum(every).cpu(), local

    def mesh(self) -> DeviceMesh:
        """The mesh of the ranks (see the module), without dimensions of one rank but for ``shard``."""
        shards = self.fsdp_size or self.num_shares
        sizes = {"replicate": self.num_shares // shards, "shard": shards, "tensor": self.tensor_parallel}
        used = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(self.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
        groups = mesh.get_all_groups()
        if self.tensor_parallel > 1:
            groups.append(mesh["shard", "tensor"]._flatten().get_group())  # adds norms of gradients in one message
            # gathering a matrix takes two messages, which torch says each time
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
    """Make this process one of ``size`` ranks and return when all have joined. Once per process.

    gloo joins CPUs, NCCL GPUs. On a loopback address gloo listens on loopback only.

    Args:
        rank: of this process, from 0.
        size: processes that join.
        init_method: ``tcp://host:port``; or, for processes of one machine, ``file:///path`` of a new file.
        device: where this rank computes.
        timeout_s: longest wait for the others in every collective.
        start_timeout_s: longest wait for the others to join, during which rank 0 may load a model; None: ``timeout_s``.
        layout: ``reduce_once``, ``tensor_parallel`` and ``fsdp_size`` of :class:`Ranks`.

    Raises:
        torch.distributed.DistError: the others did not join in time.
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
    """Leave this rank its shard of every parameter, in place; the forward pass gathers one decoder layer at a time.

    Rank 0 sends the parameters, bit for bit, so the others need not load any. They may be on the CPU: each layer moves
    to the ranks' device on its own. Rank 0 also decides whether rows are packed, measured on real weights. Gradients
    are sums over the ranks, not means. Call this before an optimizer is built.
    """
    mesh = ranks.mesh()
    names = mesh.mesh_dim_names or ()
    by_rows = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
    scorer = policy.scorer
    model = base_model(policy.model)
    if scorer.shared_prompt and ranks.leads and ranks.device.type != "cpu":
        # what packs on the CPU, where rank 0 has loaded it, has to do so where the ranks compute
        scorer.shared_prompt = takes_packed_rows(model, kernel_difference(model, ranks.device))
    scorer.shared_prompt = _of_rank_0(scorer.shared_prompt, ranks)
    if scorer.shared_prompt:
        model.set_attn_implementation(SHARED_ATTENTION)
        if policy.fused:
            fuse_layers(model)
    plan: Any = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    for module in [*decoder_layers(model), scorer]:
        _send(module, ranks)
        if "tensor" in names:
            divide_ends(model, mesh["tensor"]) if module is scorer else divide_layer(module, mesh["tensor"], plan)
        # the outermost too: what stayed gathered would be computed with after the weights have changed
        fully_shard(module, mesh=by_rows, reshard_after_forward=True)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


@torch.no_grad()
def _send(module: nn.Module, ranks: Ranks) -> None:
    """Broadcast rank 0's parameters and buffers, on their device; sharded ones were sent before."""
    tensors = [value for value in [*module.parameters(), *module.buffers()] if not isinstance(value, DTensor)]
    sent = _of_rank_0([(value.shape, value.dtype) for value in tensors], ranks)
    if [shape for shape, _ in sent] != [value.shape for value in tensors]:
        raise RuntimeError(f"Rank {ranks.rank} has built another {type(module).__name__} than rank 0.")
    for value, (_, dtype) in zip(tensors, sent):
        empty = torch.empty(value.shape, dtype=dtype, device=ranks.device)
        whole = empty.copy_(value) if ranks.leads else empty
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        value.data = whole


def _of_rank_0(value: Any, ranks: Ranks) -> Any:
    """What rank 0 has as ``value``; collective."""
    values = [value]
    dist.broadcast_object_list(values, src=0, device=ranks.device)
    return values[0]


def reduce_gradients(policy: CausalPolicy, now: bool) -> None:
    """Set whether the next backward pass sums the gradients over the ranks."""
    if isinstance(policy.scorer, FSDPModule):
        policy.scorer.set_requires_gradient_sync(now)


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # whose gradients are tested to be those of one rank


def require_divisible(name: str, config: PreTrainedConfig, size: int) -> None:
    """Raise ``UserError`` unless ``size`` ranks can divide the matrices of a model, by its ``config.json``.

    >>> from transformers import LlamaConfig
    >>> require_divisible("m", LlamaConfig(num_attention_heads=32, num_key_value_heads=8), 16)
    Traceback (most recent call last):
    sota_grpo.errors.UserError: train_model.tensor_parallel_size=16 divides num_key_value_heads=8 of model.name=m, \
which is no multiple of it; use train_model.tensor_parallel_size=8.
    """
    text: Any = config.get_text_config()
    if text.model_type not in FAMILIES:
        raise UserError(
            f"train_model.tensor_parallel_size={size} is tested for {', '.join(FAMILIES)}, and model.name={name} is "
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
                f"train_model.tensor_parallel_size={size} divides {key}={number} of model.name={name}, which is no "
                f"multiple of it; use train_model.tensor_parallel_size={fits}."
            )


class WholeWeights(ParallelStyle):
    """A module whose weights are whole on every rank, over inputs that are whole too, or divided by heads.

    Divided inputs give each rank a part of the gradient of the weights (norms of queries and keys), which is added.
    ``layout`` is that of its one input, and of its output.
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
    """This rank's part of a parameter that every rank has whole; nothing is sent."""
    local = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(local, requires_grad=parameter.requires_grad)


def divide_layer(layer: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Leave this rank its shard of a decoder layer, in place; adapters are divided as the matrices under them.

    ``plan`` is transformers' ``base_model_tp_plan``.
    """
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


#: What several matrices read is annotated once, so that its gradient is added over the ranks once and not for each.
_WHOLE: dict[str, Placement] = {"hidden_states": Replicate()}
_INPUTS: dict[str, ParallelStyle] = {
    "mlp": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)),
    "self_attn": PrepareModuleInput(input_kwarg_layouts=_WHOLE, desired_input_kwarg_layouts=_WHOLE),
}


def _styles(name: str, kind: str, layer: nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles of one module of the plan, or of its matrix and its adapter's two factors."""
    if kind == "replicated_with_grad_allreduce":
        return {name: WholeWeights(Shard(2))}  # [1, L, heads, width]
    if kind not in ("colwise", "rowwise"):
        raise NotImplementedError(f"transformers' plan divides {name} as {kind}, which is not known here")
    parallel = ColwiseParallel if kind == "colwise" else RowwiseParallel
    module: Any = layer.get_submodule(name)
    if not hasattr(module, "lora_A"):
        return {name: parallel()}
    (adapter,) = module.active_adapters
    first, second = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
    divided, whole = (second, first) if kind == "colwise" else (first, second)
    return {f"{name}.base_layer": parallel(), divided: parallel(), whole: WholeWeights(Replicate())}


def divide_ends(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Leave this rank its ids of the embedding and of the head, in place; tied ones stay tied."""
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
