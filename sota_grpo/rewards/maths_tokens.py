"""The tokens of an answer and the nodes of its tree."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

MAX_TOKENS = 400


class Unreadable(ValueError):
    """The text is no answer that the grammar knows."""


class Token(NamedTuple):
    """A token; kinds: num, repeating, letter, cmd (with its backslash), op, sep (and, or), text (words), begin, end."""

    kind: str
    text: str


class Node(NamedTuple):
    """One node of an answer's tree.

    Kinds: num (data: value and decimal places), var (name), const (pi, e, i, inf), add, neg, mul, div, pow, root, fn
    (name), fact, binom, abs, floor, ceil, pct, deg, pm (sign), list (separator), set, seq (brackets), union, inter,
    minus, reals, rel (signs between the parts), ratio, matrix (of rows), row, base (digits and base), text (words).
    """

    kind: str
    parts: tuple[Node, ...] = ()
    data: Any = None


FUNCTIONS = {
    **{
        f"\\{name}": name
        for name in (
            *("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh"),
            *("asin", "acos", "atan", "acot", "asec", "acsc", "log", "ln", "exp"),
        )
    },
    **{f"\\arc{name}": f"a{name}" for name in ("sin", "cos", "tan", "cot", "sec", "csc")},
    "\\lg": "log",
}
CONSTANTS = {
    **{"\\pi": Node("const", (), "pi"), "e": Node("const", (), "e"), "i": Node("const", (), "i")},
    **{"\\imath": Node("const", (), "i"), "\\infty": Node("const", (), "inf")},
}
_GREEK = ("alpha", "beta", "gamma", "delta", "epsilon", "theta", "lambda", "mu", "phi", "rho", "sigma", "omega")
_PLAIN_NAMES = {
    **{name[1:]: name for name in (*FUNCTIONS, "\\pi", "\\sqrt", "\\infty", *(f"\\{letter}" for letter in _GREEK))},
    **{"inf": "\\infty", "infinity": "\\infty", "oo": "\\infty"},
}
_PREFIXES = re.compile(r"(sin|cos|tan|log|ln|sqrt)(?=[a-z]\Z)")

_NUMBER = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?![\w.]))?"
_THOUSANDS = r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?"
_REST = r"""
 |(?P<begin>\\begin\s?\{(?P<env>[A-Za-z]{1,20}\*?)\}(?:\s?\{[clr|\s]{0,40}\})?)
 |(?P<end>\\end\s?\{[A-Za-z]{1,20}\*?\})
 |(?P<text>\\text\s?\{(?P<body>[^{}]*)\})
 |(?P<cmd>\\(?:[A-Za-z]+|.))
 |(?P<word>[A-Za-z]+)
 |(?P<op>\*\*|<=|>=|!=|==|[-+*/^_=<>(){}\[\]|,;:!%'&])
 |(?P<space>\s+)
 |(?P<other>.)
"""
_REPEATING = (
    r"(?P<repeating>(?P<whole>\d*)\.(?P<fixed>\d*)\\(?:overline|bar|dot)\s?(?:\{(?P<period>\d{1,30})\}|(?P<digit>\d)))"
)
_OUTSIDE = re.compile(rf"{_REPEATING}|(?P<num>{_THOUSANDS}|{_NUMBER}){_REST}", re.VERBOSE | re.DOTALL | re.ASCII)
_INSIDE = re.compile(rf"{_REPEATING}|(?P<num>{_NUMBER}){_REST}", re.VERBOSE | re.DOTALL | re.ASCII)
_OPENS, _CLOSES = frozenset(("(", "[", "\\{")), frozenset((")", "]", "\\}"))


def tokens_of(text: str, *, thousands: bool = True) -> list[Token]:
    """The tokens of a tidy answer.

    A comma between groups of three digits belongs to the number, unless it stands in brackets: ``1,234`` is a number
    and ``(1,234)`` is a pair.

    Args:
        thousands: False reads every comma as a separator.

    Raises:
        Unreadable: a character that no answer has, or more than ``MAX_TOKENS`` tokens.

    >>> [token.text for token in tokens_of("1,234 \\\\pi r + (1,234)")]
    ['1,234', '\\\\pi', 'r', '+', '(', '1', ',', '234', ')']
    """
    found: list[Token] = []
    at, depth = 0, 0
    while at < len(text):
        match = (_OUTSIDE if thousands and depth <= 0 else _INSIDE).match(text, at)
        if match is None:
            raise Unreadable("a character is not known")
        found.extend(_tokens_of_match(match, found, text))
        depth += (match[0] in _OPENS) - (match[0] in _CLOSES)
        at = match.end()
        if len(found) > MAX_TOKENS:
            raise Unreadable("it is too long")
    return found


def _tokens_of_match(match: re.Match[str], before: list[Token], text: str) -> Iterator[Token]:
    kind = match.lastgroup if match.lastgroup not in ("env", "body", "whole", "fixed", "period", "digit") else None
    kind = kind or next(name for name in ("repeating", "begin", "text") if match[name] is not None)
    if kind == "other":
        raise Unreadable(f"{match[0]!r} is not known")
    if kind == "word":
        yield from _word(match[0], before, text[match.end() : match.end() + 2])
    elif kind == "text":
        yield from _text(match["body"])
    elif kind == "begin":
        yield Token("begin", match["env"])
    elif kind != "space":
        yield Token(kind, match[0])


def _word(word: str, before: list[Token], after: str) -> Iterator[Token]:
    """Letters of plain text: the name of a function or constant, a separator, or one variable per letter."""
    lowered = word.lower()
    if lowered in ("and", "or"):
        yield Token("sep", lowered)
    elif lowered in _PLAIN_NAMES:
        yield Token("cmd", _PLAIN_NAMES[lowered])
    elif lowered == "u" and before and before[-1].text in _CLOSES and after.lstrip()[:1] in ("(", "[", "\\"):
        yield Token("cmd", "\\cup")
    elif prefix := _PREFIXES.match(lowered):
        yield Token("cmd", _PLAIN_NAMES[prefix[1]])
        yield from (Token("letter", letter) for letter in word[prefix.end() :])
    else:
        yield from (Token("letter", letter) for letter in word)


def _text(body: str) -> Iterator[Token]:
    """What stands in ``\\text{...}``: a separator, a number, a letter (with or without brackets), a name, or words."""
    words = body.strip(" ,.;:").lower()
    letter = body.strip(" .()")
    if words in ("and", "or"):
        yield Token("sep", words)
    elif any(char.isdigit() for char in body):
        yield from tokens_of(body)
    elif len(letter) == 1 and letter.isalpha():
        yield Token("letter", letter)
    elif words in _PLAIN_NAMES:
        yield Token("cmd", _PLAIN_NAMES[words])
    elif words:
        yield Token("text", "".join(words.split()))


def number(token: Token) -> Node:
    """A number token as a node: its exact value, and how many decimals it is written with.

    >>> number(Token("num", "1,250.50")).data, number(Token("repeating", "0.1\\\\overline{6}")).data
    ((Fraction(2501, 2), 2), (Fraction(1, 6), 0))
    """
    if token.kind == "repeating":
        match = _INSIDE.match(token.text)
        assert match is not None
        period = match["period"] or match["digit"]
        fixed = Fraction(f"{match['whole'] or 0}.{match['fixed'] or 0}")
        return Node("num", (), (fixed + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(match["fixed"])), 0))
    plain = token.text.replace(",", "")
    decimals = plain.lower().partition("e")[0].partition(".")[2]
    return Node("num", (), (Fraction(plain), len(decimals)))


class Cursor:
    """A place in a list of tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._at = tokens, 0

    def at_end(self) -> bool:
        return self._at >= len(self._tokens)

    def peek(self) -> str:
        """The next token as the grammar sees it; words in a text are never an operator."""
        if self.at_end() or self._tokens[self._at].kind == "text":
            return ""
        return self._tokens[self._at].text

    def kind(self) -> str:
        return "" if self.at_end() else self._tokens[self._at].kind

    def take(self) -> Token:
        if self.at_end():
            raise Unreadable("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def accept(self, *texts: str) -> str:
        return self.take().text if self.peek() in texts and not self.at_end() else ""

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"{text!r} is missing")

    def before(self) -> Token:
        """The token that was taken last."""
        return self._tokens[self._at - 1]

    def split_number(self) -> None:
        """Cut the first digit off a number that comes next: ``\\\\frac12`` is one half."""
        text = self.peek()
        if self.kind() == "num" and len(text) > 1 and text.isdigit():
            self._tokens[self._at : self._at + 1] = [Token("num", text[0]), Token("num", text[1:])]
