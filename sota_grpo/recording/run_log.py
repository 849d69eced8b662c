"""Write the log files of a run: ``metrics.jsonl``, ``rollouts.jsonl``, ``debug_logs/``, ``training.log``, sinks.

A step's lines are written at once and flushed, so a killed run loses at most those. A step must be logged before its
checkpoint is saved: then a resumed run finds every step of its checkpoint, drops later steps and logs them again.
"""

from __future__ import annotations

import itertools
import logging
import math
import numbers
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import atomic_file
from sota_grpo.recording.metrics import declared, responses_trained
from sota_grpo.recording.progress import Progress, ZeroAdvantageWatch
from sota_grpo.recording.run_files import DEBUG_FOLDER, METRICS_FILE, ROLLOUTS_FILE, json_line, read_rows, whole_lines
from sota_grpo.recording.sinks import CopySink
from sota_grpo.recording.step_rows import batch_metrics, rollout_rows
from sota_grpo.recording.stored_steps import StoredSteps, drop_steps
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.task import Task
from sota_grpo.text import ReadableFormatter, one_line, readable
from sota_grpo.text import json_line as as_json

TRAINING_LOG = "training.log"
ROLLOUT_FIELDS = (
    *("group_id", "sample_id", "query", "answer", "prompt", "response", "response_tokens", "success"),
    *("reward", "reward_terms", "reward_info", "advantage", "truncated", "policy_version"),
)
#: Fields that only some responses have: the task in a run of several tasks, the turns of a dialog.
SOME_FIELDS = ("task", "dialog")
_ORDER = (*ROLLOUT_FIELDS[:-1], *SOME_FIELDS, ROLLOUT_FIELDS[-1])  # in the order that the report expects
Row = Mapping[str, Any]

_RULE = "=" * 100
_ROUNDING = 5e-5  # error of rewards, which are float32 and written with four digits in debug_logs/


