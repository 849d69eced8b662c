"""Sweeps whose runs are jobs, by submitit's executor for this machine; of SLURM only what it would be given."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import SMALL, command, metrics
from tests.forked import Done, ForkServer
from tests.process_rigs import wait_for

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra slurm is not installed")

QUICK = (
    *(*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false", "train.resume=auto"),
    "env.reward_workers=0",
)


@pytest.fixture
def sweep(tmp_path: Path, fork_server: ForkServer) -> Callable[..., Done]:
    """Run ``grpo.py`` to its end with ``sweep`` as its directory; ``during`` is called with its process's id."""

    def run(*options: str, during: Callable[[int], None] = lambda pid: None, **environment: str) -> Done:
        line = command(tmp_path / "unused", "--multirun", *QUICK, f"hydra.sweep.dir={tmp_path / 'sweep'}", *options)
        process = fork_server.start(line[1:], cwd=tmp_path, environment=list(environment.items()))
        try:
            during(process)
        finally:
            done = fork_server.finish()
        return done

    return run


def job_of(sweep: int, run_dir: Path, steps: int) -> psutil.Process:
    """The process that trains in ``run_dir``, once it has done so many steps."""
    actual: list[psutil.Process] = []

    def is_found() -> bool:
        if not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < steps:
            return False
        for process in psutil.Process(sweep).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                is_job = "submitit.core._submit" in process.cmdline()
                if is_job and any(file.path == str(run_dir / ".lock") for file in process.open_files()):
                    actual.append(process)
        return bool(actual)

    wait_for(is_found)
    return actual[0]


@pytest.mark.slow
def test_a_job_that_is_killed_continues_by_the_same_command(tmp_path: Path, sweep: Callable[..., Done]) -> None:
    runs = [tmp_path / "sweep" / name for name in ("0", "1")]
    options = ("hydra/launcher=submitit_local", "seed=1,2")
    options += ("train.total_dialog_turns=1600", "train.checkpoint_frequency=10")
    first = sweep(*options, during=lambda pid: job_of(pid, runs[1], steps=12).kill())
    assert first.code == 1, first.stderr
    assert "A job of the sweep returned no result (Job" in first.stderr
    log = (runs[0] / "training.log").read_text()
    assert [row["step"] for row in metrics(runs[0])] == list(range(100))
    assert "2 runs, 1 finished, 1 stopped" in first.stdout
    assert not json.loads((tmp_path / "sweep" / "sweep.json").read_text())["complete"]

    again = sweep(*options)
    assert again.code == 0, again.stderr
    assert f"Continuing {runs[1]} after" in (runs[1] / "training.log").read_text()
    assert (runs[0] / "training.log").read_text() == log
    assert [row["step"] for row in metrics(runs[1])] == list(range(100))
    assert "2 runs, 2 finished" in again.stdout
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["complete"]


def test_what_a_job_has_to_say_reaches_the_command(sweep: Callable[..., Done]) -> None:
    jobs = sweep("hydra/launcher=submitit_local", "optimizer.lr=-1,-2")
    assert jobs.code == 2, jobs.stderr
    assert [line for line in jobs.stderr.splitlines() if "grpo.py: job 0: optimizer.lr=-1" in line]
    assert "2 runs, 2 failed" in jobs.stdout
    assert "run 1 failed: optimizer.lr=-2" in jobs.stdout


def test_a_search_whose_jobs_fail_fails(sweep: Callable[..., Done]) -> None:
    """The sweeper continues after a job that failed, so only the runs' directories say that there was one."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    chosen = ("hydra/sweeper=search", "hydra.sweeper.n_trials=1", "optimizer.lr=choice(-1,-2)")
    jobs = sweep("hydra/launcher=submitit_local", *chosen)
    assert jobs.code == 1, jobs.stderr
    assert "1 run, 1 failed" in jobs.stdout
    assert "Traceback" not in jobs.stderr


def test_without_slurm_it_says_so(sweep: Callable[..., Done]) -> None:
    refused = sweep("hydra/launcher=slurm", "seed=1,2", PATH="/nowhere")
    assert (refused.code, refused.stderr) == (
        2,
        "grpo.py: There is no srun on this machine; start the sweep where jobs can be submitted to SLURM.\n",
    )


def test_slurm_gets_the_resources_of_the_preset_and_the_command(tmp_path: Path, sweep: Callable[..., Done]) -> None:
    """By a fake sbatch that keeps its arguments, and refuses."""
    for name, text in (("srun", ""), ("sbatch", 'cp "$1" "$KEPT"; echo "invalid partition" >&2; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    kept, path = tmp_path / "kept.sh", f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    refused = sweep("hydra/launcher=slurm", "hydra.launcher.partition=gpus", "seed=1,2,3", PATH=path, KEPT=str(kept))
    assert refused.code == 1, refused.stderr
    assert "invalid partition" in refused.stderr
    lines = {line.removeprefix("#SBATCH --") for line in kept.read_text().splitlines() if line.startswith("#SBATCH")}
    wanted = ["time=720", "gpus-per-node=1", "cpus-per-task=8", "partition=gpus", "signal=USR2@120", "array=0-2%3"]
    assert {*wanted, "open-mode=append", "job-name=grpo"} <= lines
