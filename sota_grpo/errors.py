"""Errors that the user can fix, with messages that say what is wrong and what to change; exit codes of commands."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import extract_tb
from typing import NoReturn

from sota_grpo.stopping import interrupt_once
from sota_grpo.text import RED, first_line, os_reason, readable, say

CRASHED, USER_MISTAKE, INTERRUPTED = 1, 2, 130  # exit codes


class UserError(Exception):
    """A mistake in config, data or environment, printed without a traceback; exit code 2 (:class:`RunFailed`: 1)."""

    exit_code = USER_MISTAKE

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: show only the message in a notebook; ``%debug`` still has the frames."""
        return [f"{type(self).__name__}: {self}"]


class RunFailed(UserError):
    """A run with a valid config cannot continue (a dead process, a full disk, an unreachable server); exit code 1."""

    exit_code = CRASHED


@contextmanager
def memory_for(what: str, fix: str) -> Iterator[None]:
    """Replace torch's out-of-memory error in the block by :class:`RunFailed`, which names ``what`` and ``fix``."""
    try:
        yield
    except RuntimeError as error:
        from torch import OutOfMemoryError

        if not isinstance(error, OutOfMemoryError):
            raise
        raise RunFailed(f"The device lacks memory for {what} ({first_line(error).rstrip('.')}); {fix}.") from error


@contextmanager
def writing(what: object, fix: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Replace an OSError in the block by ``kind``: ``what`` cannot be written, because of its reason, and the fix."""
    try:
        yield
    except OSError as error:
        reason = os_reason(error)
        raise kind(f"{what} cannot be written ({reason}); {fix}.") from error


@contextmanager
def without_exit() -> Iterator[None]:
    """Replace a SystemExit that a user's Python code raises in the block by :class:`RunFailed`, with file and line."""
    try:
        yield
    except SystemExit as error:
        frame = extract_tb(error.__traceback__)[-1]
        raise RunFailed(
            f"{frame.filename}, line {frame.lineno}: {frame.name} raised SystemExit({error.code!r}), as sys.exit does; "
            "raise another exception, with a message."
        ) from error


def collect_garbage_rarely() -> None:
    """Set this process's garbage collection thresholds to 50,000 objects, 20 and 50, which shortens imports."""
    gc.set_threshold(50_000, 20, 50)


def run_command(program: str, command: Callable[[], int], if_interrupted: str) -> NoReturn:
    """Call ``command`` and exit with the code that it returns.

    A :class:`UserError` (its ``exit_code``) or Ctrl-C (130) prints ``program`` and its message to stderr; a
    KeyboardInterrupt without a message prints ``if_interrupted``. A BrokenPipeError (1), as of a closed stdout, closes
    stderr and prints nothing. It first calls :func:`collect_garbage_rarely` and
    :func:`~sota_grpo.stopping.interrupt_once`.
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
