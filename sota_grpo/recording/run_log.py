"""The files that a run appends to: ``metrics.jsonl``, ``rollouts.jsonl``, ``training.log`` and ``debug_logs/``.

Each line is written whole and flushed, so a killed run loses at most the line being written; a resumed run first
rewinds to the step it restarts from. A step must be written before its checkpoint: then whatever a checkpoint knows is
in the files, and what comes after it is dropped and written again.
"""

from __future__ import annotations

import itertools
import logging
import math
import numbers
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import atomic_file
from sota_grpo.recording.metrics import declared
from sota_grpo.recording.run_files import DEBUG_FOLDER, METRICS_FILE, ROLLOUTS_FILE, json_line, whole_lines
from sota_grpo.recording.sinks import CopySink
from sota_grpo.text import ReadableFormatter, one_line, readable
from sota_grpo.text import json_line as as_json

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
#: Of responses that have them: the task in a run of several, and what is known of a dialog of several turns.
SOME_FIELDS = ("task", "dialog")
_ORDER = (*ROLLOUT_FIELDS[:-1], *SOME_FIELDS, ROLLOUT_FIELDS[-1])  # the report finds step, group and version by place
Row = Mapping[str, Any]

_RULE = "=" * 100
_ROUNDING = 5e-5  # of rewards, which are kept in float32, and of the four digits written in debug_logs/


class RunLog:
    """Appends one strict JSON line per step, and the best and worst sample of each group, to a run directory.

    The directory is created where it is missing, and a line torn by a kill removed. The ``sinks`` get a copy of
    everything written, and are closed with the log.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, sinks: Sequence[CopySink] = ()):
        self._paths = {name: Path(run_dir) / name for name in (METRICS_FILE, ROLLOUTS_FILE)}
        self._sinks = tuple(sinks)
        for path in self._paths.values():
            end = max((offset + len(line) for _, offset, line in whole_lines(_writable(path))), default=0)
            if end < path.stat().st_size:
                os.truncate(path, end)

    def write_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append ``{"step": step, **metrics}`` to ``metrics.jsonl``; evaluations write their own line of a step.

        None is a quantity that was looked for and could not be measured; one that does not exist is a missing key.
        """
        row: dict[str, float | int | None] = {}
        for name, value in metrics.items():
            declared(name)
            if not isinstance(value, numbers.Real | None):
                kind = type(value).__name__
                raise TypeError(f"The metric {name} at step {step} is a {kind}, not a number: call .item().")
            if value is not None and not math.isfinite(value):
                raise ValueError(f"The metric {name} at step {step} is {value}: write None if it was not measured.")
            row[name] = None if value is None else _plain(value)
        self._append(METRICS_FILE, [{"step": step, **row}])
        for sink in self._sinks:
            sink.log(step, row)

    def write_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Append the best and the worst response of each group to ``rollouts.jsonl``.

        Args:
            step: training step.
            rows: all responses of the batch, each with the fields ``ROLLOUT_FIELDS``, and perhaps with some of
                ``SOME_FIELDS``, which the sinks are not given: they show a table.
        """
        for row in rows:
            odd = sorted(set(row).difference(SOME_FIELDS) ^ set(ROLLOUT_FIELDS))
            if odd:
                raise ValueError(f"A rollout row at step {step} lacks or adds {', '.join(odd)}.")
            for name in ("reward", "advantage"):
                if not math.isfinite(row[name]):
                    where = f"sample {row['sample_id']} of group {row['group_id']} at step {step}"
                    raise ValueError(f"The {name} of {where} is {row[name]}: a response is scored before it is logged.")
        picked = best_and_worst(rows)
        lines, samples = (
            [{"step": step} | {name: row[name] for name in names if name in row} for row in picked]
            for names in (_ORDER, ROLLOUT_FIELDS)
        )
        self._append(ROLLOUTS_FILE, lines)
        for sink in self._sinks:
            sink.log_samples(step, samples)

    def rewind(self, first_step: int) -> int:
        """Drop every line whose step is ``first_step`` or later and return their number; each file changes atomically.

        Called before a resumed run writes its first step. Evaluations are lines of a step and go with it.
        """
        dropped = 0
        for path in self._paths.values():
            with path.open("rb") as lines:
                is_kept = [json_line(line, path, number)["step"] < first_step for number, line in enumerate(lines, 1)]
            if not all(is_kept):
                with (
                    atomic_file(path, durable=True) as temporary,
                    path.open("rb") as lines,
                    temporary.open("wb") as kept,
                ):
                    kept.writelines(itertools.compress(lines, is_kept))
            dropped += is_kept.count(False)
        for sink in self._sinks:
            sink.rewind(first_step)
        return dropped

    def close(self, exit_code: int = 0) -> None:
        """Close the sinks; ``exit_code`` tells them whether the run succeeded. Idempotent."""
        for sink in self._sinks:
            sink.close(exit_code)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0 if kind is None else 1)

    def _append(self, name: str, rows: Iterable[Row]) -> None:
        try:
            lines = [as_json(row, allow_nan=False, default=_plain) + "\n" for row in rows]
            with self._paths[name].open("ab") as file:
                file.write("".join(lines).encode())
        except OSError as error:
            raise RunFailed(
                f"{self._paths[name]} cannot be written ({error.strerror}); free space there, then train.resume=auto "
                "continues from the last checkpoint."
            ) from error


def best_and_worst(rows: Sequence[Row]) -> list[Row]:
    """The row of the largest and the row of the smallest reward of each group, in this order.

    Groups keep their order of appearance; of equal rewards the smallest ``sample_id`` counts; a group of equal rewards
    gives one row. For example the rewards ``[0, 1, 1]`` of one group give its samples 1 and 0, ``[0.5, 0.5]`` sample 0.

    >>> rows = [{"group_id": 7, "sample_id": i, "reward": r} for i, r in enumerate([0.0, 1.0, 1.0])]
    >>> [row["sample_id"] for row in best_and_worst(rows)]
    [1, 0]
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group_id"], []).append(row)
    picked = []
    for siblings in groups.values():
        best = min(siblings, key=lambda row: (-row["reward"], row["sample_id"]))
        worst = min(siblings, key=lambda row: (row["reward"], row["sample_id"]))
        picked += [best] if best is worst else [best, worst]
    return picked


