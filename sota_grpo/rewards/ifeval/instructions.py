"""The 25 instructions by their official ids: what checks each, and the kwargs that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sota_grpo.rewards.extract import extract_answer, without_thinking
from sota_grpo.rewards.ifeval import checks
from sota_grpo.rewards.ifeval.checks import LANGUAGES, RELATIONS

Reader = Callable[[Any], Any]  # the value of a kwarg, or a ValueError that says what it must be


def _count(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of numbers with gaps comes back as floats
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number from 0")
    return value


def _position(value: Any) -> int:
    if _count(value) == 0:
        raise ValueError("a whole number from 1")
    return _count(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("a text")
    return value.strip()


def _texts(value: Any) -> list[str]:
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(item, str) and item for item in value):
        raise ValueError("a list of texts")
    return list(value)


def _letter(value: Any) -> str:
    if len(_text(value)) != 1:
        raise ValueError("one character")
    return _text(value)


def _relation(value: Any) -> str:
    if not isinstance(value, str) or value not in RELATIONS:
        raise ValueError(f"one of {', '.join(RELATIONS)}")
    return value


def _language(value: Any) -> str:
    if not isinstance(value, str) or value not in LANGUAGES:
        raise ValueError("the code of a language that langdetect knows, such as en, de or zh-cn")
    return value


@dataclass(frozen=True)
class Instruction:
    """What a response is checked for.

    Args:
        follows: ``(text, **kwargs) -> bool``.
        kwargs: reader of each kwarg that must be there.
        optional: reader of each kwarg that may be there; the benchmark has none, training data do.
        splits_sentences: ``follows`` takes ``nltk_data`` beside its kwargs.
    """

    follows: Callable[..., bool]
    kwargs: Mapping[str, Reader] = field(default_factory=dict)
    optional: Mapping[str, Reader] = field(default_factory=dict)
    splits_sentences: bool = False


INSTRUCTIONS: Mapping[str, Instruction] = {
    "keywords:existence": Instruction(checks.has_keywords, {"keywords": _texts}),
    "keywords:frequency": Instruction(
        checks.keyword_count, {"keyword": _text, "relation": _relation, "frequency": _count}
    ),
    "keywords:forbidden_words": Instruction(checks.lacks_words, {"forbidden_words": _texts}),
    "keywords:letter_frequency": Instruction(
        checks.letter_count, {"letter": _letter, "let_relation": _relation, "let_frequency": _count}
    ),
    "language:response_language": Instruction(checks.in_language, {"language": _language}),
    "length_constraints:number_sentences": Instruction(
        checks.sentence_count, {"relation": _relation, "num_sentences": _count}, splits_sentences=True
    ),
    "length_constraints:number_paragraphs": Instruction(
        checks.paragraph_count, {"num_paragraphs": _count}, optional={"divider": _text}
    ),
    "length_constraints:number_words": Instruction(checks.word_count, {"relation": _relation, "num_words": _count}),
    "length_constraints:nth_paragraph_first_word": Instruction(
        checks.nth_paragraph_begins, {"num_paragraphs": _count, "nth_paragraph": _position, "first_word": _text}
    ),
    "detectable_content:number_placeholders": Instruction(checks.placeholder_count, {"num_placeholders": _count}),
    "detectable_content:postscript": Instruction(checks.has_postscript, {"postscript_marker": _text}),
    "detectable_format:number_bullet_lists": Instruction(checks.bullet_count, {"num_bullets": _count}),
    "detectable_format:constrained_response": Instruction(checks.is_choice, optional={"options": _texts}),
    "detectable_format:number_highlighted_sections": Instruction(checks.highlight_count, {"num_highlights": _count}),
    "detectable_format:multiple_sections": Instruction(
        checks.section_count, {"section_spliter": _text, "num_sections": _count}
    ),
    "detectable_format:json_format": Instruction(checks.is_json),
    "detectable_format:title": Instruction(checks.has_title),
    "combination:two_responses": Instruction(checks.has_two_responses),
    "combination:repeat_prompt": Instruction(checks.repeats_prompt, {"prompt_to_repeat": _text}),
    "startend:end_checker": Instruction(checks.ends_with, {"end_phrase": _text}),
    "change_case:capital_word_frequency": Instruction(
        checks.capital_word_count,
        {"capital_relation": _relation, "capital_frequency": _count},
        splits_sentences=True,
    ),
    "change_case:english_capital": Instruction(checks.is_english_in_capitals),
    "change_case:english_lowercase": Instruction(checks.is_english_in_lower_case),
    "punctuation:no_comma": Instruction(checks.lacks_commas),
    "startend:quotation": Instruction(checks.is_quoted),
}


def read_kwargs(instruction_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs that an instruction needs, checked; those without a value (None, NaN, empty) are left out.

    Tables give every row the kwargs of all instructions, most of them None; 0 is a value. The official evaluator draws
    a missing kwarg at random, so here it is an error.

    Raises:
        ValueError: an id that is none of the 25, a kwarg that is missing, of the wrong kind or not the instruction's.

    >>> read_kwargs("length_constraints:number_words", {"relation": "less than", "num_words": 0, "keywords": None})
    {'relation': 'less than', 'num_words': 0}
    """
    if instruction_id not in INSTRUCTIONS:
        raise ValueError(f"{instruction_id!r} is none of the {len(INSTRUCTIONS)} instructions of IFEval")
    instruction = INSTRUCTIONS[instruction_id]
    readers = {**instruction.kwargs, **instruction.optional}
    given = {name: value for name, value in kwargs.items() if not _is_absent(value)}
    for name in instruction.kwargs:
        if name not in given:
            raise ValueError(f"{instruction_id} needs {name}")
    for name in given:
        if name not in readers:
            takes = f"takes {', '.join(readers)}" if readers else "takes no kwargs"
            raise ValueError(f"{instruction_id} has {name}={given[name]!r} but {takes}")
    read = {}
    for name in (name for name in readers if name in given):
        try:
            read[name] = readers[name](given[name])
        except ValueError as must_be:
            raise ValueError(f"{instruction_id}: {name}={given[name]!r} must be {must_be}") from None
    return read


