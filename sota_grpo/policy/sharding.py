"""A policy over several processes (FSDP2): each rank keeps a part of every parameter, gradient and optimizer moment.

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from sota_grpo.policy.causal import base_model, decoder_layers, fuse_layers, kernel_difference
from sota_grpo.policy.shared_prompt import SHARED_ATTENTION
from sota_grpo.policy.tensor_files import StoredTensor, in_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sota_grpo.policy.causal import CausalPolicy


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, sharing its memory; a tensor that is not sharded is its own part.

    >>> local(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def gathered(tensor: torch.Tensor) -> torch.Tensor | None:
    """The whole of a sharded tensor on rank 0's CPU and None on the others; collective. Any other tensor as it is.

    >>> gathered(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    if not isinstance(tensor, DTensor):
        return tensor
    whole = tensor.full_tensor()
    return whole.cpu() if tensor.device_mesh.get_local_rank() == 0 else None


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor on every rank; collective. Any other tensor as it is.

    >>> replicated(torch.ones(2)).tolist()
    [1.0, 1.0]
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(tensor: torch.Tensor, ranks: Ranks) -> tuple[torch.Tensor, int] | None:
    """What this rank has to write of a tensor, uncopied, and its first row in the whole; None where there is nothing.

    Of what is not divided, rank 0's counts.

    >>> own_rows(torch.ones(2), Ranks())
    (tensor([1., 1.]), 0)
    """
    if not isinstance(tensor, DTensor) or tensor.placements == (Replicate(),):
        return (local(tensor), 0) if ranks.leads else None
    if tensor.placements != (Shard(0),):
        raise NotImplementedError(f"a tensor is divided as {tensor.placements}, and only rows are written by ranks")
    start, stop = _rows_of(tensor)
    return (tensor.to_local(), start) if start < stop else None


def _rows_of(tensor: DTensor) -> tuple[int, int]:
    """This rank's first row, and the one after its last."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]


def divided(whole: torch.Tensor | StoredTensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`gathered` and of :func:`own_rows`: ``whole``, which every rank can see, cut as ``like`` is.

    No message is sent. Of a stored tensor this rank reads its own rows. A part is a copy; a whole that stays whole is
    what it was.
    """
    if not isinstance(like, DTensor):
        return in_memory(whole)
    if whole.shape != like.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} is given for one of {tuple(like.shape)}")
    start, stop = _rows_of(like)
    shard = whole.rows(start, stop) if isinstance(whole, StoredTensor) else whole[start:stop].clone()
    places = like.device_mesh, like.placements
    return DTensor.from_local(shard.to(like.device), *places, run_check=False, shape=like.shape, stride=like.stride())


