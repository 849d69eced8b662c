"""A small grammar of the answers to mathematics problems: LaTeX or plain text in, a tree of nodes out.

Recursive descent over a bounded number of tokens, nested at most ``MAX_DEPTH`` deep, without backtracking: time is
linear and nothing is evaluated. What the grammar does not know raises :class:`Unreadable`.
"""

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


CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_PLAIN_FUNCTIONS = (*CIRCULAR, *(f"a{name}" for name in CIRCULAR), "sinh", "cosh", "tanh", "log", "ln", "exp")
FUNCTIONS = {
    **{f"\\{name}": name for name in _PLAIN_FUNCTIONS},
    **{f"\\arc{name}": f"a{name}" for name in CIRCULAR},
    "\\lg": "log",
}
INFINITY, IMAGINARY = Node("const", (), "inf"), Node("const", (), "i")
CONSTANTS = {
    **{"\\pi": Node("const", (), "pi"), "e": Node("const", (), "e"), "\\infty": INFINITY},
    **{"i": IMAGINARY, "\\imath": IMAGINARY},
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
    tokens: list[Token] = []
    at, depth = 0, 0
    while at < len(text):
        match = (_OUTSIDE if thousands and depth <= 0 else _INSIDE).match(text, at)
        assert match is not None  # its last form is any character
        tokens.extend(_tokens_of_match(match, tokens, text))
        depth += (match[0] in _OPENS) - (match[0] in _CLOSES)
        at = match.end()
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("it is too long")
    return tokens


def _tokens_of_match(match: re.Match[str], before: list[Token], text: str) -> Iterator[Token]:
    kind = match.lastgroup  # the outer one of two
    if kind == "other":
        raise Unreadable(f"{match[0]!r} is not known")
    if kind == "word":
        yield from _word(match[0], before, text[match.end() : match.end() + 2])
    elif kind == "text":
        yield from _text(match["body"])
    elif kind == "begin":
        yield Token("begin", match["env"])
    elif kind != "space":
        yield Token(str(kind), match[0])


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


def _number(token: Token) -> Node:
    """A number token as a node: its exact value, and how many decimals it is written with."""
    if token.kind == "repeating":
        match = _INSIDE.match(token.text)
        assert match is not None
        period = match["period"] or match["digit"]
        fixed = Fraction(f"{match['whole'] or 0}.{match['fixed'] or 0}")
        return Node("num", (), (fixed + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(match["fixed"])), 0))
    plain = token.text.replace(",", "")
    decimals = plain.lower().partition("e")[0].partition(".")[2]
    return Node("num", (), (Fraction(plain), len(decimals)))


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
_NOT_NAMES = {  # commands that are no variable
    *("\\int", "\\sum", "\\prod", "\\lim", "\\max", "\\min", "\\gcd", "\\lcm", "\\det", "\\mod", "\\pmod", "\\bmod"),
    *("\\mid", "\\to", "\\rightarrow", "\\Rightarrow", "\\subset", "\\subseteq", "\\notin", "\\sim", "\\cong"),
}
_ENDS = (*CLOSERS.values(), "}", "&", "\\\\", "\\choose")
_RELATIONS = {
    **{"=": "=", "==": "=", "\\equiv": "=", "\\approx": "~", "\\in": "in"},
    **{"<": "<", "\\lt": "<", ">": ">", "\\gt": ">", "!=": "!=", "\\ne": "!=", "\\neq": "!="},
    **dict.fromkeys(("<=", "\\le", "\\leq", "\\leqslant", "\\leqq"), "<="),
    **dict.fromkeys((">=", "\\ge", "\\geq", "\\geqslant", "\\geqq"), ">="),
}
_TIMES, _OVER = ("*", "\\cdot", "\\times", "\\ast"), ("/", "\\div")
_SETS = {"\\cup": "union", "\\cap": "inter", "\\setminus": "minus", "\\backslash": "minus"}
_POSTFIX = {"!": "fact", "\\%": "pct", "%": "pct", "\\degree": "deg"}
_NOTHING, _NO_TOKEN = Node("list", (), ","), Token("", "")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_SEPARATORS = (",", ";", "and", "or")
_OPERATORS = {  # what cannot begin an atom
    *(*_ENDS, *_RELATIONS, *_TIMES, *_OVER, *_SETS, *_POSTFIX),
    *("\\pm", "\\mp", "\\colon", "\\rfloor", "\\rceil", "\\rvert", "\\rVert"),
}


