"""Compare the runs of a sweep, and find an interrupted sweep to resume.

A sweep's command is saved in its directory. ``--multirun train.resume=auto`` resumes the newest incomplete sweep with
the same command, or that in ``hydra.sweep.dir=DIR``: finished runs are kept, all others are resumed or started.
"""

from __future__ import annotations

import io
import math
import os
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from sota_grpo.errors import UserError, writing
from sota_grpo.files import write_json
from sota_grpo.recording.metrics import METRICS, is_number
from sota_grpo.recording.progress import percent
from sota_grpo.recording.run_files import (
    METRICS_FILE,
    OVERRIDES_FILE,
    find_runs,
    has_begun,
    is_held,
    read_json,
    read_record,
    read_rows,
    state_of,
)
from sota_grpo.text import duration, one_line
from sota_grpo.untrusted import read_yaml

Value = TypeVar("Value")
LAST_STEPS = 10  # over which metrics are averaged: the reward of one step is too noisy
SEED = "seed"
ACCURACY, ACCURACY_ERROR, REWARD = "eval/accuracy", "eval/stderr", "reward"

FOLDER = "multirun"  # Hydra's own, with DATE/TIME in it
SWEEP_FILE = "sweep.json"
SUMMARY = "summary.json"  # in the sweep's directory

_UNKNOWN = "-"
_NOTHING = {"mean": None, "stderr": None}
_WIDTH = 400  # characters per line if the output is no terminal, so that no cell is wrapped
# Arguments that may differ when a sweep is resumed: they do not change the results of its runs.
_FREE = re.compile(r"\+*(train\.resume|logging\.|hydra\.(sweep\.dir|callbacks\.|output_subdir=)|hydra[./]launcher\b)")


@dataclass(frozen=True)
class RunRow:
    """One run of a sweep."""

    name: str  # the run directory, relative to the sweep's
    path: Path
    overrides: Mapping[str, str]  # {option: value} of the command line
    state: str  # finished, running, stopped or failed
    note: str  # why the run failed or is not finished; empty if there is no reason
    steps: int  # training steps done so far
    num_steps: int | None  # training steps in all; None before the run has begun
    seconds: float  # of steps and evaluations, without the start of the run
    #: {metric: mean over the last 10 steps that have it; for evaluations and counters the last value}.
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Sweep:
    """All runs in a sweep's directory, and how to sort them."""

    path: Path
    runs: list[RunRow]  # in the order of their numbers
    varied: list[str]  # options with an effect that differ between runs, in the order of the command line
    metric: str  # to sort by
    ascending: bool = False  # smallest values first

    @property
    def ranked(self) -> list[RunRow]:
        """The runs sorted by ``metric``, largest first unless ``ascending``; runs without the metric are last."""
        return sorted(self.runs, key=lambda run: self._rank(run.metrics.get(self.metric)))

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings, whose runs differ only in their seed, sorted by the mean of ``metric``, like ``ranked``.

        Each has ``overrides`` (those that differ between settings, without the seed), the number of ``runs``, how many
        of them are ``finished``, and of those the ``means``: {metric: {"mean": .., "stderr": .. over seeds, None for
        one}}. The list is empty if no setting has several seeds.
        """
        names = [name for name in self.varied if name != SEED]
        groups: dict[tuple[str | None, ...], list[RunRow]] = {}
        for run in self.runs:
            groups.setdefault(tuple(run.overrides.get(name) for name in names), []).append(run)
        if SEED not in self.varied or all(len(group) == 1 for group in groups.values()):
            return []
        settings: list[dict[str, Any]] = []
        for group in groups.values():
            done = [run.metrics for run in group if run.state == "finished"]
            means: dict[str, dict[str, float | None]] = {}
            for name in dict.fromkeys(chain(*done)):
                values = [metrics[name] for metrics in done if name in metrics]
                error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
                means[name] = {"mean": statistics.fmean(values), "stderr": error}
            overrides = {name: group[0].overrides[name] for name in names if name in group[0].overrides}
            settings.append({"overrides": overrides, "runs": len(group), "finished": len(done), "means": means})
        return sorted(settings, key=lambda row: self._rank(row["means"].get(self.metric, _NOTHING)["mean"]))

    def _rank(self, value: float | None) -> tuple[bool, float]:
        return value is None, (value or 0.0) * (1 if self.ascending else -1)

    def measured(self) -> list[str]:
        """Return the names of all metrics that any run measured: those of METRICS in its order, then others sorted."""
        names = {name for run in self.runs for name in run.metrics}
        return [name for name in METRICS if name in names] + sorted(names - METRICS.keys())


def read_sweep(path: Path, metric: str | None = None, *, ascending: bool = False) -> Sweep:
    """Read the runs below ``path``, the directory of a sweep or any folder of run directories.

    ``metric``: to sort by; None: held-out accuracy if any run has it, else reward. UserError if there is no sweep.
    """
    if path.is_dir() and has_begun(path, OVERRIDES_FILE):
        raise UserError(f"{path} is one run, not a folder of runs; give {path.parent}.")
    runs = [_read_run(folder, path) for folder in find_runs([path])]
    names = dict.fromkeys(name for run in runs for name in run.overrides if not _FREE.match(name))
    varied = [name for name in names if len({run.overrides.get(name) for run in runs}) > 1]
    default = ACCURACY if any(ACCURACY in run.metrics for run in runs) else REWARD
    return Sweep(path, runs, varied, metric or default, ascending)


def objective(run_dir: Path) -> float | None:
    """Return a sweep's objective of a run: last held-out accuracy, else mean reward of the last 10 steps, else None."""
    metrics, _, _ = read_metrics(run_dir / METRICS_FILE)
    return metrics.get(ACCURACY, metrics.get(REWARD))


