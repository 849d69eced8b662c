"""Soak: long runs whose memory, file handles, threads, shared memory and disk must not grow.

``python -m benchmarks.soak`` does 2,000 steps of the scripted engine and 300 of the embedded transformers engine, with
evaluations, checkpoints and stored steps in between, and measures the run with all its child processes at about 300
moments. ``--plant leak`` keeps 1 MB a step, which must fail. Exit code 1 if a quantity grows or could not be judged.

The judgement is a regression on the second half of the series, when caches are full: the half is cut into ``BLOCKS``
blocks of equal length, and the blocks' means (nearly independent, however the moments within one correlate) are
regressed on the step. With the slope's interval at 99 % (Student, ``BLOCKS - 2`` degrees of freedom):

- "flat": the interval's lower end is at most the quantity's allowance, its upper end below the fault to be seen;
- "grows": the lower end is above the allowance;
- "too noisy": neither, so the run must be longer.

``memory`` is proportional set size (PSS) of the process tree, ``shm`` the bytes of /dev/shm and ``semaphores`` its
entries (of the whole machine: nothing else may run), ``disk`` what the run directory and TMPDIR hold but for the logs
with a line per step and the stored steps, of which each checkpoint adds one.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from benchmarks.corridors import t_quantile
from benchmarks.corridors.runs import PLANTED, ROOT
from sota_grpo.recording.run_files import METRICS_FILE

BLOCKS = 8
MOMENTS = 300
SHM = Path("/dev/shm")
LOGS = (".jsonl", ".log", ".html")  # a line per step, or a picture of them
#: By quantity: the slope per step that is allowed, and the one that must be seen.
ALLOWED: Mapping[str, tuple[float, float]] = {
    "memory": (0.02e6, 1e6),  # bytes
    "handles": (0.002, 0.1),
    "threads": (0.002, 0.1),
    "semaphores": (0.002, 0.1),
    "shm": (0.02e6, 1e6),
    "disk": (0.02e6, 1e6),
}
SMALL = (
    *("env.num_envs=16", "env.repeats=4", "env.max_samples=256", "env.num_heldout=32", "eval.num_samples=8"),
    *("train.dialog_turns_per_batch=16", "train.optim_batch_size=16", "inference_model.max_tokens=16"),
    *("eval.avg_at_k=0", "train.export_hf=false", "check.mode=off"),
)
RUNS = {"scripted": 2000, "transformers": 300}


@dataclass(frozen=True)
class Slope:
    """Growth per step over the second half: estimate and half-width of its interval at 99 %."""

    per_step: float
    half_width: float

    def verdict(self, allowed: float, seen: float) -> str:
        """
        >>> Slope(0.0, 0.1).verdict(0.02, 1.0), Slope(1.0, 0.1).verdict(0.02, 1.0), Slope(0.0, 2.0).verdict(0.02, 1.0)
        ('flat', 'grows', 'too noisy')
        """
        if self.per_step - self.half_width > allowed:
            return "grows"
        return "flat" if self.per_step + self.half_width < seen else "too noisy"


def slope(steps: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the slope of the second half of a series.

    Raises:
        ValueError: the second half has fewer than two moments a block.

    >>> slope(range(100), [3.0 * step for step in range(100)]).per_step
    3.0
    """
    half = len(steps) // 2
    if len(steps) - half < 2 * BLOCKS:
        raise ValueError(f"{len(steps)} moments are too few for a slope: take at least {4 * BLOCKS}.")
    x = np.array([block.mean() for block in np.array_split(np.asarray(steps, float)[half:], BLOCKS)])
    y = np.array([block.mean() for block in np.array_split(np.asarray(values, float)[half:], BLOCKS)])
    x -= x.mean()
    per_step = float(x @ y / (x @ x))
    residual = y - y.mean() - per_step * x
    error = math.sqrt(float(residual @ residual) / (BLOCKS - 2) / float(x @ x))
    return Slope(round(per_step, 9), t_quantile(0.005, BLOCKS - 2) * error)


