"""``sota-grpo replay``: compute a stored step of a run again, offline on the CPU, and perhaps under other algorithms.

Losses, gradient norms and shares of tokens follow from the stored responses and rewards and from the checkpoint before
the step; no engine is started. Under other algorithms there are the cosines between the gradients too, and the tables
are left in the run for ``sota-grpo report``. A run keeps step 0 and the steps after its checkpoints::

    sota-grpo replay outputs/2026-01-31/10-00-00 --step 20
    sota-grpo replay outputs/2026-01-31/10-00-00 --step 20 algorithm=dapo,gspo,mine.py:sapo train.epochs=2
    sota-grpo replay outputs/2026-01-31/10-00-00 algorithm.clip_high=0.28 policy.kl_coef=0 --json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser, add_trust, tell_trust, whole
from sota_grpo.errors import UserError


def add_command(commands: Any) -> None:
    """Add ``replay`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "replay", "compute a stored step again, perhaps under other algorithms", __doc__, run)
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="directory of the run")
    say = "algorithm=A,B,..: presets, FILE.py:FUNCTION, or run, the run's own; further options hold for all"
    add("overrides", metavar="OPTION=VALUE", nargs="*", help=say)
    step = whole("the number of a step", least=0)
    add("--step", metavar="N", type=step, help="as in metrics.jsonl; default: the last that can be replayed")
    add("--json", action="store_true", help="print the figures as JSON")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Replay the step and print what came of it; 0 once it is computed, whether or not it agrees."""
    from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, load_config
    from sota_grpo.recording.run_files import save_replay
    from sota_grpo.run.entry import quiet_console

    quiet_console()
    run_dir = Path(options.run_dir)
    tell_trust(options, load_config(run_dir, trust=options.trust_run, unused=UNUSED_WITHOUT_SAMPLES))
    from sota_grpo.assembly.replay import replayed

    result = replayed(run_dir, options.step, options.overrides, trust=options.trust_run)
    tables = [_table("", result["figures"])]
    if result["cosines"]:
        tables.append(_table("cosine of gradients", result["cosines"]))
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{run_dir}: {result['title']}\n")
        for table in tables:
            widths = [max(map(len, column)) for column in zip(*table)]
            for name, *cells in table:
                print("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
            print()
        print(*result["notes"], sep="\n")
    if result["cosines"]:
        record = {"title": result["title"], "tables": tables, "notes": result["notes"]}
        try:
            path = save_replay(run_dir, result["step"], options.overrides, record)
            print(f"{path}; sota-grpo report {run_dir} shows it.", file=sys.stderr)
        except UserError as error:  # of a run that cannot be written; its figures are printed
            print(f"sota-grpo: {error}", file=sys.stderr)
    return 0


def _table(corner: str, rows: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Text of the rows below a head; nine digits tell float32 values apart.

    >>> _table("", {"kl": {"stored": 1 / 3, "dapo": None}})
    [['', 'stored', 'dapo'], ['kl', '0.333333333', '-']]
    """
    head = [corner, *next(iter(rows.values()))]
    return [head, *([n, *("-" if v is None else f"{v:.9g}" for v in row.values())] for n, row in rows.items())]
