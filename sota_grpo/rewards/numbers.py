"""Reading numbers out of model text, exactly and without evaluating anything.

Model text is untrusted: nothing here calls ``eval`` or a computer algebra system, the length of what is parsed is
bounded, and every regular expression is linear (its alternatives start with different characters or are bounded).
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

MAX_ANSWER_CHARS = 256  # an answer longer than this is not a number; also keeps integers small

_MAGNITUDE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.)\]}])-)?\$?(?P<minus2>(?<=\$)-)?"  # -5, -$5, $-5, but the 5 of 10-5 is not negative
    rf"(?<![\w.])(?P<magnitude>{_MAGNITUDE})(?P<exponent>[eE][+-]?\d+)?(?:/(?P<divisor>\d+)(?![\d/]))?",
    re.ASCII,
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{(-?\d{1,80})\}\{(\d{1,80})\}", re.ASCII)
_MAX_EXPONENT_CHARS = 4  # e-99: a longer exponent would make an integer of thousands of digits
_CALCULATION = re.compile(r"<<[^<>]*>>")  # GSM8K's calculator annotations
_UNIT_POWER = re.compile(r"\b([cmk]?m|ft|feet|in|inches|yd|units)\^(?:\d|\{\d\})", re.ASCII)  # its 2 is no number
_MIXED_NUMBER = re.compile(r"(?<![\w.,/])(\d{1,80}) +(\d{1,80})/(\d{1,80})(?![\d/])", re.ASCII)
_LEADING_MINUS = re.compile(r"\A\s*-\s+(?=[$.\d])", re.ASCII)
_REWRITES = (("\u2212", "-"), ("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%"))


def parse_number(text: str) -> Fraction | None:
    """The value of ``text`` when it holds exactly one number, else None.

    Thousands commas, a dollar sign, a percent sign, units and words around the number, and a trailing period are
    read over; ``18%`` is 18, as a percentage is asked for as a bare number. ``a/b`` and ``\\frac{a}{b}`` are
    fractions, ``3 1/2`` is a mixed number. Two numbers (``"5 or 6"``, ``"2*3"``) are no answer: a response may not
    hedge, and nothing is computed.

    Args:
        text: an extracted answer, at most 256 characters; a longer one is not a number.

    >>> parse_number("$1,080.50"), parse_number("-3/4"), parse_number("18.00 dollars.") == 18
    (Fraction(2161, 2), Fraction(-3, 4), True)
    >>> parse_number("10**10**10"), parse_number("5 or 6"), parse_number("none"), parse_number("1/0")
    (None, None, None, None)
    """
    if len(text) > MAX_ANSWER_CHARS:
        return None
    for old, new in _REWRITES:
        text = text.replace(old, new)
    text = _UNIT_POWER.sub(r"\1", _CALCULATION.sub("", text))
    text = _LEADING_MINUS.sub("-", text)
    text = _MIXED_NUMBER.sub(lambda found: f"{int(found[1]) * int(found[3]) + int(found[2])}/{found[3]}", text)
    text = _LATEX_FRACTION.sub(r" \1/\2 ", text)
    matches = _NUMBER.finditer(text)
    found = next(matches, None)
    if found is None or next(matches, None) is not None:
        return None
    return _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    exponent = found["exponent"] or ""
    if len(exponent) > _MAX_EXPONENT_CHARS:
        return None
    value = Fraction(found["magnitude"].replace(",", "") + exponent)
    if found["divisor"]:
        divisor = int(found["divisor"])
        if divisor == 0:
            return None
        value /= divisor
    return -value if found["minus"] or found["minus2"] else value


def find_last_number(text: str) -> str | None:
    """The last number of ``text`` as it is written there, or None.

    >>> find_last_number("She sold 48/2 = 24 clips, so $1,072.50.")
    '$1,072.50'
    """
    last = deque(_NUMBER.finditer(text.replace("\u2212", "-")), maxlen=1)
    return last[0][0] if last else None


def numbers_equal(left: str, right: str) -> bool:
    """Whether both texts are numbers and equal, exactly: no tolerance, no float.

    >>> numbers_equal("18", "$18.00"), numbers_equal("0.5", "1/2"), numbers_equal("18", "18.01")
    (True, True, False)
    >>> numbers_equal("none", "none")
    False
    """
    value = parse_number(left)
    return value is not None and value == parse_number(right)
