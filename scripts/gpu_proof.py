"""Proof on one GPU, stage by stage: ``python scripts/gpu_proof.py kernels`` (then runs, speed, memory, processes), or
several: ``python scripts/gpu_proof.py kernels memory``.

Every check prints one line of JSON with what was measured, what was allowed and whether it passed, and a table comes
last. A stage starts no further check after 80 % of ``--limit`` seconds, nor any after ``--deadline`` seconds in all,
and names those that it left out. Exit code 1 if a check failed. ``--small`` takes shapes for a device that is slow (one
that is only pretended, or a CPU).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.proof import Finding, Options

STAGES = ("kernels", "runs", "engine", "speed", "memory", "processes")


Check = Callable[[Options], Iterator[Finding]]


def run_stage(name: str, checks: list[Check], options: Options, limit_s: float) -> list[Finding]:
    """Make the checks of a stage while there is time; an exception is a finding, and the next check continues."""
    began, measured = time.perf_counter(), []
    for index, check in enumerate(checks):
        if time.perf_counter() - began > 0.8 * limit_s:
            left = [each.__name__ for each in checks[index:]]
            measured.append(report(name, Finding("left out for lack of time", False, {"checks": left}), 0.0))
            break
        since = time.perf_counter()
        gc.collect()  # compiled models are cycles, which hold the device's memory
        try:
            for finding in check(options):
                measured.append(report(name, finding, time.perf_counter() - since))
                since = time.perf_counter()
                if since - began > 0.8 * limit_s:
                    break
        except Exception as error:  # the rest of the stage may still show something
            traceback.print_exc()
            figures = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            measured.append(report(name, Finding(check.__name__, False, figures), time.perf_counter() - since))
    return measured


def checks_of(stage: str) -> list[Check]:
    return importlib.import_module(f"scripts.proof.{stage}").CHECKS


def forget() -> None:
    """What an earlier stage has compiled, of which there is a limit, and the memory that it has left reserved."""
    import torch

    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()


def report(stage: str, finding: Finding, seconds: float) -> Finding:
    line = {"stage": stage, "what": finding.what, "passed": finding.passed, **finding.figures}
    print(json.dumps(line | {"seconds": round(seconds, 2)}), flush=True)
    return finding


def table(found: list[Finding]) -> str:
    """The findings, one line each."""
    marks = {True: "ok  ", False: "FAIL", None: "    "}
    lines = []
    for finding in found:
        shown = [f"{name} {short(value)}" for name, value in finding.figures.items()]
        lines.append(f"{marks[finding.passed]} {finding.what}: {', '.join(shown)}"[:300])
    return "\n".join(lines)


def short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", choices=STAGES, nargs="+", metavar="stage", help=", ".join(STAGES))
    parser.add_argument("--limit", type=float, default=300.0, help="seconds, of each stage")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds, of all stages together")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", help="names of checks")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu_proof"), help="for profiles and runs")
    parsed = parser.parse_args()
    parsed.out.mkdir(parents=True, exist_ok=True)
    options, measured, began = Options(parsed.device, parsed.small, parsed.out), [], time.perf_counter()
    for stage in parsed.stages:
        forget()
        chosen = [check for check in checks_of(stage) if not parsed.only or check.__name__ in parsed.only]
        left = parsed.deadline - (time.perf_counter() - began)
        measured += run_stage(stage, chosen, options, max(0.0, min(parsed.limit, left)))
    print(table(measured), flush=True)
    sys.exit(any(finding.passed is False for finding in measured))


if __name__ == "__main__":
    main()
