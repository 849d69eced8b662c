"""A model's folder says what it is: what cannot be trained is one sentence before a weight is read; its digest."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto import CONFIG_MAPPING

from sota_grpo.assembly.learning import trainable_tokenizer
from sota_grpo.assembly.sampling import max_model_len
from sota_grpo.config import Config
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.errors import UserError
from sota_grpo.policy import load as module
from sota_grpo.policy.causal import CausalPolicy, end_token_ids
from sota_grpo.policy.load import (
    find_architecture,
    load_model,
    load_tokenizer,
    model_digest,
    resolve_model_path,
    save_hf,
)
from tests.unit.tiny_models import LONG_ROPE, SIZES, make_model, make_tokenizer

QUANTIZED = {"quant_method": "awq", "bits": 4}


def config_of(folder: Path) -> Config:
    config = Config()
    config.model.name = str(folder)
    return config


def judge(folder: Path) -> None:
    trainable_tokenizer(config_of(folder), "transformers")


def tiny_folder(tmp_path: Path, **changes: Any) -> Path:
    """The embedded policy's folder with another ``config.json``, and without weights: none is read."""
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model", dirs_exist_ok=True)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | changes))
    (folder / "model.safetensors").unlink()
    return folder


def other_folder(tmp_path: Path, family: str, **sizes: Any) -> Path:
    CONFIG_MAPPING[family](**sizes).save_pretrained(tmp_path / family)
    make_tokenizer().save_pretrained(tmp_path / family)
    return tmp_path / family


def with_adapter(tmp_path: Path) -> Path:
    folder = tiny_folder(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def without_tokenizer(tmp_path: Path) -> Path:
    folder = tiny_folder(tmp_path)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    return folder


NO_MODEL = r"model.name=.*could not be loaded"
AWQ = r"quantised weights \(awq\), which can be neither .*model.quantization"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (partial(tiny_folder, model_type="no_such_type"), NO_MODEL),
        (partial(tiny_folder, quantization_config=QUANTIZED), AWQ),
        (partial(tiny_folder, num_experts=8), r"mixture of experts \(num_experts=8\)"),
        (partial(tiny_folder, vocab_size=100), r"tokenizer has \d+ tokens with ids beyond its 100 embedding rows"),
        (partial(tiny_folder, layer_types=["linear_attention"] * 4), "layers of type linear_attention, .* engine=vllm"),
        (partial(other_folder, family="t5"), "an encoder and a decoder"),
        (partial(other_folder, family="qwen2_5_vl"), "no causal language model"),
        (partial(other_folder, family="mamba"), "has no attention"),
        (with_adapter, r"adapter_config.json; merge the adapter into its base"),
        (without_tokenizer, r"has no tokenizer; put its tokenizer.json"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_one_sentence(make: Callable[..., Path], sentence: str, tmp_path) -> None:
    with pytest.raises(UserError, match=sentence):
        judge(make(tmp_path))


@pytest.mark.parametrize("broken", ["quantised", "adapter"])
def test_a_reference_is_asked_as_the_policy_is(broken: str, tmp_path: Path) -> None:
    """Of an adapter's folder transformers would load both; with a quantised one the KL is that of its rounding."""
    config = config_of(Path("tiny"))
    folder = with_adapter(tmp_path) if broken == "adapter" else tiny_folder(tmp_path, quantization_config=QUANTIZED)
    config.ref_model.name = str(folder)
    with pytest.raises(UserError, match=rf"^ref_model\.name={folder} has .*{broken}"):
        trainable_tokenizer(config, "transformers")


def test_special_tokens_that_nothing_writes_need_no_row(tmp_path: Path) -> None:
    """As of Gemma 3 1B, whose tokenizer knows a token for images. One that ends or pads needs a row, as words do."""
    folder = tiny_folder(tmp_path)
    tokenizer = load_tokenizer(str(folder))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image{n}>" for n in range(rows)]})
    tokenizer.save_pretrained(folder)
    judge(folder)
    tokenizer.pad_token = f"<image{rows - 1}>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=rf"for example '<image{rows - 1}>'.*resize_token_embeddings"):
        judge(folder)


def test_a_model_of_several_modalities_has_its_context_in_its_text_part(tmp_path: Path) -> None:
    text = {**SIZES, "sliding_window": 4, "query_pre_attn_scalar": 4}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = other_folder(tmp_path, "gemma3", text_config=text, vision_config=vision)
    judge(folder)
    assert max_model_len(config_of(folder)) == SIZES["max_position_embeddings"]
    config = config_of(other_folder(tmp_path, "mamba"))  # which has none
    with pytest.raises(UserError, match=r"context length.*inference_model.max_model_len"):
        max_model_len(config)
    config.inference_model.max_model_len = 99
    assert max_model_len(config) == 99


def test_a_context_ends_where_positions_would_change_with_the_longest_row(tmp_path: Path) -> None:
    """The engine's too, which decodes rows together."""
    folder = other_folder(tmp_path, "phi3", **SIZES, **LONG_ROPE)
    assert max_model_len(config_of(folder)) == 8
    options = {"eos_token_ids": [2], "pad_token_id": 0, "max_model_len": 64}
    assert TransformersEngine(make_model("phi3", **LONG_ROPE), **options).max_model_len == 8


def test_a_model_that_keeps_a_state_outside_of_the_cache_is_refused() -> None:
    """RecurrentGemma lists no types of layers; its responses had nothing to do with their prompts."""
    model = make_model("recurrent_gemma", num_hidden_layers=3, lru_width=16, attention_window_size=8)
    with pytest.raises(UserError, match="layers of type recurrent, and engine=transformers can cache only keys"):
        TransformersEngine(model, eos_token_ids=[2], pad_token_id=0, max_model_len=64)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_hf(make_model("llama"), make_tokenizer(), tmp_path / "saved")


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights[NAME][3, 2].fill_(float("nan")), f"{NAME} is not finite"),
        (lambda weights: weights[NAME][3, 2].fill_(float("inf")), f"{NAME} is not finite"),
        (lambda weights: weights.pop("lm_head.weight"), r"lack 1 of the weights.*lm_head.weight"),
    ],
    ids=["nan", "infinite", "missing"],
)
def test_weights_that_are_missing_or_no_numbers_are_one_sentence(saved: Path, change: Any, sentence: str) -> None:
    weights = load_file(saved / "model.safetensors")
    change(weights)
    save_file(weights, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=sentence):
        load_model(str(saved))


