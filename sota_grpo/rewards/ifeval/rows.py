"""Rows of IFEval's table and of RLVR-IFeval's: the prompt, and the instructions that it gives.

A constraint of RLVR-IFeval (Lambert et al. 2024, arXiv:2411.15124) is ``{"func_name": ..., "N": ..., ...}`` with the
arguments that it does not use set to null. It is graded as the benchmark would, whose score is what the training is
for; where its prompt asks for something else ("exactly", "around", another divider, options of its own) the kwargs say
so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sota_grpo.rewards.ifeval.instructions import read_kwargs

_Names = Mapping[str, str]  # argument of the constraint -> kwarg of the instruction
_CONSTRAINTS: Mapping[str, tuple[str, _Names, Mapping[str, Any]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency",
        {"word": "keyword", "N": "frequency"},
        {"relation": "exactly"},
    ),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency",
        {"letter": "letter", "N": "let_frequency"},
        {"let_relation": "exactly"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}, {"divider": "* * *"}),
    "validate_word_constraint": ("length_constraints:number_words", {"quantifier": "relation", "N": "num_words"}, {}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"quantifier": "relation", "N": "num_sentences"},
        {},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph", "first_word": "first_word"},
        {},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": (
        "detectable_format:number_highlighted_sections",
        {"N": "num_highlights"},
        {},
    ),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"section_splitter": "section_spliter", "N": "num_sections"},
        {},
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"quantifier": "capital_relation", "N": "capital_frequency"},
        {},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}
FUNC_NAMES = tuple(_CONSTRAINTS)

_REPEAT = "First, repeat the request"  # begins the sentence that does not belong to the request


def _escaped(words: str | Sequence[str]) -> list[str]:
    return [re.escape(word) for word in ([words] if isinstance(words, str) else words)]


def _options(options: str | Sequence[str]) -> Sequence[str]:
    return [option.strip() for option in options.split(",")] if isinstance(options, str) else options


_MEANING: Mapping[str, Callable[[Any], Any]] = {  # to the benchmark keywords are regular expressions
    "keyword_list": _escaped,
    "word": lambda word: rf"(?<!\w){re.escape(word)}(?!\w)",
    "forbidden_words": _escaped,
    "section_splitter": re.escape,
    "options": _options,
    "original_prompt": lambda prompt: prompt.partition(_REPEAT)[0],
}


def instruction_of(constraint: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The instruction id of a constraint and its kwargs, not checked yet.

    Raises:
        ValueError: no ``func_name``, one that is none of the 25, or an argument that is no text where it must be.

    >>> instruction_of({"func_name": "validate_word_constraint", "N": 17, "quantifier": "at least", "word": None})
    ('length_constraints:number_words', {'relation': 'at least', 'num_words': 17})
    >>> instruction_of({"func_name": "verify_keyword_frequency", "word": "cat", "N": 2})[1]
    {'keyword': '(?<!\\\\w)cat(?!\\\\w)', 'frequency': 2, 'relation': 'exactly'}
    """
    func_name = constraint.get("func_name")
    if func_name not in FUNC_NAMES:
        raise ValueError(f"func_name {func_name!r} is none of the {len(FUNC_NAMES)} constraints of RLVR-IFeval")
    instruction_id, names, fixed = _CONSTRAINTS[func_name]
    kwargs = {kwarg: _meaning(argument, constraint.get(argument)) for argument, kwarg in names.items()}
    return instruction_id, {**kwargs, **fixed}


def _meaning(argument: str, value: Any) -> Any:
    try:
        return value if value is None else _MEANING.get(argument, _as_it_is)(value)
    except (TypeError, AttributeError):
        raise ValueError(f"{argument}={value!r} is no text, nor a list of texts") from None


def _as_it_is(value: Any) -> Any:
    return value


Instructions = Sequence[tuple[str, Mapping[str, Any]]]


def read_prompt(row: Mapping[str, Any]) -> str:
    """The prompt of a row of either table, empty where it is missing.

    Raises:
        ValueError: it is not text.

    >>> read_prompt({"messages": [{"role": "user", "content": "Hi"}], "ground_truth": "{}"}), read_prompt({})
    ('Hi', '')
    """
    if row.get("prompt") is None and row.get("messages") is not None:
        return _text(_user_turn(row["messages"]).get("content"), "messages")
    return _text(row.get("prompt"), "prompt")


def read_instructions(row: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """The instruction ids of a row of either table, and the kwargs of each, checked.

    IFEval: ``instruction_id_list`` and ``kwargs``, a list with one mapping per instruction, or the JSON of it.
    RLVR-IFeval: ``ground_truth``, a constraint (:func:`sota_grpo.rewards.ifeval.rows.instruction_of`), a list of them,
    or the JSON of either.

    Raises:
        ValueError: a column that is missing or of the wrong form, an unknown instruction, kwargs that it cannot be
            checked with.

    >>> read_instructions({"instruction_id_list": ["startend:quotation"], "kwargs": '[{"num_words": null}]'})
    (['startend:quotation'], [{}])
    """
    if "instruction_id_list" in row:
        given = _of_ifeval(_plain(row["instruction_id_list"]), _plain(row.get("kwargs")))
    elif "ground_truth" in row:
        given = _of_rlvr(_plain(row["ground_truth"]))
    else:
        found = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"there is no column 'instruction_id_list' or 'ground_truth'; the columns found are {found}")
    return [name for name, _ in given], [read_kwargs(name, kwargs) for name, kwargs in given]


def _of_ifeval(ids: Any, kwargs: Any) -> Instructions:
    if not isinstance(ids, (list, tuple)) or not ids or not all(isinstance(name, str) for name in ids):
        raise ValueError(f"column 'instruction_id_list' holds {ids!r}, not a list of instructions")
    if not isinstance(kwargs, (list, tuple)) or len(kwargs) != len(ids):
        raise ValueError(f"column 'kwargs' does not hold one mapping for each of the {len(ids)} instructions")
    return list(zip(ids, [_mapping(one or {}, "kwargs") for one in kwargs], strict=True))


def _of_rlvr(ground_truth: Any) -> Instructions:
    constraints = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    if not constraints:
        raise ValueError("column 'ground_truth' holds no constraint")
    return [instruction_of(_mapping(one, "ground_truth")) for one in constraints]


def _user_turn(messages: Any) -> Mapping[str, Any]:
    turns = messages if isinstance(messages, (list, tuple)) else [messages]
    if len(turns) != 1 or not isinstance(turns[0], Mapping) or turns[0].get("role") != "user":
        raise ValueError("column 'messages' does not hold one turn of the user")
    return turns[0]


def _text(value: Any, column: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not text")
    return value or ""


def _mapping(value: Any, column: str) -> Mapping[str, Any]:
    value = _plain(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not a mapping")
    return value


def _plain(value: Any) -> Any:
    """The value, read as JSON where it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{value[:80]!r} is not valid JSON") from None
