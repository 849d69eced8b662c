"""Compare the parsed trees of two answers: numbers, ordered and unordered collections, relations, sets of real numbers.

Untrusted expressions are evaluated exactly or to ``DIGITS`` digits, with bounds on size and computing time. Two are
equal if they agree at pseudo-random points (Schwartz 1980, Zippel 1979): polynomials and rational functions exactly, at
rational points; other expressions to 40 digits.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import mpmath

from sota_grpo.rewards.maths.parse import CIRCULAR, IMAGINARY, INFINITY, Incomparable, Node, variables, walk

DIGITS = 50
MAX_BITS = 1 << 15  # of numerator and denominator of an exact value, and of the exponent of an inexact one
BUDGET = 200_000  # units, about 1 µs each, that all operations of one comparison may cost
_MAX_FACTORIAL, _MAX_ARGUMENT_BITS, _MAX_EXPONENT_BITS = 3000, 200, 15
_POINTS, _LEAST_AGREEMENTS = 8, 2
MAX_MEMBERS = 60  # most members of an unordered list or set, and most ends of intervals
LEAST_DECIMALS = 6  # fewest decimal places of a rounded value that is accepted for an exact one

Reals = Callable[[Any], bool]  # membership test of a set of real numbers
_COLLECTIONS = {"list", "set", "seq", "matrix", "sets", "reals"}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_HOLDS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "!=": operator.ne}
_JOINED = {"\\cup": operator.or_, "\\cap": operator.and_, "\\setminus": operator.gt}  # operators on two memberships
_FUNCTION_NAMES = frozenset("fghpqrstuvwFGHPQRSTVAC")
_INFINITE = {INFINITY: math.inf, Node("neg", (INFINITY,)): -math.inf}


class NoValue(Incomparable):
    """The expression has no value: division by zero, logarithm of zero, square root of -1 among the reals."""


class Values:
    """Evaluates trees within one budget for all calls. Exact values are of type ``Fraction``, others mpmath numbers."""

    def __init__(self) -> None:
        self.real = True  # True: a value that is not real raises NoValue
        self._left = BUDGET
        self._context = mpmath.MPContext()  # a separate one, so that no other thread changes its precision
        self._context.dps = DIGITS
        self._tolerance, self._smallest = (self._context.mpf(10) ** -digits for digits in (DIGITS - 10, DIGITS))
        self._operations: Mapping[str, Callable[..., Any]] = {  # on the children's values, by kind of node
            **{"add": partial(self._fold, operator.add), "mul": partial(self._fold, operator.mul)},
            **{"div": partial(self._fold, operator.truediv), "pow": self._power, "fact": self._factorial},
            **{
                "neg": operator.neg,
                "abs": abs,
                "pct": lambda value: self._fold(operator.truediv, value, Fraction(100)),
            },
            "floor": lambda value: self._checked(self._context.floor(self.inexact(value))),
            "ceil": lambda value: self._checked(self._context.ceil(self.inexact(value))),
        }

    def spend(self, units: int) -> None:
        """Subtract ``units`` from the budget; raise Incomparable if it is exhausted."""
        self._left -= units
        if self._left < 0:
            raise Incomparable("the comparison takes too long")

    def inexact(self, value: Any) -> Any:
        """Return a ``Fraction`` as an mpmath number, any other value as it is."""
        return self._context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def close(self, left: Any, right: Any) -> bool:
        """Return whether two values are equal: exactly if both are fractions, else to 40 digits or within 1e-50."""
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left == right
        left, right = self.inexact(left), self.inexact(right)
        return bool(abs(left - right) <= max(abs(left), abs(right)) * self._tolerance + self._smallest)

    def _checked(self, value: Any) -> Any:
        """Return ``value``, and pay for it; raise NoValue if it is infinite or not real, Incomparable if large."""
        if isinstance(value, Fraction):
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        else:
            if not getattr(value, "imag", 0):
                value = value.real
            if not self._context.isfinite(value) or (self.real and isinstance(value, self._context.mpc)):
                raise NoValue("the value is infinite, or not real")
            bits = abs(self._context.mag(value)) if value else 0
        self.spend(4 + ((bits >> 9) ** 2 >> 2))
        if bits > MAX_BITS:
            raise Incomparable("a number is too large")
        return value

    def _fold(self, operation: Callable[[Any, Any], Any], value: Any, *others: Any) -> Any:
        """Return the operation on the values from left to right, exact as long as both operands are."""
        for other in others:
            if not (isinstance(value, Fraction) and isinstance(other, Fraction)):
                value, other = self.inexact(value), self.inexact(other)
            value = self._checked(operation(value, other))
        return value

    def _power(self, base: Any, exponent: Any) -> Any:
        """Return ``base ** exponent``; if values must be real, the real odd root of a negative number."""
        if not base:
            if isinstance(exponent, self._context.mpc) or exponent <= 0:
                raise NoValue("a power of zero whose exponent is not positive")
            return base
        if abs(self.inexact(exponent)) * (abs(self._context.mag(self.inexact(base))) + 1) > MAX_BITS:
            raise Incomparable("a power is too large")
        self.spend(20)
        if isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                return self._checked(base ** int(exponent))
            if self.real and base < 0 and exponent.denominator % 2:
                return self._power(-base, exponent) * (-1) ** (exponent.numerator % 2)
        return self._checked(self._context.power(self.inexact(base), self.inexact(exponent)))

    def _factorial(self, value: Any) -> Any:
        """Return the factorial of a value, by the gamma function if it is not an integer."""
        if abs(value) > _MAX_FACTORIAL:
            raise Incomparable("a factorial is too large")
        self.spend(300 + int(abs(value)))
        if not isinstance(value, Fraction) or value.denominator > 1:
            return self._checked(self._context.factorial(self.inexact(value)))
        return self._checked(Fraction(math.factorial(int(value))))

    def _function(self, name: str, argument: Any, base: Any = None) -> Any:
        """Return the value of an elementary function; only ``log`` has a base, by default 10."""
        self.spend(30)
        if name == "log":
            base = Fraction(10) if base is None else base
            return self._fold(operator.truediv, self._function("ln", argument), self._function("ln", base))
        if base is not None:
            raise Incomparable(f"{name} has no base")
        value, limit = self.inexact(argument), _MAX_ARGUMENT_BITS if name in (*CIRCULAR, "ln") else _MAX_EXPONENT_BITS
        if value and self._context.mag(value) > limit:
            raise Incomparable("an argument is too large")
        return self._checked(getattr(self._context, name)(value))

    def value(self, node: Node, point: Mapping[str, Fraction] | None = None, *, angle: bool = False) -> Any:
        """Return the value of a tree: a ``Fraction`` if it is computed exactly, else an mpmath number.

        ``point`` has the values of all variables by the names of :func:`~.parse.variables`, such as ``var x``.
        ``angle`` converts degrees to radians, as is always done in the argument of a circular function. NoValue: the
        value is infinite, undefined, or not real though values must be ``real``. Incomparable: the tree is no number,
        has variables but no ``point``, or costs too much.
        """
        self.spend(1)
        kind = node.kind
        if kind == "num":
            return node.data[0]
        if kind in ("var", "text") and point is not None:
            return point[f"{kind} {node.data}"]
        if kind == "const" and node != INFINITY:
            return self._checked(self._context.mpc(0, 1)) if node == IMAGINARY else +getattr(self._context, node.data)
        if kind not in ("fn", "deg", *self._operations):
            raise Incomparable(f"{kind} has no number as its value")
        angle |= node.data in CIRCULAR
        values = [self.value(child, point, angle=angle) for child in node.children]
        if kind == "deg":
            return self._checked(self.inexact(values[0]) * self._context.pi / 180) if angle else values[0]
        try:
            return self._function(node.data, *values) if kind == "fn" else self._operations[kind](*values)
        except (ZeroDivisionError, ValueError) as error:
            raise NoValue(str(error)) from error

    def equal(self, left: Node, right: Node, *, up_to_factor: bool = False, positive: bool = False) -> bool:
        """Return whether two expressions agree at the sampled points where both have values.

        The values are real; if too few points have real values, complex. False if too few have complex ones, too. With
        ``up_to_factor``, one expression may be a nonzero constant multiple of the other, with ``positive`` as well a
        positive one. Incomparable: see :meth:`value`. This sets ``real``.
        """
        names, zero = sorted(variables(left) | variables(right)), Fraction(0)
        for real in (False,) if IMAGINARY in (*walk(left), *walk(right)) else (True, False):
            self.real, agreements, ratio = real, 0, None
            for point in _points(names):
                try:
                    first, second = self.value(left, point), self.value(right, point)
                    if up_to_factor and not (self.close(first, zero) or self.close(second, zero)):
                        ratio = self._fold(operator.truediv, first, second) if ratio is None else ratio
                        second = self._fold(operator.mul, ratio, second)
                except NoValue:
                    continue
                if not self.close(first, second) or (positive and not (real and (ratio or 1) > 0)):
                    return False
                agreements += 1
            if agreements >= (_LEAST_AGREEMENTS if names else 1):
                return not up_to_factor or ratio is not None
        return False


def _points(names: Sequence[str]) -> Iterator[dict[str, Fraction]]:
    """Yield pseudo-random values of the variables, equal for equal names: positive, negative, integer and small."""
    for index in range(_POINTS if names else 1):
        draw = random.Random(f"{index} {' '.join(names)}".encode("utf-8", "backslashreplace"))
        low, high, divisor = {1: (2, 12, 1), 2: (2, 96, 97)}.get(index % 4, (20, 240, 97 if index % 4 else -97))
        yield {name: Fraction(draw.randint(low, high), divisor) for name in names}


class Comparison:
    """Compares parsed trees of a gold answer and of an answer; its calls share one computation budget."""

    def __init__(self) -> None:
        self._values = Values()
        self._ends: list[Any] = []  # ends of all intervals; close numbers are one end
        self._names: set[Node] = set()  # the names that the current inequalities are about

    def same(self, gold: Node, answer: Node) -> bool:
        """Return whether ``answer`` equals ``gold`` (50% equals 0.5 and 50); raise Incomparable if undecided."""
        self._values.spend(1)
        if gold == answer:
            return True
        if any(node.kind != "set" and node.data != "()" for node in (gold, answer)):  # else (1,2) may be a point
            first, second = self._reals(gold), self._reals(answer)
            if first and second:
                one_name = len(first[1] | second[1]) < 2
                return one_name and all(first[0](x) == second[0](x) for x in self._probes())
        kinds = {gold.kind, answer.kind}
        if "rel" in kinds:
            return self._same_relation(gold, answer)
        if kinds & _COLLECTIONS:
            return self._same_collection(gold, answer, kinds)
        if "base" in kinds:
            return gold.children == (answer,)  # the problem names the base: 101 is accepted for 101_2
        if "text" in kinds or {gold, answer} & {*_INFINITE}:
            return False
        both = ((gold, answer), (answer, gold))
        if any(one.kind == "pct" != other.kind and self.same(one.children[0], other) for one, other in both):
            return True  # 50 and 0.5 are accepted for 50%
        return self._values.equal(gold, answer) or any(self._rounded(*pair) for pair in both)

    def _rounded(self, exact: Node, decimal: Node) -> bool:
        """Return whether ``decimal``, of enough places, rounds or cuts ``exact``, which has no finite decimal form."""
        literal = decimal.children[0] if decimal.kind == "neg" else decimal
        if literal.kind != "num" or literal.data[1] < LEAST_DECIMALS or variables(exact) or exact.kind == "num":
            return False
        value, ulp = self._values.value(exact), Fraction(1, 10 ** literal.data[1])
        finite = isinstance(value, Fraction) and (value / ulp).denominator == 1
        error = self._values.inexact(value) - self._values.inexact(self._values.value(decimal))
        return not finite and bool(abs(error) < self._values.inexact(ulp))

    def _same_collection(self, gold: Node, answer: Node, kinds: set[str]) -> bool:
        if "matrix" in kinds:
            rows = _rows(gold), _rows(answer)
            return len(rows[0]) == len(rows[1]) > 0 and all(map(self._in_order, *rows))
        for one, other in ((gold, answer), (answer, gold)):
            if one.kind in ("list", "set") and one.children and other.kind not in _COLLECTIONS:
                return all(self.same(member, other) for member in one.children)  # one answer in several forms
        if not kinds <= {"list", "set", "seq"} or max(len(gold.children), len(answer.children)) > MAX_MEMBERS:
            return False
        if kinds == {"seq"}:
            return gold.data == answer.data and self._in_order(gold.children, answer.children)
        if "seq" in kinds or _names_differ(gold) != _names_differ(answer):  # (1,2), or 1, 2, against x=1, y=2
            points = _coordinates(gold), _coordinates(answer)
            return all(points) and self._in_order(*points)

        def count(member: Node, node: Node) -> int:
            return sum(self.same(member, other) for other in node.children)

        if "set" in kinds:
            return all(count(one, answer) for one in gold.children) and all(count(one, gold) for one in answer.children)
        same_length = len(gold.children) == len(answer.children)
        return same_length and all(count(one, gold) == count(one, answer) for one in gold.children)

    def _in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(gold) == len(answer) and all(map(self.same, gold, answer))

    def _same_relation(self, gold: Node, answer: Node) -> bool:
        (gold_name, gold_value), (answer_name, answer_value) = _sides(gold), _sides(answer)
        if gold_value is not None and answer_value is not None:
            names = {name for name in (gold_name, answer_name) if name}
            of_x = {name.kind for name in names} == {"var", "mul"} and Node("var", (), "y") in names
            if len(names) < 2 or (of_x and variables(gold_value)):  # y and f(x) name the same thing
                return self.same(gold_value, answer_value)
        if gold.kind != answer.kind:  # the answer of an identity is its last side: x^2 - 1 = (x - 1)(x + 1)
            equation, other = (gold, answer) if gold.kind == "rel" else (answer, gold)
            first, *others = equation.children
            holds = {*equation.data} == {"="} and all(self._values.equal(first, member) for member in others)
            return holds and self.same(others[-1], other)
        solved = [value is not None and not variables(value) for value in (gold_value, answer_value)]
        if solved[0] != solved[1] or self._reals(gold) or self._reals(answer):
            return False  # 2x = 6 and 2x < 6 do not state x
        flipped = Node("rel", answer.children[::-1], tuple(_FLIPPED.get(sign, sign) for sign in answer.data[::-1]))
        for side in (answer, flipped):
            if side.data != gold.data:
                continue
            if len(gold.children) > 2 or gold.data[0] not in ("=", *_FLIPPED):
                return self._in_order(gold.children, side.children)
            left, right = (Node("add", (one.children[0], Node("neg", one.children[1:]))) for one in (gold, side))
            return self._values.equal(left, right, up_to_factor=True, positive=gold.data[0] not in ("=", "!="))
        return False

    def _reals(self, node: Node) -> tuple[Reals, set[Node]] | None:
        """Return the set of real numbers that a tree describes, and its names (x of x < 2); None if it is no set."""
        self._names = set()
        try:
            members = self._members(*node)
        except Incomparable:
            return None
        return (members, self._names) if len(self._names) < 2 else None

    def _members(self, kind: str, nodes: Sequence[Node], data: Any) -> Reals:
        if kind == "reals":
            return lambda x: True
        if kind == "set":
            points = list(map(self._end, nodes))
            return lambda x: x in points
        if kind == "rel" and data == ("\\in",):
            self._names.add(nodes[0])
            return self._members(*nodes[1])
        if kind == "sets":
            first, *others = (self._members(*node) for node in nodes)
            joins = [(_JOINED[sign], other) for sign, other in zip(data, others)]
            return lambda x: reduce(lambda inside, join: join[0](inside, join[1](x)), joins, first(x))
        every = all
        if kind == "seq" and len(nodes) == 2 and self._end(nodes[0]) < self._end(nodes[1]):
            signs = ">" + "=" * (data[0] == "["), "<" + "=" * (data[1] == "]")
            conditions = list(map(self._bounded, signs, nodes))
        elif kind == "rel" and {*data} <= {*_FLIPPED}:
            conditions = list(map(self._half_line, nodes, data, nodes[1:]))
        elif kind == "list" and all(node.kind == "rel" for node in nodes):
            conditions = [self._members(*node) for node in nodes]
            if data == "or" or not any(all(condition(x) for condition in conditions) for x in self._probes()):
                every = any  # after "or", and if the conditions exclude each other
        else:
            raise Incomparable(f"a node {kind!r} is not a set of reals")
        return lambda x: every(condition(x) for condition in conditions)

    def _half_line(self, left: Node, sign: str, right: Node) -> Reals:
        """Return the solutions of an inequality that is solved for a name (or minus a name)."""
        if not variables(left):
            left, sign, right = right, _FLIPPED[sign], left
        if left.kind == "neg":
            left, sign, right = left.children[0], _FLIPPED[sign], Node("neg", (right,))
        if not _is_name(left):
            raise Incomparable("the inequality is not solved for a name")
        self._names.add(left)
        return self._bounded(sign, right)

    def _bounded(self, sign: str, bound: Node) -> Reals:
        end = self._end(bound)
        return lambda x: _HOLDS[sign](x, end)

    def _end(self, node: Node) -> Any:
        """Return the number that a tree denotes; among close numbers always the first one seen."""
        if node in _INFINITE:
            return _INFINITE[node]
        if variables(node) or len(self._ends) > MAX_MEMBERS:
            raise Incomparable(f"a bound or set member has a variable, or there are over {MAX_MEMBERS} of them")
        self._values.real = True
        self._values.spend(10 * len(self._ends))
        end = self._values.inexact(self._values.value(node))
        self._ends += [] if any(self._values.close(known, end) for known in self._ends) else [end]
        return next(known for known in self._ends if self._values.close(known, end))

    def _probes(self) -> list[Any]:
        """Return the ends of all intervals, a number between any two neighbours, one below and one above all ends."""
        self._values.spend(len(self._ends) ** 2)
        ends = sorted(self._ends)
        return [*ends, *((low + high) / 2 for low, high in pairwise(ends)), ends[0] - 1, ends[-1] + 1] if ends else [0]


def _sides(node: Node) -> tuple[Node | None, Node | None]:
    """Return (name, value) of ``x = 5``, ``5 = x``, ``x \\in (1,2)``, ``AB = 3+4 = 7`` or 5 (name None), else Nones."""
    members: tuple[Node, ...] = node.children if node.kind == "rel" else (node,)
    signs: tuple[str, ...] = node.data if node.kind == "rel" else ()
    if "~" in signs:  # an approximation counts only if nothing exact precedes it
        keep = signs.index("~") + (2 if signs[0] == "~" and _is_name(members[0]) else 1)
        members, signs = members[:keep], ("=",) * (keep - 1)
    if len(members) == 1 or not {*signs} <= {"=", "\\in"}:
        return None, members[0] if len(members) == 1 else None
    if _is_name(members[0]):
        return members[0], members[-1]
    if len(members) == 2 and _is_name(members[1]):
        return members[1], members[0]
    return None, None if any(map(variables, members)) else members[-1]


def _is_name(node: Node) -> bool:
    """Return whether a tree is only a name: ``x``, ``AB``, ``f(x)``, ``f(2)``, ``|AB|``, ``(x, y)``, ``a:b``, words."""
    if node.kind == "mul" and len(node.children) == 2 and node.children[1].kind in ("num", "neg", "seq", "var"):
        function = node.children[0].children[0] if node.children[0].kind == "pow" else node.children[0]
        if function.kind == "var" and function.data[0] in _FUNCTION_NAMES:
            return True
    is_word = node.kind in ("var", "text")
    return is_word or (node.kind in ("mul", "div", "abs", "seq") and all(map(_is_name, node.children)))


def _names(node: Node) -> list[Node]:
    """Return the names of the members of a list (x, y of x=1, y=2); empty if some member has none."""
    names = [_sides(member)[0] for member in node.children]
    return [name for name in names if name] if None not in names else []


def _names_differ(node: Node) -> bool:
    """Return whether the members have different names; ``x_1`` and ``x_2`` count as one (roots are unordered)."""
    names = _names(node)
    return len({str(name).partition("_")[0] for name in names}) == len(names) > 1


def _coordinates(node: Node) -> Sequence[Node]:
    """Return the coordinates of a possible point; named ones in alphabetical order: ``y=2, x=3`` is ``(3,2)``."""
    names = _names(node)
    if len({*names}) < len(names) or node.data not in ("()", ","):
        return ()
    letters = [name.data for name in names if name.kind == "var" and len(name.data) == 1]
    values = node.children
    return [value for _, value in sorted(zip(letters, values))] if len(letters) == len(values) else values


def _rows(node: Node) -> list[tuple[Node, ...]]:
    """Return the rows of a matrix, a list of lists or a (column) vector; empty for anything else."""
    if node.kind == "mul" and node.children[-1].kind == "matrix":
        return [tuple(Node("mul", (*node.children[:-1], cell)) for cell in row) for row in _rows(node.children[-1])]
    if node.kind != "matrix" and (node.kind != "seq" or node.data not in ("()", "[]")):
        return []
    return [child.children if child.kind in ("row", "seq") else (child,) for child in node.children]
