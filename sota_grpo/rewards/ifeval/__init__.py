"""IFEval: check the 25 instructions that a program can verify (Zhou et al. 2023, arXiv:2311.07911).

Results equal those of the benchmark's evaluator, and of TorchRL's copy of it, wherever these are deterministic. For a
missing kwarg or a letter such as ``#`` they draw a random value; here the first is an error and the second is used
unchanged. Every check takes time linear in the length of the text.

A constraint of RLVR-IFeval (Lambert et al. 2024, arXiv:2411.15124) is ``{"func_name": ..., "N": ..., ...}``, in which
unused arguments are null. It is graded by the benchmark's rules, because the benchmark's score is the goal of the
training; kwargs express what differs in its prompt ("exactly", "around", another divider, other options).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from sota_grpo.rewards.extract import extract_answer, without_thinking
from sota_grpo.rewards.ifeval.checks import INSTRUCTIONS, LANGUAGES, RELATIONS

Kwargs = Mapping[str, Any]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, str) and item for item in value)


def _is_count(value: Any, least: int = 0) -> bool:
    is_whole = value.is_integer() if isinstance(value, float) else isinstance(value, int)  # columns with gaps are float
    return is_whole and not isinstance(value, bool) and bool(value >= least)


def _is_among(names: Collection[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


_LANGUAGE = "the code of a language that langdetect knows, such as en, de or zh-cn"
#: What a kwarg must be, the test of that, its conversion, and the names of such kwargs.
_KINDS: tuple[tuple[str, Callable[[Any], bool], Callable[[Any], Any], str], ...] = (
    ("a text", _is_text, str.strip, "keyword divider first_word postscript_marker section_spliter"),
    ("a text", _is_text, str.strip, "prompt_to_repeat end_phrase"),
    ("a list of texts", _are_texts, list, "keywords forbidden_words options"),
    ("one character", lambda value: _is_text(value) and len(value.strip()) == 1, str.strip, "letter"),
    ("a whole number from 1", partial(_is_count, least=1), int, "nth_paragraph"),
    (_LANGUAGE, _is_among(LANGUAGES), str, "language"),
    (f"one of {', '.join(RELATIONS)}", _is_among(RELATIONS), str, "relation let_relation capital_relation"),
    ("a whole number from 0", _is_count, int, "frequency let_frequency capital_frequency num_sentences num_words"),
    (
        "a whole number from 0",
        _is_count,
        int,
        "num_paragraphs num_placeholders num_bullets num_highlights num_sections",
    ),
)
_READERS = {name: (must_be, holds, read) for must_be, holds, read, names in _KINDS for name in names.split()}


def read_kwargs(instruction_id: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked and converted kwargs of an instruction, without those that have no value (None, NaN, empty).

    Tables give every row the kwargs of all instructions, most of them None; 0 is a value. ValueError for an unknown
    ``instruction_id``, or a kwarg that is missing, of a wrong type or not the instruction's.
    """
    if instruction_id not in INSTRUCTIONS:
        raise ValueError(f"{instruction_id!r} is not one of the {len(INSTRUCTIONS)} instructions of IFEval")
    names = INSTRUCTIONS[instruction_id].kwargs
    present = {
        name: value
        for name, value in kwargs.items()
        if value is not None and value == value and (value or not isinstance(value, (str, list, tuple, dict)))
    }
    for name, is_needed in names.items():
        if is_needed and name not in present:
            raise ValueError(f"{instruction_id} needs {name}, which is missing or empty")
    read = {}
    for name, value in present.items():
        if name not in names:
            takes = f"takes {', '.join(names)}" if names else "takes no kwargs"
            raise ValueError(f"{instruction_id} has {name}={value!r} but {takes}")
        must_be, holds, convert = _READERS[name]
        if not holds(value):
            raise ValueError(f"{instruction_id}: {name}={value!r} must be {must_be}")
        read[name] = convert(value)
    return {name: read[name] for name in names if name in read}


