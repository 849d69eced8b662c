"""Runs are read as they lie there: unfinished, torn, nested, empty; what is not a run is one sentence."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from sota_grpo.cli import main
from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import METRICS_FILE, find_runs, note_failure, whole_lines
from sota_grpo.report import report_json, report_of
from sota_grpo.report.data import read_run, read_runs
from sota_grpo.sweeps import read_sweep
from tests.report_rigs import damaged, write_run
from tests.unit.test_report_page import page_of


def put(path: Path, *lines: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / METRICS_FILE).write_text("".join(lines))
    return path


def test_an_evaluation_and_the_turn_after_it_are_one_row_and_an_unfinished_line_is_none(tmp_path: Path) -> None:
    lines = ['{"step": 0, "eval/accuracy": 0.5}\n', '{"step": 0, "reward": 0.25}\n', '{"step": 1, "reward": 0.75}\n']
    run = read_run(put(tmp_path, *lines, '{"step": 2, "eval/accuracy": 0.875}\n'))
    assert run.rows[0] == {"step": 0, "eval/accuracy": 0.5, "reward": 0.25}
    assert ([row["step"] for row in run.rows], run.steps) == ([0, 1, 2], 2)
    for torn in ('{"step": 2, "rew', '{"step": 2, "reward": 1.0}'):
        run = read_run(put(tmp_path, '{"step": 0, "reward": NaN, "kl": -Infinity}\n', '{"step": 1, "lr": 0.5}\n', torn))
        assert run.rows == [{"step": 0, "reward": None, "kl": None}, {"step": 1, "lr": 0.5}]


def test_runs_below_a_folder_are_found_once_and_in_natural_order(tmp_path: Path) -> None:
    for name in ("sweep/10", "sweep/2", "sweep/2/checkpoints/odd", "sweep/.hidden"):
        put(tmp_path / name, '{"step": 0}\n')
    put(tmp_path / "sweep/3")
    for name in ("sweep/4", "."):  # what another program left in the folder itself hides no run
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra/overrides.yaml").write_text("[seed=1]")
    note_failure(tmp_path / "sweep/4", UserError("There is no model there."))
    runs, left_out = read_runs(find_runs([tmp_path, tmp_path / "sweep" / "2"]))
    assert [run.path.name for run in runs] == ["2", "10"]
    assert left_out == [
        f"The run in {tmp_path / 'sweep' / '3'} has not finished a step: it has stopped (before its first step).",
        f"The run in {tmp_path / 'sweep' / '4'} has not finished a step: it has failed (There is no model there).",
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "There is no run in .*missing: the folder does not exist"),
        ("folder", "There is no run in .*folder: neither the folder nor its subfolders have a metrics.jsonl"),
        ("empty", r"The run in .*empty has not finished a step: it has stopped"),
        ("file", "is a file; give the run directory"),
        ("unreadable", r"metrics.jsonl cannot be read|neither the folder nor its subfolders"),
    ],
)
def test_what_is_no_run_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    put(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    (tmp_path / "unreadable" / METRICS_FILE).mkdir(parents=True)
    with pytest.raises(UserError, match=sentence):
        read_runs(find_runs([tmp_path / name]))


FILES = ("config.yaml", "gate.json", "run.json", "metrics.jsonl", "rollouts.jsonl", "failure.json")


def damage(path: Path) -> None:
    """Replace some values in a file of a run."""
    text, is_yaml = path.read_text(), path.suffix == ".yaml"
    rows = [yaml.safe_load(text)] if is_yaml else list(map(json.loads, text.splitlines()))
    path.write_text("".join((yaml.safe_dump if is_yaml else json.dumps)(damaged(row, 0.05)) + "\n" for row in rows))


@pytest.mark.parametrize("name", FILES)
def test_a_run_with_an_odd_file_does_not_cost_the_others_their_page(tmp_path: Path, name: str) -> None:
    sound, damaged = write_run(tmp_path / "sweep" / "0", steps=2, groups=2), tmp_path / "sweep" / "1"
    whole = write_run(tmp_path / "whole", steps=2, groups=2, finished=random.random() < 0.5)
    checks = [{"name": "ratio", "passed": True, "sentence": "it is 1", "seconds": 0.25}]
    (whole / "gate.json").write_text(json.dumps({"mode": "warn", "checks": checks}))
    (whole / "failure.json").write_text(json.dumps({"reason": "it failed"}))
    for _ in range(4):
        shutil.copytree(whole, damaged)
        damage(damaged / name)
        print((damaged / name).read_text()[:2000])  # of the last attempt
        data = json.loads(report_json(*read_runs([sound, damaged]), budget=1 << 20))
        assert len(read_sweep(tmp_path / "sweep").runs) == 2
        assert data["runs"][0]["groups"]
        assert len(data["runs"]) + len(data["left_out"]) >= 2
        shutil.rmtree(damaged)


def test_numbers_that_json_lacks_end_no_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "run.json").write_text('{"num_steps": 2, "finished": true, "passed": NaN}')
    (run / "replays").mkdir()
    (run / "replays" / "a.json").write_text('{"title": "t", "notes": [], "tables": [], "step": Infinity}')
    _, data = page_of(run, out=tmp_path / "report.html")
    assert data["runs"][0]["replays"] == [{"title": "t", "tables": [], "notes": []}]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("metrics.jsonl", "{broken\n", "Line 1 of .* is not a JSON object with a step"),
        ("rollouts.jsonl", "{broken\n", "The groups of .*: Line 1 of .* is not a JSON object with a step"),
        ("config.yaml", "a: [1", "is not a valid config; remove the file"),
        ("config.yaml", "algorithm: 3", "algorithm is no section of options"),
    ],
)
def test_what_is_wrong_is_said_on_the_page_and_by_the_command(
    tmp_path: Path, name: str, text: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b")]
    (runs[1] / name).write_text(text)
    _, data = page_of(*runs, out=tmp_path / "report.html")
    assert len(data["left_out"]) == 1
    assert re.search(sentence, data["left_out"][0])
    assert len(data["runs"]) == (2 if name == "rollouts.jsonl" else 1)  # its curves are shown without its groups
    with pytest.raises(SystemExit, match="0"):
        main(["report", *map(str, runs), "--out", str(tmp_path / "report.html")])
    assert re.search(f"Left out: .*{sentence}", capsys.readouterr().err)


def test_a_sweep_names_the_run_that_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in ("0", "1"):
        hydra = write_run(tmp_path / seed) / ".hydra"
        hydra.mkdir()
        (hydra / "overrides.yaml").write_text(f"[seed={seed}]")
    (tmp_path / "0" / "metrics.jsonl").write_text("{broken\n")
    (tmp_path / "1" / ".hydra" / "overrides.yaml").write_text("[seed=1")
    notes = [run.note for run in read_sweep(tmp_path).runs]
    assert "Line 1 of" in notes[0]
    assert "overrides.yaml cannot be read" in notes[1]
    assert "reward" in read_sweep(tmp_path).runs[1].metrics, "what can be read is shown all the same"
    with pytest.raises(SystemExit) as ended:
        main(["sweep", str(tmp_path)])
    assert ended.value.code == 0
    assert "Line 1 of" in capsys.readouterr().out


def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for another user: root, who runs tests in containers, may look into every folder."""
    for name in ("a", "b"):
        write_run(tmp_path / name)
    locked = tmp_path / "b"

    def refusing(function: Any) -> Any:
        def refuse(path: Any, *args: Any, **named: Any) -> Any:
            if locked in (Path(path), *Path(path).parents):
                raise PermissionError(13, "Permission denied")
            return function(path, *args, **named)

        return refuse

    for module, name in ((os, "listdir"), (os, "open"), (Path, "is_file")):
        monkeypatch.setattr(module, name, refusing(getattr(module, name)))
    runs, left_out = read_runs(find_runs([tmp_path]))
    assert [run.path.name for run in runs] == ["a"]
    assert left_out == [f"{locked / 'metrics.jsonl'} cannot be read (Permission denied)."]
    notes = {run.name: run.note for run in read_sweep(tmp_path).runs}
    assert notes["a"] == ""
    assert "metrics.jsonl cannot be read (Permission denied)" in notes["b"]


def test_a_line_whose_end_is_still_to_come_is_no_line_and_neither_is_its_rest(tmp_path: Path) -> None:
    """Readers see what a writer has flushed: perhaps half a line, and then, before they are done, its other half."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "rew')
    actual = []
    for number, _, line in whole_lines(path):
        actual.append((number, line))
        if number == 1:
            with path.open("ab") as file:
                file.write(b'ard": 0.5}\n{"step": 2}\n')
    assert actual[0] == (1, b'{"step": 0}\n')
    assert all(line.startswith(b"{") and line.endswith(b"}\n") for _, line in actual)


def test_a_full_disk_keeps_the_page_that_there_is_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fills up in the middle of the page: its beginning has been written."""
    run_dir = write_run(tmp_path / "run")
    report_of(run_dir)
    before = {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()}
    write = Path.write_text

    def full(path: Path, text: str, *args: object, **options: object) -> int:
        if "report.html" not in path.name:
            return write(path, text, *args, **options)
        write(path, text[:100], *args, **options)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    assert report_of(run_dir) > 0
    assert {path.name: path.read_bytes() for path in run_dir.iterdir() if path.is_file()} == before
    (message,) = caplog.messages
    assert "No space left on device" in message
    assert f"sota-grpo report {run_dir}" in message
