"""The command ``sota-grpo``: tools around a training run, one module each."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sota_grpo.errors import UserError

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one tool; mistakes of the user are one sentence and exit code 2, Ctrl-C is one and 130."""
    from sota_grpo.cli import score

    parser = argparse.ArgumentParser(prog="sota-grpo", description="Tools around GRPO post-training.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    score.add_command(commands)
    options = parser.parse_args(arguments)
    try:
        code = options.run(options)
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
