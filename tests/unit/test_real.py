"""``make real``: each step is done once and leaves a whole file or none; its commands are those of the presets."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import real
from sota_grpo.assembly.evaluation import find_target
from sota_grpo.config.validators import validate
from tests.config.test_config import composed


def given(folder: Path, preset: str) -> argparse.Namespace:
    options = {"seed": 3, "overrides": [], "num_samples": None, "max_tokens": None}
    return argparse.Namespace(file=folder / "rows.jsonl", out=folder / "out", preset=preset, **options)


WRITE = "import sys; from pathlib import Path; Path('ran').open('a').write('x'); Path(sys.argv[-1]).write_text('half')"


def test_a_step_is_done_once_and_a_killed_one_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    killed = real.Step("Killed", [sys.executable, "-c", WRITE + "; import os; os.kill(os.getpid(), 9)"], tmp_path / "a")
    with pytest.raises(subprocess.CalledProcessError):
        real.do(killed)
    assert not killed.target.exists()
    for _ in range(2):
        real.do(real.Step("Again", [sys.executable, "-c", WRITE], tmp_path / "a"))
    assert (tmp_path / "a").read_text() == "half"
    assert (tmp_path / "ran").read_text() == "xx"


@pytest.mark.parametrize("preset", real.BENCHMARKS)
def test_the_run_and_both_evaluations_have_the_same_seed_and_problems(preset: str, tmp_path, monkeypatch) -> None:
    """The options of the run's own config are those of its evaluation, so only the model's are composed here."""
    monkeypatch.setattr("sota_grpo.assembly.evaluation.resolve_model_path", lambda name: str(tmp_path))
    checked, before, train, after, _ = real.steps(given(tmp_path, preset))
    benchmark = real.BENCHMARKS[preset]
    overrides = [word for word in before.command if "=" in word]
    config = find_target("smollm2", overrides, config_name=preset, task=benchmark.task).config
    run = composed(preset, *(word for word in train.command if "=" in word and not word.startswith("hydra.")))
    validate(run)
    assert composed(preset, *(word for word in checked.command if "=" in word)).seed == run.seed
    assert (run.eval.mode, run.train.resume) == ("off", "auto")
    assert config.seed == run.seed == 3
    assert config.inference_model.max_tokens == benchmark.max_tokens
    assert (config.env.eval_path, config.env.dataset_path) == (run.env.eval_path, run.env.dataset_path)
    shared = list(before.command[before.command.index("--task") :])
    assert after.command[-len(shared) - 2 : -2] == shared
    assert after.command[-2:] == ["--against", str(before.target)]
