"""Errors that the user can mend: the message is one sentence that says what is wrong and what to change."""

from __future__ import annotations


class UserError(Exception):
    """Something outside the program is wrong; printed without a traceback, the exit code is 2."""

    exit_code = 2

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: a notebook shows the sentence, as the command line does; ``%debug`` still has the frames."""
        return [f"{type(self).__name__}: {self}"]


class RunFailed(UserError):
    """The run cannot go on though nothing is wrong with the config: a process died, a disk is full, nobody answers."""

    exit_code = 1
