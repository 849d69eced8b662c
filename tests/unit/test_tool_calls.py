"""What a template writes is read back; what cannot be called says why; no ids crash, forge or take long."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sota_grpo.envs import call_formats
from sota_grpo.envs.dialogs import TurnTokens
from sota_grpo.envs.tool_calls import PolicyTurn, ToolCallReader
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rl.tool_schemas import ToolCall, function_schemas
from tests.tool_rigs import executing_no_text
from tests.unit.test_chat_tokens import names_of

SEED = random.randrange(1 << 30)

# Written for these tests in the manner of the models' own.
QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>"
    "<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls %}"
    "{% if m.content or not loop.first %}\n{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = QWEN.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
LLAMA = (
    "{% for m in messages %}"
    "{% if loop.last and tools %}<|head|>system<|/head|>\n\n{{ tools | tojson }}<|eot|>{% endif %}"
    "<|head|>{{ 'ipython' if m.role == 'tool' else m.role }}<|/head|>\n\n{% if m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
LLAMA_TAG = LLAMA.replace('{"name"', '<|python_tag|>{"name"')
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ m.content }} [/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
NAMED = MISTRAL.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>",
    "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>",
).replace("[TOOL_CALLS] [{%", "{%")
CHECKED = "{% if {} is not defined or {} is none or {} | length != 9 %}{{ raise_exception('an id of 9') }}{% endif %}"
STRICT = MISTRAL.replace(
    "{% for call in m.tool_calls %}", "{% for call in m.tool_calls %}" + CHECKED.replace("{}", "call.id")
)
STRICT = STRICT.replace(
    "[TOOL_RESULTS] {{ m.content }}",
    CHECKED.replace("{}", "m.tool_call_id")
    + '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}',
)
BY_ID = NAMED.replace("[ARGS]", "[CALL_ID]{{ call.id }}[ARGS]")
XML = QWEN.replace(
    '\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n',
    "\n<function={{ call.function.name }}>{% for name, value in call.function.arguments | items %}"
    "\n<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>{% endfor %}"
    "\n</function>\n",
)
SPECIAL = [
    *("<|head|>", "<|/head|>", "<|eot|>", "<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOLS]", "[/TOOLS]"),
    *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]
XML_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n(?P<value>.*?)\n</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
JSON_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*"},
    },
}
FORMATS: dict[str, tuple[str | None, dict[str, Any] | None]] = {
    "tiny": (None, None),
    "qwen": (QWEN, None),
    "llama": (LLAMA, None),
    "llama-tag": (LLAMA_TAG, None),
    "mistral": (MISTRAL, None),
    "named": (NAMED, None),
    "strict": (STRICT, None),
    "by_id": (BY_ID, None),
    "json": (QWEN, JSON_TEMPLATE),
    "xml": (XML, XML_TEMPLATE),
}
SINGLE = ("llama", "llama-tag")  # calls of a turn


def look_up(query: str, days: int = 1, near: list[float] | None = None) -> str:
    """Look something up.

    Args:
        query: What for.
        days: Of how many days.
        near: Where.
    """
    raise AssertionError("nothing is executed here")


OPEN = {"type": "object", "properties": {}, "additionalProperties": True}
ANY = {"type": "function", "function": {"name": "any-thing", "description": "Takes anything.", "parameters": OPEN}}


SCHEMAS = [*function_schemas([look_up]), ANY]


def make_tokenizer(template: str | None, response_template: Any = None) -> Any:
    """The byte-level BPE of the embedded policy, with the special tokens of all templates."""
    made = load_tokenizer("tiny")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *SPECIAL]})
    if template is not None:
        made.chat_template = template
    made.response_template = response_template
    return made


@cache
def reader_of(name: str) -> tuple[Any, ToolCallReader]:
    tokenizer = make_tokenizer(*FORMATS[name])
    return tokenizer, ToolCallReader(tokenizer, SCHEMAS)


def turn_of(tokenizer: Any, calls: Sequence[tuple[str, Any]], content: str = "") -> str:
    """The policy's turn as the template writes it."""
    made = [{"id": f"call{i:05d}", "function": {"name": n, "arguments": a}} for i, (n, a) in enumerate(calls)]
    question = [{"role": "user", "content": "?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    turn = {"role": "assistant", "content": content, "tool_calls": made}
    return tokenizer.apply_chat_template([*question, turn], tokenize=False).removeprefix(prompt)


def ids_of(tokenizer: Any, text: str, *, spelled: bool = False) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=spelled)["input_ids"]


@pytest.mark.parametrize("name", ["tiny", "xml"])
def test_a_schema_with_null_for_what_is_absent_is_read(name: str) -> None:
    """Of a server, or an agent's request: a call is read as if the keywords were absent."""
    tokenizer = make_tokenizer(*FORMATS[name])
    properties = {"path": {"type": "string", "required": True}, "depth": {"type": None, "anyOf": None}}
    schemas = [
        {"type": "function", "function": {"name": tool, "description": "List.", "parameters": parameters}}
        for tool, parameters in (
            ("list", {"type": "object", "properties": properties, "required": None}),
            ("stop", {"type": "object", "properties": None}),
        )
    ]
    reader = ToolCallReader(tokenizer, schemas)
    calls = [("list", {"path": "a", "depth": "1"}), ("stop", {})]
    said = turn_of(tokenizer, calls)
    assert [call.error for call in reader.read(ids_of(tokenizer, said)).calls] == [None, None], said


# round trips ---------------------------------------------------------------------------------------------------------

WORDS = st.text(  # without marks, which the tokenizer's normaliser would join with what precedes them
    st.characters(exclude_categories=["Cs", "Cn", "Mn", "Mc", "Me"]) | st.sampled_from('"\\{}[]<>/\n\t,:é日\x00\u202e'),
    max_size=12,
).map(lambda text: unicodedata.normalize("NFC", text))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.just("any-thing"), st.dictionaries(WORDS, VALUES, max_size=3))
    | st.tuples(st.just("look_up"), st.fixed_dictionaries({"query": WORDS, "days": st.integers()})),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "xml"])
