"""Invariants and hand-computed numbers of the surrogates in sota_grpo.functional.loss_terms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sota_grpo import functional
from sota_grpo.functional import SURROGATES, cispo_surrogate, clipped_surrogate, clipped_tokens, dppo_surrogate
from sota_grpo.functional.loss_terms import capped_tokens, of_terms

ROWS, TOKENS = 6, 9


@pytest.fixture
def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs, and an advantage per row of which one is 0, in float64."""
    log_prob = -torch.rand(ROWS, TOKENS, dtype=torch.float64) * 3 - 0.1
    old = log_prob + torch.randn(ROWS, TOKENS, dtype=torch.float64)
    advantage = torch.randn(ROWS, 1, dtype=torch.float64)
    advantage[0], advantage[1], advantage[2] = 0.0, advantage[1].abs(), -advantage[2].abs()
    return log_prob.requires_grad_(), old, advantage


def clipped_token(low: float, high: float, dual: float | None = None):
    """The textbook form; as the others below, the loss of a token and its slope in the log-prob."""

    def token(rho: float, a: float, p: float) -> tuple[float, float]:
        clipped = min(max(rho, 1 - low), 1 + high)
        gain, slope = (rho * a, rho * a) if rho * a <= clipped * a else (clipped * a, 0.0)
        return (-dual * a, 0.0) if dual is not None and a < 0 and gain < dual * a else (-gain, -slope)

    return token


def cispo_token(rho: float, a: float, p: float) -> tuple[float, float]:
    weight = min(rho, 1.5) * a
    return -weight * math.log(p), -weight


def sapo_token(rho: float, a: float, p: float) -> tuple[float, float]:
    tau = 0.8 if a > 0 else 1.7
    gate = 1 / (1 + math.exp(-tau * (rho - 1)))
    return -4 / tau * gate * a, -4 * gate * (1 - gate) * rho * a


def dppo_token(rho: float, a: float, p: float) -> tuple[float, float]:
    change = p - p / rho
    kept = change <= 0.02 if a > 0 else change >= -0.3
    weight = min(rho, 2.0) * a * kept
    return -weight * math.log(p), -weight


