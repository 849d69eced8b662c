"""The record of a run on disk: ``metrics.jsonl``, ``rollouts.jsonl`` and ``training.log``.

Each line is written whole and flushed, so a killed run loses at most the line being written; a resumed run first
rewinds to the step it restarts from. A step must be written before its checkpoint: then whatever a checkpoint knows is
in the record, and what comes after it is dropped and written again.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import atomic_file
from sota_grpo.recording.metrics import declared
from sota_grpo.recording.run_record import METRICS_FILE, ROLLOUTS_FILE
from sota_grpo.recording.sinks import Sink
from sota_grpo.text import json_line

TRAINING_LOG = "training.log"
ROLLOUT_FIELDS = (
    "group_id",
    "sample_id",
    "query",
    "answer",
    "prompt",
    "response",
    "response_tokens",
    "success",
    "reward",
    "reward_terms",
    "reward_info",
    "advantage",
    "truncated",
    "policy_version",
)

_BLOCK = 1 << 16


class RunLog:
    """Appends one strict JSON line per step, and the best and worst sample of each group, to a run directory.

    A line torn by a kill is removed when the files are opened.

    Args:
        run_dir: created where missing.
        sinks: get a copy of everything written; closed with the log.

    Raises:
        UserError: the directory or one of its files cannot be written.

    >>> import tempfile
    >>> directory = tempfile.mkdtemp()
    >>> with RunLog(directory) as log:
    ...     log.write_step(0, {"reward": 0.5, "kl": None})
    >>> print((Path(directory) / "metrics.jsonl").read_text(), end="")
    {"step": 0, "reward": 0.5, "kl": null}
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, sinks: Sequence[Sink] = ()):
        self._paths = {name: Path(run_dir) / name for name in (METRICS_FILE, ROLLOUTS_FILE)}
        self._sinks = tuple(sinks)
        self._files = {name: _open_for_appending(path) for name, path in self._paths.items()}

    def write_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append ``{"step": step, **metrics}`` to ``metrics.jsonl``; evaluations write their own line of a step.

        None is a quantity that was looked for and could not be measured; one that does not exist is a missing key.

        Raises:
            ValueError: a name is not declared in the glossary, or a value is not finite.
            TypeError: a value is not a number.
        """
        if "step" in metrics:
            raise ValueError("'step' is the first argument of write_step, not one of its metrics.")
        row = {name: _number(name, value, step) for name, value in metrics.items()}
        self._append(METRICS_FILE, [{"step": step, **row}])
        for sink in self._sinks:
            sink.log(step, row)

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the best and the worst response of each group to ``rollouts.jsonl``.

        Args:
            step: turn of the loop.
            rows: all responses of the batch, each with exactly the fields ``ROLLOUT_FIELDS``.

        Raises:
            ValueError: a field is missing or unknown, or a number is not finite.
        """
        for row in rows:
            _check_rollout(step, row)
        kept = [{"step": step, **{name: row[name] for name in ROLLOUT_FIELDS}} for row in best_and_worst(rows)]
        self._append(ROLLOUTS_FILE, kept)
        for sink in self._sinks:
            sink.log_samples(step, kept)

    def rewind(self, first_step: int) -> int:
        """Drop every line whose step is ``first_step`` or later and return their number; each file changes atomically.

        Called before a resumed run writes its first step. Evaluations are lines of a step and go with it.

        Raises:
            UserError: a line that is not the last one is not JSON with a step, which no kill does.
        """
        dropped = 0
        for name, path in self._paths.items():
            self._files[name].close()
            dropped += _drop_from(path, first_step)
            self._files[name] = _open_for_appending(path)
        for sink in self._sinks:
            sink.rewind(first_step)
        return dropped

    def close(self, exit_code: int = 0) -> None:
        """Close the files and the sinks; ``exit_code`` tells the sinks whether the run succeeded. Idempotent."""
        for file in self._files.values():
            with suppress(OSError):  # what a full disk refused was told when it was written
                file.close()
        for sink in self._sinks:
            sink.close(exit_code)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0 if kind is None else 1)

    def _append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        try:
            lines = [json_line(row, allow_nan=False, default=_plain) + "\n" for row in rows]
            self._files[name].write("".join(lines).encode())
            self._files[name].flush()
        except OSError as error:
            raise RunFailed(
                f"{self._paths[name]} cannot be written ({error.strerror}); free space there, then train.resume=auto "
                "continues from the last checkpoint."
            ) from error


