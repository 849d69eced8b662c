"""The values of expressions from strangers: exact, else to ``DIGITS`` digits, never large; sets of them; their units.

Two expressions are equal when they agree at pseudo-random points (Schwartz 1980, Zippel 1979): at rational points
polynomials and rational functions are compared exactly, the rest to 40 digits. Only trees of
:class:`~sota_grpo.rewards.maths.parse.Node` are evaluated, and each step is paid for from one budget.
"""

from __future__ import annotations

import bisect
import math
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any, NamedTuple

import mpmath

from sota_grpo.rewards.maths.parse import CIRCULAR, IMAGINARY, INFINITY, Node, variables, walk, without_sign

DIGITS = 50
MAX_BITS = 1 << 15  # of the numerator and denominator of an exact value, and of the exponent of any other
_MAX_FACTORIAL = 3000
_MAX_ANGLE_BITS = 200

_OF_INVERSE = {"acot": "atan", "asec": "acos", "acsc": "asin"}


class NoValue(ArithmeticError):
    """There is no value: a division by zero, a logarithm of zero, the square root of -1 among the reals."""


class TooCostly(ArithmeticError):
    """A value is too large, or the budget is spent."""


class NoNumber(ValueError):
    """The tree is no expression whose value is a number: a set, a relation, a matrix."""


BUDGET = 200_000  # units of about a microsecond that all operations of a comparison may spend

Point = Mapping[str, Fraction]
_AGREEMENTS, _LEAST_AGREEMENTS = 5, 2
_INSIDE: Mapping[str, Callable[[Values, list[Any]], Any]] = {  # operations on the values of the parts, by kind
    "add": lambda calculate, values: calculate.add(values),
    "mul": lambda calculate, values: calculate.multiply(values),
    "neg": lambda calculate, values: -values[0],
    "div": lambda calculate, values: calculate.divide(*values),
    "ratio": lambda calculate, values: calculate.divide(*values),
    "pow": lambda calculate, values: calculate.power(*values),
    "root": lambda calculate, values: calculate.power(values[0], calculate.divide(Fraction(1), values[1])),
    "fact": lambda calculate, values: calculate.factorial(values[0]),
    "binom": lambda calculate, values: calculate.binomial(*values),
    "abs": lambda calculate, values: calculate.checked(abs(values[0])),
    "floor": lambda calculate, values: calculate.floor(values[0]),
    "ceil": lambda calculate, values: -calculate.floor(-values[0]),
    "pct": lambda calculate, values: calculate.divide(values[0], Fraction(100)),
}


