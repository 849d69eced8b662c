"""Dialogs of a page: from the record, from a mask alone, and from whatever stands in a file that somebody else made."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from sota_grpo.report.data import read_run
from sota_grpo.report.groups import choose_groups, dialog_columns, plain_group, prompt_turns
from tests.report_rigs import WORDS, write_run

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
    groups = [json.loads(text) for text in choose_groups(read_run(run_dir), 1_000_000).encoded]
    old, plain, stored = groups[0], groups[2], groups[4]
    assert "turns" not in old
    assert "turns" not in old["samples"][0]
    assert old["samples"][0]["text"] == "".join(WORDS)
    for group in (plain, stored):
        assert group["turns"] == [{"role": "user", "text": "Add!"}]
        assert group["task"] == "tools"
        sample = group["samples"][0]
        assert "text" not in sample
        assert sample["ended"] == "answer"
        assert "lost" not in sample
        assert [(turn["role"], turn["said"], turn["tokens"]) for turn in sample["turns"]] == [
            *(("assistant", 1, 4), ("tool", 0, 3), ("assistant", 1, 2))
        ]
        assert sample["turns"][0]["calls"] == [{**CALL, "arguments": {"x": "1", "y": "[2]"}}]
    assert [turn["text"] for turn in plain["samples"][0]["turns"]] == ["call", "three", "3"]
    assert stored["samples"][0]["pieces"] == list(WORDS)
    assert all("text" not in turn for turn in stored["samples"][0]["turns"])


def test_whatever_stands_in_a_dialog_the_page_is_made_and_small() -> None:
    rng = random.Random(random.getrandbits(32))
    odd: list[Any] = [None, True, -1, 1e300, "x" * 100_000, [], [None, 5], {}, {"turns": 7}, {"a": [1]}]

    def damaged(value: Any) -> Any:
        if rng.random() < 0.2:
            return rng.choice(odd)
        if isinstance(value, dict):
            return {name: damaged(each) for name, each in value.items()}
        return [damaged(each) for each in value] if isinstance(value, list) else value

    row = {"step": 0, "group_id": 0, "sample_id": 0, "reward": 0.5, "response": "hello"}
    for _ in range(300):
        dialog = damaged(DIALOG)
        group = plain_group([{**row, "dialog": dialog, "task": rng.choice(odd)}], whole=False)
        text = json.dumps(group, allow_nan=False)
        assert len(text) < 300_000, dialog
        (sample,) = group["samples"]
        assert ("text" in sample) == (not sample.get("turns")), dialog
        for turn in sample.get("turns", []):
            assert isinstance(turn["role"], str), dialog
            assert len(turn["role"]) <= 100, dialog


def test_no_number_of_turns_fills_the_page() -> None:
    many = {"turns": [DIALOG["turns"][0]] * 10_000}
    found = dialog_columns({"dialog": many})
    assert found is not None
    assert len(found["turns"]) == 200
    assert len(prompt_turns([{"role": "user", "content": "x"}] * 10_000)) == 200
