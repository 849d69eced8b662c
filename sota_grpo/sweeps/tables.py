"""A sweep as a table to read, as Markdown, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sota_grpo.recording.progress import duration
from sota_grpo.run_record import write_text
from sota_grpo.sweeps.reading import (
    ACCURACY,
    ACCURACY_ERROR,
    LAST_TURNS,
    REWARD,
    SEED,
    RunRow,
    Setting,
    Sweep,
    read_sweep,
)

SUMMARY = "summary"  # .md and .json, in the sweep's directory

_UNKNOWN = "-"
_WIDTH = 400  # of text that no terminal limits: no cell is wrapped
_Rows = tuple[list[str], list[list[str]]]


def default_metric(sweep: Sweep) -> str:
    """What runs are sorted by if nothing is said: accuracy where it was measured, else reward."""
    return ACCURACY if any(ACCURACY in run.metrics for run in sweep.runs) else REWARD


def as_text(sweep: Sweep, metric: str | None = None, *, ascending: bool = False, width: int | None = None) -> str:
    """The tables and what there is to say of single runs, in plain characters.

    Args:
        metric: the runs are sorted by it; None is :func:`default_metric`.
        ascending: the smallest first.
        width: of the terminal; None wraps nothing.
    """
    metric = metric or default_metric(sweep)
    console = Console(file=io.StringIO(), width=width or _WIDTH, force_terminal=False, color_system=None)
    with console.capture() as capture:
        console.print(Text(_headline(sweep, metric)), soft_wrap=True)
        for header, rows in _tables(sweep, metric, ascending):
            console.print(_table(header, rows))
        for note in _notes(sweep):
            console.print(Text(note), soft_wrap=True)
    return capture.get()


def as_markdown(sweep: Sweep, metric: str | None = None) -> str:
    """The same as Markdown."""
    metric = metric or default_metric(sweep)
    tables = [_markdown_table(header, rows) for header, rows in _tables(sweep, metric, ascending=False)]
    notes = "".join(f"- {_escaped(note)}\n" for note in _notes(sweep))
    rule = f"Accuracy and counters are the last measured, everything else the mean of the last {LAST_TURNS} turns.\n"
    return "\n".join([f"# Sweep\n\n{_escaped(_headline(sweep, metric))}\n", *tables, *([notes] if notes else []), rule])


def as_csv(sweep: Sweep, metric: str | None = None, *, ascending: bool = False) -> str:
    """One line per run, with every metric that any of them measured; what a run did not measure is empty."""
    names = sweep.measured()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *sweep.varied, "state", "note", "turns", "seconds", *names])
    for run in sweep.ranked(metric or default_metric(sweep), ascending=ascending):
        asked = [run.overrides.get(name, "") for name in sweep.varied]
        measured = [run.metrics.get(name, "") for name in names]
        writer.writerow([run.name, *asked, run.state, run.note, run.turns, f"{run.seconds:.1f}", *measured])
    return text.getvalue()


def as_json(sweep: Sweep, metric: str | None = None, *, ascending: bool = False) -> dict[str, Any]:
    """Everything as plain values for strict JSON."""
    metric = metric or default_metric(sweep)
    runs = [_plain_run(run) for run in sweep.ranked(metric, ascending=ascending)]
    settings = [_plain_setting(one) for one in sweep.settings(metric, ascending=ascending)]
    found = {"directory": str(sweep.path), "sorted_by": metric, "last_turns": LAST_TURNS, "varied": sweep.varied}
    return {**found, "runs": runs, "settings": settings}


def write_summary(path: Path) -> Sweep:
    """Write ``summary.md`` and ``summary.json`` into the sweep's directory ``path``; each changes atomically.

    Raises:
        UserError: there is no run below ``path``.
        OSError: they cannot be written.
    """
    sweep = read_sweep(path)
    write_text(path / f"{SUMMARY}.md", as_markdown(sweep))
    write_text(path / f"{SUMMARY}.json", json.dumps(as_json(sweep), indent=1, allow_nan=False) + "\n")
    return sweep


def _headline(sweep: Sweep, metric: str) -> str:
    states = [run.state for run in sweep.runs]
    counts = [f"{states.count(state)} {state}" for state in ("finished", "running", "stopped", "failed")]
    found = ", ".join(count for count in counts if not count.startswith("0 "))
    number = f"{len(states)} run" + ("s" if len(states) > 1 else "")
    return f"{sweep.path}: {number}, {found}; sorted by {metric}."


def _notes(sweep: Sweep) -> list[str]:
    return [f"run {run.name} {run.state}: {run.note}" for run in sweep.runs if run.note]


def _tables(sweep: Sweep, metric: str, ascending: bool) -> list[_Rows]:
    """The runs, and the settings where several seeds were run of one."""
    extra = [] if metric in (ACCURACY, REWARD) else [metric]
    header = ["run", *sweep.varied, REWARD, "accuracy", *extra, "turns", "state", "time"]
    rows = [_run_cells(sweep, run, extra) for run in sweep.ranked(metric, ascending=ascending)]
    tables = [(header, rows)]
    settings = sweep.settings(metric, ascending=ascending)
    if settings:
        names = [name for name in sweep.varied if name != SEED]
        header = ["seeds", *names, REWARD, "accuracy", *extra]
        tables.append((header, [_setting_cells(one, names, extra) for one in settings]))
    return tables


def _run_cells(sweep: Sweep, run: RunRow, extra: Sequence[str]) -> list[str]:
    asked = [run.overrides.get(name, _UNKNOWN) for name in sweep.varied]
    reward = _number(run.metrics.get(REWARD))
    accuracy = _percent(run.metrics.get(ACCURACY), run.metrics.get(ACCURACY_ERROR))
    others = [_number(run.metrics.get(name)) for name in extra]
    turns = f"{run.turns}" if run.asked in (None, run.turns) else f"{run.turns} of {run.asked}"
    return [run.name, *asked, reward, accuracy, *others, turns, run.state, duration(run.seconds)]


def _setting_cells(setting: Setting, names: Sequence[str], extra: Sequence[str]) -> list[str]:
    count = f"{setting.finished}" + ("" if setting.finished == setting.runs else f" of {setting.runs}")
    asked = [setting.overrides.get(name, _UNKNOWN) for name in names]
    reward = _number(*setting.means.get(REWARD, (None, None)))
    accuracy = _percent(*setting.means.get(ACCURACY, (None, None)))
    others = [_number(*setting.means.get(name, (None, None))) for name in extra]
    return [count, *asked, reward, accuracy, *others]


def _number(value: float | None, error: float | None = None) -> str:
    """Value and error.

    >>> _number(0.60449, 0.0049), _number(0.5), _number(None)
    ('0.6045 +/- 0.0049', '0.5', '-')
    """
    if value is None:
        return _UNKNOWN
    return f"{value:.4g}" + ("" if error is None else f" +/- {error:.2g}")


def _percent(value: float | None, error: float | None = None) -> str:
    """A share and its error in percent.

    >>> _percent(0.613, 0.03), _percent(0.5), _percent(None)
    ('61.3 +/- 3.0 %', '50.0 %', '-')
    """
    if value is None:
        return _UNKNOWN
    return f"{100 * value:.1f}" + (" %" if error is None else f" +/- {100 * error:.1f} %")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.ASCII)
    for name in header:
        table.add_column(Text(name), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # not as markup: [0,1] is a value
    return table


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(map(_escaped, line)) + " |\n" for line in lines)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _plain_run(run: RunRow) -> dict[str, Any]:
    about = {"run": run.name, "path": str(run.path), "overrides": dict(run.overrides)}
    progress = {"state": run.state, "note": run.note, "turns": run.turns, "asked": run.asked, "seconds": run.seconds}
    return {**about, **progress, "metrics": dict(run.metrics)}


def _plain_setting(setting: Setting) -> dict[str, Any]:
    means: Mapping[str, Any] = {name: {"mean": mean, "stderr": error} for name, (mean, error) in setting.means.items()}
    return {"overrides": dict(setting.overrides), "runs": setting.runs, "finished": setting.finished, "means": means}
