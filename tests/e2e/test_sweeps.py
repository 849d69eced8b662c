"""Whole sweeps: cut off and continued, and searched by Optuna."""

from __future__ import annotations

import json
import os
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, command, metrics, wait_for, without_clock
from tests.forked import ForkServer

QUICK = (*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false")
LONGER = ("train.total_dialog_turns=160", "train.checkpoint_frequency=1")


def has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.mark.slow
def test_a_killed_sweep_continues_where_it_was(tmp_path: Path, grpo, fork_server: ForkServer) -> None:
    """Run 0 is finished, run 1 is killed, run 2 has not begun; the same command with auto finds the sweep by itself."""
    sweep = ("--multirun", *QUICK, *LONGER, "seed=1,2,3")
    process = fork_server.start(command(tmp_path / "unused", *sweep)[1:], cwd=tmp_path)

    def second_run_is_under_way() -> bool:
        actual = list(tmp_path.glob("multirun/*/*/1/metrics.jsonl"))
        return bool(actual) and actual[0].read_bytes().count(b"\n") >= 3

    wait_for(second_run_is_under_way)
    os.kill(process, signal.SIGKILL)
    assert fork_server.finish().code == -signal.SIGKILL
    (folder,) = tmp_path.glob("multirun/*/*")
    first, done_before = metrics(folder / "0"), len(metrics(folder / "1"))
    state = {run["run"]: run["state"] for run in json.loads((folder / "summary.json").read_text())["runs"]}
    assert state["0"] == "finished"  # the summary is kept up to date during the sweep
    assert len(first) == 10
    assert done_before < 10
    assert not (folder / "2").exists()

    done = grpo(tmp_path / "unused", *sweep, "train.resume=auto")
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("multirun/*/*")) == [folder]
    assert f"The run in {folder / '0'} is already finished." in done.stdout
    assert f"Continuing {folder / '1'} after" in done.stderr
    assert metrics(folder / "0") == first
    whole = grpo(tmp_path / "whole", *QUICK, *LONGER, "seed=2")
    assert whole.returncode == 0, whole.stderr
    assert without_clock(metrics(folder / "1")) == without_clock(metrics(tmp_path / "whole"))
    assert len(metrics(folder / "2")) == 10
    assert "3 runs, 3 finished" in done.stdout
    assert json.loads((folder / "sweep.json").read_text())["complete"]


@pytest.mark.slow
@pytest.mark.skipif(not has("hydra-optuna-sweeper"), reason="the extra optuna is not installed")
def test_a_search_that_is_repeated_proposes_the_same_and_continues_after_it(tmp_path: Path, grpo) -> None:
    folder = tmp_path / "search"
    search = (
        *("--multirun", f"hydra.sweep.dir={folder}", *QUICK),
        *("hydra/sweeper=search", "hydra.sweeper.sampler.n_startup_trials=1"),  # the second trial depends on the first
        *("optimizer.lr=tag(log, interval(1e-5, 1e-3))", "policy.kl_coef=choice(0.0, 0.01)"),
    )

    def found() -> list[dict]:
        runs = json.loads((folder / "summary.json").read_text())["runs"]
        return sorted(runs, key=lambda run: run["run"])

    done = grpo(tmp_path / "unused", *search, "hydra.sweeper.n_trials=2")
    assert done.returncode == 0, done.stderr
    first = found()
    rates = [float(run["overrides"]["optimizer.lr"]) for run in first]
    assert len(set(rates)) == 2
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)

    again = grpo(tmp_path / "unused", *search, "hydra.sweeper.n_trials=3", "train.resume=auto")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is already finished.") == 2
    assert [run["metrics"] for run in found()[:2]] == [run["metrics"] for run in first]
    assert [run["state"] for run in found()] == ["finished"] * 3
    best = max(run["metrics"]["reward"] for run in found())
    assert f"best_value: {best}" in (folder / "optimization_results.yaml").read_text()


@pytest.mark.parametrize(
    ("option", "package", "extra"),
    [
        ("hydra/sweeper=search", "hydra-optuna-sweeper", "optuna"),
        ("hydra/launcher=slurm", "hydra-submitit-launcher", "slurm"),
    ],
)
def test_a_plugin_that_is_not_installed_is_named(option: str, package: str, extra: str, tmp_path: Path, grpo) -> None:
    if has(package):
        pytest.skip(f"{package} is installed")
    done = grpo(tmp_path / "unused", "--multirun", f"hydra.sweep.dir={tmp_path}", option, "seed=1,2")
    assert done.returncode == 2
    assert f"pip install 'sota-grpo[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr
