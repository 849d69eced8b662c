"""Whether two trees are the same answer: what is ordered, what is not, which sets of numbers they describe.

The conventions are those of the MATH data set and of its usual graders (Hendrycks et al. 2021, arXiv:2103.03874;
Lightman et al. 2023, arXiv:2305.20050; Math-Verify).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from sota_grpo.rewards.maths.parse import Node
from sota_grpo.rewards.maths.values import NoNumber, NoValue, Values, variables, walk

MAX_PIECES = 64


class Piece(NamedTuple):
    """An interval; a point where both ends are the same."""

    low: Any
    has_low: bool
    high: Any
    has_high: bool


EVERYTHING = (Piece(-math.inf, False, math.inf, False),)
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}


class RealSets:
    """Reads trees as sets of real numbers and compares them.

    Args:
        values: evaluates the ends.

    >>> from sota_grpo.rewards.maths.parse import parse_answer
    >>> sets = RealSets(Values())
    >>> sets.equal(parse_answer("x<1 or x>=2"), parse_answer("(-\\\\infty,1)\\\\cup[2,\\\\infty)"))
    True
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def equal(self, left: Node, right: Node) -> bool | None:
        """Whether two trees say the same set of reals (of the same variable); None if one of them says none."""
        if _is_only_points(left) and _is_only_points(right):
            return None
        first, second = self.find(left), self.find(right)
        if first is None or second is None:
            return None
        names = [variables(node) for node in (left, right)]
        if names[0] and names[1] and names[0] != names[1]:
            return False
        return len(first) == len(second) and all(map(self._same_piece, first, second))

    def find(self, node: Node) -> tuple[Piece, ...] | None:
        """The set that a tree says, None where it says none."""
        try:
            return self.read(node)
        except (NoNumber, NoValue):
            return None

    def read(self, node: Node) -> tuple[Piece, ...]:
        """The set that a tree says, as disjoint intervals in order.

        Raises:
            NoNumber, NoValue: it says none.
        """
        kind, parts = node.kind, node.parts
        if kind == "reals":
            return EVERYTHING
        if kind == "seq" and len(parts) == 2:
            low, high = self._end(parts[0]), self._end(parts[1])
            if low >= high:
                raise NoNumber("an interval is empty")
            has_low, has_high = node.data[0] == "[" and low != -math.inf, node.data[1] == "]" and high != math.inf
            return (Piece(low, has_low, high, has_high),)
        if kind == "set":
            points = [self._end(part) for part in parts]
            return self._merged(Piece(point, True, point, True) for point in points)
        if kind == "union":
            return self._merged([*self.read(parts[0]), *self.read(parts[1])])
        if kind == "inter":
            return self._intersection(self.read(parts[0]), self.read(parts[1]))
        if kind == "minus":
            return self._intersection(self.read(parts[0]), self._complement(self.read(parts[1])))
        if kind == "rel":
            return self._read_relation(node)
        if kind == "list" and all(part.kind == "rel" for part in parts):
            return self._read_list(node)
        raise NoNumber(f"{kind} is no set of real numbers")

    def _read_list(self, node: Node) -> tuple[Piece, ...]:
        """Conditions together: all of them, or any of them after an "or" and where they exclude each other."""
        sets = [self.read(part) for part in node.parts]
        if len({variables(part) for part in node.parts}) != 1:
            raise NoNumber("conditions on several variables, or none")
        union = self._merged(piece for pieces in sets for piece in pieces)
        if node.data == "or":
            return union
        common = sets[0]
        for pieces in sets[1:]:
            common = self._intersection(common, pieces)
        return common or union

    def _read_relation(self, node: Node) -> tuple[Piece, ...]:
        if node.data == ("in",) and node.parts[0].kind == "var":
            return self.read(node.parts[1])
        if len(variables(node)) != 1 or any(sign not in _FLIPPED for sign in node.data):
            raise NoNumber("no inequality in one variable")
        common: tuple[Piece, ...] = EVERYTHING
        for left, sign, right in zip(node.parts, node.data, node.parts[1:]):
            common = self._intersection(common, self._half_line(left, sign, right))
        return common

    def _half_line(self, left: Node, sign: str, right: Node) -> tuple[Piece, ...]:
        """The solutions of ``left sign right`` where that is solved already: a variable, or minus it, and a bound."""
        if not variables(left):
            left, sign, right = right, _FLIPPED[sign], left
        end = self._end(right)
        if left.kind == "neg":
            left, sign, end = left.parts[0], _FLIPPED[sign], -end
        if left.kind != "var":
            raise NoNumber("it is not solved")
        if sign == "!=":
            return self._complement((Piece(end, True, end, True),))
        if sign[0] == "<":
            return (Piece(-math.inf, False, end, sign == "<=" and end != math.inf),)
        return (Piece(end, sign == ">=" and end != -math.inf, math.inf, False),)

    def _end(self, node: Node) -> Any:
        infinite = node.parts[0] if node.kind in ("neg", "add") and len(node.parts) == 1 else node
        if infinite.kind == "const" and infinite.data == "inf":
            return -math.inf if node.kind == "neg" else math.inf
        if variables(node):
            raise NoNumber("an end depends on a variable")
        self._values.arithmetic.real = True
        return self._values.arithmetic.inexact(self._values.value(node))

    def _merged(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        merged: list[Piece] = []
        for piece in sorted(pieces, key=lambda p: (p.low, not p.has_low)):
            last = merged[-1] if merged else None
            touching = last is not None and (
                piece.low < last.high or (self._same_end(piece.low, last.high) and (piece.has_low or last.has_high))
            )
            if last is None or not touching:
                merged.append(piece)
            elif piece.high > last.high or (piece.high == last.high and piece.has_high):
                merged[-1] = Piece(last.low, last.has_low, piece.high, piece.has_high)
        if len(merged) > MAX_PIECES:
            raise NoNumber("too many intervals")
        return tuple(merged)

    def _complement(self, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
        gaps, low, has_low = [], -math.inf, False
        for piece in pieces:
            if low < piece.low or (low == piece.low and has_low and not piece.has_low):
                gaps.append(Piece(low, has_low, piece.low, not piece.has_low))
            low, has_low = piece.high, not piece.has_high
        if low < math.inf:
            gaps.append(Piece(low, has_low, math.inf, False))
        return tuple(gaps)

    def _intersection(self, left: tuple[Piece, ...], right: tuple[Piece, ...]) -> tuple[Piece, ...]:
        outside = self._merged([*self._complement(left), *self._complement(right)])
        return self._complement(outside)

    def _same_piece(self, left: Piece, right: Piece) -> bool:
        closed = (left.has_low, left.has_high) == (right.has_low, right.has_high)
        return closed and self._same_end(left.low, right.low) and self._same_end(left.high, right.high)

    def _same_end(self, left: Any, right: Any) -> bool:
        if math.inf in (abs(left), abs(right)):
            return bool(left == right)
        return self._values.arithmetic.close(left, right)


def _is_only_points(node: Node) -> bool:
    """Whether a tree is a plain pair or finite set, which other rules compare: ``(1,2)`` may be a point."""
    return node.kind == "set" or (node.kind == "seq" and node.data == "()")


MAX_MEMBERS = 60  # of a list or set whose order does not matter
LEAST_DECIMALS = 6  # of a decimal that may stand for a number it is rounded from

_FUNCTION_NAMES = frozenset("fghpqrstuvwFGHPQRSTVAC")
_COLLECTIONS = ("list", "set", "seq", "matrix", "union", "inter", "minus", "reals")


class Comparison:
    """Compares the trees of a gold answer and of an answer.

    Args:
        values: evaluates expressions.

    >>> from sota_grpo.rewards.maths.parse import parse_answer
    >>> def same(gold, answer): return Comparison().same(parse_answer(gold), parse_answer(answer))
    >>> same("1,2", "2,1"), same("(1,2)", "(2,1)"), same("x=5", "5"), same("x=5", "y=5"), same("50\\\\%", "0.5")
    (True, False, True, False, True)
    """

    def __init__(self, values: Values | None = None) -> None:
        self._values = values or Values()
        self._sets = RealSets(self._values)

    def same(self, gold: Node, answer: Node) -> bool:
        """Whether they are the same answer.

        Raises:
            NoNumber: something in them is neither a number nor anything else that is compared here.
            TooCostly: they cannot be compared within the budget.
        """
        return self._same(_expanded(_with_names(gold)), _expanded(_with_names(answer)))

    def _same(self, gold: Node, answer: Node) -> bool:
        self._values.arithmetic.spend(1)
        if gold == answer:
            return True
        as_sets = self._sets.equal(gold, answer)
        if as_sets is not None:
            return as_sets
        if "rel" in (gold.kind, answer.kind):
            return self._same_relation(gold, answer)
        if gold.kind == "text" or answer.kind == "text":
            return False
        if gold.kind in _COLLECTIONS or answer.kind in _COLLECTIONS:
            return self._same_collection(gold, answer)
        if gold.kind == "ratio" and answer.kind == "ratio":
            return self._same_ratio(gold.parts, answer.parts)
        if gold.kind == "base" or answer.kind == "base":
            return gold.parts == (answer,)  # the problem has said in which base: 101_2 may be answered by 101
        if _is_infinite(gold) or _is_infinite(answer):
            return False
        return self._same_number(gold, answer)

    def _same_number(self, gold: Node, answer: Node) -> bool:
        if (gold.kind == "pct") != (answer.kind == "pct"):  # 50% is written as 50 and as 0.5
            percentage, other = (gold, answer) if gold.kind == "pct" else (answer, gold)
            return self._same_number(percentage.parts[0], other) or self._values.equal(percentage, other)
        return self._values.equal(gold, answer) or self._rounded(gold, answer) or self._rounded(answer, gold)

    def _rounded(self, exact: Node, decimal: Node) -> bool:
        """Whether a decimal with enough places is the rounded value of a number that has no finite decimal."""
        literal = decimal.parts[0] if decimal.kind == "neg" else decimal
        if literal.kind != "num" or literal.data[1] < LEAST_DECIMALS or variables(exact) or exact.kind == "num":
            return False
        try:
            value = self._values.value(exact)
            written = self._values.value(decimal)
        except NoValue:
            return False
        ulp = Fraction(1, 10 ** literal.data[1])
        if isinstance(value, Fraction) and (value / ulp).denominator == 1:
            return False
        arithmetic = self._values.arithmetic
        error = abs(arithmetic.inexact(arithmetic.add([value, -written])))
        return bool(error < arithmetic.inexact(ulp))

    def _same_ratio(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        if len(gold) != len(answer):
            return False
        if all(map(self._same, gold, answer)):
            return True
        firsts = gold[0], answer[0]
        pairs = [(Node("mul", (g, firsts[1])), Node("mul", (a, firsts[0]))) for g, a in zip(gold[1:], answer[1:])]
        zero = Node("num", (), (Fraction(0), 0))
        return not any(self._values.equal(part, zero) for part in (*gold, *answer)) and all(
            self._values.equal(left, right) for left, right in pairs
        )

    def _same_collection(self, gold: Node, answer: Node) -> bool:
        if gold.kind == "matrix" or answer.kind == "matrix":
            return self._same_matrix(gold, answer)
        for one, other in ((gold, answer), (answer, gold)):
            if one.kind in ("list", "set") and one.parts and other.kind not in _COLLECTIONS:
                return all(self._same(member, other) for member in one.parts)  # one answer, written in several ways
        kinds = {gold.kind, answer.kind}
        if not kinds <= {"list", "set", "seq"}:
            return False
        if kinds == {"seq"}:
            long = len(gold.parts) > 2
            same_brackets = gold.data == answer.data or (long and {gold.data, answer.data} == {"()", "[]"})
            return same_brackets and self._in_order(gold.parts, answer.parts)
        if "seq" in kinds:
            sequence, other = (gold, answer) if gold.kind == "seq" else (answer, gold)
            bracketed = sequence.data == "()" or (sequence.data == "[]" and len(sequence.parts) > 2)
            return other.kind == "list" and bracketed and self._in_order(gold.parts, answer.parts)
        if _names_differ(gold) != _names_differ(answer):  # x=1, y=2 against 1, 2
            return self._in_order(gold.parts, answer.parts)
        return self._in_any_order(gold, answer)

    def _same_matrix(self, gold: Node, answer: Node) -> bool:
        if any(side.kind != "matrix" and _has_matrix(side) for side in (gold, answer)):
            raise NoNumber("matrices are not added or multiplied here")
        first, second = _rows(gold), _rows(answer)
        return len(first) == len(second) > 0 and all(map(self._in_order, first, second))

    def _in_order(self, gold: Sequence[Node], answer: Sequence[Node]) -> bool:
        return len(gold) == len(answer) and all(map(self._same, gold, answer))

    def _in_any_order(self, gold: Node, answer: Node) -> bool:
        """Whether the members can be paired; in sets, each may come several times."""
        if max(len(gold.parts), len(answer.parts)) > MAX_MEMBERS:
            return False
        if gold.kind == "set" and answer.kind == "set":
            covered = (self._covers(answer.parts, gold.parts), self._covers(gold.parts, answer.parts))
            return all(covered)
        if len(gold.parts) != len(answer.parts):
            return False
        left = list(answer.parts)
        for member in gold.parts:
            match = next((index for index, other in enumerate(left) if self._same(member, other)), None)
            if match is None:
                return False
            left.pop(match)
        return True

    def _covers(self, members: Sequence[Node], others: Sequence[Node]) -> bool:
        return all(any(self._same(other, member) for member in members) for other in others)

    def _same_relation(self, gold: Node, answer: Node) -> bool:
        sides = _sides(gold), _sides(answer)
        (gold_name, gold_value), (answer_name, answer_value) = sides
        if gold_value is not None and answer_value is not None:
            if gold_name is None or answer_name is None or gold_name == answer_name:
                return self._same(gold_value, answer_value)
            if _are_function_names(gold_name, answer_name) and variables(gold_value):
                return self._same(gold_value, answer_value)
        if gold.kind != answer.kind:
            return self._same_identity(gold, answer)
        if _is_solved(gold_value) != _is_solved(answer_value):
            return False  # 2x = 6 does not answer what x is
        if self._sets.find(gold) is not None or self._sets.find(answer) is not None:
            return False  # nor does 2x < 6
        return self._same_conditions(gold, answer)

    def _same_identity(self, gold: Node, answer: Node) -> bool:
        """An equation that always holds says its last side: ``x^2 - 1 = (x - 1)(x + 1)``."""
        equation, other = (gold, answer) if gold.kind == "rel" else (answer, gold)
        first, *others = equation.parts
        holds = set(equation.data) == {"="} and all(self._values.equal(first, part) for part in others)
        return holds and self._same(others[-1], other)

    def _same_conditions(self, gold: Node, answer: Node) -> bool:
        """Equations up to a factor, inequalities up to a positive one, chains part by part."""
        for flipped in (False, True):
            parts = answer.parts[::-1] if flipped else answer.parts
            signs = tuple(_FLIPPED.get(s, s) for s in answer.data[::-1]) if flipped else answer.data
            if signs != gold.data:
                continue
            if len(parts) > 2:
                if self._in_order(gold.parts, parts):
                    return True
            elif gold.data[0] in ("=", *_FLIPPED):
                differences = [Node("add", (pair[0], Node("neg", (pair[1],)))) for pair in (gold.parts, parts)]
                ordered = gold.data[0] not in ("=", "!=")
                return self._values.proportional(differences[0], differences[1], same_sign=ordered)
        return False


def _sides(node: Node) -> tuple[Node | None, Node | None]:
    """The name and the value that a tree gives it: ``x = 5``, ``5 = x``, ``x \\in (1,2)``, ``AB = 3+4 = 7``, or just 5.

    The value is None where a relation says something else: an equation such as ``2x + y = 1``, an inequality.
    """
    if node.kind != "rel":
        return None, node
    parts, signs = list(node.parts), list(node.data)
    if "~" in signs:  # an approximation counts only where nothing exact stands before it
        cut = signs.index("~")
        keep = cut + 2 if cut == 0 and _is_name(parts[0]) else cut + 1
        parts, signs = parts[:keep], ["="] * (keep - 1) if keep > 1 else []
        if len(parts) == 1:
            return None, parts[0]
    if any(sign not in ("=", "in") for sign in signs):
        return None, None
    if _is_name(parts[0]):
        return parts[0], parts[-1]
    if _is_name(parts[-1]) and len(parts) == 2 and signs == ["="]:
        return parts[-1], parts[0]
    if all(not variables(part) for part in parts):
        return None, parts[-1]
    return None, None


def _is_name(node: Node) -> bool:
    """Whether a tree only names something: ``x``, ``AB``, ``f(x)``, ``f(2)``, ``|AB|``, ``(x, y)``, ``a:b``, words."""
    if node.kind in ("var", "text"):
        return True
    if node.kind == "mul" and len(node.parts) == 2 and node.parts[0].kind in ("var", "pow"):
        function = node.parts[0] if node.parts[0].kind == "var" else node.parts[0].parts[0]
        if function.kind == "var" and function.data.strip("'")[:1] in _FUNCTION_NAMES:
            return node.parts[1].kind in ("num", "neg", "seq") or _is_name(node.parts[1])
    return node.kind in ("mul", "div", "abs", "seq", "ratio") and all(map(_is_name, node.parts))


def _with_names(node: Node) -> Node:
    """The tree with what an inequality is about as one variable: the ``f(x)`` of ``0 < f(x) < 1``."""
    parts = tuple(map(_with_names, node.parts)) if node.kind == "list" else node.parts
    if node.kind == "rel" and any(sign in _FLIPPED for sign in node.data):
        parts = tuple(Node("var", (), str(part)) if part.parts and _is_name(part) else part for part in parts)
    return node._replace(parts=parts)


def _is_solved(value: Node | None) -> bool:
    """Whether a name is given a value without variables."""
    return value is not None and not variables(value)


def _are_function_names(first: Node, second: Node) -> bool:
    """Whether one is ``y`` and the other ``f(x)``, which name the same thing."""
    kinds = {first.kind, second.kind}
    return kinds == {"var", "mul"} and "y" in (first.data, second.data)


def _is_infinite(node: Node) -> bool:
    inside = node.parts[0] if node.kind == "neg" else node
    return inside.kind == "const" and inside.data == "inf"


def _names_differ(node: Node) -> bool:
    """Whether the members of a list are given different names; ``x_1`` and ``x_2`` are one: roots have no order."""
    names = [_sides(part)[0] for part in node.parts]
    return None not in names and len({str(name).partition("_")[0] for name in names}) == len(names) > 1


def _has_matrix(node: Node) -> bool:
    return any(part.kind == "matrix" for part in walk(node))


def _rows(node: Node) -> list[tuple[Node, ...]]:
    """The rows of a matrix, of a list of lists, or of a vector, which is a column; none of anything else."""
    if node.kind != "matrix" and (node.kind != "seq" or node.data not in ("()", "[]")):
        return []
    return [part.parts if part.kind in ("row", "seq") else (part,) for part in node.parts]


def _expanded(node: Node) -> Node:
    """The tree with each plus-minus written out: a member with one becomes two members."""
    if not any(part.kind == "pm" for part in walk(node)):
        return node
    if node.kind in ("list", "set"):
        members = [member for part in node.parts for member in _both_signs(part)]
        return Node(node.kind, tuple(members), node.data)
    return Node("list", _both_signs(node), ",")


def _both_signs(node: Node) -> tuple[Node, ...]:
    if not any(part.kind == "pm" for part in walk(node)):
        return (node,)
    return _signed(node, 1), _signed(node, -1)


def _signed(node: Node, sign: int) -> Node:
    parts = tuple(_signed(part, sign) for part in node.parts)
    if node.kind == "pm":
        return parts[0] if sign * node.data > 0 else Node("neg", parts)
    return Node(node.kind, parts, node.data)