class Values:
    """Evaluates trees, all from one budget: a ``Fraction`` is exact, else a value is a number of mpmath.

    Attributes:
        real: a value that is not real is no value.

    >>> from sota_grpo.rewards.maths.parse import parse_answer
    >>> Values().value(parse_answer("\\\\frac{2^{10}}{6!}")), Values().value(parse_answer("\\\\sqrt{4/9}"))
    (Fraction(64, 45), Fraction(2, 3))
    >>> Values().equal(parse_answer("(x+1)^2"), parse_answer("x^2+2x+1"))
    True
    >>> Values().value(parse_answer("10^{10^{10}}"))
    Traceback (most recent call last):
        ...
    sota_grpo.rewards.maths.values.TooCostly: a power is too large
    """

    def __init__(self) -> None:
        self.real = True
        self._left = BUDGET
        self._angles = 0  # circular functions around the node at hand
        self._context = mpmath.MPContext()  # of its own, so that no other thread changes its precision
        self._context.dps = DIGITS
        self._tolerance = self._context.mpf(10) ** (10 - DIGITS)
        self._smallest = self._context.mpf(10) ** -DIGITS

    def spend(self, units: int) -> None:
        """Pay for work; TooCostly where the budget is spent."""
        self._left -= units
        if self._left < 0:
            raise TooCostly("the budget is spent")

    def inexact(self, value: Any) -> Any:
        """The value as a number of mpmath."""
        return self._context.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def is_real(self, value: Any) -> bool:
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

    def _combined(self, operation: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """Exact where both are."""
        if not (isinstance(left, Fraction) and isinstance(right, Fraction)):
            left, right = self.inexact(left), self.inexact(right)
        return self.checked(operation(left, right))

    def add(self, terms: Sequence[Any]) -> Any:
        return reduce(partial(self._combined, operator.add), terms)

    def multiply(self, factors: Sequence[Any]) -> Any:
        return reduce(partial(self._combined, operator.mul), factors)

    def divide(self, upper: Any, lower: Any) -> Any:
        if not lower:
            raise NoValue("division by zero")
        return self._combined(operator.truediv, upper, lower)

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
            return self.multiply([Fraction((-1) ** (exponent.numerator % 2)), self.power(-base, exponent)])
        self.spend(20)
        return self.checked(self._context.power(self.inexact(base), self.inexact(exponent)))

    def _exact_root(self, base: Fraction, degree: int) -> Fraction | None:
        """The root of a fraction, if it is a fraction."""
        if degree > 64 or max(base.numerator, base.denominator).bit_length() > 1024:
            return None
        roots = []
        for number in (base.numerator, base.denominator):
            self.spend(10)
            roots.append(int(self._context.nint(self._context.root(number, degree))))
            if roots[-1] ** degree != number:
                return None
        return Fraction(*roots)

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
        divisor = self.multiply([self.factorial(lower), self.factorial(self.add([upper, -lower]))])
        return self.divide(self.factorial(upper), divisor)

    def floor(self, value: Any) -> Any:
        """The largest integer that is not larger."""
        if not self.is_real(value):
            raise NoValue("it is not real")
        whole = math.floor(value) if isinstance(value, Fraction) else int(self._context.floor(value))
        return self.checked(Fraction(whole))

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
        try:
            return self.checked(getattr(self._context, name)(value))
        except (ZeroDivisionError, ValueError) as error:
            raise NoValue(str(error)) from error

    def value(self, node: Node, point: Point | None = None) -> Any:
        """The value, a ``Fraction`` where it is known exactly, at the given values of the variables.

        Raises:
            NoValue: there is none here.
            NoNumber: the tree has no number as its value, or a variable has none.
            TooCostly: it is too large, or the budget is spent.
        """
        self.spend(1)
        kind = node.kind
        if kind == "num":
            return node.data[0]
        if kind in ("var", "text") and point is not None:
            return point[f"{kind} {node.data}"]
        if kind == "const" and node != INFINITY:
            return self.checked(self._context.mpc(0, 1)) if node.data == "i" else +getattr(self._context, node.data)
        if kind == "fn":
            angle = node.data in CIRCULAR
            self._angles += angle
            arguments = [self.value(part, point) for part in node.parts]
            self._angles -= angle
            return self.function(node.data, arguments)
        if kind == "deg":
            degrees = self.value(node.parts[0], point)
            return self.checked(self.inexact(degrees) * self._context.pi / 180) if self._angles else degrees
        if kind not in _INSIDE or (kind == "ratio" and len(node.parts) > 2):
            raise NoNumber(f"{kind} has no number as its value")
        return _INSIDE[kind](self, [self.value(part, point) for part in node.parts])

    def equal(self, left: Node, right: Node) -> bool:
        """Whether two expressions are equal wherever both are defined.

        Real values are compared where there are any: ``\\\\sqrt{x^2}`` equals ``|x|`` and not ``x``.

        Raises:
            NoNumber: one of them is no expression.
            TooCostly: they cannot be compared within the budget.
        """
        return self._agree(left, right, self.close)

    def proportional(self, left: Node, right: Node, *, same_sign: bool) -> bool:
        """Whether ``left = c * right`` for one constant ``c``, neither zero nor (if asked) negative.

        Raises:
            NoNumber, TooCostly: as in :meth:`equal`.
        """
        close, ratios = self.close, []

        def constant_ratio(first: Any, second: Any) -> bool:
            if close(first, Fraction(0)) or close(second, Fraction(0)):
                return close(first, second)
            ratios.append(self.divide(first, second))
            positive = self.is_real(ratios[-1]) and ratios[-1] > 0
            return close(ratios[0], ratios[-1]) and (positive or not same_sign)

        return self._agree(left, right, constant_ratio) and bool(ratios)

    def _agree(self, left: Node, right: Node, same: Callable[[Any, Any], bool]) -> bool:
        names = sorted(variables(left) | variables(right))
        for real in (False,) if IMAGINARY in (*walk(left), *walk(right)) else (True, False):
            self.real = real
            agreements = 0
            for point in _points(names):
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


def _points(names: list[str]) -> Iterator[dict[str, Fraction]]:
    """Pseudo-random values of the variables, the same for the same names: positive, negative, whole and small ones."""
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


MAX_PIECES = 64
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}

