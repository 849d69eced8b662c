"""Read run directories, running or not, for a report, and arrange their metrics as curves and charts."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.recording.machine import in_words
from sota_grpo.recording.metrics import METRICS, known
from sota_grpo.recording.run_files import (
    GATE_FILE,
    METRICS_FILE,
    dicts,
    read_config,
    read_json,
    read_record,
    read_rows,
    state_of,
)
from sota_grpo.text import json_line, one_line

Row = Mapping[str, Any]
NUMBERS = 250_000  # most numbers in all curves of a page (2 MB); beyond it, steps are left out
#: Sections of the page: title, and metric names or (ending in a slash) prefixes of names.
FAMILIES = {
    "What it learned": ["eval/accuracy", "reward", "success", "eval/avg_at_k", "eval/reward"],
    "Tasks": ["task/*/reward", "task/*/success", "eval/task/*", "task/", "eval/task/"],
    "Policy": [
        *("kl", "distill/", "entropy", "clip_fraction", "ess", "gradient_share/max_token", "mismatch_kl", "kl_approx"),
        *("correction_fraction", "off_policy_fraction", "entropy_coef", "entropy_threshold", "kept_tokens"),
    ],
    "Responses": ["response_tokens/", "truncated", "prompt_tokens/mean"],
    "Dialogs and tools": [
        *("turns/mean", "turn_tokens/mean", "grader/tool_calls", "grader/tool_errors", "grader/ended_by_turns"),
    ],
    "Rewards and advantages": ["reward/", "grader/", "advantage", "reward_errors", "reward_timeouts"],
    "Judge": ["judge/"],
    "Groups, policy age and workers": ["groups/", "policy_age/", "workers/"],
    "Optimisation": ["loss/", "grad_norm", "lr", "loss_scale", "skipped_steps", "packed"],
    "Further evaluation metrics": ["eval/"],
    "Speed": ["tokens_per_s", "time/"],
    "Machine": ["system/"],
}
#: {beginning of metric names: metric whose chart shows them too if they are equal in all runs}.
REPEATS = {"success": "reward", "reward/": "reward", "eval/reward": "eval/accuracy", "turn_": "response_tokens/mean"}
EVAL_TASK, EVAL_TASK_ERROR = "eval/task/", "eval/task_stderr/"
#: {metric of evaluations: metric that is its standard error}.
STDERRS = {name: f"{name}_stderr" for name in ("eval/avg_at_k", "eval/reward")} | {"eval/accuracy": "eval/stderr"}
#: {metric with a standard error: where that comes from, see _error}; beside them those of EVAL_TASK.
BANDS = {
    "reward": "reward/std over the root of the number of responses",
    **dict.fromkeys(("success", "truncated"), "of a fraction of independent responses"),
    **{name: f"{error}, over problems" for name, error in STDERRS.items()},
}
_NO_CURVE = frozenset(("step", "version", "dialog_turns", "optimizer_steps", *STDERRS.values()))
#: Titles of charts whose metric name is not clear enough.
TITLES = {
    "turns/mean": "Turns per dialog",
    "turn_tokens/mean": "Tokens per turn",
    "grader/tool_calls": "Tool calls per dialog",
    "grader/tool_errors": "Tool errors per dialog",
    "grader/ended_by_turns": "Dialogs ended by the limit of turns",
    "task/*/reward": "Reward",
    "task/*/success": "Success",
    "task/*/truncated": "Truncated responses",
    "task/*/response_tokens": "Tokens per response",
    "task/*/responses": "Responses in the batch",
    "eval/task/*": "Held-out accuracies",
}
_LAST = ("reward/", "eval/reward/", "grader/")  # in a mixture, the task's name precedes the rest
_HEAD, _TAIL = 16_000, 4_000  # characters shown of a longer text


@dataclass(frozen=True)
class RunData:
    """The data of a run directory, without its responses."""

    path: Path  # run directory
    rows: list[dict[str, Any]]  # metrics in order of steps; an evaluation is merged into its step's row
    config: dict[str, Any]  # nested options; empty without a config file
    num_steps: int | None  # steps of the whole run
    state: str  # finished, running, failed or stopped
    note: str  # why it failed, or empty
    gate: dict[str, Any] | None  # content of gate.json
    written: float  # time of the last write of the metrics, seconds since the epoch
    starts: tuple[str, ...] = ()  # command, code version and machine of each start, oldest first
    passed: Any = None  # digests of Python inputs

    @property
    def steps(self) -> int:
        """Number of finished training steps."""
        return max((row["step"] + 1 for row in self.rows if "dialog_turns" in row or "reward" in row), default=0)


def read_runs(paths: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """Return the runs with metrics, and an error message per other run; UserError if no run has metrics."""
    runs, sentences = [], []
    for path in paths:
        try:
            runs.append(read_run(path))
        except UserError as error:
            sentences.append(str(error))
    if not runs:
        raise UserError(sentences[0])
    return runs, sentences


def read_run(path: Path) -> RunData:
    """Read the run in ``path``; UserError if it is damaged or has no metrics. An incomplete last line is ignored."""
    rows: dict[int, dict[str, Any]] = {}
    for row in read_rows(path / METRICS_FILE):
        rows.setdefault(row["step"], {}).update(row)
    state, note = state_of(path)
    if not rows:
        condition = f"it {'is' if state == 'running' else 'has'} {state}" + (f" ({note.rstrip('.')})" if note else "")
        raise UserError(f"The run in {path} has not finished a step: {condition}.")
    record = read_record(path) or {}
    num_steps = record.get("num_steps")
    return RunData(
        path=path,
        rows=[rows[step] for step in sorted(rows)],
        config=read_config(path),
        num_steps=num_steps if isinstance(num_steps, int) else None,
        state=state,
        note=note,
        gate=read_json(path / GATE_FILE),
        written=(path / METRICS_FILE).stat().st_mtime,
        starts=tuple(one_line(in_words(start), limit=2000) for start in dicts(record.get("starts"))),
        passed=record.get("passed"),
    )


def safe_json(value: Any) -> str:
    """Return ``value`` as JSON that is safe in an HTML ``<script>`` element; ValueError for NaN and infinity."""
    return json_line(value, html=True, allow_nan=False, separators=(",", ":"))


def number(value: Any, digits: int = 5) -> float | int | None:
    """Round a finite number to ``digits`` significant digits (integers below 2**53: exact); None for anything else.

    >>> number(0.1234567), number(40.0), number(123456789), number(float("nan")), number("1"), number(10**400)
    (0.12346, 40, 123456789, None, None, None)
    """
    if not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    if float(value).is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{digits}g}")


def clipped(text: str) -> str | dict[str, Any]:
    """Return ``text``, or for a very long text its head, its tail and the number of characters left out.

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
    """Return a value (of an option, or a grader's info) as text, written as in a config.

    >>> shown(None), shown(True), shown("auto"), shown([1, 2]), shown(1e-6)
    ('null', 'true', 'auto', '[1, 2]', '1e-06')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def curves(run: RunData, stride: int = 1) -> dict[str, Any]:
    """Return a run's curves, ready for JSON, of every ``stride``-th step, all evaluations and the last step.

    ``steps``, and ``responses`` and ``seconds`` since the start, are the three x-axes. ``columns`` (values) and
    ``errors`` (standard errors) map a metric to ``{"v": values}``, one per entry of ``steps``, or, if at least half of
    the entries lack it, to ``{"i": positions, "v": values}``, with positions in ``steps`` from 0.
    """
    seconds, responses, points = 0.0, 0.0, []
    last = len(run.rows) - 1
    for index, row in enumerate(run.rows):
        seconds += _number(row, "time/step_s") + _number(row, "time/eval_s")
        before, responses = responses, max(responses, _number(row, "dialog_turns"))  # an evaluation has no count
        if index % stride == 0 or index == last or "eval/accuracy" in row:
            points.append((row, seconds, responses, responses - before))
    rows = [row for row, *_ in points]
    columns = {name: _column([row.get(name) for row in rows]) for name in names(rows)}
    with_error = [name for name in columns if name in BANDS or name.startswith(EVAL_TASK)]
    errors = {name: _column([_error(name, row, count) for row, _, _, count in points]) for name in with_error}
    return {
        "steps": [row["step"] for row in rows],
        "responses": [number(count) for _, _, count, _ in points],
        "seconds": [number(spent) for _, spent, _, _ in points],
        "columns": {name: column for name, column in columns.items() if column},
        "errors": {name: column for name, column in errors.items() if column},
    }


def names(rows: Iterable[Row]) -> list[str]:
    """Return the metrics to draw, no counters or standard errors: those named in METRICS, in its order, then others.

    >>> names([{"step": 0, "zeal": 1, "kl": None}, {"step": 1, "reward": 0.5, "version": 1}])
    ['reward', 'kl', 'zeal']
    """
    logged = dict.fromkeys(name for row in rows for name in row)
    order = {name: index for index, name in enumerate(METRICS)}
    shown = (name for name in logged if name not in _NO_CURVE and not name.startswith(EVAL_TASK_ERROR))
    return sorted(shown, key=lambda name: order.get(name, len(order)))


def stride_for(runs: Sequence[RunData]) -> int:
    """Return the smallest stride with which all curves together have at most about ``NUMBERS`` numbers."""
    total = sum(len(run.rows) * len(names(run.rows)) for run in runs)
    return max(1, math.ceil(total / NUMBERS))


def position_of(name: str) -> tuple[int, int]:
    """Return a metric's sort key: (index in FAMILIES of its section, index there); (``len(FAMILIES)``, 0) if in none.

    The section is the first that lists the name, else the first that lists a prefix of it. Names found by a prefix come
    after the names that the section lists.

    >>> [position_of(name) for name in ("reward", "reward/format", "eval/num_samples", "zeal")]
    [(0, 1), (5, 5), (9, 1), (12, 0)]
    """
    for index, members in enumerate(FAMILIES.values()):
        if name in members:
            return index, members.index(name)
    for index, members in enumerate(FAMILIES.values()):
        if any(member.endswith("/") and name.startswith(member) for member in members):
            return index, len(members)
    return len(FAMILIES), 0


def charts(columns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of some runs' metrics, in the order of the page.

    A metric of ``REPEATS`` whose values equal those of its counterpart in every run is left out. ``columns``: for each
    run, the ``columns`` of :func:`curves`. A chart's ``members`` are its curves, as (label or empty text, metric).
    Metrics that differ only in a task's name share a chart; its ``name`` has ``*`` in place of the task.

    >>> names = ["kl", "task/a/reward", "task/b/reward", "task/b/x/reward", "task/b/y/reward", "eval/task/a", "lr"]
    >>> for chart in charts([{**{name: name for name in names}, "reward": 1, "success": 1}]):
    ...     print(chart["title"] or chart["name"], chart["members"])
    reward [('', 'reward')]
    Reward by task [('a', 'task/a/reward'), ('b', 'task/b/reward')]
    Held-out accuracies [('', 'eval/task/a')]
    Reward by task of b [('x', 'task/b/x/reward'), ('y', 'task/b/y/reward')]
    kl [('', 'kl')]
    lr [('', 'lr')]
    """
    lines: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for name in sorted(dict.fromkeys(chain(*columns)), key=position_of):
        other = next((other for start, other in REPEATS.items() if name.startswith(start)), name)
        if name == other or any(run.get(name) != run.get(other) for run in columns):
            plain, key, within, label = _split(name)
            lines.setdefault((plain, key, within), []).append((label, name))

    def position(chart: tuple[str, str, str]) -> tuple[int, str, int]:
        plain, _, within = chart
        index, member = position_of(plain)
        return index, within, member

    return [_chart(*chart, sorted(lines[chart])) for chart in sorted(lines, key=position)]


