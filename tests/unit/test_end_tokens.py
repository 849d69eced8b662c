"""A response ends where its model's own chat template says, and its grader reads all but its end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from sota_grpo import keys
from sota_grpo.assembly.sampling import engine_options
from sota_grpo.config import Config
from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.errors import UserError
from sota_grpo.policy.causal import end_of_turn, end_token_ids, response_text
from sota_grpo.policy.load import load_model, load_tokenizer, resolve_model_path, save_hf
from sota_grpo.rl.collate import drawn_entries, group_table
from sota_grpo.rl.records import Example, Sample
from tests.training_rigs import make_env
from tests.unit.test_dialogs_turns import CHATML, LLAMA, MISTRAL, THINKING
from tests.unit.test_dialogs_turns import tokenizer as characters

END_OF_TURN, END_OF_TEXT, START = 2, 0, 1  # of the embedded policy


@pytest.fixture
def base_model(tmp_path: Path) -> str:
    """As base models come: tokenizer and configs end a text by another token than the chat template ends a turn."""
    folder = tmp_path / "base"
    shutil.copytree(resolve_model_path("tiny"), folder)
    for file, change in (
        ("tokenizer_config.json", {"eos_token": "<|endoftext|>"}),
        ("generation_config.json", {"eos_token_id": END_OF_TEXT}),
        ("config.json", {"eos_token_id": END_OF_TEXT}),
    ):
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    return str(folder)


def test_the_template_of_a_base_model_ends_its_turns_after_its_export_too(base_model: str, tmp_path: Path) -> None:
    config, tokenizer = Config(), load_tokenizer(base_model)
    config.model.name = base_model
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == END_OF_TEXT
    options = engine_options(config, "transformers", "cpu", tokenizer, tmp_path)
    assert options.eos_token_ids == (END_OF_TEXT, END_OF_TURN)
    folder = save_hf(load_model(base_model), tokenizer, tmp_path / "hf")
    made = GenerationConfig.from_pretrained(folder)  # what transformers and vLLM stop by
    assert made.eos_token_id == [END_OF_TEXT, END_OF_TURN]
    tiny = save_hf(load_model("tiny"), load_tokenizer("tiny"), folder)  # which names its ends, and is left as it was
    assert GenerationConfig.from_pretrained(tiny) == GenerationConfig.from_pretrained(resolve_model_path("tiny"))


def test_sampling_options_that_transformers_refuses_keep_no_model_from_its_export(base_model, tmp_path: Path) -> None:
    """Llama 2 and Vicuna came with a temperature and without ``do_sample``: read with a warning, refused on saving."""
    options = {"temperature": 0.9, "top_p": 0.6, "early_stopping": True}
    (Path(base_model) / "generation_config.json").write_text(json.dumps(options | {"eos_token_id": END_OF_TEXT}))
    model = load_model(base_model)
    before = model.generation_config
    folder = save_hf(model, load_tokenizer(base_model), tmp_path / "hf")
    written = json.loads((folder / "generation_config.json").read_text())
    assert written.items() >= (options | {"eos_token_id": [END_OF_TEXT, END_OF_TURN]}).items()
    assert load_model(str(folder)).generation_config.temperature == 0.9
    assert model.generation_config is before


@pytest.mark.parametrize("template", [CHATML, LLAMA, MISTRAL, THINKING])
def test_the_end_of_a_turn_is_the_one_that_the_template_writes(template: Any) -> None:
    made = characters(template)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = made(made.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
    assert end_of_turn(made) == [number for number in ids if number in made.all_special_ids][-1]


def test_a_blank_token_after_a_turn_is_not_its_end() -> None:
    """As in tokenizers that have tokens for several spaces or line breaks, with a template that is plain text."""
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    made = characters(plain)
    made.add_tokens(["\n\n", "  "])
    assert made("\n\n", add_special_tokens=False)["input_ids"] == [made.convert_tokens_to_ids("\n\n")]
    assert end_of_turn(made) is None
    made.chat_template = plain.replace("\n\n", "\n\n" + made.eos_token)
    assert end_of_turn(made) == made.eos_token_id


@pytest.mark.parametrize(
    ("of_tokenizer", "of_model", "expected"),
    [(2, 2, (2,)), (2, [7, 2], (2, 7)), (2, None, (2,)), (None, 9, (9,)), (None, None, ())],
)
def test_every_end_token_of_the_model_ends_a_response(of_tokenizer, of_model, expected) -> None:
    tokenizer = SimpleNamespace(eos_token_id=of_tokenizer)
    assert end_token_ids(tokenizer, SimpleNamespace(eos_token_id=of_model)) == expected
    assert end_token_ids(tokenizer) == expected  # and from the tokenizer alone


def test_a_model_without_end_token_is_refused(tmp_path: Path) -> None:
    config = Config()
    config.model.name = "tiny"
    with pytest.raises(UserError, match="no end token"):
        engine_options(config, "transformers", "cpu", SimpleNamespace(eos_token_id=None, pad_token_id=0), tmp_path)


def test_special_tokens_are_in_the_text_that_is_graded_and_ends_are_not() -> None:
    """``<answer>`` is often added as a special token; only what ends a response is left out of its text."""
    env = make_env()
    env.tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    ids = torch.tensor([*env.tokenizer("<answer>4</answer>")["input_ids"], START, END_OF_TURN, END_OF_TEXT])
    text = "<answer>4</answer><|im_start|>"
    assert env.decode(ids) == text
    assert TurnTokens(env.tokenizer).text(ids) == text
    sample = Sample(ids, torch.zeros(len(ids)), torch.zeros(len(ids)), truncated=False)
    (row,) = group_table(drawn_entries(0, Example("", ""), [5]), [sample], env.tokenizer).rows()
    assert row[keys.RESPONSE_TEXT] == text
    made, program = characters(CHATML), "s = ' '.join(a) if b != 1 , 2 else ' ?'"  # which is not tidied
    made.clean_up_tokenization_spaces = True
    assert response_text(made, made(program, add_special_tokens=False)["input_ids"]) == program


def test_in_torchrls_loops_a_response_that_ends_as_the_template_does_is_not_truncated() -> None:
    env = make_env()
    env.tokenizer = load_tokenizer("tiny")
    env.tokenizer.eos_token = "<|im_start|>"  # another than the template's
    assert [env._truncated(torch.tensor([5, last])) for last in (5, START, END_OF_TURN)] == [True, False, False]
