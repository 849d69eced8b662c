"""Numbers as options of commands take them: anything else is one sentence that names the option."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(what: str, *, least: int = 1) -> Callable[[str], int]:
    """The type of an option that counts something.

    >>> whole("a number of tokens")("12")
    12
    >>> whole("a number of tokens")("none")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'none' is not a number of tokens, 1 or more
    """

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}, {least} or more")
        return int(text)

    return parsed


def above_zero(what: str) -> Callable[[str], float]:
    """The type of an option that measures something.

    >>> above_zero("a time")("0.5")
    0.5
    >>> above_zero("a time")("inf")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'inf' is not a time above 0
    """

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0")
        return value

    return parsed
