"""A dialog in ``rollouts.jsonl``: its turns are its tokens, each once, and calls are shown with their results."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sota_grpo import keys
from sota_grpo.recording.run_files import ROLLOUTS_FILE
from sota_grpo.recording.run_log import ROLLOUT_FIELDS, RunLog, dialog_of, rollout_rows
from sota_grpo.report.groups import dialog_columns, scan
from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import SUBTASK, TASK, Example, Sample
from sota_grpo.rl.table import Key, RowTable
from tests.unit.test_recording import rollout

EXAMPLE = Example("?", "!")


class Letters:
    def decode(self, ids: Any, **_: bool) -> str:
        return "".join(chr(int(each)) for each in ids)


def row_of(
    turns: list[tuple[str, bool]], record: dict[str, Any] | None = None, example: Example = EXAMPLE
) -> dict[Key, Any]:
    """A row whose turns are these texts, one token per character, True where the policy wrote it."""
    ids = torch.tensor([ord(letter) for text, _ in turns for letter in text])
    mask = torch.tensor([trained for text, trained in turns for _ in text])
    sample = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids), dtype=torch.int64), False, mask, record)
    (row,) = group_table(drawn_entries(0, example, [80, 81]), [sample], Letters()).rows()
    return row


def spoken(text: str, *calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if calls else {})}


def replied(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "f", "content": content}


def test_calls_are_shown_with_their_replies_and_masked_turns_with_their_role() -> None:
    messages = [spoken("a", ("f", {"x": 1}), ("g", {})), replied("one"), replied("error: no"), spoken("b", ("f", {}))]
    record = {"messages": messages, "failed": [2], "ended": "turns", "error": None, "reward": math.nan}
    row = row_of([("Begin", False), ("call call", True), ("one, error: no", False), ("again", True)], record)
    assert dialog_of(row, Letters()) == {
        "turns": [
            {"role": "user", "trained": False, "tokens": 5, "text": "Begin"},
            {
                **{"role": "assistant", "trained": True, "tokens": 9, "text": "call call"},
                "calls": [
                    {"name": "f", "arguments": {"x": 1}, "reply": "one", "error": False},
                    {"name": "g", "arguments": {}, "reply": "error: no", "error": True},
                ],
            },
            {"role": "tool", "trained": False, "tokens": 14, "text": "one, error: no"},
            {
                **{"role": "assistant", "trained": True, "tokens": 5, "text": "again"},
                "calls": [{"name": "f", "arguments": {}, "reply": None, "error": False}],
            },
        ],
        "ended": "turns",
        "error": None,
    }


@pytest.mark.parametrize(
    ("record", "roles"),
    [
        ({"replies": [[{"role": "user", "content": "no"}], [{"role": "tool", "content": "4"}]]}, ("user", "tool")),
        (None, ("unknown", "unknown")),
        ({"ended": "answer"}, ("unknown", "unknown")),  # of another partner
    ],
)
def test_a_graded_dialog_has_the_roles_of_its_replies_or_the_mask_says_who_spoke(record: Any, roles: Any) -> None:
    row = row_of([("a", True), ("no", False), ("b", True), ("4", False), ("c", True)], record)
    dialog = dialog_of(row, Letters())
    assert dialog.keys() == {"turns", *(record or {})} - {"replies"}
    assert not any("calls" in turn for turn in dialog["turns"])
    turns = [(turn["role"], turn["trained"]) for turn in dialog["turns"]]
    assert turns[::2] == [("assistant", True)] * 3
    assert turns[1::2] == [(role, False) for role in roles]


def test_a_turn_of_a_tree_says_what_it_follows() -> None:
    """``ab`` and ``cd`` follow the prompt, ``e`` follows ``a``, ``g`` begins another prompt after ``f``."""
    row = row_of([("ab", True), ("cd", True), ("e", False), ("f", True), ("g", False), ("h", True)], {"messages": []})
    begun = len(row[keys.ASSISTANT_MASK]) - 8
    parents = torch.arange(-1, begun + 7)
    parents[begun + 2], parents[begun + 4], parents[begun + 6] = begun - 1, begun, -1
    row[keys.PARENTS] = parents
    turns = dialog_of(row, Letters())["turns"]
    assert [(turn["role"], turn["text"], turn.get("after")) for turn in turns] == [
        *(("assistant", "ab", None), ("assistant", "cd", -1), ("context", "e", 0), ("assistant", "f", None)),
        *(("context", "g", -2), ("assistant", "h", None)),
    ]
    page = dialog_columns({"dialog": {"turns": turns}})
    assert [turn.get("after") for turn in page["turns"]] == [None, -1, 0, None, -2, None]


def test_rows_have_their_task_and_dialogs_the_chat_that_they_began_with() -> None:
    """Beside rows that have neither, as in a mixture."""
    tagged = Example("What?", "!", {TASK: "gym", SUBTASK: "sums"})
    turns = [("a", True), ("no", False), ("b", True)]
    rows = [row_of(turns, {"replies": []}, tagged), row_of([("abc", True)]), row_of(turns, None, Example("Why?", "!"))]
    for row in rows:
        zero = torch.zeros(1)
        row |= {keys.ADVANTAGE: zero[None], keys.REWARD_INFO: "{}", keys.REWARD: zero, keys.SUCCESS: zero}
    actual = rollout_rows(RowTable.of(rows), Letters(), lambda example: [{"role": "user", "content": example.query}])
    assert [row.get("task") for row in actual] == ["gym/sums", None, None]
    chats = [row["dialog"]["prompt"] if "dialog" in row else None for row in actual]
    assert chats == [[{"role": "user", "content": "What?"}], None, [{"role": "user", "content": "Why?"}]]
    assert [set(row) - set(ROLLOUT_FIELDS) for row in actual] == [{"task", "dialog"}, set(), {"dialog"}]
    assert "prompt" not in rollout_rows(RowTable.of(rows), Letters())[0]["dialog"]


def test_the_record_has_a_dialog_where_there_is_one(tmp_path: Path) -> None:
    plain = rollout(3, 0, 0.0) | {"policy_version": 2}
    dialog = {"turns": [{"role": "tool", "text": '"policy_version": 9}'}]}
    records: list[Any] = []
    sink: Any = SimpleNamespace(log_samples=lambda step, rows: records.extend(rows), close=lambda exit_code: None)
    with RunLog(tmp_path, sinks=[sink]) as log:
        log.write_rollouts(4, [plain, {**plain, "group_id": 4, "dialog": dialog, "task": "gym/sums"}])
    first, second = map(json.loads, (tmp_path / ROLLOUTS_FILE).read_text().splitlines())
    assert set(first) == {"step", *ROLLOUT_FIELDS}
    assert (second["dialog"], second["task"]) == (dialog, "gym/sums")
    assert [list(row) for row in records] == [["step", *ROLLOUT_FIELDS]] * 2  # a table has the same columns in each row
    lines, ages = scan(tmp_path / ROLLOUTS_FILE)
    assert (list(lines), dict(ages)) == ([(4, 3), (4, 4)], {2: 2})
