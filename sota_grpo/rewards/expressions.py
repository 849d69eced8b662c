"""Parse arithmetic expressions that a model wrote and compute their exact value, without Python's ``eval``.

Model text is untrusted: a text beyond the bounds below is rejected. There is no power operator, so values have few
digits and are computed fast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 32  # of nested brackets and signs

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|([-+*/()]))", re.ASCII)
_ASCII_OPERATORS = str.maketrans("×∗⋅·÷∕−–", "****//--")
_END = ""


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
    text, position, tokens = text.translate(_ASCII_OPERATORS).rstrip(), 0, list[str]()
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ExpressionError(f"unexpected {text[position:].lstrip()[0]!r}")
        tokens.append(token[1] or token[2])
        position = token.end()
    parser = _Parser(tokens)
    value = parser.sum(0)
    if parser.next != _END:
        raise parser.unexpected()
    return Expression(value, tuple(parser.numbers))


class _Parser:
    """Recursive descent parser with one method per level of precedence; ``depth``: open brackets and signs."""

    def __init__(self, tokens: list[str]):
        self.numbers: list[Fraction] = []
        self._rest = iter(tokens)
        self.next = next(self._rest, _END)

    def unexpected(self) -> ExpressionError:
        return ExpressionError(f"unexpected {self.next[0]!r}" if self.next else "it ends too early")

    def sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while self.next in ("+", "-"):
            value = value + self._product(depth) if self._take() == "+" else value - self._product(depth)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while self.next in ("*", "/"):
            if self._take() == "*":
                value *= self._factor(depth)
            elif divisor := self._factor(depth):
                value /= divisor
            else:
                raise ExpressionError("division by zero")
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"brackets or signs nest over {MAX_DEPTH} deep")
        if self.next in ("+", "-"):
            return self._factor(depth + 1) if self._take() == "+" else -self._factor(depth + 1)
        if self.next == "(":
            self._take()
            value = self.sum(depth + 1)
            if self.next != ")":
                raise self.unexpected()
            self._take()
            return value
        if self.next in ("*", "/", ")", _END):
            raise self.unexpected()
        self.numbers.append(Fraction(self._take()))
        return self.numbers[-1]

    def _take(self) -> str:
        taken, self.next = self.next, next(self._rest, _END)
        return taken