WIDTHS = ((0.2, 0.2), (0.2, 0.28, 1.5), (1.0, 5.0, 3.0), (0.0, 0.0))
CLIPPED = {
    f"clipped {widths}": (
        lambda x, ratio, a, widths=widths: clipped_surrogate(ratio, a, *widths),
        clipped_token(*widths),
        lambda x, ratio, a, widths=widths: clipped_tokens(ratio, a, *widths),
    )
    for widths in WIDTHS
}
#: The loss, what the plain loop says of a token, and which tokens are clipped or masked: those of slope 0.
LOSSES = CLIPPED | {
    "cispo": (lambda x, ratio, a: cispo_surrogate(x, ratio, a, 0.5), cispo_token, None),
    "sapo": (lambda x, ratio, a: functional.sapo_surrogate(ratio, a, 0.8, 1.7), sapo_token, None),
    "dppo": (
        lambda x, ratio, a: dppo_surrogate(x, ratio, a, 0.3, 0.02, 2.0),
        dppo_token,
        lambda x, ratio, a: SURROGATES["dppo"].clipped(x, ratio, a, 0.3, 0.02),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_surrogate_of_tokens_equals_the_plain_loop_with_its_gradient(batch, name) -> None:
    log_prob, old, advantage = batch
    surrogate, token, stopped = LOSSES[name]
    ratio, close = log_prob - old, 1e-10 if name in ("sapo", "dppo") else 1e-12
    loss = surrogate(log_prob, ratio, advantage)
    loss.sum().backward()
    for i in range(ROWS):
        for t in range(TOKENS):
            a = advantage[i, 0].item()
            value, slope = token(math.exp(ratio[i, t].item()), a, math.exp(log_prob[i, t].item()))
            assert loss[i, t].item() == pytest.approx(value, rel=close, abs=1e-14)
            assert log_prob.grad[i, t].item() == pytest.approx(slope, rel=close, abs=1e-14)
    if stopped is not None:  # with a gradient of exactly 0, there and nowhere else
        where = stopped(log_prob, ratio, advantage)
        assert torch.equal(log_prob.grad == 0, where | (advantage == 0))
        assert not where[0].any()  # its advantage is 0


LEVELS = [(name, level) for name, one in SURROGATES.items() if one.reads("log_ratio") for level in one.ratios]


@pytest.mark.parametrize(("name", "level"), LEVELS)
def test_on_policy_gradient_is_that_of_reinforce(batch, name, level) -> None:
    """Of every surrogate that there is, whatever its widths."""
    log_prob, _, advantage = batch
    old, mask = log_prob.detach().clone(), torch.rand(ROWS, TOKENS) < 0.7
    weight = functional.loss_weights(mask, "sequence").double()
    ratio = log_prob - old if level == "token" else functional.sequence_log_ratio(log_prob, old, mask)
    terms = {"log_prob": log_prob, "log_ratio": ratio, "advantage": advantage, "mask": mask}
    loss = of_terms(SURROGATES[name].loss, {**terms, "clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.1})
    (gradient,) = torch.autograd.grad((weight * loss).sum(), log_prob)
    (expected,) = torch.autograd.grad((weight * functional.reinforce_surrogate(log_prob, advantage)).sum(), log_prob)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(expected, -(weight * advantage))


@pytest.mark.parametrize(
    ("name", "bounds"), [("clipped", [math.log1p(0.28), math.log1p(-0.2), math.log(1.5)]), ("gmpo", [0.28, -0.2])]
)
@pytest.mark.parametrize("beyond", [0.0, 1e-6])
def test_a_token_exactly_at_a_bound_keeps_its_gradient(name, bounds, beyond) -> None:
    """Above for A > 0, below and, for the dual clip, above for A < 0; whatever torch's own ``clamp`` does there."""
    side, advantage = (torch.tensor(signs)[: len(bounds), None] for signs in ([1.0, -1.0, 1.0], [1.0, -1.0, -1.0]))
    at = (torch.tensor(bounds)[:, None] + beyond * side).requires_grad_()
    terms = {"log_ratio": at, "advantage": advantage, "mask": torch.ones_like(at, dtype=torch.bool)}
    terms |= {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
    (gradient,) = torch.autograd.grad(of_terms(SURROGATES[name].loss, terms).sum(), at)
    assert of_terms(SURROGATES[name].clipped, terms).tolist() == [[beyond > 0]] * len(bounds)
    expected = 0 * at if beyond else -advantage * at.exp()
    torch.testing.assert_close(gradient, expected.detach(), rtol=1e-6, atol=0)


def test_an_overflowing_ratio_is_clipped_without_nan() -> None:
    """Nan itself is not hidden; and DPPO masks a ratio that moved its token, and caps one that did not."""
    log_ratio = torch.tensor([500.0, 500.0, 500.0, -500.0], requires_grad=True)
    advantage = torch.tensor([1.0, 0.0, -1.0, -1.0])
    loss = clipped_surrogate(log_ratio, advantage, 0.2, 0.25, 4.0)
    loss.sum().backward()
    torch.testing.assert_close(loss.detach(), torch.tensor([-1.25, 0.0, 4.0, 0.8]))
    assert log_ratio.grad.tolist() == [0.0] * 4
    assert clipped_surrogate(log_ratio, advantage, 0.2, 0.25)[2].item() == math.inf
    assert clipped_surrogate(torch.tensor([math.nan]), torch.tensor([1.0]), 0.2, 0.2).isnan().all()
    log_prob = torch.tensor([-1.0, -200.0], requires_grad=True)
    dppo_surrogate(log_prob, torch.tensor([500.0, 500.0]), torch.ones(2), 0.2, 0.2, 20.0).sum().backward()
    assert log_prob.grad.tolist() == [0.0, -20.0]


def by_hand_vespo(ratios: list[float], logs: list[float], a: float) -> tuple[list[float], list[float]]:
    k, rate = (1.5, 2.5) if a >= 0 else (4.0, 2.0)
    whole = math.prod(ratios)
    weight = whole**k * math.exp(rate * (1 - whole)) * a
    return [-weight * x for x in logs], [-weight] * len(logs)


def by_hand_sequence(ratios: list[float], logs: list[float], a: float) -> tuple[list[float], list[float]]:
    return [sum(map(math.log, ratios)) / max(len(ratios), 1)] * len(logs), [1.0] * len(logs)


def by_hand_gmpo(ratios: list[float], logs: list[float], a: float) -> tuple[list[float], list[float]]:
    bounded = [min(math.log(r), 0.5) if a >= 0 else min(max(math.log(r), -0.3), math.log(1.6)) for r in ratios]
    value = -a * math.exp(sum(bounded) / max(len(bounded), 1))
    return [value] * len(logs), [value if b == math.log(r) else 0.0 for b, r in zip(bounded, ratios)]


BY_HAND = {"vespo": by_hand_vespo, "gmpo": by_hand_gmpo, "sequence": by_hand_sequence}


@pytest.mark.parametrize("name", BY_HAND)
def test_what_rows_have_in_common_equals_the_plain_loop_with_its_gradient(batch, name) -> None:
    """The mean log-ratio of a row even if NaN is in a masked slot."""
    log_prob, old, advantage = batch
    ratio, mask = log_prob - old, torch.rand(ROWS, TOKENS) < 0.6
    mask[3] = False
    if name == "sequence":
        loss = functional.sequence_log_ratio(log_prob.masked_fill(~mask, math.nan), old, mask)
        assert not loss[~mask].any()
    elif name == "vespo":
        loss = functional.vespo_surrogate(log_prob, ratio, advantage, mask, 1.5, 2.5, 4.0, 2.0)
    else:
        loss = functional.gmpo_surrogate(ratio, advantage, mask, 0.3, 0.5, 1.6)
        clipped = SURROGATES["gmpo"].clipped(ratio, advantage, 0.3, 0.5, 1.6)
    loss.where(mask, 0.0).sum().backward()
    for i in range(ROWS):
        spots, a = mask[i].nonzero().flatten().tolist(), advantage[i, 0].item()
        ratios, logs = ([math.exp(ratio[i, t].item()) for t in spots], log_prob[i, spots].tolist())
        values, slopes = BY_HAND[name](ratios, logs, a)
        assert loss[i, spots].tolist() == pytest.approx(values, rel=1e-10, abs=1e-14)
        assert log_prob.grad[i, spots].tolist() == pytest.approx(slopes, rel=1e-10, abs=1e-14)
        assert not log_prob.grad[i, ~mask[i]].any()
        assert name != "gmpo" or clipped[i, spots].tolist() == [slope == 0 and a != 0 for slope in slopes]


@pytest.mark.parametrize("extreme", [500.0, -500.0])
@pytest.mark.parametrize("name", ["sapo", "vespo"])
def test_a_smooth_surrogate_is_finite_and_without_gradient_at_an_extreme_ratio(name, extreme) -> None:
    log_prob = torch.full((2, 3), -3.0, requires_grad=True)
    log_ratio = log_prob - log_prob.detach() + extreme
    advantage, mask = torch.tensor([[1.0], [-1.0]]), torch.ones(2, 3, dtype=torch.bool)
    terms = {"log_prob": log_prob, "log_ratio": log_ratio, "advantage": advantage, "mask": mask}
    loss = of_terms(SURROGATES[name].loss, terms)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert log_prob.grad.abs().max() < 1e-12


def test_meaningless_widths_are_refused() -> None:
    x = torch.zeros(1)
    for function, arguments, sentence in (
        (clipped_surrogate, (x, x, -0.1, 0.2), r"clip_low is -0\.1"),
        (cispo_surrogate, (x, x, x, math.nan), "clip_high is nan"),
        (capped_tokens, (x, x, -0.1), r"clip_high is -0\.1"),
        (functional.sapo_surrogate, (x, x, 1.0, 0), "tau_negative is 0; a temperature must be above 0"),
        (functional.vespo_surrogate, (x, x, x, x == 0, 2.0, 3.0, -1), "k_negative is -1; it must be above 0"),
        (dppo_surrogate, (x, x, x, 0.2, 0.2, 1.0), r"ratio_cap is 1\.0; .* greater than 1"),
        (functional.gmpo_surrogate, (x, x, x == 0, -1, 0.2), "clip_low is -1"),
        (clipped_tokens, (x, x, 0.2, 0.2, 1.0), r"dual_clip is 1\.0; .* greater than 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            function(*arguments)


def test_an_objective_without_a_hash_is_called_with_its_parameters() -> None:
    class Own:
        __hash__ = None

        def __call__(self, advantage: Tensor, **others: Tensor) -> Tensor:
            return advantage * len(others)

    one = torch.ones(1)
    assert float(of_terms(Own(), {"advantage": one, "mask": one, "log_prob": one})) == 2.0


def test_every_public_function_has_an_example() -> None:
    members = {name: getattr(functional, name) for name in functional.__all__}
    assert [name for name, member in members.items() if callable(member) and ">>>" not in member.__doc__] == []