def command(engine: str, steps: int, run_dir: Path) -> list[str]:
    often = max(1, steps // 20)
    return [
        *(sys.executable, str(ROOT / "grpo.py"), "--config-name=grpo_cpu", f"hydra.run.dir={run_dir}"),
        *(*SMALL, f"engine={engine}", f"train.total_dialog_turns={16 * steps}"),
        *(f"eval.every={often}", f"train.checkpoint_frequency={often}"),
    ]


def measured(root: psutil.Process, folders: Sequence[Path]) -> dict[str, float]:
    """Return each quantity of a process and its children now."""
    totals = dict.fromkeys(ALLOWED, 0.0)
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            totals["memory"] += process.memory_full_info().pss
            totals["handles"] += process.num_fds()
            totals["threads"] += process.num_threads()
    entries = [entry.stat().st_size for entry in _files(SHM)]
    files = [
        file.stat().st_size
        for folder in folders
        for file in _files(folder)
        if file.suffix not in LOGS and file.parent.name != "steps"
    ]
    return totals | {"semaphores": len(entries), "shm": sum(entries), "disk": sum(files)}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def steps_done(run_dir: Path) -> int:
    with suppress(FileNotFoundError):
        return sum(b'"reward"' in line for line in (run_dir / METRICS_FILE).read_bytes().splitlines())
    return 0


def soak(engine: str, steps: int, out: Path, plant: str | None = None) -> dict[str, list[float]]:
    """Do the run; return the series of ``step`` and of each quantity.

    Raises:
        RuntimeError: the run failed; its output is in the message.
    """
    run_dir, temporary = out / engine, out / f"{engine}-tmp"
    temporary.mkdir(parents=True)
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT)]
    if plant is not None:
        environment["PLANTED"] = plant
        paths.insert(0, str(PLANTED))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    series: dict[str, list[float]] = {name: [] for name in ("step", *ALLOWED)}
    with (out / f"{engine}.txt").open("w+") as printed:
        run = subprocess.Popen(
            command(engine, steps, run_dir), env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed
        )
        next_step = 1.0
        while run.poll() is None:
            if (done := steps_done(run_dir)) >= next_step:
                with suppress(psutil.NoSuchProcess, FileNotFoundError):  # the run has ended, a file has just gone
                    moment = measured(psutil.Process(run.pid), (run_dir, temporary))
                    for name, value in {"step": done, **moment}.items():
                        series[name].append(value)
                    next_step = done + max(1.0, steps / MOMENTS)
            time.sleep(0.02)
        printed.seek(0)
        if run.returncode:
            raise RuntimeError(f"The soak run ended with code {run.returncode}: {printed.read()[-2000:]}")
    return series


def table(engine: str, series: Mapping[str, Sequence[float]]) -> tuple[str, bool]:
    """Return a line per quantity, and whether all are flat."""
    lines, flat = [], True
    for name, (allowed, seen) in ALLOWED.items():
        growth = slope(series["step"], series[name])
        verdict = growth.verdict(allowed, seen)
        unit, factor = (" kB", 1e-3) if allowed >= 1e3 else ("", 1.0)
        lines.append(
            f"| {engine} | {name} | {factor * series[name][-1]:,.0f}{unit} | {factor * growth.per_step:+.4f} +/- "
            f"{factor * growth.half_width:.4f}{unit} | {verdict} |"
        )
        flat &= verdict == "flat"
    return "\n".join(lines), flat


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--steps", type=int, help="steps of each run (default: 2000 scripted, 300 transformers)")
    parser.add_argument("--plant", choices=("leak",), help="keep 1 MB a step")
    options = parser.parse_args(argv)
    all_flat = True
    print("| engine | quantity | at the end | per step, second half | verdict |\n|---|---|---|---|---|")
    for engine in options.engines:
        with tempfile.TemporaryDirectory() as out:
            series = soak(engine, options.steps or RUNS[engine], Path(out), options.plant)
        lines, flat = table(engine, series)
        print(lines, flush=True)
        all_flat &= flat
    return int(not all_flat)


if __name__ == "__main__":
    sys.exit(main())
