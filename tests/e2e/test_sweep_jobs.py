"""Sweeps whose runs are jobs, by submitit's executor for this machine; of SLURM only what it would be given."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import ENVIRONMENT, SMALL, command, metrics, wait_for

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra slurm is not installed")

QUICK = (*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false", "train.resume=auto")


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., subprocess.Popen]:
    """Start ``grpo.py`` in a process of its own with ``sweep`` as the sweep's directory."""

    def start(*options: str, **environment: str) -> subprocess.Popen:
        folder = f"hydra.sweep.dir={tmp_path / 'sweep'}"
        return subprocess.Popen(
            command(tmp_path / "unused", "--multirun", *QUICK, folder, *options),
            cwd=tmp_path,
            env={**ENVIRONMENT, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def job_of(sweep: subprocess.Popen, run_dir: Path, steps: int) -> psutil.Process:
    """The process that trains in ``run_dir``, once it has done so many steps."""
    actual: list[psutil.Process] = []

    def is_found() -> bool:
        if not (run_dir / "metrics.jsonl").exists() or len(metrics(run_dir)) < steps:
            return False
        for process in psutil.Process(sweep.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended
                is_job = "submitit.core._submit" in process.cmdline()
                if is_job and any(file.path == str(run_dir / ".lock") for file in process.open_files()):
                    actual.append(process)
        return bool(actual)

    wait_for(is_found)
    return actual[0]


@pytest.mark.slow
def test_a_job_that_is_killed_continues_by_the_same_command(
    tmp_path: Path, sweep: Callable[..., subprocess.Popen]
) -> None:
    runs = [tmp_path / "sweep" / name for name in ("0", "1")]
    options = ("hydra/launcher=submitit_local", "seed=1,2")
    options += ("train.total_dialog_turns=1600", "train.checkpoint_frequency=10")
    first = sweep(*options)
    killed = job_of(first, runs[1], steps=12)
    killed.kill()
    out, err = first.communicate(timeout=300)
    assert first.returncode == 1, err
    assert "A job of the sweep returned no result (Job" in err
    log = (runs[0] / "training.log").read_text()
    assert [row["step"] for row in metrics(runs[0])] == list(range(100))
    assert "2 runs, 1 finished, 1 stopped" in out
    assert not json.loads((tmp_path / "sweep" / "sweep.json").read_text())["complete"]

    again = sweep(*options)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert f"Continuing {runs[1]} after" in (runs[1] / "training.log").read_text()
    assert (runs[0] / "training.log").read_text() == log
    assert [row["step"] for row in metrics(runs[1])] == list(range(100))
    assert "2 runs, 2 finished" in out
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["complete"]


def test_what_a_job_has_to_say_reaches_the_command(sweep: Callable[..., subprocess.Popen]) -> None:
    jobs = sweep("hydra/launcher=submitit_local", "optimizer.lr=-1,-2")
    out, err = jobs.communicate(timeout=120)
    assert jobs.returncode == 2, err
    assert [line for line in err.splitlines() if "grpo.py: job 0: optimizer.lr=-1" in line]
    assert "2 runs, 2 failed" in out
    assert "run 1 failed: optimizer.lr=-2" in out


def test_a_search_whose_jobs_fail_fails(sweep: Callable[..., subprocess.Popen]) -> None:
    """The sweeper continues after a job that failed, so only the runs' directories say that there was one."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra optuna is not installed")
    chosen = ("hydra/sweeper=search", "hydra.sweeper.n_trials=1", "optimizer.lr=choice(-1,-2)")
    jobs = sweep("hydra/launcher=submitit_local", *chosen)
    out, err = jobs.communicate(timeout=120)
    assert jobs.returncode == 1, err
    assert "1 run, 1 failed" in out
    assert "Traceback" not in err


def test_without_slurm_it_says_so(sweep: Callable[..., subprocess.Popen]) -> None:
    refused = sweep("hydra/launcher=slurm", "seed=1,2", PATH="/nowhere")
    _, err = refused.communicate(timeout=300)
    assert (refused.returncode, err) == (
        2,
        "grpo.py: There is no srun on this machine; start the sweep where jobs can be submitted to SLURM.\n",
    )


def test_slurm_gets_the_resources_of_the_preset_and_the_command(
    tmp_path: Path, sweep: Callable[..., subprocess.Popen]
) -> None:
    """By a fake sbatch that keeps its arguments, and refuses."""
    for name, text in (("srun", ""), ("sbatch", 'cp "$1" "$KEPT"; echo "invalid partition" >&2; exit 1')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    kept, path = tmp_path / "kept.sh", f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    refused = sweep("hydra/launcher=slurm", "hydra.launcher.partition=gpus", "seed=1,2,3", PATH=path, KEPT=str(kept))
    _, err = refused.communicate(timeout=300)
    assert refused.returncode == 1, err
    assert "invalid partition" in err
    lines = {line.removeprefix("#SBATCH --") for line in kept.read_text().splitlines() if line.startswith("#SBATCH")}
    wanted = ["time=720", "gpus-per-node=1", "cpus-per-task=8", "partition=gpus", "signal=USR2@120", "array=0-2%3"]
    assert {*wanted, "open-mode=append", "job-name=grpo"} <= lines
