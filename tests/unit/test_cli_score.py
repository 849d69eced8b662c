"""``sota-grpo score``: rows in, rows out, in order; what is broken is named by its line and affects no other row."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from sota_grpo.cli import main
from sota_grpo.cli import responses as score_command
from sota_grpo.rewards.grading import LocalGrader


@pytest.fixture
def graded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without worker processes, which a test of rows and those of pipes have."""
    grader = lambda task, _: closing(LocalGrader(task.score, task.term_weights))  # noqa: E731
    monkeypatch.setattr(score_command, "_graders", grader)


HERE = pytest.mark.usefixtures("graded_here")


def ended(*words: str) -> int:
    """The exit code of ``sota-grpo score``."""
    with pytest.raises(SystemExit) as end:
        main(["score", *words])
    return end.value.code


def score(tmp_path: Path, rows: Sequence[object]) -> list[dict]:
    source, target = tmp_path / "rows.jsonl", tmp_path / "scored.jsonl"
    source.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    where = ["--input", str(source), "--output", str(target)]
    assert ended("--task", "gsm8k", *where, "--workers", "1") == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_rows_keep_their_order_and_their_columns(tmp_path: Path) -> None:
    golds = [random.randint(-999, 99_999) for _ in range(300)]
    says = [gold if random.random() < 0.5 else gold + random.randint(1, 9) for gold in golds]
    pairs = enumerate(zip(says, golds))
    rows = [{"id": i, "response": f"So\n#### {says:,}", "answer": f"#### {gold}"} for i, (says, gold) in pairs]
    scored = score(tmp_path, rows)
    assert [row["id"] for row in scored] == list(range(300))
    assert [row["success"] for row in scored] == [answer == gold for answer, gold in zip(says, golds)]
    assert all(row["reward"] == row["success"] and row["error"] is None for row in scored)
    assert all(row["terms"].keys() == {"correct", "format"} for row in scored)


@HERE
def test_a_broken_line_is_named_and_the_others_are_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, broken = {"response": "#### 4", "answer": "4"}, [{"answer": "4"}, "[1]", {"response": "#### 4"}]
    scored = score(tmp_path, [good, "{not json", good, *broken, {"response": 4, "answer": "4"}, good])
    assert [row["reward"] for row in scored] == [1.0, None, 1.0, None, None, None, None, 1.0]
    output = capsys.readouterr().err
    broken_lines = {2: "not valid JSON", 4: "'response' is missing", 5: "not a JSON object", 6: "'answer'"}
    for number, what in broken_lines.items():
        assert f"line {number}: " in output
        assert what in scored[number - 1]["error"]
    assert "3 responses scored" in output
    assert "5 lines could not be read" in output


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["--task", "gsm8k"], "give either --input FILE or --text RESPONSE"),
        (["--task", "gsm8k", "--input", "nowhere.jsonl"], "--input nowhere.jsonl cannot be read (No such file"),
        (["--task", "gsm8k", "--text", "4"], "give --answer"),
        (["--task", "gsm8k", "--input", "-", "--answer", "4"], "--answer is for --text"),
        (["--task", "gsm8k", "--text", "4", "--answer", "4", "--reward-name", "f"], "with --reward-path FILE"),
        (["--task", "gsm8k", "--text", "4", "--timeout-s", "nan"], "is not a time above 0"),
    ],
)
def test_a_mistake_is_one_sentence(command: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*command) == 2
    assert sentence in capsys.readouterr().err


PIPE = [sys.executable, "-m", "sota_grpo.cli", "score", "--task", "gsm8k", "--input", "-", "--workers", "1"]
ROW = '{"response": "#### 4", "answer": "4"}\n'


