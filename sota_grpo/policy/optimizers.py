"""Registry of optimizers by ``optimizer.name``, each with its memory formula and limits.

Torch and the packages of the optimizers are imported when an optimizer is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError
from sota_grpo.plugins import Registry
from sota_grpo.policy.model_sizes import Architecture

if TYPE_CHECKING:
    import torch

BLOCK = 256  # elements that share a scale in 8-bit moments
MIN_8BIT = 4096  # smaller tensors keep their moments in float32


@dataclass(frozen=True)
class Rates:
    """Options of the config's section ``optimizer`` that are arguments of optimizers."""

    lr: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.95  # of Muon, for matrices

    @property
    def adamw(self) -> dict[str, Any]:
        """Keyword arguments of AdamW."""
        return {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True)
class Trained:
    """Sizes of the trained parameters, from which an optimizer's memory is computed."""

    matrices: Sequence[tuple[int, int]]  # (rows, columns) of matrices in decoder layers, LoRA factors included
    others: Sequence[int]  # elements of embedding and head
    small: int  # elements of all biases and norms together
    weight_bytes: int  # bytes of an element, and of its gradient

    @classmethod
    def of(cls, model: Architecture, *, rank: int, weight_bytes: int) -> Trained:
        """Return the sizes of all weights of a model; if ``rank`` > 0, those of its LoRA adapter, which is float32."""
        if rank:
            pairs = [pair for inputs, outputs in model.linear_layers for pair in ((inputs, rank), (rank, outputs))]
            return cls(pairs * model.layers, (), 0, 4)
        matrices = list(model.linear_layers) * model.layers
        heads = [model.head_weights] * (1 if model.tied else 2)
        small = model.parameters - model.layers * model.layer_matrices - sum(heads)
        return cls(matrices, heads, small, weight_bytes)

    @property
    def sizes(self) -> list[int]:
        """Number of elements of each tensor; biases and norms are left out."""
        return [rows * columns for rows, columns in self.matrices] + list(self.others)

    @property
    def numbers(self) -> int:
        return sum(self.sizes) + self.small


Build = Callable[[Sequence["torch.Tensor"], Sequence["torch.Tensor"], Rates], "torch.optim.Optimizer"]


@dataclass(frozen=True)
class OptimizerKind:
    """Declaration of an optimizer: how to build it, its memory in bytes, and what it supports."""

    build: Build  # called with (matrices of decoder layers, all other parameters, rates)
    state_bytes: Callable[[Trained], int]  # bytes of its state between two steps
    step_bytes: Callable[[Trained, bool], int] = lambda trained, on_cpu: 0  # further bytes during a step
    package: str | None = None  # package and extra that it needs in addition to torch
    trains_adapters: bool = True  # it can train LoRA factors
    over_ranks: bool = True  # its state can be sharded over ranks (FSDP2)


def decay_groups(parameters: Sequence[torch.Tensor], rates: Rates) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: parameters of fewer than two dimensions get no weight decay."""
    flat = [p for p in parameters if p.dim() < 2]
    if not flat or rates.weight_decay == 0:
        return [{"params": list(parameters)}]
    return [{"params": [p for p in parameters if p.dim() >= 2]}, {"params": flat, "weight_decay": 0.0}]


def _adamw(matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates) -> torch.optim.Optimizer:
    """Build AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    import torch

    return torch.optim.AdamW(decay_groups([*matrices, *others], rates), fused=True, **rates.adamw)


def _adamw_8bit(
    matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates
) -> torch.optim.Optimizer:
    """Build AdamW with 8-bit moments, one scale per 256 of them (Dettmers et al. 2022, arXiv:2110.02861)."""
    require_package("adamw_8bit")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(decay_groups([*matrices, *others], rates), min_8bit_size=MIN_8BIT, **rates.adamw)


