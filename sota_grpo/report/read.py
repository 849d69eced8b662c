"""Runs on disk, as far as a report needs them: finished, interrupted, resumed, or being written at this moment."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.recording.run_record import (
    GATE_FILE,
    METRICS_FILE,
    has_begun,
    is_run,
    natural,
    read_config,
    read_json,
    read_record,
    read_rows,
    state_of,
)
from sota_grpo.text import json_line

_HEAD, _TAIL = 16_000, 4_000  # characters that are kept of a longer text


def safe_json(value: Any) -> str:
    """``value`` as JSON that can stand in an HTML ``<script>`` element, whatever the texts in it hold.

    Raises:
        ValueError: a number is not finite; ``number`` lets none through.
    """
    return json_line(value, html=True, allow_nan=False, separators=(",", ":"))


def number(value: Any, digits: int = 5) -> float | int | None:
    """A finite number with so many significant digits; anything else is None. Integers stay exact.

    >>> number(0.1234567), number(40.0), number(123456789), number(float("nan")), number("1"), number(10**400)
    (0.12346, 40, 123456789, None, None, None)
    """
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


def clipped(text: str) -> str | dict[str, Any]:
    """``text``, or of a very long one its beginning, its end, and how many characters are left out between them.

    >>> clipped("short")
    'short'
    >>> long = clipped("a" * 1_000_000)
    >>> len(long["head"]), long["left"], len(long["tail"])
    (16000, 980000, 4000)
    """
    if len(text) <= _HEAD + _TAIL:
        return text
    return {"head": text[:_HEAD], "left": len(text) - _HEAD - _TAIL, "tail": text[-_TAIL:]}


def shown(value: Any) -> str:
    """The value of an option or a note of a grader, as one writes it in a config.

    >>> shown(None), shown(True), shown("auto"), shown([1, 2]), shown(1e-6)
    ('null', 'true', 'auto', '[1, 2]', '1e-06')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


_DEPTH = 4  # folders between the one named and a run: DATE/TIME/JOB and one to spare


@dataclass(frozen=True)
class RunData:
    """What a run directory says, apart from its rollouts.

    Attributes:
        path: as the user named it, or found below what they named.
        rows: metrics by turn, ascending; what was measured before a turn and in it is one row.
        config: nested, as resolved; empty where there is none.
        asked: turns that it was started for, or None.
        state: ``finished``, ``running``, ``failed`` or ``stopped``.
        note: why it failed; empty where it did not.
        gate: of ``gate.json``, or None.
        written: when the metrics were last written, seconds since the epoch.
        passed: digests of what was passed in Python, of which the config has only the places.
    """

    path: Path
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    asked: int | None
    state: str
    note: str
    gate: dict[str, Any] | None
    written: float
    passed: Any = None

    @property
    def turns(self) -> int:
        """Turns done, in which something was trained."""
        return max((row["step"] + 1 for row in self.rows if "dialog_turns" in row or "reward" in row), default=0)


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The run directories among ``paths`` and below them, in natural order, each once.

    Raises:
        UserError: a path is not there, or no run is.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for run in _runs_at(path):
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_runs(paths: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """The runs that have something to show, and of each other one a sentence that says why it has not.

    Raises:
        UserError: none has; the sentence is that of the first.
    """
    runs, sentences = [], []
    for path in paths:
        try:
            runs.append(read_run(path))
        except UserError as error:
            sentences.append(str(error))
    if not runs:
        raise UserError(sentences[0])
    return runs, sentences


def _runs_at(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"There is no run in {path}: it does not exist.")
    if not path.is_dir():
        raise UserError(f"{path} is a file; give the run directory, {path.parent}.")
    runs = list(_below(path, _DEPTH))
    if not runs:
        raise UserError(f"There is no run in {path}: neither there nor in its folders is a {METRICS_FILE}.")
    return runs


def _below(path: Path, depth: int) -> Iterator[Path]:
    if has_begun(path):
        yield path
        return
    below: list[Path] = []
    if depth:
        folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        below = [run for folder in sorted(folders, key=natural) for run in _below(folder, depth - 1)]
    yield from below or ([path] if is_run(path) else [])


def read_run(path: Path) -> RunData:
    """Read the run in ``path``; a last line that is still being written is left alone.

    Raises:
        UserError: it has no finished turn, a file cannot be read, or it is not what a run writes.
    """
    rows: dict[int, dict[str, Any]] = {}
    for row in read_rows(path / METRICS_FILE):
        rows.setdefault(row["step"], {}).update(row)
    state, note = state_of(path)
    if not rows:
        how = f"it {'is' if state == 'running' else 'has'} {state}" + (f" ({note})" if note else "")
        raise UserError(f"The run in {path} has not finished a turn: {how}.")
    record = read_record(path) or {}
    asked = record.get("num_steps")
    return RunData(
        path=path,
        rows=[rows[step] for step in sorted(rows)],
        config=read_config(path),
        asked=asked if isinstance(asked, int) else None,
        state=state,
        note=note,
        gate=read_json(path / GATE_FILE),
        written=(path / METRICS_FILE).stat().st_mtime,
        passed=record.get("passed"),
    )
