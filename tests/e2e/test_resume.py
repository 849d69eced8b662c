"""A kill loses nothing: after ``kill -9`` at any moment the resumed run equals the uninterrupted one bit for bit."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.policy.load import resolve_model_path
from sota_grpo.recording.progress import Progress
from sota_grpo.recording.run_files import FAILURE_FILE, read_json
from sota_grpo.recording.stored_steps import StoredStep, read_step, stored_steps
from sota_grpo.run.app import train
from tests.config.test_config import composed
from tests.e2e.conftest import SMALL, final_weights, metrics, without_clock

SCRIPTED = (
    *(*SMALL, "engine=scripted", "check.mode=off", "train.export_hf=false", "train.checkpoint_frequency=1"),
    *("env.reward_workers=0", "env.num_heldout=32", "logging.report=false"),
)


def mid_checkpoint(run_dir: Path) -> Callable[[], bool]:
    """True while a checkpoint is being written: its temporary name is there."""

    def moment() -> bool:
        folder = run_dir / "checkpoints"
        return folder.is_dir() and any(not path.name.startswith("checkpoint_") for path in folder.iterdir())

    return moment


def after_rows(run_dir: Path, count: int, delay_s: float = 0.0) -> Callable[[], bool]:
    """True ``delay_s`` after ``metrics.jsonl`` has ``count`` rows more than now."""
    path, seen = run_dir / "metrics.jsonl", list[float]()
    before = path.read_bytes().count(b"\n") if path.exists() else 0

    def moment() -> bool:
        if not seen and path.exists() and path.read_bytes().count(b"\n") >= before + count:
            seen.append(time.monotonic())
        return bool(seen) and time.monotonic() >= seen[0] + delay_s

    return moment


def content(stored: StoredStep) -> tuple:
    """All but the clock and the machine, as plain values."""
    rows = [
        {str(name): value.tolist() for name, value in row.items() if isinstance(value, torch.Tensor)}
        for row in stored.rows
    ]
    return without_clock([stored.metrics]), rows, stored.samples


def test_killed_run_equals_the_uninterrupted_one(tmp_path: Path, grpo, signalled) -> None:
    """With the sets that top-p keeps, which travel with the tokens. Each later start finds the run by itself."""
    options = (*SCRIPTED, "engine=transformers", "env.reward_workers=1", "train.total_dialog_turns=96")
    options += ("inference_model.top_p=0.9", "inference_model.temperature=1.5")
    options += ("algorithm.entropy_target=9", "algorithm.top_entropy_quantile=0.5")  # it grows each step
    whole = tmp_path / "whole"
    done = grpo(whole, *options)
    assert done.returncode == 0, done.stderr
    run_dir, *others = (tmp_path / "outputs" / f"2026-01-0{day}" / "10-00-00" for day in (1, 2, 3))
    again = (*options, "train.resume=auto")
    for kill, started in zip(random.sample(range(2), 2), (run_dir, others[0])):
        moment = mid_checkpoint(run_dir) if kill == 0 else after_rows(run_dir, 3, random.uniform(0, 0.1))
        assert signalled(signal.SIGKILL, moment, started, *again).code == -signal.SIGKILL
    last = grpo(others[1], *again)
    assert last.returncode == 0, last.stderr
    assert re.search(rf"Continuing {run_dir} after [1-6] steps?\.", last.stderr)
    assert not any(other.exists() for other in others)
    assert without_clock(metrics(run_dir)) == without_clock(metrics(whole))
    coefs = [row["entropy_coef"] for row in metrics(run_dir) if "entropy_coef" in row]
    assert len(coefs) > 2
    assert coefs == sorted(set(coefs))
    mine, theirs = final_weights(run_dir), final_weights(whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    rollouts = [(path / "rollouts.jsonl").read_text() for path in (run_dir, whole)]
    assert rollouts[0] == rollouts[1]
    stored = [[content(read_step(path)) for path in stored_steps(each).values()] for each in (run_dir, whole)]
    assert len(stored[0]) == 6
    assert stored[0] == stored[1]


def test_a_finished_run_that_is_made_longer_equals_the_long_one(tmp_path: Path) -> None:
    options = (*SCRIPTED, "eval.num_samples=4", "train.total_dialog_turns=32")
    options += ("optimizer.schedule=constant",)  # a learning rate that does not depend on the length of the run
    run_dir, whole, longer = tmp_path / "run", tmp_path / "whole", (*options, "train.total_dialog_turns=64")
    assert train(composed("grpo_cpu", *options), run_dir) == 2
    assert train(composed("grpo_cpu", *longer, f"train.resume={run_dir}"), tmp_path / "fresh") == 4
    assert train(composed("grpo_cpu", *longer), whole) == 4
    assert without_clock(metrics(run_dir)) == without_clock(metrics(whole))


def test_ctrl_c_saves_the_step_and_exits(tmp_path: Path, signalled) -> None:
    run_dir = tmp_path / "run"
    options = (*SCRIPTED, "eval.mode=off", "train.total_dialog_turns=16000", "train.checkpoint_frequency=25")
    done = signalled(signal.SIGINT, after_rows(run_dir, 2), run_dir, *options)
    assert done.code == 130, done.stderr
    assert "Traceback" not in done.stderr
    newest = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    assert newest.stem == f"checkpoint_{len(metrics(run_dir)):06d}"


def test_a_run_does_not_continue_over_another_base_model(tmp_path: Path) -> None:
    """Of an adapter a checkpoint has no weight of the base."""
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    options = (*SCRIPTED, "eval.mode=off", f"model.name={folder}", "train_model.lora.enabled=true")
    assert train(composed("grpo_cpu", *options, "train.total_dialog_turns=16"), tmp_path / "run") == 1
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, tmp_path / "other.safetensors", metadata={"format": "pt"})
    (tmp_path / "other.safetensors").replace(folder / "model.safetensors")
    with pytest.raises(UserError, match=r"was started with other files of model\.name"):
        train(composed("grpo_cpu", *options, "train.resume=auto", "train.total_dialog_turns=32"), tmp_path / "run")


@pytest.mark.parametrize("terminal", [False, True])
def test_a_run_whose_console_goes_away_continues_and_saves_at_a_hangup(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader is gone from the first line on; SIGHUP comes twice in its second step."""
    update = Progress.update

    def hang_up(progress: Progress, done: int, values: dict) -> str:
        for _ in range(2 * (done == 2)):
            signal.raise_signal(signal.SIGHUP)
        return update(progress, done, values)

    reader, writer = os.pipe()
    os.close(reader)
    console = os.fdopen(writer, "w")
    monkeypatch.setattr(console, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", console)
    monkeypatch.setattr(Progress, "update", hang_up)
    options = (*SCRIPTED, "eval.mode=off", "logging.report=true", "train.checkpoint_frequency=100")
    assert train(composed("grpo_cpu", *options), tmp_path) == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_000002.pt"]
    log = (tmp_path / "training.log").read_text()
    assert log.count("cannot be written (Broken pipe); its further output is discarded") == 1
    assert log.count("SIGHUP: stopping after this step") == 1
    console.close()  # what was not written does not fail the process at its end


def test_user_code_that_ends_the_program_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the process would end without a word and with exit code 0, as after the last step."""
    monkeypatch.setattr(Progress, "update", lambda *_: sys.exit(0))
    with pytest.raises(RunFailed, match=r"test_resume\.py, line \d+: <lambda> raised SystemExit\(0\)"):
        train(composed("grpo_cpu", *SCRIPTED, "eval.mode=off"), tmp_path)
    assert "raised SystemExit(0)" in read_json(tmp_path / FAILURE_FILE)["reason"]


def test_what_ends_a_run_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The console that showed the traceback may be gone."""
    monkeypatch.setattr(Progress, "update", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        train(composed("grpo_cpu", *SCRIPTED, "eval.mode=off"), tmp_path)
    log = (tmp_path / "training.log").read_text()
    assert "Traceback" in log
    assert read_json(tmp_path / FAILURE_FILE)["reason"] == "ZeroDivisionError: integer division or modulo by zero"