def read_metrics(path: Path) -> tuple[dict[str, float], int, float]:
    """Return ``metrics``, ``steps``, ``seconds`` of a :class:`RunRow` from a metrics file; ``{}, 0, 0`` if missing."""
    recent: dict[str, deque[float]] = {}
    steps, seconds = 0, 0.0
    for row in read_rows(path):
        numbers = {one_line(name): value for name, value in row.items() if name != "step" and is_number(value)}
        seconds += sum(numbers.get(name, 0.0) for name in ("time/step_s", "time/eval_s"))
        steps += REWARD in row
        for name, value in numbers.items():
            recent.setdefault(name, deque(maxlen=LAST_STEPS)).append(value)
    counters = {name for name, metric in METRICS.items() if metric.reduction == "last"}
    metrics = {
        name: values[-1] if name in counters or name.startswith("eval/") else statistics.fmean(values)
        for name, values in recent.items()
    }
    return metrics, steps, seconds


def _read_run(path: Path, root: Path) -> RunRow:
    """Read a run; files that cannot be read are listed in its note."""
    notes: list[str] = []

    def tried(read: Callable[[], Value], instead: Value) -> Value:
        try:
            return read()
        except UserError as error:
            notes.append(str(error))
            return instead

    state, note = tried(lambda: state_of(path), ("stopped", ""))
    notes += [note] if note else []
    nothing = (dict[str, float](), 0, 0.0)
    metrics, steps, seconds = tried(lambda: read_metrics(path / METRICS_FILE), nothing)
    overrides = tried(lambda: _overrides(path / OVERRIDES_FILE), dict[str, str]())
    num_steps = (read_record(path) or {}).get("num_steps")
    return RunRow(
        name=one_line(path.relative_to(root).as_posix()),
        path=path,
        overrides=overrides,
        state=state,
        note=one_line("; ".join(dict.fromkeys(notes)), None),
        metrics=metrics,
        steps=steps,
        num_steps=num_steps if isinstance(num_steps, int) else None,
        seconds=seconds,
    )


