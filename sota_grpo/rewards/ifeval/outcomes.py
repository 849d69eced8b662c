"""Which instructions a response follows: to the letter, and when its frame is overlooked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sota_grpo.rewards.extract import extract_answer, without_thinking
from sota_grpo.rewards.ifeval.instructions import INSTRUCTIONS

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
