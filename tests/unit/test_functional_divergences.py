"""Invariants and hand-computed numbers of KL, correction weights and entropy control, and of the gate's estimates."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from sota_grpo.functional import (
    KL_ESTIMATORS,
    adapted_entropy_coef,
    importance_weights,
    kl_k3,
    off_policy_tokens,
    top_entropy_tokens,
)
from sota_grpo.training.gate import mean_ratio, temperature_slope

# levels and modes of a correction
WAYS = list(product(("token", "sequence", "geometric"), ("truncate", "mask", "reject")))
NUM_TOKENS, NUM_IDS = 20_000, 12  # of the policies whose agreement is measured


def test_by_the_plain_loop() -> None:
    log_prob, ref = -3 * torch.rand(2, 4, 7, dtype=torch.float64)
    for p, q, *actual in zip(
        log_prob.flatten().tolist(),
        ref.flatten().tolist(),
        *(KL_ESTIMATORS[name](log_prob, ref).flatten().tolist() for name in ("k1", "k2", "k3")),
    ):
        expected = [p - q, (p - q) ** 2 / 2, math.exp(q - p) - (q - p) - 1]
        assert actual == pytest.approx(expected, rel=1e-9, abs=1e-14)
    close = kl_k3(torch.tensor([1e-3]), torch.zeros(1)).item()  # k3 keeps its digits in float32
    assert close == pytest.approx(math.expm1(-1e-3) + 1e-3, rel=1e-3)


def random_rows() -> tuple[Tensor, Tensor]:
    mask = torch.rand(5, 8) < 0.6
    mask[1], mask[0, 0] = False, True
    return 0.7 * torch.randn(5, 8, dtype=torch.float64), mask


@pytest.mark.parametrize(("level", "mode"), WAYS)
@pytest.mark.parametrize("floor", [0.0, 0.7])
def test_importance_weights_by_the_plain_loop(level: str, mode: str, floor: float) -> None:
    log_ratio, mask = random_rows()
    actual = importance_weights(log_ratio.requires_grad_(), mask, level=level, mode=mode, cap=1.3, floor=floor)
    assert not actual.requires_grad
    assert actual.dtype == torch.float64
    for i, t in product(range(5), range(8)):
        if not mask[i, t]:
            assert actual[i, t] == 0
            continue
        ratios = [math.exp(log_ratio[i, s].item()) for s in range(8) if mask[i, s]]
        whole = math.prod(ratios)
        weight = {"token": math.exp(log_ratio[i, t].item()), "sequence": whole, "geometric": whole ** (1 / len(ratios))}
        inside = floor <= weight[level] <= 1.3
        truncated = max(floor, min(weight[level], 1.3))
        bounded = {"truncate": truncated, "mask": inside * weight[level], "reject": float(inside)}
        assert actual[i, t].item() == pytest.approx(bounded[mode], rel=1e-12)


def test_off_policy_tokens_by_the_plain_loop() -> None:
    log_prob, behaviour = torch.randn(2, 40, 8, dtype=torch.float64)
    mask, advantage = torch.rand(40, 8) < 0.6, torch.randint(-1, 2, (40, 1))
    mask[1] = False
    mask[2:4], behaviour[2:4], advantage[2], advantage[3] = True, log_prob[2:4] + 1, -1, 0
    dirty = log_prob.masked_fill(~mask, math.nan).requires_grad_()
    actual = off_policy_tokens(dirty, behaviour, advantage, mask, threshold=0.1)
    assert not actual.requires_grad
    assert actual[2].all()
    for i in range(40):
        gaps = [(behaviour[i, t] - log_prob[i, t]).item() for t in range(8) if mask[i, t]]
        stale = bool(gaps) and advantage[i] < 0 and sum(gaps) / len(gaps) > 0.1
        assert actual[i].tolist() == [bool(stale) and trained for trained in mask[i].tolist()]


@pytest.mark.parametrize(("level", "mode"), WAYS)
def test_equal_policies_have_weight_exactly_1(level: str, mode: str) -> None:
    """As has a long row whose ratios cancel, at the level of rows."""
    mask = random_rows()[1]
    weights = importance_weights(torch.zeros(5, 8), mask, level=level, mode=mode, cap=1.0)
    assert torch.equal(weights, mask.float())
    log_ratio = torch.tensor([[90.0] * 50 + [-90.0] * 50], dtype=torch.float64)
    if level != "token":
        whole = importance_weights(log_ratio, torch.ones(1, 100) > 0, level=level, mode=mode, cap=2.0)
        assert torch.equal(whole, torch.ones(1, 100, dtype=torch.float64))


@pytest.mark.parametrize(("level", "mode"), WAYS)
def test_extreme_and_masked_values_do_no_harm(level: str, mode: str) -> None:
    log_ratio = torch.tensor([[400.0, 400.0, math.nan], [-400.0, -400.0, math.inf]])
    mask = torch.tensor([[True, True, False]] * 2)
    above = 2.0 if mode == "truncate" else 0.0
    actual = importance_weights(log_ratio, mask, level=level, mode=mode, cap=2.0)
    below = 1.0 if mode == "reject" else 0.0  # there is no floor
    assert actual.tolist() == [[above, above, 0.0], [below, below, 0.0]]


def test_bad_corrections_are_refused() -> None:
    x, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    for options, sentence in (
        ({"level": "row"}, "level is 'row'"),
        ({"mode": "clip"}, "mode is 'clip'"),
        ({"floor": 1.0}, r"floor is 1\.0 and cap is 1\.0"),
        ({"cap": 0}, "cap is 0"),
    ):
        with pytest.raises(ValueError, match=sentence):
            importance_weights(x, mask, **{"level": "token", "mode": "mask", "cap": 1.0, **options})
    with pytest.raises(ValueError, match=r"threshold is -0\.1"):
        off_policy_tokens(x, x, x, mask, threshold=-0.1)
    assert not off_policy_tokens(x, x, x - 1, mask, threshold=0.0).any()


def make_logits() -> Tensor:
    return 1.5 * torch.randn(NUM_TOKENS, NUM_IDS, dtype=torch.float64)


def sampled_gaps(engine: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gaps, and the trainer's log-probs and entropies, of tokens that the engine samples; logits ``[n, V]``."""
    ours, theirs = trainer.log_softmax(-1), engine.log_softmax(-1)
    ids = torch.multinomial(theirs.exp(), 1)
    entropy = -(ours.exp() * ours).sum(-1)
    own = ours.gather(1, ids).squeeze(1)
    return own - theirs.gather(1, ids).squeeze(1), own, entropy


