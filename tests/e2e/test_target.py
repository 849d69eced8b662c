"""A run ends at its target score, on whatever step that is, and keeps its best checkpoint.

One with workers: tests/e2e/test_replay.py.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.assembly.evaluation import exported_steps, find_checkpoint
from sota_grpo.cli import step
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.run import app, launch
from sota_grpo.run.app import train
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.runs import RunDir
from tests.config.test_config import composed
from tests.e2e.conftest import SMALL, metrics, without_clock

OPTIONS = (
    *(*SMALL, "engine=scripted", "check.mode=off", "train.export_hf=false", "train.checkpoint_frequency=0"),
    *("env.reward_workers=0", "env.num_heldout=32", "logging.report=false", "logging.store_steps=false"),
    *("eval.every=1", "eval.avg_at_k=0", "optimizer.schedule=constant"),
)


@pytest.fixture
def scoring(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give the policy after each number of steps an accuracy; there are 8 problems, 2 of them in the subset."""

    def score(*accuracies: float) -> None:
        def measure(evaluator: Evaluator, target: float | None = None) -> dict[str, float]:
            accuracy = accuracies[evaluator.rollouts.engine.version]
            is_whole = target is None or accuracy > target - 0.2
            return {
                **{"eval/accuracy": accuracy, "eval/stderr": 0.0, "eval/reward": accuracy, "eval/reward_stderr": 0.0},
                **{"eval/num_samples": 8 if is_whole else 2, "time/eval_s": 0.0},
                **({"eval/first_turn_accuracy": accuracy} if accuracy < 1 else {}),
                **({"eval/task/rare": accuracy} if is_whole else {}),
            }

        monkeypatch.setattr(Evaluator, "measure", measure)

    return score


def run(run_dir: Path, *options: str) -> int:
    return train(composed("grpo_cpu", *OPTIONS, *options), run_dir)


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.stem[-6:]) for path in (run_dir / "checkpoints").glob("*.pt"))


def record(run_dir: Path, name: str = "run.json") -> dict[str, Any]:
    return json.loads((run_dir / name).read_text())


