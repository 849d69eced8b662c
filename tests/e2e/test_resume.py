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

from sota_grpo.errors import RunFailed
from sota_grpo.policy.load import resolve_model_path
from sota_grpo.recording.progress import Progress
from sota_grpo.recording.run_files import FAILURE_FILE, read_json
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


def test_killed_run_equals_the_uninterrupted_one(tmp_path: Path, grpo, signalled) -> None:
    """With the sets that top-p keeps, which travel with the tokens."""
    options = (*SCRIPTED, "engine=transformers", "env.reward_workers=1", "train.total_dialog_turns=96")
    options += ("inference_model.top_p=0.9", "inference_model.temperature=1.5")
    options += ("algorithm.entropy_target=9", "algorithm.top_entropy_quantile=0.5")  # it grows each step
    whole = grpo(tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr
    run_dir, again = tmp_path / "killed", (*options, "train.resume=auto")
    for kill in random.sample(range(2), 2):
        moment = mid_checkpoint(run_dir) if kill == 0 else after_rows(run_dir, 2, random.uniform(0, 0.1))
        assert signalled(signal.SIGKILL, moment, run_dir, *again).code == -signal.SIGKILL
    last = grpo(run_dir, *again)
    assert last.returncode == 0, last.stderr
    assert without_clock(metrics(run_dir)) == without_clock(metrics(tmp_path / "whole"))
    coefs = [row["entropy_coef"] for row in metrics(run_dir) if "entropy_coef" in row]
    assert len(coefs) > 2
    assert coefs == sorted(set(coefs))
    mine, theirs = final_weights(run_dir), final_weights(tmp_path / "whole")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    rollouts = [(path / "rollouts.jsonl").read_text() for path in (run_dir, tmp_path / "whole")]
    assert rollouts[0] == rollouts[1]


def test_resume_finds_the_newest_unfinished_run_by_itself(tmp_path: Path, grpo, signalled) -> None:
    options = (*SCRIPTED, "eval.mode=off", "train.total_dialog_turns=96")
    first = tmp_path / "outputs" / "2026-01-01" / "10-00-00"
    signalled(signal.SIGKILL, after_rows(first, 2), first, *options)
    second = tmp_path / "outputs" / "2026-01-02" / "10-00-00"
    done = grpo(second, *options, "train.resume=auto", "train.micro_batch_tokens=512")  # an option that is free
    assert done.returncode == 0, done.stderr
    assert re.search(rf"Continuing {first} after [1-6] steps", done.stderr)
    assert [row["step"] for row in metrics(first)] == list(range(6))
    assert not second.exists()
    again = grpo(second, *options, "train.resume=auto")  # nothing unfinished is left: a fresh run
    assert again.returncode == 0
    assert f"There is no checkpoint to resume: starting a new run in {second}" in again.stderr
    assert [row["step"] for row in metrics(second)] == list(range(6))


def test_a_finished_run_that_is_made_longer_equals_the_long_one(tmp_path: Path, grpo) -> None:
    options = (*SCRIPTED, "eval.num_samples=4", "train.total_dialog_turns=32")
    options += ("optimizer.schedule=constant",)  # a learning rate that does not depend on the length of the run
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert grpo(run_dir, *options).returncode == 0
    longer = (*options, "train.total_dialog_turns=64")
    assert grpo(tmp_path / "fresh", *longer, f"train.resume={run_dir}").returncode == 0
    assert grpo(whole, *longer).returncode == 0
    assert without_clock(metrics(run_dir)) == without_clock(metrics(whole))


def test_ctrl_c_saves_the_step_and_exits(tmp_path: Path, signalled) -> None:
    run_dir = tmp_path / "run"
    options = (*SCRIPTED, "eval.mode=off", "train.total_dialog_turns=16000", "train.checkpoint_frequency=25")
    done = signalled(signal.SIGINT, after_rows(run_dir, 2), run_dir, *options)
    assert done.code == 130, done.stderr
    assert "Traceback" not in done.stderr
    newest = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    assert newest.stem == f"checkpoint_{len(metrics(run_dir)):06d}"


def test_a_run_does_not_continue_over_another_base_model(tmp_path: Path, grpo) -> None:
    """Of an adapter a checkpoint has no weight of the base."""
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    options = (*SCRIPTED, f"model.name={folder}", "train_model.lora.enabled=true", "train.total_dialog_turns=32")
    assert grpo(tmp_path / "run", *options).returncode == 0
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    done = grpo(tmp_path / "run", *options, "train.resume=auto", "train.total_dialog_turns=64")
    assert done.returncode == 2, done.stderr
    assert "was started with other files of model.name" in done.stderr


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
    options = (*SCRIPTED, "eval.mode=off", "logging.report=true")
    assert train(composed("grpo_cpu", *options, "train.checkpoint_frequency=100"), tmp_path) == 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_000002.pt"]
    log = (tmp_path / "training.log").read_text()
    assert log.count("cannot be written (Broken pipe); its further output is discarded") == 1
    assert log.count("SIGHUP: stopping after this step") == 1
    assert train(composed("grpo_cpu", *options, "train.resume=auto"), tmp_path) == 4
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
