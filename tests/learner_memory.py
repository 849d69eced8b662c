"""Peak memory of a learner in a process of its own, measured and predicted.

``python -m tests.learner_memory JSON SEED``, where JSON is a list of cases.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.peers.memory import peak_bytes
from sota_grpo import keys
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.estimate import GIB, Estimate, Learning, Machine, MicroBatch, learner_memory
from sota_grpo.policy.causal import CausalPolicy
from sota_grpo.policy.load import architecture_from, enable_gradient_checkpointing
from sota_grpo.policy.lora import add_lora, quantize
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings, groups_by_prompt, micro_batches, row_prompts
from sota_grpo.training.learner import Learner
from tests.builders import random_row

FAMILIES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
SMALL = {
    **{"hidden": 64, "layers": 1, "heads": 2, "kv_heads": 2, "intermediate": 64, "vocab": 300, "tied": True},
    **{"prompt": 8, "response": 8, "group": 2, "groups": 2, "budget": 64},
}


def model_config(case: dict[str, Any]) -> Any:
    """The transformers config of a case."""
    return FAMILIES[case.get("family", "qwen2")][0](
        hidden_size=case["hidden"],
        num_hidden_layers=case["layers"],
        num_attention_heads=case["heads"],
        num_key_value_heads=case["kv_heads"],
        head_dim=case["hidden"] // case["heads"],
        intermediate_size=case["intermediate"],
        vocab_size=case["vocab"],
        tie_word_embeddings=case["tied"],
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )


def make_policy(case: dict[str, Any]) -> CausalPolicy:
    """Random weights, with an adapter or checkpointing where the case has them."""
    model: Any = FAMILIES[case.get("family", "qwen2")][1](model_config(case)).train()
    if case.get("checkpointing"):
        enable_gradient_checkpointing(model)
    if case.get("quantization"):
        quantize(model, case["quantization"])
    if case.get("rank"):
        model = add_lora(model, r=case["rank"], alpha=case["rank"], dropout=case.get("dropout", 0.0))
    return CausalPolicy(model)


def how_of(case: dict[str, Any]) -> Learning:
    """The same for the prediction."""
    return Learning(
        rank=case.get("rank", 0),
        dropout=case.get("dropout", 0.0) > 0,
        checkpointing=case.get("checkpointing", False),
        quantized="quantization" in case,
        optimizer=case.get("optimizer", "adamw"),
    )


def make_rows(case: dict[str, Any]) -> list[TensorDictBase]:
    """Ragged rows of a fresh random stream: prompts and responses of 0.7 to 1.3 times the case's lengths.

    With ``full`` in the case they have these lengths exactly.
    """
    stream = torch.Generator().manual_seed(random.getrandbits(62))

    def length(mean: int) -> int:
        if case.get("full"):
            return mean
        return int(torch.randint(int(0.7 * mean), int(1.3 * mean) + 1, (1,), generator=stream))

    read = (keys.FULL_TOKENS, keys.ATTENTION_MASK, keys.ASSISTANT_MASK, keys.LOG_PROBS, keys.ADVANTAGE)
    rows: list[TensorDictBase] = []
    for _ in range(case["groups"]):
        prompt = torch.randint(3, case["vocab"], (length(case["prompt"]),), generator=stream)
        for _ in range(case["group"]):
            row = random_row(stream, len(prompt), length(case["response"]), vocab=case["vocab"], spread=(0.0, -5.0))
            row[keys.FULL_TOKENS][: len(prompt)] = prompt
            rows.append(row.select(*read, keys.GROUP_ID, keys.SAMPLE_ID, keys.TRUNCATED))
    return rows


def batches_of(rows: Sequence[TensorDictBase], budget: int) -> list[MicroBatch]:
    """What the learner makes of the rows, counted."""
    actual = []
    for part in micro_batches(rows, token_budget=budget, shared_prompt=True):
        groups = groups_by_prompt(row_prompts(part))
        longest = max(row.get(keys.FULL_TOKENS).shape[-1] for row in part)
        tokens = sum(group.size[0] for group in groups)
        actual.append(MicroBatch(tokens, sum(sum(group.responses) for group in groups), len(part) * longest))
    return actual


def train(
    case: dict[str, Any], rows: list[TensorDictBase], updates: int = 2, policy: CausalPolicy | None = None
) -> None:
    """Build a learner and take some steps: from the second on the optimizer has its moments."""
    policy = policy or make_policy(case)
    settings = LearnerSettings(
        lr=1e-6,
        total_steps=10,
        optim_batch_size=len(rows),
        micro_batch_tokens=case["budget"],
        aggregation="token",
        optimizer=case.get("optimizer", "adamw"),
    )
    learner = Learner(policy, GRPOLoss(policy, entropy_bonus=False), settings, pad_token_id=0, dump_dir=Path("."))
    for _ in range(updates):
        learner.update(lazy_stack(rows))


def estimated(case: dict[str, Any]) -> int:
    """What ``sota-grpo estimate`` says of the learner of such a run, when every sample is as long as it may be."""
    fields = {
        "env.repeats": case["group"],
        "env.num_envs": case["group"],
        "train.optim_batch_size": case["group"] * case["groups"],
        "train.micro_batch_tokens": case["budget"],
        "inference_model.max_tokens": case["response"],
        "train_model.gradient_checkpointing": bool(case.get("checkpointing")),
        "train_model.lora.enabled": bool(case.get("rank")),
        "train_model.lora.r": case.get("rank") or 16,
        "model.quantization": case.get("quantization") or "null",
        "optimizer.name": case.get("optimizer", "adamw"),
        "device": "cpu",
        "engine": "transformers",
    }
    config = compose("grpo_cpu", [f"{name}={value}" for name, value in fields.items()])
    machine = Machine("cpu", 64 * GIB, 0)
    return sum(Estimate(config, architecture_from(model_config(case)), case["prompt"], machine).learner.values())


def compared(case: dict[str, Any]) -> dict[str, Any]:
    """What the learner of a case took at its peak, and what was predicted."""
    kept = ("rank", "dropout", "checkpointing", "family", "optimizer", "quantization")
    train(SMALL | {name: case[name] for name in kept if name in case}, make_rows(SMALL))
    rows = make_rows(case)
    predicted = learner_memory(architecture_from(model_config(case)), how_of(case), batches_of(rows, case["budget"]))
    if case.get("quantization"):  # it is made of a whole model, whose peak is another moment's
        policy = make_policy(case)
        standing = {value.data_ptr(): value.nbytes for value in policy.model.state_dict().values()}
        measured = sum(standing.values()) + (peak_bytes(lambda: train(case, rows, policy=policy)) or 0)
    else:
        measured = peak_bytes(lambda: train(case, rows))
    actual = {"predicted": sum(predicted.values()), "measured": measured, "parts": predicted}
    return actual | ({"estimated": estimated(case)} if case.get("full") else {})


if __name__ == "__main__":
    torch.set_num_threads(1)
    random.seed(sys.argv[2])
    print(json.dumps([compared(case) for case in json.loads(sys.argv[1])]))