Cut = tuple[Any, bool]  # just below a number, or just above it
Piece = tuple[Cut, Cut]  # what lies between two cuts; a point lies between those around it
EVERYTHING: tuple[Piece, ...] = (((-math.inf, True), (math.inf, False)),)


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
        self._ends: list[Any] = []  # in order; numbers that are close are one of them

    def equal(self, left: Node, right: Node) -> bool | None:
        """Whether two trees say the same set of reals (of the same variable); None if one of them says none."""
        if all(node.kind == "set" or (node.kind == "seq" and node.data == "()") for node in (left, right)):
            return None  # plain pairs and finite sets have other rules: (1,2) may be a point
        first, second = self.find(left), self.find(right)
        if first is None or second is None:
            return None
        names = [variables(node) for node in (left, right)]
        return first == second and (not all(names) or names[0] == names[1])

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
            return (((low, node.data[0] != "[" or low == -math.inf), (high, node.data[1] == "]" and high != math.inf)),)
        if kind == "set":
            points = [self._end(part) for part in parts]
            return _merged([((point, False), (point, True)) for point in points])
        if kind == "union":
            return _merged([*self.read(parts[0]), *self.read(parts[1])])
        if kind == "inter":
            return _intersection(self.read(parts[0]), self.read(parts[1]))
        if kind == "minus":
            return _intersection(self.read(parts[0]), _complement(self.read(parts[1])))
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
        union = _merged([piece for pieces in sets for piece in pieces])
        return union if node.data == "or" else reduce(_intersection, sets) or union

    def _read_relation(self, node: Node) -> tuple[Piece, ...]:
        if node.data == ("in",) and node.parts[0].kind == "var":
            return self.read(node.parts[1])
        if len(variables(node)) != 1 or any(sign not in FLIPPED for sign in node.data):
            raise NoNumber("no inequality in one variable")
        return reduce(_intersection, map(self._half_line, node.parts, node.data, node.parts[1:]), EVERYTHING)

    def _half_line(self, left: Node, sign: str, right: Node) -> tuple[Piece, ...]:
        """The solutions of ``left sign right`` where that is solved already: a variable, or minus it, and a bound."""
        if not variables(left):
            left, sign, right = right, FLIPPED[sign], left
        end = self._end(right, -1 if left.kind == "neg" else 1)
        if left.kind == "neg":
            left, sign = left.parts[0], FLIPPED[sign]
        if left.kind != "var":
            raise NoNumber("it is not solved")
        if sign == "!=":
            return _complement((((end, False), (end, True)),))
        if sign[0] == "<":
            return (((-math.inf, True), (end, sign == "<=" and end != math.inf)),)
        return (((end, sign == ">" or end == -math.inf), (math.inf, False)),)

    def _end(self, node: Node, sign: int = 1) -> Any:
        """The number, with ``sign``, that a tree says; of numbers that are close the one that was read first."""
        if without_sign(node) == INFINITY:
            return sign * (-math.inf if node.kind == "neg" else math.inf)
        if variables(node):
            raise NoNumber("an end depends on a variable")
        self._values.real = True
        end = sign * self._values.inexact(self._values.value(node))
        at = bisect.bisect(self._ends, end)
        for known in self._ends[max(at - 1, 0) : at + 1]:
            if self._values.close(known, end):
                return known
        self._ends.insert(at, end)
        return end


