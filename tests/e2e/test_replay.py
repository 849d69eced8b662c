"""``sota-grpo replay`` on a run that was broken off, and on one with workers and ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sota_grpo.recording.stored_steps import StoredStep, read_step, step_of, stored_steps
from tests.docs.desk import write_program
from tests.e2e.conftest import SMALL, of_machine
from tests.forked import Done, ForkServer

QUIET = ("engine=transformers", "check.mode=off", "eval.mode=off", "train.export_hf=false", "logging.report=false")
OPTIONS = (*SMALL, *QUIET, "env.difficulty=1", "train.checkpoint_frequency=1", "optimizer.schedule=constant")


@pytest.fixture
def replay(tmp_path: Path, fork_server: ForkServer) -> Callable[..., Done]:
    program = write_program(tmp_path / "bin", sys.executable)
    return lambda *arguments: fork_server.run([str(program), "replay", *arguments], cwd=tmp_path)


def content(stored: StoredStep) -> tuple:
    """All but the clock and the machine, as plain values."""
    figures = {name: value for name, value in stored.metrics.items() if not of_machine(name)}
    rows = [
        {str(name): value.tolist() for name, value in row.items() if isinstance(value, torch.Tensor)}
        for row in stored.rows
    ]
    return figures, rows, stored.samples


@pytest.mark.slow
def test_a_resumed_run_stores_again_what_it_does_again(tmp_path: Path, grpo, replay) -> None:
    run_dir = tmp_path / "run"
    first = grpo(run_dir, *OPTIONS, "train.keep_checkpoints=9")
    assert first.returncode == 0, first.stderr
    assert [step_of(path) for path in stored_steps(run_dir)] == [0, 1, 2, 3]
    before = [content(read_step(path)) for path in stored_steps(run_dir)]
    for steps in (3, 4):
        (run_dir / "checkpoints" / f"checkpoint_{steps:06d}.pt").unlink()
    longer = (f"train.resume={run_dir}", "train.total_dialog_turns=80", "train.keep_checkpoints=9")
    second = grpo(tmp_path / "again", *OPTIONS, *longer)
    assert second.returncode == 0, second.stderr
    assert "after 2 steps" in second.stderr
    after = [content(read_step(path)) for path in stored_steps(run_dir)]
    assert len(after) == 5
    assert after[:4] == before

    done = replay(str(run_dir), "--json")
    assert done.code == 0, done.stderr
    actual = json.loads(done.stdout)
    assert actual["step"] == 4
    assert actual["agrees"]
    refused = replay(str(run_dir), "--step", "7")
    assert refused.code == 2
    assert "steps that can be replayed: 0, 1, 2, 3, 4. To replay all" in refused.stderr


@pytest.mark.slow
def test_a_run_with_workers_and_ranks_replays_in_one_process(tmp_path: Path, grpo, replay) -> None:
    """Two by two ranks: each pair has rows of its own, and its two divide the matrices between them."""
    pytest.importorskip("ray", reason="needs Ray (the extra ray)")
    run_dir = tmp_path / "run"
    options = ("train_model.num_devices=4", "train_model.tensor_parallel_size=2", "policy.kl_coef=0.01")
    options += ("train.total_dialog_turns=32", "inference_model.top_k=20")  # the sets that it keeps travel along
    done = grpo(run_dir, *OPTIONS, *options, script="grpo-async.py")
    assert done.returncode == 0, done.stderr
    stored = read_step(stored_steps(run_dir)[1])
    assert stored.origin.num_ranks == 4
    sample = max(stored.samples, key=lambda each: each["response_tokens"])
    assert min(sample["policy_log_probs"]) < 0 < max(sample["entropy"])
    again = replay(str(run_dir), "--step", "1", "--json")
    assert again.code == 0, again.stderr
    actual = json.loads(again.stdout)
    for name in ("loss/objective", "loss/kl", "grad_norm", "kl", "entropy"):
        values = actual["figures"][name]
        # the objective is a sum of advantages that cancel
        nothing = 1e-6 if name == "loss/objective" else 1e-7
        assert values["replayed"] == pytest.approx(values["stored"], rel=1e-4, abs=nothing), name
    assert any("4 ranks" in note for note in actual["notes"])
