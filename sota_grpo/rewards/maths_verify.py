"""Math-Verify as the last judge: matrices that are added or multiplied, greatest and least of lists of numbers.

Math-Verify parses LaTeX with a grammar (latex2sympy2_extended, which evaluates no code) and lets SymPy compare. Of it,
the extraction of plain expressions is left out, because that one hands text to ``sympy.parse_expr``, which is Python's
``eval``; its timeouts are left out too, because they are signals, which exist in the main thread alone. SymPy takes
minutes over many an innocent expression (products, integrals, high powers), so it is shown only what is small, flat
and of these few kinds.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable

_MAX_CHARS, _MAX_TOKENS, _MAX_DEPTH, _MAX_POWERS, _MAX_DIGITS = 160, 80, 5, 2, 4

_OPERATORS = ("gcd", "lcm", "max", "min", "det")
_OURS_NOT = re.compile(r"\\(?:begin|gcd|lcm|max|min|det)\b|\\(?:operatorname|text) ?\{(?:gcd|lcm|max|min|det)\}")
_COMMANDS = {"frac", "sqrt", "pi", "cdot", "times", "div", *_OPERATORS, "begin", "end", "text", "operatorname"}
_NAMES = {*_OPERATORS, "pmatrix", "bmatrix"}
_NAMED = re.compile(r"\\(?:operatorname|text|begin|end) ?(?:\{([^{}]*)\})?")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\d+|[A-Za-z]|\S")
_SLOW = re.compile(r"\^ ?(?!\d(?!\d)|\{ ?-?\d ?\})|\\sqrt ?\{[^}]*\\(?:begin|det)")  # large powers, roots of matrices


def verified(gold: str, answer: str) -> bool:
    """Whether Math-Verify calls two tidy answers equal; False where it is not asked.

    >>> verified("12", "\\\\gcd(24, 36)"), verified("12", "\\\\int_0^{12} dx")
    (True, False)
    """
    asked = _OURS_NOT.search(gold) or _OURS_NOT.search(answer)
    if not asked or not (_is_harmless(gold) and _is_harmless(answer)):
        return False
    read, compare = _math_verify()
    try:
        return bool(compare(read(f"${gold}$"), read(f"${answer}$")))
    except Exception:  # model text reaches two foreign libraries here; where they fail the answers are not equal
        return False


def _is_harmless(text: str) -> bool:
    """Whether a text is short and flat, has known commands only, small numbers and no powers but small ones."""
    tokens = _TOKEN.findall(text)
    commands = {token[1:] for token in tokens if token[0] == "\\" and token[1:].isalpha()}
    if len(text) > _MAX_CHARS or len(tokens) > _MAX_TOKENS or not commands <= _COMMANDS or "!" in tokens:
        return False
    if not set(_NAMED.findall(text)) <= _NAMES or tokens.count("^") > _MAX_POWERS or _SLOW.search(text):
        return False
    depth = deepest = 0
    for token in tokens:
        depth += (token in ("{", "(", "[")) - (token in ("}", ")", "]"))
        deepest = max(deepest, depth)
    return deepest <= _MAX_DEPTH and not any(len(token) > _MAX_DIGITS for token in tokens if token.isdigit())


@functools.cache
def _math_verify() -> tuple[Callable[[str], list[object]], Callable[[list[object], list[object]], bool]]:
    """Math-Verify's two functions, imported when first needed: SymPy takes a while."""
    from math_verify import LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    read = functools.partial(
        parse, extraction_config=(LatexExtractionConfig(),), fallback_mode="no_fallback", parsing_timeout=None
    )
    return read, functools.partial(verify, timeout_seconds=None)