def best_and_worst(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The row of the largest and the row of the smallest reward of each group, in this order.

    Groups keep their order of appearance; of equal rewards the smallest ``sample_id`` counts; a group of equal rewards
    gives one row. For example the rewards ``[0, 1, 1]`` of one group give its samples 1 and 0, ``[0.5, 0.5]`` sample 0.

    >>> rows = [{"group_id": 7, "sample_id": i, "reward": r} for i, r in enumerate([0.0, 1.0, 1.0])]
    >>> [row["sample_id"] for row in best_and_worst(rows)]
    [1, 0]
    """
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    picked = []
    for siblings in groups.values():
        best = min(siblings, key=lambda row: (-row["reward"], row["sample_id"]))
        worst = min(siblings, key=lambda row: (row["reward"], row["sample_id"]))
        picked += [best] if best is worst else [best, worst]
    return picked


class _TrainingLog(logging.FileHandler):
    """Our own handler, recognisable, so that a second run in one process replaces it and nobody else's."""


def setup_logging(run_dir: str | os.PathLike[str], level: str = "info") -> logging.Handler:
    """Write the records of the ``sota_grpo`` loggers at ``level`` and above to ``training.log``.

    Other handlers stay as they are and get what they got, INFO and above. Called again, it replaces only its own.

    Raises:
        UserError: the log cannot be written.
    """
    path = _writable(Path(run_dir) / TRAINING_LOG)
    handler = _TrainingLog(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("sota_grpo")
    for old in [one for one in logger.handlers if isinstance(one, _TrainingLog)]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    handler.setLevel(level.upper())
    logger.setLevel(min(handler.level, logging.INFO))
    return handler


def _number(name: str, value: Any, step: int) -> float | int | None:
    declared(name)
    if value is None or isinstance(value, numbers.Integral):
        return value if value is None else int(value)
    if not isinstance(value, numbers.Real):
        raise TypeError(f"The metric {name} at step {step} is a {type(value).__name__}, not a number: call .item().")
    if not math.isfinite(value):
        raise ValueError(f"The metric {name} at step {step} is {value}: write None if it could not be measured.")
    return float(value)


def _check_rollout(step: int, row: Mapping[str, Any]) -> None:
    if set(row) != set(ROLLOUT_FIELDS):
        odd = sorted(set(row) ^ set(ROLLOUT_FIELDS))
        raise ValueError(f"A rollout row at step {step} lacks or adds {', '.join(odd)}.")
    for name in ("reward", "advantage"):
        if not math.isfinite(row[name]):
            where = f"sample {row['sample_id']} of group {row['group_id']} at step {step}"
            raise ValueError(f"The {name} of {where} is {row[name]}: a response is scored before it is logged.")


def _plain(value: Any) -> float | int:
    """The JSON number of a foreign scalar type (numpy's)."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"A {type(value).__name__} has no place in a JSON line: pass plain values.")


def _writable(path: Path) -> Path:
    """``path``, once its directory exists and it can be opened for appending."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"Cannot write {path} ({reason}): choose a writable run directory with hydra.run.dir=PATH."
        ) from error
    return path


def _open_for_appending(path: Path) -> BinaryIO:
    with _writable(path).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = _end_of_last_whole_line(file, size)
        if end < size:
            file.truncate(end)
    return path.open("ab")


def _end_of_last_whole_line(file: BinaryIO, size: int) -> int:
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _drop_from(path: Path, first_step: int) -> int:
    """Rewrite ``path`` without the lines of step ``first_step`` and later, where there are any."""
    with path.open("rb") as lines:
        is_kept = [_step_of(line, path, number) < first_step for number, line in enumerate(lines, 1)]
    if not all(is_kept):
        with atomic_file(path, durable=True) as temporary, path.open("rb") as lines, temporary.open("wb") as kept:
            kept.writelines(itertools.compress(lines, is_kept))
    return is_kept.count(False)


def _step_of(line: bytes, path: Path, number: int) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"Line {number} of {path} is not JSON with a step: remove it to resume.") from error