class RunLog:
    """Writes the metrics and responses of each step to the run directory, and copies them to ``sinks``.

    The constructor creates missing files and removes an incomplete last line of a killed run; UserError if that fails.
    The owner adds to ``phase_seconds``, the total seconds since this start by phase (``time/..._s``).

    Args:
        sinks: further destinations; :meth:`close`, or the end of a ``with`` block, closes them.
        num_examine: completions per step in a new ``debug_logs/grpo_debug_<UTC time of the first write>.txt``; 0: none.
        term_weights: weights of the reward terms, for the debug log; a term without a weight (a penalty) has 1.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        sinks: Sequence[CopySink] = (),
        num_examine: int = 0,
        term_weights: Mapping[str, float] | None = None,
    ):
        self._run_dir, self._sinks = Path(run_dir), tuple(sinks)
        self._num_examine, self._term_weights = num_examine, dict(term_weights or {})
        self._debug_log: Path | None = None  # until the first write
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        for name in (METRICS_FILE, ROLLOUTS_FILE):
            path = _writable(self._run_dir / name)
            end = max((offset + len(line) for _, offset, line in whole_lines(path)), default=0)
            if end < path.stat().st_size:
                os.truncate(path, end)

    def write_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Append ``{"step": step, **metrics}`` to ``metrics.jsonl`` and the sinks; an evaluation is a separate line.

        None means that the quantity could not be measured. NaN, infinity and undeclared names raise ValueError, a
        failed write RunFailed.
        """
        row: dict[str, float | int | None] = {}
        for name, value in metrics.items():
            declared(name)
            if value is not None and not math.isfinite(value):
                raise ValueError(f"The metric {name} at step {step} is {value}: pass None if it was not measured.")
            row[name] = None if value is None else _plain(value)
        self._append(METRICS_FILE, [{"step": step, **row}])
        for sink in self._sinks:
            sink.log(step, row)

    def write_rollouts(self, step: int, rows: Sequence[Row]) -> None:
        """Append each group's best and worst response to ``rollouts.jsonl``, and copy both to the sinks.

        Up to ``num_examine`` of all responses go to the debug log. ``rows`` are all responses of the batch, each with
        ``ROLLOUT_FIELDS`` and optionally ``SOME_FIELDS`` (which sinks do not get). RunFailed if a write fails.
        """
        picked = best_and_worst(rows)
        lines, samples = (
            [{"step": step} | {name: row[name] for name in names if name in row} for row in picked]
            for names in (_ORDER, ROLLOUT_FIELDS)
        )
        self._append(ROLLOUTS_FILE, lines)
        for sink in self._sinks:
            sink.log_samples(step, samples)
        if not self._num_examine or not rows:
            return
        text = "".join(
            described(step, row, why, self._term_weights) for why, row in pick(rows, self._num_examine, step)
        )
        folder = self._run_dir / DEBUG_FOLDER
        self._debug_log = self._debug_log or folder / f"grpo_debug_{datetime.now(UTC):%Y%m%d_%H%M%S}.txt"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self._debug_log.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RunFailed(
                f"{error.filename or self._debug_log} cannot be written ({error.strerror}); free disk space or set "
                "logging.num_examine=0, then continue from the last checkpoint with train.resume=auto."
            ) from error

    def rewind(self, first_step: int) -> int:
        """Delete the lines and stored steps from ``first_step`` on, rewind sinks that can; return the number of lines.

        Call this before writing the first step. Each file is replaced atomically; UserError if a line is invalid.
        """
        dropped = 0
        for path in (self._run_dir / METRICS_FILE, self._run_dir / ROLLOUTS_FILE):
            with path.open("rb") as lines:
                is_kept = [json_line(line, path, number)["step"] < first_step for number, line in enumerate(lines, 1)]
            if not all(is_kept):
                with (
                    atomic_file(path, durable=True) as temporary,
                    path.open("rb") as lines,
                    temporary.open("wb") as file,
                ):
                    file.writelines(itertools.compress(lines, is_kept))
            dropped += is_kept.count(False)
        for sink in self._sinks:
            sink.rewind(first_step)
        drop_steps(self._run_dir, first_step)
        return dropped

    def close(self, exit_code: int = 0) -> None:
        """Close the sinks; ``exit_code`` is 0 if the run succeeded. Idempotent."""
        for sink in self._sinks:
            sink.close(exit_code)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(0 if kind is None else 1)

    def _append(self, name: str, rows: Iterable[Row]) -> None:
        path = self._run_dir / name
        try:
            lines = [as_json(row, allow_nan=False, default=_plain) + "\n" for row in rows]
            with path.open("ab") as file:
                file.write("".join(lines).encode())
        except OSError as error:
            raise RunFailed(
                f"{path} cannot be written ({error.strerror}); free disk space, then continue from the last checkpoint "
                "with train.resume=auto."
            ) from error


def best_and_worst(rows: Sequence[Row]) -> list[Row]:
    """Return of each group the row with the largest reward, then the row with the smallest reward.

    Among equal rewards the smallest ``sample_id`` is chosen; a group whose rewards are all equal gives one row.

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
    """Convert a scalar of another library (NumPy) to an int or float."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"A {type(value).__name__} cannot be written as JSON: pass str, numbers, lists or dicts.")


class _TrainingLog(logging.FileHandler):
    """The handler of ``training.log``; a second run in the same process replaces it."""


