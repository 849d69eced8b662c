"""A dialog of several turns as it stands in ``rollouts.jsonl``: who said what, which tokens were trained on, what was
called and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from tensordict import TensorDictBase

from sota_grpo import keys

Turn = dict[str, Any]


def dialog_of(row: TensorDictBase, tokenizer: Any) -> dict[str, Any] | None:
    """The turns after the prompt; None of a response that the policy wrote at one go, without tools.

    ``turns`` are in the order of the tokens, each with ``role``, ``trained`` (whether the policy wrote it; the others
    are masked out of the loss), ``tokens`` (how many) and ``text`` (decoded, special tokens included). A turn of the
    policy with calls has ``calls``: ``name``, ``arguments``, ``reply`` (None: there was none) and ``error`` (whether
    the call failed). Of a dialog with tools, ``ended`` says how it ended (:class:`sota_grpo.envs.agents.ToolTalk`) and
    ``error`` why its environment was lost.

    Three tokens of the policy, two of a tool, one of the policy::

        mask    1 1 1 0 0 1
        turns   assistant 3, tool 2, assistant 1
    """
    ids = row.get(keys.RESPONSE_TOKENS)
    said = row.get(keys.ASSISTANT_MASK)[-len(ids) :]
    record = json.loads(row[keys.DIALOG], parse_constant=str) if keys.DIALOG in row.keys() else None  # noqa: SIM118
    if record is None and bool(said.all()):
        return None
    turns, start = [], 0
    for trained, each in groupby(said.tolist()):
        count = len(list(each))
        text = tokenizer.decode(ids[start : start + count])
        turns.append({"role": "assistant", "trained": trained, "tokens": count, "text": text})
        start += count
    _name_others(turns, record or {})
    ended = {name: record[name] for name in ("ended", "error") if record and name in record}
    return {"turns": turns, **ended}


def _name_others(turns: Sequence[Turn], record: Mapping[str, Any]) -> None:
    """Roles of masked turns, and calls of the others; what stands before the policy's first turn is of a user."""
    told = iter(_told(record))
    replied: Sequence[str] = ("user",)
    for turn in turns:
        if turn["trained"]:
            calls, replied = next(told, ([], ()))
            if calls:
                turn["calls"] = calls
        else:
            turn["role"] = " and ".join(dict.fromkeys(replied)) or "unknown"


def _told(record: Mapping[str, Any]) -> Iterator[tuple[list[dict[str, Any]], Sequence[str]]]:
    """For each turn of the policy: its calls, and the roles of those who answered."""
    for replies in record.get("replies", ()):
        yield [], [reply["role"] for reply in replies]
    messages, failed = record.get("messages", ()), set(record.get("failed", ()))
    at = 0
    while at < len(messages):
        end = next((i for i in range(at + 1, len(messages)) if messages[i]["role"] == "assistant"), len(messages))
        asked = [call["function"] for call in messages[at].get("tool_calls", ())]
        answers = [(messages[i]["content"], i in failed) for i in range(at + 1, end)]
        answers += [(None, False)] * (len(asked) - len(answers))
        yield (
            [{**call, "reply": reply, "error": error} for call, (reply, error) in zip(asked, answers)],
            [message["role"] for message in messages[at + 1 : end]],
        )
        at = end
