"""The smallest parts of an answer: numbers, names, brackets, commands with their arguments, matrices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction
from typing import ClassVar

from sota_grpo.rewards.maths_tokens import CONSTANTS, FUNCTIONS, Cursor, Node, Token, Unreadable, number

MAX_DEPTH = 40

CLOSERS = {"(": ")", "[": "]", "\\{": "\\}", "\\langle": "\\rangle", "\\lbrace": "\\rbrace", "\\lbrack": "\\rbrack"}
BARS = {"|": "|", "\\vert": "\\vert", "\\lvert": "\\rvert", "\\|": "\\|", "\\Vert": "\\Vert", "\\lVert": "\\rVert"}
_BRACKETS = {"\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[", "\\rbrack": "]", "\\langle": "(", "\\rangle": ")"}
_ROUNDING = {"\\lfloor": ("floor", "\\rfloor"), "\\lceil": ("ceil", "\\rceil")}
_WRAPPERS = {
    *("\\mathbf", "\\boldsymbol", "\\mathcal", "\\vec", "\\overline", "\\bar", "\\hat", "\\underline", "\\text"),
    *("\\boxed", "\\fbox", "\\tilde", "\\widehat", "\\pmb", "\\bm", "\\overrightarrow"),
}
_MATRICES = ("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array")
_LINES = ("cases", "aligned", "align", "align*", "gathered")
_TWO = Node("num", (), (Fraction(2), 0))
_MINUS_ONE = Node("neg", (Node("num", (), (Fraction(1), 0)),))
_INVERTIBLE = ("sin", "cos", "tan", "cot", "sec", "csc")
_NOT_NAMES = {  # commands that are no variable
    *("\\int", "\\sum", "\\prod", "\\lim", "\\max", "\\min", "\\gcd", "\\lcm", "\\det", "\\mod", "\\pmod", "\\bmod"),
    *("\\mid", "\\to", "\\rightarrow", "\\Rightarrow", "\\subset", "\\subseteq", "\\notin", "\\sim", "\\cong"),
}


class Atoms(Cursor, ABC):
    """The atoms of the grammar, in terms of its levels.

    Attributes:
        depth: atoms in which the parser stands.
        open_bars: absolute values in which it stands.
        operators: commands and signs that cannot begin an atom.
    """

    operators: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, tokens: list[Token]) -> None:
        super().__init__(tokens)
        self.depth, self.open_bars = 0, 0

    @abstractmethod
    def items(self) -> Node:
        """Items between separators."""

    @abstractmethod
    def sum(self) -> Node:
        """A sum."""

    @abstractmethod
    def power(self) -> Node:
        """An atom with what follows it: powers, subscripts, factorials."""

    @abstractmethod
    def exponent(self) -> Node:
        """What stands after a caret."""

    @abstractmethod
    def starts_atom(self) -> bool:
        """Whether the next token begins an atom, which is then multiplied."""

    def atom(self) -> Node:
        """A number, a name, a bracket or a command with its arguments."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("nested too deep")
        token = self.take()
        node = self._word(token) or self._bracketed(token.text) or self._command(token)
        self.depth -= 1
        return node

    def _word(self, token: Token) -> Node | None:
        if token.kind in ("num", "repeating"):
            return number(token)
        if token.kind == "text":
            return Node("text", (), token.text)
        if token.kind == "begin":
            return self._matrix(token.text)
        if token.text in CONSTANTS:
            return CONSTANTS[token.text]
        return Node("var", (), token.text) if token.kind == "letter" else None

    def _bracketed(self, opener: str) -> Node | None:
        if opener == "{":
            node = self._inside()
            if self.accept("\\choose"):
                node = Node("binom", (node, self._inside()))
            self.expect("}")
            return node
        if opener in BARS:
            self.open_bars += 1
            node = self.sum()
            self.open_bars -= 1
            self.expect(BARS[opener])
            return Node("abs", (node,))
        if opener in _ROUNDING:
            node = self.sum()
            self.expect(_ROUNDING[opener][1])
            return Node(_ROUNDING[opener][0], (node,))
        if opener not in CLOSERS:
            return None
        inside = self._inside()
        members = inside.parts if inside.kind == "list" else (inside,)
        brackets = _BRACKETS.get(opener, opener) + _BRACKETS.get(closer := self.take().text, closer)
        if brackets == "\\{\\}":
            return Node("set", members)
        if brackets not in ("()", "[]", "(]", "[)") or not members:
            raise Unreadable(f"{brackets!r} is no pair of brackets")
        return inside if len(members) == 1 and brackets in ("()", "[]") else Node("seq", members, brackets)

    def _inside(self) -> Node:
        """Items in brackets, where a bar opens a new absolute value."""
        bars, self.open_bars = self.open_bars, 0
        node = self.items()
        self.open_bars = bars
        return node

    def _argument(self) -> Node:
        """The argument of a command: a group, or the next digit, letter or command."""
        self.split_number()
        return self.atom()

    def _command(self, token: Token) -> Node:
        name = token.text
        if name in FUNCTIONS:
            return self._function(FUNCTIONS[name])
        if name in ("\\frac", "\\binom"):
            upper = self._argument()
            return Node("div" if name == "\\frac" else "binom", (upper, self._argument()))
        if name == "\\sqrt":
            return self._root()
        if name in ("\\mathbb", "\\Bbb", "\\R"):
            letter = Node("var", (), "R") if name == "\\R" else self._argument()
            return Node("reals") if letter.data in ("R", "r") else Node("var", (), f"{name} {letter.data}")
        if name in _WRAPPERS:
            return self._argument()
        if name in ("\\emptyset", "\\varnothing"):
            return Node("set")
        if token.kind != "cmd" or name in self.operators or name in _NOT_NAMES or not name[1:].isalpha():
            raise Unreadable(f"{name!r} is not expected")
        return Node("var", (), name)

    def _root(self) -> Node:
        degree = _TWO
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        return Node("root", (self._argument(), degree))

    def _function(self, name: str) -> Node:
        """A function with its power and base, and as argument what stands in brackets or the factors that follow."""
        power: Node | None = None
        base: tuple[Node, ...] = ()
        while sign := self.accept("^", "_"):
            if sign == "^":
                power = self.exponent()
            else:
                base = (self._argument(),)
        if self.peek() in ("(", "[", "{") or self.peek() in BARS:
            argument = self.atom()
        else:
            factors = [self.power()]
            while self.starts_atom() and self.peek() not in FUNCTIONS:
                factors.append(self.power())
            argument = product_of(factors)
        inverse = power == _MINUS_ONE and name in _INVERTIBLE
        node = Node("fn", (argument, *base), f"a{name}" if inverse else name)
        return Node("pow", (node, power)) if power is not None and not inverse else node

    def _matrix(self, environment: str) -> Node:
        if environment not in _MATRICES and environment not in _LINES:
            raise Unreadable(f"{environment} is not known")
        rows: list[Node] = []
        cells: list[Node] = []
        while self.kind() != "end":
            cell = self.items()
            if cell.kind != "list" or cell.parts:
                cells.append(cell)
            if self.accept("\\\\") and cells:
                rows.append(Node("row", tuple(cells)))
                cells = []
            elif not self.accept("&") and self.kind() != "end":
                raise Unreadable("a matrix is not closed")
        self.take()
        rows += [Node("row", tuple(cells))] if cells else []
        if environment in _LINES:
            return Node("list", tuple(cell for row in rows for cell in row.parts), "and")
        return Node("matrix", tuple(rows))


def product_of(factors: list[Node]) -> Node:
    """A product, or its only factor."""
    return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))
