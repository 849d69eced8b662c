"""Whole runs in this process: every preset, reference, precision and adapter trains on the real embedded engine."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sota_grpo.policy.load import load_model
from sota_grpo.recording.metrics import METRICS
from sota_grpo.run.app import train
from sota_grpo.training.gate import CHECKS
from tests.config.test_config import ALGORITHMS, composed
from tests.e2e.conftest import SMALL, final_weights, metrics

BASE = (
    *SMALL,
    "engine=transformers",
    "check.mode=strict",
    "eval.mode=off",
    "train.total_dialog_turns=32",
    "train.export_hf=false",
    "env.reward_workers=0",
    "env.num_heldout=32",
    "logging.report=false",
)
ALWAYS = (
    *("step", "reward", "success", "kl", "entropy", "ess", "clip_fraction", "grad_norm", "policy_age/max"),
    *("response_tokens/mean", "truncated", "groups/zero_advantage", "mismatch_kl", "time/step_s", "time/generate_s"),
    *("time/score_s", "time/ref_s", "time/learn_s", "time/publish_s", "tokens_per_s", "reward/correct"),
)
ROLLOUT = (
    *("step", "group_id", "sample_id", "query", "answer", "prompt", "response", "reward", "reward_terms"),
    *("response_tokens", "success", "reward_info", "advantage", "truncated", "policy_version"),
)


def run(tmp_path: Path, *overrides: str, config: str = "grpo_cpu") -> list[dict]:
    assert train(composed(config, *BASE, *overrides), tmp_path / "run") > 0
    return metrics(tmp_path / "run")


def rollouts(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_preset_trains(algorithm: str, tmp_path: Path) -> None:
    seed = 3 if algorithm == "pass_at_k" else 0  # a group with a single right response is rare
    rows = run(tmp_path, f"algorithm={algorithm}", "policy.kl_coef=0.01", f"seed={seed}", "check.mode=off")
    assert [row["step"] for row in rows] == [0, 1]
    for row in rows:
        assert set(ALWAYS) <= row.keys()
        assert row["mismatch_kl"] < 1e-8
    assert rows[0]["grad_norm"] > 0
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)  # the policy is the reference
    assert rows[1]["kl"] > 1e-9  # and no longer
    assert all(set(ROLLOUT) == row.keys() for row in rollouts(tmp_path))


def test_the_policy_learns(tmp_path: Path) -> None:
    rows = run(tmp_path, "env.num_envs=64", "env.repeats=8", "train.dialog_turns_per_batch=64",
               "train.optim_batch_size=64", "train.total_dialog_turns=384", "inference_model.max_tokens=64",
               "optimizer.lr=3e-4", "check.mode=off")  # fmt: skip
    assert (rows[0]["kl"], rows[0]["time/ref_s"]) == (None, 0)  # no reference
    first, last = (sum(row["reward"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > first + 0.15, [row["reward"] for row in rows]
    assert not list(tmp_path.rglob("report.html"))  # logging.report=false


@pytest.mark.parametrize(
    "overrides",
    [
        ("train_model.lora.enabled=true", "optimizer.lr=1e-2"),
        ("train_model.gradient_checkpointing=true", "algorithm.entropy_coef=0.01"),
        ("algorithm.drop_truncated=true", "algorithm.overlong_buffer=8"),
    ],
    ids=lambda overrides: ",".join(overrides),
)
def test_variants_train_with_a_reference(overrides: tuple[str, ...], tmp_path: Path) -> None:
    rows = run(tmp_path, "policy.kl_coef=0.01", "optimizer.warmup_steps=0", *overrides)
    assert rows[1]["kl"] > 1e-9
    assert rows[1]["mismatch_kl"] < 1e-8  # what was published, merged adapters included, is what the trainer holds


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains(precision: str, tmp_path: Path) -> None:
    rows = run(tmp_path, f"train.precision={precision}", "policy.kl_coef=0.01")
    assert 0 < rows[0]["mismatch_kl"] < 1e-2
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-6)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with evaluations, a reference, a report and an export."""
    folder = tmp_path_factory.mktemp("measured")
    options = ("eval.mode=on", "eval.every=1", "eval.avg_at_k=2", "env.reward_workers=1", "policy.kl_coef=0.01")
    options += ("optimizer.lr=1e-2", "optimizer.warmup_steps=0", "train.checkpoint_frequency=1")
    run(folder, *options, "logging.report=true", "train.export_hf=true")
    return folder / "run"


def test_evaluation_rows_and_their_errors(measured: Path) -> None:
    rows = metrics(measured)
    actual = [row for row in rows if "eval/accuracy" in row]
    assert [row["step"] for row in actual] == [0, 1, 2]
    for row in actual:
        share = row["eval/accuracy"]
        assert row["eval/stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 7))
        assert 0 <= row["eval/avg_at_k"] <= 1
    clocks = {name for name in METRICS if name.startswith("time/")} - {"time/wait_s"}  # which is of mode=async
    assert clocks <= set().union(*rows)
    lines = (line.partition("recording.progress: ") for line in (measured / "training.log").open())
    stages = [sentence.strip() for _, ours, sentence in lines if ours and "so far" not in sentence]
    assert [stage.partition(" ")[0] for stage in stages] == [
        *("Reading", "Loading", "Starting", "Building", "Waiting", "Sending", "Checking", "Evaluating", "The", "The"),
    ]  # once each: nothing is being started after the first step
    assert stages[-1] == "The first step is done."


def test_a_run_leaves_a_report_of_what_it_did(measured: Path) -> None:
    """Its gate and its stored steps included."""
    page = (measured / "report.html").read_text(encoding="utf-8")
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]
    assert (shown["state"], shown["done"]) == ("finished", 2)
    checks = [check["passed"] for check in shown["gate"]["checks"]]
    assert checks == [True] * (len(CHECKS) + 1)  # that of the reference, too
    rewards = [row["reward"] for row in metrics(measured) if "reward" in row]
    assert [value for value in shown["columns"]["reward"]["v"] if value is not None] == pytest.approx(rewards, rel=1e-4)
    assert shown["record"]["stored"] == [0, 1]
    first, *_ = (group for group in shown["groups"] if group["whole"] and group["step"] == 0)
    assert len(first["samples"]) == 4
    for sample in first["samples"]:  # the first policy is engine, trainer and reference in one
        assert "".join(sample["pieces"])
        assert sample["ratio"] == pytest.approx([1.0] * len(sample["pieces"]), abs=1e-3)
        assert sample["kl"] == pytest.approx([0.0] * len(sample["pieces"]), abs=1e-6)
        assert max(sample["entropy"]) > 0


def test_the_export_is_the_trained_policy(measured: Path) -> None:
    """Of an adapter: tests/e2e/test_export.py."""
    weights, exported = final_weights(measured), AutoModelForCausalLM.from_pretrained(measured / "hf")
    assert all(torch.equal(value, weights[f"model.{name}"]) for name, value in exported.named_parameters())
    base = load_model("tiny")
    moved = [n for (n, a), b in zip(exported.named_parameters(), base.parameters()) if not torch.equal(a, b)]
    assert any("q_proj" in name for name in moved)
    assert AutoTokenizer.from_pretrained(measured / "hf").chat_template
