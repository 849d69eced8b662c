"""``sota-grpo sweep``: the runs of a sweep side by side, during it and after it.

One row per run: the options in which the runs differ, the mean reward of the last 10 steps, the last held-out accuracy
with its standard error, how far the run is, how it ended, and the time of its steps. Runs that differ in their seed
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
    """Print the summary; 0 whatever became of the runs."""
    from sota_grpo.sweeps import FOLDER, as_csv, as_json, as_text, read_sweep

    folders = [options.directory] if options.directory else sorted(Path(FOLDER).glob("*/*/"))
    if not folders:
        raise UserError(f"There is no sweep below {FOLDER}/; give the directory of one.")
    sweep = read_sweep(Path(folders[-1]), options.sort, ascending=options.ascending)
    names = sweep.measured()
    if options.sort and options.sort not in names:
        near = get_close_matches(options.sort, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; they measured {', '.join(names) or 'nothing yet'}."
        raise UserError(f"--sort {options.sort}: no run measured it{hint}")
    if options.csv:
        sys.stdout.write(as_csv(sweep))
    elif options.json:
        print(json.dumps(as_json(sweep), indent=1, allow_nan=False))
    else:
        sys.stdout.write(as_text(sweep, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 0
