"""The command ``sota-grpo``: tools around a training run, one module each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sota_grpo.errors import UserError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one tool; mistakes of the user are one sentence and exit code 2, Ctrl-C is one and 130."""
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
    except UserError as error:
        print(f"sota-grpo: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt as stop:  # its text says what is left
        print(f"sota-grpo: interrupted; {str(stop) or 'nothing was written'}.", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has had enough
        sys.stderr.close()
        code = 1
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    from sota_grpo.cli import check, estimate, eval, export, replay, report, score, sweep, train

    parser = argparse.ArgumentParser(prog="sota-grpo", description="Tools around GRPO post-training.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (train, check, estimate, eval, report, replay, export, score, sweep):
        command.add_command(commands)
    if arguments[:1] == [train.QUERY]:  # the shell's question, which comes without a command
        return train.complete(arguments, commands.choices)
    options = _parsed(parser, arguments)
    return options.run(options)


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options; overrides (OPTION=VALUE) may stand behind them too, where argparse by itself takes none."""
    options, left = parser.parse_known_args(arguments)
    if left and not (hasattr(options, "overrides") and all("=" in one and one[0] != "-" for one in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if left:
        options.overrides = [*options.overrides, *left]
    return options
