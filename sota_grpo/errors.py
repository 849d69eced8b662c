"""Errors that the user can mend: the message is one sentence that says what is wrong and what to change."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from sota_grpo.stopping import interrupt_once
from sota_grpo.text import first_line, readable, say

CRASHED, USER_MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


class UserError(Exception):
    """Something outside the program is wrong; printed without a traceback, the exit code is 2."""

    exit_code = USER_MISTAKE

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: a notebook shows the sentence, as the command line does; ``%debug`` still has the frames."""
        return [f"{type(self).__name__}: {self}"]


class RunFailed(UserError):
    """The run cannot go on though nothing is wrong with the config: a process died, a disk is full, nobody answers."""

    exit_code = CRASHED


@contextmanager
def memory_for(what: str, fix: str) -> Iterator[None]:
    """Raise :class:`RunFailed` where the device lacks memory inside: it lacks memory for ``what``; ``fix``."""
    try:
        yield
    except RuntimeError as error:
        from torch import OutOfMemoryError

        if not isinstance(error, OutOfMemoryError):
            raise
        raise RunFailed(f"The device lacks memory for {what} ({first_line(error)}); {fix}.") from error


def collect_seldom() -> None:
    """Have Python look for cycles every 50,000 objects instead of every 700: modules, while they are imported (a second
    of five), and rows have none."""
    gc.set_threshold(50_000, 20, 50)


def run_command(program: str, command: Callable[[], int], if_interrupted: str) -> NoReturn:
    """Run a command to the end of the process: mistakes of the user are one sentence, Ctrl-C is one and 130.

    Args:
        program: how the sentences begin.
        command: returns the exit code.
        if_interrupted: what is left then, where the interrupt itself does not say it.
    """
    collect_seldom()
    interrupt_once()
    try:
        code = command()
    except UserError as error:
        say(f"{program}: {readable(str(error))}", sys.stderr)  # it may quote what others wrote
        code = error.exit_code
    except KeyboardInterrupt as stop:
        say(f"{program}: interrupted; {str(stop) or if_interrupted}.", sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has had enough
        sys.stderr.close()
        code = CRASHED
    sys.exit(code)
