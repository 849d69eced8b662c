"""Laws and hand-computed numbers of sota_grpo.functional.surrogates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sota_grpo import functional
from sota_grpo.functional import (
    cispo_surrogate,
    clipped_surrogate,
    clipped_tokens,
    loss_weights,
    reinforce_surrogate,
    sequence_log_ratio,
)

ROWS, TOKENS = 6, 9


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    print("torch.manual_seed", torch.seed())


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, and an advantage per row of which one is 0, in float64."""
    log_prob = -torch.rand(ROWS, TOKENS, dtype=torch.float64) * 3 - 0.1
    old = log_prob + torch.randn(ROWS, TOKENS, dtype=torch.float64)
    advantage = torch.randn(ROWS, 1, dtype=torch.float64)
    advantage[0], advantage[1], advantage[2] = 0.0, advantage[1].abs(), -advantage[2].abs()
    return log_prob.requires_grad_(), old, advantage


def loop(log_ratio: Tensor, advantage: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    """The textbook form and its slope in the log-ratio, token by token."""
    values, slopes = torch.zeros_like(log_ratio), torch.zeros_like(log_ratio)
    for i in range(log_ratio.shape[0]):
        a = advantage[i, 0].item()
        for t in range(log_ratio.shape[1]):
            rho = math.exp(log_ratio[i, t].item())
            clipped = min(max(rho, 1 - low), 1 + high)
            objective, slope = (rho * a, rho * a) if rho * a <= clipped * a else (clipped * a, 0.0)
            if dual is not None and a < 0 and objective < dual * a:
                objective, slope = dual * a, 0.0
            values[i, t], slopes[i, t] = -objective, -slope
    return values, slopes


@pytest.mark.parametrize(
    ("low", "high", "dual"), [(0.2, 0.2, None), (0.2, 0.28, 1.5), (1.0, 5.0, 3.0), (0.0, 0.0, None)]
)
def test_clipped_equals_the_plain_loop_with_its_gradient(batch, low, high, dual) -> None:
    log_prob, old, advantage = batch
    loss = clipped_surrogate(log_prob - old, advantage, low, high, dual)
    loss.sum().backward()
    values, slopes = loop((log_prob - old).detach(), advantage, low, high, dual)
    torch.testing.assert_close(loss.detach(), values, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_prob.grad, slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dual", [None, 1.5])
def test_gradient_is_exactly_0_where_and_only_where_the_clip_says(batch, dual) -> None:
    log_prob, old, advantage = batch
    clipped_surrogate(log_prob - old, advantage, 0.2, 0.28, dual).sum().backward()
    clipped = clipped_tokens(log_prob - old, advantage, 0.2, 0.28, dual)
    signal = (advantage != 0).expand_as(clipped)
    assert clipped.any()
    assert torch.equal(log_prob.grad == 0, clipped | ~signal)


def test_clipped_numbers_by_hand() -> None:
    ratio = torch.tensor([1.5, 1.1, 0.5, 1.5, 0.9, 0.5, 9.0], dtype=torch.float64)
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    expected = torch.tensor([-2.56, -2.2, -1.0, 3.0, 1.8, 1.6, 6.0], dtype=torch.float64)
    torch.testing.assert_close(clipped_surrogate(ratio.log(), advantage, 0.2, 0.28, 3.0), expected)
    found = clipped_tokens(ratio.log(), advantage, 0.2, 0.28, 3.0)
    assert found.tolist() == [True, False, False, False, False, True, True]
    assert not clipped_tokens(ratio.log(), torch.zeros_like(ratio), 0.2, 0.28, 3.0).any()


@pytest.mark.parametrize("surrogate", ["clipped", "cispo", "sequence"])
def test_on_policy_gradient_is_that_of_reinforce(batch, surrogate) -> None:
    log_prob, _, advantage = batch
    old, mask = log_prob.detach().clone(), torch.rand(ROWS, TOKENS) < 0.7
    weight = loss_weights(mask, "sequence").double()
    ratio = log_prob - old
    loss = {
        "clipped": lambda: clipped_surrogate(ratio, advantage, 0.0, 0.0, 1.1),
        "cispo": lambda: cispo_surrogate(log_prob, ratio, advantage, 0.0),
        "sequence": lambda: clipped_surrogate(sequence_log_ratio(log_prob, old, mask), advantage, 3e-4, 4e-4),
    }[surrogate]()
    (gradient,) = torch.autograd.grad((weight * loss).sum(), log_prob)
    (expected,) = torch.autograd.grad((weight * reinforce_surrogate(log_prob, advantage)).sum(), log_prob)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(expected, -(weight * advantage))


def test_an_overflowing_ratio_is_clipped_without_nan() -> None:
    log_ratio = torch.tensor([500.0, 500.0, 500.0, -500.0], requires_grad=True)
    advantage = torch.tensor([1.0, 0.0, -1.0, -1.0])
    loss = clipped_surrogate(log_ratio, advantage, 0.2, 0.25, 4.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.25, 0.0, 4.0, 0.8]))
    assert log_ratio.grad.tolist() == [0.0] * 4
    assert clipped_surrogate(log_ratio, advantage, 0.2, 0.25)[2].item() == math.inf


