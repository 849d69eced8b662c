"""Commands that read runs: ``sota-grpo report``, ``replay``, ``export`` and ``sweep``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser, add_trust, require_run, step, whole
from sota_grpo.config import DTYPES
from sota_grpo.errors import UserError
from sota_grpo.text import readable


def add_command(commands: Any) -> None:
    """Add ``report``, ``replay``, ``export`` and ``sweep`` to the parser of ``sota-grpo``."""
    summary = "write an HTML report of one run or several"
    add = add_parser(commands, "report", summary, report.__doc__, report).add_argument
    add("runs", nargs="+", metavar="RUN", help="run directory, or a folder of runs (a multirun)")
    add("--out", metavar="FILE", help="HTML file; default: report.html in RUN, for several runs in the current folder")

    summary = "recompute a stored step, also with other algorithms"
    parser = add_parser(commands, "replay", summary, replay.__doc__, replay)
    add, number = parser.add_argument, whole("the number of a step", least=0)
    add("run_dir", metavar="RUN", help="directory of the run")
    algorithms = "algorithm=A,B,..: presets, FILE.py:FUNCTION, or run (the run's); other options apply to all"
    add("overrides", metavar="OPTION=VALUE", nargs="*", help=algorithms)
    add("--step", metavar="N", type=number, help="number of the step; default: the last that can be replayed")
    add("--json", action="store_true", help="print the results as JSON")
    add_trust(parser)

    summary = "export a run's model with a model card, or the run as a verl command"
    parser = add_parser(commands, "export", summary, export.__doc__, export)
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="a run directory")
    add("--to", required=True, choices=("hf", "verl"), help="hf: the model; verl: a script that trains the same")
    add("--out", metavar="DIR", help="new or empty folder; default: RUN/export/hf or RUN/export/verl")
    steps = "hf: export the checkpoint after N steps; best: of train.keep_best; default: the final model, or the newest"
    add("--step", metavar="N", type=step, help=steps)
    add("--adapter", action="store_true", help="hf: export the LoRA adapter alone")
    add("--dtype", choices=DTYPES[1:], help="hf: dtype of the weights; default: the trained model's")
    add_trust(parser)

    add = add_parser(commands, "sweep", "compare the runs of a sweep", sweep.__doc__, sweep).add_argument
    add("directory", nargs="?", metavar="DIR", help="folder of runs; default: the newest sweep in multirun/")
    add("--sort", metavar="METRIC", help="sort by this metric; default: eval/accuracy, or reward if not evaluated")
    add("--ascending", action="store_true", help="sort the smallest first")
    add("--json", action="store_true", help="print runs with all metrics, and means over seeds, as JSON")


def report(options: argparse.Namespace) -> int:
    """Write an HTML report of one run, several runs or a sweep; a single file that needs no server or network.

    It shows curves with standard errors, differences between configs, prompt groups with responses and rewards, tokens
    of stored steps, time per phase, policy ages, checks and configs. Runs may be finished, interrupted or training::

        sota-grpo report outputs/2026-01-31/10-00-00
        sota-grpo report multirun/2026-01-31/10-00-00 --out sweep.html
    """
    from sota_grpo.report import write_report

    folder = Path(options.runs[0]) if len(options.runs) == 1 else Path()
    out = Path(options.out) if options.out else folder / "report.html"
    if options.out and not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; create it.")

    def left_out(sentence: str) -> None:
        print(f"Left out: {readable(sentence)}", file=sys.stderr)

    path = write_report(options.runs, out, on_left_out=left_out)
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def replay(options: argparse.Namespace) -> int:
    """Recompute a stored training step of a run on the CPU, optionally with other algorithms.

    Losses, gradient norms and fractions of tokens are computed from the stored responses and rewards and from the
    checkpoint before the step; no engine is started. With other algorithms, cosines between the gradients are added,
    and the tables are saved for ``sota-grpo report``. A run stores step 0 and the step after each checkpoint::

        sota-grpo replay outputs/2026-01-31/10-00-00 --step 20
        sota-grpo replay outputs/2026-01-31/10-00-00 --step 20 algorithm=dapo,gspo,mine.py:sapo train.epochs=2
        sota-grpo replay outputs/2026-01-31/10-00-00 algorithm.clip_high=0.28 policy.kl_coef=0 --json

    The exit code is 0 if the step could be computed, whether or not the values match those that the run logged.
    """
    from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES
    from sota_grpo.recording.run_files import save_replay

    run_dir = require_run(options, UNUSED_WITHOUT_SAMPLES)
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
        except UserError as error:  # the run is read-only; its figures are printed
            print(f"sota-grpo: {error}", file=sys.stderr)
    return 0


def _table(corner: str, rows: Mapping[str, Mapping[str, float | None]]) -> list[list[str]]:
    """Return header and rows of a table as text, with nine digits, so that different float32 values differ.

    >>> _table("", {"kl": {"stored": 1 / 3, "dapo": None}})
    [['', 'stored', 'dapo'], ['kl', '0.333333333', '-']]
    """
    head = [corner, *next(iter(rows.values()))]
    return [head, *([n, *("-" if v is None else f"{v:.9g}" for v in row.values())] for n, row in rows.items())]


def export(options: argparse.Namespace) -> int:
    """Export the model that a run has trained, or the run as a command of verl.

    - ``--to hf``: the model with adapters merged (``--adapter``: only the PEFT adapter), and a model card for the hub
    - ``--to verl``: run_verl.sh, a command for verl 0.9 that trains the same, with data and reward function

    A comment in the script lists the options that verl does not have::

        sota-grpo export outputs/2026-01-31/10-00-00 --to hf --out my-model
        sota-grpo export outputs/2026-01-31/10-00-00 --to verl
    """
    of_model = {"--adapter": options.adapter or None, "--step": options.step, "--dtype": options.dtype}
    for option in [name for name, value in of_model.items() if value is not None and options.to != "hf"]:
        raise UserError(f"{option} is for --to hf; --to verl translates the whole run: leave it out.")
    if options.adapter and options.dtype:
        raise UserError("--dtype has no effect on --adapter, which keeps the dtype of its training; leave it out.")
    from sota_grpo.assembly.compose import UNUSED_WITHOUT_LOSS, UNUSED_WITHOUT_SAMPLES

    run_dir = require_run(options, (*UNUSED_WITHOUT_LOSS, *(UNUSED_WITHOUT_SAMPLES if options.to == "hf" else ())))
    from sota_grpo.migration.export import write_hf, write_verl

    out = run_dir / "export" / options.to if options.out is None else Path(options.out).expanduser()
    if options.to == "hf":
        chosen = {"step": options.step, "adapter": options.adapter, "dtype": options.dtype}
        steps = write_hf(run_dir, out, **chosen, trust=options.trust_run)
        print(f"{out}: the {'adapter' if options.adapter else 'model'} after {steps} steps, and its card README.md.")
    else:
        write_verl(run_dir, out, trust=options.trust_run)
        print(f"{out}: run_verl.sh, train.parquet, heldout.parquet, reward.py; a comment says what differs in verl.")
    return 0


def sweep(options: argparse.Namespace) -> int:
    """Print a table of the runs of a sweep, while it runs or afterwards.

    Each row has the options in which the runs differ, the mean reward of the last 10 steps, the last held-out accuracy
    with its standard error, the completed steps, the state, and the time of steps and evaluations. If there are several
    seeds, a second table averages the finished runs that differ only in their seed. DIR may be any folder of run
    directories; the default is the newest sweep in ``multirun/``::

        sota-grpo sweep multirun/2026-01-31/10-00-00
        sota-grpo sweep --sort time/step_s --ascending
        sota-grpo sweep multirun/2026-01-31/10-00-00 --json > sweep.json
    """
    from sota_grpo.sweeps import FOLDER, as_json, as_text, read_sweep

    folders = [options.directory] if options.directory else sorted(Path(FOLDER).glob("*/*/"))
    if not folders:
        raise UserError(f"There is no sweep in {FOLDER}/, the default; give the directory of a sweep.")
    table = read_sweep(Path(folders[-1]), options.sort, ascending=options.ascending)
    names = table.measured()
    if options.sort and options.sort not in names:
        near = get_close_matches(options.sort, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose from {', '.join(names) or 'nothing yet'}."
        raise UserError(f"--sort {options.sort}: no run measured it{hint}")
    if options.json:
        print(json.dumps(as_json(table), indent=1, allow_nan=False))
    else:
        sys.stdout.write(as_text(table, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    return 0
