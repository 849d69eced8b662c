"""The memory model against what is public, and against what autograd really saves, tensor by tensor."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from transformers.models.auto import CONFIG_MAPPING

from benchmarks.trainer_work import SHAPES
from sota_grpo import keys
from sota_grpo.assembly import estimate as memory
from sota_grpo.assembly.estimate import Learning, MicroBatch, learner_memory
from sota_grpo.policy.load import architecture_from
from sota_grpo.policy.model_sizes import Architecture, architecture_of
from sota_grpo.rl.collate import pad_rows
from tests.learner_memory import batches_of, how_of, make_policy, make_rows, model_config

PUBLISHED = {  # numbers of parameters as the hub shows them for the weights themselves
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-Math-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
}
BASE = {
    **{"hidden": 64, "layers": 3, "heads": 4, "kv_heads": 2, "intermediate": 160, "vocab": 500, "tied": True},
    **{"prompt": 20, "response": 30, "group": 4, "groups": 3, "budget": 10_000},
}
CASES = {
    "full": {},
    "one head per key, wide MLP": {"kv_heads": 4, "intermediate": 400, "layers": 2},
    "untied": {"tied": False, "hidden": 96},
    "llama": {"family": "llama", "tied": False},
    "norms of queries and keys": {"family": "qwen3"},
    "adapter": {"rank": 8},
    "adapter with dropout": {"rank": 8, "dropout": 0.1, "layers": 8},  # the first has no gradient to pass on
    "half precision": {"half": True},
    "adapter in half precision": {"rank": 8, "half": True},
}


def test_the_table_has_the_published_numbers_of_parameters() -> None:
    assert {name: architecture_of(name).parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("qwen3", False), ("llama", False)])
def test_a_config_gives_the_shape_and_every_parameter(family: str, tied: bool) -> None:
    case = BASE | {"family": family, "tied": tied}
    actual = architecture_from(model_config(case))
    assert actual.parameters == sum(weight.numel() for weight in make_policy(case).model.parameters())
    assert (actual.other, actual.tied, actual.layers) == (0, tied, 3)


def test_what_the_shape_does_not_know_of_is_counted_as_well() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=64)
    counted = sum(weight.numel() for weight in GPT2LMHeadModel(config).parameters())
    assert abs(architecture_from(config).parameters - counted) < config.n_layer


@pytest.mark.parametrize("name", CASES)
def test_what_autograd_saves_is_what_is_counted(name: str) -> None:
    """Every storage that the graph of a forward pass holds, parameters aside, within 3 %."""
    case = BASE | {name: value for name, value in CASES[name].items() if name != "half"}
    rows, half = make_rows(case), CASES[name].get("half", False)
    how = replace(how_of(case), product_bytes=2 if half else 4)
    (batch,) = batches_of(rows, case["budget"])
    model = architecture_from(model_config(case))
    counted = memory.decoder_bytes(model, how, batch) + memory.head_bytes(model, how, batch)
    assert saved_bytes(make_policy(case), rows, half=half) == pytest.approx(counted, rel=0.03)


def saved_bytes(policy, rows: list[TensorDictBase], *, half: bool) -> int:
    """Bytes of the distinct storages that a forward pass saves for its backward pass, the parameters left out."""
    storages = {}  # held, so that no address comes twice
    weights = {weight.untyped_storage().data_ptr() for weight in policy.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    padded = pad_rows(rows, pad_token_id=0)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = policy(padded.select(*policy.in_keys))
        assert out.get(keys.LOG_PROBS).requires_grad
    return sum(storage.nbytes() for storage in storages.values())


ON_A_GPU = [  # GiB at the peak of an update, float32 under bf16 autocast, compiled, H100 of 26 November (docs/log)
    ("qwen3-0.6b", 4096, 5, {}, 16.5),
    ("qwen3-0.6b", 16384, 1, {}, 33.4),
    ("qwen3-0.6b", 40960, 1, {}, 60.3),
    ("qwen2.5-1.5b", 16384, 1, {}, 58.5),
    ("qwen2.5-1.5b", 16384, 1, {"checkpointing": True}, 26.1),
]


@pytest.mark.parametrize(("shape", "tokens", "batches", "how", "measured"), ON_A_GPU)
def test_the_peak_is_that_of_a_gpu(
    shape: str, tokens: int, batches: int, how: dict[str, bool], measured: float
) -> None:
    """Groups of a prompt and eight responses of 1,024 tokens each; within 10 %, and what is kept in bf16 since then."""
    family, sizes = SHAPES[shape]
    response = tokens - 1024 * -(-tokens // (9 * 1024))
    on_gpu = Learning(product_bytes=2, on_cpu=False, compiled=True, saved_bytes=int(79.2 * 2**30) // 12, **how)
    model, batch = architecture_from(CONFIG_MAPPING[family](**sizes)), MicroBatch(tokens, response, 2 * response)
    counted = learner_memory(model, on_gpu, [batch] * batches)
    kept = 2 * (model.head_weights + (model.layers * model.layer_matrices if on_gpu.checkpointing else 0))
    assert (sum(counted.values()) - kept) / 2**30 == pytest.approx(measured, rel=0.1)


def test_ranks_divide_weights_and_moments_but_not_the_gathered_layers() -> None:
    model = Architecture(64, 40, 4, 4, 16, 128, vocab=32, tied=True, context=64)
    alone, eight, whole = (
        learner_memory(model, how, [MicroBatch(100, 50, 100)] * 2)
        for how in (Learning(), Learning(ranks=8, shard_gradients=True), Learning(ranks=8))
    )
    assert eight["optimizer"] == pytest.approx(alone["optimizer"] / 8, rel=0.001)
    assert alone["weights"] / 8 < eight["weights"] < alone["weights"] / 4
    assert whole["gradients"] >= 4 * model.parameters


def test_vllm_has_nothing_left_where_its_share_is_smaller_than_the_weights() -> None:
    share = (architecture_of("meta-llama/Llama-2-7b-hf"), 12 * 2**30)
    alone, halves = (memory.vllm_pool_bytes(*share, number_bytes=2, rows=64, parallel=many) for many in (1, 2))
    assert alone < 0 < halves


ROOT = Path(__file__).resolve().parents[2]
WORDS = {"hidden": 384, "layers": 4, "heads": 6, "kv_heads": 2, "intermediate": 1024, "vocab": 60_000, "tied": True}
TALL = {"hidden": 256, "layers": 8, "heads": 4, "kv_heads": 2, "intermediate": 1024, "vocab": 8_000, "tied": True}
DEEP = {"hidden": 512, "layers": 12, "heads": 8, "kv_heads": 8, "intermediate": 1408, "vocab": 32_000, "tied": False}
SHORT = {"prompt": 60, "response": 60, "group": 4, "groups": 2, "budget": 4096}
LONG = {"prompt": 100, "response": 150, "group": 4, "groups": 3, "budget": 1500}
FLAT = TALL | {"layers": 4}
LIGHT: dict[str, dict[str, Any]] = {
    "6M parameters, 700 of 1400 tokens at once": FLAT | LONG | {"groups": 2, "budget": 750, "full": True},
    "moments of 8 bits": FLAT | SHORT | {"optimizer": "adamw_8bit"},
}
HEAVY: dict[str, dict[str, Any]] = {
    "71M parameters, a head of its own, 600 tokens at once": DEEP | SHORT | {"family": "llama", "full": True},
    "29M parameters, most of them words, 600 tokens at once": WORDS | SHORT,
    "an adapter with dropout": FLAT | SHORT | {"rank": 16, "dropout": 0.05},
    "checkpointing": TALL | LONG | {"checkpointing": True},
    "muon": FLAT | SHORT | {"family": "llama", "optimizer": "muon"},
    "an adapter on weights of 4 bits": FLAT | SHORT | {"family": "llama", "rank": 16, "quantization": "nf4"},
}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("cases", [LIGHT, pytest.param(HEAVY, marks=pytest.mark.slow)], ids=["light", "heavy"])
def test_the_learners_peak_is_predicted_within_15_percent(cases: dict[str, dict[str, Any]]) -> None:
    """By the formula from the micro-batches; where rows have their full length, by the estimate from the config too."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.learner_memory", json.dumps([*cases.values()]), str(random.getrandbits(62))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    for name, actual in zip(cases, json.loads(done.stdout), strict=True):
        for way in {"predicted", "estimated"} & actual.keys():
            assert actual[way] == pytest.approx(actual["measured"], rel=0.15), (name, way, actual)