def test_the_mean_ratio_is_one_for_any_two_policies_and_the_mass_that_is_left_under_a_cut() -> None:
    trainer = make_logits()
    engine = trainer + 0.3 * torch.randn(trainer.shape, dtype=torch.float64)
    actual = mean_ratio(sampled_gaps(engine, trainer)[0])
    assert abs(actual.value - 1) < 6 * actual.error
    kept = engine >= engine.topk(4).values[:, -1:]
    actual = mean_ratio(sampled_gaps(engine.masked_fill(~kept, -1e9), trainer)[0])
    mass = float((trainer.softmax(-1) * kept).sum(-1).mean())
    assert abs(actual.value - mass) < 6 * actual.error
    assert 1 - mass > 12 * actual.error


def test_the_slope_is_the_share_between_two_temperatures_and_nothing_under_rounding() -> None:
    logits = make_logits()
    noise = 0.1 * torch.randn(NUM_TOKENS, dtype=torch.float64)
    for ratio in (0.98, 1.0, 1.02):  # T_trainer / T_engine
        gap, log_prob, entropy = sampled_gaps(logits, logits / ratio)
        actual = temperature_slope(gap + noise, log_prob, entropy)
        assert abs(actual.value - (1 - ratio)) < 6 * actual.error + 2 * (1 - ratio) ** 2  # first order in 1 - ratio
        assert actual.error < 2e-3


def test_slope_and_error_are_those_of_least_squares() -> None:
    """The normal equation of one variable without a constant, and White's sandwich around it."""
    score, entropy = torch.randn(2, 50, dtype=torch.float64)
    gap = torch.randn(50, dtype=torch.float64)
    slope = torch.linalg.lstsq(score[:, None], gap[:, None]).solution.item()
    bread = 1 / (score @ score)
    meat = score @ torch.diag((gap - slope * score).square()) @ score
    actual = temperature_slope(gap, score - entropy, entropy)
    assert actual.value == pytest.approx(slope, rel=1e-10)
    assert actual.error == pytest.approx(float((bread * meat * bread).sqrt()), rel=1e-10)


@pytest.mark.parametrize("share", [0.01, 0.2, 1 / 3, 0.5, 0.9, 1.0])
def test_the_tokens_above_the_quantile_are_kept(share: float) -> None:
    """By a loop over Python floats: a token is kept unless more than its share of the others lie below it."""
    entropy = torch.rand(6, 9, dtype=torch.float64) + 0.01
    mask = torch.rand(6, 9) < 0.7
    kept = top_entropy_tokens(entropy.masked_fill(~mask, torch.nan), mask, share=share)
    values = sorted(entropy[mask].tolist())
    position = round((1 - share) * (len(values) - 1), 9)
    low, high = values[math.floor(position)], values[math.ceil(position)]
    threshold = low + (high - low) * (position - math.floor(position))  # linear between the two
    assert torch.equal(kept, mask & (entropy >= threshold))
    assert kept.sum() == len(values) - math.ceil(position)


def test_order_padding_and_rounding_decide_nothing_and_ties_are_all_kept() -> None:
    entropy = torch.randint(4, (30,)).double()
    mask = torch.ones(30, dtype=torch.bool)
    kept, order = top_entropy_tokens(entropy, mask, share=0.2), torch.randperm(30)
    assert torch.equal(top_entropy_tokens(entropy[order], mask, share=0.2), kept[order])
    assert torch.equal(kept, entropy >= entropy[kept].min())
    padded, real = torch.cat([entropy, torch.full((7,), 99.0)]), torch.cat([mask, torch.zeros(7).bool()])
    assert torch.equal(top_entropy_tokens(padded, real, share=0.2)[:30], kept)
    assert not top_entropy_tokens(entropy, ~mask, share=0.2).any()
    assert (1 - 0.7) * 10 > 3  # in floating point; the fourth value is the threshold all the same
    kept = top_entropy_tokens(torch.arange(11.0), torch.ones(11).bool(), share=0.7)
    assert kept.tolist() == [False] * 3 + [True] * 8
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="must be above 0 and at most 1"):
            top_entropy_tokens(entropy, mask, share=share)


def test_the_coefficient_follows_the_entropy_by_hand() -> None:
    """Target 1.0, steps of 0.25, at most 0.5: two steps up, held at the bound, two down, held at 0, up again."""
    coef, seen = 0.0, []
    for entropy in (0.9, 1.0, 0.5, 1.5, 2.0, 2.0, 0.1):
        coef, applied = adapted_entropy_coef(coef, entropy, target=1.0, delta=0.25, largest=0.5)
        seen.append((coef, applied))
    assert seen == [(0.25, 0.25), (0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.0, 0.0), (0.0, 0.0), (0.25, 0.25)]
