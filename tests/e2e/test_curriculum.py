"""A run with a curriculum, cut in two: the same run, to the byte of its rollouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sota_grpo.run.app import train
from tests.config.test_config import composed
from tests.e2e.conftest import metrics, without_clock
from tests.e2e.test_tasks import TINY

GIVEN = (
    *(*TINY, "train.total_dialog_turns=80", "train.checkpoint_frequency=1", "logging.store_steps=false"),
    *("env.difficulty=5", "env.max_samples=200", "algorithm.dynamic_sampling=true"),
)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["level", "example"])
def test_a_curriculum_goes_on_where_it_stood(tmp_path: Path, by: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    given = (*GIVEN, f"env.curriculum={by}", "optimizer.schedule=constant")
    assert train(composed("grpo_cpu", *given), whole) == 5
    assert train(composed("grpo_cpu", *given, "train.total_dialog_turns=32", "eval.mode=off"), cut) == 2
    assert train(composed("grpo_cpu", *given, "eval.mode=off", f"train.resume={cut}"), cut) == 5
    both = [[row for row in metrics(place) if "grad_norm" in row] for place in (whole, cut)]
    assert without_clock(both[0]) == without_clock(both[1])
    assert (whole / "rollouts.jsonl").read_bytes() == (cut / "rollouts.jsonl").read_bytes()
    (first, *_) = [row for row in metrics(whole) if "eval/accuracy" in row]
    assert any(name.startswith("eval/task/level_") for name in first) == (by == "level")
    names = {name for row in both[0] for name in row if name.startswith("curriculum/")}
    assert ("curriculum/1/share" in names) if by == "level" else ("curriculum/seen" in names)