def setup_logging(run_dir: str | os.PathLike[str]) -> logging.Handler:
    """Append ``sota_grpo`` logs from INFO on to ``training.log``, no more to an earlier run's; UserError on failure."""
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
    """Create the directory of ``path``, check that ``path`` can be opened for appending, and return it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"Cannot write {path} ({reason}): choose a writable run directory with hydra.run.dir=PATH."
        ) from error
    return path


def system_metrics() -> dict[str, float]:
    """Return the available ``system/`` metrics; CPU use: since the thread's last call (or psutil's import), or 0."""
    import torch

    values = {
        "system/memory_gib": psutil.Process().memory_info().rss / 2**30,
        "system/host_memory": psutil.virtual_memory().percent / 100,
        "system/cpu": psutil.cpu_percent() / 100,
    }
    if torch.cuda.is_initialized():
        values["system/gpu_memory_gib"] = torch.cuda.max_memory_reserved() / 2**30
    with suppress(Exception):  # a missing NVML package or a driver failure raises many types
        busy = [torch.cuda.utilization(index) / 100 for index in range(torch.cuda.device_count())]
        values |= {"system/gpu": sum(busy) / len(busy)}
    return values


class StepLog:
    """The training loop's ``log``: logs each step and shows the progress line.

    ``dialog_turns`` continues from ``metrics.jsonl`` (UserError if unreadable), so call :meth:`RunLog.rewind` before.
    ``task.messages`` are the prompts of dialogs; ``publish_seconds`` returns the seconds of the last weight sync.
    """

    def __init__(
        self,
        run_log: RunLog,
        progress: Progress,
        stored: StoredSteps,
        tokenizer: Any,
        task: Task,
        publish_seconds: Callable[[], float],
    ) -> None:
        self._run_log, self._progress, self._stored = run_log, progress, stored
        self._tokenizer, self._task, self._publish_seconds = tokenizer, task, publish_seconds
        self._watch = ZeroAdvantageWatch(progress.total)
        self._responses = responses_trained(read_rows(stored.run_dir / METRICS_FILE))
        self.begin()

    def begin(self) -> None:
        """Start timing a step; :meth:`write` logs the time since then."""
        self._began = time.perf_counter()

    def write(self, step: int, batch: RowTable, update: Mapping[str, Any], source: Mapping[str, float]) -> None:
        """Write a step's metrics and responses, and if due the whole step in ``steps/``; update the progress line.

        Steps count from 0; ``update`` and ``source`` are metrics of learner and collector. RunFailed if it fails.
        """
        seconds = time.perf_counter() - self._began
        metrics: dict[str, Any] = {"kl": None, "time/ref_s": 0.0}  # without a reference
        metrics |= batch_metrics(batch, version=step) | dict(source) | dict(update)
        metrics |= {"version": step + 1, "time/publish_s": self._publish_seconds(), "time/step_s": seconds}
        metrics["tokens_per_s"] = metrics["response_tokens/mean"] * len(batch) / seconds
        metrics["groups/trained"] = len(batch.get(keys.GROUP_ID).unique())
        self._responses += len(batch)
        metrics["dialog_turns"] = self._responses
        metrics |= system_metrics()
        for name, value in metrics.items():
            if name.startswith("time/"):
                self._run_log.phase_seconds[name] += value
        self._run_log.write_step(step, metrics)
        rows = rollout_rows(batch, self._tokenizer, self._task.messages)
        self._run_log.write_rollouts(step, rows)
        if self._stored.before is not None:
            self._run_log.phase_seconds["time/store_s"] += self._stored.write(step, metrics, batch, rows)
        self._progress.update(step + 1, metrics)
        self._watch.look(step, metrics, len(batch))


def pick(rows: Sequence[Row], count: int, step: int) -> list[tuple[str, Row]]:
    """Return up to ``count`` pairs (reason, row): the best row, the worst row, then random ones.

    Ties are broken at random, too. The random seed is ``step``, so a repeated step gives the same rows.

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
    return picked + [(f"random one of {len(rows)}", row) for row in rest[: count - len(picked)]]


def described(step: int, row: Row, why: str, term_weights: Mapping[str, float]) -> str:
    """Return a completion and its rewards as readable text; ``why``: the reason why the completion is shown.

    Texts are escaped and each of their lines begins with a bar, so they cannot control a terminal or imitate the log.
    """

    def quoted(text: str) -> str:
        return "\n".join(f"  | {line}" for line in readable(text).split("\n"))

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
        f"question\n{quoted(row['query'])}",
        f"gold answer\n{quoted(row['answer'])}",
        f"completion, {row['response_tokens']} tokens{cut}\n{quoted(row['response'])}",
        "\n".join(["reward", *lines]),
        "\n".join(facts),
    ]
    return "\n\n".join(paragraphs) + "\n\n\n"