def _overrides(path: Path) -> dict[str, str]:
    """Return {option: value} of a run's Hydra overrides, without ``+``; the value of ``~option`` is ``removed``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    overrides = {}
    try:
        noted = OmegaConf.to_container(read_yaml(path, levels=2))
    except FileNotFoundError:
        return {}
    except (OmegaConfBaseException, YAMLError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as Hydra's overrides ({type(error).__name__}); remove it.") from error
    for override in noted if isinstance(noted, list) else []:
        name, _, value = str(override).partition("=")
        overrides[one_line(name.lstrip("+~"))] = "removed" if name.startswith("~") else one_line(value)
    return overrides


def as_text(sweep: Sweep, width: int | None = None) -> str:
    """Return a headline, tables and notes on runs as plain text; ``width``: characters of a table (None: 400)."""
    console = Console(file=io.StringIO(), width=width or _WIDTH, force_terminal=False, color_system=None)
    states = Counter(run.state for run in sweep.runs)
    counts = [f"{states[state]} {state}" for state in ("finished", "running", "stopped", "failed") if states[state]]
    number = f"{len(sweep.runs)} run" + ("s" if len(sweep.runs) > 1 else "")
    with console.capture() as capture:
        headline = f"{sweep.path}: {number}, {', '.join(counts)}; sorted by {sweep.metric}."
        console.print(Text(headline), soft_wrap=True)
        for header, *rows in _tables(sweep):
            table = Table(*(Column(Text(name), overflow="fold") for name in header), box=box.ASCII)
            for row in rows:
                table.add_row(*map(Text, row))  # not as markup: [0,1] is a value
            console.print(table)
        for run in sweep.runs:
            if run.note:
                console.print(Text(f"run {run.name} {run.state}: {run.note}"), soft_wrap=True)
    return capture.get()


def as_json(sweep: Sweep) -> dict[str, Any]:
    """Return the runs and settings as values for strict JSON."""
    runs = [{"run": run.name} | vars(run) | {"path": str(run.path)} for run in sweep.ranked]
    for run in runs:
        del run["name"]
    about = {"directory": str(sweep.path), "sorted_by": sweep.metric, "last_steps": LAST_STEPS, "varied": sweep.varied}
    return about | {"runs": runs, "settings": sweep.settings}


def write_summary(path: Path) -> Sweep:
    """Read the sweep in ``path``, write ``summary.json`` there, atomically, and return the sweep."""
    sweep = read_sweep(path)
    write_json(path / SUMMARY, as_json(sweep))
    return sweep


def _tables(sweep: Sweep) -> list[list[list[str]]]:
    """Return the table of runs, and if there are several seeds that of settings, each with a header line."""
    extra = [] if sweep.metric in (ACCURACY, REWARD) else [sweep.metric]

    def shown(mean: float | None, stderr: float | None) -> str:
        return _UNKNOWN if mean is None else f"{mean:.4g}" + ("" if stderr is None else f" +/- {stderr:.2g}")

    def count(done: int, total: int | None) -> str:
        return f"{done}" if total in (None, done) else f"{done} of {total}"

    def cells(overrides: Mapping[str, str], names: Sequence[str], means: Mapping[str, Any]) -> list[str]:
        reward, accuracy, *others = (means.get(name, _NOTHING) for name in (REWARD, ACCURACY, *extra))
        figures = [shown(**reward), percent(*accuracy.values()), *(shown(**other) for other in others)]
        return [*(overrides.get(name, _UNKNOWN) for name in names), *figures]

    runs = [["run", *sweep.varied, REWARD, "accuracy", *extra, "steps", "state", "time"]]
    for run in sweep.ranked:
        means = {name: {"mean": value, "stderr": None} for name, value in run.metrics.items()}
        if ACCURACY in means:
            means[ACCURACY]["stderr"] = run.metrics.get(ACCURACY_ERROR)
        measured = cells(run.overrides, sweep.varied, means)
        runs.append([run.name, *measured, count(run.steps, run.num_steps), run.state, duration(run.seconds)])
    names = [name for name in sweep.varied if name != SEED]
    settings = [["seeds", *names, REWARD, "accuracy", *extra]]
    for row in sweep.settings:
        settings.append([count(row["finished"], row["runs"]), *cells(row["overrides"], names, row["means"])])
    return [table for table in (runs, settings) if len(table) > 1]


def continued(arguments: Sequence[str], root: Path = Path(FOLDER)) -> list[str]:
    """Return the arguments; to ``-m train.resume=auto`` add ``hydra.sweep.dir`` of the sweep to resume, if any."""
    args = list(arguments)
    is_sweep = any(arg in ("-m", "hydra.mode=MULTIRUN") or arg.startswith("--mu") for arg in args)  # to Hydra
    if not is_sweep or "train.resume=auto" not in args or any(arg.startswith("hydra.sweep.dir=") for arg in args):
        return args
    for folder in sorted((path.parent for path in root.glob(f"*/*/{SWEEP_FILE}")), reverse=True):  # the newest first
        record = read_json(folder / SWEEP_FILE) or {}
        same = record.get("command") == _identity(args) and not record.get("complete")
        if same and os.access(folder, os.W_OK) and not any(map(is_held, folder.glob("*/"))):
            return [f"hydra.sweep.dir={folder.as_posix()}", *args]
    return args


def note_command(sweep_dir: Path, arguments: Sequence[str], *, complete: bool = False) -> None:
    """Save the options that identify a sweep, and whether the sweep is complete; UserError if that cannot be written.

    Options that do not change its results, such as ``train.resume`` and ``logging.*``, are left out. UserError also if
    a sweep that did not choose ``hydra.sweep.dir`` begins where another sweep has begun, in the same second.
    """
    is_named = any(argument.startswith("hydra.sweep.dir=") for argument in arguments)
    with writing(f"hydra.sweep.dir={sweep_dir}", "use another"):
        try:
            if not complete and not is_named:
                (sweep_dir / SWEEP_FILE).touch(exist_ok=False)
        except FileExistsError:
            raise UserError(f"Another sweep has begun in {sweep_dir}; start this one again, a second later.") from None
        write_json(sweep_dir / SWEEP_FILE, {"command": _identity(arguments), "complete": complete})


def _identity(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that identify a sweep, in their order, which determines Hydra's run numbers."""
    return [argument for argument in arguments if not _FREE.match(argument)]
