"""One line under the cell of a notebook, redrawn in place; in the saved notebook it stands as it was last."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TextIO

_EVERY_S = 0.25  # between two drawings, each a message to the browser


def in_notebook(stream: TextIO) -> bool:
    """Whether ``stream`` leads to the cell of a notebook, where it is no terminal and still can be redrawn.

    >>> import io
    >>> in_notebook(io.StringIO())
    False
    """
    return type(stream).__module__.partition(".")[0] == "ipykernel"


class NotebookLine:
    """Draws a line where it was drawn first, at most four times a second.

    IPython's display is used as it is, without widgets: those need a package beside the notebook, and are empty in a
    saved one.

    Args:
        display: IPython's; None imports it.
        clock: seconds, monotonic.
    """

    def __init__(self, display: Callable[..., Any] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._display, self._clock = display or _ipythons(), clock
        self._handle: Any = None
        self._line: str | None = None  # what is still to be drawn
        self._drawn_at = -float("inf")

    def show(self, line: str) -> None:
        """Draw ``line`` now, or with the next one, or when the line is closed."""
        self._line = line
        if self._clock() - self._drawn_at >= _EVERY_S:
            self._draw()

    def close(self) -> None:
        """Leave the last line standing. Idempotent."""
        if self._line is not None:
            self._draw()

    def _draw(self) -> None:
        content = {"text/plain": self._line}
        if self._handle is None:
            self._handle = self._display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._line, self._drawn_at = None, self._clock()


def _ipythons() -> Callable[..., Any]:
    from IPython.display import display

    return display
