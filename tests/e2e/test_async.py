"""Whole runs of ``grpo-async.py``: real Ray, real engines, real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import SMALL, final_weights, metrics, without_clock

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
ASYNC = "grpo-async.py"
QUIET = ("check.mode=off", "eval.mode=off", "train.export_hf=false")


def test_at_age_0_it_equals_sync_bit_for_bit(tmp_path: Path, grpo) -> None:
    """Tokens depend on the version, so a push that is missed or early shows; the entropy bonus gives a gradient."""
    options = (*SMALL, *QUIET, "engine=scripted", "algorithm.entropy_coef=0.1", "train.optim_batch_size=8")
    sync = grpo(tmp_path / "sync", *options)
    assert sync.returncode == 0, sync.stderr
    concurrent = grpo(tmp_path / "async", *options, "train.max_policy_age=0", script=ASYNC)
    assert concurrent.returncode == 0, concurrent.stderr
    expected, actual = (without_clock(metrics(tmp_path / name)) for name in ("sync", "async"))
    assert [{name: row[name] for name in wanted} for row, wanted in zip(actual, expected, strict=True)] == expected
    rollouts = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("sync", "async")]
    assert rollouts[0] == rollouts[1]
    mine, theirs = final_weights(tmp_path / "async"), final_weights(tmp_path / "sync")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert expected[0]["grad_norm"] > 0
