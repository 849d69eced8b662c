"""Laws and hand-computed numbers of sota_grpo.functional.corrections and diagnostics."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from sota_grpo.functional import (
    effective_sample_size,
    importance_weights,
    masked_mean,
    mismatch_kl,
    token_entropy,
)


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    print("torch.manual_seed", torch.seed())


def random_rows() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.rand(5, 8) < 0.6
    mask[1], mask[0, 0] = False, True
    return 0.7 * torch.randn(5, 8, dtype=torch.float64), mask


@pytest.mark.parametrize(("level", "mode"), list(product(("token", "sequence"), ("truncate", "mask"))))
def test_importance_weights_by_the_plain_loop(level: str, mode: str) -> None:
    log_ratio, mask = random_rows()
    found = importance_weights(log_ratio.requires_grad_(), mask, level=level, mode=mode, cap=1.3)
    assert not found.requires_grad
    for i, t in product(range(5), range(8)):
        weight = math.exp(log_ratio[i, t].item())
        if level == "sequence":
            weight = math.prod(math.exp(log_ratio[i, s].item()) for s in range(8) if mask[i, s])
        bounded = min(weight, 1.3) if mode == "truncate" else weight * (weight <= 1.3)
        assert found[i, t].item() == pytest.approx(bounded if mask[i, t] else 0.0, rel=1e-12)


@pytest.mark.parametrize(("level", "mode"), list(product(("token", "sequence"), ("truncate", "mask"))))
def test_equal_policies_have_weight_exactly_1(level: str, mode: str) -> None:
    mask = random_rows()[1]
    weights = importance_weights(torch.zeros(5, 8), mask, level=level, mode=mode, cap=1.0)
    assert torch.equal(weights, mask.float())


@pytest.mark.parametrize(("level", "mode"), list(product(("token", "sequence"), ("truncate", "mask"))))
def test_extreme_and_masked_values_do_no_harm(level: str, mode: str) -> None:
    log_ratio = torch.tensor([[400.0, 400.0, math.nan], [-400.0, -400.0, math.inf]])
    mask = torch.tensor([[True, True, False]] * 2)
    above = 2.0 if mode == "truncate" else 0.0
    found = importance_weights(log_ratio, mask, level=level, mode=mode, cap=2.0)
    assert found.tolist() == [[above, above, 0.0], [0.0, 0.0, 0.0]]


def test_a_long_row_whose_ratios_cancel_keeps_its_product() -> None:
    log_ratio = torch.tensor([[90.0] * 50 + [-90.0] * 50], dtype=torch.float64)
    mask = torch.ones(1, 100, dtype=torch.bool)
    found = importance_weights(log_ratio, mask, level="sequence", mode="mask", cap=2.0)
    assert torch.equal(found, torch.ones(1, 100, dtype=torch.float64))


def test_token_weights_are_unbiased_until_they_are_capped() -> None:
    behaviour, proximal = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    values = torch.randn(6, dtype=torch.float64)
    log_ratio, mask = (proximal - behaviour).unsqueeze(0), torch.ones(1, 6, dtype=torch.bool)
    weights = importance_weights(log_ratio, mask, level="token", mode="truncate", cap=1e9)
    torch.testing.assert_close((behaviour.exp() * weights[0] * values).sum(), (proximal.exp() * values).sum())


def test_bad_corrections_are_refused() -> None:
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ValueError, match="level is 'row'"):
        importance_weights(x, mask, level="row", mode="mask", cap=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode is 'clip'"):
        importance_weights(x, mask, level="token", mode="clip", cap=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cap is 0"):
        importance_weights(x, mask, level="token", mode="mask", cap=0)


def test_effective_sample_size_by_the_plain_loop() -> None:
    log_ratio, mask = random_rows()
    weights = [math.exp(log_ratio[i, t].item()) for i, t in product(range(5), range(8)) if mask[i, t]]
    expected = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert effective_sample_size(log_ratio, mask).item() == pytest.approx(expected, rel=1e-12)


def test_effective_sample_size_is_1_for_equal_weights_and_1_over_n_for_one() -> None:
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert effective_sample_size(torch.full((2, 5), 300.0), mask).item() == 1.0
    alone = torch.zeros(2, 5)
    alone[1, 2] = 500.0
    assert effective_sample_size(alone, mask).item() == pytest.approx(0.1)


def test_mismatch_kl_by_the_plain_loop() -> None:
    trainer, engine = -3 * torch.rand(2, 5, 8, dtype=torch.float64)
    mask = random_rows()[1]
    terms = [
        math.exp(d) - d - 1
        for d in ((trainer[i, t] - engine[i, t]).item() for i, t in product(range(5), range(8)) if mask[i, t])
    ]
    found = mismatch_kl(trainer, engine, mask)
    assert found.item() == pytest.approx(sum(terms) / len(terms), rel=1e-9)


def test_expected_mismatch_kl_is_the_kl_from_engine_to_trainer() -> None:
    """Every symbol is drawn as often as the engine's probability says: 1/2, 1/4, 1/4."""
    engine = torch.tensor([[0.5, 0.5, 0.25, 0.25]], dtype=torch.float64).log()
    trainer = torch.tensor([[0.25, 0.25, 0.25, 0.5]], dtype=torch.float64).log()
    found = mismatch_kl(trainer, engine, torch.ones(1, 4, dtype=torch.bool))
    assert found.item() == pytest.approx(0.25 * math.log(2))  # 0.5 log 2 + 0.25 log 1 - 0.25 log 2