def _is_absent(value: Any) -> bool:
    return value is None or value != value or (isinstance(value, (str, list, tuple, dict)) and not value)


Kwargs = Mapping[str, Any]


def answer_text(response: str) -> str:
    """What is graded: the last ``<answer>`` block if there is one, else all but the thinking; the frame is stripped.

    >>> answer_text("<think>Yes?</think>\\n<answer>\\nNo\\n</answer> Bye"), answer_text("<think>Yes?</think>\\nNo")
    ('No', 'No')
    >>> answer_text(" as it is \\n")
    ' as it is \\n'
    """
    tagged = extract_answer(response, "tags")
    if tagged is not None:
        return tagged
    visible = without_thinking(response)
    return response if visible == response else visible.strip()


def follow_lists(
    text: str, instruction_ids: Sequence[str], kwargs: Sequence[Kwargs], nltk_data: str | None = None
) -> tuple[list[bool], list[bool]]:
    """Whether the text follows each instruction: strictly, as it stands, and loosely, in one of eight readings.

    The readings forgive an introduction and an ending: the text, without its first line, without its last and without
    both, each with and without ``*``. An empty reading follows nothing.

    Args:
        text: :func:`answer_text` of a response.
        instruction_ids: keys of ``INSTRUCTIONS``.
        kwargs: one per instruction, as :func:`sota_grpo.rewards.ifeval.read_kwargs` returns them.
        nltk_data: see :func:`sota_grpo.rewards.ifeval.find_punkt`.

    >>> follow_lists("Sure, here it is:\\n**Yes**", ["punctuation:no_comma", "detectable_format:title"], [{}, {}])
    ([False, False], [True, False])
    """
    checks = _checks(instruction_ids, kwargs, nltk_data)
    strict = [_follows(check, [text]) for check in checks]
    others = [] if all(strict) else _other_readings(text)
    return strict, [followed or _follows(check, others) for followed, check in zip(strict, checks, strict=True)]


def _checks(ids: Sequence[str], kwargs: Sequence[Kwargs], nltk_data: str | None) -> list[Callable[[str], bool]]:
    checks: list[Callable[[str], bool]] = []
    for instruction_id, values in zip(ids, kwargs, strict=True):
        instruction = INSTRUCTIONS[instruction_id]
        data = {"nltk_data": nltk_data} if instruction.splits_sentences else {}
        checks.append(partial(instruction.follows, **values, **data))
    return checks


def _follows(check: Callable[[str], bool], readings: Sequence[str]) -> bool:
    return any(bool(text.strip()) and check(text) for text in readings)


def _other_readings(text: str) -> list[str]:
    lines = text.split("\n")
    cut = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*cut, *(reading.replace("*", "") for reading in cut)]))[1:]
