"""Reading one row of a user's table: the prompt, the ground truth, and all other columns as JSON can hold them."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sota_grpo.tasks.dataset import DatasetError, Row

Chat = list[dict[str, Any]]


def plain_columns(row: Row, place: str) -> dict[str, Any]:
    """The columns with their types kept, as far as JSON has them: dates become ISO text, decimals numbers,
    arrays lists.

    Raises:
        DatasetError: a column of something else (bytes, images), which cannot travel to a grader's process.

    >>> plain_columns({"level": 3, "tags": ("a", "b"), "made": datetime.date(2026, 11, 2)}, "demo, row 1")
    {'level': 3, 'tags': ['a', 'b'], 'made': '2026-11-02'}
    """
    return {str(name): _plain(value, f"{place}: column {name!r}") for name, value in row.items()}


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(item, place) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, place) for item in value]
    if isinstance(value, (datetime.date, datetime.time)):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if hasattr(value, "tolist"):  # of NumPy, pandas and torch: rows that are passed as objects
        return _plain(value.tolist(), place)
    raise DatasetError(
        f"{place} holds {type(value).__name__}, which is neither text nor a number nor a list or dict of them; "
        "remove the column or write it as text."
    )


def chat_of(prompt: Any, place: str) -> Chat:
    """The turns of a chat prompt, without entries that are None (parquet fills them in).

    Raises:
        DatasetError: not a list of ``{"role", "content"}`` turns, content that is not text, no user turn, or an
            assistant's turn at the end.

    >>> chat_of([{"role": "user", "content": "2+2?", "name": None}], "demo, row 1")
    [{'role': 'user', 'content': '2+2?'}]
    """
    if not isinstance(prompt, list) or not prompt or not all(isinstance(turn, Mapping) for turn in prompt):
        raise DatasetError(
            f"{place} is neither text nor a chat; give a string, or a list of {{'role', 'content'}} turns."
        )
    for number, turn in enumerate(prompt, start=1):
        for name in ("role", "content"):
            if not isinstance(turn.get(name), str):
                found = f"holds {type(turn[name]).__name__}" if name in turn else "is missing"
                raise DatasetError(f"{place}, turn {number}: {name!r} {found}; both role and content must be text.")
    if prompt[-1]["role"] == "assistant" or not any(turn["role"] == "user" for turn in prompt):
        raise DatasetError(f"{place} asks nothing: a chat must hold a user turn and must not end in an assistant's.")
    return [{name: value for name, value in turn.items() if value is not None} for turn in prompt]


def last_user_turn(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """What is shown of a prompt."""
    if isinstance(prompt, str):
        return prompt
    return next(turn["content"] for turn in reversed(prompt) if turn["role"] == "user")


def ground_truth_of(columns: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The ground truth with its type: verl's, else the first of the columns ``names`` that holds one; None without any.

    >>> ground_truth_of({"data_source": "s", "reward_model": {"style": "rule", "ground_truth": "4"}}, ["ground_truth"])
    '4'
    """
    model = columns.get("reward_model")
    if "data_source" in columns and isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return next((columns[name] for name in names if columns.get(name) is not None), None)


def text_of_answer(ground_truth: Any) -> str:
    """The ground truth as it is shown and written to the rollouts: text as it is, all else as JSON."""
    if ground_truth is None or isinstance(ground_truth, str):
        return ground_truth or ""
    return json.dumps(ground_truth, ensure_ascii=False)