def test_a_run_ends_at_its_target_and_says_so_again(
    tmp_path: Path, scoring: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    scoring(0.1, 0.45, 0.5, 0.2, 0.3)
    run_dir, sentence = tmp_path / "run", "eval.target=0.5 was reached after 2 steps: 50.0 %"
    launch(composed("grpo_cpu", *OPTIONS, "eval.target=0.5", "train.export_hf=true"), run_dir)  # no KeyboardInterrupt
    assert sentence in capsys.readouterr().out.splitlines()
    assert checkpoints(run_dir) == [2]
    assert exported_steps(run_dir, composed("grpo_cpu", *OPTIONS, "train.export_hf=true")) == 2
    before = metrics(run_dir)
    assert [row["step"] for row in before] == [0, 0, 1, 1, 2]
    again = ("train.resume=auto", "train.export_hf=true")
    launch(composed("grpo_cpu", *OPTIONS, "eval.target=0.4", *again), run_dir)
    assert f"The run in {run_dir} is already finished. {sentence}.\n" in capsys.readouterr().out
    assert metrics(run_dir) == before
    assert run(run_dir, "eval.target=0.6", *again) == 4, "a higher target continues the run"
    assert "eval.target=0.6 was not reached in 4 steps" in capsys.readouterr().out.splitlines()
    assert run(tmp_path / "whole") == 4

    def steps(path: Path) -> list[dict]:
        return [row for row in without_clock(metrics(path)) if "eval/accuracy" not in row]

    assert steps(run_dir) == steps(tmp_path / "whole")


def test_a_run_that_was_killed_before_it_could_say_so_ends_as_well(
    tmp_path: Path, scoring: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring(0.1, 0.2, 0.5, 0.0, 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(RunDir, "finish", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path, "eval.target=0.5")
    assert run(tmp_path, "eval.target=0.5", "train.resume=auto") == 2
    assert record(tmp_path)["reached"] == {"step": 2, "accuracy": 0.5, "target": 0.5}
    assert [row["step"] for row in metrics(tmp_path)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("accuracies", "options", "evaluated"),
    [
        ((0.0, 0.0, 0.0, 0.0, 1.0), ("eval.target=1", "eval.every=3"), [0, 3, 4]),  # by the last step
        ((0.9, 0.1), ("eval.target=0.5",), [0]),  # before training
        ((0.9, 0.1, 0.5, 0.1, 0.1), ("eval.target=0.5", "eval.mode=after", "eval.every=2"), [2]),  # not before it
    ],
)
def test_a_target_is_reached_by_whichever_evaluation_has_it(
    accuracies: tuple[float, ...],
    options: tuple[str, ...],
    evaluated: list[int],
    tmp_path: Path,
    scoring: Callable[..., None],
) -> None:
    scoring(*accuracies)
    assert run(tmp_path, *options) == record(tmp_path)["reached"]["step"] == evaluated[-1]
    assert [row["step"] for row in metrics(tmp_path) if "eval/accuracy" in row] == evaluated
    assert checkpoints(tmp_path) == evaluated[-1:]
    assert run(tmp_path, *options, "train.resume=auto") == evaluated[-1]


def test_an_interrupt_in_the_last_evaluation_is_not_forgotten(
    tmp_path: Path, scoring: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run ends as it would have, but the sweep or the loop that it is in does not go on."""
    scoring(0.1, 0.2, 0.3, 0.4, 0.5)
    measure = Evaluator.measure

    def interrupted(evaluator: Evaluator, target: float | None = None) -> dict[str, float]:
        if evaluator.rollouts.engine.version == 4:
            signal.raise_signal(signal.SIGINT)
        return measure(evaluator, target)

    config = composed("grpo_cpu", *OPTIONS, "eval.every=3")
    assert launch(config, tmp_path / "before") is False
    monkeypatch.setattr(Evaluator, "measure", interrupted)
    assert launch(config, tmp_path / "run") is True
    assert record(tmp_path / "run")["finished"]
    assert "train.resume=auto continues the run" not in caplog.text


def test_the_best_checkpoint_is_kept(tmp_path: Path, scoring: Callable[..., None]) -> None:
    options = ("train.keep_best=eval/accuracy", "train.keep_checkpoints=1", "train.checkpoint_frequency=1")
    scoring(0.1, 0.5, 0.3, 0.5, 0.2)
    assert run(tmp_path, *options) == 4
    assert checkpoints(tmp_path) == [1, 4]
    assert record(tmp_path, "best.json") == {"step": 1, "metric": "eval/accuracy", "value": 0.5}
    assert find_checkpoint(tmp_path, "best") == (1, tmp_path / "checkpoints" / "checkpoint_000001.pt")
    scoring(0.1, 0.5, 0.3, 0.5, 0.2, 0.4, 0.6)
    assert run(tmp_path, *options, "train.resume=auto", "train.total_dialog_turns=96") == 6
    assert checkpoints(tmp_path) == [1, 6]
    assert find_checkpoint(tmp_path, "best")[0] == 6


def test_the_best_checkpoint_is_chosen_on_the_command_line(tmp_path: Path) -> None:
    assert [step(text) for text in ("best", "0", "12")] == ["best", 0, 12]
    with pytest.raises(argparse.ArgumentTypeError, match="'better' is not a number of steps"):
        step("better")
    with pytest.raises(UserError, match=r"has no best\.json, which train\.keep_best=METRIC writes"):
        find_checkpoint(tmp_path, "best")


@pytest.mark.parametrize(
    ("accuracies", "options", "best"),
    [
        ((0.1, 0.45, 0.3, 0.4, 0.2), ("eval/accuracy", "eval.target=0.65"), 4),  # the only one on all problems
        ((0.2, 0.4, 1.0, 0.6, 0.3), ("eval/first_turn_accuracy",), 3),  # none where all responses are right at once
        ((0.1, 0.2, 0.3, 0.4, 0.5), ("eval/task/rare", "eval.target=0.65"), 4),  # none in the subset of problems
    ],
)
def test_an_evaluation_of_a_subset_or_without_the_metric_is_not_the_best(
    accuracies: tuple[float, ...], options: tuple[str, ...], best: int, tmp_path: Path, scoring: Callable[..., None]
) -> None:
    scoring(*accuracies)
    assert run(tmp_path, *("train.keep_best=" * ("." not in option) + option for option in options)) == 4
    assert find_checkpoint(tmp_path, "best")[0] == record(tmp_path, "best.json")["step"] == best


def test_a_metric_that_is_not_measured_is_refused_and_the_steps_before_are_saved(
    tmp_path: Path, scoring: Callable[..., None]
) -> None:
    scoring(0.1, 0.2, 0.3)
    with pytest.raises(UserError, match=r"keep_best=eval/acuracy is no metric .* use one of eval/accuracy, eval/fi"):
        run(tmp_path, "train.keep_best=eval/acuracy", "eval.target=0.5")
    assert not list(tmp_path.glob("checkpoints/*"))
    with pytest.raises(UserError, match=r"keep_best=eval/avg_at_k is no metric"):
        run(tmp_path, "train.keep_best=eval/avg_at_k", "eval.mode=after", "eval.every=2", "train.resume=auto")
    assert checkpoints(tmp_path) == [2]
    scoring(0.1, 0.2, 0.3, 0.4, 0.5)
    assert run(tmp_path, "train.keep_best=eval/accuracy", "eval.mode=after", "eval.every=2", "train.resume=auto") == 4


def test_a_full_disk_at_the_name_of_the_best_is_one_sentence(
    tmp_path: Path, scoring: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    scoring(0.1)
    monkeypatch.setattr(app, "write_json", full)
    with pytest.raises(RunFailed, match=r"best\.json cannot be written .No space left on device.*train\.resume=auto"):
        run(tmp_path, "train.keep_best=eval/accuracy")
