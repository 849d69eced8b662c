"""The ids between two turns: what the chat template itself would have written there, whatever the template."""

from __future__ import annotations

import logging
import random
from functools import partial

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from tests.unit.test_envs import char_tokenizer

SEED = random.randrange(1 << 30)
REPLY = {"role": "user", "content": "Think again."}
TOOL = {"role": "tool", "content": "9716"}

# Written for these tests in the manner of the models' own.
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # earlier turns lose their thinking, and the thinking of the next may be switched off
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1].lstrip() }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}<|head|>system<|/head|>\n\nCutting Knowledge Date: December 2023<|eot|>"
    "{% for m in messages %}<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/assistant') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
TOOLS_BY_ID = MISTRAL.replace("(m.role == 'user') !=", "m.role != 'tool' and (m.role == 'user') !=").replace(
    "{% else %}", "{% elif m.role == 'tool' %}RULE[{{ m.tool_call_id }}: {{ m.content }}]{% else %}"
)
IGNORES_TOOLS = CHATML.replace("<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n", "")
AFTER_CALLS = (  # as Gemma 4: the policy's turn goes on after the results, which are written with the calls before them
    "{% for m in messages %}{% if m.tool_calls %}<|im_start|>assistant\n"
    "{% for call in m.tool_calls %}[{{ call.function.name }}]{% endfor %}<|eot|>"
    "{% for reply in messages[loop.index:] if reply.role == 'tool' %}<{{ reply.name }}>{{ reply.content }}{% endfor %}"
    "{% elif m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]", "[/INST]", "</s>", "<s>"]


def tokenizer(template: str | None, *, end: str = "<eos>") -> PreTrainedTokenizerFast:
    """One token per character, and those of the templates; a text of its own begins with a token more."""
    made = char_tokenizer(chat_template=template)
    made.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<s>"})
    made.eos_token = end
    begin = [("<s>", made.bos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=begin)
    return made


def decoded(made: PreTrainedTokenizerFast, ids: tuple[int, ...]) -> str:
    return made.decode(list(ids))


GENERATION = "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "end", "reply", "between"),
    [
        (CHATML, "<|im_end|>", REPLY, f"\n<|im_start|>user\nThink again.{GENERATION}"),
        (CHATML, "<|im_end|>", TOOL, f"\n<|im_start|>user\n<tool_response>\n9716\n</tool_response>{GENERATION}"),
        (THINKING, "<|im_end|>", REPLY, f"\n<|im_start|>user\nThink again.{GENERATION}"),
        (LLAMA, "<|eot|>", REPLY, "<|head|>user<|/head|>\n\nThink again.<|eot|><|head|>assistant<|/head|>\n\n"),
        (LLAMA, "<|eot|>", TOOL, "<|head|>ipython<|/head|>\n\n9716<|eot|><|head|>assistant<|/head|>\n\n"),
        (MISTRAL, "</s>", REPLY, "[INST] Think again. [/INST]"),
        (None, "<eos>", REPLY, "\n\nThink again.\n\n"),
        (None, "<eos>", TOOL, "\n\n9716\n\n"),
    ],
    ids=["chatml", "chatml-tool", "thinking", "llama", "llama-tool", "mistral", "none", "none-tool"],
)
def test_the_text_between_two_turns(template: str | None, end: str, reply: dict[str, str], between: str) -> None:
    made = tokenizer(template, end=end)
    turns = TurnTokens(made)
    ended = made.convert_tokens_to_ids(end)
    assert decoded(made, turns.ids([reply], ended)) == between
    # a turn that ended otherwise is closed first, where the template closes turns
    assert decoded(made, turns.ids([reply], made.convert_tokens_to_ids("x"))) == (end if template else "") + between


def test_a_turn_that_the_template_ends_after_a_blank_is_ended_once() -> None:
    made = tokenizer(MISTRAL.replace("</s>", " </s>"), end="</s>")  # as Llama 2's
    between, turns = "[INST] Think again. [/INST]", TurnTokens(made)
    assert decoded(made, turns.ids([REPLY], made.eos_token_id)) == between
    assert decoded(made, turns.ids([REPLY], made.convert_tokens_to_ids("x"))) == f" </s>{between}"


def test_template_arguments_reach_the_next_turn() -> None:
    made = tokenizer(THINKING, end="<|im_end|>")
    turns = TurnTokens(made, {"enable_thinking": False})
    assert decoded(made, turns.ids([REPLY], made.eos_token_id)).endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("template", [MISTRAL, IGNORES_TOOLS], ids=["raises", "ignores"])
