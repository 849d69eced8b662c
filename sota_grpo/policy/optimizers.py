"""The optimizers by ``optimizer.name``, each with its memory and limits.

Torch and the packages of the optimizers are imported when one is built.
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

BLOCK = 256  # numbers that share a scale in 8-bit moments
MIN_8BIT = 4096  # smaller tensors keep their moments in float32


@dataclass(frozen=True)
class Rates:
    """The options of ``optimizer`` in the config that optimizers are built from."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    momentum: float

    @property
    def adamw(self) -> dict[str, Any]:
        """What every AdamW takes of them."""
        return {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True)
class Trained:
    """Sizes of what is trained."""

    matrices: Sequence[tuple[int, int]]  # (rows, columns), in decoder layers, adapters' included
    others: Sequence[int]  # numbers of embedding and head
    small: int  # numbers of biases and norms together, which are small tensors
    weight_bytes: int  # of each number, and so of its gradient

    @classmethod
    def of(cls, model: Architecture, *, rank: int, weight_bytes: int) -> Trained:
        """All weights of a model, or the adapter of that rank, which is kept in float32."""
        if rank:
            pairs = [pair for inputs, outputs in model.linear_layers for pair in ((inputs, rank), (rank, outputs))]
            return cls(pairs * model.layers, (), 0, 4)
        matrices = list(model.linear_layers) * model.layers
        heads = [model.head_weights] * (1 if model.tied else 2)
        small = model.parameters - model.layers * model.layer_matrices - sum(heads)
        return cls(matrices, heads, small, weight_bytes)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each tensor but the small ones."""
        return [rows * columns for rows, columns in self.matrices] + list(self.others)

    @property
    def numbers(self) -> int:
        return sum(self.sizes) + self.small


Build = Callable[[Sequence["torch.Tensor"], Sequence["torch.Tensor"], Rates], "torch.optim.Optimizer"]


@dataclass(frozen=True)
class OptimizerKind:
    """Declaration of an optimizer."""

    build: Build  # the optimizer of (matrices of decoder layers, all other parameters, rates)
    state_bytes: Callable[[Trained], int]  # kept between two steps
    step_bytes: Callable[[Trained, bool], int] = lambda trained, on_cpu: 0  # further bytes of a step, on a CPU or not
    package: str | None = None  # that it needs beyond torch, which is the name of an extra too
    trains_adapters: bool = True  # it can train LoRA's factors
    over_ranks: bool = True  # its state can be divided over ranks (FSDP2)


def decay_groups(parameters: Sequence[torch.Tensor], rates: Rates) -> list[dict[str, Any]]:
    """``parameters`` as groups of an optimizer: norms and biases, of one dimension, do not decay."""
    flat = [p for p in parameters if p.dim() < 2]
    if not flat or rates.weight_decay == 0:
        return [{"params": list(parameters)}]
    return [{"params": [p for p in parameters if p.dim() >= 2]}, {"params": flat, "weight_decay": 0.0}]


def _adamw(matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101)."""
    import torch

    return torch.optim.AdamW(decay_groups([*matrices, *others], rates), fused=True, **rates.adamw)


def _adamw_8bit(
    matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates
) -> torch.optim.Optimizer:
    """AdamW whose moments are kept in 8 bits, a scale for each 256 of them (Dettmers et al. 2022, arXiv:2110.02861)."""
    require_package("adamw_8bit")
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(decay_groups([*matrices, *others], rates), min_8bit_size=MIN_8BIT, **rates.adamw)


def _muon(matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], rates: Rates) -> torch.optim.Optimizer:
    from sota_grpo.policy.muon import MuonAndAdamW

    return MuonAndAdamW(matrices, others, rates)


def _two_moments_in_8_bits(trained: Trained) -> int:
    """A byte each and a float32 scale per block; those of small tensors in float32."""
    bytes_of = (2 * (size + 4 * -(-size // BLOCK)) if size >= MIN_8BIT else 8 * size for size in trained.sizes)
    return 8 * trained.small + sum(bytes_of)


def _orthogonalised(trained: Trained) -> int:
    """Of the largest matrix: the update, in half precision three times, and two of its products with itself."""
    rows, columns = max(trained.matrices, key=lambda shape: shape[0] * shape[1])
    return (trained.weight_bytes + 6) * rows * columns + 4 * min(rows, columns) ** 2


_OWN: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, lambda trained: 2 * trained.weight_bytes * trained.numbers),
    "adamw_8bit": OptimizerKind(
        _adamw_8bit,
        _two_moments_in_8_bits,
        # on a CPU one tensor after another is updated in float32: both moments, gradient, denominator and its root
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
#: By the name that ``optimizer.name=`` takes; packages add theirs as entry points of "sota_grpo.optimizers".
OPTIMIZERS: Registry[OptimizerKind] = Registry("sota_grpo.optimizers", _OWN)


def make_optimizer(
    name: str, parameters: Sequence[torch.Tensor], matrices: Collection[torch.Tensor], rates: Rates
) -> torch.optim.Optimizer:
    """The optimizer ``name`` of ``parameters``, among which are the ``matrices`` inside decoder layers.

    Raises:
        UserError: its package is not installed.
    """
    inside = {id(parameter) for parameter in matrices}
    if name == "adamw":  # in the order of the model, which is that of older checkpoints
        return OPTIMIZERS[name].build(parameters, (), rates)
    first = [parameter for parameter in parameters if id(parameter) in inside]
    return OPTIMIZERS[name].build(first, [one for one in parameters if id(one) not in inside], rates)


def require_package(name: str) -> None:
    """Raise ``UserError`` unless the package of the optimizer ``name`` is installed."""
    package = OPTIMIZERS[name].package
    if package is not None:
        require_installed(package, f"optimizer.name={name}", "optimizer.name=adamw")


def require_installed(package: str, option: str, other: str) -> None:
    """Raise ``UserError``, which proposes ``other`` and the extra of that name, unless ``package`` is installed."""
    if find_spec(package) is None:
        raise UserError(
            f"{option} needs {package}, which is not installed: `pip install 'sota-grpo[{package}]'`, or use {other}."
        )
