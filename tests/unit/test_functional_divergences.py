"""Laws and hand-computed numbers of sota_grpo.functional.divergences."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sota_grpo.functional import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    print("torch.manual_seed", torch.seed())


def test_by_the_plain_loop() -> None:
    log_prob, ref = -3 * torch.rand(2, 4, 7, dtype=torch.float64)
    for p, q, *found in zip(
        log_prob.flatten().tolist(),
        ref.flatten().tolist(),
        *(KL_ESTIMATORS[name](log_prob, ref).flatten().tolist() for name in ("k1", "k2", "k3")),
    ):
        expected = [p - q, (p - q) ** 2 / 2, math.exp(q - p) - (q - p) - 1]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-14)


def test_numbers_by_hand() -> None:
    log_prob, ref = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 1.0]).log()
    log2 = math.log(2)
    torch.testing.assert_close(kl_k1(log_prob, ref), torch.tensor([log2, -log2]))
    torch.testing.assert_close(kl_k2(log_prob, ref), torch.tensor([log2**2 / 2] * 2))
    torch.testing.assert_close(kl_k3(log_prob, ref), torch.tensor([0.5 + log2 - 1, 2 - log2 - 1]))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_equal_policies_have_exactly_0(name: str) -> None:
    log_prob = -torch.rand(50) * 20
    assert KL_ESTIMATORS[name](log_prob, log_prob.clone()).abs().max() == 0


def test_k3_keeps_its_digits_for_close_policies_in_float32() -> None:
    difference = torch.tensor([1e-3])
    assert kl_k3(difference, torch.zeros(1)).item() == pytest.approx(math.expm1(-1e-3) + 1e-3, rel=1e-3)


def two_policies() -> tuple[Tensor, Tensor]:
    return torch.randn(6, dtype=torch.float64).requires_grad_(), torch.randn(6, dtype=torch.float64).log_softmax(-1)


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_expected_value_is_the_kl(name: str) -> None:
    logits, ref = two_policies()
    log_prob = logits.log_softmax(-1)
    expected = (log_prob.exp() * KL_ESTIMATORS[name](log_prob, ref)).sum()
    torch.testing.assert_close(expected, kl(log_prob, ref))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_expected_gradient_in_the_loss(name: str) -> None:
    """Tokens are sampled, so their probabilities are constants: only the estimator is differentiated."""
    logits, ref = two_policies()
    log_prob = logits.log_softmax(-1)
    (found,) = torch.autograd.grad((log_prob.exp().detach() * KL_ESTIMATORS[name](log_prob, ref)).sum(), logits)
    log_prob = logits.log_softmax(-1)
    target = {"k1": 0 * logits.sum(), "k2": kl(log_prob, ref), "k3": kl(ref, log_prob)}[name]
    (expected,) = torch.autograd.grad(target, logits)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
