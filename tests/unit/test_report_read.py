"""Runs are read as they lie there: unfinished, torn, nested, empty; what is not a run is one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.recording.run_files import METRICS_FILE, note_failure
from sota_grpo.report.data import find_runs, read_run, read_runs


def put(path: Path, *lines: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / METRICS_FILE).write_text("".join(lines))
    return path


def test_an_evaluation_and_the_turn_after_it_are_one_row(tmp_path: Path) -> None:
    lines = ['{"step": 0, "eval/accuracy": 0.5}\n', '{"step": 0, "reward": 0.25}\n', '{"step": 1, "reward": 0.75}\n']
    run = read_run(put(tmp_path, *lines, '{"step": 2, "eval/accuracy": 0.875}\n'))
    assert run.rows[0] == {"step": 0, "eval/accuracy": 0.5, "reward": 0.25}
    assert [row["step"] for row in run.rows] == [0, 1, 2]
    assert run.steps == 2


def test_a_line_that_is_being_written_is_left_alone_and_numbers_that_json_lacks_are_nothing(tmp_path: Path) -> None:
    for torn in ('{"step": 2, "rew', '{"step": 2, "reward": 1.0}'):
        run = read_run(put(tmp_path, '{"step": 0, "reward": NaN, "kl": -Infinity}\n', '{"step": 1, "lr": 0.5}\n', torn))
        assert run.rows == [{"step": 0, "reward": None, "kl": None}, {"step": 1, "lr": 0.5}]


@pytest.mark.parametrize("line", ["{not json", "[1]", '{"reward": 1}', '{"step": "x"}', "[" * 100_000], ids=range(5))
def test_a_broken_line_is_named(tmp_path: Path, line: str) -> None:
    put(tmp_path, '{"step": 0, "reward": 0.5}\n', line + "\n", '{"step": 1, "reward": 0.5}\n')
    with pytest.raises(UserError, match=rf"Line 2 of .*{METRICS_FILE} is not JSON with a step"):
        read_run(tmp_path)


def test_runs_below_a_folder_are_found_once_and_in_natural_order(tmp_path: Path) -> None:
    for name in ("sweep/10", "sweep/2", "sweep/2/checkpoints/odd", "sweep/.hidden"):
        put(tmp_path / name, '{"step": 0}\n')
    put(tmp_path / "sweep/3")
    (tmp_path / "sweep/4/.hydra").mkdir(parents=True)
    (tmp_path / "sweep/4/.hydra/overrides.yaml").write_text("[seed=1]")
    note_failure(tmp_path / "sweep/4", UserError("There is no model there."))
    runs, left_out = read_runs(find_runs([tmp_path, tmp_path / "sweep" / "2"]))
    assert [run.path.name for run in runs] == ["2", "10"]
    assert left_out == [
        f"The run in {tmp_path / 'sweep' / '3'} has not finished a step: it has stopped (before its first step).",
        f"The run in {tmp_path / 'sweep' / '4'} has not finished a step: it has failed (There is no model there.).",
    ]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "There is no run in .*missing: it does not exist"),
        ("folder", "There is no run in .*folder: neither there nor in its folders is a metrics.jsonl"),
        ("empty", r"The run in .*empty has not finished a step: it has stopped"),
        ("file", "is a file; give the run directory"),
        ("unreadable", r"metrics.jsonl cannot be read|neither there nor in its folders"),
    ],
)
def test_what_is_no_run_is_one_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "folder").mkdir()
    put(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    (tmp_path / "unreadable" / METRICS_FILE).mkdir(parents=True)
    with pytest.raises(UserError, match=sentence):
        read_runs(find_runs([tmp_path / name]))
