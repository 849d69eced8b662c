"""Laws of what the gate reads from log-probs, on fresh random policies in float64."""

from __future__ import annotations

import secrets

import pytest
import torch
from torch import Tensor

from sota_grpo.functional.agreement import mean_ratio, temperature_slope

NUM_TOKENS, NUM_IDS = 20_000, 12


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def make_logits(generator: torch.Generator) -> Tensor:
    return 1.5 * torch.randn(NUM_TOKENS, NUM_IDS, generator=generator, dtype=torch.float64)


def sampled_gaps(engine: Tensor, trainer: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Gaps, and the trainer's log-probs and entropies, of tokens that the engine samples; logits ``[n, V]``."""
    ours, theirs = trainer.log_softmax(-1), engine.log_softmax(-1)
    ids = torch.multinomial(theirs.exp(), 1, generator=generator)
    entropy = -(ours.exp() * ours).sum(-1)
    own = ours.gather(1, ids).squeeze(1)
    return own - theirs.gather(1, ids).squeeze(1), own, entropy


def test_the_mean_ratio_is_one_for_any_two_policies_and_the_mass_that_is_left_under_a_cut(
    generator: torch.Generator,
) -> None:
    trainer = make_logits(generator)
    engine = trainer + 0.3 * torch.randn(trainer.shape, generator=generator, dtype=torch.float64)
    found = mean_ratio(sampled_gaps(engine, trainer, generator)[0])
    assert abs(found.value - 1) < 6 * found.error
    kept = engine >= engine.topk(4).values[:, -1:]
    found = mean_ratio(sampled_gaps(engine.masked_fill(~kept, -1e9), trainer, generator)[0])
    mass = float((trainer.softmax(-1) * kept).sum(-1).mean())
    assert abs(found.value - mass) < 6 * found.error
    assert 1 - mass > 12 * found.error


def test_the_slope_is_the_share_between_two_temperatures_and_nothing_under_rounding(
    generator: torch.Generator,
) -> None:
    logits = make_logits(generator)
    noise = 0.1 * torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    for ratio in (0.98, 1.0, 1.02):  # T_trainer / T_engine
        gap, log_prob, entropy = sampled_gaps(logits, logits / ratio, generator)
        found = temperature_slope(gap + noise, log_prob, entropy)
        assert abs(found.value - (1 - ratio)) < 6 * found.error + 2 * (1 - ratio) ** 2  # first order in 1 - ratio
        assert found.error < 2e-3


def test_slope_and_error_are_those_of_least_squares(generator: torch.Generator) -> None:
    """The normal equation of one variable without a constant, and White's sandwich around it."""
    score, entropy = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    gap = torch.randn(50, generator=generator, dtype=torch.float64)
    slope = torch.linalg.lstsq(score[:, None], gap[:, None]).solution.item()
    bread = 1 / (score @ score)
    meat = score @ torch.diag((gap - slope * score).square()) @ score
    found = temperature_slope(gap, score - entropy, entropy)
    assert found.value == pytest.approx(slope, rel=1e-10)
    assert found.error == pytest.approx(float((bread * meat * bread).sqrt()), rel=1e-10)
