"""Invariants and hand-computed numbers of sota_grpo.functional.weighting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sota_grpo.functional import loss_weights, row_weights, soft_overlong_penalty

AGGREGATIONS = ("token", "sequence", "constant")


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    print("torch.manual_seed", torch.seed())


def random_mask() -> Tensor:
    mask = torch.rand(7, 11) < 0.5
    mask[2] = False
    mask[0, 0] = True
    return mask


def test_the_table_of_the_module() -> None:
    lengths = torch.tensor([2, 0, 4])
    torch.testing.assert_close(row_weights(lengths, "token"), torch.tensor([1 / 6, 0, 1 / 6]))
    torch.testing.assert_close(row_weights(lengths, "sequence"), torch.tensor([1 / 4, 0, 1 / 8]))
    constant = row_weights(lengths, "constant", max_response_tokens=8)
    torch.testing.assert_close(constant, torch.tensor([1 / 24, 0, 1 / 24]))
    assert constant.dtype == torch.float32


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_by_the_plain_loop(aggregation: str) -> None:
    mask, x = random_mask(), torch.randn(7, 11, dtype=torch.float64)
    rows = [[x[i, t].item() for t in range(11) if mask[i, t]] for i in range(7)]
    expected = {
        "token": lambda: sum(map(sum, rows)) / sum(map(len, rows)),
        "sequence": lambda: sum(sum(r) / len(r) for r in rows if r) / sum(1 for r in rows if r),
        "constant": lambda: sum(map(sum, rows)) / (7 * 16),
    }[aggregation]()
    found = (loss_weights(mask, aggregation, max_response_tokens=16) * x).sum()
    assert found.item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_are_0_off_the_mask_and_equal_inside_a_row(aggregation: str) -> None:
    mask = random_mask()
    weights = loss_weights(mask, aggregation, max_response_tokens=11)
    assert torch.equal(weights != 0, mask)
    rows = row_weights(mask.sum(-1), aggregation, max_response_tokens=11)
    assert torch.equal(weights, rows.unsqueeze(-1) * mask)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_means_have_weights_that_sum_to_1(aggregation: str) -> None:
    assert loss_weights(random_mask(), aggregation).sum().item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_order_padding_and_split_change_nothing(aggregation: str) -> None:
    mask, x = random_mask(), torch.randn(7, 11)
    weights = loss_weights(mask, aggregation, max_response_tokens=11)
    order = torch.randperm(7)
    assert torch.equal(loss_weights(mask[order], aggregation, max_response_tokens=11), weights[order])
    padded = torch.nn.functional.pad(mask, (0, 5))
    assert torch.equal(loss_weights(padded, aggregation, max_response_tokens=11)[:, :11], weights)
    whole = (weights * x).double().sum()
    for size in (1, 2, 3):
        parts = sum((w * v).double().sum() for w, v in zip(weights.split(size), x.split(size)))
        torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


def test_an_empty_row_counts_under_constant_only() -> None:
    lengths, more = torch.tensor([3, 5]), torch.tensor([3, 5, 0])
    for aggregation in ("token", "sequence"):
        assert torch.equal(row_weights(more, aggregation)[:2], row_weights(lengths, aggregation))
    before, after = (row_weights(x, "constant", max_response_tokens=8)[0].item() for x in (lengths, more))
    assert before / after == pytest.approx(3 / 2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_without_trainable_tokens_weighs_nothing(aggregation: str) -> None:
    assert (
        loss_weights(torch.zeros(3, 4, dtype=torch.bool), aggregation, max_response_tokens=4).tolist()
        == [[0.0] * 4] * 3
    )


def test_soft_overlong_penalty_by_the_plain_loop() -> None:
    for length, found in zip(range(60), soft_overlong_penalty(torch.arange(60), 40, 16).tolist()):
        if length <= 24:
            expected = 0.0
        elif length <= 40:
            expected = (24 - length) / 16
        else:
            expected = -1.0
        assert found == expected
        assert math.copysign(1.0, found) == 1.0 or found < 0


def test_bad_input_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="aggregation is 'mean'; choose one of token, sequence, constant"):
        row_weights(torch.tensor([1]), "mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_response_tokens is None"):
        row_weights(torch.tensor([1]), "constant")
    with pytest.raises(ValueError, match=r"lengths must be \[N\], one per row, but it is \[1, 2\]"):
        row_weights(torch.ones(1, 2), "token")
    with pytest.raises(ValueError, match="buffer_tokens is 50 and max_tokens is 40"):
        soft_overlong_penalty(torch.tensor([1]), 40, 50)
