"""Weights that are changed for a moment, so that a push of them shows, and put back bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from sota_grpo.policy.sharding import local

PROBE_SHARE = 0.01  # of each tensor's elements; changed signs move a tensor by 2 sqrt(share), a fifth, of its norm


class Changed(NamedTuple):
    """Where a tensor was changed, and what stood there."""

    tensor: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor


@torch.no_grad()
def perturb(parameters: Iterable[torch.Tensor]) -> list[Changed]:
    """Change every tensor in place; :func:`restore` of the result brings back each bit.

    ``PROBE_SHARE`` of its elements, at least one, change their sign (zeros become 1). Noise on all elements would need
    a copy of the whole model to restore; this keeps 3 to 5 % of its bytes. Of a sharded tensor each rank changes its
    own part.

    >>> weight = torch.tensor([0.0, 2.0])
    >>> kept = perturb([weight])
    >>> weight.tolist() in ([1.0, 2.0], [0.0, -2.0])
    True
    >>> restore(kept)
    >>> weight.tolist()
    [0.0, 2.0]
    """
    kept = []
    for parameter in parameters:
        tensor, generator = local(parameter.data), torch.Generator().manual_seed(0)
        if not tensor.numel():
            continue
        count = max(1, round(PROBE_SHARE * tensor.numel()))
        places = torch.randint(tensor.numel(), (count,), generator=generator).to(tensor.device)
        values = tensor.take(places)
        kept.append(Changed(tensor, places, values))
        tensor.put_(places, torch.where(values == 0, 1.0, -values))
    return kept


@torch.no_grad()
def restore(kept: Iterable[Changed]) -> None:
    """Put back what :func:`perturb` changed."""
    for tensor, places, values in kept:
        tensor.put_(places, values)
