"""One optimizer with one state: Muon for the matrices of decoder layers, AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from sota_grpo.policy.optimizers import Rates, decay_groups


class MuonAndAdamW(Optimizer):
    """Optimizer: Muon (Jordan et al. 2024) for ``matrices``, AdamW for ``others``. Muon orthogonalises momentum ``M``::

        W <- W - lr * (0.2 sqrt(max(m, n)) * NS(M) + weight_decay * W),   NS(M) ~ U V^T of  M = U S V^T

    ``W`` and ``M`` are ``[m, n]``. With the factor of Liu et al. 2025 (arXiv:2502.16982, eq. 4) the entries of a step
    are as large as AdamW's, so both share ``lr``, its schedule and ``weight_decay`` (0 for biases and norms). The first
    parameter group is Muon's; AdamW has the others: embedding, head, biases and norms.
    """

    def __init__(self, matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates):
        muon: dict[str, Any] = {"lr": rates.lr, "weight_decay": rates.weight_decay, "momentum": rates.momentum}
        self._parts = [
            Muon(matrices, adjust_lr_fn="match_rms_adamw", **muon),
            AdamW(decay_groups(others, rates), fused=True, **rates.adamw),
        ]
        super().__init__([{"params": list(matrices)}, *decay_groups(others, rates)], {})
        self.param_groups = [group for optimizer in self._parts for group in optimizer.param_groups]
        self._share()

    def _share(self) -> None:
        """Make Muon and AdamW use this optimizer's parameter groups and state."""
        for optimizer, groups in zip(self._parts, (self.param_groups[:1], self.param_groups[1:])):
            optimizer.param_groups, optimizer.state = groups, self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Make one step of Muon and AdamW; ``closure`` is not called."""
        for optimizer in self._parts:
            optimizer.step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self._share()