@pytest.mark.parametrize("family", ["cohere", "recurrent_gemma"])
def test_a_head_that_is_computed_in_another_way_is_one_sentence(family: str) -> None:
    """Its random logits may hide it: RecurrentGemma's are below 3 of 30, and its cap takes 0.3 % of them at most."""
    sizes = {"num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8} if family == "recurrent_gemma" else {}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**{**SIZES, **sizes}))
    model.config.logit_scale = None  # Cohere's config does not say so
    with pytest.raises(UserError, match=r"(Cohere|RecurrentGemma)ForCausalLM changes hidden states or logits around"):
        CausalPolicy(model)


def test_the_estimate_and_the_look_at_the_disk_refuse_it_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an encoder and a decoder"):
        find_architecture(str(other_folder(tmp_path, "t5")))
    with pytest.raises(UserError, match=r"could not be loaded .*ZeroDivisionError"):
        find_architecture(str(tiny_folder(tmp_path, num_attention_heads=0)))


def test_an_end_token_that_is_no_number_is_one_sentence() -> None:
    with pytest.raises(UserError, match="eos_token_id='x', which is not a token id"):
        end_token_ids(load_tokenizer("tiny"), GenerationConfig(eos_token_id=["x"]))


@pytest.mark.parametrize("whole", [True, False])
def test_it_follows_what_a_model_is(whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not whole:  # 3.4 MB of weights, of which 32 blocks of 4 KiB are read
        monkeypatch.setattr(module, "WHOLE_BYTES", 1 << 20)
        monkeypatch.setattr(module, "BLOCKS", 32)
        monkeypatch.setattr(module, "BLOCK_BYTES", 4 << 10)
    folder = shutil.copytree(resolve_model_path("tiny"), tmp_path / "model")
    first = model_digest(str(folder))
    assert first == model_digest("tiny")
    (folder / "README.md").write_text("a card")
    assert model_digest(str(folder)) == first
    for name in ("model.safetensors", "config.json", "chat_template.jinja"):
        path, data = folder / name, bytearray((folder / name).read_bytes())
        path.write_bytes(bytes(byte ^ (index % 2) for index, byte in enumerate(data)))  # as other weights differ
        assert model_digest(str(folder)) != first, name
        path.write_bytes(data)
    assert model_digest(str(folder)) == first
    (folder / "model.safetensors").unlink()  # they are elsewhere
    assert model_digest(str(folder)) is None
