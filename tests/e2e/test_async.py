"""Whole runs of ``grpo-async.py``: real Ray, real engines, real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import SMALL, final_weights, metrics, without_clock

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
ASYNC = "grpo-async.py"
SAMPLER = """
from pathlib import Path
from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement

class Noted(SamplerWithoutReplacement):
    def sample(self, storage, batch_size):
        with Path(__file__).with_suffix(".txt").open("a") as notes:
            notes.write(f"{len(storage)} {batch_size}\\n")
        return super().sample(storage, batch_size)
"""
QUIET = ("check.mode=off", "eval.mode=off", "train.export_hf=false")


def test_at_age_0_it_equals_sync_bit_for_bit(tmp_path: Path, grpo) -> None:
    """Tokens depend on the version, so a push that is missed or early shows; the entropy bonus gives a gradient.

    At age 0 the finished groups are the batch, whatever sampler chooses among them.
    """
    (tmp_path / "sampler.py").write_text(SAMPLER)
    options = (*SMALL, *QUIET, "engine=scripted", "algorithm.entropy_coef=0.1", "train.optim_batch_size=8")
    sync = grpo(tmp_path / "sync", *options, "env.reward_workers=0")
    assert sync.returncode == 0, sync.stderr
    sampler = f"train.sampler={tmp_path}/sampler.py:Noted"
    concurrent = grpo(tmp_path / "async", *options, "train.max_policy_age=0", sampler, script=ASYNC)
    assert concurrent.returncode == 0, concurrent.stderr
    expected, actual = (without_clock(metrics(tmp_path / name)) for name in ("sync", "async"))
    assert [{name: row[name] for name in wanted} for row, wanted in zip(actual, expected, strict=True)] == expected
    rollouts = [(tmp_path / name / "rollouts.jsonl").read_text() for name in ("sync", "async")]
    assert rollouts[0] == rollouts[1]
    mine, theirs = final_weights(tmp_path / "async"), final_weights(tmp_path / "sync")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert expected[0]["grad_norm"] > 0
    notes = (tmp_path / "sampler.txt").read_text().splitlines()
    assert len(notes) == len(expected)
    assert len(set(notes)) == 1
    assert len(set(notes[0].split())) == 1
