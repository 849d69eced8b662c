"""Where ``sota-grpo score`` reads its rows and writes them: JSON lines in UTF-8, whatever the locale says."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from sota_grpo.errors import RunFailed, UserError

STANDARD = "-"  # stdin or stdout
_ENCODING, _ERRORS = "utf-8-sig", "surrogateescape"  # of the input: what is not UTF-8 stands escaped in the output
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class RowWriter:
    """Writes rows, one JSON object per line, and counts them.

    Args:
        file: where they go.
        given: option and name of the output, for messages.
        place: where written rows are to be found when the work ends early.

    Raises:
        RunFailed: by ``write`` and ``flush``: the disk is full, or else in the way.
        BrokenPipeError: by them: the reader of stdout has had enough.

    >>> rows = RowWriter(sys.stdout, "-", "stdout")
    >>> rows.write({"reward": 1.0})
    {"reward": 1.0}
    >>> rows.count
    1
    """

    def __init__(self, file: TextIO, given: str, place: str) -> None:
        self.count = 0
        self._file, self._given, self._place = file, given, place

    def write(self, row: dict[str, Any]) -> None:
        with self._told():
            self._file.write(_json(row) + "\n")
        self.count += 1

    def flush(self) -> None:
        with self._told():
            self._file.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            _abandon(self._file)
            left = f"{self._place} holds the rows before"
            raise RunFailed(f"{self._given} cannot be written on ({error.strerror}); {left}.") from error


@contextmanager
def row_reader(name: str) -> Iterator[TextIO]:
    """The lines of a file or of stdin; a byte order mark is no part of them, and no byte is refused.

    Raises:
        UserError: the file cannot be read.
    """
    if name == STANDARD:
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding=_ENCODING, errors=_ERRORS)
        yield sys.stdin
        return
    try:
        file = open(name, encoding=_ENCODING, errors=_ERRORS)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--input {name} cannot be read ({error.strerror}).") from error
    with file:
        yield file


@contextmanager
def row_writer(name: str, read: str | None = None, option: str = "--output") -> Iterator[RowWriter]:
    """The output, under its name only once it is complete; an interrupted one keeps what it has beside it.

    Args:
        name: of the file, or ``-``.
        read: name of the input.
        option: by which the user gave the name.

    Raises:
        UserError: at once, if nothing can be written there.
        RunFailed: something is in the way later.
        KeyboardInterrupt: with the number of rows that are written as its text.
    """
    if name == STANDARD:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        with _rows(sys.stdout, option, "stdout") as rows:
            yield rows
        return
    partial = Path(f"{name}.partial")
    given = f"{option} {name}"
    with _opened(Path(name), partial, read, given) as file, _rows(file, given, str(partial)) as rows:
        yield rows
    try:
        partial.replace(name)
    except OSError as error:
        raise RunFailed(f"{given} cannot be written ({error.strerror}); {partial} holds all rows.") from error


def _opened(path: Path, partial: Path, read: str | None, given: str) -> TextIO:
    if read is not None and Path(read).resolve() in (path.resolve(), partial.resolve()):
        raise UserError(f"{given} would overwrite the input; give another file.")
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{given} is there and is no file; give a file, or - for stdout.")
        return partial.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{given} cannot be written ({error.strerror}).") from error


@contextmanager
def _rows(file: TextIO, given: str, place: str) -> Iterator[RowWriter]:
    rows = RowWriter(file, given, place)
    try:
        yield rows
    except KeyboardInterrupt:
        rows.flush()
        told = [f"rows written to {place}: {rows.count}"] if rows.count else []
        raise KeyboardInterrupt(*told) from None
    rows.flush()


def _abandon(file: TextIO) -> None:
    """Let what is buffered go nowhere: Python would try again at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, file.fileno())
    os.close(nowhere)


def _json(row: dict[str, Any]) -> str:
    text = json.dumps(row, ensure_ascii=False, default=str)
    # half of a surrogate pair, which untrusted text may hold, exists only in escaped form
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(row, default=str)
