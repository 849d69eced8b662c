"""The constraints of RLVR-IFeval (Lambert et al. 2024, arXiv:2411.15124) as instructions of the benchmark.

A constraint is ``{"func_name": ..., "N": ..., ...}`` with the arguments that it does not use set to null. It is graded
as the benchmark would, whose score is what the training is for; where its prompt asks for something else ("exactly",
"around", another divider, options of its own) the kwargs say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
