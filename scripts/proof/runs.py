"""Stage 2: whole runs of ``grpo.py`` on the device, with the gate; a kill and a resume."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.proof import Finding, Options
from sota_grpo.training.gate import CHECKS as CHECKS_OF_THE_GATE

NUM_CHECKS = len(CHECKS_OF_THE_GATE)  # at least; a reference has one more
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "env.num_envs=8", "env.repeats=4", "train.dialog_turns_per_batch=8", "train.optim_batch_size=8",
    "train.total_dialog_turns=16", "inference_model.max_tokens=8", "eval.num_samples=8", "train_model.compile=false",
)  # fmt: skip


def command(options: Options, folder: Path, *overrides: str, steps: int | None = None) -> list[str]:
    """A run of the embedded policy with the embedded engine; ``steps`` of 128 responses, or all 80."""
    size = () if steps is None else (f"train.total_dialog_turns={128 * steps}", "eval.mode=off")
    general = (f"device={options.device}", "engine=transformers", "logging.report=false", "train.export_hf=false")
    return [
        sys.executable, str(ROOT / "grpo.py"), "--config-name=grpo_cpu", f"hydra.run.dir={folder}",
        *general, *size, *(SMALL if options.small else ()), *overrides,
    ]  # fmt: skip


def ran(given: Sequence[str], limit_s: float = 240.0) -> dict[str, Any]:
    """Exit code, seconds, and the last words of a run that failed; it is ended, with its children, at its limit."""
    began = time.perf_counter()
    process = subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    figures: dict[str, Any] = {"exit": process.returncode, "run_s": round(time.perf_counter() - began, 1)}
    return figures if process.returncode == 0 else figures | {"said": output[-600:]}


def metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may still be written


def gate_of(folder: Path) -> list[str]:
    """What the checks before training said."""
    path = folder / "training.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split("check ok: ")[1] for line in lines if "check ok: " in line]


def accuracies(folder: Path) -> list[float]:
    return [row["eval/accuracy"] for row in metrics(folder) if row.get("eval/accuracy") is not None]


def demonstration(options: Options) -> Iterator[Finding]:
    """The embedded policy learns what it learns on a CPU: at least 90 % of the held-out problems."""
    folder = options.out / "demonstration"
    measured = ran(command(options, folder))
    seen = accuracies(folder)
    good = measured["exit"] == 0 and len(gate_of(folder)) >= NUM_CHECKS
    good = good and (options.small or (len(seen) > 1 and seen[-1] >= 0.9))
    yield Finding("demonstration", good, measured | {"accuracy": seen[:1] + seen[-1:], "gate": gate_of(folder)})


def variants(options: Options) -> Iterator[Finding]:
    """Adapter with dropout, a reference, fp16, and the layers uncompiled: gate and 8 steps."""
    cases = {
        "lora": ("train_model.lora.enabled=true", "train_model.lora.dropout=0.05"),
        "reference": ("policy.kl_coef=0.001",),
        "fp16": ("train.precision=fp16",),
        "eager": ("train_model.compile=false",),
    }
    for name, overrides in cases.items():
        folder = options.out / name
        measured = ran(command(options, folder, *overrides, steps=None if options.small else 8))
        rows = [row for row in metrics(folder) if "reward" in row]
        figures = {"steps": len(rows), "reward": [row["reward"] for row in rows[:1] + rows[-1:]]}
        good = measured["exit"] == 0 and len(gate_of(folder)) >= NUM_CHECKS
        yield Finding(f"run, {name}", good, measured | figures | {"gate": gate_of(folder)})


def kill_and_resume(options: Options) -> Iterator[Finding]:
    """``kill -9`` behind a checkpoint, then a resume: the weights of a run that was left alone, but rounding.

    Where equal runs differ by more than that, no further from it than twice another such run.
    """
    extra = (
        "train.checkpoint_frequency=1",
        "train.keep_checkpoints=100",
        "check.mode=off",
        "eval.mode=off",
        "optimizer.schedule=constant",
        "algorithm.entropy_coef=0.01",  # so that the weights move, whatever the rewards are
    )
    steps = None if options.small else 6
    whole, killed = options.out / "whole", options.out / "killed"
    measured = ran(command(options, whole, *extra, steps=steps))
    process = subprocess.Popen(
        command(options, killed, *extra, steps=steps), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not list((killed / "checkpoints").glob("checkpoint_*.pt")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = len(metrics(killed))
    resumed = ran(command(options, killed, *extra, "train.resume=auto", steps=steps))
    yield Finding("kill -9 and resume", measured["exit"] == resumed["exit"] == 0, resumed | {"turns_before": before})
    start, left_alone, resumed_ones = (_flat(_weights(*which)) for which in ((whole, min), (whole, max), (killed, max)))
    moved = float((left_alone - start).norm())
    gap = float((resumed_ones - left_alone).norm()) / moved if moved else math.inf
    figures = {"gap_to_movement": gap, "equal": gap == 0}
    if gap < 1e-2:
        yield Finding("the resumed weights", True, figures)
        return
    # where sums have no fixed order equal runs part as well: by rounding, then by one sampled token
    again = options.out / "whole_again"
    ran(command(options, again, *extra, steps=steps))
    figures["gap_of_two_whole_runs"] = float((_flat(_weights(again, max)) - left_alone).norm()) / moved
    yield Finding("the resumed weights", gap < 2 * figures["gap_of_two_whole_runs"], figures)


def _weights(folder: Path, which: Callable[..., Path]) -> dict[str, torch.Tensor]:
    """Those of the oldest (``min``) or the newest checkpoint (``max``)."""
    path = which((folder / "checkpoints").glob("checkpoint_*.pt"))
    return torch.load(path, weights_only=True, map_location="cpu")["learner"]["model"]


def _flat(weights: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[name].double().flatten() for name in sorted(weights)])


CHECKS = [demonstration, kill_and_resume, variants]
