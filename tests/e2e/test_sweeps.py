"""Whole sweeps that Optuna searches. One that is killed and continued: tests/e2e/test_logging.py."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL

QUICK = (
    *(*SMALL, "engine=scripted", "check.mode=off", "eval.mode=off", "train.export_hf=false"),
    *("train.total_dialog_turns=16", "env.reward_workers=0"),
)


def has(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


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