def _merged(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    merged: list[Piece] = []
    for low, high in sorted(pieces):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    if len(merged) > MAX_PIECES:
        raise NoNumber("too many intervals")
    return tuple(merged)


def _complement(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    ((lowest, highest),) = EVERYTHING
    cuts = [lowest, *(cut for piece in pieces for cut in piece), highest]
    return tuple((low, high) for low, high in zip(cuts[::2], cuts[1::2]) if low < high)


def _intersection(left: Sequence[Piece], right: Sequence[Piece]) -> tuple[Piece, ...]:
    return _complement(_merged([*_complement(left), *_complement(right)]))


class Measure(NamedTuple):
    """An answer without its unit: what is left, the base units, the factor of a word such as million."""

    text: str
    units: frozenset[str] = frozenset()
    factor: int = 1


_UNITS = """
cm centimeter centimeters centimetre centimetres; mm millimeter millimeters millimetre millimetres
km kilometer kilometers kilometre kilometres kms; m meter meters metre metres; in inch inches; ft foot feet
yd yds yard yards; mi mile miles; kg kilogram kilograms kgs; g gram grams; lb lbs pound pounds; oz ounce ounces
l L liter liters litre litres; ml mL milliliter milliliters millilitre millilitres
s sec secs second seconds; min mins minute minutes; h hr hrs hour hours; day days; week weeks; month months
year years yr yrs; $ dollar dollars usd bucks; cent cents; deg degree degrees; rad radian radians; am; pm
"""
_BASE_UNITS = {
    alias: symbol
    for symbol, *others in map(str.split, re.split(r"[;\n]", _UNITS.strip()))
    for alias in (symbol, *others)
}
_OTHER_UNITS = {
    *("per", "square", "squared", "cubic", "cubed", "sq", "sq.", "cu", "unit", "units", "mph", "kph"),
    *("point", "points", "pts"),
}
_FACTORS = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNITS = {
    *("and", "or", "if", "for", "when", "where", "is", "not", "mod"),
    *("e", "i", "pi", "inf", "sin", "cos", "tan", "log", "ln"),
}
_POWER = r"(?:\s?\^\s?(?:\d|\{\s?-?\d\s?\}))?"
_TEXT_TAIL = re.compile(rf"\s?\\text\s?\{{([^{{}}]*)\}}{_POWER}\Z")
_PLAIN_TAIL = re.compile(rf"(?<=[\d}}) ])([A-Za-z][A-Za-z./ ]{{0,60}}?){_POWER}\Z")
_WORD = re.compile(r"[A-Za-z.]+")
_MODULUS = re.compile(r" ?\(?(?:\\p?mod|\\bmod|\\text ?\{ ?mod ?\}) ?\{? ?(\d{1,9}) ?\}?\)?\Z")
_MAX_TAILS = 4


def split_unit(text: str) -> Measure:
    """Take the unit off a tidy answer; a text that is all words has none.

    >>> split_unit("5\\\\text{ cm}^2"), split_unit("12 square feet").text, split_unit("3\\\\text{ million}").factor
    (Measure(text='5', units=frozenset({'cm'}), factor=1), '12', 1000000)
    >>> split_unit("\\\\text{east}").text, split_unit("2 x").text, split_unit("7 apples").text
    ('\\\\text{east}', '2 x', '7')
    """
    words: list[str] = []
    modulus = _MODULUS.search(text)
    text = text[: modulus.start()].rstrip() if modulus else text
    for _ in range(_MAX_TAILS):
        tail = _TEXT_TAIL.search(text) or _PLAIN_TAIL.search(text)
        rest = text[: tail.start()].rstrip() if tail else ""
        if tail is None or not _is_unit(tail, rest):
            break
        words += _WORD.findall(tail[1])
        text = rest
    units = frozenset(unit for unit in map(_base_unit, words) if unit)
    units |= {f"mod {modulus[1]}"} if modulus else frozenset()
    units |= {unit for sign, unit in (("\\degree", "deg"), ("\\%", "%")) if text.endswith(sign)}
    return Measure(text, units, math.prod(_FACTORS.get(word.lower(), 1) for word in words))


def _is_unit(tail: re.Match[str], rest: str) -> bool:
    """Whether the words at the end of an answer are a unit of what stands before them."""
    words = _WORD.findall(tail[1])
    if not rest or rest[-1] in "=<>+-*/^_,;(:" or "\\text" in rest or any(word.lower() in _NO_UNITS for word in words):
        return False
    in_text = tail[0].lstrip().startswith("\\text")
    if all(_base_unit(word) or word.lower() in _OTHER_UNITS or word.lower() in _FACTORS for word in words):
        return in_text or "/" in tail[1] or any(len(word) > 1 for word in words)
    if in_text:
        return any(char.isdigit() for char in rest) and any(len(word) > 1 for word in words)
    return rest[-1].isdigit() and tail.string[tail.start() - 1] == " " and all(len(word) > 2 for word in words)


def _base_unit(word: str) -> str | None:
    return _BASE_UNITS.get(word) or _BASE_UNITS.get(word.lower())
