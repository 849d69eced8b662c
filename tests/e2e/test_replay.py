"""``sota-grpo replay`` on a run with workers and ranks that ended at its target. Others: tests/unit/test_replay.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sota_grpo.assembly.evaluation import find_checkpoint
from sota_grpo.recording.stored_steps import read_step, stored_steps
from tests.docs.desk import write_program
from tests.e2e.conftest import SMALL
from tests.forked import ForkServer

OPTIONS = (
    *(*SMALL, "engine=transformers", "check.mode=off", "train.export_hf=false", "logging.report=false"),
    *("env.difficulty=1", "train.checkpoint_frequency=1", "optimizer.schedule=constant", "policy.kl_coef=0.01"),
    *("train_model.num_devices=4", "train_model.tensor_parallel_size=2"),
    "inference_model.top_k=20",  # the sets that it keeps travel along
    *("eval.mode=after", "eval.every=2", "eval.num_samples=32", "eval.avg_at_k=0"),
    *("eval.target=0.05", "train.keep_best=eval/accuracy", "inference_model.max_tokens=40"),
)


@pytest.mark.slow
def test_a_run_with_workers_and_ranks_ends_at_its_target_and_replays_in_one_process(
    tmp_path: Path, grpo, fork_server: ForkServer
) -> None:
    """Two by two ranks: each pair has rows of its own, and its two divide the matrices between them.

    Far more than one in twenty of the easiest problems the embedded policy answers before it is trained.
    """
    pytest.importorskip("ray", reason="needs Ray (the extra ray)")
    run_dir = tmp_path / "run"
    done = grpo(run_dir, *OPTIONS, script="grpo-async.py")
    assert done.returncode == 0, done.stderr
    assert "eval.target=0.05 was reached after 2 steps:" in done.stdout
    assert find_checkpoint(run_dir, "best")[0] == 2
    stored = read_step(stored_steps(run_dir)[1])
    assert stored.origin.num_ranks == 4
    sample = max(stored.samples, key=lambda each: each["response_tokens"])
    assert min(sample["policy_log_probs"]) < 0 < max(sample["entropy"])
    program = write_program(tmp_path / "bin", sys.executable)
    again = fork_server.run([str(program), "replay", str(run_dir), "--step", "1", "--json"], cwd=tmp_path)
    assert again.code == 0, again.stderr
    actual = json.loads(again.stdout)
    for name in ("loss/objective", "loss/kl", "grad_norm", "kl", "entropy"):
        values = actual["figures"][name]
        # the objective is a sum of advantages that cancel
        nothing = 1e-6 if name == "loss/objective" else 1e-7
        assert values["replayed"] == pytest.approx(values["stored"], rel=1e-4, abs=nothing), name
    assert any("4 ranks" in note for note in actual["notes"])
