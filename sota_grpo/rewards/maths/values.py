"""Evaluate untrusted expressions, exactly or to ``DIGITS`` digits, with bounds on size and computing time.

Two expressions count as equal if they agree at pseudo-random points (Schwartz 1980, Zippel 1979): polynomials and
rational functions are compared exactly, at rational points; other expressions to 40 digits.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any

import mpmath

from sota_grpo.rewards.maths.parse import CIRCULAR, IMAGINARY, INFINITY, Incomparable, Node, variables, walk

DIGITS = 50
MAX_BITS = 1 << 15  # of numerator and denominator of an exact value, and of the exponent of an inexact one
BUDGET = 200_000  # units, about 1 µs each, that all operations of one comparison may cost
_MAX_FACTORIAL, _MAX_ARGUMENT_BITS, _MAX_EXPONENT_BITS = 3000, 200, 15
_POINTS, _LEAST_AGREEMENTS = 8, 2


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
            "add": lambda *terms: reduce(partial(self._exact, operator.add), terms),
            "mul": lambda *factors: reduce(partial(self._exact, operator.mul), factors),
            "neg": operator.neg,
            "div": partial(self._exact, operator.truediv),
            "pct": lambda value: self._exact(operator.truediv, value, Fraction(100)),
            "pow": self._power,
            "fact": self._factorial,
            "abs": abs,
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

    def _exact(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Return ``operation(left, right)``, exact if both operands are."""
        if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
            left, right = self.inexact(left), self.inexact(right)
        return self._checked(operation(left, right))

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
            return self._exact(operator.truediv, self._function("ln", argument), self._function("ln", base))
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
                        ratio = self._exact(operator.truediv, first, second) if ratio is None else ratio
                        second = self._exact(operator.mul, ratio, second)
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
