"""Whether two answers to a mathematics problem are the same (the boxed answers of MATH and its kin)."""

from __future__ import annotations

import re

from sota_grpo.rewards.maths_arithmetic import NoValue, TooCostly
from sota_grpo.rewards.maths_compare import Comparison
from sota_grpo.rewards.maths_parse import parse_answer
from sota_grpo.rewards.maths_text import MAX_ANSWER_CHARS, plain, tidy
from sota_grpo.rewards.maths_tokens import Unreadable
from sota_grpo.rewards.maths_units import Measure, split_letter, split_unit, units_conflict
from sota_grpo.rewards.maths_value import NoNumber
from sota_grpo.rewards.maths_verify import verified

_WORDS = re.compile(r"[A-Za-z(][A-Za-z ().,'-]*")
_CHOICE = re.compile(r"\(?([A-Za-z])[).:]*")
_COMMA = re.compile(r"\d,\d{3}(?!\d)")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")  # not between two numbers
_WORD = re.compile(r"(?<!\\)(?<![A-Za-z])[A-Za-z]{3}")
_LETTERS = re.compile(r"\\[A-Za-z]+|[A-Za-z]")


def math_equal(gold: str, answer: str) -> bool:
    """Whether ``answer`` is the same mathematical answer as ``gold``. Total: it returns for any two texts.

    Compared are, in this order: the words; the units, where both have a known one; the two answers as the grammar of
    :mod:`sota_grpo.rewards.maths_parse` reads them (:mod:`sota_grpo.rewards.maths_compare` has the conventions); and,
    only where that grammar cannot read them, what Math-Verify makes of them. Nothing is evaluated as code, and large
    numbers, deep nesting and long texts end the comparison instead of being worked out.

    Args:
        gold: the right answer, without its box.
        answer: the answer found in a response, at most ``MAX_ANSWER_CHARS`` characters; a longer one is not equal.

    >>> math_equal("\\\\frac{\\\\sqrt3}{2}", "\\\\sqrt{3}/2"), math_equal("x=5", "5"), math_equal("0.333", "1/3")
    (True, True, False)
    >>> math_equal("5\\\\text{ cm}", "5"), math_equal("\\\\text{(A)}", "A"), math_equal("[1,2)", "(1,2)")
    (True, True, False)
    >>> math_equal("10^{10^{10}}", "__import__('os').getcwd()")
    False
    """
    if max(len(gold), len(answer)) > MAX_ANSWER_CHARS:
        return False
    texts = tidy(gold), tidy(answer)
    if not all(texts):
        return False
    if _SPACE.sub("", texts[0]) == _SPACE.sub("", texts[1]) or _same_words(*texts):
        return True
    gold_measure, answer_measure = _measures(*texts)
    if units_conflict(gold_measure, answer_measure):
        return False
    try:
        return _same_trees(gold_measure, answer_measure)
    except TooCostly:
        return False
    except (Unreadable, NoNumber, NoValue):
        return verified(gold_measure.text, answer_measure.text)


def _same_words(gold: str, answer: str) -> bool:
    """Whether both are words, and the same; letter case matters only in what may be an expression: ``R-r``."""
    words = plain(gold), plain(answer)
    choices = _CHOICE.fullmatch(words[0]), _CHOICE.fullmatch(words[1])
    if choices[0] and choices[1]:
        return choices[0][1].casefold() == choices[1][1].casefold()
    if not all(map(_WORDS.fullmatch, words)):
        return False
    return words[0] == words[1] or (_WORD.search(gold) is not None and words[0].casefold() == words[1].casefold())


def _measures(gold: str, answer: str) -> tuple[Measure, Measure]:
    """Both answers without their units; a bare letter is a unit only where the other answer has no letters."""
    gold_measure, answer_measure = split_unit(gold), split_unit(answer)
    if not _has_letters(answer_measure.text):
        gold_measure = split_letter(gold_measure)
    if not _has_letters(gold_measure.text):
        answer_measure = split_letter(answer_measure)
    return gold_measure, answer_measure


def _has_letters(text: str) -> bool:
    return any(found[0] != "\\" for found in _LETTERS.findall(text))


def _same_trees(gold: Measure, answer: Measure) -> bool:
    texts = [_scaled(measure) for measure in (gold, answer)]
    if not any(map(_mixes_cases, texts)):
        texts = [_LETTERS.sub(lambda found: found[0] if found[0][0] == "\\" else found[0].lower(), t) for t in texts]
    readings = (True, False) if any(map(_COMMA.search, texts)) else (True,)  # 100,200 is a number or a list
    return any(Comparison().same(*(parse_answer(text, thousands=reading) for text in texts)) for reading in readings)


def _scaled(measure: Measure) -> str:
    return measure.text if measure.factor == 1 else f"({measure.text})\\cdot {measure.factor}"


def _mixes_cases(text: str) -> bool:
    """Whether a letter stands in a text both large and small, and so may mean two things."""
    letters = {found for found in _LETTERS.findall(text) if found[0] != "\\"}
    return any(letter.islower() and letter.upper() in letters for letter in letters)
