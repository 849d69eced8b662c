"""Finding the final answer of a response, in the place where the task asked for it. Linear in the text's length.

Reading numbers out of model text, exactly and without evaluating anything.

Model text is untrusted: nothing here calls ``eval`` or a computer algebra system, the length of what is parsed is
bounded, and every regular expression is linear (its alternatives start with different characters or are bounded).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
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


_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACE = re.compile(r"\\(?:boxed|fbox)\s{0,3}\{|\\.|[{}]", re.DOTALL)  # \{ and \} are text, not braces


def without_thinking(text: str) -> str:
    """What follows the last ``</think>``, up to a ``<think>`` that is never closed; the whole text without either.

    >>> without_thinking("<think>#### 1</think> #### 2"), without_thinking("#### 3 <think> or #### 4?")
    (' #### 2', '#### 3 ')
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _tags(text: str) -> str | None:
    begin, answer = None, None
    for tag in _TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            answer, begin = text[begin : tag.start()], None
    return answer


def _boxed(text: str) -> str | None:
    """Of all boxes that are closed, the one that opens last: one pass with a stack of open braces."""
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for token in _BRACE.finditer(text):
        if token[0] == "}":
            begin = open_braces.pop() if open_braces else None
            if begin is not None and (last is None or begin > last[0]):
                last = (begin, token.start())
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0][-1] == "{" and len(token[0]) > 2:
            open_braces.append(token.end())
    return text[last[0] : last[1]] if last else None


def _hash(text: str) -> str | None:
    _, mark, rest = text.rpartition("####")
    if mark:
        return rest.partition("\n")[0]
    last_line = text.rstrip().rpartition("\n")[2]
    return last_line[2:] if last_line.startswith("A:") else None  # the solutions released with GSM8K end so


_FINDERS: dict[str, tuple[Callable[[str], str | None], ...]] = {
    "tags": (_tags,),
    "boxed": (_boxed,),
    "hash": (_hash,),
    "last_number": (find_last_number,),
    "any": (_tags, _boxed, _hash, find_last_number),
}
ANSWER_FORMATS = tuple(_FINDERS)


def extract_answer(text: str, answer_format: str) -> str | None:
    """The final answer of a response, stripped, or None when it is not there; thinking is read over.

    Args:
        text: the response.
        answer_format: ``tags`` the last complete ``<answer>...</answer>``; ``boxed`` the last complete
            ``\\boxed{...}`` (or ``\\fbox``), braces matched; ``hash`` the rest of the line after the last ``####``
            or, without one, of a last line that begins with ``A:``; ``last_number``; ``any`` the first of these, in
            this order, that is there.

    Raises:
        ValueError: an unknown format.

    >>> extract_answer("So 6*3=18.\\n#### 18", "hash"), extract_answer("#### 18", "boxed")
    ('18', None)
    >>> extract_answer("<think>\\\\boxed{1}</think> \\\\boxed{\\\\frac{1}{2}} or \\\\boxed{3", "boxed")
    '\\\\frac{1}{2}'
    """
    if answer_format not in _FINDERS:
        raise ValueError(f"answer_format={answer_format!r} is not one of {', '.join(ANSWER_FORMATS)}.")
    visible = without_thinking(text)
    for find in _FINDERS[answer_format]:
        answer = find(visible)
        if answer is not None and answer.strip():
            return answer.strip()
    return None