def parse_answer(text: str, *, thousands: bool = True) -> Node:
    """The tree of a tidy answer (:func:`sota_grpo.rewards.maths.tidy`).

    Args:
        thousands: see :func:`sota_grpo.rewards.maths.parse.tokens_of`.

    Raises:
        Unreadable: the grammar does not know it, or it is too long or nested too deep.

    >>> parse_answer("\\\\frac12").kind, parse_answer("(1, 2]").data, parse_answer("1, 2").kind
    ('div', '(]', 'list')
    >>> parse_answer("1,250.50").data, parse_answer("0.1\\\\overline{6}").data
    ((Fraction(2501, 2), 2), (Fraction(1, 6), 0))
    """
    parser = _Parser(tokens_of(text, thousands=thousands))
    tree = parser.items()
    if parser.kind() or tree == _NOTHING:
        raise Unreadable(f"{parser.peek()!r} is not expected")
    level = [tree]
    for _ in range(2 * MAX_DEPTH):
        level = [part for node in level for part in node.parts]
    if level:
        raise Unreadable("nested too deep")
    return tree


class _Parser:
    """One method per level of the grammar; each consumes its tokens and returns their node."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens, self._at = [*tokens, _NO_TOKEN], 0
        self.depth, self.open_bars = 0, 0  # atoms, and absolute values, in which it stands

    def kind(self) -> str:
        """That of the next token; of none at the end."""
        return self._tokens[self._at].kind

    def peek(self) -> str:
        """The next token as the grammar sees it; words in a text are never an operator."""
        return "" if self.kind() == "text" else self._tokens[self._at].text

    def take(self) -> Token:
        if not self.kind():
            raise Unreadable("it ends too early")
        self._at += 1
        return self._tokens[self._at - 1]

    def accept(self, *texts: str) -> str:
        return self.take().text if self.peek() in texts else ""

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise Unreadable(f"{text!r} is missing")

    def items(self) -> Node:
        """Items between separators, up to a closing bracket or the end; a single item stands for itself."""
        members: list[Node] = []
        separators: set[str] = set()
        while self.kind() not in ("", "end") and self.peek() not in _ENDS:
            members.append(self._relation())
            if self.peek() not in _SEPARATORS:
                break
            while separator := self.accept(*_SEPARATORS):
                separators.add(separator)
        if len(members) == 1:
            return members[0]
        return Node("list", tuple(members), next((word for word in ("or", "and") if word in separators), ","))

    def _relation(self) -> Node:
        parts, signs = [self._ratio()], []
        while sign := self.accept(*_RELATIONS):
            signs.append(_RELATIONS[sign])
            parts.append(self._ratio())
        return Node("rel", tuple(parts), tuple(signs)) if signs else parts[0]

    def _ratio(self) -> Node:
        parts = [self._sets()]
        while self.accept(":", "\\colon"):
            parts.append(self._sets())
        return Node("ratio", tuple(parts)) if len(parts) > 1 else parts[0]

    def _sets(self) -> Node:
        left = self.sum()
        while sign := self.accept(*_SETS):
            left = Node(_SETS[sign], (left, self.sum()))
        return left

    def sum(self) -> Node:
        """Terms with their signs."""
        terms: list[Node] = []
        while True:
            sign = self.accept("+", "-", "\\pm", "\\mp")
            if terms and not sign:
                return terms[0] if len(terms) == 1 else Node("add", tuple(terms))
            term = self._product()
            if sign in ("\\pm", "\\mp"):
                term = Node("pm", (term,), 1 if sign == "\\pm" else -1)
            terms.append(Node("neg", (term,)) if sign == "-" else term)

    def _product(self) -> Node:
        factors = [self.power()]
        while True:
            after_number = self._tokens[self._at - 1].kind == "num"
            if self.accept(*_TIMES):
                factors.append(self._signed())
            elif self.accept(*_OVER):
                factors = [Node("div", (_product_of(factors), self._signed()))]
            elif not self.starts_atom():
                return _product_of(factors)
            elif after_number and self.peek() == "\\frac":
                factors.append(_mixed(factors.pop(), self.power()))
            else:
                factors.append(self.power())

    def _signed(self) -> Node:
        negative = False
        while sign := self.accept("+", "-"):
            negative ^= sign == "-"
        return Node("neg", (self.power(),)) if negative else self.power()

    def starts_atom(self) -> bool:
        """Whether the next token begins an atom; inside an absolute value a bar ends it."""
        kind, text = self.kind(), self.peek()
        if text in BARS:
            return not self.open_bars or text not in BARS.values()
        if kind == "op":
            return text in ("(", "[", "{")
        return kind not in ("", "sep", "end") and text not in _OPERATORS

    def power(self) -> Node:
        """An atom with its powers, subscripts, primes, factorials, percent and degree signs."""
        base = self.atom()
        while True:
            if self.accept("^", "**"):
                base = Node("pow", (base, self.exponent()))
            elif self.accept("_"):
                base = _with_subscript(base, self._subscript())
            elif self.accept("'"):
                base = Node("var", (), f"{base.data}'") if base.kind == "var" else base
            elif self.peek() in _POSTFIX:
                base = Node(_POSTFIX[self.take().text], (base,))
            else:
                return base

    def exponent(self) -> Node:
        """What stands after a caret: an atom, or a tower of them."""
        negative = bool(self.accept("-"))
        node = self.atom()
        if self.accept("^", "**"):  # a tower binds to the right
            node = Node("pow", (node, self.exponent()))
        return Node("neg", (node,)) if negative else node

    def _subscript(self) -> str:
        """The text of a subscript: what stands in the braces, or one token."""
        if not self.accept("{"):
            return self.take().text
        text = ""
        while not self.accept("}"):
            text += self.take().text
        return text

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
            return _number(token)
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
        """The argument of a command: a group, or the next digit, letter or command; ``\\\\frac12`` is one half."""
        text = self.peek()
        if self.kind() == "num" and len(text) > 1 and text.isdigit():
            self._tokens[self._at : self._at + 1] = [Token("num", text[0]), Token("num", text[1:])]
        return self.atom()

    def _command(self, token: Token) -> Node:
        name = token.text
        if name in FUNCTIONS:
            return self._function(FUNCTIONS[name])
        if name in ("\\frac", "\\binom"):
            upper = self._argument()
            return Node("div" if name == "\\frac" else "binom", (upper, self._argument()))
        if name == "\\sqrt":
            degree = _TWO
            if self.accept("["):
                degree = self.sum()
                self.expect("]")
            return Node("root", (self._argument(), degree))
        if name in ("\\mathbb", "\\Bbb", "\\R"):
            letter = Node("var", (), "R") if name == "\\R" else self._argument()
            return Node("reals") if letter.data in ("R", "r") else Node("var", (), f"{name} {letter.data}")
        if name in _WRAPPERS:
            return self._argument()
        if name in ("\\emptyset", "\\varnothing"):
            return Node("set")
        if token.kind != "cmd" or name in _OPERATORS or name in _NOT_NAMES or not name[1:].isalpha():
            raise Unreadable(f"{name!r} is not expected")
        return Node("var", (), name)

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
            argument = _product_of(factors)
        inverse = power == _MINUS_ONE and name in CIRCULAR
        node = Node("fn", (argument, *base), f"a{name}" if inverse else name)
        return Node("pow", (node, power)) if power is not None and not inverse else node

    def _matrix(self, environment: str) -> Node:
        if environment not in _MATRICES and environment not in _LINES:
            raise Unreadable(f"{environment} is not known")
        rows: list[list[Node]] = [[]]
        while self.kind() != "end":
            if (cell := self.items()) != _NOTHING:
                rows[-1].append(cell)
            if self.accept("\\\\") and rows[-1]:
                rows.append([])
            elif not self.accept("&") and self.kind() != "end":
                raise Unreadable("a matrix is not closed")
        self.take()
        cells = tuple(cell for row in rows for cell in row)
        if len(cells) == 1 and environment in (*_LINES, "array"):
            return cells[0]
        if environment in _LINES:
            return Node("list", cells, "and")
        return Node("matrix", tuple(Node("row", tuple(row)) for row in rows if row))


def _product_of(factors: list[Node]) -> Node:
    """A product, or its only factor."""
    return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))


def _mixed(whole: Node, fraction: Node) -> Node:
    """``1\\frac{1}{2}`` is a mixed number; ``2\\frac{x}{3}`` is a product."""
    parts = fraction.parts if fraction.kind == "div" else ()
    is_mixed = whole.kind == "num" and whole.data[1] == 0 and len(parts) == 2 and all(p.kind == "num" for p in parts)
    return Node("add" if is_mixed and parts[0].data[0] < parts[1].data[0] else "mul", (whole, fraction))


def _with_subscript(base: Node, subscript: str) -> Node:
    """A numeral in another base, or a variable with an index."""
    if base.kind == "num" and (subscript in _BASES or (subscript.isdecimal() and len(subscript) <= 2)):
        return Node("base", (base,), _BASES.get(subscript) or int(subscript))
    if base.kind not in ("var", "const"):
        raise Unreadable("a subscript stands where none can")
    return Node("var", (), f"{base.data}_{subscript}")


def variables(node: Node) -> frozenset[str]:
    """What the value of a tree depends on, as keys of a point: ``var x`` for the variable x, ``text cm`` for words."""
    return frozenset(f"{part.kind} {part.data}" for part in walk(node) if part.kind in ("var", "text"))


def without_sign(node: Node) -> Node:
    """The tree, or what a minus sign stands before."""
    return node.parts[0] if node.kind == "neg" else node


def walk(node: Node) -> Iterator[Node]:
    """The nodes of a tree."""
    left = [node]
    while left:
        part = left.pop()
        left.extend(part.parts)
        yield part
