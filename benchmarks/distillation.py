"""Samples until the policy is as good as its teacher: judged by the teacher alone, and by GRPO's reward alone.

``python -m benchmarks.distillation --seeds 3`` first trains the teacher, the embedded policy after GRPO on
``arithmetic`` (preset ``grpo_cpu``, 10,240 responses). Then, for every seed, the embedded policy learns the same task
by that preset, by GRPO in steps of 32 responses to 4 prompts, and, in short runs, once more so and from the teacher
(``algorithm.distill_coef=1 algorithm.advantage_coef=0``), which judges each token, in steps of 32 responses to 32
prompts: both once for each ``--lr``. A learning rate falls to 0 at the end of its run. A seed draws the held-out
problems, on which the teacher is measured as well. No problem of a training split is held out under any seed.

The goal is the teacher's own greedy accuracy less one standard error of it over problems, down to a whole one.
Printed: the curves, measured every 256 responses, and the responses after which it was first reached. The run
directories and ``distillation.json`` are in ``--out``; what has ended there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.learning import ROOT, train_ours

TEACHER_SEED = 1000
SETTINGS = (
    *("engine=transformers", "train.checkpoint_frequency=0", "eval.avg_at_k=0", "logging.report=false"),
    "logging.store_steps=false",
)
EVERY = 256  # responses between two evaluations
SMALL = ("env.num_envs=32", "train.dialog_turns_per_batch=32", "train.optim_batch_size=32")


@dataclass(frozen=True)
class Goal:
    """What the policy is to reach on the held-out problems of a seed."""

    teacher: float
    stderr: float
    problems: int

    @property
    def accuracy(self) -> float:
        """The teacher's less one standard error, down to a whole problem."""
        return math.floor((self.teacher - self.stderr) * self.problems) / self.problems


def reached(curve: dict[int, float], goal: float) -> int | None:
    """Samples at the first point of ``curve`` that is no lower than ``goal``; None: nowhere.

    >>> reached({0: 0.5, 128: 0.9, 256: 0.8}, 0.85), reached({0: 0.5}, 0.85)
    (128, None)
    """
    return next((samples for samples, accuracy in sorted(curve.items()) if accuracy >= goal), None)


def goal_of(teacher: Path, seed: int, options: argparse.Namespace) -> Goal:
    """The teacher on the problems of ``seed``."""
    out = options.out / f"teacher_on_{seed}.json"
    if not out.is_file():
        _measure(teacher, seed, out, options)
    measured = json.loads(out.read_text())["greedy"]
    return Goal(measured["accuracy"], measured["stderr"], options.problems)


def _measure(teacher: Path, seed: int, out: Path, options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "sota_grpo.cli", "eval", str(teacher), "--config-name=grpo_cpu", "--k=0"]
    command += ["--engine=transformers", f"--num-samples={options.problems}", f"--out={out}", f"seed={seed}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)


def ways_of(teacher: Path, options: argparse.Namespace) -> dict[str, tuple[int, list[str]]]:
    """The ways to learn by name: responses a step, and what the preset is changed by."""
    long, short = (f"train.total_dialog_turns={count}" for count in (options.samples, options.short))
    taught = ["env.repeats=1", f"ref_model.name={teacher}", "algorithm.distill_coef=1", "algorithm.advantage_coef=0"]
    ways = {"GRPO, 128 a step": (128, [long]), "GRPO, 32 a step": (32, [*SMALL, long])}
    for lr in options.lr:
        small = [*SMALL, short, f"optimizer.lr={lr}"]
        ways[f"GRPO, 32 a step, short, lr {lr}"] = (32, small)
        ways[f"teacher, 32 a step, short, lr {lr}"] = (32, [*small, *taught])
    return ways


def curve_of(name: str, rows: int, changes: Sequence[str], seed: int, options: argparse.Namespace) -> dict[int, float]:
    """Held-out accuracy by samples; that of a run which has ended in ``--out`` is read and not measured again."""
    run_dir = options.out / f"{re.sub(r'[^a-zA-Z0-9.-]+', '_', name)}_{seed}"
    known = run_dir.with_suffix(".json")
    if not known.is_file():
        common = [*SETTINGS, f"seed={seed}", f"eval.num_samples={options.problems}", "train.export_hf=false"]
        curve = train_ours([*common, f"eval.every={EVERY // rows}", *changes], rows, run_dir)
        known.write_text(json.dumps(curve.accuracy))
    return {int(samples): accuracy for samples, accuracy in json.loads(known.read_text()).items()}


def report(goals: Sequence[Goal], curves: Sequence[dict[str, dict[int, float]]]) -> str:
    """A row per seed and way; the share is that of the first GRPO to arrive, whatever its steps and learning rate.

    >>> print(report([Goal(0.9, 0.05, 100)], [{"GRPO": {0: 0.5, 384: 0.85}, "teacher": {0: 0.5, 128: 0.9}}]))
    | seed | learned by | samples to the goal | share of GRPO's | to the teacher's own | share | last % |
    |---:|---|---:|---:|---:|---:|---:|
    | 0 | GRPO | 384 | 1.00 | - | - | 85.0 after 384 |
    | 0 | teacher | 128 | 0.33 | 128 | - | 90.0 after 128 |
    <BLANKLINE>
    Seed 0: the teacher is right in 90.0 %, the goal is 85.0 %.
    """
    lines = ["| seed | learned by | samples to the goal | share of GRPO's | to the teacher's own | share | last % |"]
    lines += ["|---:|---|---:|---:|---:|---:|---:|"]
    for seed, (goal, by_way) in enumerate(zip(goals, curves, strict=True)):
        plain = [curve for name, curve in by_way.items() if name.startswith("GRPO")]
        for name, curve in by_way.items():
            cells = [str(seed), name]
            for wanted in (goal.accuracy, goal.teacher):
                first = min(filter(None, (reached(other, wanted) for other in plain)), default=None)
                samples = reached(curve, wanted)
                cells += [str(samples or "-"), f"{samples / first:.2f}" if samples and first else "-"]
            cells.append(f"{100 * curve[max(curve)]:.1f} after {max(curve)}")
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [
        f"Seed {seed}: the teacher is right in {100 * goal.teacher:.1f} %, the goal is {100 * goal.accuracy:.1f} %."
        for seed, goal in enumerate(goals)
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10240, help="responses of a run of GRPO, a multiple of 128")
    parser.add_argument("--short", type=int, default=2560, help="responses of a short run, of GRPO or with the teacher")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems")
    parser.add_argument("--lr", nargs="+", default=["1e-4", "5e-5"], help="peaks of the learning rate, of short runs")
    parser.add_argument("--teacher", type=Path, help="folder of a teacher that is there already")
    parser.add_argument("--out", type=Path, default=Path("outputs/distillation") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    teacher = options.teacher or options.out / "teacher" / "hf"
    if options.teacher is None and not teacher.is_dir():
        train_ours([*SETTINGS, f"seed={TEACHER_SEED}", "eval.mode=off"], 128, options.out / "teacher")
    goals, curves = [], []
    for seed in range(options.seeds):
        goals.append(goal_of(teacher.resolve(), seed, options))
        ways = ways_of(teacher.resolve(), options)
        curves.append({name: curve_of(name, *way, seed, options) for name, way in ways.items()})
        measured = {"goals": [asdict(goal) for goal in goals], "curves": curves}
        (options.out / "distillation.json").write_text(json.dumps(measured, indent=1))
        print(json.dumps(curves[-1]), flush=True)
    print(report(goals, curves))


if __name__ == "__main__":
    main()