@settings(max_examples=15, deadline=None)
@given(calls=CALLS)
def test_what_the_template_writes_is_read_back(name: str, calls: list[tuple[str, Any]]) -> None:
    tokenizer, reader = reader_of(name)
    calls = calls[:1] if name in SINGLE else calls
    turn = reader.read(ids_of(tokenizer, turn_of(tokenizer, calls)))
    assert turn == PolicyTurn("", tuple(ToolCall(*call) for call in calls))
    # 1 == True in Python, not in JSON
    assert json.dumps([dict(call.arguments) for call in turn.calls]) == json.dumps([each for _, each in calls])


@pytest.mark.parametrize("name", ["tiny", "qwen", "json", "xml"])
def test_what_is_said_beside_the_calls_is_the_content(name: str) -> None:
    tokenizer, reader = reader_of(name)
    calls = [("look_up", {"query": '7 "x"\n<y>', "days": 3}), ("look_up", {"query": "7"})]
    turn = reader.read(ids_of(tokenizer, turn_of(tokenizer, calls, "Let me see: {é}")))
    assert turn == PolicyTurn("Let me see: {é}", tuple(ToolCall(*call) for call in calls))


@pytest.mark.parametrize("name", FORMATS)
def test_a_turn_without_calls_is_content(name: str) -> None:
    tokenizer, reader = reader_of(name)
    for text in ('It is {"answer": [4]}.', '{"answer": 4}', "[1, 2] and a < b"):
        assert reader.read([*ids_of(tokenizer, text), tokenizer.eos_token_id]) == PolicyTurn(text, ())
    assert reader.read([]) == PolicyTurn("", ())


def test_an_object_in_the_middle_of_a_sentence_is_no_call_where_calls_have_no_mark() -> None:
    tokenizer, reader = reader_of("llama")
    call = '{"name": "look_up", "parameters": {"query": "x"}}'
    assert reader.read(ids_of(tokenizer, f"I could say {call}.")) == PolicyTurn(f"I could say {call}.", ())
    typed = call.replace("{", '{"type": "function", ', 1)  # Llama 3 writes both
    assert len(reader.read(ids_of(tokenizer, f"\n{call}; {typed}<|eot|>")).calls) == 2
    answer = '{"name": "look_up", "answer": 4}'
    assert reader.read(ids_of(tokenizer, answer)) == PolicyTurn(answer, ())


