"""A grader may raise, return or say anything: it costs its response, and the run sees nothing but a failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sota_grpo import keys
from sota_grpo.recording.run_log import rollout_rows
from sota_grpo.rewards.grading import WrongTerms, failed_score, guarded_scores
from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import LARGEST, Example, Sample, Score
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import write_scores

EXAMPLE = Example("2 + 2?", "4")


def graded(grader: Callable[[str, Example], Score]) -> Score:
    (score,) = guarded_scores(grader, ["right"], [("4", EXAMPLE)])
    return score


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), GeneratorExit("g")], ids=repr)
def test_whatever_a_grader_raises_costs_its_response(error: BaseException) -> None:
    actual = graded(Mock(spec=[], side_effect=error))
    assert actual.terms == {"right": 0.0}
    assert actual.error == f"{type(error).__name__}: {error}"
    assert failed_score(["a"], "ValueError: \x1b[2J\nstep 9/9").error == "ValueError: \\x1b[2J\\nstep 9/9"
    with pytest.raises(KeyboardInterrupt):  # the user's
        graded(Mock(spec=[], side_effect=KeyboardInterrupt))


@pytest.mark.parametrize(
    "returned",
    [
        None,
        Score({"right": "much"}, True),  # type: ignore[dict-item]
        Score({"right": 10**400}, True),
        Score({"right": 1e39}, True),  # infinite in float32
        Score({"right": float("nan")}, True),
        Score({"right": 1.0}, True, info={(1, 2): 3}),  # type: ignore[dict-item]
        Score({"right": 1.0}, True, info={"digits": 10**5000}),
        Score({"right": 1.0}, True, info={"object": object()}),
    ],
    ids=range(8),
)
def test_whatever_a_grader_returns_costs_its_response(returned: Any) -> None:
    actual = graded(lambda response, example: returned)
    assert actual.error is not None
    assert actual.terms == {"right": 0.0}
    assert not actual.success


def test_terms_that_the_task_does_not_name_end_the_run() -> None:
    grader = lambda response, example: Score({"left": 1.0}, True)  # noqa: E731
    for _ in range(2):  # alone, and as a group
        with pytest.raises(WrongTerms, match="left"):
            graded(grader)
        grader.score_group = lambda pairs: [grader("", EXAMPLE)] * len(pairs)  # type: ignore[attr-defined]


def test_a_row_to_which_no_term_applies_is_logged_without_terms() -> None:
    sample = Sample(torch.tensor([6]), torch.zeros(1), torch.zeros(1, dtype=torch.int64), False, text="4")
    rows = group_table(drawn_entries(1, EXAMPLE, [5]), [sample], None)
    rows.set(keys.ADVANTAGE, [torch.zeros(1, 1)])
    write_scores(rows, [Score({"a": None}, False, info={"x": 1})], {"a": 1.0})
    (plain,) = rollout_rows(rows, SimpleNamespace(decode=str))
    assert (plain["reward_terms"], plain["reward"]) == ({}, 0.0)
    assert plain["reward_info"].pop("error").startswith("NoReward: no term of the reward applies")
    assert json.dumps(plain["reward_info"]) == '{"x": 1}'


def test_the_largest_float32_is_a_reward() -> None:
    rows = RowTable(1, {})
    write_scores(rows, guarded_scores(lambda *_: Score({"a": LARGEST}, True), ["a"], [("", EXAMPLE)]), {"a": 1.0})
    assert rows.get(keys.REWARD).isfinite().all()
