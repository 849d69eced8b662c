"""Sets of real numbers: intervals, points, unions, complements, and what an inequality in one variable says."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from sota_grpo.rewards.maths_arithmetic import NoValue
from sota_grpo.rewards.maths_tokens import Node
from sota_grpo.rewards.maths_value import NoNumber, Values, variables

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

    >>> from sota_grpo.rewards.maths_parse import parse_answer
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
        first, second = self._read_if_set(left), self._read_if_set(right)
        if first is None or second is None:
            return None
        names = [variables(node) for node in (left, right)]
        if names[0] and names[1] and names[0] != names[1]:
            return False
        return len(first) == len(second) and all(map(self._same_piece, first, second))

    def is_read(self, node: Node) -> bool:
        """Whether a tree says a set of real numbers."""
        return self._read_if_set(node) is not None

    def _read_if_set(self, node: Node) -> tuple[Piece, ...] | None:
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
