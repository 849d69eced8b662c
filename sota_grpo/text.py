"""Escape untrusted text; format durations; print to streams that may fail. Imports the standard library only."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

logger = logging.getLogger(__name__)

RED, GREEN, YELLOW = 31, 32, 33  # ANSI

_KEPT = frozenset("\u00a0\u3000\u200c\u200d")  # spaces, and the joiners that some scripts need
# Characters that JSON does not escape, but that harm terminals, line readers or UTF-8: more control characters, line
# separators, direction overrides, halves of surrogate pairs.
_RAW = "\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
SURROGATE = re.compile("[\ud800-\udfff]")  # in Python text always half of a pair, which UTF-8 lacks
_ODD, _ODD_IN_HTML = re.compile(f"[{_RAW}]"), re.compile(f"[<>&{_RAW}]")


def readable(text: str, keep: str = "\n\t") -> str:
    """Return ``text`` with unprintable characters escaped, except ``keep``, U+00A0, U+3000 and zero-width joiners.

    >>> readable("3 < 4\\x1b[2J\\u202e\\n5 Ångström \\ud800")
    '3 < 4\\\\x1b[2J\\\\u202e\\n5 Ångström \\\\ud800'
    """
    if text.isprintable():
        return text
    legal = _KEPT.union(keep)
    return "".join(c if c.isprintable() or c in legal else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str, limit: int | None = 500) -> str:
    """Return the first ``limit`` characters of ``text`` (None: all), line breaks and control characters escaped."""
    return readable(text[:limit], keep="")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to 500 characters and escaped; without one the type's name.

    >>> first_line(ValueError("no route\\nand a page of details")), first_line(KeyError())
    ('no route', 'KeyError')
    """
    lines = str(error).strip().splitlines()
    return one_line(lines[0]) if lines else type(error).__name__


def os_reason(error: OSError) -> str:
    """Return the system's reason for an error, such as ``No space left on device``; without one its :func:`first_line`.

    >>> os_reason(FileNotFoundError(2, "No such file", "a.txt")), os_reason(OSError("no Parquet file"))
    ('No such file', 'no Parquet file')
    """
    return error.strerror or first_line(error)


def sentence(error: BaseException) -> str:
    """Return ``TYPE: LINE`` of an exception, with the :func:`first_line` of its message; ``TYPE`` without a message."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line}"


class ReadableFormatter(logging.Formatter):
    """A log formatter that escapes control characters except line breaks and tabs, for untrusted text in messages."""

    def format(self, record: logging.LogRecord) -> str:
        return readable(super().format(record))


def is_terminal(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def shown(text: str, stream: TextIO, colour: int | None = None) -> str:
    """Return ``text``; for a terminal with ANSI codes that clear the line and, without ``NO_COLOR``, set ``colour``."""
    if not is_terminal(stream):
        return text
    return "\x1b[2K" + (text if colour is None or os.environ.get("NO_COLOR") else f"\x1b[{colour}m{text}\x1b[m")


class ConsoleHandler(logging.StreamHandler[TextIO]):
    """A log handler that prints records from INFO on, except those with the attribute ``file_only``.

    On a terminal warnings are yellow, errors red, and the next record overwrites one with the attribute ``redrawn``.
    Without ``stream`` records go to the current ``sys.stderr``, which the live progress line replaces.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._is_stderr = stream is None
        self.setLevel(logging.INFO)
        self.addFilter(lambda record: not getattr(record, "file_only", False))
        self.setFormatter(ReadableFormatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr if self._is_stderr else self.stream
        if self.stream is not None:  # a process without a console
            self.terminator = "\r" if getattr(record, "redrawn", False) and is_terminal(self.stream) else "\n"
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        colour = RED if record.levelno >= logging.ERROR else YELLOW if record.levelno >= logging.WARNING else None
        return shown(super().format(record), self.stream, colour)


def json_line(value: Any, *, html: bool = False, **options: Any) -> str:
    """Return ``value`` as one line of JSON with control characters escaped.

    ``html``: escape ``<``, ``>`` and ``&`` too, for a ``<script>`` element. ``options``: see :func:`json.dumps`.

    >>> json_line({"text": "\\x1b[2J <b> é \\u202e\\ud800"})
    '{"text": "\\\\u001b[2J <b> é \\\\u202e\\\\ud800"}'
    """
    text = json.dumps(value, ensure_ascii=False, **options)
    if text.isascii() and "\x7f" not in text and not html:  # most rows, in a third of the time
        return text
    return (_ODD_IN_HTML if html else _ODD).sub(lambda odd: f"\\u{ord(odd[0]):04x}", text)


def duration(seconds: float) -> str:
    """Return ``seconds``, rounded, as ``M:SS``, or as ``H:MM:SS`` from one hour on.

    >>> duration(151), duration(3661.2), duration(0.4)
    ('2:31', '1:01:01', '0:00')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class Output:
    """A text stream that discards its output after a write has failed (closed pipe, lost terminal, full disk).

    The failed write also points the stream's file descriptor to ``os.devnull``. ``stream`` None is standard output.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Write and flush ``text``, return its length; if that fails, log a warning and discard it and later texts.

        Characters that the stream's encoding lacks are escaped.
        """
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            self._stream.flush()
        except OSError as error:
            cause = os_reason(error)
            with suppress(OSError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self._stream.fileno())  # what is still buffered goes there, too
            # only now: the console's handler may write to this stream
            logger.warning("%s cannot be written (%s); its further output is discarded.", self._stream.name, cause)
        return len(text)

    def flush(self) -> None:
        """No-op: :meth:`write` has flushed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def say(text: str, stream: TextIO | None = None, colour: int | None = None) -> None:
    """Print ``text`` as a line (:func:`shown`) to ``stream`` (None: standard output); if that fails, log a warning."""
    output = Output(stream)
    output.write(shown(text, cast(TextIO, output), colour) + "\n")  # at once: threads write, too
