"""The debug log shows what was trained on, adds up, and cannot be forged by what it shows."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.errors import RunFailed
from sota_grpo.recording import run_log
from sota_grpo.recording.run_log import RunLog, described, pick

NOON = datetime(2031, 2, 3, 12, 0, 5, tzinfo=UTC)


def row(**changes: Any) -> dict[str, Any]:
    plain = {
        "group_id": 4,
        "sample_id": 1,
        "query": "9 times 2?",
        "answer": "9*2=18\n#### 18",
        "prompt": "<|user|>9 times 2?",
        "response": "<think>Twice.</think>\n<answer>18</answer>",
        "reward": 1.15,
        "reward_terms": {"answer": 1.0, "format": 1.0, "thinking": -0.25},
        "reward_info": {"think_words": 1},
        "advantage": 0.75,
        "truncated": False,
        "policy_version": 11,
        "success": True,
        "response_tokens": 12,
    }
    return plain | changes


WEIGHTS = {"answer": 1.0, "format": 0.2, "thinking": 0.2}


def test_everything_asked_for_stands_in_the_text() -> None:
    text = described(12, row(), "best of 8", WEIGHTS)
    for line in (
        "step 12, group 4, sample 1: best of 8",
        "question\n  | 9 times 2?",
        "gold answer\n  | 9*2=18\n  | #### 18",
        "completion, 12 tokens\n  | <think>Twice.</think>\n  | <answer>18</answer>",
        "answer                  1.0000 x   1.0000 =   1.0000",
        "format                  1.0000 x   0.2000 =   0.2000",
        "thinking               -0.2500 x   0.2000 =  -0.0500",
        "total                                         1.1500",
        "advantage 0.7500",
        "success yes",
        "policy version 11",
        "grader: think_words = 1",
    ):
        assert line in text, line
    assert "(other)" not in text
    assert "error" not in text


def test_failures_cuts_missing_terms_and_penalties_are_told() -> None:
    failed = row(
        reward_terms=dict.fromkeys(WEIGHTS, 0.0), reward=0.0, success=False, reward_info={"error": "TimeoutError: 5 s"}
    )
    assert "grader: error = TimeoutError: 5 s" in described(0, failed, "", WEIGHTS)
    assert "success no" in described(0, failed, "", WEIGHTS)
    assert "completion, 12 tokens, cut for length\n" in described(0, row(truncated=True), "", WEIGHTS)
    penalised = row(reward_terms={"answer": 1.0, "kl": -0.5}, reward=0.75)
    text = described(0, penalised, "", {"answer": 1.0, "style": 2.0})
    assert "style                 does not apply" in text
    assert "kl                     -0.5000 x   1.0000 =  -0.5000" in text
    assert "(other)                                       0.2500" in text  # 0.75 - (1 - 0.5)


def test_text_of_a_model_cannot_pass_for_the_log_or_drive_a_terminal() -> None:
    rng = random.Random(random.getrandbits(32))
    bits = [*map(chr, range(0x20)), *"\x7f\x9b\x85\u2028\u202e\ud800\U000e0041", "\r\n", "=" * 100]
    bits += ["\ntotal     9.0000", "step 1, group 1", "\x1b]0;title\x07", "é", "漢字", "😀", "\t", "\n"]
    for _ in range(300):
        hostile = "".join(rng.choices(bits, k=rng.randrange(40)))
        place = rng.choice(["query", "answer", "response", "info", "name"])
        changes = {"info": {"reward_info": {"found": hostile}}, "name": {"reward_info": {hostile: 1}}}
        text = described(1, row(**changes.get(place, {place: hostile})), "best of 1", WEIGHTS)
        assert all(sign.isprintable() or sign in "\n\t" for sign in text)
        text.encode("utf-8")
        free = [line for line in text.split("\n") if not line.startswith("  | ")]
        assert sum(line.startswith("step ") for line in free) == 1
        assert sum(line.startswith("total ") for line in free) == 1
        assert sum(line == "=" * 100 for line in free) == 2


def test_the_best_the_worst_then_others_each_once() -> None:
    rng = random.Random(random.getrandbits(32))
    for _ in range(200):
        rows = [row(sample_id=i, reward=rng.choice([0.0, 0.5, 1.0])) for i in range(rng.randrange(1, 12))]
        count, step = rng.randrange(1, 14), rng.randrange(1000)
        picked = pick(rows, count, step)
        found = [one for _, one in picked]
        assert len(found) == len({one["sample_id"] for one in found}) == min(count, len(rows))
        assert found[0]["reward"] == max(one["reward"] for one in rows)
        if len(found) > 1:
            assert found[1]["reward"] == min(one["reward"] for one in rows if one is not found[0])
        assert [why.split()[0] for why, _ in picked] == (["best", "worst"] + ["drawn"] * 12)[: len(found)]
        assert pick(rows, count, step) == picked  # a step that is done again shows the same


def test_of_equals_every_one_is_shown_at_some_step() -> None:
    rows = [row(sample_id=i, reward=1.0) for i in range(4)]
    assert {pick(rows, 1, step)[0][1]["sample_id"] for step in range(100)} == {0, 1, 2, 3}


class Clock(datetime):
    hour_now = 12

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return NOON.replace(hour=cls.hour_now)


def test_a_step_is_on_disk_when_write_returns_and_a_restart_writes_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "datetime", Clock)
    RunLog(tmp_path).write_rollouts(0, [row()])
    folder = tmp_path / "debug_logs"
    folder.touch()
    with pytest.raises(RunFailed, match=r"debug_logs cannot be written \(File exists\).*logging.num_examine=0"):
        RunLog(tmp_path, num_examine=1).write_rollouts(0, [row()])
    folder.unlink()
    log = RunLog(tmp_path, num_examine=2, term_weights=WEIGHTS)
    log.write_rollouts(0, [row(), row(sample_id=2), row(sample_id=3)])
    first, second = (folder / f"grpo_debug_20310203_1{hour}0005.txt" for hour in (2, 3))
    assert re.findall(r"^step (\d+)", first.read_text(), re.MULTILINE) == ["0", "0"]
    monkeypatch.setattr(Clock, "hour_now", 13)
    log.write_rollouts(1, [row()])
    assert re.findall(r"^step (\d+)", first.read_text(), re.MULTILINE) == ["0", "0", "1"]
    for step in (1, 2):  # two starts within a second; the first was killed
        RunLog(tmp_path, num_examine=1).write_rollouts(step, [row()])
    assert re.findall(r"^step (\d+)", second.read_text(), re.MULTILINE) == ["1", "2"]
