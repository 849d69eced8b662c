"""Compare the parsed trees of two answers: ordered and unordered collections, relations, and sets of real numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import reduce
from itertools import pairwise
from typing import Any

from sota_grpo.rewards.maths.parse import INFINITY, Incomparable, Node, variables
from sota_grpo.rewards.maths.values import Values

MAX_MEMBERS = 60  # most members of an unordered list or set, and most ends of intervals
LEAST_DECIMALS = 6  # fewest decimal places of a rounded value that is accepted for an exact one

Reals = Callable[[Any], bool]  # membership test of a set of real numbers
_COLLECTIONS = {"list", "set", "seq", "matrix", "sets", "reals"}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_HOLDS = {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge, "!=": operator.ne}
_JOINED = {"\\cup": operator.or_, "\\cap": operator.and_, "\\setminus": operator.gt}  # operators on two memberships
_FUNCTION_NAMES = frozenset("fghpqrstuvwFGHPQRSTVAC")
_INFINITE = {INFINITY: math.inf, Node("neg", (INFINITY,)): -math.inf}


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
        for one, other in ((gold, answer), (answer, gold)):
            if one.kind == "pct" != other.kind and self.same(one.children[0], other):  # 50 and 0.5 are accepted for 50%
                return True
        return self._values.equal(gold, answer) or self._rounded(gold, answer) or self._rounded(answer, gold)

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
        """Return the solutions of an inequality that is already solved for a name (or minus a name)."""
        if not variables(left):
            left, sign, right = right, _FLIPPED[sign], left
        if left.kind == "neg":
            left, sign, right = left.children[0], _FLIPPED[sign], Node("neg", (right,))
        if not _is_name(left):
            raise Incomparable("the inequality is not solved for a name")
        self._names.add(left)
        return self._bounded(sign, right)

    def _bounded(self, sign: str, bound: Node) -> Reals:
        end, holds = self._end(bound), _HOLDS[sign]
        return lambda x: holds(x, end)

    def _end(self, node: Node) -> Any:
        """Return the number that a tree denotes; among close numbers always the first one seen."""
        if node in _INFINITE:
            return _INFINITE[node]
        if variables(node) or len(self._ends) > MAX_MEMBERS:
            raise Incomparable(
                f"an interval bound or a set member has a variable, or there are more than {MAX_MEMBERS} of them"
            )
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
