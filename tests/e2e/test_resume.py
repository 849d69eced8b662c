"""A kill loses nothing: after ``kill -9`` at any moment the resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import ENVIRONMENT, SMALL, command, final_weights, metrics, without_clock

KILLS = 5
EVERY_TURN = ("train.checkpoint_frequency=1", "train.total_dialog_turns=96")


def kill_when(process: subprocess.Popen, moment, deadline_s: float = 120.0) -> bool:
    """``kill -9`` as soon as ``moment()`` holds; False when the process ended before."""
    limit = time.monotonic() + deadline_s
    while time.monotonic() < limit:
        if process.poll() is not None:
            return False
        if moment():
            process.send_signal(signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    raise AssertionError("the moment to kill at never came")


def mid_checkpoint(run_dir: Path):
    """True while a checkpoint is being written: its temporary name is there."""

    def moment() -> bool:
        folder = run_dir / "checkpoints"
        return folder.is_dir() and any(not path.name.startswith("checkpoint_") for path in folder.iterdir())

    return moment


def after(seconds: float):
    limit = time.monotonic() + seconds
    return lambda: time.monotonic() >= limit


def after_rows(run_dir: Path, count: int, delay_s: float):
    """True ``delay_s`` after ``metrics.jsonl`` has ``count`` rows."""
    seen: list[float] = []

    def moment() -> bool:
        path = run_dir / "metrics.jsonl"
        if not seen and path.exists() and path.read_bytes().count(b"\n") >= count:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + delay_s

    return moment


@pytest.mark.parametrize("engine", ["transformers", "scripted"])
def test_killed_run_equals_the_uninterrupted_one(engine: str, tmp_path: Path, grpo) -> None:
    options = (*SMALL, *EVERY_TURN, f"engine={engine}", "train.export_hf=false")
    options += ("train.total_dialog_turns=320",)  # more turns than the kills leave time for
    options += ("check.mode=off",) if engine == "scripted" else ()
    whole = grpo(tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr
    run_dir = tmp_path / "killed"
    dice = random.Random(time.time_ns())
    killed = 0
    for attempt in range(KILLS):
        process = subprocess.Popen(
            command(run_dir, *options, "train.resume=auto"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=ENVIRONMENT,
        )
        rows = (run_dir / "metrics.jsonl").read_bytes().count(b"\n") if (run_dir / "metrics.jsonl").exists() else 0
        moments = [
            after(dice.uniform(1, 4)),
            mid_checkpoint(run_dir),
            after_rows(run_dir, rows + 1, dice.uniform(0, 0.3)),
        ]
        killed += kill_when(process, moments[attempt % 3])
    assert killed >= 3
    last = grpo(run_dir, *options, "train.resume=auto")
    assert last.returncode == 0, last.stderr
    assert without_clock(metrics(run_dir)) == without_clock(metrics(tmp_path / "whole"))
    mine, theirs = final_weights(run_dir), final_weights(tmp_path / "whole")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    rollouts = [(path / "rollouts.jsonl").read_text() for path in (run_dir, tmp_path / "whole")]
    assert rollouts[0] == rollouts[1]


def test_resume_finds_the_newest_unfinished_run_by_itself(tmp_path: Path, grpo) -> None:
    options = (*SMALL, *EVERY_TURN, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false")
    first = tmp_path / "outputs" / "2026-01-01" / "10-00-00"
    process = subprocess.Popen(
        command(first, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    assert kill_when(process, after_rows(first, 2, 0.0))
    second = tmp_path / "outputs" / "2026-01-02" / "10-00-00"
    done = grpo(second, *options, "train.resume=auto", "train.micro_batch_tokens=512")  # an option that is free
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Continuing {first} after [1-6] steps", done.stderr)
    assert [row["step"] for row in metrics(first)] == list(range(6))
    assert not second.exists()
    again = grpo(second, *options, "train.resume=auto")  # nothing unfinished is left: a fresh run
    assert again.returncode == 0
    assert f"Nothing to continue: starting afresh in {second}" in again.stderr
    assert [row["step"] for row in metrics(second)] == list(range(6))


def test_a_finished_run_is_left_as_it_is_until_it_is_made_longer(tmp_path: Path, grpo) -> None:
    options = (*SMALL, "engine=scripted", "check.mode=off", "train.export_hf=false", "eval.num_samples=4")
    options += ("optimizer.schedule=constant",)  # a learning rate that does not depend on the length of the run
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert grpo(run_dir, *options).returncode == 0
    before = metrics(run_dir)
    again = grpo(tmp_path / "fresh", *options, f"train.resume={run_dir}")
    assert again.returncode == 0, again.stderr
    assert again.stdout.splitlines() == [f"The run in {run_dir} is already finished."]
    assert metrics(run_dir) == before
    longer = (*options, "train.total_dialog_turns=96")
    assert grpo(tmp_path / "fresh", *longer, f"train.resume={run_dir}").returncode == 0
    assert grpo(whole, *longer).returncode == 0
    assert without_clock(metrics(run_dir)) == without_clock(metrics(whole))


def test_a_run_that_is_alive_is_not_taken_over(tmp_path: Path, grpo) -> None:
    options = (*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.total_dialog_turns=160000")
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, *options), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    try:
        ready = after_rows(run_dir, 1, 0.0)
        while not ready():
            time.sleep(0.01)
        done = grpo(run_dir, *options, "train.resume=auto")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert done.returncode == 2, done.stderr
    assert f"Another process is at work in {run_dir}" in done.stderr
    assert [row["step"] for row in metrics(run_dir)] == list(range(len(metrics(run_dir))))


def test_ctrl_c_saves_the_turn_and_exits(tmp_path: Path, grpo) -> None:
    options = (*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.total_dialog_turns=16000")
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        command(run_dir, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )
    ready = after_rows(run_dir, 2, 0.0)
    while not ready():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    turns = len(metrics(run_dir))
    newest = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    assert newest.stem == f"checkpoint_{turns:06d}"
