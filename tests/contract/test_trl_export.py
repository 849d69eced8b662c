"""The arguments that ``sota-grpo export --to trl`` writes: TRL takes them, and computes our gradient with them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments

from sota_grpo import keys
from sota_grpo.config import Config
from sota_grpo.config.spelling import NOT_HERE, THEIRS, walk
from sota_grpo.migration.export import write_trl
from sota_grpo.migration.trl import Code, trl_arguments
from sota_grpo.rl.collate import pad_rows, set_loss_weights
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.run.app import train
from tests.builders import ModelActor, tiny_model, tiny_tokenizer
from tests.config.test_config import ALGORITHMS, PRESETS, composed
from tests.contract.test_trl_parity import (
    DRIFT,
    MAX_RESPONSE_TOKENS,
    keep_top_entropy,
    rows_near,
    trl_inputs,
    value_and_gradient,
)
from tests.e2e.conftest import SMALL

pytestmark = pytest.mark.bench
trl = pytest.importorskip("trl", reason="TRL is a benchmark-only dependency: pip install sota-grpo[bench]")

ON_CPU = {"bf16": False, "fp16": False, "use_cpu": True, "use_vllm": False, "report_to": "none"}


def grpo_config(config: Config, folder: Path, **others):
    found = {name: value for name, value in trl_arguments(config)[0].items() if not isinstance(value, Code)}
    return trl.GRPOConfig(output_dir=str(folder), **(found | ON_CPU | others))


@pytest.mark.parametrize("overrides", [(), ("mode=async",), ("train_model.lora.enabled=true", "engine=vllm_server")])
@pytest.mark.parametrize("name", PRESETS)
def test_trl_takes_the_arguments_of_every_preset(name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = composed(name, *overrides)
    found = grpo_config(config, tmp_path)
    size = config.train.optim_batch_size
    assert found.per_device_train_batch_size * found.gradient_accumulation_steps == size
    assert found.generation_batch_size % config.env.repeats == 0
    assert found.max_steps == config.train.total_dialog_turns // size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_trl_computes_our_gradient_with_them(algorithm: str, tmp_path: Path) -> None:
    """Of rows that drifted from their log-probs, where TRL has a ratio to them, else on policy."""
    overrides = (f"algorithm={algorithm}", "policy.kl_coef=0.1", f"inference_model.max_tokens={MAX_RESPONSE_TOKENS}")
    config, model = composed("grpo_cpu", *overrides), tiny_model()
    part = config.algorithm
    rows = rows_near(model, algorithm if algorithm in DRIFT else "grpo")
    if part.top_entropy_quantile < 1:
        rows = keep_top_entropy(model, rows, part.top_entropy_quantile)
    rows = set_loss_weights(rows, part.aggregation, max_response_tokens=MAX_RESPONSE_TOKENS)
    inputs = trl_inputs(rows)
    batch = pad_rows(rows, pad_token_id=0)
    if algorithm not in DRIFT:  # REINFORCE, and k2: equal in the first step of a batch
        with torch.no_grad():
            batch.set(keys.LOG_PROBS, ModelActor(model)(batch.copy())[keys.LOG_PROBS])
        del inputs["old_per_token_logps"]
    ours = GRPOLoss(
        ModelActor(model),
        objective=part.objective,
        ratio=part.ratio,
        clip_epsilon=(part.clip_low, part.clip_high),
        kl_estimator=part.kl_estimator,
        kl_unbiased=part.kl_unbiased,
        off_policy_threshold=part.off_policy_threshold,
        kl_to_ref_coeff=config.policy.kl_coef,
        entropy_bonus=False,
    )(batch)
    whole = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "steps_per_generation": 1}
    arguments = grpo_config(config, tmp_path, beta=0.0, num_generations=2, gradient_checkpointing=False, **whole)
    from datasets import Dataset

    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["w3"]}),
        processing_class=tiny_tokenizer(),
    )
    trainer.beta = trl_arguments(config)[0]["beta"]  # set now: it would load a reference from the hub
    model.eval()
    _, grad = value_and_gradient(model, ours.loss_objective + ours.loss_kl_to_ref)
    _, their_grad = value_and_gradient(model, trainer._compute_loss(model, inputs))
    torch.testing.assert_close(grad, their_grad, rtol=1e-5, atol=1e-5)


def test_leaving_one_out_is_a_weight_of_the_reward() -> None:
    """r_i - mean of the others = G / (G - 1) * (r_i - mean), so TRL's group mean of weighted rewards is RLOO's."""
    found = trl_arguments(composed("grpo_cpu", "algorithm=rloo", "env.repeats=4"))[0]
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5])
    weighted = rewards * found["reward_weights"][0]
    theirs = weighted - weighted.mean()
    ours = torch.stack([rewards[i] - rewards[[j for j in range(4) if j != i]].mean() for i in range(4)])
    torch.testing.assert_close(theirs, ours)
    assert found["scale_rewards"] == "none"


@pytest.mark.slow
def test_the_script_trains(tmp_path: Path) -> None:
    overrides = (
        "algorithm=dapo",
        "policy.kl_coef=0.01",
        "algorithm.overlong_buffer=8",
        "train_model.lora.enabled=true",
    )
    options = (*SMALL, "engine=transformers", "eval.mode=off", "check.mode=off", "env.max_samples=32",
               "train.total_dialog_turns=16", "train.export_hf=false")  # fmt: skip
    assert train(composed("grpo_cpu", *options, *overrides), tmp_path / "run") == 1
    write_trl(tmp_path / "run", tmp_path / "out")
    done = subprocess.run(
        [
            sys.executable,
            str(tmp_path / "out" / "train.py"),
            "--max-steps",
            "2",
            "--output-dir",
            str(tmp_path / "trained"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'reward'" in done.stdout or "reward" in done.stderr
    assert any((tmp_path / "trained").glob("*.safetensors"))


def test_every_option_of_trl_is_ours_or_explained() -> None:
    """But those of transformers' trainer, which are many; the ones that people do set are among the explained."""
    own = {item.name for item in fields(trl.GRPOConfig)} - {item.name for item in fields(TrainingArguments)}
    last = {option.rpartition(".")[2] for option, _, _ in walk()}
    left = sorted(own - last - THEIRS.keys() - NOT_HERE.keys())
    assert left == [], left