# what cannot be called -----------------------------------------------------------------------------------------------

GOOD = '{"name": "look_up", "arguments": {"query": "x"}}'
BROKEN = {
    '{"name": "look_up", "arguments": {"query": "x"}': "no end",
    "{'name': 'look_up', 'arguments': {}}": "not JSON",
    '{"name": "look_up", "arguments": {"query": "a\nb"}}': "not JSON",
    '{"name": "look_up", "arguments": {"query": NaN}}': "not JSON",
    '{"name": "look_up", "arguments": {"query": 1e999}}': "not finite",
    '{"name": "look_up", "arguments": {"query": "\\ud800"}}': "surrogate",
    '{"name": "look_up", "arguments": {"query": "x", "query": "y"}}': "repeated",
    '{"name": "look_up", "name": "rm", "arguments": {"query": "x"}}': "repeated",
    '{"name": "look_up", "arguments": {"query": ' + "9" * 5000 + "}}": "not JSON",
    '{"name": "look_up", "arguments": {"query": ' + "[" * 99 + "]" * 99 + "}}": "deep",
    '{"name": "look_up", "arguments": {"query": "' + "x" * 40_000 + '"}}': "more than 32768",
    '{"name": "look_up"}': "needs the keys",
    '["look_up", {}]': "no JSON object",
    "look_up(query='x')": "no JSON object",
    "": "no JSON object",
    '{"name": "rm", "arguments": {"query": "x"}}': "no tool 'rm'; available: look_up",
    '{"name": ["look_up"], "arguments": {}}': "names no tool",
    '{"name": "look_up", "arguments": "{}"}': "not a JSON object",
    '{"name": "look_up", "arguments": {}}': "'query' is missing",
    '{"name": "look_up", "arguments": {"query": "x", "limit": 3}}': "no argument 'limit'; available: query, days, near",
    '{"name": "look_up", "arguments": {"query": 7}}': "'query' is an integer, not a string",
    '{"name": "look_up", "arguments": {"query": "x", "days": "3"}}': "'days' is a string, not an integer",
    '{"name": "look_up", "arguments": {"query": "x", "days": 3.0}}': "'days' is a number, not an integer",
    '{"name": "look_up", "arguments": {"query": "x", "days": true}}': "'days' is a boolean, not an integer",
    '{"name": "look_up", "arguments": {"query": "x", "near": [1, "2"]}}': "item, number 1, that is a string",
}


@pytest.mark.parametrize("call", BROKEN, ids=range(len(BROKEN)))
def test_a_call_that_cannot_be_made_says_why_and_spoils_no_other(call: str) -> None:
    tokenizer, reader = reader_of("qwen")
    text = f"<tool_call>{GOOD}</tool_call> then <tool_call>{call}</tool_call><tool_call>{GOOD}</tool_call><|im_end|>"
    first, broken, last = reader.read(ids_of(tokenizer, text)).calls
    assert first == last == ToolCall("look_up", {"query": "x"})
    assert broken.error is not None
    assert BROKEN[call] in broken.error
    assert broken.error.isprintable()
    assert len(broken.error) < 500
    by_template = reader_of("json")[1].read(ids_of(tokenizer, text)).calls
    assert [each.error is None for each in by_template] == [True, False, True]


def test_values_of_a_format_without_types_are_typed_by_the_tool() -> None:
    tokenizer, reader = reader_of("xml")

    def call(days: str) -> ToolCall:
        parameters = {"query": "7", "days": days, "near": "[1, 2.5]"}.items()
        text = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in parameters)
        (made,) = reader.read(ids_of(tokenizer, f"<tool_call><function=look_up>{text}</function></tool_call>")).calls
        return made

    assert call("3") == ToolCall("look_up", {"query": "7", "days": 3, "near": [1, 2.5]})
    assert call("three").error == "the argument 'days' is a string, not an integer"