def _muon(matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates) -> torch.optim.Optimizer:
    """Build one optimizer: Muon (Jordan et al. 2024) for ``matrices``, AdamW for ``others``. Muon orthogonalises::

        W <- W - lr * (0.2 sqrt(max(m, n)) * NS(M) + weight_decay * W),   NS(M) ~ U V^T of  M = U S V^T

    ``W`` and its momentum ``M`` are ``[m, n]``. With the factor of Liu et al. 2025 (arXiv:2502.16982, eq. 4) a step's
    entries are as large as AdamW's, so both share ``lr``, its schedule and ``weight_decay`` (0 for biases and norms).
    The first parameter group is Muon's; AdamW has the others: embedding, head, biases and norms.
    """
    from torch.optim import AdamW, Muon, Optimizer

    class MuonAndAdamW(Optimizer):
        def __init__(self) -> None:
            self._optimizers: list[Optimizer] = [
                Muon(
                    matrices,
                    lr=rates.lr,
                    weight_decay=rates.weight_decay,
                    momentum=rates.momentum,
                    adjust_lr_fn="match_rms_adamw",
                ),
                AdamW(decay_groups(others, rates), fused=True, **rates.adamw),
            ]
            super().__init__([{"params": list(matrices)}, *decay_groups(others, rates)], {})
            self.param_groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
            self._share()

        def _share(self) -> None:
            """Make Muon and AdamW use this optimizer's parameter groups and state."""
            for optimizer, groups in zip(self._optimizers, (self.param_groups[:1], self.param_groups[1:])):
                optimizer.param_groups, optimizer.state = groups, self.state

        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the closure is not called
            for optimizer in self._optimizers:
                optimizer.step()

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self._share()

    return MuonAndAdamW()


def _two_moments_in_8_bits(trained: Trained) -> int:
    """Return bytes of two moments: a byte per element and a float32 scale per block; float32 in small tensors."""
    bytes_of = (2 * (size + 4 * -(-size // BLOCK)) if size >= MIN_8BIT else 8 * size for size in trained.sizes)
    return 8 * trained.small + sum(bytes_of)


def _orthogonalised(trained: Trained) -> int:
    """Return a Muon step's bytes for the largest matrix: update, 3 half-precision copies, 2 products with itself."""
    rows, columns = max(trained.matrices, key=lambda shape: shape[0] * shape[1])
    return (trained.weight_bytes + 6) * rows * columns + 4 * min(rows, columns) ** 2


_OWN: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, lambda trained: 2 * trained.weight_bytes * trained.numbers),
    "adamw_8bit": OptimizerKind(
        _adamw_8bit,
        _two_moments_in_8_bits,
        # on a CPU each tensor is updated in float32: two moments, gradient, denominator and its root
        step_bytes=lambda trained, on_cpu: 20 * max(trained.sizes) if on_cpu else 0,
        package="bitsandbytes",
        over_ranks=False,
    ),
    "muon": OptimizerKind(
        _muon,
        lambda trained: trained.weight_bytes * (2 * trained.numbers - sum(r * c for r, c in trained.matrices)),
        step_bytes=lambda trained, on_cpu: _orthogonalised(trained),
        trains_adapters=False,
    ),
}
#: Optimizers by the value of ``optimizer.name=``; packages add optimizers as entry points of "sota_grpo.optimizers".
OPTIMIZERS: Registry[OptimizerKind] = Registry("sota_grpo.optimizers", _OWN)


def make_optimizer(
    name: str, parameters: Sequence[torch.Tensor], matrices: Collection[torch.Tensor], rates: Rates
) -> torch.optim.Optimizer:
    """Build the optimizer ``name`` of ``parameters``; ``muon`` applies Muon to ``matrices`` and AdamW to the others.

    KeyError if ``name`` is not in :data:`OPTIMIZERS`; UserError if the optimizer's package cannot be used.
    """
    inside = {id(parameter) for parameter in matrices}
    if name == "adamw":  # in the model's order, as in older checkpoints
        return OPTIMIZERS[name].build(parameters, (), rates)
    first = [parameter for parameter in parameters if id(parameter) in inside]
    return OPTIMIZERS[name].build(first, [one for one in parameters if id(one) not in inside], rates)


def require_package(name: str) -> None:
    """Raise UserError unless the package of the optimizer ``name`` is installed, KeyError for an unknown name."""
    package = OPTIMIZERS[name].package
    if package is not None:
        require_installed(package, f"optimizer.name={name}", "optimizer.name=adamw")


def require_installed(package: str, option: str, other: str) -> None:
    """Raise UserError unless ``package``, which ``option`` needs, is installed; the message suggests ``other``."""
    if find_spec(package) is None:
        raise UserError(
            f"{option} needs {package}, which is not installed: `pip install 'sota-grpo[{package}]'`, or use {other}."
        )
