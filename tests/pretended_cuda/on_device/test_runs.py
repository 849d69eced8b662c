"""Whole synchronous runs on the device: sampling, reference, training, checkpoints, and going on from one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from sota_grpo.assembly.compose import compose
from sota_grpo.run.app import train
from tests.e2e.conftest import final_weights, metrics, without_clock

SMALL = (
    "device=cuda",
    "engine=transformers",
    "env.num_envs=8",
    "env.repeats=4",
    "inference_model.max_tokens=24",
    "train.total_dialog_turns=16",
    "train.dialog_turns_per_batch=8",
    "train.optim_batch_size=8",
    "train.checkpoint_frequency=1",
    "train.export_hf=false",
    "eval.mode=off",
    "logging.report=false",
)


def run(folder: Path, *overrides: str) -> list[dict]:
    """The metrics of two steps of packed rows, of which one had a gradient at least."""
    assert train(compose("grpo_cpu", [*SMALL, *overrides]), folder) == 2
    assert "computes packed rows" in (folder / "training.log").read_text()
    rows = metrics(folder)
    assert any(row["grad_norm"] > 0 for row in rows)
    return rows


def test_an_adapter_in_fp16_continues_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Its dropout draws from the device's random stream, which is in the checkpoint therefore."""
    options = (
        "train_model.lora.enabled=true",
        "train_model.lora.dropout=0.1",
        "train.precision=fp16",
        "check.mode=off",
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = run(whole, *options)
    shutil.copytree(whole, cut)
    (cut / "checkpoints" / "checkpoint_000002.pt").unlink()
    record = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps(record | {"finished": False}))
    torch.manual_seed(99)
    assert without_clock(run(cut, *options, f"train.resume={cut}")) == without_clock(expected)
    weights = final_weights(whole)
    assert weights.keys() == final_weights(cut).keys()
    assert all(torch.equal(value, weights[name]) for name, value in final_weights(cut).items())
