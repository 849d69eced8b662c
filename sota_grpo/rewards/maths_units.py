"""Units at the end of an answer: read over where one answer has none, compared where both have one."""

from __future__ import annotations

import re
from typing import NamedTuple


class Measure(NamedTuple):
    """An answer without its unit: what is left, the base units, the factor of a word such as million."""

    text: str
    units: frozenset[str] = frozenset()
    factor: int = 1


_BASE_UNITS = {
    alias: symbol
    for symbol, aliases in {
        "cm": "cm centimeter centimeters centimetre centimetres",
        "mm": "mm millimeter millimeters millimetre millimetres",
        "km": "km kilometer kilometers kilometre kilometres kms",
        "m": "m meter meters metre metres",
        "in": "in inch inches",
        "ft": "ft foot feet",
        "yd": "yd yds yard yards",
        "mi": "mi mile miles",
        "kg": "kg kilogram kilograms kgs",
        "g": "g gram grams",
        "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces",
        "l": "l L liter liters litre litres",
        "ml": "ml mL milliliter milliliters millilitre millilitres",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks",
        "month": "month months",
        "year": "yr yrs year years",
        "$": "dollar dollars usd bucks",
        "cent": "cent cents",
        "deg": "degree degrees deg",
        "rad": "rad radian radians",
        "am": "am",
        "pm": "pm",
    }.items()
    for alias in aliases.split()
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
_LETTER_TAIL = re.compile(r"(?<=[\d}]) ?([mgsLlh])\Z")
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
    factor = 1
    for word in words:
        factor *= _FACTORS.get(word.lower(), 1)
    return Measure(text, units, factor)


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


def split_letter(measure: Measure) -> Measure:
    """Take a bare letter after a number for its unit, as the caller has found that it is no variable.

    >>> split_letter(Measure("5 m")), split_letter(Measure("5")).text
    (Measure(text='5', units=frozenset({'m'}), factor=1), '5')
    """
    tail = _LETTER_TAIL.search(measure.text)
    if tail is None:
        return measure
    return Measure(measure.text[: tail.start()], measure.units | {_BASE_UNITS[tail[1]]}, measure.factor)


def units_conflict(first: Measure, second: Measure) -> bool:
    """Whether both have a known unit, and neither is part of the other: ``5 km`` for ``5 km/h`` is let pass.

    >>> first = split_unit("5 cm")
    >>> units_conflict(first, split_unit("5\\\\text{ m}")), units_conflict(first, split_unit("5"))
    (True, False)
    """
    return not (first.units <= second.units or second.units <= first.units)
