"""Rows and functions as arguments: what a run makes of them, and what it says to those that it cannot use."""

from __future__ import annotations

import datetime
import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

from sota_grpo.assembly.passed import PASSED, Passed, take
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import Config
from sota_grpo.errors import UserError

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]


def right(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def brief(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


def taken(*overrides: str, **objects: Any) -> tuple[Config, Passed]:
    config = Config()
    return config, take(config, overrides, **objects)


def lines(content: bytes | None) -> list[dict]:
    assert content is not None
    return [json.loads(line) for line in content.splitlines()]


def as_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


def as_frame() -> Any:
    import pandas

    return pandas.DataFrame(ROWS)


@pytest.mark.parametrize(
    "make",
    [lambda: ROWS, lambda: tuple(ROWS), lambda: iter(ROWS), as_dataset, as_frame],
    ids=["list", "tuple", "iterator", "datasets", "pandas"],
)
def test_every_table_gives_the_same_rows(make: Callable[[], Any]) -> None:
    config, passed = taken(dataset=make(), eval_dataset=ROWS[:3])
    assert (lines(passed.train_rows), lines(passed.eval_rows)) == (ROWS, ROWS[:3])
    assert (config.env.dataset, config.env.dataset_path) == ("table", PASSED)
    config = Config()
    config.env.dataset = "gsm8k"  # as an override has it
    take(config, ["env.dataset=gsm8k"], dataset=ROWS)
    assert config.env.dataset == "gsm8k"


def test_what_pandas_writes_for_a_missing_value_is_none() -> None:
    import pandas

    table = {"prompt": ["a", None], "ground_truth": [1.0, None], "day": [None, pandas.Timestamp("2026-11-02")]}
    frame = pandas.DataFrame(table).astype({"ground_truth": "Float64"})
    _, passed = taken(dataset=frame)
    assert lines(passed.train_rows) == [
        {"prompt": "a", "ground_truth": 1.0, "day": None},
        {"prompt": None, "ground_truth": None, "day": "2026-11-02T00:00:00"},
    ]


def test_columns_keep_their_types_as_far_as_json_has_them() -> None:
    row = {"prompt": "?", "n": numpy.int64(3), "x": numpy.arange(2), "day": datetime.date(2026, 11, 2), "none": None}
    _, passed = taken(dataset=[row])
    assert lines(passed.train_rows) == [{"prompt": "?", "n": 3, "x": [0, 1], "day": "2026-11-02", "none": None}]


def test_a_path_is_the_option_and_nothing_is_copied(tmp_path: Path) -> None:
    config, passed = taken(dataset=tmp_path / "a.jsonl", eval_dataset="b.jsonl")
    assert (config.env.dataset, config.env.dataset_path) == ("table", str(tmp_path / "a.jsonl"))
    assert config.env.eval_path == "b.jsonl"
    assert passed.signature == {}


@pytest.mark.parametrize(
    ("reward", "name", "functions"),
    [
        (right, "right", ["right"]),
        ([right, brief], ["right", "brief"], ["right", "brief"]),
        (["builtin", brief], ["builtin", "brief"], ["brief"]),
        ({"accuracy": right, "short": brief}, ["accuracy", "short"], ["accuracy", "short"]),
        (lambda solution_str: 1.0, "reward", ["reward"]),
        (functools.partial(right, ground_truth="4"), "right", ["right"]),
    ],
)
def test_functions_are_named_as_their_reward_terms(reward: Any, name: Any, functions: list[str]) -> None:
    config, passed = taken(reward=reward)
    assert (config.reward.path, config.reward.name) == (PASSED, name)
    assert list(passed.functions or {}) == functions


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ({"dataset": {"train": ROWS, "test": ROWS}}, r"is a dict with 'train', 'test'; give .*=splits\['train'\]"),
        ({"dataset": 3}, "dataset is a int; give a datasets.Dataset, a list of dicts"),
        ({"dataset": []}, "dataset has no rows"),
        ({"dataset": [ROWS[0], "2 + 2?"]}, "dataset, row 2 is a str, not a dict of its columns"),
        ({"dataset": [{"prompt": "?", "image": b"PNG"}]}, "dataset, row 1: column 'image' holds bytes"),
        ({"reward": "reward.py"}, r"reward holds 'reward.py', which is no function; .*reward\.path=FILE"),
        ({"reward": []}, "reward has the names"),
        ({"reward": [right, right]}, r"reward has the names \['right', 'right'\]; give different ones with a dict"),
        ({"reward": {"a b": right}}, "'a b' cannot be logged"),
        ({"reward": lambda text: 1.0}, r"reward: reward\(text\) is neither verl's"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(objects: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        taken(**objects)


@pytest.mark.parametrize(
    ("option", "objects"),
    [
        ("env.dataset_path", {"dataset": ROWS}),
        ("env.eval_path", {"eval_dataset": ROWS}),
        ("reward.path", {"reward": right}),
        ("reward.name", {"reward": right}),
    ],
)
def test_an_object_and_an_option_for_the_same_contradict_each_other(option: str, objects: dict[str, Any]) -> None:
    config = Config()
    section, _, name = option.partition(".")
    setattr(getattr(config, section), name, "other")
    with pytest.raises(UserError, match=f"{option}=other names another"):
        take(config, [], **objects)


def test_a_run_is_known_by_the_objects() -> None:
    def signature(**objects: Any) -> dict:
        return taken(**objects)[1].signature

    assert signature() == {}
    assert signature(dataset=ROWS) == signature(dataset=as_dataset())
    found = [
        signature(dataset=ROWS),
        signature(dataset=ROWS[1:]),
        signature(dataset=ROWS, eval_dataset=ROWS[:1]),
        signature(dataset=ROWS, reward=right),
        signature(dataset=ROWS, reward={"other": right}),
    ]
    assert all(one != other for index, one in enumerate(found) for other in found[index + 1 :])


def test_the_files_make_the_task_that_the_objects_make(tmp_path: Path) -> None:
    """What reads the config of the run later has the same examples and the same rewards."""
    config, passed = taken(dataset=ROWS, reward=[right, brief])
    passed.write(tmp_path, config)
    assert passed.run_dir == tmp_path
    first, later = task_of(config, passed.functions), task_of(config)
    assert list(first.train) == list(later.train)
    assert len(first.train) == 36
    assert len(first.heldout) == 4
    example = first.train[0]
    assert first.score(example.answer, example) == later.score(example.answer, example)
    assert first.score(example.answer, example).terms["right"] == 1.0


def test_what_cannot_travel_is_graded_in_this_process_if_told_so(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(solution_str: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(UserError, match=r"locked cannot be sent .*env\.reward_workers=0"):
        taken(reward=locked)
    config = Config()
    config.env.reward_workers = 0
    passed = take(config, ["env.reward_workers=0"], dataset=ROWS, reward=locked)
    passed.write(tmp_path, config)
    task = task_of(config, passed.functions)
    assert task.score("4", task.train[0]).terms == {"locked": 1.0}
    with pytest.raises(UserError, match="stayed in that process"):
        task_of(config)