def test_nan_is_not_hidden() -> None:
    assert clipped_surrogate(torch.tensor([math.nan]), torch.tensor([1.0]), 0.2, 0.2).isnan().all()


def test_cispo_by_the_plain_loop_keeps_every_gradient(batch) -> None:
    log_prob, old, advantage = batch
    loss = cispo_surrogate(log_prob, log_prob - old, advantage, 0.5)
    loss.sum().backward()
    for i in range(ROWS):
        for t in range(TOKENS):
            rho = min(math.exp(log_prob[i, t].item() - old[i, t].item()), 1.5)
            assert loss[i, t].item() == pytest.approx(-rho * advantage[i].item() * log_prob[i, t].item(), rel=1e-12)
            assert log_prob.grad[i, t].item() == pytest.approx(-rho * advantage[i].item(), rel=1e-12)
    assert (log_prob.grad[1:] != 0).all()


def test_sequence_ratio_by_the_plain_loop(batch) -> None:
    log_prob, old, _ = batch
    mask = torch.rand(ROWS, TOKENS) < 0.6
    mask[3] = False
    found = sequence_log_ratio(log_prob, old, mask)
    seed = torch.randn(ROWS, TOKENS, dtype=torch.float64)
    found.backward(seed)
    for i in range(ROWS):
        steps = [t for t in range(TOKENS) if mask[i, t]]
        mean = sum(log_prob[i, t].item() - old[i, t].item() for t in steps) / max(len(steps), 1)
        expected = [mean if t in steps else 0.0 for t in range(TOKENS)]
        assert found[i].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)
    assert torch.equal(log_prob.grad, torch.where(mask, seed, 0.0))


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_token_form_of_gspo_has_the_gradient_of_plain_gspo(batch, aggregation) -> None:
    log_prob, _, advantage = batch
    old = log_prob.detach() + 0.3 * torch.randn(ROWS, TOKENS, dtype=torch.float64)
    mask = torch.rand(ROWS, TOKENS) < 0.6
    mask[:, 0] = True
    weight = loss_weights(mask, aggregation, max_response_tokens=TOKENS).double()
    token_form = clipped_surrogate(sequence_log_ratio(log_prob, old, mask), advantage, 0.05, 0.05)
    mean = torch.where(mask, log_prob - old, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)
    plain_ratio = mean.exp().expand_as(log_prob)
    plain = -torch.minimum(plain_ratio * advantage, plain_ratio.clamp(0.95, 1.05) * advantage)
    (found,) = torch.autograd.grad((weight * token_form).sum(), log_prob)
    (expected,) = torch.autograd.grad((weight * plain).sum(), log_prob)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_nan_in_a_masked_slot_changes_no_sequence_ratio(batch) -> None:
    log_prob, old, _ = batch
    mask = torch.rand(ROWS, TOKENS) < 0.6
    clean = sequence_log_ratio(log_prob, old, mask)
    dirty = log_prob.detach().masked_fill(~mask, math.nan).requires_grad_()
    found = sequence_log_ratio(dirty, old.masked_fill(~mask, -math.inf), mask)
    found.sum().backward()
    assert torch.equal(found, clean)
    assert torch.equal(dirty.grad, mask.double())


def test_meaningless_widths_are_refused() -> None:
    x = torch.zeros(1)
    with pytest.raises(ValueError, match=r"clip_low is -0\.1"):
        clipped_surrogate(x, x, -0.1, 0.2)
    with pytest.raises(ValueError, match="clip_high is nan"):
        cispo_surrogate(x, x, x, math.nan)
    with pytest.raises(ValueError, match=r"dual_clip is 1\.0; .* greater than 1"):
        clipped_tokens(x, x, 0.2, 0.2, 1.0)


def test_every_public_function_has_an_example() -> None:
    members = {name: getattr(functional, name) for name in functional.__all__}
    assert [name for name, member in members.items() if callable(member) and ">>>" not in member.__doc__] == []