def test_calls_beyond_the_most_of_a_turn_are_one_error() -> None:
    for name in ("tiny", "json", "mistral"):
        tokenizer, reader = reader_of(name)
        calls = reader.read(ids_of(tokenizer, turn_of(tokenizer, [("look_up", {"query": "x"})] * 20))).calls
        assert [call.error is None for call in calls] == [True] * 16 + [False]
        assert "can have at most 16 calls" in str(calls[-1].error)


# thinking, special tokens --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny", "qwen", "json"])
def test_what_is_thought_is_no_call(name: str) -> None:
    tokenizer, reader = reader_of(name)
    call = f"<tool_call>{GOOD}</tool_call>"
    turn = reader.read(ids_of(tokenizer, f"<think>I say {call}</think>Well: {call}<|im_end|>"))
    assert turn == PolicyTurn("Well:", (ToolCall("look_up", {"query": "x"}),))
    assert reader.read(ids_of(tokenizer, f"<think>I say {call}")) == PolicyTurn("", ())
    (marked,) = reader_of("tiny")[1].read(ids_of(tokenizer, call.replace("x", "</tool_call><think>"))).calls
    assert dict(marked.arguments) == {"query": "</tool_call><think>"}


def test_thinking_that_the_prompt_has_begun() -> None:
    tokenizer = make_tokenizer(THINKS)
    reader = ToolCallReader(tokenizer, SCHEMAS)
    call = f"<tool_call>{GOOD}</tool_call>"
    assert reader.read(ids_of(tokenizer, f"I say {call}")) == PolicyTurn("", ())
    after = reader.read(ids_of(tokenizer, f"I say {call}</think>{call}{call}"))
    assert after.calls == (ToolCall("look_up", {"query": "x"}),) * 2


@pytest.mark.parametrize("name", ["llama-tag", "mistral", "named"])
def test_a_mark_that_is_a_special_token_counts_as_a_token_only(name: str) -> None:
    tokenizer, reader = reader_of(name)
    text = turn_of(tokenizer, [("look_up", {"query": "x"})])
    assert reader.read(ids_of(tokenizer, text)).calls == (ToolCall("look_up", {"query": "x"}),)
    spelled = reader.read(ids_of(tokenizer, text, spelled=True))
    assert spelled == PolicyTurn(text.strip(), ())


@pytest.mark.parametrize("name", FORMATS)
def test_names_of_special_tokens_in_arguments_are_text_and_the_tokens_an_error(name: str) -> None:
    tokenizer, reader = reader_of(name)
    before, after = turn_of(tokenizer, [("look_up", {"query": "STANDIN"})]).split("STANDIN")
    for forged in (*names_of(tokenizer), "[TOOL_[TOOL_CALLS]CALLS]", "<<s>s>"):
        around = ids_of(tokenizer, before), ids_of(tokenizer, after)
        ids = [*around[0], *ids_of(tokenizer, forged, spelled=True), *around[1]]
        assert reader.read(ids) == PolicyTurn("", (ToolCall("look_up", {"query": forged}),))
    number = tokenizer.convert_tokens_to_ids("<|head|>")
    for odd in (number, len(tokenizer) + 5):  # the model's vocabulary may be larger than the tokenizer's
        (call,) = reader.read([*around[0], odd, *around[1]]).calls
        assert "special token" in str(call.error)


def test_special_tokens_are_left_out_of_what_is_said_but_their_names_are_not() -> None:
    tokenizer, reader = reader_of("mistral")
    ids = [*ids_of(tokenizer, "a<s>"), *ids_of(tokenizer, "b</s>", spelled=True), *ids_of(tokenizer, "c</s>")]
    assert reader.read(ids).content == "ab</s>c"


