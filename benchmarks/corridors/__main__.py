"""Make the corridors and check runs against them.

``python -m benchmarks.corridors make RUN`` does eight seeds, two at a time, and writes ``corridors/RUN.json`` (with
``--out FOLDER`` it continues where it was stopped);
``check RUN`` does a ninth and prints each value outside; ``check RUN --plant FAULT`` does it with a fault, and ``show
RUN`` prints the corridor. RUN: demonstration, smollm (needs the packages of docs/tasks.md) or asynchronous (needs Ray).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.corridors import METRICS, Corridor, Values, corridors, departures, left_out
from benchmarks.corridors.runs import FAULTS, RUNS, execute, logged
from sota_grpo.recording.run_files import METRICS_FILE

FOLDER = Path(__file__).parent
NUM_SEEDS, NINTH = 8, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; of ``check``, 1 if the run leaves its corridor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "check", "show"))
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--seed", type=int, default=NINTH, help="of check")
    parser.add_argument("--plant", choices=FAULTS, metavar="FAULT", help=f"of check: {', '.join(FAULTS)}")
    parser.add_argument("--jobs", type=int, default=2, help="of make: runs at a time")
    parser.add_argument("--out", type=Path, help="keep the run directories in this folder")
    options = parser.parse_args(argv)
    if options.action == "show":
        for name, limit in stored(options.run).items():
            print(name, *(f"{low:.4g}..{high:.4g}" for low, high in zip(limit.low, limit.high)))
        return 0
    with folder(options.out) as out:
        if options.action == "make":
            make(options.run, options.jobs, out)
            return 0
        left = check(options.run, out, seed=options.seed, fault=options.plant)
    print("\n".join(left) or f"{options.run}, seed {options.seed}, stays in its corridor.")
    return int(bool(left))


@contextmanager
def folder(path: Path | None) -> Iterator[Path]:
    if path is not None:
        path.mkdir(parents=True, exist_ok=True)
        yield path.resolve()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def make(name: str, jobs: int, out: Path) -> None:
    """Do the seeds 0 to 7 that are not complete in ``out`` and write the values of all, rounded to four digits."""

    def values_of_seed(seed: int) -> dict[str, list[float]]:
        run_dir = out / f"{name}-{seed}"
        if (run_dir / METRICS_FILE).exists() and len((done := logged(run_dir))["reward"]) == RUNS[name].num_steps:
            return done
        shutil.rmtree(run_dir, ignore_errors=True)
        return execute(name, seed, run_dir)

    with ThreadPoolExecutor(jobs) as pool:
        seeds = list(pool.map(values_of_seed, range(NUM_SEEDS)))
    values = {metric: [[float(f"{value:.4g}") for value in seed[metric]] for seed in seeds] for metric in METRICS}
    parts = [f'"{metric}": [\n  {rows(values[metric])}]' for metric in METRICS]
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")
    print(report(name))


def rows(values: Sequence[Sequence[float]]) -> str:
    return ",\n  ".join(json.dumps(row) for row in values)


def values_of(name: str) -> dict[str, Values]:
    """Return the stored values of a run, ``[seeds, steps]`` by metric."""
    return {metric: np.array(rows) for metric, rows in json.loads((FOLDER / f"{name}.json").read_text()).items()}


def stored(name: str) -> Mapping[str, Corridor]:
    return corridors(values_of(name))


def report(name: str) -> str:
    """Return what leave-one-out says of the stored seeds."""
    lines = [
        f"{name}, seed {seed} against the others: {left[0]}"
        for seed, left in enumerate(left_out(values_of(name)))
        if left
    ]
    return "\n".join([*lines, f"{name}: {len(lines)} of {NUM_SEEDS} seeds leave the corridor of the others."])


def check(name: str, out: Path, *, seed: int = NINTH, fault: str | None = None) -> list[str]:
    """Do one run; return a sentence for each value outside the corridor, the first step's first."""
    return departures(execute(name, seed, out / f"{name}-{seed}-{fault or 'healthy'}", fault), stored(name))


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(main())
