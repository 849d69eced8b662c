"""Options that several commands take: numbers that are checked, and a preset with overrides as ``grpo.py`` has."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError

if TYPE_CHECKING:
    from sota_grpo.config import Config


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


def add_config(parser: Any) -> None:
    """Add ``--config-name`` and the overrides to a command's parser."""
    from sota_grpo.assembly.compose import DEFAULT_CONFIG

    add = parser.add_argument
    add("--config-name", "-cn", metavar="NAME", default=DEFAULT_CONFIG, help=f"preset; default: {DEFAULT_CONFIG}")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="what grpo.py would be given; mode=async: grpo-async.py")


def config_of(options: argparse.Namespace) -> Config:
    """The config that the options name, composed and not validated.

    Raises:
        UserError: see :func:`sota_grpo.assembly.compose.compose`; or an override that is none.
    """
    from sota_grpo.assembly.compose import compose

    for given in options.overrides:
        if "=" not in given and not given.startswith("~"):
            raise UserError(f"{given!r} is not OPTION=VALUE; a preset is chosen with --config-name {given}.")
    return compose(options.config_name, options.overrides)