@pytest.mark.parametrize("name", ["mistral", "strict", "by_id"])
def test_a_calls_id_is_the_one_that_was_sampled(name: str) -> None:
    tokenizer, reader = reader_of(name)
    text = turn_of(tokenizer, [("look_up", {"query": "a"}), ("nothing", {}), ("look_up", {})])
    for number, call_id in enumerate(["aB3dE6gH9", "x y", "123456789"]):
        text = text.replace(f"call{number:05d}", call_id)
    assert [call.id for call in reader.read(ids_of(tokenizer, text)).calls] == ["aB3dE6gH9", "", "123456789"]


# hostile turns -------------------------------------------------------------------------------------------------------

PIECES = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "{", "}", "[", "]", '"', "\\", ",", ":", "\n", " " * 30),
    *('{"name": "', '", "arguments": ', '"parameters": {', "look_up", "any-thing", '{"query": "x"}', GOOD, "null", "é"),
    *("<function=look_up>", "<parameter=query>\n", "\n</parameter>", "</function>", "\x00", "\x1b[2J", "\u202e"),
    *("__import__('os').system('touch executed')", "{{7*7}}", "1e999", "9" * 5000, "NaN", '"\\"', '{"a":' * 30),
    *("<|im_end|>\n<|im_start|>tool\n4", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<|eot|>", "</s>", "\\ud800"),
)


def hostile_turns(rng: random.Random, tokenizer: Any, count: int) -> Iterator[list[int]]:
    """``count`` turns: soups of pieces, damaged calls, one piece many times, random ids; as text and with tokens."""
    names = [name for name in names_of(tokenizer) if name]
    for _ in range(count):
        kind = rng.randrange(8)
        if kind == 0:
            yield [rng.randrange(-3, len(tokenizer) + 9) for _ in range(rng.randrange(200))]
            continue
        if kind == 1:
            text = "".join(rng.choices((*PIECES, *names), k=rng.randint(1, 4))) * rng.choice((3, 30, 300))
        elif kind <= 4:
            damaged = list(turn_of(tokenizer, [("look_up", {"query": 'a"é\n', "near": [1.5]})]))
            for _ in range(rng.randint(0, 3)):
                damaged[rng.randrange(len(damaged))] = rng.choice((*PIECES, *names, ""))
            text = "".join(damaged)
        else:
            text = "".join(rng.choices((*PIECES, *names), k=rng.choice((3, 10, 30))))
        yield ids_of(tokenizer, text[:6000], spelled=rng.random() < 0.3)


TYPES = {"query": {"type": "string"}, "days": {"type": "integer"}, "near": {"type": ["array", "null"]}}
LOOK_UP = {"type": "object", "properties": TYPES, "required": ["query"], "additionalProperties": False}


def require_laws(reader: ToolCallReader, ids: Sequence[int]) -> PolicyTurn:
    """Of every turn, whatever its ids."""
    turn = reader.read(ids)
    assert len(turn.calls) <= call_formats.MAX_CALLS + 1
    turn.content.encode()
    for call in turn.calls:
        text = json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)
        assert len(text.encode()) < 200_000
        if call.error is None:
            assert Draft202012Validator(OPEN if call.name == "any-thing" else LOOK_UP).is_valid(dict(call.arguments))
        else:
            assert call.error.isprintable()
            assert len(call.error) <= 500
    return turn


@pytest.mark.parametrize("name", FORMATS)
def test_hostile_turns_crash_execute_and_forge_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, reader = reader_of(name)
    rng, turns, special = random.Random(SEED), TurnTokens(tokenizer), set(tokenizer.all_special_ids)
    framing = [n for n in turns.ids([{"role": "tool", "content": "4"}], 0) if n in special]
    monkeypatch.chdir(tmp_path)
    num_called, said = 0, [*hostile_turns(rng, tokenizer, 200)]
    with executing_no_text():
        for number, ids in enumerate(said):
            turn = require_laws(reader, ids)
            num_called += any(call.error is None for call in turn.calls)
            if number % 25 == 0 and turn.calls:  # what it is answered begins and ends one turn
                answer = {"role": "tool", "content": turn.calls[0].error or json.dumps(dict(turn.calls[0].arguments))}
                assert [n for n in turns.ids([answer], 0) if n in special] == framing, f"seed {SEED}"
    assert not list(tmp_path.iterdir())
    assert num_called > 2, f"seed {SEED}"  # some get through, so the rest is near to calls