def answer_text(response: str) -> str:
    """Return the text to grade: the last ``<answer>`` block or text after thinking, stripped; else ``response`` as is.

    >>> answer_text("<think>Yes?</think>\\n<answer>\\nNo\\n</answer> Bye"), answer_text(" as it is \\n")
    ('No', ' as it is \\n')
    """
    tagged = extract_answer(response, "tags")
    if tagged is not None:
        return tagged
    visible = without_thinking(response)
    return response if visible == response else visible.strip()


def follow_lists(text: str, instruction_ids: Sequence[str], kwargs: Sequence[Kwargs]) -> tuple[list[bool], list[bool]]:
    """Return two lists, with whether the text follows each instruction: strictly (unchanged) and loosely.

    Loosely means that at least one of eight variants follows it, to tolerate an introduction and an ending: the text,
    and the text without its first line, last line or both, each with and without ``*``. A blank variant follows
    nothing. ``text`` is a result of :func:`answer_text`, ``kwargs`` has one of :func:`read_kwargs` per instruction.

    >>> follow_lists("Sure, here it is:\\n**Yes**", ["punctuation:no_comma", "detectable_format:title"], [{}, {}])
    ([False, False], [True, False])
    """
    named = zip(instruction_ids, kwargs, strict=True)
    bound = [partial(INSTRUCTIONS[name].follows, **values) for name, values in named]

    def followed(check: Callable[[str], bool], readings: Sequence[str]) -> bool:
        return any(bool(reading.strip()) and check(reading) for reading in readings)

    strict = [followed(check, [text]) for check in bound]
    if all(strict):
        return strict, list(strict)
    lines = text.split("\n")
    cut = [text, *("\n".join(shorter).strip() for shorter in (lines[1:], lines[:-1], lines[1:-1]))]
    others = list(dict.fromkeys([*cut, *(reading.replace("*", "") for reading in cut)]))[1:]
    return strict, [is_strict or followed(check, others) for is_strict, check in zip(strict, bound, strict=True)]


_FUNCTIONS = {instruction.func_name: name for name, instruction in INSTRUCTIONS.items()}
FUNC_NAMES = tuple(_FUNCTIONS)
_ARGUMENTS = {  # names of a constraint's arguments by kwarg, if they differ; all counts are called N
    **{name: "N" for name, (_, holds, _) in _READERS.items() if holds is _is_count},
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), "quantifier"),
    **{"keywords": "keyword_list", "keyword": "word", "nth_paragraph": "i", "prompt_to_repeat": "original_prompt"},
    "section_spliter": "section_splitter",
}
_FIXED: Mapping[str, Kwargs] = {  # kwargs that the constraint's text implies
    "verify_keyword_frequency": {"relation": "exactly"},
    "verify_letter_frequency": {"let_relation": "exactly"},
    "verify_paragraph_count": {"divider": "* * *"},
}


def _escaped(words: Sequence[str]) -> list[str]:
    return list(map(re.escape, [words] if isinstance(words, str) else words))


_MEANING: Mapping[str, Callable[[Any], Any]] = {  # converts arguments; the benchmark's keywords are regular expressions
    "keyword_list": _escaped,
    "word": lambda word: rf"(?<!\w){re.escape(word)}(?!\w)",
    "forbidden_words": _escaped,
    "section_splitter": re.escape,
    "options": lambda options: list(map(str.strip, options.split(","))) if isinstance(options, str) else options,
    "original_prompt": lambda prompt: prompt.partition("First, repeat the request")[0],  # the sentence after it
}


