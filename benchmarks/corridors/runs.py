"""The three short runs, what they log, and faults that are planted into them from outside the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from sota_grpo.recording.run_files import METRICS_FILE, ROLLOUTS_FILE

ROOT = Path(__file__).resolve().parents[2]
PLANTED = Path(__file__).parent / "planted"
QUIET = ("check.mode=off", "eval.mode=off", "train.checkpoint_frequency=0", "train.export_hf=false")
#: Each run has the reference's KL, which measures how far the policy has moved, and float32, whose rounding is far
#: below the faults on every CPU.
EXACT = ("engine=transformers", "policy.kl_coef=0.001", "train.precision=fp32", "inference_model.torch_dtype=float32")


def batch(groups: int, repeats: int, steps: int) -> tuple[str, ...]:
    rows = groups * repeats
    return (
        f"env.num_envs={rows}",
        f"env.repeats={repeats}",
        "env.max_samples=512",  # every prompt is tokenized at the start
        f"train.dialog_turns_per_batch={rows}",
        f"train.optim_batch_size={rows}",
        f"train.total_dialog_turns={rows * steps}",
    )


@dataclass(frozen=True)
class Run:
    """A command of ``num_steps`` steps; ``lr`` is its learning rate."""

    script: str
    preset: str
    num_steps: int
    lr: float
    options: Sequence[str]

    def command(self, seed: int, run_dir: Path, *more: str) -> list[str]:
        options = (*QUIET, *EXACT, *self.options, f"optimizer.lr={self.lr}", f"seed={seed}", *more)
        script = str(ROOT / self.script)
        return [sys.executable, script, f"--config-name={self.preset}", f"hydra.run.dir={run_dir}", *options]


RUNS = {
    "demonstration": Run("grpo.py", "grpo_cpu", 20, 1e-4, batch(16, 4, 20)),
    "smollm": Run(
        "grpo.py",
        "smollm_ifeval",
        8,
        1e-4,
        (*batch(12, 6, 8), "algorithm.overlong_buffer=0", "inference_model.max_tokens=32"),
    ),
    "asynchronous": Run(
        "grpo-async.py",
        "grpo_cpu",
        16,
        1e-4,
        (
            *batch(16, 4, 16),
            *("train_model.num_devices=2", "ref_model.num_devices=2", "inference_model.num_devices=2"),
        ),
    ),
}
#: ``lr`` is an option; the others are patches (``planted/sitecustomize.py``).
FAULTS = ("lr", "sign", "stale", "log_probs")


def execute(name: str, seed: int, run_dir: Path, fault: str | None = None) -> dict[str, list[float]]:
    """Do a run in processes of its own, with one thread each; return what :func:`logged` reads of it.

    Raises:
        RuntimeError: the run failed; with the end of what it printed.
    """
    run = RUNS[name]
    more = [f"optimizer.lr={3 * run.lr}"] if fault == "lr" else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0"}
    paths = [str(ROOT)]
    if fault not in (None, "lr"):
        environment["PLANTED"] = str(fault)
        paths.insert(0, str(PLANTED))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        run.command(seed, run_dir, *more),
        capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=run_dir.parent, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{name}, seed {seed}, ended with code {done.returncode}: {done.stderr[-2000:]}")
    return logged(run_dir)


def logged(run_dir: Path) -> dict[str, list[float]]:
    """Return the values per step of each metric of a run that has a corridor.

    ``tokens`` and ``advantage_order`` are computed here, the others are in ``metrics.jsonl``.
    """
    from benchmarks.corridors import METRICS

    rows = [row for row in _lines(run_dir / METRICS_FILE) if "reward" in row]
    turns = [0, *(row["dialog_turns"] for row in rows)]
    ordered = {
        step: [_in_order(list(group)) for _, group in groupby(of_step, key=lambda row: row["group_id"])]
        for step, of_step in groupby(_lines(run_dir / ROLLOUTS_FILE), key=lambda row: row["step"])
    }
    for row, before in zip(rows, turns):
        row["tokens"] = (row["dialog_turns"] - before) * (row["prompt_tokens/mean"] + row["response_tokens/mean"])
        in_order = ordered[row["step"]]
        row["advantage_order"] = sum(in_order) / len(in_order)
    return {name: [float(row[name]) for row in rows] for name in METRICS}


def _in_order(rows: Sequence[dict]) -> bool:
    """Return whether the advantages of a group's best and worst response are ordered as their rewards."""
    return (
        len(rows) < 2 or (rows[0]["reward"] - rows[-1]["reward"]) * (rows[0]["advantage"] - rows[-1]["advantage"]) >= 0
    )


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
