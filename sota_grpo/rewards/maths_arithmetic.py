"""Arithmetic on untrusted numbers: exact on fractions, else with ``DIGITS`` digits, and never on anything large."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import mpmath

DIGITS = 50
MAX_BITS = 1 << 15  # of the numerator and denominator of an exact value, and of the exponent of any other
_MAX_FACTORIAL = 3000
_MAX_ANGLE_BITS = 200

_OF_INVERSE = {"acot": "atan", "asec": "acos", "acsc": "asin"}


class NoValue(ArithmeticError):
    """There is no value: a division by zero, a logarithm of zero, the square root of -1 among the reals."""


class TooCostly(ArithmeticError):
    """A value is too large, or the budget is spent."""


class Arithmetic:
    """Operations on values: a ``Fraction`` is exact, anything else is a number of mpmath with ``DIGITS`` digits.

    Args:
        budget: units of about a microsecond that all operations together may spend.

    Attributes:
        real: a value that is not real is no value.

    >>> Arithmetic(1000).power(Fraction(4, 9), Fraction(1, 2))
    Fraction(2, 3)
    >>> Arithmetic(1000).power(Fraction(10), Fraction(10**10))
    Traceback (most recent call last):
        ...
    sota_grpo.rewards.maths_arithmetic.TooCostly: a power is too large
    """

    def __init__(self, budget: int) -> None:
        self.real = True
        self._left = budget
        self._context = mpmath.MPContext()  # of its own, so that no other thread changes its precision
        self._context.dps = DIGITS
        self._tolerance = self._context.mpf(10) ** (10 - DIGITS)
        self._smallest = self._context.mpf(10) ** -DIGITS

    def spend(self, units: int) -> None:
        """Pay for work.

        Raises:
            TooCostly: the budget is spent.
        """
        self._left -= units
        if self._left < 0:
            raise TooCostly("the budget is spent")

    def constant(self, name: str) -> Any:
        """pi, e or i."""
        if name == "i":
            return self.checked(self._context.mpc(0, 1))
        return +self._context.pi if name == "pi" else +self._context.e

    def inexact(self, value: Any) -> Any:
        """The value as a number of mpmath."""
        return self._context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def is_real(self, value: Any) -> bool:
        """Whether a value is real."""
        return not isinstance(value, self._context.mpc)

    def close(self, left: Any, right: Any) -> bool:
        """Whether two values are equal: exactly, or to all but the last ten digits."""
        if isinstance(left, Fraction) and isinstance(right, Fraction):
            return left == right
        left, right = self.inexact(left), self.inexact(right)
        return bool(abs(left - right) <= max(abs(left), abs(right)) * self._tolerance + self._smallest)

    def checked(self, value: Any) -> Any:
        """The value, paid for.

        Raises:
            NoValue: it is not finite, or not real where it must be.
            TooCostly: it is too large, or the budget is spent.
        """
        if isinstance(value, Fraction):
            bits = max(value.numerator.bit_length(), value.denominator.bit_length())
            if bits > MAX_BITS:
                raise TooCostly("a number is too large")
            self.spend(1 + ((bits >> 9) ** 2 >> 2))
            return value
        self.spend(4)
        if isinstance(value, self._context.mpc):
            if not value.imag:
                value = value.real
            elif self.real:
                raise NoValue("it is not real")
        if not self._context.isfinite(value):
            raise NoValue("it is infinite")
        if value and abs(self._context.mag(value)) > MAX_BITS:
            raise TooCostly("a number is too large")
        return value

    def add(self, terms: Sequence[Any]) -> Any:
        """The sum."""
        total: Any = terms[0]
        for term in terms[1:]:
            exact = isinstance(total, Fraction) and isinstance(term, Fraction)
            total = self.checked(total + term if exact else self.inexact(total) + self.inexact(term))
        return total

    def multiply(self, factors: Sequence[Any]) -> Any:
        """The product."""
        product: Any = factors[0]
        for factor in factors[1:]:
            exact = isinstance(product, Fraction) and isinstance(factor, Fraction)
            product = self.checked(product * factor if exact else self.inexact(product) * self.inexact(factor))
        return product

    def divide(self, upper: Any, lower: Any) -> Any:
        """The quotient."""
        if not lower:
            raise NoValue("division by zero")
        exact = isinstance(upper, Fraction) and isinstance(lower, Fraction)
        return self.checked(upper / lower if exact else self.inexact(upper) / self.inexact(lower))

    def power(self, base: Any, exponent: Any) -> Any:
        """``base ** exponent``; an odd root of a negative number is real where values must be."""
        if not base:
            if not self.is_real(exponent) or exponent <= 0:
                raise NoValue("a power of zero")
            return base
        size = abs(self._context.mag(self.inexact(base))) + 1
        if abs(self.inexact(exponent)) * size > MAX_BITS:
            raise TooCostly("a power is too large")
        if isinstance(exponent, Fraction) and exponent.denominator == 1:
            self.spend(10)
            exact = isinstance(base, Fraction)
            return self.checked(base ** int(exponent) if exact else self.inexact(base) ** int(exponent))
        if isinstance(base, Fraction) and isinstance(exponent, Fraction) and base > 0:
            root = self._exact_root(base, exponent.denominator)
            if root is not None:
                return self.power(root, Fraction(exponent.numerator))
        if self.real and self.is_real(base) and base < 0:
            if not isinstance(exponent, Fraction) or exponent.denominator % 2 == 0:
                raise NoValue("a root of a negative number")
            return self.multiply(
                [Fraction((-1) ** (exponent.numerator % 2)), self.power(self.negative(base), exponent)]
            )
        self.spend(20)
        return self.checked(self._context.power(self.inexact(base), self.inexact(exponent)))

    def negative(self, value: Any) -> Any:
        """Minus the value."""
        return -value

    def _exact_root(self, base: Fraction, degree: int) -> Fraction | None:
        """The root of a fraction, if it is a fraction."""
        if degree > 64 or max(base.numerator, base.denominator).bit_length() > 1024:
            return None
        parts = []
        for number in (base.numerator, base.denominator):
            self.spend(10)
            guess = int(self._context.nint(self._context.root(number, degree)))
            if guess**degree != number:
                return None
            parts.append(guess)
        return Fraction(parts[0], parts[1])

    def factorial(self, value: Any) -> Any:
        """``n!``, by the gamma function where ``n`` is not whole."""
        if not self.is_real(value) or abs(value) > _MAX_FACTORIAL:
            raise TooCostly("a factorial is too large")
        if isinstance(value, Fraction) and value.denominator == 1:
            if value < 0:
                raise NoValue("a factorial of a negative number")
            self.spend(10 + int(value))
            return self.checked(Fraction(math.factorial(int(value))))
        self.spend(300)
        return self.checked(self._context.factorial(self.inexact(value)))

    def binomial(self, upper: Any, lower: Any) -> Any:
        """The number of subsets of size ``lower``."""
        whole = [isinstance(value, Fraction) and value.denominator == 1 for value in (upper, lower)]
        if all(whole) and 0 <= upper <= _MAX_FACTORIAL and lower >= 0:
            self.spend(10 + int(upper))
            return self.checked(Fraction(math.comb(int(upper), int(lower))))
        lower_part = self.multiply([self.factorial(lower), self.factorial(self.add([upper, self.negative(lower)]))])
        return self.divide(self.factorial(upper), lower_part)

    def absolute(self, value: Any) -> Any:
        """The absolute value."""
        return self.checked(abs(value))

    def floor(self, value: Any) -> Any:
        """The largest integer that is not larger."""
        if not self.is_real(value):
            raise NoValue("it is not real")
        return self.checked(
            Fraction(math.floor(value) if isinstance(value, Fraction) else int(self._context.floor(value)))
        )

    def ceiling(self, value: Any) -> Any:
        """The smallest integer that is not smaller."""
        return self.negative(self.floor(self.negative(value)))

    def radians(self, degrees: Any) -> Any:
        """An angle in radians."""
        return self.checked(self.inexact(degrees) * self._context.pi / 180)

    def logarithm(self, value: Any, base: Any = None) -> Any:
        """The logarithm to ``base``, natural without one."""
        if not value or (self.real and value < 0):
            raise NoValue("a logarithm of what is not positive")
        self.spend(20)
        natural = self.checked(self._context.log(self.inexact(value)))
        return natural if base is None else self.divide(natural, self.logarithm(base))

    def function(self, name: str, arguments: Sequence[Any]) -> Any:
        """An elementary function of one argument; ``log`` may have a base, and is to base 10 without one."""
        if name in ("log", "ln"):
            base = arguments[1] if len(arguments) > 1 else Fraction(10) if name == "log" else None
            return self.logarithm(arguments[0], base)
        value = self.inexact(arguments[0])
        limit = 15 if name in ("exp", "sinh", "cosh", "tanh") else _MAX_ANGLE_BITS
        if value and self._context.mag(value) > limit:
            raise TooCostly("an argument is too large")
        self.spend(30)
        if name in _OF_INVERSE:
            return self.function(_OF_INVERSE[name], [self.divide(Fraction(1), value)])
        known: Callable[[Any], Any] = getattr(self._context, name)
        try:
            return self.checked(known(value))
        except (ZeroDivisionError, ValueError) as error:
            raise NoValue(str(error)) from error