def instruction_of(constraint: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return an RLVR-IFeval constraint's instruction id and its unchecked kwargs; a missing argument becomes None.

    ValueError for a missing or unknown ``func_name``, or an argument that is not the text or list of texts it must be.

    >>> instruction_of({"func_name": "validate_word_constraint", "N": 17, "quantifier": "at least", "word": None})
    ('length_constraints:number_words', {'relation': 'at least', 'num_words': 17})
    """
    func_name = constraint.get("func_name")
    if func_name not in FUNC_NAMES:
        raise ValueError(f"func_name {func_name!r} is not one of the {len(FUNC_NAMES)} constraints of RLVR-IFeval")
    instruction_id = _FUNCTIONS[func_name]
    kwargs = {}
    for name in INSTRUCTIONS[instruction_id].kwargs:
        argument = _ARGUMENTS.get(name, name)
        value = constraint.get(argument)
        try:
            kwargs[name] = value if value is None else _MEANING.get(argument, lambda same: same)(value)
        except (TypeError, AttributeError):
            must_be = "a text, or for keyword_list and forbidden_words a list of texts"
            raise ValueError(f"{argument}={value!r} must be {must_be}") from None
    return instruction_id, {**kwargs, **_FIXED.get(func_name, {})}


def read_prompt(row: Mapping[str, Any]) -> str:
    """Return the prompt of a row of either dataset, or an empty text; ValueError if it is not one text of the user."""
    column, prompt = "prompt", row.get("prompt")
    if prompt is None and row.get("messages") is not None:
        column, messages = "messages", row["messages"]
        turns = messages if isinstance(messages, (list, tuple)) else [messages]
        if len(turns) != 1 or not isinstance(turns[0], Mapping) or turns[0].get("role") != "user":
            raise ValueError("column 'messages' must hold one message, of the user")
        prompt = turns[0].get("content")
    if prompt is not None and not isinstance(prompt, str):
        raise ValueError(f"column {column!r} holds {type(prompt).__name__}, not text")
    return prompt or ""


def read_instructions(row: Mapping[str, Any]) -> tuple[list[str], list[dict[str, Any]]]:
    """Return (instruction ids, checked kwargs of each instruction) of a row of either dataset.

    IFEval: column ``instruction_id_list``, and ``kwargs`` with one mapping per instruction, as a list or JSON.
    RLVR-IFeval: column ``ground_truth`` with one constraint or a list of them (:func:`instruction_of`), or JSON.
    ValueError if a column is missing, or a column, an instruction or its kwargs are invalid.
    """
    if "instruction_id_list" in row:
        ids, kwargs = _plain(row["instruction_id_list"]), _plain(row.get("kwargs"))
        if not isinstance(ids, (list, tuple)) or not ids or not all(isinstance(name, str) for name in ids):
            raise ValueError(f"column 'instruction_id_list' holds {ids!r}, not a list of instructions")
        if not isinstance(kwargs, (list, tuple)) or len(kwargs) != len(ids):
            raise ValueError(f"column 'kwargs' does not hold one mapping for each of the {len(ids)} instructions")
        instructions = [(name, _mapping(entry or {}, "kwargs")) for name, entry in zip(ids, kwargs, strict=True)]
    elif "ground_truth" in row:
        ground_truth = _plain(row["ground_truth"])
        constraints = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
        if not constraints:
            raise ValueError("column 'ground_truth' holds no constraint")
        instructions = [instruction_of(_mapping(entry, "ground_truth")) for entry in constraints]
    else:
        columns = f"the columns found are {', '.join(map(repr, row)) or 'none'}"
        raise ValueError(f"there is no column 'instruction_id_list' and no 'ground_truth'; {columns}")
    return [name for name, _ in instructions], [read_kwargs(name, kwargs) for name, kwargs in instructions]


def _mapping(value: Any, column: str) -> Mapping[str, Any]:
    value = _plain(value)
    if not isinstance(value, Mapping):
        raise ValueError(f"column {column!r} holds {type(value).__name__}, not a mapping")
    return value


def _plain(value: Any) -> Any:
    """Return the value, parsed as JSON if it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError(f"{value[:80]!r} is not valid JSON") from None
