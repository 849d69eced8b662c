"""The command ``sota-grpo``: training, and tools for runs, models and data."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sota_grpo.config.secrets import take_tokens, without_tokens
from sota_grpo.errors import UserError, run_command

if TYPE_CHECKING:
    from sota_grpo.config import Config

ASYNC = "--async"
_NO_PREFIX = "\0"  # begins no argument, so argparse passes all arguments to Hydra


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a ``sota-grpo`` command and exit: 2 after a user's mistake, 1 after a failure, 130 after Ctrl-C, else 0."""
    argv = sys.argv[1:] if arguments is None else arguments
    run_command("sota-grpo", lambda: _run(argv), "nothing was written")


def _run(arguments: Sequence[str]) -> int:
    from sota_grpo.cli import configs, doctor, responses, runs

    parser = argparse.ArgumentParser(prog="sota-grpo", description="GRPO post-training, and tools for runs and models.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train", help="train, as grpo.py does; --async: as grpo-async.py", prefix_chars=_NO_PREFIX, add_help=False
    )
    train.add_argument("arguments", nargs="*")
    train.set_defaults(run=lambda options: _train(options.arguments))
    for module in (doctor, configs, responses, runs):
        module.add_command(commands)
    # parse_known_args takes no overrides (OPTION=VALUE) after options
    options, left = parser.parse_known_args(take_tokens(arguments))
    if left and not (hasattr(options, "overrides") and all("=" in word and word[0] != "-" for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    overrides = without_tokens([*getattr(options, "overrides", ()), *left])  # other arguments are texts of the user
    if hasattr(options, "overrides"):
        options.overrides = overrides
    return options.run(options)


def _train(arguments: Sequence[str]) -> int:
    """Train as ``grpo.py`` does: pass the arguments to Hydra, which exits with the exit code."""
    # OpenMP threads that spin while they wait slow a busy machine down by 10x and more; read when torch loads
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from sota_grpo.run.entry import entry

    if "-sc" in arguments or "--shell-completion" in arguments:
        raise UserError("sota-grpo has no completion by the shell; grpo.py has: python grpo.py -sc install=bash.")
    sys.argv[1:] = [argument for argument in arguments if argument != ASYNC]
    entry(mode="async" if ASYNC in arguments else "sync", command="sota-grpo train [--async]")
    return 0


def add_parser(
    commands: Any, name: str, summary: str, description: str | None, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    """Add and return a command's parser; ``description`` is for its ``--help``; ``run`` returns the exit code."""
    raw, text = argparse.RawDescriptionHelpFormatter, inspect.cleandoc(description or "")
    parser = commands.add_parser(name, help=summary, description=text, formatter_class=raw)
    parser.set_defaults(run=run)
    return parser


def whole(what: str, *, least: int = 1) -> Callable[[str], int]:
    """Return an argparse type for integers of at least ``least``; ``what`` names the value in the error.

    >>> whole("a number of tokens")("none")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'none' is not a number of tokens, 1 or more
    """

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}, {least} or more")
        return int(text)

    return parsed


def step(text: str) -> int | str:
    """Convert the value of ``--step``: a number of steps, or ``best``; ``ArgumentTypeError`` for any other text."""
    return text if text == "best" else whole("a number of steps", least=0)(text)


def above_zero(what: str) -> Callable[[str], float]:
    """Return an argparse type for finite numbers above 0; ``what`` names the value in the error."""

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
    """Add ``--trust-run``, which allows the code and servers that a run names."""
    help_text = "allow the code and the servers that the run's config names; they are printed"
    parser.add_argument("--trust-run", action="store_true", help=help_text)


def print_trust(options: argparse.Namespace, config: Config) -> None:
    """If ``--trust-run`` is set, print to stderr what it allows the run's ``config`` to execute or contact."""
    from sota_grpo.assembly.compose import needs_consent

    for option, act in needs_consent(config).items() if options.trust_run else ():
        print(f"--trust-run: the run's config may {act} ({option}).", file=sys.stderr)


def require_run(options: argparse.Namespace, unused: Sequence[str]) -> Path:
    """Check the run in ``options.run_dir`` before torch is imported, and return its directory.

    UserError if it is no valid run, or options not in ``unused`` lack ``--trust-run``. With it, print what it allows.
    """
    from sota_grpo.assembly.compose import load_config
    from sota_grpo.run.entry import quiet_console

    quiet_console()
    run_dir = Path(options.run_dir).expanduser()
    print_trust(options, load_config(run_dir, trust=options.trust_run, unused=unused))
    return run_dir


def add_config(parser: Any) -> None:
    """Add the arguments of a config to a parser: ``--config-name`` and overrides."""
    from sota_grpo.assembly.compose import DEFAULT_CONFIG

    add = parser.add_argument
    add("--config-name", "-cn", metavar="NAME", default=DEFAULT_CONFIG, help=f"preset; default: {DEFAULT_CONFIG}")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="options of grpo.py; for grpo-async.py add mode=async")


def config_of(options: argparse.Namespace) -> Config:
    """Compose and return the config of the arguments of :func:`add_config`, not validated; UserError if it fails."""
    from sota_grpo.assembly.compose import compose

    return compose(options.config_name, overrides_of(options))


def overrides_of(options: argparse.Namespace) -> Sequence[str]:
    """Return the arguments OPTION=VALUE; UserError if one has another form."""
    for override in options.overrides:
        if "=" not in override and not override.startswith("~"):
            raise UserError(f"{override!r} is not OPTION=VALUE; if it is a preset, use --config-name {override}.")
    return options.overrides
