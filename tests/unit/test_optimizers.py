"""Optimizers by name: their steps against plain loops, what they keep and say of it, and an exact resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sota_grpo.assembly.estimate import disk_of
from sota_grpo.config import Config
from sota_grpo.config.spelling import with_options
from sota_grpo.errors import UserError
from sota_grpo.policy import optimizers
from sota_grpo.policy.load import architecture_from
from sota_grpo.policy.model_sizes import Architecture
from sota_grpo.policy.optimizers import OPTIMIZERS, Rates, Trained, make_optimizer, require_package
from sota_grpo.policy.sharding import Ranks
from tests.rank_rigs import build_learner, ragged_rows

NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            kind.package is not None and importlib.util.find_spec(kind.package) is None, reason=f"needs {kind.package}"
        ),
    )
    for name, kind in OPTIMIZERS.items()
]
RATES = Rates(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-8, momentum=0.9)


@pytest.fixture(autouse=True)
def eight_bits_for_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model has no tensor of 4096 numbers."""
    monkeypatch.setattr(optimizers, "MIN_8BIT", 64)


def learner(folder: Path, name: str, **settings: Any) -> Any:
    return build_learner(Ranks(), str(folder), optimizer=name, schedule="linear", warmup_steps=2, **settings)


def weights(one: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in one.trainable.items()}


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_learner_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    """Through the file of a checkpoint, in the middle of a warm-up."""
    one, other = learner(tmp_path, name), learner(tmp_path, name)
    batches = [ragged_rows(8) for _ in range(4)]
    one.update(batches[0])
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.update(batches[3])
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in batches[1:]:
        actual, expected = other.update(batch), one.update(batch)
        assert {key: actual[key] for key in ("lr", "grad_norm")} == {key: expected[key] for key in ("lr", "grad_norm")}
    assert all(torch.equal(value, weights(other)[key]) for key, value in weights(one).items())


@pytest.mark.parametrize("name", NAMES)
def test_the_state_is_as_large_as_declared(name: str, tmp_path: Path) -> None:
    one = learner(tmp_path, name)
    one.update(ragged_rows(4))
    trained = Trained.of(architecture_from(one.policy.model.config), rank=0, weight_bytes=4)
    assert trained.numbers == sum(parameter.numel() for parameter in one.parameters)
    kept = {  # the tables of 256 levels and the counts of steps are the same few for all
        value.data_ptr(): value.nbytes
        for entry in one.optimizer.state.values()
        for key, value in entry.items()
        if isinstance(value, torch.Tensor) and key != "step" and not key.startswith("qmap")
    }
    assert sum(kept.values()) == OPTIMIZERS[name].state_bytes(trained)


@pytest.mark.parametrize("name", NAMES)
def test_every_group_follows_the_schedule(name: str, tmp_path: Path) -> None:
    one = learner(tmp_path, name)
    rates = []
    for _ in range(3):
        rates.append({group["lr"] for group in one.optimizer.param_groups})
        one.update(ragged_rows(4))
    assert rates == [{5e-4}, {1e-3}, {1e-3}]


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(tmp_path: Path) -> None:
    one = learner(tmp_path, "muon")
    names = {id(parameter): key for key, parameter in one.trainable.items()}
    muon, adamw = ({names[id(p)] for p in group["params"]} for group in one.optimizer.param_groups)
    assert muon == {key for key, p in one.trainable.items() if ".layers." in key and p.ndim == 2}
    assert muon | adamw == one.trainable.keys()
    assert any("embed_tokens" in key for key in adamw)


def test_muons_step_is_orthogonal_with_the_size_of_adamws() -> None:
    """Against a float64 SVD: ``-lr 0.2 sqrt(max(m, n)) U V^T``; singular values of 0.6 to 1.3 (Jordan 2024)."""
    weight, bias = nn.Parameter(torch.randn(24, 40)), nn.Parameter(torch.randn(7))
    optimizer = make_optimizer("muon", [bias, weight], [weight], RATES)
    average = torch.zeros(24, 40, dtype=torch.float64)
    for _ in range(2):
        before = weight.detach().double().clone()
        weight.grad, bias.grad = torch.randn(24, 40), torch.randn(7)
        average = 0.9 * average + 0.1 * weight.grad.double()
        optimizer.step()
    left, _, right = torch.linalg.svd(0.1 * weight.grad.double() + 0.9 * average, full_matrices=False)
    step = (weight.detach().double() - (1 - 1e-2 * 0.1) * before) / (-1e-2 * 0.2 * 40**0.5)
    inside = left.T @ step @ right.T  # diagonal where the singular vectors are those of the gradient
    assert float((inside - inside.diag().diag()).norm() / inside.norm()) < 0.05
    assert 0.6 < float(inside.diag().min()) <= float(inside.diag().max()) < 1.3
    assert float(step.square().mean().sqrt() * 0.2 * 40**0.5) == pytest.approx(0.2, rel=0.2)  # of AdamW's own order


@pytest.mark.parametrize("shape", [(50,), (5, 10)], ids=["a norm or bias, which does not decay", "an embedding"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_a_matrix_of_a_layer_is_adamws(name: str, shape: tuple[int, ...]) -> None:
    """Two steps on a small tensor, which no optimizer keeps in 8 bits, against the equations in float64."""
    vector, matrix = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(8, 8))
    optimizer = make_optimizer(name, [vector, matrix], [matrix], RATES)
    expected, first, second = vector.detach().double(), torch.zeros(shape).double(), torch.zeros(shape).double()
    for step in (1, 2):
        vector.grad, matrix.grad = torch.randn(shape), torch.randn(8, 8)
        gradient = vector.grad.double()
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        expected = expected * (1 - 1e-2 * 0.1 * (len(shape) > 1))
        expected = expected - 1e-2 * (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
        optimizer.step()
    torch.testing.assert_close(vector.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_moments_of_8_bits_make_nearly_adamws_steps() -> None:
    """Dettmers et al. 2022: a block's largest number is exact, small ones lose relative precision."""
    pytest.importorskip("bitsandbytes")
    one, other = (nn.Parameter(torch.zeros(64, 128)) for _ in range(2))
    both = make_optimizer("adamw", [one], [one], RATES), make_optimizer("adamw_8bit", [other], [other], RATES)
    for _ in range(10):
        one.grad = torch.randn(64, 128)
        other.grad = one.grad.clone()
        for optimizer in both:
            optimizer.step()
    assert both[1].state[other]["state1"].dtype == torch.uint8
    gap = float((one - other).detach().norm() / one.detach().norm())
    assert 0 < gap < 0.05


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sota_grpo.policy.optimizers.find_spec", lambda name: None)
    require_package("muon")
    with pytest.raises(UserError, match=r"pip install 'sota-grpo\[bitsandbytes\]'"):
        require_package("adamw_8bit")


def test_a_checkpoint_is_estimated_from_what_the_optimizer_keeps() -> None:
    tiny = Architecture(8, 2, 2, 1, 4, 16, vocab=32, tied=True, context=64)
    trained = Trained.of(tiny, rank=0, weight_bytes=4)
    for name, kind in OPTIMIZERS.items():
        size = disk_of(with_options(Config(), {"optimizer.name": name}), tiny).checkpoint
        assert size == 4 * tiny.parameters + kind.state_bytes(trained)
