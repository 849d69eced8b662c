"""The values of expressions and whether two of them are equal.

Two expressions are equal when they agree at pseudo-random points (Schwartz 1980, Zippel 1979): at rational points
polynomials and rational functions are compared exactly, the rest to 40 digits. Only trees of
:class:`~sota_grpo.rewards.maths_tokens.Node` are evaluated, and each step is paid for from one budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from sota_grpo.rewards.maths_arithmetic import Arithmetic, NoValue
from sota_grpo.rewards.maths_tokens import Node

BUDGET = 200_000  # units of about a microsecond

Point = Mapping[str, Fraction]
_AGREEMENTS, _LEAST_AGREEMENTS = 5, 2
_CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_INSIDE = {  # operations on the values of the parts, by kind
    "add": lambda calculate, values: calculate.add(values),
    "mul": lambda calculate, values: calculate.multiply(values),
    "neg": lambda calculate, values: calculate.negative(values[0]),
    "div": lambda calculate, values: calculate.divide(*values),
    "ratio": lambda calculate, values: calculate.divide(*values),
    "pow": lambda calculate, values: calculate.power(*values),
    "root": lambda calculate, values: calculate.power(values[0], calculate.divide(Fraction(1), values[1])),
    "fact": lambda calculate, values: calculate.factorial(values[0]),
    "binom": lambda calculate, values: calculate.binomial(*values),
    "abs": lambda calculate, values: calculate.absolute(values[0]),
    "floor": lambda calculate, values: calculate.floor(values[0]),
    "ceil": lambda calculate, values: calculate.ceiling(values[0]),
    "pct": lambda calculate, values: calculate.divide(values[0], Fraction(100)),
}


class NoNumber(ValueError):
    """The tree is no expression whose value is a number: a set, a relation, a matrix."""


class Values:
    """Evaluates trees, all from one budget.

    Args:
        budget: see :class:`sota_grpo.rewards.maths_arithmetic.Arithmetic`.

    >>> from sota_grpo.rewards.maths_parse import parse_answer
    >>> Values().value(parse_answer("\\\\frac{2^{10}}{6!}"))
    Fraction(64, 45)
    >>> Values().equal(parse_answer("(x+1)^2"), parse_answer("x^2+2x+1"))
    True
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.arithmetic = Arithmetic(budget)
        self._angles = 0  # circular functions around the node at hand

    def value(self, node: Node, point: Point | None = None) -> Any:
        """The value, a ``Fraction`` where it is known exactly, at the given values of the variables.

        Raises:
            NoValue: there is none here.
            NoNumber: the tree has no number as its value, or a variable has none.
            TooCostly: it is too large, or the budget is spent.
        """
        self.arithmetic.spend(1)
        kind = node.kind
        if kind == "num":
            return node.data[0]
        if kind in ("var", "text") and point is not None:
            return point[f"{kind} {node.data}"]
        if kind == "const" and node.data != "inf":
            return self.arithmetic.constant(node.data)
        if kind == "fn":
            return self._function(node, point)
        if kind == "deg":
            degrees = self.value(node.parts[0], point)
            return self.arithmetic.radians(degrees) if self._angles else degrees
        if kind not in _INSIDE or (kind == "ratio" and len(node.parts) > 2):
            raise NoNumber(f"{kind} has no number as its value")
        return _INSIDE[kind](self.arithmetic, [self.value(part, point) for part in node.parts])

    def _function(self, node: Node, point: Point | None) -> Any:
        angle = node.data in _CIRCULAR
        self._angles += angle
        arguments = [self.value(part, point) for part in node.parts]
        self._angles -= angle
        return self.arithmetic.function(node.data, arguments)

    def equal(self, left: Node, right: Node) -> bool:
        """Whether two expressions are equal wherever both are defined.

        Real values are compared where there are any: ``\\\\sqrt{x^2}`` equals ``|x|`` and not ``x``.

        Raises:
            NoNumber: one of them is no expression.
            TooCostly: they cannot be compared within the budget.
        """
        return self._agree(left, right, self.arithmetic.close)

    def proportional(self, left: Node, right: Node, *, same_sign: bool) -> bool:
        """Whether ``left = c * right`` for one constant ``c``, neither zero nor (if asked) negative.

        Raises:
            NoNumber, TooCostly: as in :meth:`equal`.
        """
        close, ratios = self.arithmetic.close, []

        def constant_ratio(first: Any, second: Any) -> bool:
            if close(first, Fraction(0)) or close(second, Fraction(0)):
                return close(first, second)
            ratios.append(self.arithmetic.divide(first, second))
            positive = self.arithmetic.is_real(ratios[-1]) and ratios[-1] > 0
            return close(ratios[0], ratios[-1]) and (positive or not same_sign)

        return self._agree(left, right, constant_ratio) and bool(ratios)

    def _agree(self, left: Node, right: Node, same: Callable[[Any, Any], bool]) -> bool:
        names = sorted(variables(left) | variables(right))
        for real in (False,) if mentions_i(left) or mentions_i(right) else (True, False):
            self.arithmetic.real = real
            agreements = 0
            for point in points(names):
                try:
                    agree = same(self.value(left, point), self.value(right, point))
                except NoValue:
                    continue
                if not agree:
                    return False
                agreements += 1
                if agreements == (_AGREEMENTS if names else 1):
                    return True
            if agreements >= _LEAST_AGREEMENTS:
                return True
        return False


def points(names: list[str]) -> Iterator[dict[str, Fraction]]:
    """Pseudo-random values of the variables, the same for the same names: positive, negative, whole and small ones.

    >>> next(points(["var x"])) == next(points(["var x"])), next(points([]))
    (True, {})
    """
    if not names:
        yield {}
        return
    for index in range(12):
        draw = random.Random(f"{index} {' '.join(names)}".encode("utf-8", "backslashreplace"))
        if index in (4, 7):
            yield {name: Fraction(draw.randint(2, 12)) for name in names}
        elif index in (5, 8):
            yield {name: Fraction(draw.randint(2, 96), 97) for name in names}
        else:
            yield {name: Fraction((-1) ** (index % 3 == 1) * draw.randint(20, 240), 97) for name in names}


def variables(node: Node) -> frozenset[str]:
    """What the value of a tree depends on, as keys of a point: ``var x`` for the variable x, ``text cm`` for words."""
    return frozenset(f"{part.kind} {part.data}" for part in walk(node) if part.kind in ("var", "text"))


def mentions_i(node: Node) -> bool:
    """Whether the imaginary unit stands in a tree."""
    return any(part.kind == "const" and part.data == "i" for part in walk(node))


def walk(node: Node) -> Iterator[Node]:
    """The nodes of a tree."""
    left = [node]
    while left:
        part = left.pop()
        left.extend(part.parts)
        yield part
