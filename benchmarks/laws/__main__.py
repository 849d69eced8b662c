"""Check the laws of RL training on every trainer: ``python -m benchmarks.laws``.

It takes three minutes on two cores, and at the first time downloads the wheels of :mod:`benchmarks.laws.wheels`, 50 MB.
``--only skyrl --law kl_pull`` reproduces one cell. ``--write`` writes the table to docs/laws.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "laws.md"
TIME_LIMIT_S = 600  # of one trainer, its download included


def main(arguments: list[str] | None = None) -> int:
    from benchmarks.laws.adapters import NAMES

    parser = argparse.ArgumentParser(prog="python -m benchmarks.laws", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), help="trainers; default: all")
    parser.add_argument("--law", nargs="+", help="names of laws; default: all")
    parser.add_argument("--wheels", type=Path, default=ROOT / "outputs" / "laws", help="where wheels are unpacked")
    parser.add_argument("--write", action="store_true", help="write docs/laws.md, which needs all trainers and laws")
    parser.add_argument("--json", action="store_true", help="judge one trainer in this process and print JSON")
    options = parser.parse_args(arguments)
    if options.json:
        print(json.dumps(judged(options.only[0], options.wheels.resolve(), options.law)))
        return 0
    if options.write and (options.law or set(options.only) != set(NAMES)):
        parser.error("--write needs all trainers and laws; leave out --only and --law")
    results = {name: in_process(name, options.wheels, options.law) for name in options.only}
    for name, result in results.items():
        print(f"\n{name} {result.get('version', '')}")
        if "reason" in result:
            print(f"  not installed: {result['reason']}")
        for law, (verdict, measured) in result.get("outcomes", {}).items():
            print(f"  {law:16s} {verdict:15s} {measured}")
    if options.write:
        from benchmarks.laws.page import page

        PAGE.write_text(page(results, time.strftime("%d %B %Y").lstrip("0")))
        print(f"\nwritten to {PAGE}")
    return 0


def in_process(name: str, wheels: Path, laws: list[str] | None) -> dict[str, Any]:
    """The result of one trainer, from a process of its own, because a package may change what it imports."""
    command = [sys.executable, "-m", "benchmarks.laws", "--only", name, "--wheels", str(wheels), "--json"]
    quiet = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command + (["--law", *laws] if laws else []),
            env=os.environ | quiet, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"reason": f"no result within {TIME_LIMIT_S} s"}
    if done.returncode:
        return {"reason": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def judged(name: str, wheels: Path, laws: list[str] | None = None) -> dict[str, Any]:
    """Version, outcomes and notes of one trainer; or the reason why it is not installed."""
    from benchmarks.laws.adapters import load
    from benchmarks.laws.laws import FAILS, LAWS
    from benchmarks.laws.wheels import NotInstalled, version

    unknown = set(laws or ()) - LAWS.keys()
    if unknown:
        raise SystemExit(f"unknown laws: {', '.join(sorted(unknown))}; choose of {', '.join(LAWS)}")
    try:
        adapter, found = load(name, wheels), "" if name == "ours" else version(name)
    except NotInstalled as error:
        return {"reason": str(error)}
    outcomes = {law: check(adapter) for law, check in LAWS.items() if not laws or law in laws}
    notes = {law: adapter.notes.get(law, "") for law, outcome in outcomes.items() if outcome.verdict == FAILS}
    return {"version": found, "outcomes": outcomes, "notes": notes, "unmet": adapter.unmet}


if __name__ == "__main__":
    raise SystemExit(main())
