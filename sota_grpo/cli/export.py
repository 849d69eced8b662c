"""``sota-grpo export``: what a run has trained, or the run itself, for others to go on with.

- ``--to hf``: the model, adapters merged (or, with ``--adapter``, the PEFT adapter), with a model card for the hub
- ``--to verl``: run_verl.sh, the command of verl 0.9 that trains the same, with its data and reward function

Options without a counterpart are named in the comment at the head of the script::

    sota-grpo export outputs/2026-01-31/10-00-00 --to hf --out my-model
    sota-grpo export outputs/2026-01-31/10-00-00 --to verl
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser, add_trust, tell_trust, whole
from sota_grpo.config import DTYPES
from sota_grpo.errors import UserError


def add_command(commands: Any) -> None:
    """Add ``export`` and its options to the parser of ``sota-grpo``."""
    summary = "write a run's model with a card, or the run as verl's command"
    parser = add_parser(commands, "export", summary, __doc__, run)
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="a run directory")
    add("--to", required=True, choices=("hf", "verl"), help="what to write")
    add("--out", metavar="DIR", help="where; new or empty; default: RUN/export/ and the name of the kind")
    count = whole("a number of steps", least=0)
    add("--step", metavar="N", type=count, help="hf: checkpoint after so many steps; default: the end, or the newest")
    add("--adapter", action="store_true", help="hf: the LoRA adapter alone")
    of_weights = "hf: of the weights; default: that of the model which was trained. Made from a checkpoint"
    add("--dtype", choices=DTYPES[1:], help=of_weights)
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Write what the options name; 0 once it is written."""
    of_model = {"--adapter": options.adapter or None, "--step": options.step, "--dtype": options.dtype}
    for option in [name for name, value in of_model.items() if value is not None and options.to != "hf"]:
        raise UserError(f"{option} goes with --to hf; --to verl translates the whole run.")
    if options.adapter and options.dtype:
        raise UserError("--dtype goes without --adapter; an adapter keeps the dtype in which it was trained.")
    from sota_grpo.assembly.compose import UNUSED_WITHOUT_LOSS, UNUSED_WITHOUT_SAMPLES, load_config
    from sota_grpo.run.entry import quiet_console

    quiet_console()
    run_dir = Path(options.run_dir).expanduser()
    unused = (*UNUSED_WITHOUT_LOSS, *(UNUSED_WITHOUT_SAMPLES if options.to == "hf" else ()))
    # that there is no run is told before torch is imported
    tell_trust(options, load_config(run_dir, trust=options.trust_run, unused=unused))
    from sota_grpo.migration.export import write_hf, write_verl

    out = run_dir / "export" / options.to if options.out is None else Path(options.out).expanduser()
    if options.to == "hf":
        chosen = {"step": options.step, "adapter": options.adapter, "dtype": options.dtype}
        steps = write_hf(run_dir, out, **chosen, trust=options.trust_run)
        print(f"{out}: the {'adapter' if options.adapter else 'model'} after {steps} steps, and its card README.md.")
    else:
        write_verl(run_dir, out, trust=options.trust_run)
        print(f"{out}: run_verl.sh, train.parquet, heldout.parquet, reward.py; its head says what differs there.")
    return 0
