"""``sota-grpo sweep``: the runs of a sweep side by side, during it and after it.

One row per run: the options in which the runs differ, the mean reward of the last 10 turns, the last held-out accuracy
with its standard error, how far the run is, how it ended, and the time of its turns. Runs that differ in their seed
only are averaged in a second table. Any folder of run directories will do::

    sota-grpo sweep multirun/2026-01-31/10-00-00
    sota-grpo sweep --sort time/step_s --ascending
    sota-grpo sweep multirun/2026-01-31/10-00-00 --csv > sweep.csv
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser
from sota_grpo.errors import UserError


def add_command(commands: Any) -> None:
    """Add ``sweep`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "sweep", "the runs of a sweep side by side", __doc__, run)
    add = parser.add_argument
    add("directory", nargs="?", metavar="DIR", help="folder of runs; default: the newest sweep below multirun/")
    add("--sort", metavar="METRIC", help="sort by it; default: eval/accuracy, or reward where that was not measured")
    add("--ascending", action="store_true", help="the smallest first")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="one line per run with all its metrics, instead of the table")
    form.add_argument("--json", action="store_true", help="runs and means over seeds as JSON, instead of the table")


def run(options: argparse.Namespace) -> int:
    """Print the summary; 0 whatever became of the runs.

    Raises:
        UserError: there is no run, or none of them measured what they are to be sorted by.
    """
    from sota_grpo.sweeps import as_csv, as_json, as_text, default_metric, read_sweep

    sweep = read_sweep(Path(options.directory) if options.directory else _newest())
    metric = options.sort or default_metric(sweep)
    _require_measured(options.sort, sweep.measured())
    if options.csv:
        sys.stdout.write(as_csv(sweep, metric, ascending=options.ascending))
    elif options.json:
        print(json.dumps(as_json(sweep, metric, ascending=options.ascending), indent=1, allow_nan=False))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        sys.stdout.write(as_text(sweep, metric, ascending=options.ascending, width=width))
    return 0


def _newest() -> Path:
    from sota_grpo.sweeps import FOLDER

    folders = sorted(Path(FOLDER).glob("*/*/"))
    if not folders:
        raise UserError(f"There is no sweep below {FOLDER}/; give the directory of one.")
    return folders[-1]


def _require_measured(metric: str | None, names: list[str]) -> None:
    if metric is None or metric in names:
        return
    near = get_close_matches(metric, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; they measured {', '.join(names) or 'nothing yet'}."
    raise UserError(f"--sort {metric}: no run measured it{hint}")
