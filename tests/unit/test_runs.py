"""Which directory a command works in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.runs import RUN_FILE, mark_finished, open_run, signature

CONFIG = {"seed": 1, "train": {"resume": None, "epochs": 1}, "logging": {"level": "info"}}


def run_at(root: Path, day: str, clock: str) -> Path:
    return root / "outputs" / day / clock


def test_signature_ignores_what_changes_nothing_that_is_computed() -> None:
    other = {"seed": 1, "train": {"resume": "auto", "epochs": 1}, "logging": {"level": "debug"}}
    assert signature(CONFIG) == signature(other)
    assert signature(CONFIG) != signature({**CONFIG, "train": {"resume": None, "epochs": 2}})


def test_a_fresh_command_starts_in_its_own_directory(tmp_path: Path) -> None:
    run_dir = run_at(tmp_path, "2026-01-01", "10-00-00")
    assert open_run(run_dir, CONFIG, None) == (run_dir, False)
    with pytest.raises(UserError, match="already holds a run"):
        open_run(run_dir, CONFIG, None)


def test_auto_takes_the_newest_unfinished_run_of_the_same_config(tmp_path: Path) -> None:
    runs = [run_at(tmp_path, "2026-01-01", f"1{n}-00-00") for n in range(4)]
    for age, run_dir in enumerate(runs):
        open_run(run_dir, CONFIG if run_dir != runs[3] else {**CONFIG, "seed": 2}, None)
        os.utime(run_dir / RUN_FILE, (1000 + age, 1000 + age))
    mark_finished(runs[2])
    fresh = run_at(tmp_path, "2026-01-02", "09-00-00")
    (fresh / ".hydra").mkdir(parents=True)
    assert open_run(fresh, CONFIG, "auto") == (runs[1], True)
    assert not fresh.exists()


def test_auto_keeps_a_directory_that_holds_anything_else(tmp_path: Path) -> None:
    old, fresh = run_at(tmp_path, "2026-01-01", "10-00-00"), run_at(tmp_path, "2026-01-02", "09-00-00")
    open_run(old, CONFIG, None)
    fresh.mkdir(parents=True)
    (fresh / "notes.txt").write_text("mine")
    assert open_run(fresh, CONFIG, "auto") == (old, True)
    assert (fresh / "notes.txt").read_text() == "mine"


def test_auto_without_a_run_starts_fresh(tmp_path: Path) -> None:
    fresh = run_at(tmp_path, "2026-01-02", "09-00-00")
    assert open_run(fresh, CONFIG, "auto") == (fresh, False)


def test_a_named_run_must_be_there_and_of_the_same_config(tmp_path: Path) -> None:
    fresh = run_at(tmp_path, "2026-01-02", "09-00-00")
    with pytest.raises(UserError, match="there is no run in"):
        open_run(fresh, CONFIG, str(tmp_path / "nowhere"))
    old = run_at(tmp_path, "2026-01-01", "10-00-00")
    open_run(old, CONFIG, None)
    with pytest.raises(UserError, match="another config"):
        open_run(fresh, {**CONFIG, "seed": 5}, str(old))
    assert open_run(fresh, CONFIG, str(old)) == (old, True)