def test_nan_in_a_masked_slot_changes_no_diagnostic() -> None:
    log_ratio, mask = random_rows()
    dirty = log_ratio.masked_fill(~mask, math.nan)
    assert torch.equal(masked_mean(dirty, mask), masked_mean(log_ratio, mask))
    assert torch.equal(effective_sample_size(dirty, mask), effective_sample_size(log_ratio, mask))
    assert torch.equal(mismatch_kl(dirty, 2 * dirty, mask), mismatch_kl(log_ratio, 2 * log_ratio, mask))


def test_masked_mean_counts_booleans_and_is_nan_over_nothing() -> None:
    mask = torch.tensor([[True, True, True, False]])
    assert masked_mean(torch.tensor([[True, False, True, True]]), mask).item() == pytest.approx(2 / 3)
    nothing = torch.zeros_like(mask)
    assert masked_mean(torch.ones(1, 4), nothing).isnan()
    assert effective_sample_size(torch.ones(1, 4), nothing).isnan()
    assert effective_sample_size(torch.ones(0, 4), torch.ones(0, 4, dtype=torch.bool)).isnan()


def test_diagnostics_are_detached() -> None:
    log_ratio, mask = random_rows()
    log_ratio.requires_grad_()
    for value in (masked_mean(log_ratio, mask), effective_sample_size(log_ratio, mask)):
        assert not value.requires_grad
    assert not mismatch_kl(log_ratio, torch.zeros_like(log_ratio), mask).requires_grad


def test_token_entropy_by_the_plain_loop() -> None:
    logits = torch.randn(3, 7, dtype=torch.float64)
    logits[0, 2] = -math.inf
    for row, found in zip(logits.tolist(), token_entropy(logits).tolist()):
        total = sum(math.exp(z) for z in row)
        p = [math.exp(z) / total for z in row]
        assert found == pytest.approx(-sum(q * math.log(q) for q in p if q > 0), rel=1e-12)


def test_token_entropy_gradient_is_exact_and_finite_at_probability_0() -> None:
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(token_entropy, (logits,))
    banned = torch.tensor([[0.0, 1.0, -math.inf]], requires_grad=True)
    token_entropy(banned).sum().backward()
    assert banned.grad.isfinite().all()
