"""Parse answers to mathematics problems, in LaTeX or plain text, to trees of nodes.

Recursive descent over at most ``MAX_TOKENS`` tokens, nested at most ``MAX_DEPTH`` deep, without backtracking: time is
linear and nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

MAX_TOKENS, MAX_DEPTH = 400, 40


class Incomparable(Exception):
    """An answer cannot be parsed, or answers cannot be compared within the bounds on size and computing time."""


class Node(NamedTuple):
    """A node of an answer's tree: its kind, its child nodes and its data.

    Kinds, with their data in parentheses: num (value, number of decimals), var (name), const (pi, e, i, inf), add, neg,
    mul, div, pow, fn (name), fact, abs, floor, ceil, pct, deg, list (separator), set, seq (brackets), sets (signs
    between the parts), reals, rel (signs), matrix, row, base (the base), text (words). A matrix's children are rows.
    """

    kind: str
    children: tuple[Node, ...] = ()
    data: Any = None


CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
FUNCTIONS = (*CIRCULAR, *(f"a{name}" for name in CIRCULAR), "sinh", "cosh", "tanh", "log", "ln", "exp")
INFINITY, IMAGINARY = Node("const", (), "inf"), Node("const", (), "i")
_CONSTANTS = {"\\pi": Node("const", (), "pi"), "e": Node("const", (), "e"), "\\infty": INFINITY, "i": IMAGINARY}
_PLAIN_COMMANDS = ("pi", "sqrt", "infty", "alpha", "beta", "gamma", "theta", "lambda", "phi", "omega")
_SPELLINGS = r"""<= \le \leq \leqslant; >= \ge \geq \geqslant; != \ne \neq; = == \equiv; ~ \approx; < \lt; > \gt;
^ **; % \%; * \cdot \times; / \div; | \vert \lvert \rvert \|; \{ \lbrace; \} \rbrace; ( \langle; ) \rangle;
\emptyset \varnothing"""
_SYNONYMS = {alias: word for word, *aliases in map(str.split, _SPELLINGS.split(";")) for alias in aliases}
_BRACKETS = {"(": ")", "[": "]", "{": "}", "\\{": "\\}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_BRACKETED = {"||": "abs", "\\lfloor\\rfloor": "floor", "\\lceil\\rceil": "ceil"}
_RELATIONS, _SETS = ("=", "~", "<", ">", "<=", ">=", "!=", "\\in"), ("\\cup", "\\cap", "\\setminus")
_CHAINS = ((_RELATIONS, "rel"), ((":",), "ratio"), (_SETS, "sets"))  # loosest binding first, with the kind of node
_POSTFIX = {"!": "fact", "%": "pct", "\\degree": "deg"}
_SEPARATORS = (",", ";", "and", "or")
_OPERATORS = {*_BRACKETS, *_BRACKETS.values(), *_POSTFIX, *_SEPARATORS, *_RELATIONS, *_SETS, *":+-*/^_'&", "\\\\"}
_LINES = ("cases", "aligned", "align", "align*", "gathered")
_MATRICES = (*_LINES, "matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9}
_ONE, _TWO, _NOTHING = *(Node("num", (), (Fraction(n), 0)) for n in (1, 2)), Node("list", (), ",")
_TOKEN = re.compile(
    r"""(?P<num>\d*\.\d*\\(?:overline|bar|dot)\s?(?:\{\d{1,30}\}|\d)|(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d{1,3}(?![\w.]))?)
    |\\begin\s?\{(?P<begin>[A-Za-z]{1,20}\*?)\}(?:\s?\{[clr|\s]{0,40}\})?
    |(?P<end>\\end\s?\{[A-Za-z]{1,20}\*?\})|\\text\s?\{(?P<text>[^{}]*)\}|(?P<cmd>\\(?:[A-Za-z]+|.))
    |(?P<word>[A-Za-z]+)|(?P<op>\*\*|<=|>=|!=|==|[-+*/^_=<>(){}\[\]|,;:!%'&])|(?P<space>\s+)|(?P<other>.)""",
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def _tokens(kind: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield (kind, text), kind: num, var, fn, cmd, op, text, begin or end; an unknown word is a var per letter."""
    words = text.strip(" ,.;:()").lower() if kind == "text" else text.lower() if kind == "word" else ""
    text = _SYNONYMS.get(text, text)
    name = words or text[1:].replace("arc", "a")
    if words in ("and", "or"):
        yield "op", words
    elif kind in ("word", "text", "cmd") and name in FUNCTIONS:
        yield "fn", name
    elif words in _PLAIN_COMMANDS:
        yield "cmd", f"\\{words}"
    elif kind == "word" or (kind == "text" and len(words) == 1):
        yield from (("var", letter) for letter in text if letter.isalpha())
    elif kind != "space" and (words or kind != "text"):
        yield "op" if text in _OPERATORS else kind, "".join(words.split()) or text


def _number(text: str) -> Node:
    """Return a number as a node with its exact value and the number of decimals it is written with."""
    written, _, period = text.partition("\\")
    decimals = len(written.lower().partition("e")[0].partition(".")[2])
    if not period:
        return Node("num", (), (Fraction(written), decimals))
    digits = "".join(filter(str.isdigit, period))  # 0.1\overline{6}
    repeated = Fraction(int(digits), (10 ** len(digits) - 1) * 10**decimals)
    return Node("num", (), (Fraction(f"{written}0") + repeated, 0))


def parse_answer(text: str) -> Node:
    """Parse a result of :func:`sota_grpo.rewards.maths.tidy` to a tree; raise Incomparable if that fails.

    >>> parse_answer("\\\\frac12").kind, parse_answer("(1, 2]").data, parse_answer("1, 2").kind
    ('div', '(]', 'list')
    """
    matches = ((str(match.lastgroup), match) for match in _TOKEN.finditer(text))
    tokens = [token for kind, match in matches for token in _tokens(kind, match[kind])]
    parser = _Parser(tokens)
    tree = parser.items() if len(tokens) <= MAX_TOKENS else _NOTHING
    level = [tree]
    for _ in range(2 * MAX_DEPTH):
        level = [child for node in level for child in node.children]
    if parser.kind or tree == _NOTHING or level:
        raise Incomparable(f"the answer is empty, too long or nested too deep, or {parser.text!r} is not expected")
    return tree


class _Parser:
    """Parser with one method per level of the grammar; ``kind`` and ``text`` are the next token (empty at the end)."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self.kind, self.text = iter(tokens), "", ""
        self._depth, self._open_bars = 0, False  # nesting at the next token; whether ``|`` closes the innermost bracket
        self.take()

    def take(self) -> str:
        text = self.text
        self.kind, self.text = next(self._tokens, ("", ""))
        return text

    def accept(self, *texts: str) -> str:
        return self.take() if self.text in texts else ""

    def items(self) -> Node:
        """Parse items between separators up to a closing bracket or the end; return a list node or the only item."""
        members: list[Node] = []
        separator = ","
        while self._starts_atom() or self.text in ("+", "-"):
            members.append(self._chain(0))
            while mark := self.accept(*_SEPARATORS):
                separator = mark if mark == "or" else separator
        return _joined("list", members, separator)

    def _chain(self, level: int) -> Node:
        if level == len(_CHAINS):
            return self._sum()
        signs, kind = _CHAINS[level]
        operands, between = [self._chain(level + 1)], []
        while sign := self.accept(*signs):
            between.append(sign)
            operands.append(self._chain(level + 1))
        if kind == "ratio" and between:  # 3:4:5 has an order
            return Node("div", tuple(operands)) if len(operands) == 2 else Node("seq", tuple(operands), "()")
        return Node(kind, tuple(operands), tuple(between)) if between else operands[0]

    def _sum(self) -> Node:
        terms: list[Node] = []
        while (sign := self.accept("+", "-")) or not terms:
            term = self._product()
            terms.append(Node("neg", (term,)) if sign == "-" else term)
        return _joined("add", terms)

    def _product(self) -> Node:
        factors = [self._power()]
        while True:
            if self.accept("*"):
                factors.append(self._signed(self._power))
            elif self.accept("/"):
                factors = [Node("div", (_joined("mul", factors), self._signed(self._power)))]
            elif self._starts_atom():
                factors.append(self._power())
            else:
                return _joined("mul", factors)

    def _signed(self, read: Callable[[], Node]) -> Node:
        return Node("neg", (read(),)) if self.accept("-") else read()

    def _starts_atom(self) -> bool:
        """Return whether the next token begins an atom; inside an absolute value ``|`` ends it instead."""
        if self.kind == "op":
            return self.text in _BRACKETS and not (self.text == "|" and self._open_bars)
        return self.kind not in ("", "end")

    def _power(self) -> Node:
        """Parse an atom with its powers, subscripts, primes, factorials, percent and degree signs."""
        base = self._atom()
        while sign := self.accept("^", "_", "'", *_POSTFIX):
            if sign == "^":
                base = Node("pow", (base, self._signed(self._atom)))
            elif sign == "_":
                base = self._with_subscript(base)
            elif sign in _POSTFIX:
                base = Node(_POSTFIX[sign], (base,))
        return base

    def _with_subscript(self, base: Node) -> Node:
        """Parse the subscript of a number (its base) or of a variable (its index): braces or one token."""
        text = self.take()
        while text[:1] == "{" and text[-1] != "}" and self.kind:
            text += self.take()
        text = text.strip("{}")
        if base.kind == "num" and (text in _BASES or (text.isdecimal() and len(text) <= 2)):
            return Node("base", (base,), _BASES.get(text) or int(text))
        if base.kind not in ("var", "const"):
            raise Incomparable("a subscript is in an unexpected position")
        return Node("var", (), f"{base.data}_{text}")

    def _atom(self) -> Node:
        """Parse a number, a name, a bracket or a command with its arguments."""
        self._depth += 1
        read = {
            "num": _number,
            "op": self._bracketed,
            "cmd": self._command,
            "fn": self._function,
            "begin": self._matrix,
        }
        kind, text = self.kind, self.take()
        if self._depth > MAX_DEPTH or kind not in ("var", "text", *read):
            raise Incomparable(f"the answer is nested too deep, or {text!r} is not expected")
        node = _CONSTANTS.get(text) or (read[kind](text) if kind in read else Node(kind, (), text))
        self._depth -= 1
        return node

    def _bracketed(self, opener: str) -> Node:
        bars, self._open_bars = self._open_bars, opener == "|"
        inside = self.items()
        self._open_bars = bars
        members = inside.children if inside.kind == "list" else (inside,)
        brackets = opener + self.take()
        if brackets == "\\{\\}":
            return Node("set", members)
        if brackets in _BRACKETED:
            return Node(_BRACKETED[brackets], (inside,))
        if brackets == "{}" or (brackets in ("()", "[]") and len(members) == 1):
            return inside
        if brackets not in ("()", "[]", "(]", "[)") or not members:
            raise Incomparable(f"{brackets!r} is no pair of brackets, or is empty")
        return Node("seq", members, "()" if len(members) > 2 else brackets)  # [1,2,3] is a point, too

    def _argument(self) -> Node:
        """Parse an argument of a command: a group, or the next digit, letter or command; ``\\\\frac12`` is one half."""
        if self.kind != "num" or not self.text.isdigit() or len(self.text) == 1:
            return self._atom()
        digit, self.text = self.text[0], self.text[1:]
        return _number(digit)

    def _command(self, name: str) -> Node:
        if name in ("\\frac", "\\binom"):
            upper, lower = self._argument(), self._argument()
            rest = Node("fact", (Node("add", (upper, Node("neg", (lower,)))),))
            below = Node("mul", (Node("fact", (lower,)), rest))
            return Node("div", (upper, lower) if name == "\\frac" else (Node("fact", (upper,)), below))
        if name == "\\sqrt":
            degree = self._atom() if self.text == "[" else _TWO
            return Node("pow", (self._argument(), Node("div", (_ONE, degree))))
        if not name[1:].isalpha():
            raise Incomparable(f"{name!r} is not expected")
        return {"\\R": Node("reals"), "\\emptyset": Node("set")}.get(name) or Node("var", (), name)

    def _function(self, name: str) -> Node:
        """Parse a function: its power and base, and as argument a bracket or the factors that follow."""
        after: dict[str, tuple[Node, ...]] = {"^": (), "_": ()}
        while sign := self.accept("^", "_"):
            if after[sign]:
                raise Incomparable(f"{name} has two powers, or two bases")
            after[sign] = (self._signed(self._atom) if sign == "^" else self._argument(),)
        factors = [self._atom() if self.text in _BRACKETS else self._power()]
        while self.text not in _BRACKETS and self._starts_atom() and self.kind != "fn":
            factors.append(self._power())
        node = Node("fn", (_joined("mul", factors), *after["_"]), name)
        return Node("pow", (node, *after["^"])) if after["^"] else node

    def _matrix(self, environment: str) -> Node:
        rows: list[list[Node]] = [[]]
        while (cell := self.items()) != _NOTHING or self.text in ("&", "\\\\"):
            rows[-1] += [cell] if cell != _NOTHING else []
            if self.accept("\\\\"):
                rows.append([])
            elif not self.accept("&"):
                break
        if self.kind != "end" or environment not in _MATRICES:
            raise Incomparable(f"the LaTeX environment {environment!r} is unknown, or its content cannot be parsed")
        self.take()
        cells = tuple(cell for row in rows for cell in row)
        if environment in _LINES or (len(cells) == 1 and environment == "array"):
            return _joined("list", cells, ",")
        return Node("matrix", tuple(Node("row", tuple(row)) for row in rows if row))


def _joined(kind: str, children: Sequence[Node], data: Any = None) -> Node:
    """Return a node of these parts, or the only part itself."""
    return children[0] if len(children) == 1 else Node(kind, tuple(children), data)


def variables(node: Node) -> frozenset[str]:
    """Return the names on which the value of a tree depends: ``var x`` for the variable x, ``text cm`` for words."""
    return frozenset(f"{child.kind} {child.data}" for child in walk(node) if child.kind in ("var", "text"))


def walk(node: Node) -> Iterator[Node]:
    """Yield all nodes of a tree, each before its children."""
    yield node
    for child in node.children:
        yield from walk(child)
