"""The command ``sota-grpo``: tools around a training run, one module each, and options that several take."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sota_grpo.config.secrets import without_tokens
from sota_grpo.errors import UserError, run_command

if TYPE_CHECKING:
    from sota_grpo.config import Config


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one tool; mistakes of the user are one sentence and exit code 2, Ctrl-C is one and 130."""
    argv = sys.argv[1:] if arguments is None else arguments
    run_command("sota-grpo", lambda: _run(without_tokens(argv)), "nothing was written")


def _run(arguments: Sequence[str]) -> int:
    from sota_grpo.cli import check, doctor, estimate, eval, export, replay, report, score, sweep, train

    parser = argparse.ArgumentParser(prog="sota-grpo", description="Tools around GRPO post-training.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (train, doctor, check, estimate, eval, report, replay, export, score, sweep):
        command.add_command(commands)
    if arguments[:1] == [train.QUERY]:  # the shell's question, which comes without a command
        return train.complete(arguments, commands.choices)
    options, left = parser.parse_known_args(arguments)  # which takes no overrides (OPTION=VALUE) behind options
    if left and not (hasattr(options, "overrides") and all("=" in one and one[0] != "-" for one in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options.run(options)


def add_parser(
    commands: Any, name: str, summary: str, description: str | None, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """The parser of one command, which is done by ``run``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(name, help=summary, description=description, formatter_class=raw)
    parser.set_defaults(run=run)
    return parser


def whole(what: str, *, least: int = 1) -> Callable[[str], int]:
    """The type of an option that counts something.

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
    """The type of an option that measures something."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} above 0")
        return value

    return parsed


def add_trust(parser: Any) -> None:
    """Add ``--trust-run`` to the parser of a command that reads a run."""
    parser.add_argument(
        "--trust-run",
        action="store_true",
        help="run the code, and ask the server, that the run's own config names; what it is is printed",
    )


def tell_trust(options: argparse.Namespace, config: Config) -> None:
    """Print what ``--trust-run`` lets the ``config`` of the run do."""
    from sota_grpo.assembly.compose import needs_consent

    for option, act in needs_consent(config).items() if options.trust_run else ():
        print(f"--trust-run: the run's config may {act} ({option}).", file=sys.stderr)


def add_config(parser: Any) -> None:
    """Add ``--config-name`` and the overrides to a command's parser."""
    from sota_grpo.assembly.compose import DEFAULT_CONFIG

    add = parser.add_argument
    add("--config-name", "-cn", metavar="NAME", default=DEFAULT_CONFIG, help=f"preset; default: {DEFAULT_CONFIG}")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="what grpo.py would be given; mode=async: grpo-async.py")


def config_of(options: argparse.Namespace) -> Config:
    """The config that the options name, composed and not validated; UserError where there is none."""
    from sota_grpo.assembly.compose import compose

    for override in options.overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override!r} is not OPTION=VALUE; a preset is chosen with --config-name {override}.")
    return compose(options.config_name, options.overrides)
