"""``sota-grpo replay``: compute a stored step of a run again, offline on the CPU, and perhaps under another algorithm.

Advantages, loss terms and gradient norms follow from the stored responses and rewards and from the checkpoint before
the step; no engine is started and nothing is written. A run keeps step 0 and the steps after its checkpoints::

    sota-grpo replay outputs/2026-01-31/10-00-00 --step 20
    sota-grpo replay outputs/2026-01-31/10-00-00 --step 20 algorithm=dapo
    sota-grpo replay outputs/2026-01-31/10-00-00 algorithm.clip_high=0.28 policy.kl_coef=0 --json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sota_grpo.cli import add_parser, add_trust, tell_trust, whole

_WIDTH = 28  # of the title that names the overrides


def add_command(commands: Any) -> None:
    """Add ``replay`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(
        commands, "replay", "compute a stored step again, perhaps under another algorithm", __doc__, run
    )
    add = parser.add_argument
    add("run_dir", metavar="RUN", help="directory of the run")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="another algorithm: algorithm=PRESET, algorithm.OPTION=..")
    step = whole("the number of a step", least=0)
    add("--step", metavar="N", type=step, help="as in metrics.jsonl; default: the last that can be replayed")
    add("--json", action="store_true", help="print the figures as JSON")
    add_trust(parser)


def run(options: argparse.Namespace) -> int:
    """Replay the step and print what came of it; 0 once it is computed, whether or not it agrees.

    Raises:
        UserError: the step cannot be replayed, or not under these options.
    """
    from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, load_config
    from sota_grpo.run.entry import quiet_console

    quiet_console()
    run_dir = Path(options.run_dir)
    # what is wrong with the names is told before torch is imported
    config = load_config(run_dir, options.overrides, trust=options.trust_run, unused=UNUSED_WITHOUT_SAMPLES)
    tell_trust(options, config)
    from sota_grpo.assembly.replay import replayed

    result = replayed(run_dir, options.step, options.overrides, trust=options.trust_run)
    print(json.dumps(result, indent=2) if options.json else as_text(result), end="\n" if options.json else "")
    return 0


def as_text(result: Mapping[str, Any]) -> str:
    """What :func:`sota_grpo.assembly.replay.replayed` found, for a person to read."""
    start = result["checkpoint"] or "the initial weights"
    steps = result["optimizer_steps"]
    lines = [
        f"Step {result['step']} of {result['run']}: {result['samples']} samples in {result['groups']} groups, {steps} "
        f"optimizer step{'s' if steps != 1 else ''} from {start}",
        "",
        *_table(result),
        "",
        _verdict(result),
    ]
    if "clip" in result:
        lines += [_advantages(result["advantages"]), _clip(result["clip"])]
    return "\n".join([*lines, *result["notes"], ""])


def _table(result: Mapping[str, Any]) -> list[str]:
    titles = {name: name for name in ("stored", "replayed", "difference")}
    if "clip" in result:
        command = " ".join(result["overrides"])
        other = command if len(command) <= _WIDTH else command[: _WIDTH - 2] + ".."
        titles |= {"other": other, "other_difference": "difference"}
    rows = [["", *titles.values()]]
    rows += [[name, *(_number(row[column]) for column in titles)] for name, row in result["figures"].items()]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]).rstrip()
        for row in rows
    ]


def _number(value: float | None) -> str:
    """Nine digits, which tell float32 values apart.

    >>> _number(None), _number(0.0), _number(-0.5), _number(1 / 3)
    ('-', '0', '-0.5', '0.333333333')
    """
    return "-" if value is None else f"{value:.9g}"


def _verdict(result: Mapping[str, Any]) -> str:
    name, distance = result["worst"]["name"], result["worst"]["relative_difference"]
    if distance is None:
        return f"The replay does not agree with the run: only one of them has {name}."
    if distance == 0:
        return "The replay gives the losses and the gradient norm of the run exactly."
    outcome = "agrees" if result["agrees"] else "does not agree"
    return f"The replay {outcome} with the run: the largest relative difference is {distance:.1e} ({name})."


def _advantages(changed: Mapping[str, Any]) -> str:
    if not changed["changed"]:
        return f"Advantages: those of all {changed['samples']} samples are the same."
    largest = changed["largest"]
    return (
        f"Advantages: {changed['changed']} of {changed['samples']} samples have another; the largest change is that of "
        f"sample {largest['sample_id']} of group {largest['group_id']}, from {largest['replayed']:.4g} to "
        f"{largest['other']:.4g}."
    )


def _clip(clip: Mapping[str, Any]) -> str:
    text = f"Clip: it takes the gradient of {clip['other']} tokens instead of {clip['replayed']}, of {clip['tokens']}"
    if clip["newly"] is None:
        return f"{text}; the two do not train on the same tokens."
    return f"{text}; {clip['newly']} newly, {clip['no_longer']} no longer."