def _split(name: str) -> tuple[str, str, str, str]:
    """Return (metric without a mixture's task, key of the chart, entry of a mixture or "", label of the line).

    >>> [_split(name)[1:] for name in ("kl", "task/b/x/reward", "eval/task/b/x", "reward/b/correct")][1:]
    [('task/*/reward', 'b', 'x'), ('eval/task/*', 'b', 'x'), ('reward/*/correct', '', 'b')]
    """
    metric = known(name)
    for prefix in _LAST if metric else ():
        if name.startswith(prefix):
            task, _, last = name.removeprefix(prefix).rpartition("/")
            return f"{prefix}{last}", f"{prefix}*/{last}" if task else name, "", task
    before, is_family, suffix = (metric.name if metric else name).partition("<")
    if metric is None or not is_family or metric.name == name:
        return name, name, "", ""
    after = suffix.partition(">")[2]
    within, _, label = name[len(before) : len(name) - len(after)].rpartition("/")
    return f"{before}*{after}", f"{before}*{after}", within, label


def _chart(plain: str, key: str, within: str, lines: list[tuple[str, str]]) -> dict[str, Any]:
    metric, name, title = known(lines[0][1]), lines[0][1], TITLES.get(plain, "")
    if len(lines) == 1:
        lines = [("", name)]
    else:
        name = key.replace("*", f"{within}/*") if within else key
        what = "task" if plain != key else metric.name.partition("<")[2].partition(">")[0] if metric else ""
        title = (title or plain) + (f" by {what}" if what != "name" else "") + (f" of {within}" if within else "")
    band = f"{EVAL_TASK_ERROR}.., over problems" if key.startswith(EVAL_TASK) else BANDS.get(key)
    return {
        "name": name,
        "title": title,
        "family": [*FAMILIES, "Other"][position_of(plain)[0]],
        "sentence": metric.sentence if metric else "",
        "unit": metric.unit if metric else "",
        "members": lines,
        **({"band": band} if band else {}),
    }