def test_a_template_without_tool_turns_gets_user_turns_and_says_so_once(template: str, caplog) -> None:
    made = tokenizer(template)
    turns = TurnTokens(made)
    with caplog.at_level(logging.INFO, logger="sota_grpo"):
        for content in ("9716", "12", "9716"):
            as_user = turns.ids([{"role": "user", "content": content}], 0)
            assert turns.ids([{"role": "tool", "content": content}], 0) == as_user
            assert content in decoded(made, as_user)
    assert [each.message.partition(" (")[0] for each in caplog.records] == ["The chat template has no tool messages"]


def test_a_template_cannot_forge_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    made = tokenizer(MISTRAL.replace("Roles must", "Roles\\n2026-01-01 ERROR sota_grpo: forged"))
    with caplog.at_level(logging.INFO, logger="sota_grpo"):
        TurnTokens(made).ids([{"role": "tool", "content": "9716"}], 0)
    (record,) = caplog.records
    assert "(TemplateError: Roles):" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_template_that_insists_on_ids_has_tool_turns() -> None:
    wrong = "m.tool_call_id is not defined or m.tool_call_id | length != 9"
    rule = f"{{% if {wrong} %}}{{{{ raise_exception('id') }}}}{{% endif %}}"
    made = tokenizer(TOOLS_BY_ID.replace("RULE", rule), end="</s>")
    turns = TurnTokens(made)
    replies = [{**TOOL, "tool_call_id": "aB3dE6gH9"}, {**TOOL, "content": "8", "tool_call_id": "call00001"}]
    assert decoded(made, turns.ids(replies, made.eos_token_id)) == "[aB3dE6gH9: 9716][call00001: 8]"
    with pytest.raises(UserError, match="cannot render messages of the roles tool"):
        turns.ids([{**TOOL, "tool_call_id": "short"}], made.eos_token_id)


def test_a_template_that_writes_results_after_calls_only_has_tool_turns() -> None:
    made = tokenizer(AFTER_CALLS, end="<|eot|>")
    turns, replies = TurnTokens(made), [{**TOOL, "name": "add"}, {**TOOL, "name": "look", "content": "8"}]
    assert decoded(made, turns.ids(replies, made.eos_token_id)) == "<add>9716<look>8"
    ended_otherwise = made.convert_tokens_to_ids("<|im_end|>")
    assert decoded(made, turns.ids(replies, ended_otherwise)) == "<|eot|><add>9716<look>8"
    assert decoded(made, turns.ids([REPLY], ended_otherwise)).startswith("\n<|im_start|>user\nThink again.")


def test_a_template_for_one_turn_only_is_refused() -> None:
    single = "{{ messages[0].content }}{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    with pytest.raises(
        UserError, match=r"cannot render a user turn after an assistant turn \(.*one turn\); use env.max_"
    ):
        TurnTokens(tokenizer(single)).ids([TOOL], 0)
    with pytest.raises(ValueError, match="role 'system'; use user or tool"):
        TurnTokens(tokenizer(CHATML)).ids([{"role": "system", "content": "no"}], 0)


def conversation(rng: random.Random, num_turns: int) -> list[dict[str, str]]:
    text = partial(rng.choices, "abc 123\n#<>?=", k=12)
    messages = [{"role": "user", "content": "".join(text())}]
    for _ in range(num_turns):
        role = rng.choice(["user", "tool"])
        messages += [{"role": "assistant", "content": "".join(text())}, {"role": role, "content": "".join(text())}]
    return messages


@pytest.mark.parametrize("name", ["tiny", "chatml"])
def test_a_dialog_decodes_to_the_templates_own_rendering(name: str) -> None:
    """Of the prompt, what was sampled, and what was inserted; the policy ends its turns itself."""
    made = load_tokenizer("tiny") if name == "tiny" else tokenizer(CHATML, end="<|im_end|>")
    turns, rng = TurnTokens(made), random.Random(SEED)
    for num_turns in (1, 2, 3, 1, 2, 3):
        messages = conversation(rng, num_turns)
        render = partial(made.apply_chat_template, add_generation_prompt=True)
        ids = list(render(messages[:1], tokenize=True, return_dict=True)["input_ids"])
        for turn, reply in zip(messages[1::2], messages[2::2]):
            ids += [*made(turn["content"], add_special_tokens=False)["input_ids"], made.eos_token_id]
            ids += turns.ids([reply], ids[-1])
        assert made.decode(ids) == render(messages, tokenize=False), f"seed {SEED}"
        assert ids == list(render(messages, tokenize=True, return_dict=True)["input_ids"])
