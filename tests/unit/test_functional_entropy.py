"""Laws and hand-computed numbers of sota_grpo.functional.divergences."""

from __future__ import annotations

import math

import pytest
import torch

from sota_grpo.functional import adapted_entropy_coef, top_entropy_tokens


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
    for i in range(6):
        for t in range(9):
            assert bool(kept[i, t]) == (bool(mask[i, t]) and entropy[i, t].item() >= threshold)
    assert kept.sum() == len(values) - math.ceil(position)


def test_the_place_of_a_quantile_that_is_one_of_the_values_is_not_rounded_up() -> None:
    """``(1 - 0.7) * 10`` is a little above 3 in floating point; the fourth value is the threshold."""
    assert (1 - 0.7) * 10 > 3
    kept = top_entropy_tokens(torch.arange(11.0), torch.ones(11).bool(), share=0.7)
    assert kept.tolist() == [False] * 3 + [True] * 8


def test_order_and_padding_decide_nothing_and_ties_are_all_kept() -> None:
    entropy = torch.randint(4, (30,)).double()
    mask = torch.ones(30, dtype=torch.bool)
    kept, order = top_entropy_tokens(entropy, mask, share=0.2), torch.randperm(30)
    assert torch.equal(top_entropy_tokens(entropy[order], mask, share=0.2), kept[order])
    assert torch.equal(kept, entropy >= entropy[kept].min())
    padded, real = torch.cat([entropy, torch.full((7,), 99.0)]), torch.cat([mask, torch.zeros(7).bool()])
    assert torch.equal(top_entropy_tokens(padded, real, share=0.2)[:30], kept)
    assert not top_entropy_tokens(entropy, ~mask, share=0.2).any()
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match="keep more than none"):
            top_entropy_tokens(entropy, mask, share=share)


def test_the_coefficient_follows_the_entropy_by_hand() -> None:
    """Target 1.0, steps of 0.25, at most 0.5: two steps up, held at the bound, two down, held at 0, up again."""
    entropies = [0.9, 1.0, 0.5, 1.5, 2.0, 2.0, 0.1]
    coef, seen = 0.0, []
    for entropy in entropies:
        coef, applied = adapted_entropy_coef(coef, entropy, target=1.0, delta=0.25, largest=0.5)
        seen.append((coef, applied))
    assert seen == [(0.25, 0.25), (0.5, 0.5), (0.5, 0.5), (0.25, 0.0), (0.0, 0.0), (0.0, 0.0), (0.25, 0.25)]
