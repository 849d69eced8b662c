"""Rows of IFEval's table and of RLVR-IFeval's: the prompt, and the instructions that it gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sota_grpo.rewards.ifeval.instructions import read_kwargs
from sota_grpo.rewards.ifeval.rlvr import instruction_of

Instructions = Sequence[tuple[str, Mapping[str, Any]]]


def read_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of a row of either table, empty where it is missing.

    Raises:
        ValueError: it is not text.

    >>> read_prompt({"messages": [{"role": "user", "content": "Hi"}], "ground_truth": "{}"}), read_prompt({})
    ('Hi', '')
    """
    if row.get("prompt") is None and row.get("messages") is not None:
        return _text(_user_turn(row["messages"]).get("content"), "messages")
    return _text(row.get("prompt"), "prompt")


def read_instructions(row: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The instruction ids of a row of either table, and the kwargs of each, checked.

    IFEval: ``instruction_id_list`` and ``kwargs``, a list with one mapping per instruction, or the JSON of it.
    RLVR-IFeval: ``ground_truth``, a constraint (:func:`sota_grpo.rewards.ifeval.rlvr.instruction_of`), a list of them,
    or the JSON of either.

    Raises:
        ValueError: a column that is missing or of the wrong form, an unknown instruction, kwargs that it cannot be
            checked with.

    >>> read_instructions({"instruction_id_list": ["startend:quotation"], "kwargs": '[{"num_words": null}]'})
    (['startend:quotation'], [{}])
    """
    if "instruction_id_list" in row:
        given = _of_ifeval(_plain(row["instruction_id_list"]), _plain(row.get("kwargs")))
    elif "ground_truth" in row:
        given = _of_rlvr(_plain(row["ground_truth"]))
    else:
        found = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"there is no column 'instruction_id_list' or 'ground_truth'; the columns found are {found}")
    return [name for name, _ in given], [read_kwargs(name, kwargs) for name, kwargs in given]


def _of_ifeval(ids: Any, kwargs: Any) -> Instructions:
    if not isinstance(ids, (list, tuple)) or not ids or not all(isinstance(name, str) for name in ids):
        raise ValueError(f"column 'instruction_id_list' holds {ids!r}, not a list of instructions")
    if not isinstance(kwargs, (list, tuple)) or len(kwargs) != len(ids):
        raise ValueError(f"column 'kwargs' does not hold one mapping for each of the {len(ids)} instructions")
    return list(zip(ids, [_mapping(one or {}, "kwargs") for one in kwargs], strict=True))


def _of_rlvr(ground_truth: Any) -> Instructions:
    constraints = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if not constraints:
        raise ValueError("column 'ground_truth' holds no constraint")
    return [instruction_of(_mapping(one, "ground_truth")) for one in constraints]


def _user_turn(messages: Any) -> Mapping[str, Any]:
    turns = messages if isinstance(messages, (list, tuple)) else [messages]
    if len(turns) != 1 or not isinstance(turns[0], Mapping) or turns[0].get("role") != "user":
        raise ValueError("column 'messages' does not hold one turn of the user")
    return turns[0]


def _text(value: Any, column: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not text")
    return value or ""


def _mapping(value: Any, column: str) -> Mapping[str, Any]:
    value = _plain(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not a mapping")
    return value


def _plain(value: Any) -> Any:
    """The value, read as JSON where it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{value[:80]!r} is not valid JSON") from None
