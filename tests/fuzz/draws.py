"""``python -m tests.fuzz.draws --minutes 60 [--seed 7] [PYTEST ARGUMENT ..]``: the tests with other random draws, for
so long; exit code 1 and the commands that repeat them where some failed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASS = ("-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not slow", "-r", "")


class Failures:
    """A plugin of pytest: the command that repeats each test that failed."""

    def __init__(self) -> None:
        self.commands: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.commands[report.nodeid] = dict(report.sections).get("Repeat it by", "a process of tests ended")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.draws", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000, help="the first; others without it")
    parser.add_argument("--each-s", type=float, default=1.0, help="for one test in one pass over all")
    options, arguments = parser.parse_known_args()
    os.chdir(ROOT)
    ends, seed, actual = time.monotonic() + 60 * options.minutes, options.seed, dict[str, str]()
    while (left_s := ends - time.monotonic()) > 0:
        os.environ |= {"TEST_SEED": str(seed), "PYTHONHASHSEED": str(seed)}
        bounds = [f"--minutes={left_s / 60}", f"--files-by={seed}", f"--redraw-s={options.each_s}"]
        failures = Failures()
        print(f"== seed {seed}, {left_s / 60:.0f} minutes left", flush=True)
        code = pytest.main([*PASS, *bounds, *arguments], plugins=[failures])
        actual |= failures.commands
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return int(code)
        seed += 1
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name, command in actual.items():
        alone = subprocess.run(command, shell=True, capture_output=True, cwd=ROOT).returncode
        print(f"FAILED {name}, {'by itself too' if alone else 'but not by itself'}:\n  {command}")
    print(f"{len(actual)} tests failed with the seeds {options.seed} to {seed - 1}.")
    return 1 if actual else 0


if __name__ == "__main__":
    sys.exit(main())
