"""Whole runs of ``grpo-async.py``: real Ray, real engines, real ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import SMALL, final_weights, metrics, without_clock

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
ASYNC = "grpo-async.py"
QUIET = ("check.mode=off", "eval.mode=off", "train.export_hf=false")


def trained_ages(run_dir: Path) -> list[float]:
    return [row["policy_age/max"] for row in metrics(run_dir) if "policy_age/max" in row]


def test_at_age_0_it_equals_sync_bit_for_bit(tmp_path: Path, grpo) -> None:
    """The scripted engine's tokens depend on the version, so a push that is missed or early shows; the entropy bonus
    gives random answers a gradient."""
    options = (*SMALL, *QUIET, "engine=scripted", "algorithm.entropy_coef=0.1", "train.optim_batch_size=8")
    sync = grpo(tmp_path / "sync", *options)
    assert sync.returncode == 0, sync.stderr
    concurrent = grpo(tmp_path / "async", *options, "train.max_policy_age=0", script=ASYNC)
    assert concurrent.returncode == 0, concurrent.stderr
    expected, found = (without_clock(metrics(tmp_path / name)) for name in ("sync", "async"))
    assert [{name: row[name] for name in wanted} for row, wanted in zip(found, expected, strict=True)] == expected
    rollouts = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("sync", "async")]
    assert rollouts[0] == rollouts[1]
    mine, theirs = final_weights(tmp_path / "async"), final_weights(tmp_path / "sync")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert expected[0]["grad_norm"] > 0


ENGINES = [pytest.param("vllm", marks=pytest.mark.vllm)] if find_spec("vllm") else ["transformers"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_ranks_references_and_engines_of_their_own(engine: str, tmp_path: Path, grpo) -> None:
    """Two of each, with real vLLM as in the README, and with the tokens that top-k kept: it trains, the gate passes, no
    token is older than the bound."""
    options = (*SMALL, "policy.kl_coef=0.001", "optimizer.schedule=constant", "eval.every=0")
    options += ("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2")
    options += ("inference_model.top_k=20", f"engine={engine}")
    done = grpo(tmp_path / "run", *options, script=ASYNC, env={"VLLM_USE_V1": "0"})
    assert done.returncode == 0, done.stderr
    assert "VLLM_USE_V1=0 is accepted" in done.stderr
    assert "Placement: 2 learner ranks, 2 engines, 2 reference workers on the CPU." in done.stderr
    assert "Checks before training: 8 of 8 passed" in done.stdout
    assert max(trained_ages(tmp_path / "run")) == 1  # the bound of mode=async, reached
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
    rows = [row for row in metrics(tmp_path / "run") if "reward" in row]
    assert [row["step"] for row in rows] == list(range(4))
    groups = [json.loads(line)["group_id"] for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert sorted(set(groups)) == list(range(16))  # each prompt once
