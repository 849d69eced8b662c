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
    from sota_grpo.run.entry import quiet_console

    quiet_console()
    run_dir = Path(options.run_dir)
    config = load_config(run_dir, trust=options.trust_run, unused=UNUSED_WITHOUT_SAMPLES)
    tell_trust(options, config)
    from sota_grpo.assembly.replay import replayed

    result = replayed(run_dir, options.step, options.overrides, trust=options.trust_run)
    print(json.dumps(result, indent=2) if options.json else as_text(result), end="\n" if options.json else "")
    if result["algorithms"]:
        from sota_grpo.recording.replays import save_replay

        record = {"title": _title(result), "tables": _tables(result), "notes": [_verdict(result), *result["notes"]]}
        try:
            path = save_replay(run_dir, result["step"], options.overrides, record)
            print(f"{path}; sota-grpo report {run_dir} shows it.", file=sys.stderr)
        except UserError as error:  # of a run that cannot be written; its figures are printed
            print(f"sota-grpo: {error}", file=sys.stderr)
    return 0


def as_text(result: Mapping[str, Any]) -> str:
    """What :func:`sota_grpo.assembly.replay.replayed` found, for a person to read."""
    lines = [f"{result['run']}: {_title(result)}", ""]
    for rows in _tables(result):
        widths = [max(map(len, column)) for column in zip(*rows)]
        cells = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        lines += [*("  ".join(row).rstrip() for row in cells), ""]
    return "\n".join([*lines, _verdict(result), *result["notes"], ""])


def _title(result: Mapping[str, Any]) -> str:
    steps = result["optimizer_steps"]
    under = f"; under {' '.join(result['overrides'])}" if result["algorithms"] else ""
    return (
        f"Step {result['step']}, {result['samples']} samples in {result['groups']} groups, {steps} optimizer "
        f"step{'s' if steps != 1 else ''} from {result['checkpoint'] or 'the initial weights'}{under}"
    )


def _tables(result: Mapping[str, Any]) -> list[list[list[str]]]:
    """The figures and, with other algorithms, the cosines between the gradients; the first row of each is its head."""
    columns = ("stored", "replayed", "difference")
    figures = [["", *columns, *result["algorithms"]]]
    for name, row in result["figures"].items():
        figures.append([name, *map(_number, [*(row[column] for column in columns), *row["under"].values()])])
    cosines = [["cosine of gradients", *result["cosines"]]]
    cosines += [[name, *map(_number, row.values())] for name, row in result["cosines"].items()]
    return [figures, cosines] if result["cosines"] else [figures]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.9g}"  # nine digits tell float32 values apart


def _verdict(result: Mapping[str, Any]) -> str:
    name, distance = result["worst"]["name"], result["worst"]["relative_difference"]
    if distance is None:
        return f"The replay does not agree with the run: only one of them has {name}."
    if distance == 0:
        return "The replay gives the losses and the gradient norm of the run exactly."
    outcome = "agrees" if result["agrees"] else "does not agree"
    return f"The replay {outcome} with the run: the largest relative difference is {distance:.1e} ({name})."
