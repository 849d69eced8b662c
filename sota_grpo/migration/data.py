"""The data of a run, as verl and TRL read them: what it trains on, and the held-out problems that it measures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.migration.graders import example_columns
from sota_grpo.records import Example
from sota_grpo.tasks.base import Task


def verl_rows(task: Task, examples: Sequence[Example], split: str) -> Iterator[dict[str, Any]]:
    """verl's five columns; the example stands in ``extra_info``, where our grader looks for it.

    >>> from sota_grpo.tasks import make_task
    >>> task = make_task("arithmetic", num_train=1, num_heldout=1)
    >>> list(next(verl_rows(task, task.train, "train")))
    ['data_source', 'prompt', 'ability', 'reward_model', 'extra_info']
    """
    for index, example in enumerate(examples):
        yield {
            "data_source": task.name,
            "prompt": task.messages(example),
            "ability": task.name,
            "reward_model": {"style": "rule", "ground_truth": example.answer},
            "extra_info": {"index": index, "split": split, **example_columns(example)},
        }


def trl_rows(task: Task, examples: Sequence[Example]) -> Iterator[dict[str, Any]]:
    """A chat as ``prompt``, and the columns that our grader reads."""
    for example in examples:
        yield {"prompt": task.messages(example), **example_columns(example)}


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """All rows in one file.

    Raises:
        UserError: there are no rows, or the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    listed = list(rows)
    if not listed:
        raise UserError(f"There is nothing to write to {path.name}: the task has no such problems.")
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from error


def write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """One JSON object per line.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}).") from error
