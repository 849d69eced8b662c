"""Parse arithmetic expressions that a model wrote and compute their exact value, without Python's ``eval``.

Model text is untrusted: a text beyond the bounds below is rejected. There is no power operator, so values have few
digits and are computed fast.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 32  # of nested brackets and signs

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))", re.ASCII)
_ASCII_OPERATORS = str.maketrans("×∗⋅·÷∕−–", "****//--")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_PRECEDENCE = {"+": 0, "-": 0, "*": 1, "/": 1}


class ExpressionError(ValueError):
    """The text is no expression within the bounds, or divides by zero; the message quotes at most one character."""


@dataclass(frozen=True)
class Expression:
    """A parsed expression: its exact value, and its numbers from left to right without signs (4 for ``-4``)."""

    value: Fraction
    numbers: tuple[Fraction, ...]


def parse_expression(text: str) -> Expression:
    """Return the exact value and the numbers of a formula with ``+ - * /``, signs and round brackets.

    Unicode signs for minus, times and divided by are accepted. Decimals are exact (``0.1`` is 1/10). ExpressionError
    for other text, such as powers, names, thousands commas and equal signs, a division by zero, more than 200
    characters, and brackets or signs nested deeper than 32.

    >>> parse_expression("(1 + 2) / 3 × −4")
    Expression(value=Fraction(-4, 1), numbers=(Fraction(1, 1), Fraction(2, 1), Fraction(3, 1), Fraction(4, 1)))
    """
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ExpressionError(f"it has more than {MAX_EXPRESSION_CHARS} characters")
    text, position, tokens = text.translate(_ASCII_OPERATORS).rstrip(), 0, deque[str]()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ExpressionError(f"unexpected {text[position:].lstrip()[0]!r}")
        tokens.append(token[1] or token[2])
        position = token.end()
    tokens.append("")  # the end
    numbers: list[Fraction] = []
    try:
        value = _parse(tokens, numbers)
    except ZeroDivisionError:
        raise ExpressionError("division by zero") from None
    _require(tokens[0] == "", tokens[0])
    return Expression(value, tuple(numbers))


def _parse(tokens: deque[str], numbers: list[Fraction], least: int = 0, depth: int = 0) -> Fraction:
    """Take an operand and what operators of at least this precedence join to it; ``depth``: open brackets and signs."""
    if depth > MAX_DEPTH:
        raise ExpressionError(f"brackets or signs nest over {MAX_DEPTH} deep")
    token = tokens.popleft()
    if token in ("+", "-"):
        value = _parse(tokens, numbers, 2, depth + 1) * (-1 if token == "-" else 1)
    elif token == "(":
        value = _parse(tokens, numbers, 0, depth + 1)
        _require(tokens[0] == ")", tokens.popleft())
    else:
        _require(token not in ("*", "/", ")", ""), token)
        value = Fraction(token)
        numbers.append(value)
    while _PRECEDENCE.get(tokens[0], -1) >= least:
        sign = tokens.popleft()
        value = _OPERATIONS[sign](value, _parse(tokens, numbers, _PRECEDENCE[sign] + 1, depth))
    return value


def _require(fits: bool, token: str) -> None:
    if not fits:
        raise ExpressionError(f"unexpected {token[0]!r}" if token else "it ends too early")
