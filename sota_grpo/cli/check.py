"""``sota-grpo check``: run the start-up checks of training on any config, without training.

Model, engine, reference and task are built as for training, a few responses are sampled, and each check prints what it
measured. Files are written only to ``--run-dir``::

    sota-grpo check --config-name grpo_cpu engine=transformers
    sota-grpo check --config-name grpo_gsm8k model.name=./my-model env.dataset_path=train.jsonl

The exit code is 0 if no check failed and 1 if one did.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sota_grpo.cli import add_config, add_parser, config_of

if TYPE_CHECKING:
    from sota_grpo.training.gate import Check


def add_command(commands: Any) -> None:
    """Add ``check`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "check", "run the start-up checks of a config, without training", __doc__, run)
    add_config(parser)
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder for the engine's logs and gate.json")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the checks and print their results; return 0 if none failed, else 1; UserError if the config is unusable."""
    from sota_grpo.assembly.preflight import announce, preflight
    from sota_grpo.recording.progress import Heartbeat
    from sota_grpo.run.entry import quiet_console

    config = config_of(options)
    preflight(config)
    quiet_console()
    began, out = time.perf_counter(), sys.stdout

    def show(check: Check) -> None:
        if not options.json:
            print(f"{check.outcome}  {check.name}: {check.sentence} ({check.seconds:.1f} s)", file=out, flush=True)

    with redirect_stdout(sys.stderr), Heartbeat():  # libraries and reward functions may print
        announce(config)
        from sota_grpo.assembly.evaluation import check

        checks = check(config, run_dir=options.run_dir, on_check=show)
    made = [one.passed for one in checks if one.passed is not None]
    seconds = time.perf_counter() - began
    if options.json:
        rows = [{"name": c.name, "passed": c.passed, "sentence": c.sentence, "seconds": c.seconds} for c in checks]
        print(json.dumps({"passed": all(made), "seconds": seconds, "checks": rows}, indent=1))
    else:
        print(f"{sum(made)} of {len(made)} checks passed in {seconds:.1f} s")
    return 0 if all(made) else 1
