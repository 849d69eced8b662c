"""The groups of a page: never above the budget, spread over the run, tokens as the trainer's mathematics says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from sota_grpo.functional.loss_terms import kl_k1, kl_k2, kl_k3
from sota_grpo.recording.metrics import METRICS
from sota_grpo.report import data as module
from sota_grpo.report.data import RunData, charts, curves, names, read_run, safe_json, stride_for
from sota_grpo.report.groups import (
    choose_groups,
    dialog_columns,
    plain_group,
    prompt_turns,
    spread,
    token_columns,
)
from tests.report_rigs import ODD, WORDS, damaged, write_run

OF_TASK = [name.rpartition("/")[2] for name in METRICS if name.startswith("task/")]


def chosen(run_dir: Path, budget: int) -> tuple[list[dict[str, Any]], Any]:
    actual = choose_groups(read_run(run_dir), budget)
    texts = [safe_json(group) for group in actual["groups"]]
    assert sum(len(text.encode()) for text in texts) <= budget
    return [json.loads(text) for text in texts], actual["record"]


def test_every_step_has_its_place_in_the_order_and_the_first_are_evenly_spread() -> None:
    assert all(sorted(spread(count)) == list(range(count)) for count in (0, 1, 2, 3, 10, 1025))
    for taken in (3, 5, 9, 17, 33):
        assert {b - a for a, b in pairwise(sorted(spread(1025)[:taken]))} == {1024 // (taken - 1)}


def test_everything_is_shown_where_it_fits(tmp_path: Path) -> None:
    groups, actual = chosen(write_run(tmp_path, steps=5, groups=3), 1_000_000)
    assert [(group["step"], group["id"]) for group in groups] == [(i // 3, i) for i in range(15)]
    assert actual["total"] == 15
    assert actual["ages"] == [(0, 3 * 5), (1, 2 * 5)]  # five samples a step; those of odd steps are a version old
    zero, cut, plain = groups[:3]
    assert (zero["zero"], zero["cut"], len(zero["samples"])) == (True, False, 1)
    assert (cut["zero"], cut["cut"], len(cut["samples"])) == (False, True, 2)
    assert plain["samples"][0]["terms"] == {"correct": 1}


def test_a_small_page_has_the_newest_step_the_first_and_the_middle(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "long", steps=101, groups=8, siblings=2)
    whole = sum(len(json.dumps(group)) for group in chosen(run_dir, 10_000_000)[0])
    groups, actual = chosen(run_dir, whole // 20)
    steps = sorted({group["step"] for group in groups})
    assert {0, 50, 100} <= set(steps)
    assert max(b - a for a, b in pairwise(steps)) <= 25
    assert actual["total"] == 808
    assert len(groups) < 80

    # a group too large for the page does not end it
    run_dir = write_run(tmp_path / "large", steps=3, response=lambda step, *_: "a" * (19_000 if step == 2 else 5))
    groups, _ = chosen(run_dir, 9_000)
    assert {group["step"] for group in groups} == {0, 1}


def test_stored_steps_show_all_samples_with_their_tokens_and_damaged_ones_are_left_out(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, steps=6, groups=2, siblings=4, stored=[0, 4])
    groups, actual = chosen(run_dir, 1_000_000)
    whole = [group for group in groups if group["whole"]]
    assert (actual["stored"], len(groups), actual["total"]) == ([0, 4], 12, 12)
    assert [(group["step"], len(group["samples"])) for group in whole] == [(0, 4), (0, 4), (4, 4), (4, 4)]
    sample = whole[0]["samples"][0]
    assert sample["pieces"] == list(WORDS)
    assert sample["ratio"] == [float(f"{math.exp(0.11 * i):.3g}") for i in range(len(WORDS))]
    assert sample["entropy"] == list(range(len(WORDS)))
    assert "said" not in sample
    (run_dir / "steps" / "step_000000.pt").write_bytes(b"torn")
    assert chosen(run_dir, 1_000_000)[1]["stored"] == [4]


@pytest.mark.parametrize(("name", "reference"), [("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)])
def test_the_kl_of_a_token_is_the_trainers(name: str, reference: Callable) -> None:
    policy, other = [-1.0, -0.5, -3.0, -1.0], [-1.0, -2.0, -0.25, -1.5]
    row = {"pieces": list("abcd"), "assistant": [True] * 4, "log_probs": [-9.0] * 4, "policy_log_probs": policy}
    actual = token_columns(row | {"ref_log_probs": other}, name)
    expected = reference(torch.tensor(policy, dtype=torch.float64), torch.tensor(other, dtype=torch.float64))
    assert actual["kl"] == [float(f"{value:.3g}") for value in expected.tolist()]


def test_tokens_that_the_policy_did_not_write_have_no_numbers_and_others_finite_ones() -> None:
    row = {"pieces": ["a", "tool", "b"], "assistant": [True, False, True], "log_probs": [-1.0, 0.0, -1.0]}
    actual = token_columns(row | {"policy_log_probs": [-1.0, 0.0, -1.0], "entropy": [1.0, 0.0, 2.0]}, "k3")
    assert actual == {"pieces": ["a", "tool", "b"], "said": [1, 0, 1], "ratio": [1, None, 1], "entropy": [1, None, 2]}
    row = {"pieces": ["a"], "assistant": [True], "log_probs": [-1e6], "policy_log_probs": [0.0], "ref_log_probs": [1e6]}
    actual = token_columns(row, "k3")
    assert json.dumps([actual["ratio"], actual["kl"]], allow_nan=False)
    count = 10_000  # of which the ends are kept
    actual = token_columns({"pieces": ["a"] * count, "assistant": [True] * count, "entropy": list(range(count))}, "k3")
    assert actual["gap"] == [2500, 7000]
    assert actual["entropy"] == [*range(2500), *range(9500, 10_000)]


CALL = {"name": "add", "arguments": {"x": 1, "y": [2]}, "reply": "3", "error": False}
DIALOG = {
    "prompt": [{"role": "user", "content": "Add!"}],
    "turns": [
        {"role": "assistant", "trained": True, "tokens": 4, "text": "call", "calls": [CALL]},
        {"role": "tool", "trained": False, "tokens": 3, "text": "three"},
        {"role": "assistant", "trained": True, "tokens": 2, "text": "3"},
    ],
    "ended": "answer",
    "error": None,
}


def test_a_group_of_dialogs_has_their_turns_and_its_prompts(tmp_path: Path) -> None:
    """Where the tokens are stored they are the text, and the turns say how many each has."""
    fields = lambda step, *_: {"dialog": DIALOG, "task": "tools"} if step else {}  # noqa: E731
    run_dir = write_run(tmp_path, steps=3, groups=2, stored=[2], fields=fields)
    groups, _ = chosen(run_dir, 1_000_000)
    old, plain, stored = groups[0], groups[2], groups[4]
    assert "turns" not in old
    assert "turns" not in old["samples"][0]
    assert old["samples"][0]["text"] == "".join(WORDS)
    for group in (plain, stored):
        assert (group["task"], group["turns"]) == ("tools", [{"role": "user", "text": "Add!"}])
        sample = group["samples"][0]
        assert sample["ended"] == "answer"
        assert not {"text", "lost"} & sample.keys()
        turns = [(turn["role"], turn["said"], turn["tokens"]) for turn in sample["turns"]]
        assert turns == [("assistant", 1, 4), ("tool", 0, 3), ("assistant", 1, 2)]
        assert sample["turns"][0]["calls"] == [{**CALL, "arguments": {"x": "1", "y": "[2]"}}]
    assert [turn["text"] for turn in plain["samples"][0]["turns"]] == ["call", "three", "3"]
    assert stored["samples"][0]["pieces"] == list(WORDS)
    assert all("text" not in turn for turn in stored["samples"][0]["turns"])


def test_whatever_is_in_a_dialog_the_page_is_made_and_small() -> None:
    row = {"step": 0, "group_id": 0, "sample_id": 0, "reward": 0.5, "response": "hello"}
    for _ in range(300):
        dialog = damaged(DIALOG, 0.2)
        group = plain_group([{**row, "dialog": dialog, "task": random.choice(ODD)}], whole=False)
        text = json.dumps(group, allow_nan=False)
        assert len(text) < 300_000, dialog
        (sample,) = group["samples"]
        assert ("text" in sample) == (not sample.get("turns")), dialog
        for turn in sample.get("turns", []):
            assert isinstance(turn["role"], str), dialog
            assert len(turn["role"]) <= 100, dialog
    assert len(dialog_columns({"dialog": {"turns": [DIALOG["turns"][0]] * 10_000}})["turns"]) == 200
    assert len(prompt_turns([{"role": "user", "content": "x"}] * 10_000)) == 200


def run_of(*rows: dict[str, Any]) -> RunData:
    return RunData(Path("."), list(rows), {}, None, "stopped", "", None, 0.0)


@pytest.mark.parametrize("num_tasks", [1, 24])
def test_metrics_of_several_tasks_are_one_chart_and_every_metric_is_in_one(num_tasks: int) -> None:
    """Of the entries of a mixture, and of the tasks within each entry."""
    tasks = [f"t{number:02}" for number in range(num_tasks)]
    of_tasks = [f"task/{task}/{name}" for task in [*tasks, *(f"gym/{task}" for task in tasks)] for name in OF_TASK]
    of_tasks += [f"{before}/{task}/correct" for before in ("reward", "eval/reward", "grader") for task in tasks]
    of_tasks += [f"eval/task/{task}" for task in [*tasks, *(f"gym/{task}" for task in tasks)]]
    names_read = [*names([dict.fromkeys(METRICS)]), *of_tasks, "reward/format", "grader/acc", "task/<b>/reward", "zeal"]
    random.shuffle(names_read)
    actual = charts([{name: name for name in names_read}])
    assert sorted(metric for chart in actual for _, metric in chart["members"]) == sorted(names_read)
    assert len({chart["name"] for chart in actual}) == len(actual)
    several = {chart["name"]: chart["members"] for chart in actual if len(chart["members"]) > 1}
    if num_tasks == 1:
        assert several == {}
        assert {chart["name"] for chart in actual} == {*names_read}
        return
    assert len(several) == 2 * len(OF_TASK) + 3 + 2
    assert several["task/*/reward"] == [(task, f"task/{task}/reward") for task in tasks]
    assert several["task/gym/*/reward"] == [(task, f"task/gym/{task}/reward") for task in tasks]
    assert several["grader/*/correct"] == [(task, f"grader/{task}/correct") for task in tasks]
    titles = {chart["name"]: (chart["title"], chart["family"]) for chart in actual}
    assert titles["task/gym/*/success"] == ("Success by task of gym", "Tasks")
    assert titles["eval/task/gym/*"] == ("Held-out accuracies of gym", "Tasks")
    assert titles["eval/reward/*/correct"] == ("eval/reward/correct by task", "Further evaluation metrics")
    assert titles["task/<b>/reward"] == ("", "Tasks")


def test_every_metric_has_a_family_and_those_of_tools_have_titles_in_a_mixture_too() -> None:
    every = charts([{name: name for name in names([dict.fromkeys(METRICS)])}])
    assert {chart["family"] for chart in every} == {*module.FAMILIES}
    actual = charts([dict.fromkeys(f"grader/{task}tool_errors" for task in ("", "a/", "b/"))])
    assert [(chart["name"], chart["title"], chart["sentence"]) for chart in actual] == [
        ("grader/tool_errors", "Tool errors per dialog", METRICS["grader/tool_errors"].sentence),
        ("grader/*/tool_errors", "Tool errors per dialog by task", METRICS["grader/tool_errors"].sentence),
    ]


def test_errors_by_hand() -> None:
    """A step of 16 responses: 0.4 / 4; then one of 64: 0.4 / 8, and sqrt(0.25 * 0.75 / 64)."""
    row = {"reward": 0.5, "reward/std": 0.4, "success": 0.25, "truncated": 0.0, "eval/accuracy": 0.5}
    rows = [row | {"step": step, "dialog_turns": count, "eval/stderr": 0.03} for step, count in ((2, 16), (3, 80))]
    actual = {name: error["v"] for name, error in curves(run_of(*rows))["errors"].items()}
    assert actual.pop("success")[1] == round(math.sqrt(0.1875 / 64), 6)
    assert actual == {"reward": [0.1, 0.05], "truncated": [0, 0], "eval/accuracy": [0.03, 0.03]}


def test_curves_have_three_x_axes_and_keep_by_place_what_most_steps_lack() -> None:
    rows = [{"step": step, "dialog_turns": 8 * (step + 1), "time/step_s": 2.0, "kl": None} for step in range(3)]
    rows += [{"step": 3, "eval/accuracy": 0.5, "time/eval_s": 1.0}]
    actual = curves(run_of(*rows))
    assert actual["steps"] == [0, 1, 2, 3]
    assert actual["responses"] == [8, 16, 24, 24]
    assert actual["seconds"] == [2, 4, 6, 7]
    assert actual["columns"]["eval/accuracy"] == {"i": [3], "v": [0.5]}
    assert "kl" not in actual["columns"]
    row = {"step": 0, "reward": math.inf, "odd": "text", "list": [1], "kl": 0.5, "reward/std": math.nan}
    assert curves(run_of(row | {"dialog_turns": 8}))["columns"] == {"kl": {"v": [0.5]}}


def test_thinning_keeps_evaluations_the_last_step_and_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"step": step, "reward": 0.5, "time/step_s": 1.0} for step in range(12)]
    rows[5]["eval/accuracy"] = 0.5
    monkeypatch.setattr(module, "NUMBERS", 9)  # 12 rows of 3 metrics: every fourth stays
    assert stride_for([run_of(*rows)]) == 4
    actual = curves(run_of(*rows), 4)
    assert actual["steps"] == [0, 4, 5, 8, 11]
    assert actual["seconds"] == [1, 5, 6, 9, 12]
