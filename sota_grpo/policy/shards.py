"""Tensors of which every rank holds a part: whole to parts and back. Other tensors pass through as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


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


def divided(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`gathered`: ``whole``, known to every rank, cut as ``like`` is. No message is sent."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


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
    entries = {
        index: {name: _divided_value(value, parameters[index]) for name, value in entry.items()}
        for index, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": entries})


def _divided_value(value: Any, parameter: torch.Tensor) -> Any:
    """Moments have the shape of their parameter; the count of steps is a scalar that every rank keeps."""
    if not isinstance(value, torch.Tensor):
        return value
    return divided(value, parameter) if value.shape == parameter.shape else value