def _plain(value: Any) -> float | int:
    """The JSON number of a foreign scalar type (numpy's)."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"A {type(value).__name__} has no place in a JSON line: pass plain values.")


class _TrainingLog(logging.FileHandler):
    """Our own handler, recognisable, so that a second run in one process replaces it and nobody else's."""


def setup_logging(run_dir: str | os.PathLike[str]) -> logging.Handler:
    """Write the records of the ``sota_grpo`` loggers, INFO and above, to ``training.log``.

    Other handlers stay as they are and get what they got, INFO and above. Called again, it replaces only its own.
    """
    path = _writable(Path(run_dir) / TRAINING_LOG)
    handler = _TrainingLog(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(ReadableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("sota_grpo")
    for old in [one for one in logger.handlers if isinstance(one, _TrainingLog)]:
        logger.removeHandler(old)
        old.close()
    logger.addHandler(handler)
    handler.setLevel(logging.INFO)
    logger.setLevel(logging.INFO)
    return handler


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


class ExamineLog:
    """Appends completions to ``<run_dir>/debug_logs/grpo_debug_<UTC time of the first write>.txt``.

    Every start of a run writes a file of its own; the steps that a resumed run does again stand in both. A step is
    flushed whole. Model text cannot drive the terminal that shows it, nor pass for a line of the log: every character
    without a picture is escaped, every line of it begins with a bar, and none is wrapped. Without ``num_examine``
    nothing is written; a term without a weight of the task (a penalty) weighs 1.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        num_examine: int,
        term_weights: Mapping[str, float],
        *,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.folder, self.num_examine = Path(run_dir) / DEBUG_FOLDER, num_examine
        self.path: Path | None = None  # until the first write
        self._term_weights, self._clock = dict(term_weights), clock

    def write(self, step: int, rows: Sequence[Row]) -> None:
        """Append ``num_examine`` of the rows (:func:`sota_grpo.recording.step_log.rollout_rows`) of step ``step``."""
        if not self.num_examine or not rows:
            return
        picked = pick(rows, self.num_examine, step)
        text = "".join(described(step, row, why, self._term_weights) for why, row in picked)
        self.path = self.path or self.folder / f"grpo_debug_{self._clock():%Y%m%d_%H%M%S}.txt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RunFailed(
                f"{error.filename or self.path} cannot be written ({error.strerror}); free space there, or set "
                "logging.num_examine=0; train.resume=auto then continues from the last checkpoint."
            ) from error


def pick(rows: Sequence[Row], count: int, step: int) -> list[tuple[str, Row]]:
    """``count`` rows and why each was picked: the best, the worst, then others at random, as far as there are any.

    Chance decides among equals too, so that it is not always the first group that is shown. It depends on ``step``
    alone: a step that is done again shows the same.

    >>> rows = [{"sample_id": i, "reward": reward} for i, reward in enumerate([0.5, 1.0, 0.0, 0.5])]
    >>> [(why, row["sample_id"]) for why, row in pick(rows, 2, step=0)]
    [('best of 4', 1), ('worst of 4', 2)]
    """
    rest = random.Random(step).sample(list(rows), len(rows))
    picked: list[tuple[str, Row]] = []
    for why, choose in (("best", max), ("worst", min)):
        if rest and len(picked) < count:
            row = choose(rest, key=lambda row: row["reward"])
            rest = [other for other in rest if other is not row]
            picked.append((f"{why} of {len(rows)}", row))
    return picked + [(f"drawn at random of {len(rows)}", row) for row in rest[: count - len(picked)]]


def described(step: int, row: Row, why: str, term_weights: Mapping[str, float]) -> str:
    """One completion with all that is known of it, for people."""
    cut = ", cut for length" if row["truncated"] else ""
    success = "yes" if row["success"] else "no"
    facts = [f"advantage {row['advantage']:.4f}", f"success {success}", f"policy version {row['policy_version']}"]
    facts += [one_line(f"grader: {name} = {value}", limit=None) for name, value in row["reward_info"].items()]
    terms = dict.fromkeys(term_weights) | dict(row["reward_terms"])
    tasks = {name.partition("/")[0] for name in row["reward_terms"] if "/" in name}  # of a mixture: one
    terms = {name: value for name, value in terms.items() if "/" not in name or name.partition("/")[0] in tasks}
    lines, total = [], 0.0
    for name, value in terms.items():
        weight = term_weights.get(name, 1.0)
        if value is None:
            lines.append(f"{one_line(name, limit=None):<20}  does not apply")
            continue
        total += weight * value
        lines.append(f"{one_line(name, limit=None):<20}  {value:8.4f} x {weight:8.4f} = {weight * value:8.4f}")
    if abs(row["reward"] - total) > _ROUNDING * max(1.0, abs(total)):
        lines.append(f"{'(other)':<20}  {'':>22}{row['reward'] - total:8.4f}")
    lines.append(f"{'total':<20}  {'':>22}{row['reward']:8.4f}")
    paragraphs = [
        f"{_RULE}\nstep {step}, group {row['group_id']}, sample {row['sample_id']}: {why}\n{_RULE}",
        f"question\n{_quoted(row['query'])}",
        f"gold answer\n{_quoted(row['answer'])}",
        f"completion, {row['response_tokens']} tokens{cut}\n{_quoted(row['response'])}",
        "\n".join(["reward", *lines]),
        "\n".join(facts),
    ]
    return "\n\n".join(paragraphs) + "\n\n\n"


def _quoted(text: str) -> str:
    return "\n".join(f"  | {line}" for line in readable(text).split("\n"))
