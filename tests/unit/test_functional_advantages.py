"""Invariants and hand-computed numbers of sota_grpo.functional.advantages."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sota_grpo.functional import decoupled_rewards, group_advantages, soft_overlong_penalty, zero_advantage_mask

BASELINES = ("group_mean", "leave_one_out", "length_weighted", "best_of_others", "batch_mean", "none")
SCALES = ("group_std", "group_mean", "batch_std", "advantage_std", "none")
GROUP_BASELINES = BASELINES[:4]
GROUP_SCALES = ("group_std", "group_mean")


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def reference(
    rewards: list[float], ids: list[int], lengths: list[int], baseline: str, scale: str, eps: float
) -> list[float]:
    def centred(i: int) -> float:
        siblings = [j for j, group in enumerate(ids) if group == ids[i]]
        others = [rewards[j] for j in siblings if j != i]
        uses_group = baseline in GROUP_BASELINES or scale in GROUP_SCALES
        uses_batch = baseline == "batch_mean" or scale in ("batch_std", "advantage_std")
        if (uses_group and len({rewards[j] for j in siblings}) == 1) or (uses_batch and len(set(rewards)) == 1):
            return 0.0
        if baseline == "best_of_others":
            return max(0.0, rewards[i] - max(others))
        tokens = [lengths[j] for j in siblings]
        baselines = {
            "group_mean": sum(rewards[j] for j in siblings) / len(siblings),
            "leave_one_out": sum(others) / max(len(others), 1),
            "length_weighted": sum(n * rewards[j] for n, j in zip(tokens, siblings)) / max(sum(tokens), 1),
            "batch_mean": sum(rewards) / len(rewards),
            "none": 0.0,
        }
        return rewards[i] - baselines[baseline]

    differences = [centred(i) for i in range(len(rewards))]
    advantages = []
    for difference, group in zip(differences, ids):
        siblings = [r for r, g in zip(rewards, ids) if g == group]
        divisor = {
            "group_std": std(siblings) + eps,
            "group_mean": sum(siblings) / len(siblings),
            "batch_std": std(rewards) + eps,
            "advantage_std": std(differences) + eps,
            "none": 1.0,
        }[scale]
        advantages.append(difference / divisor if difference else 0.0)
    return advantages


def ragged_groups() -> torch.Tensor:
    """Groups of 2 to 6 members with large, unordered ids, shuffled."""
    sizes = torch.randint(2, 7, (5,))
    ids = torch.randperm(10**6)[:5].repeat_interleave(sizes) * 10**9
    return ids[torch.randperm(len(ids))]


@pytest.mark.parametrize(("baseline", "scale"), list(product(BASELINES, SCALES)))
def test_equals_the_plain_loop(baseline: str, scale: str) -> None:
    ids = ragged_groups()
    rewards = torch.randint(0, 3, ids.shape).double() / 7
    lengths = torch.randint(0, 9, ids.shape)
    expected = reference(rewards.tolist(), ids.tolist(), lengths.tolist(), baseline, scale, 1e-6)
    actual = group_advantages(rewards, ids, baseline=baseline, scale=scale, lengths=lengths)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_seven_rewards_of_0_3_give_exactly_0() -> None:
    """Their mean is not 0.3 after rounding: in float32 arithmetic the quotient by eps alone is 0.029."""
    ids, lengths = torch.tensor([5] * 7 + [2, 2]), torch.arange(1, 10)
    for dtype, baseline, scale in product((torch.float32, torch.float64), GROUP_BASELINES, SCALES):
        rewards = torch.tensor([0.3] * 7 + [0.0, 1.0], dtype=dtype)
        actual = group_advantages(rewards, ids, baseline=baseline, scale=scale, lengths=lengths)
        assert actual[:7].tolist() == [0.0] * 7, (dtype, baseline, scale)
        assert actual[8] > 0.4
    low, pair = torch.tensor(0.3), torch.zeros(2, dtype=torch.int64)
    rewards = torch.stack([low, torch.nextafter(low, torch.tensor(1.0))])  # the smallest difference is a signal
    assert not zero_advantage_mask(rewards, pair).any()
    assert group_advantages(rewards, pair, scale="none")[1] > 0
    # an estimator that gives 0.2 to every response of unequal rewards: there is no spread to divide by
    rewards, own = torch.tensor([1.0, 0.0, 3.0, 5.0]), torch.full((4,), 0.2)
    assert not group_advantages(rewards, torch.tensor([0, 0, 1, 1]), baseline=own, scale="advantage_std").any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("terms", [*product(["batch_mean"], SCALES), ("none", "batch_std")])
def test_a_constant_batch_gives_exactly_0_against_the_batch(terms: tuple[str, str], dtype: torch.dtype) -> None:
    rewards, ids = torch.full((7,), 0.3, dtype=dtype), torch.arange(7) // 2
    assert group_advantages(rewards, ids, baseline=terms[0], scale=terms[1]).tolist() == [0.0] * 7


def test_a_group_of_one_is_0_or_refused_and_rewards_may_be_integers_or_none() -> None:
    rewards, ids = torch.tensor([5.0, 1.0, 2.0]), torch.tensor([9, 1, 1])
    assert group_advantages(rewards, ids)[0] == 0.0
    with pytest.raises(ValueError, match="leave_one_out needs at least 2 responses in every group, but 1 of 2"):
        group_advantages(rewards, ids, baseline="leave_one_out")
    actual, none = group_advantages(torch.tensor([1, 0]), torch.tensor([0, 0]), scale="none"), torch.zeros(0)
    assert actual.dtype == torch.float32
    assert actual.tolist() == [0.5, -0.5]
    assert group_advantages(none, none.long()).shape == zero_advantage_mask(none, none.long()).shape == (0,)


class OperatorCount(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_ten_thousand_rows_take_as_many_operators_as_four() -> None:
    counts = []
    for n in (4, 10_000):
        ids, rewards = torch.arange(n) // 2, torch.rand(n)
        with OperatorCount() as operators:
            group_advantages(rewards, ids, baseline="leave_one_out", scale="none")
        counts.append(operators.count)
    assert counts[0] == counts[1]


def test_bad_input_is_refused_in_a_sentence() -> None:
    zeros = torch.zeros(2)
    for rewards, options, sentence in (
        (torch.tensor([0.0, math.nan]), {}, "reward of row 1 is nan"),
        (torch.zeros(2, 1), {}, r"they are \[2, 1\] and \[2\]"),
        (
            *(torch.tensor([1.0, -0.5]), {"scale": "group_mean"}),
            r"reward of row 1 is -0\.5; scale 'group_mean' divides by the mean",
        ),
        (zeros, {"baseline": "length_weighted"}, "needs lengths"),
        (zeros, {"baseline": torch.ones(2, 1)}, r"baseline has shape \[2, 1\]; .* shape \[2\]"),
        (
            zeros[:1],
            {"baseline": "best_of_others"},
            "best_of_others needs at least 2 responses in every group, but 1 of 1",
        ),
        (zeros, {"baseline": "mean"}, "baseline is 'mean'; choose one of group_mean"),
        (zeros, {"scale": "std"}, "scale is 'std'; choose one of group_std"),
    ):
        with pytest.raises(ValueError, match=sentence):
            group_advantages(rewards, torch.zeros(len(rewards), dtype=torch.int64), **options)


def test_decoupled_rewards_by_the_plain_loop() -> None:
    """A term is compared with those siblings that have it; where all terms are constant the sum is exactly 0."""
    ids = torch.arange(24) // 4
    terms, weights = torch.rand(24, 3, dtype=torch.float64), torch.tensor([1.0, 0.3, -2.0])
    terms[torch.rand(24, 3) < 0.2] = math.nan
    terms[4:8] = torch.tensor([0.3, 0.7, 0.1])
    expected = [0.0] * 24
    for k, weight in enumerate(weights.tolist()):
        for group in range(6):
            members = [i for i in range(24) if ids[i] == group and not terms[i, k].isnan()]
            values = [terms[i, k].item() for i in members]
            for i in members if len(set(values)) > 1 else ():
                expected[i] += weight * (terms[i, k].item() - sum(values) / len(values)) / (std(values) + 1e-6)
    actual = decoupled_rewards(terms, weights, ids)
    assert actual.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert actual[4:8].tolist() == [0.0] * 4
    assert abs(actual.mean().item()) < 1e-9
    with pytest.raises(ValueError, match=r"they are \[24, 3\], \[2\] and \[24\]"):
        decoupled_rewards(terms, weights[:2], ids)


def test_soft_overlong_penalty_by_the_plain_loop() -> None:
    for length, actual in zip(range(60), soft_overlong_penalty(torch.arange(60), 40, 16).tolist()):
        expected = 0.0 if length <= 24 else max((24 - length) / 16, -1.0)
        assert actual == expected
        assert math.copysign(1.0, actual) == 1.0 or actual < 0