def phases(run: RunData) -> dict[str, Any]:
    """Return a run's seconds: ``total`` of steps and evaluations, ``parts`` by phase, ``other`` of no phase.

    >>> from pathlib import Path
    >>> row = {"step": 0, "time/learn_s": 2.0, "time/generate_s": 5.0, "time/step_s": 8.0, "time/eval_s": 1.0}
    >>> phases(RunData(Path("."), [row, row], {}, None, "stopped", "", None, 0.0))
    {'total': 18, 'parts': {'generate': 10, 'learn': 4, 'eval': 2}, 'other': 2}
    """
    spent = {name: sum(_number(row, name) for row in run.rows) for name in METRICS if name.startswith("time/")}
    total = spent.pop("time/step_s") + spent["time/eval_s"]
    seconds_of = {name[len("time/") : -len("_s")]: number(seconds) for name, seconds in spent.items() if seconds}
    return {"total": number(total), "parts": seconds_of, "other": number(max(0.0, total - sum(spent.values())))}


def _column(values: Sequence[Any]) -> dict[str, Any]:
    plain = [number(value) for value in values]
    present = {index: value for index, value in enumerate(plain) if value is not None}
    if 2 * len(present) > len(plain):
        return {"v": plain}
    return {"i": [*present], "v": [*present.values()]} if present else {}


def _number(row: Row, name: str) -> float:
    return number(row.get(name), digits=15) or 0.0


def _error(name: str, row: Row, count: float) -> Any:
    """Return the standard error of a metric in a step of ``count`` responses; None if it is unknown."""
    if name in STDERRS or name.startswith(EVAL_TASK):
        return row.get(STDERRS.get(name) or name.replace(EVAL_TASK, EVAL_TASK_ERROR))
    mean, std = (number(row.get(one), digits=15) for one in (name, "reward/std"))
    if name != "reward":  # a fraction
        std = None if mean is None or not 0 <= mean <= 1 else math.sqrt(mean * (1 - mean))
    return None if std is None or count <= 0 else std / math.sqrt(count)
