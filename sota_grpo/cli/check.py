"""``sota-grpo check``: the gate of a run alone, on any config, before you start it or hand it to a queue.

Model, engine, reference and task are put together as ``grpo.py`` would, a few samples are drawn, and each check says
what it measured. Nothing is trained and no run directory is written::

    sota-grpo check --config-name grpo_cpu engine=transformers
    sota-grpo check --config-name grpo_gsm8k model.name=./my-model env.dataset_path=train.jsonl

The exit code is 0 when all checks passed and 1 when one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from sota_grpo.cli import add_config, add_parser, config_of

if TYPE_CHECKING:
    from sota_grpo.training.gate import Check


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add ``check`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "check", "check that a config would train right mathematics", __doc__, run)
    add_config(parser)
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="keep what the engine logs, and gate.json, there")
    parser.add_argument("--json", action="store_true", help="the outcomes as JSON instead of sentences")


def run(options: argparse.Namespace) -> int:
    """Make the checks; 0 when all passed."""
    from sota_grpo.assembly.preflight import announce, preflight
    from sota_grpo.recording.progress import Heartbeat
    from sota_grpo.run.entry import quiet_console

    config = config_of(options)
    preflight(config)
    quiet_console()
    began = time.perf_counter()
    out = sys.stdout
    with redirect_stdout(sys.stderr), Heartbeat():  # libraries and reward functions may print
        announce(config)
        from sota_grpo.assembly.evaluation import check

        checks = check(
            config,
            run_dir=options.run_dir,
            on_check=lambda one: None if options.json else print(_sentence(one), file=out, flush=True),
        )
    made = [one.passed for one in checks if one.passed is not None]
    seconds = time.perf_counter() - began
    if options.json:
        rows = [{"name": c.name, "passed": c.passed, "sentence": c.sentence, "seconds": c.seconds} for c in checks]
        print(json.dumps({"passed": all(made), "seconds": seconds, "checks": rows}, indent=1))
    else:
        print(f"{sum(made)} of {len(made)} checks passed in {seconds:.1f} s")
    return 0 if all(made) else 1


def _sentence(check: Check) -> str:
    return f"{check.outcome}  {check.name}: {check.sentence} ({check.seconds:.1f} s)"
