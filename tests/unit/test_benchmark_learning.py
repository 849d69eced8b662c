"""The learning benchmark compares like with like: TRL's first step is ours, and both are measured by one evaluator."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")

from benchmarks.learning import Comparison, Estimate, area, asked, train_ours
from benchmarks.learning_trl import agreement, composed, drawn_examples, train_trl, trl_arguments
from sota_grpo.assembly.sampling import task_of
from tests.builders import generator

pytestmark = pytest.mark.bench
SMALL = (
    *("env.num_envs=16", "env.repeats=4", "train.dialog_turns_per_batch=16", "train.optim_batch_size=16"),
    *("train.total_dialog_turns=32", "eval.every=1", "eval.num_samples=32", "eval.avg_at_k=0", "check.mode=off"),
)


def fresh(*overrides: str) -> list[str]:
    quick = ("engine=transformers", "env.max_samples=64", "env.num_heldout=32", "env.reward_workers=0")
    return [*quick, f"seed={generator().initial_seed() % 2**31}", *overrides]


@pytest.mark.slow
def test_first_batch_and_first_step_equal_trls(tmp_path: Path) -> None:
    actual = agreement(fresh(), tmp_path)
    assert actual.num_prompts == actual.equal_prompts == 16
    assert actual.equal_greedy >= 15  # two logits may be tied up to rounding
    assert actual.end_tokens == ((2,), (2,))
    assert actual.step_gap_same_eps < 2e-5
    # groups with rewards 0 and 1 have a standard deviation of 0.35 to 0.54, to which TRL adds 1e-4
    assert actual.step_gap_same_eps < actual.step_gap < 3e-4


@pytest.mark.slow
def test_both_are_asked_the_same_and_measured_alike(tmp_path: Path) -> None:
    changes = fresh(*SMALL, "optimizer.lr=1", "train.optim_batch_size=8")  # two optimizer steps for each batch
    config = composed(*changes)
    assert trl_arguments(config, tmp_path, 4).generation_batch_size == 16
    ours, theirs = train_ours(changes, 16, tmp_path / "ours"), train_trl(config, tmp_path / "trl")
    assert ours.accuracy.keys() == theirs.accuracy.keys() == {0, 16, 32}
    assert ours.accuracy[0] == theirs.accuracy[0] > 0
    for curve in (ours, theirs):  # a step this long leaves no policy: what is measured moves
        assert curve.accuracy[32] <= 1 / 32 < curve.accuracy[0], "one of 32 answers may be right by chance"
    assert min(ours.train_s, theirs.train_s) > 0
    assert asked(tmp_path / "ours") == [example.query for example in drawn_examples(config, task_of(config))]


def test_the_error_of_the_difference_is_that_of_the_pairs() -> None:
    """Seeds differ by much more than the two programs do: pairs see the difference, two means would not."""
    actual = Comparison.of([(0.5, 0.4), (0.7, 0.62), (0.9, 0.84)])
    assert actual.gain == Estimate(pytest.approx(0.08), pytest.approx(0.02 / math.sqrt(3)))
    assert actual.ours.error == pytest.approx(0.2 / math.sqrt(3))
    assert actual.spread == pytest.approx(math.sqrt((0.2**2 + 0.22**2) / 3))
    other, verdicts = Estimate(0.0, 1.0), ["yes", "within 1 s.e.", "within 2 s.e.", "no"]
    gains = (Estimate(mean, 1.0) for mean in (0.0, -0.5, -1.5, -2.5))
    assert [Comparison(other, other, gain).verdict() for gain in gains] == verdicts
    assert area({0: 0.0, 10: 0.5, 40: 0.5}) == pytest.approx((10 * 0.25 + 30 * 0.5) / 40)  # the mean height
