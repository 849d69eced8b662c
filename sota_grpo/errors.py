"""Errors that the user can fix: the message is one sentence with what is wrong and what to change."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from sota_grpo.stopping import interrupt_once
from sota_grpo.text import RED, first_line, readable, say

CRASHED, USER_MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


class UserError(Exception):
    """An error outside the program; printed without a traceback, with exit code 2."""

    exit_code = USER_MISTAKE

    def _render_traceback_(self) -> list[str]:
        """Show the sentence in a notebook (IPython's hook); ``%debug`` still has the frames."""
        return [f"{type(self).__name__}: {self}"]


class RunFailed(UserError):
    """A run cannot continue, though its config is right: a process died, a disk is full, a server is silent."""

    exit_code = CRASHED


@contextmanager
def memory_for(what: str, fix: str) -> Iterator[None]:
    """Turn torch's out-of-memory error inside the block into :class:`RunFailed`: no memory for ``what``; ``fix``."""
    try:
        yield
    except RuntimeError as error:
        from torch import OutOfMemoryError

        if not isinstance(error, OutOfMemoryError):
            raise
        raise RunFailed(f"The device lacks memory for {what} ({first_line(error)}); {fix}.") from error


def collect_garbage_rarely() -> None:
    """Collect garbage every 50,000 objects instead of 700, which saves a second of five while modules are imported."""
    gc.set_threshold(50_000, 20, 50)


def run_command(program: str, command: Callable[[], int], if_interrupted: str) -> NoReturn:
    """Run a command and exit: a mistake of the user is one sentence, Ctrl-C is one and exit code 130.

    Args:
        program: first word of the sentences.
        command: returns the exit code.
        if_interrupted: end of the sentence of an interrupt without a text.
    """
    collect_garbage_rarely()
    interrupt_once()
    try:
        code = command()
    except UserError as error:
        say(f"{program}: {readable(str(error))}", sys.stderr, RED)  # it may quote untrusted text
        code = error.exit_code
    except KeyboardInterrupt as stop:
        say(f"{program}: interrupted; {str(stop) or if_interrupted}.", sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has closed it
        sys.stderr.close()
        code = CRASHED
    sys.exit(code)
