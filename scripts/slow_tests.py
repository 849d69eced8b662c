"""Run the tests marked ``slow``, file after file in an order drawn from a seed, for so many minutes.

Each file has a pytest process of its own, which ends with its first failure. When the time is over, the file at hand is
interrupted; it and those after it are named as not reached, which is no failure. Another seed begins with other files.

Usage: ``python scripts/slow_tests.py --minutes 30 --seed "$(git rev-parse HEAD)"``; without ``--minutes`` all files.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

LEAST_S = 120.0  # with less a file would hardly come to its first test
GRACE_S = 60.0  # for an interrupted file to end what it started
PYTEST = (sys.executable, "-m", "pytest", "-m", "slow")


@dataclass(frozen=True)
class Outcome:
    """How a file ended: how many tests ``passed``, ``failed`` and were ``skipped``, and whether it was interrupted."""

    counts: Counter[str]
    is_cut: bool = False


@dataclass
class Result:
    """What became of all files.

    >>> print(Result(Counter(passed=3, skipped=1), ["tests/e2e/test_faults.py"]))
    Not reached: tests/e2e/test_faults.py
    3 passed, 0 failed, 1 skipped
    """

    counts: Counter[str] = field(default_factory=Counter)
    unreached: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"Not reached: {name}" for name in self.unreached]
        if self.counts.total():
            lines.append(", ".join(f"{self.counts[kind]} {kind}" for kind in ("passed", "failed", "skipped")))
        return "\n".join(lines)


def ordered(names: Mapping[str, int], seed: str) -> list[str]:
    """The names in the seed's order, whatever order they come in."""
    return random.Random(seed).sample(sorted(names), len(names))


def run_within(
    names: list[str],
    budget_s: float,
    run: Callable[[str, float], Outcome],
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """Run one after the other while ``budget_s`` lasts; ``run(name, limit_s)`` gets what is left of it."""
    result, until_s = Result(), clock() + budget_s
    for name in names:
        if (left_s := until_s - clock()) < LEAST_S:
            result.unreached.append(name)
            continue
        outcome = run(name, left_s)
        result.counts += outcome.counts
        if outcome.is_cut:
            result.unreached.append(name)
    return result


def run_file(path: str, limit_s: float) -> Outcome:
    """Run the slow tests of one file up to the first that fails; after ``limit_s`` they are interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        process = subprocess.Popen([*PYTEST, "-x", f"--junitxml={report}", path], start_new_session=True)
        try:
            code = process.wait(None if math.isinf(limit_s) else limit_s)
        except subprocess.TimeoutExpired:
            # a failure would have ended it before: what fails from here on fails because of the interrupt
            process.send_signal(signal.SIGINT)
            _end(process)
            return Outcome(Counter(passed=_counts(report)["passed"]), is_cut=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        counts = _counts(report)
    if code != 0 and not counts["failed"]:  # it was killed, or failed outside its tests
        counts["failed"] = 1
    return Outcome(counts)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _counts(report: Path) -> Counter[str]:
    """The numbers of tests in a JUnit report; none where pytest did not come to write it."""
    if not report.exists():
        return Counter()
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed, skipped = number["failures"] + number["errors"], number["skipped"]
    return Counter(passed=number["tests"] - failed - skipped, failed=failed, skipped=skipped)


def slow_files() -> dict[str, int]:
    """The files that have slow tests, and how many."""
    done = subprocess.run([*PYTEST, "--collect-only", "-qq"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{done.stdout}{done.stderr}\nThe slow tests could not be collected.")
    return {name: int(count) for name, count in re.findall(r"^(\S+\.py): (\d+)$", done.stdout, re.MULTILINE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()
    files = slow_files()

    def run(name: str, limit_s: float) -> Outcome:
        print(f"\n{name}: {files[name]} slow tests, {limit_s / 60:.0f} minutes left", flush=True)
        return run_file(name, limit_s)

    result = run_within(ordered(files, options.seed), options.minutes * 60, run)
    print(f"\n{result}", flush=True)
    sys.exit(1 if result.counts["failed"] else 0)


if __name__ == "__main__":
    main()
