"""The tiny policy that ships: it loads, its tokenizer is lossless, its starting accuracy is what docs/tiny.md says."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import sota_grpo
from sota_grpo.tasks.arithmetic import ArithmeticTask

TINY = Path(sota_grpo.__file__).parent / "assets" / "tiny"
SEED = random.randrange(1 << 30)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


def random_text() -> str:
    """Assigned characters without marks: the order of marks depends on the Unicode version, and two are at work."""
    planes = [(0x00, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    drawn = [chr(random.randint(*random.choice(planes))) for _ in range(random.randint(0, 60))]
    return "".join(letter for letter in drawn if unicodedata.category(letter) not in ("Mn", "Mc", "Me", "Cn"))


def test_tokenizer_round_trips_any_text_in_normal_form_c(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [random_text() for _ in range(100)]
    texts += ["", " ", "\r\n\t  x  \n\n", "12,345.67 <<3*4=12>>", "e\u0301 é 漢字 \U0001f600 \u200d\ufeff"]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)
    number = str(random.randrange(10**20))
    assert tokenizer.tokenize(number) == list(number)


def test_files_and_special_tokens(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    files = [path for path in TINY.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".jinja", ".safetensors"}, "no code"
    assert sum(path.stat().st_size for path in files) < 5e6
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert len(tokenizer) == model.config.vocab_size
    assert len(tokenizer("<|im_start|><|im_end|><|endoftext|>")["input_ids"]) == 3


def test_chat_template_and_mask_of_the_answer(tokenizer: PreTrainedTokenizerBase) -> None:
    chat = [{"role": "user", "content": "2+2?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    answered = [{"role": "system", "content": "Be brief."}, *chat, {"role": "assistant", "content": "#### 4"}]
    turns = ("system\nBe brief.", "user\n2+2?", "assistant\n#### 4")
    text = tokenizer.apply_chat_template(answered, tokenize=False)
    assert text == "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    encoded = tokenizer.apply_chat_template(answered, return_dict=True, return_assistant_tokens_mask=True)
    produced = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"]) if mask]
    assert tokenizer.decode(produced) == "#### 4<|im_end|>"


def test_prompts_and_solutions_are_short(tokenizer: PreTrainedTokenizerBase) -> None:
    task = ArithmeticTask(seed=SEED, num_train=100)
    for example in task.train:
        prompt = tokenizer.apply_chat_template(task.messages(example), add_generation_prompt=True, return_dict=True)
        assert len(prompt["input_ids"]) <= 60
        assert len(tokenizer(task.gold_response(example))["input_ids"]) + 1 <= 60


@torch.no_grad()
def accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, greedy: bool) -> float:
    """Share of 128 held-out problems, drawn afresh, that one response to each solves (standard error 0.044)."""
    task = ArithmeticTask(seed=SEED, num_heldout=128)
    options = {"tokenize": False, "add_generation_prompt": True}
    texts = [tokenizer.apply_chat_template(task.messages(example), **options) for example in task.heldout]
    batch = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    torch.manual_seed(SEED)
    output = model.generate(**batch, max_new_tokens=64, do_sample=not greedy, top_k=0)
    responses = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(task.score(text, example).success for text, example in zip(responses, task.heldout)) / len(responses)


def test_starting_accuracy_is_as_documented(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    # over ten seeds 0.52 and 0.45 were measured; five standard errors to each side
    assert 0.30 < accuracy(model, tokenizer, greedy=True) < 0.74
    assert 0.23 < accuracy(model, tokenizer, greedy=False) < 0.67
