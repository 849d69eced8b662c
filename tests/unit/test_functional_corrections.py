"""Laws and hand-computed numbers of sota_grpo.functional.corrections."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from sota_grpo.functional import importance_weights


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
