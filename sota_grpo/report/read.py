"""Runs on disk, as far as a report needs them: finished, interrupted, resumed, or being written at this moment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.recording.gate_record import GATE_FILE
from sota_grpo.recording.run_log import METRICS_FILE
from sota_grpo.run_record import CONFIG_FILE, is_held, read_failure, read_json, read_record

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
    """

    path: Path
    rows: list[dict[str, Any]]
    config: dict[str, Any]
    asked: int | None
    state: str
    note: str
    gate: dict[str, Any] | None
    written: float

    @property
    def turns(self) -> int:
        """Turns done, in which something was trained."""
        return max((row["step"] + 1 for row in self.rows if "dialog_turns" in row or "reward" in row), default=0)


def find_runs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[Path], list[Path]]:
    """The run directories among ``paths`` and below them, in natural order, each once; and those yet without a turn.

    Raises:
        UserError: a path is not there, or no run with metrics is.
    """
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        for run in _runs_at(path):
            found.setdefault(run.resolve(), run)
    runs = list(found.values())
    empty = [run for run in runs if next(whole_lines(run / METRICS_FILE), None) is None]
    if len(empty) == len(runs):
        raise UserError(f"{runs[0] / METRICS_FILE} holds no whole line yet: that run has not finished a turn.")
    return [run for run in runs if run not in empty], empty


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
    if (path / METRICS_FILE).is_file():
        yield path
    elif depth:
        try:
            folders = [entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
        except OSError as error:
            raise _unreadable(path, error) from error
        for folder in sorted(folders, key=natural):
            yield from _below(folder, depth - 1)


def natural(path: Path) -> list[tuple[int, str]]:
    """Sorting key by which job 10 of a sweep comes after job 2.

    >>> sorted([Path("sweep/10"), Path("sweep/2")], key=natural)[0].name
    '2'
    """
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def read_run(path: Path) -> RunData:
    """Read the run in ``path``; a last line that is still being written is left alone.

    Raises:
        UserError: a file cannot be read, or a line of it is no JSON with a step.
    """
    rows: dict[int, dict[str, Any]] = {}
    for number, _, line in whole_lines(path / METRICS_FILE):
        row = json_line(line, path / METRICS_FILE, number)
        rows.setdefault(row["step"], {}).update(row)
    if not rows:
        raise UserError(f"{path / METRICS_FILE} holds no whole line yet: that run has not finished a turn.")
    asked = (read_record(path) or {}).get("num_steps")
    state, note = _state(path)
    return RunData(
        path=path,
        rows=[rows[step] for step in sorted(rows)],
        config=_read_config(path / CONFIG_FILE),
        asked=asked if isinstance(asked, int) else None,
        state=state,
        note=note,
        gate=read_json(path / GATE_FILE),
        written=(path / METRICS_FILE).stat().st_mtime,
    )


def whole_lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number from 1, offset in bytes, and text of each line that ends; nothing where there is no file.

    Raises:
        UserError: the file cannot be read.
    """
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    yield number, offset, line
                offset += len(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from error


def json_line(line: bytes, path: Path, number: int) -> dict[str, Any]:
    """The object in a line; numbers that JSON does not have are None.

    Raises:
        UserError: it is no object with a step.
    """
    try:
        row = json.loads(line, parse_constant=lambda _: None)
        row["step"] = int(row["step"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"Line {number} of {path} is not JSON with a step: remove it to get a report.") from error
    return row


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Options by their dotted names.

    >>> flat({"seed": 0, "train": {"epochs": 1, "resume": None}})
    {'seed': 0, 'train.epochs': 1, 'train.resume': None}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}"
        found |= flat(value, dotted + ".") if isinstance(value, Mapping) and value else {dotted: value}
    return found


def _state(path: Path) -> tuple[str, str]:
    """How the run stands. A run that is training asks this too, and holds its own lock."""
    failure = read_failure(path)
    if (read_record(path) or {}).get("finished"):
        return "finished", ""
    if is_held(path):
        return "running", ""
    return ("stopped", "") if failure is None else ("failed", failure)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return _parsed_config(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _unreadable(path, error) from error


@lru_cache(maxsize=64)  # a run that is training asks again at every checkpoint
def _parsed_config(path: Path, _written: int) -> dict[str, Any]:
    from omegaconf import OmegaConf

    try:
        found = OmegaConf.to_container(OmegaConf.load(path))
    except OSError:
        raise
    except Exception as error:  # PyYAML and OmegaConf have a family of errors each
        raise UserError(f"{path} is not the YAML of a config: remove it to get a report.") from error
    return {str(name): value for name, value in found.items()} if isinstance(found, dict) else {}


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path} cannot be read ({error.strerror or type(error).__name__}).")
