"""``sota-grpo report``: one HTML file about a run, several runs, or a whole sweep; it needs no server and no network.

Curves with their standard errors, runs over each other with what differs in their configs, groups with their samples
and rewards, tokens where steps are stored, time by phase, the age of policies, the gate's checks, the config. Runs may
be finished, interrupted, or training at this moment::

    sota-grpo report outputs/2026-01-31/10-00-00
    sota-grpo report multirun/2026-01-31/10-00-00 --out sweep.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser
from sota_grpo.errors import UserError
from sota_grpo.text import readable

_FILE = "report.html"


def add_command(commands: Any) -> None:
    """Add ``report`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "report", "one HTML file about one run or several", __doc__, run)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or a folder of runs (a multirun)")
    parser.add_argument(
        "--out", metavar="FILE", help=f"the page; default: {_FILE} in RUN, or here where several are given"
    )


def run(options: argparse.Namespace) -> int:
    """Write the page and say where it is."""
    from sota_grpo.report import write_report

    folder = Path(options.runs[0]) if len(options.runs) == 1 else Path()
    out = Path(options.out) if options.out else folder / _FILE
    if options.out and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}.")
    path = write_report(
        options.runs, out, on_left_out=lambda sentence: print(f"Left out: {readable(sentence)}", file=sys.stderr)
    )
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
