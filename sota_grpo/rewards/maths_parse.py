"""A small grammar of the answers to mathematics problems: LaTeX or plain text in, a tree of nodes out.

Recursive descent over a bounded number of tokens, nested at most ``MAX_DEPTH`` deep, without backtracking: time is
linear and nothing is evaluated. What the grammar does not know raises
:class:`~sota_grpo.rewards.maths_tokens.Unreadable`.
"""

from __future__ import annotations

from sota_grpo.rewards.maths_atoms import BARS, CLOSERS, MAX_DEPTH, Atoms, product_of
from sota_grpo.rewards.maths_tokens import Node, Unreadable, tokens_of

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
_NOTHING = Node("list", (), ",")
_BASES = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10}
_SEPARATORS = (",", ";", "and", "or")


def parse_answer(text: str, *, thousands: bool = True) -> Node:
    """The tree of a tidy answer (:func:`sota_grpo.rewards.maths_text.tidy`).

    Args:
        thousands: see :func:`sota_grpo.rewards.maths_tokens.tokens_of`.

    Raises:
        Unreadable: the grammar does not know it, or it is too long or nested too deep.

    >>> parse_answer("\\\\frac12").kind, parse_answer("(1, 2]").data, parse_answer("1, 2").kind
    ('div', '(]', 'list')
    """
    parser = _Parser(tokens_of(text, thousands=thousands))
    tree = parser.items()
    if not parser.at_end() or tree == _NOTHING:
        raise Unreadable(f"{parser.peek()!r} is not expected")
    return _not_too_deep(tree)


def _not_too_deep(tree: Node) -> Node:
    level, depth = [tree], 0
    while level:
        level, depth = [part for node in level for part in node.parts], depth + 1
        if depth > 2 * MAX_DEPTH:
            raise Unreadable("nested too deep")
    return tree


class _Parser(Atoms):
    """One method per level of the grammar; each consumes its tokens and returns their node."""

    operators = frozenset(
        (
            *(*_ENDS, *_RELATIONS, *_TIMES, *_OVER, *_SETS, *_POSTFIX),
            *("\\pm", "\\mp", "\\colon", "\\rfloor", "\\rceil", "\\rvert", "\\rVert"),
        )
    )

    def items(self) -> Node:
        """Items between separators, up to a closing bracket or the end; a single item stands for itself."""
        found: list[Node] = []
        separators: set[str] = set()
        while not self.at_end() and self.peek() not in _ENDS and self.kind() != "end":
            found.append(self._relation())
            separator = self.accept(*_SEPARATORS)
            if not separator:
                break
            while separator:
                separators.add(separator)
                separator = self.accept(*_SEPARATORS)
        if len(found) == 1:
            return found[0]
        return Node("list", tuple(found), "or" if "or" in separators else "and" if "and" in separators else ",")

    def _relation(self) -> Node:
        parts, signs = [self._ratio()], []
        while (sign := self.accept(*_RELATIONS)) != "":
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
        while (sign := self.accept(*_SETS)) != "":
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
            after_number = self.before().kind == "num"
            if self.accept(*_TIMES):
                factors.append(self._signed())
            elif self.accept(*_OVER):
                factors = [Node("div", (product_of(factors), self._signed()))]
            elif not self.starts_atom():
                return product_of(factors)
            elif after_number and self.peek() == "\\frac":
                factors.append(_mixed(factors.pop(), self.power()))
            else:
                factors.append(self.power())

    def _signed(self) -> Node:
        negative = False
        while (sign := self.accept("+", "-")) != "":
            negative ^= sign == "-"
        return Node("neg", (self.power(),)) if negative else self.power()

    def starts_atom(self) -> bool:
        """Whether the next token begins an atom; inside an absolute value a bar ends it."""
        kind, text = self.kind(), self.peek()
        if text in BARS:
            return not self.open_bars or text not in BARS.values()
        if kind == "op":
            return text in ("(", "[", "{")
        return kind not in ("", "sep", "end") and text not in self.operators

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
        parts: list[Node] = []
        while not parts or self.accept("^", "**"):
            negative = bool(self.accept("-"))
            parts.append(Node("neg", (self.atom(),)) if negative else self.atom())
        exponent = parts.pop()
        while parts:  # a tower binds to the right
            below = parts.pop()
            inner = Node("pow", (below.parts[0] if below.kind == "neg" else below, exponent))
            exponent = Node("neg", (inner,)) if below.kind == "neg" else inner
        return exponent

    def _subscript(self) -> str:
        """The text of a subscript: what stands in the braces, or one token."""
        if not self.accept("{"):
            return self.take().text
        parts: list[str] = []
        while not self.accept("}"):
            parts.append(self.take().text)
        return "".join(parts)


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