def optimizer_state(
    optimizer: torch.optim.Optimizer, whole: Callable[[torch.Tensor], torch.Tensor | None] = gathered
) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors; collective, one tensor at a time, and rank 0's alone is whole."""
    state = optimizer.state_dict()
    entries = {
        index: {name: whole(value) if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    return state | {"state": entries}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`optimizer_state` gave, on any number of ranks; the moments are copied."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def own(value: Any, parameter: torch.Tensor) -> Any:
        """Moments have the shape of their parameter; the count of steps is a scalar that every rank keeps.

        What bitsandbytes quantised lies a level deeper, and whole: one process has it.
        """
        if isinstance(value, Mapping):
            return {name: in_memory(one) if isinstance(one, StoredTensor) else one for name, one in value.items()}
        if not isinstance(value, (torch.Tensor, StoredTensor)):
            return value
        return divided(value, parameter) if value.shape == parameter.shape else in_memory(value).clone()

    entries = {
        index: {name: own(value, parameters[index]) for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


logger = logging.getLogger(__name__)

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

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: gathered values and files are its."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each of them; collective.

        >>> Ranks().sum(torch.tensor([1.0, 2.0])).tolist()
        [1.0, 2.0]
        """
        if self.size == 1:
            return values
        total = values.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def sums(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Each scalar summed over all ranks, in float64 and one message; every rank gives the same names.

        >>> Ranks().sums({"tokens": torch.tensor(3.0)})
        {'tokens': tensor(3.)}
        """
        if self.size == 1:
            return dict(values)
        total = self.sum(torch.stack([value.detach().double() for value in values.values()]))
        return dict(zip(values, total.unbind()))

    def joined(self, values: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Every rank's flat ``values`` one after the other on the CPU, and where this rank's stand; collective.

        >>> Ranks().joined(torch.tensor([1.0, 2.0]))
        (tensor([1., 2.]), slice(0, 2, None))
        """
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(values)
        ends = self.sum(counts).cumsum(0).tolist()
        own = slice(ends[self.rank] - len(values), ends[self.rank])
        every = torch.zeros(ends[-1], dtype=values.dtype)
        every[own] = values
        return self.sum(every).cpu(), own


def join_ranks(
    rank: int,
    size: int,
    *,
    init_method: str,
    device: torch.device | str,
    timeout_s: float = 1800.0,
    start_timeout_s: float | None = None,
    reduce_once: bool = True,
) -> Ranks:
    """Make this process one of ``size`` ranks; returns when all have come. Once per process.

    gloo joins CPUs, NCCL GPUs. On a loopback address gloo listens on loopback only.

    Args:
        rank: of this process, from 0.
        size: how many processes join.
        init_method: where they meet: ``tcp://host:port``; or, for processes of one machine, ``file:///path`` of a file
            that does not exist yet.
        device: where this rank computes.
        timeout_s: longest wait for the others in every collective.
        start_timeout_s: longest wait for the others to come: rank 0 may load a model first. None: ``timeout_s``.
        reduce_once: see :class:`Ranks`.

    Raises:
        torch.distributed.DistError: the others did not come in time.
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
    return Ranks(rank, size, device, reduce_once)


def shard(policy: CausalPolicy, ranks: Ranks) -> None:
    """Leave this rank its part of every parameter, in place; what computes gathers one decoder layer at a time.

    The parameters are rank 0's: it sends them, bit for bit, and the others' count for nothing, so that they need not
    load any. They may lie on the CPU: each layer moves to the ranks' device on its own, so that no device ever holds
    the whole model. Whether rows are packed is rank 0's to say too, which has measured it on real weights. Gradients
    are sums over the ranks, not means. Do this before an optimizer is built. With one rank nothing happens.
    """
    if ranks.size > 1:
        shard_over(policy, ranks)


def shard_over(policy: CausalPolicy, ranks: Ranks) -> None:
    """:func:`shard` whatever the number of ranks: one has all of every parameter, and takes the same path."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    scorer = policy.scorer
    model = base_model(policy.model)
    scorer.shared_prompt = _of_rank_0(scorer.shared_prompt and _packs_there(model, ranks), ranks)
    if scorer.shared_prompt:
        model.set_attn_implementation(SHARED_ATTENTION)
        if policy.fused:
            fuse_layers(model)
    for module in [*decoder_layers(model), scorer]:
        _send(module, ranks)
        # the outermost too: what stayed gathered would be computed with after the weights have changed
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def _packs_there(model: PreTrainedModel, ranks: Ranks) -> bool:
    """Whether what packs on the CPU, where rank 0 has loaded it, does so where the ranks compute."""
    if not ranks.leads or ranks.device.type == "cpu":
        return True
    reason = kernel_difference(model, ranks.device)
    if reason is not None:
        logger.warning("%s computes padded rows, each with its prompt: %s.", type(model).__name__, reason)
    return reason is None


@torch.no_grad()
def _send(module: nn.Module, ranks: Ranks) -> None:
    """Rank 0's parameters and buffers to all, on their device; what is sharded has been sent already.

    Raises:
        RuntimeError: the ranks have built different modules.
    """
    tensors = [value for value in [*module.parameters(), *module.buffers()] if not isinstance(value, DTensor)]
    shapes = _of_rank_0([value.shape for value in tensors], ranks)
    if shapes != [value.shape for value in tensors]:
        raise RuntimeError(f"Rank {ranks.rank} has built another {type(module).__name__} than rank 0.")
    dtypes = _of_rank_0([value.dtype for value in tensors], ranks)
    for value, dtype in zip(tensors, dtypes):
        empty = torch.empty(value.shape, dtype=dtype, device=ranks.device)
        whole = empty.copy_(value) if ranks.leads else empty
        dist.broadcast(whole.view(-1).view(torch.uint8), src=0)
        value.data = whole


def _of_rank_0(value: Any, ranks: Ranks) -> Any:
    """What rank 0 has as ``value``; collective."""
    said = [value]
    dist.broadcast_object_list(said, src=0, device=ranks.device)
    return said[0]


def reduce_gradients(policy: CausalPolicy, now: bool) -> None:
    """Whether the next backward pass sums the gradients over the ranks, or keeps them for a later one to do so."""
    if isinstance(policy.scorer, FSDPModule):
        policy.scorer.set_requires_gradient_sync(now)
