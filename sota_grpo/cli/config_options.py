"""The options of a command that works on a config: a preset and overrides, as ``grpo.py`` takes them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError

if TYPE_CHECKING:
    from sota_grpo.config import Config


def add_config(parser: Any) -> None:
    """Add ``--config-name`` and the overrides to a command's parser."""
    from sota_grpo.compose import DEFAULT_CONFIG

    add = parser.add_argument
    add("--config-name", "-cn", metavar="NAME", default=DEFAULT_CONFIG, help=f"preset; default: {DEFAULT_CONFIG}")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="what grpo.py would be given; mode=async: grpo-async.py")


def config_of(options: argparse.Namespace) -> Config:
    """The config that the options name, composed and not validated.

    Raises:
        UserError: see :func:`sota_grpo.compose.compose`; or an override that is none.
    """
    from sota_grpo.compose import compose

    for given in options.overrides:
        if "=" not in given and not given.startswith("~"):
            raise UserError(f"{given!r} is not OPTION=VALUE; a preset is chosen with --config-name {given}.")
    return compose(options.config_name, options.overrides)