@pytest.mark.parametrize("unit", ["<tool_call>", '<tool_call>{"', '<tool_call>["x</tool_call>', '<tool_call>{"a":"\\"'])
def test_reading_costs_what_the_turn_is_long(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that are looked at inside of calls, per character of the turn and call."""
    cost = 0
    plain = call_formats._BRACKETS

    class Counting:
        def finditer(self, text: str, start: int) -> Iterator[Any]:
            nonlocal cost
            for actual in plain.finditer(text, start):
                cost += actual.end() - start
                start = actual.end()
                yield actual
            cost += len(text) - start

    monkeypatch.setattr(call_formats, "MAX_CALLS", 4)
    monkeypatch.setattr(call_formats, "_BRACKETS", Counting())
    _, reader = reader_of("qwen")
    costs = []
    for times in (100, 200, 400):
        cost = 0
        reader._format.scan(unit * times)
        costs.append(cost)
    assert costs[2] <= 5 * 400 * len(unit)  # every call looks at the turn at most once
    assert costs[2] - costs[1] <= 2.01 * (costs[1] - costs[0]) + 100


def test_regular_expressions_of_a_tokenizer_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cubic in blanks, as some that are in use."""
    slow = json.loads(json.dumps(XML_TEMPLATE))
    slow["fields"]["tool_calls"]["content_args"]["tag_pattern"] = (
        r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"
    )
    tokenizer = make_tokenizer(XML, slow)
    reader = ToolCallReader(tokenizer, function_schemas([look_up]))
    monkeypatch.setattr(call_formats, "TEMPLATE_SECONDS", 0.2)
    text = f"<tool_call><function=look_up><parameter=query>{' ' * 20_000}</function></tool_call>"
    (call,) = reader.read(ids_of(tokenizer, text)).calls
    assert "TimeoutError" in str(call.error)


# templates that will not do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "response_template", "reason"),
    [
        ("", None, "has no chat template"),
        (QWEN.replace("{% if tools %}", "{% if false %}"), None, "does not list the tools"),
        (QWEN.replace("in m.tool_calls", "in []"), None, "does not render tool calls"),
        (QWEN.replace("<tool_response>\n{{ m.content }}", "<tool_response>"), None, "does not render the results"),
        (QWEN.replace("<tool_response>", "{{ raise_exception('no tools') }}"), None, r"render tool turns \(no tools\)"),
        (XML, None, "cannot be parsed"),
        (XML, {"fields": {}}, "cannot be parsed"),
        (QWEN.replace("</tool_call>", "").replace("<tool_call>", ""), None, None),  # as Llama's
        (QWEN, {"fields": {}}, None),
    ],
)
def test_templates_that_will_not_do_are_refused_with_what_to_do(
    template: str, response_template: Any, reason: str | None
) -> None:
    tokenizer = make_tokenizer(template, response_template)
    if reason is None:
        ToolCallReader(tokenizer, [ANY])
        return
    with pytest.raises(UserError, match=f"{reason}.*; use "):
        ToolCallReader(tokenizer, [ANY])


def test_the_embedded_template_marks_calls_as_the_policys_own() -> None:
    tokenizer = load_tokenizer("tiny")
    call = {"function": {"name": "look_up", "arguments": {"query": "é"}}}
    messages = [
        *({"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}),
        *({"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "4"}),
    ]
    made = tokenizer.apply_chat_template(
        messages, tools=function_schemas([look_up]), return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [number for number, mask in zip(made["input_ids"], made["assistant_masks"]) if mask]
    assert tokenizer.decode(marked) == (
        '<tool_call>\n{"name": "look_up", "arguments": {"query": "é"}}\n</tool_call><|im_end|>'
    )
    text = tokenizer.decode(made["input_ids"])
    system, _, rest = text.partition("<|im_end|>")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.loads(system.splitlines()[-2])["name"] == "look_up"
    assert "Be brief." not in rest
    assert rest.endswith("<|im_end|>\n<|im_start|>tool\n4<|im_end|>\n")
