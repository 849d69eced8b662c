"""``sota-grpo score``: rows in, rows out, in order; what is broken is named by its line and costs nobody else."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sota_grpo.cli import main


def score(tmp_path: Path, rows: list[object], *options: str, task: str = "gsm8k") -> list[dict]:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    command = ["score", "--task", task, "--input", str(source), "--output", str(target), "--workers", "1", *options]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_rows_keep_their_order_and_their_columns(tmp_path: Path) -> None:
    rng = random.Random(0)
    golds = [rng.randint(-999, 99_999) for _ in range(300)]
    says = [gold if rng.random() < 0.5 else gold + rng.randint(1, 9) for gold in golds]
    rows = [
        {"id": i, "response": f"So\n#### {s:,}", "answer": f"#### {g}"} for i, (s, g) in enumerate(zip(says, golds))
    ]
    scored = score(tmp_path, rows)
    assert [row["id"] for row in scored] == list(range(300))
    assert [row["success"] for row in scored] == [said == gold for said, gold in zip(says, golds)]
    assert [row["reward"] for row in scored] == [float(said == gold) for said, gold in zip(says, golds)]
    assert all(row["terms"].keys() == {"correct", "format"} and row["error"] is None for row in scored)


def test_a_broken_line_is_named_and_the_others_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"response": "#### 4", "answer": "4"}
    rows = [
        good,
        "{not json",
        good,
        {"answer": "4"},
        "[1]",
        {"response": "#### 4"},
        {"response": 4, "answer": "4"},
        good,
    ]
    scored = score(tmp_path, rows)
    assert [row["reward"] for row in scored] == [1.0, None, 1.0, None, None, None, None, 1.0]
    told = capsys.readouterr().err
    for number, what in ((2, "not valid JSON"), (4, "'response' is missing"), (5, "not an object"), (6, "'answer'")):
        assert f"line {number}: " in told
        assert what in scored[number - 1]["error"]
    assert "3 responses scored" in told
    assert "5 lines could not be read" in told


@pytest.mark.parametrize(
    ("text", "answer_format", "right"),
    [
        ("<answer>7</answer> \\boxed{8} #### 9 or 10", "any", "7"),
        ("\\boxed{8} #### 9 or 10", "any", "8"),
        ("#### 9\n or 10", "any", "9"),
        ("9 or 10", "any", "10"),
        ("\\boxed{8} #### 9", "hash", "9"),
        ("\\boxed{8} #### 9", "boxed", "8"),
        ("<answer>7</answer> \\boxed{8}", "tags", "7"),
        ("\\boxed{8} then 11", "last_number", "11"),
    ],
)
def test_the_answer_format_says_where_the_answer_stands(
    text: str, answer_format: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer, reward in ((right, 1.0), ("12", 0.0)):
        with pytest.raises(SystemExit) as ended:
            main(["score", "--task", "gsm8k", "--text", text, "--answer", answer, "--answer-format", answer_format])
        assert ended.value.code == 0
        found = json.loads(capsys.readouterr().out)
        assert found["reward"] == reward
        assert found["success"] == bool(reward)


def test_text_that_no_encoding_holds_comes_back(tmp_path: Path) -> None:
    rows = ['{"response": "\\ud800 #### 4", "answer": "4", "note": "\\u2028é"}']
    assert score(tmp_path, rows)[0]["response"] == "\ud800 #### 4"


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["--task", "gsm8k"], "give either --input FILE or --text RESPONSE"),
        (["--task", "gsm8k", "--input", "nowhere.jsonl"], "--input nowhere.jsonl cannot be read (No such file"),
        (["--task", "gsm8k", "--text", "4"], "give --answer"),
        (["--task", "gsm8k", "--text", "4", "--row", "[]"], "is not a JSON object"),
    ],
)
def test_a_mistake_is_one_sentence(command: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["score", *command])
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"response": "#### 4", "answer": "4"}\n')
    with pytest.raises(SystemExit) as ended:
        main(["score", "--task", "gsm8k", "--input", str(source), "--output", str(source)])
    assert ended.value.code == 2
    assert source.read_text() == '{"response": "#### 4", "answer": "4"}\n'


def test_the_command_reads_stdin_and_writes_stdout() -> None:
    command = [sys.executable, "-m", "sota_grpo.cli", "score", "--task", "gsm8k", "--input", "-", "--workers", "1"]
    row = '{"response": "#### 4", "answer": "4"}\n'
    done = subprocess.run(command, input=row * 3, capture_output=True, text=True, check=True)
    assert [json.loads(line)["reward"] for line in done.stdout.splitlines()] == [1.0] * 3