@HERE
def test_stdout_has_the_rows_alone_and_no_byte_of_the_input_stops_it(tmp_path: Path) -> None:
    """Whatever a reward function prints, and in whichever encoding."""
    functions = tmp_path / "functions.py"
    functions.write_text(
        "import os\n"
        "print('the file runs')\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    print('graded by print')\n"
        "    os.write(1, b'graded by the descriptor\\n')\n"
        "    return 0.5\n"
    )
    content = b"\xef\xbb\xbf" + b'{"response": "\xff\xc3\xa9 #### 4", "answer": "4"}\n' * 3
    environment = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    done = subprocess.run([*PIPE, "--reward-path", str(functions)], input=content, capture_output=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert b"the file runs" in done.stderr
    assert done.stderr.count(b"graded by print") == done.stderr.count(b"graded by the descriptor") == 3
    (tmp_path / "rows.jsonl").write_bytes(content)
    source, target = str(tmp_path / "rows.jsonl"), tmp_path / "scored.jsonl"
    assert ended("--task", "gsm8k", "--input", source, "--output", str(target)) == 0
    for output, reward in ((done.stdout, 0.5), (target.read_bytes(), 1.0)):
        rows = map(json.loads, output.splitlines())
        assert [(row["response"], row["reward"]) for row in rows] == [("\udcffé #### 4", reward)] * 3


def test_an_output_that_cannot_be_is_refused_before_anything_is_scored(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(score_command, "_graders", lambda *_: pytest.fail("it was scored"))
    source = tmp_path / "rows.jsonl.partial"
    source.write_text(ROW)
    (tmp_path / "folder").mkdir()
    outputs = {
        "folder": "is not a file",
        "folder/": "is not a file",
        "nowhere/rows.jsonl": "No such file or directory",
        source.name: "would overwrite the input",
        source.stem: "would overwrite the input",  # what is written goes beside it first
    }
    for name, reason in outputs.items():
        assert ended("--task", "gsm8k", "--input", str(source), "--output", f"{tmp_path}/{name}") == 2
        assert reason in capsys.readouterr().err
    assert source.read_text() == ROW


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@HERE
def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "scored.jsonl.partial").symlink_to("/dev/full")
    with open("/dev/full", "w") as full:
        to_stdout = subprocess.run(PIPE, input=ROW, stdout=full, stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr(sys, "stdin", iter([ROW]))
    to_file = ended(*PIPE[4:], "--output", str(tmp_path / "scored.jsonl"))
    for code, printed in ((to_stdout.returncode, to_stdout.stderr), (to_file, capsys.readouterr().err)):
        assert code == 1
        assert len(printed.splitlines()) == 1
        assert "cannot be written further (No space left on device)" in printed
    assert not (tmp_path / "scored.jsonl").exists()


@HERE
def test_an_output_taken_by_a_folder_meanwhile_leaves_the_rows_beside_it(tmp_path: Path, monkeypatch, capsys) -> None:
    target = tmp_path / "scored.jsonl"

    def lines() -> Iterator[str]:
        yield ROW
        target.mkdir()

    monkeypatch.setattr(sys, "stdin", lines())
    assert ended("--task", "gsm8k", "--input", "-", "--output", str(target), "--workers", "1") == 1
    assert f"{target}.partial has all rows" in capsys.readouterr().err
    assert len(Path(f"{target}.partial").read_text().splitlines()) == 1


@pytest.mark.parametrize(("to_file", "num_read"), [(False, 0), (True, 640)])
@HERE
def test_an_interrupt_says_how_many_rows_are_written(to_file, num_read, tmp_path, monkeypatch, capsys) -> None:
    def lines() -> Iterator[str]:
        yield from [ROW] * num_read
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", lines())
    target = tmp_path / "scored.jsonl"
    where = ["--output", str(target)] if to_file else []
    assert ended("--task", "gsm8k", "--input", "-", "--workers", "1", *where) == 130
    output = capsys.readouterr()
    actual = (Path(f"{target}.partial").read_text() if to_file else output.out).splitlines()
    assert all(json.loads(line)["reward"] == 1.0 for line in actual)
    assert bool(actual) == bool(num_read)
    place = f"{target}.partial" if to_file else "stdout"
    assert (f"rows written to {place}: {len(actual)}." if num_read else "nothing was written") in output.err
    assert not target.exists()


@HERE
def test_the_score_of_a_text_goes_to_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "scored.jsonl"
    text = "I set api_key = 5, so #### 4"  # no option with a key
    assert ended("--task", "gsm8k", "--text", text, "--answer", "4", "--output", str(target)) == 0
    assert json.loads(target.read_text())["reward"] == 1.0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("punkt", [None, "here"])
def test_sentences_that_are_split_by_rules_are_reported(punkt: str | None, monkeypatch, capsys) -> None:
    monkeypatch.setattr(score_command, "_score_text", lambda task, options: None)
    monkeypatch.setattr(score_command, "find_punkt", lambda: punkt)
    assert ended("--task", "ifeval", "--text", "Well.", "--workers", "1") == 0
    assert ("split by rules" in capsys.readouterr().err) == (punkt is None)
