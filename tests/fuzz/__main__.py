"""``python -m tests.fuzz --minutes 60 --seed 7 [TARGET ..]``: a table of what was tried; exit code 1 after a crash."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from rich.console import Console
from rich.table import Table

MEMORY_GB = 6
LONGEST_S = 20.0  # of one input, in processor time: a grader has 60 s of wall-clock time
EXAMPLES = 30  # of one seed; Hypothesis shrinks what fails
LEAST_SEEDS = 10  # however slow the machine is: of 30 tables all may be refused


def fuzz(name: str, seconds: float, first_seed: int) -> dict[str, Any]:
    """Try seed after seed for so long, ten at least, in this process; a crash raises, shrunk to its smallest input."""
    from sota_grpo.errors import UserError
    from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    tried, refused, longest = 0, 0, 0.0
    ends = time.monotonic() + seconds

    def check(drawn: Any) -> None:
        nonlocal tried, refused, longest
        tried += 1
        began = time.process_time()
        try:
            target.check(drawn)
        except UserError:
            refused += 1
        took = time.process_time() - began
        longest = max(longest, took)
        assert took < LONGEST_S, f"it took {took:.1f} s"

    run = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    number = first_seed
    while number < first_seed + LEAST_SEEDS or time.monotonic() < ends:
        seed(number)(run(given(target.drawn)(check)))()
        number += 1
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seeds": number - first_seed, "tried": tried, "refused": refused, "longest_s": longest, "peak_mb": peak_mb}


def apart(names: Sequence[str], seconds: float, first_seed: int) -> dict[str, dict[str, Any] | str]:
    """:func:`fuzz` of each for so long, in one process with bounded memory; a string where that ended before it."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        results.touch()
        code = f"from tests.fuzz.__main__ import child; child({[*names]!r}, {seconds}, {first_seed}, {str(results)!r})"
        try:
            limit = seconds * len(names) + 300
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit)
            how = f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        except subprocess.TimeoutExpired as late:
            how = f"one input did not end: {str(late.stderr)[-2000:]}"
        actual = dict(zip(names, map(json.loads, results.read_text().splitlines())))
    left = names[len(actual) :]
    return actual | {name: how if name == left[0] else f"not tried, since {left[0]} failed" for name in left}


def child(names: Sequence[str], seconds: float, first_seed: int, results: str) -> None:
    """What :func:`apart` runs: a line of results for each."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_GB << 30, MEMORY_GB << 30))
    for name in names:
        actual = fuzz(name, seconds, first_seed)
        with Path(results).open("a") as file:
            print(json.dumps(actual), file=file)


def main() -> int:
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], help="all of them without any")
    parser.add_argument("--minutes", type=float, default=1.0, help="of all targets together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    table = Table("target", "seeds", "inputs", "refused by a sentence", "longest, s", "memory, MB")
    crashes = 0
    for name in names:
        actual = apart([name], 60 * options.minutes / len(names), options.seed)[name]
        if isinstance(actual, str):
            crashes += 1
            print(f"== {name}, from seed {options.seed}\n{actual}", file=sys.stderr)
            table.add_row(name, "crashed")
        else:
            counts = [f"{actual[key]:,}" for key in ("seeds", "tried", "refused")]
            table.add_row(name, *counts, f"{actual['longest_s']:.2f}", f"{actual['peak_mb']:.0f}")
    Console().print(table)
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
