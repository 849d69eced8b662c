"""The command line as the README shows it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, metrics

GSM8K = next(
    (
        folder / "gsm8k" / "train.jsonl"
        for folder in (Path(os.environ.get("SOTA_GRPO_DATA", "/nowhere")), ROOT.parent / "shared" / "data")
        if (folder / "gsm8k" / "train.jsonl").exists()
    ),
    None,
)


def has_vllm() -> bool:
    from importlib.util import find_spec

    return find_spec("vllm") is not None


@pytest.mark.slow  # of vLLM beside Ray: tests/docs/test_reference_commands.py
@pytest.mark.vllm
@pytest.mark.data
@pytest.mark.skipif(not has_vllm(), reason="vLLM is not installed")
@pytest.mark.skipif(GSM8K is None, reason="GSM8K's training file is not on this machine (SOTA_GRPO_DATA)")
def test_gsm8k_through_the_real_vllm(tmp_path: Path, grpo) -> None:
    """The issue's own command, with a smaller evaluation: real questions, real engine, real reference."""
    done = grpo(
        tmp_path / "run",
        "env.dataset=gsm8k",
        f"env.dataset_path={GSM8K}",
        f"model.name={ROOT / 'sota_grpo' / 'assets' / 'tiny'}",
        "engine=vllm",
        "inference_model.max_tokens=64",
        "train.total_dialog_turns=256",
        "eval.num_samples=16",
        "eval.avg_at_k=0",
        config="grpo_gsm8k",
        env={"VLLM_USE_V1": "0"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "VLLM_USE_V1=0 is accepted" in done.stderr
    assert re.search(r"Checks before training: (\d+) of \1 passed", done.stdout)
    questions = {json.loads(line)["question"] for line in GSM8K.read_text().splitlines()}
    rollouts = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts
    assert all(row["query"] in questions and "####" in row["answer"] for row in rollouts)
    rows = [row for row in metrics(tmp_path / "run") if "reward" in row]
    assert [row["step"] for row in rows] == [0, 1]
    assert all(row["mismatch_kl"] < 1e-8 and row["policy_age/max"] == 0 for row in rows)
    assert {row["policy_version"] for row in rollouts} == {0, 1}
    assert (tmp_path / "run" / "hf" / "model.safetensors").exists()
