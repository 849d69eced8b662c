"""The columns of a page: every metric has its place, errors are by hand, thinning keeps the ends."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.recording.metrics import METRICS, OF_TASK
from sota_grpo.report import data as module
from sota_grpo.report.data import BANDS, RunData, charts, curves, family, names, stride_for


def run_of(*rows: dict[str, Any]) -> RunData:
    return RunData(Path("."), list(rows), {}, None, "stopped", "", None, 0.0)


def test_every_metric_of_the_glossary_has_a_family() -> None:
    shown = names([dict.fromkeys(METRICS)])
    assert {family(name) for name in shown} == {title for title, _ in module.FAMILIES}


@pytest.mark.parametrize("num_tasks", [1, 24])
def test_metrics_of_several_tasks_are_one_chart_and_every_metric_is_in_one(num_tasks: int) -> None:
    """Of the entries of a mixture, and of the tasks within each entry."""
    tasks = [f"t{number:02}" for number in range(num_tasks)]
    of_tasks = [f"task/{task}/{name}" for task in [*tasks, *(f"gym/{task}" for task in tasks)] for name in OF_TASK]
    of_tasks += [f"{before}/{task}/correct" for before in ("reward", "eval/reward", "grader") for task in tasks]
    of_tasks += [f"eval/task/{task}" for task in [*tasks, *(f"gym/{task}" for task in tasks)]]
    given = [*names([dict.fromkeys(METRICS)]), *of_tasks, "reward/format", "grader/acc", "task/<b>/reward", "zeal"]
    random.shuffle(given)
    found = charts(given)
    assert sorted(metric for chart in found for _, metric in chart["members"]) == sorted(given)
    assert len({chart["name"] for chart in found}) == len(found)
    several = {chart["name"]: chart["members"] for chart in found if len(chart["members"]) > 1}
    if num_tasks == 1:
        assert several == {}
        assert {chart["name"] for chart in found} == {*given}
        return
    assert len(several) == 2 * len(OF_TASK) + 3 + 2
    assert several["task/*/reward"] == [(task, f"task/{task}/reward") for task in tasks]
    assert several["task/gym/*/reward"] == [(task, f"task/gym/{task}/reward") for task in tasks]
    assert several["grader/*/correct"] == [(task, f"grader/{task}/correct") for task in tasks]
    titles = {chart["name"]: (chart["title"], chart["family"]) for chart in found}
    assert titles["task/gym/*/success"] == ("Success by task of gym", "Tasks")
    assert titles["eval/task/gym/*"] == ("Held-out accuracies of gym", "Tasks")
    assert titles["eval/reward/*/correct"] == ("eval/reward/correct by task", "Evaluation beside its accuracy")
    assert titles["task/<b>/reward"] == ("", "Tasks")


def test_metrics_of_tools_have_titles_and_sentences_in_a_mixture_too() -> None:
    found = charts([f"grader/{task}tool_errors" for task in ("", "a/", "b/")])
    assert [(chart["name"], chart["title"], chart["sentence"]) for chart in found] == [
        ("grader/tool_errors", "Tool errors per dialog", METRICS["grader/tool_errors"].sentence),
        ("grader/*/tool_errors", "Tool errors per dialog by task", METRICS["grader/tool_errors"].sentence),
    ]


def test_errors_by_hand() -> None:
    """64 responses per step: 0.4 / 8, and sqrt(0.25 * 0.75 / 64)."""
    row = {"step": 3, "dialog_turns": 256, "reward": 0.5, "reward/std": 0.4, "success": 0.25, "truncated": 0.0}
    found = curves(run_of(row | {"eval/accuracy": 0.5, "eval/stderr": 0.03}))["errors"]
    assert found["reward"]["v"] == [0.05]
    assert found["success"]["v"] == [round(math.sqrt(0.1875 / 64), 6)]
    assert found["truncated"]["v"] == [0]
    assert found["eval/accuracy"]["v"] == [0.03]
    assert "eval/avg_at_k" not in found


def test_no_error_without_the_number_of_responses() -> None:
    assert curves(run_of({"step": 0, "reward": 0.5, "reward/std": 0.4, "success": 0.5}))["errors"] == {}


def test_what_most_steps_lack_is_kept_by_place() -> None:
    rows = [{"step": step, "reward": step / 8, "kl": None} for step in range(8)]
    rows[6]["eval/accuracy"] = 0.5
    found = curves(run_of(*rows))["columns"]
    assert found["eval/accuracy"] == {"i": [6], "v": [0.5]}
    assert found["reward"] == {"v": [step / 8 for step in range(8)]}
    assert "kl" not in found


def test_the_x_axes() -> None:
    rows = [{"step": step, "dialog_turns": 8 * (step + 1), "time/step_s": 2.0} for step in range(3)]
    rows += [{"step": 3, "eval/accuracy": 0.5, "time/eval_s": 1.0}]
    found = curves(run_of(*rows))
    assert found["steps"] == [0, 1, 2, 3]
    assert found["responses"] == [8, 16, 24, 24]
    assert found["seconds"] == [2, 4, 6, 7]


def test_thinning_keeps_evaluations_the_last_step_and_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": step, "reward": 0.5, "time/step_s": 1.0} for step in range(12)]
    rows[5]["eval/accuracy"] = 0.5
    monkeypatch.setattr(module, "NUMBERS", 9)  # 12 rows of 3 metrics: every fourth stays
    assert stride_for([run_of(*rows)]) == 4
    found = curves(run_of(*rows), 4)
    assert found["steps"] == [0, 4, 5, 8, 11]
    assert found["seconds"] == [1, 5, 6, 9, 12]


def test_whatever_stands_in_a_metric_no_infinity_reaches_the_page() -> None:
    row = {"step": 0, "reward": math.inf, "odd": "text", "list": [1], "kl": 0.5, "reward/std": math.nan}
    assert curves(run_of(row | {"dialog_turns": 8}))["columns"] == {"kl": {"v": [0.5]}}


def test_bands_are_of_metrics_that_exist() -> None:
    assert BANDS.keys() <= METRICS.keys()
