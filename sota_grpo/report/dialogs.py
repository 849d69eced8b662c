"""Dialogs of several turns as a page shows them, from what ``rollouts.jsonl`` has of them, or a token mask alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sota_grpo.report.data import clipped, number, shown

_MOST_TURNS, _MOST_CALLS = 200, 50  # of a dialog and of a turn; what a run writes is far below
_MOST_NAME = 100


def dialog_columns(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The turns after the prompt, or None of a response that the policy wrote at one go.

    ``turns``, in the order of the tokens: ``role`` (empty where it is not known), ``said`` (1: the policy wrote it, and
    is trained on it), ``tokens`` and ``text``, which is missing where the tokens themselves are in the page; ``calls``
    with ``name``, ``arguments``, ``reply`` (null: none came) and ``error``. ``ended`` and ``lost`` say how a dialog
    with tools ended. Other than what a run writes is left out: the file may be anybody's.

    >>> found = dialog_columns({"pieces": ["4", "?"], "assistant": [True, False]})
    >>> [(turn["role"], turn["said"], turn["tokens"]) for turn in found["turns"]]
    [('assistant', 1, 1), ('', 0, 1)]
    """
    dialog, mask = row.get("dialog"), row.get("assistant")
    if not isinstance(dialog, dict):
        if not mask or all(mask):
            return None
        runs = [(said, len(list(each))) for said, each in groupby(map(bool, mask))]
        if len(runs) > _MOST_TURNS:
            return None
        return {"turns": [{"role": "assistant" if said else "", "said": int(said), "tokens": n} for said, n in runs]}
    given = dialog.get("turns")
    turns = [_turn(each, bool(row.get("pieces"))) for each in _dicts(given)[:_MOST_TURNS]]
    ended = {"ended": clipped_name(dialog.get("ended")), "lost": clipped_name(dialog.get("error"), 500)}
    return {"turns": turns, **{name: text for name, text in ended.items() if text}}


def prompt_turns(prompt: Any) -> list[dict[str, Any]]:
    """The chat that a prompt was made of, ``role`` and ``text`` of each turn; empty where it is not known."""
    return [
        {"role": clipped_name(turn.get("role")), "text": clipped(shown(turn.get("content") or ""))}
        for turn in _dicts(prompt)[:_MOST_TURNS]
    ]


def clipped_name(name: Any, most: int = _MOST_NAME) -> str:
    """A name, as long as it can be shown.

    >>> clipped_name(None), clipped_name("sum"), clipped_name("a" * 200)[-3:]
    ('', 'sum', 'aa…')
    """
    text = "" if name is None else shown(name)
    return text if len(text) <= most else text[: most - 1] + "…"


def _turn(turn: Mapping[str, Any], has_pieces: bool) -> dict[str, Any]:
    calls = [_call(each) for each in _dicts(turn.get("calls"))[:_MOST_CALLS]]
    return {
        "role": clipped_name(turn.get("role")),
        "said": int(turn.get("trained") is True),
        "tokens": number(turn.get("tokens")) or 0,
        **({} if has_pieces else {"text": clipped(str(turn.get("text") or ""))}),
        **({"calls": calls} if calls else {}),
    }


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    reply, arguments = call.get("reply"), call.get("arguments")
    given = arguments if isinstance(arguments, dict) else {"": arguments}
    return {
        "name": clipped_name(call.get("name")),
        "arguments": {clipped_name(name): clipped(shown(value)) for name, value in given.items()},
        "reply": None if reply is None else clipped(shown(reply)),
        "error": call.get("error") is True,
    }


def _dicts(values: Any) -> Sequence[Mapping[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []
