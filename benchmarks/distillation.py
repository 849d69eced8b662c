"""Samples until the policy is as good as its teacher: judged by the teacher alone, and by GRPO's reward alone.

``python -m benchmarks.distillation --seeds 3`` first trains the teacher, the embedded policy after GRPO on
``arithmetic`` (preset ``grpo_cpu``, 10,240 responses). Then, for every seed, the embedded policy learns the same task
once by that preset and once from the teacher (``algorithm.distill_coef=1 algorithm.advantage_coef=0``), which judges
each token, so that a step takes 32 responses to 32 prompts in the place of 128 to 16; ``--small`` lets GRPO take steps
of 32 responses too. A seed draws the held-out problems, on which the teacher is measured as well. No problem of a
training split is held out under any seed.

The goal is the teacher's own greedy accuracy less one standard error of it over problems, down to a whole one.
Printed: the curves, and the responses after which it was first reached. The run directories and ``distillation.json``
are in ``--out``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
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
    command = [sys.executable, "-m", "sota_grpo.cli", "eval", str(teacher), "--config-name=grpo_cpu", "--k=0"]
    command += ["--engine=transformers", f"--num-samples={options.problems}", f"--out={out}", f"seed={seed}"]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    found = json.loads(out.read_text())["greedy"]
    return Goal(found["accuracy"], found["stderr"], options.problems)


def curves_of(seed: int, teacher: Path, options: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Held-out accuracy by samples, of each way to learn."""
    common = [*SETTINGS, f"seed={seed}", f"eval.num_samples={options.problems}", "train.export_hf=false"]
    distilled = [*SMALL, "env.repeats=1", f"ref_model.name={teacher}", "algorithm.distill_coef=1"]
    distilled += ["algorithm.advantage_coef=0", f"train.total_dialog_turns={options.distilled}", "eval.every=8"]
    ways = {"GRPO": (128, [f"train.total_dialog_turns={options.samples}", "eval.every=4"])}
    if options.small:
        ways["GRPO, small steps"] = (32, [*SMALL, f"train.total_dialog_turns={options.samples}", "eval.every=16"])
    ways["teacher"] = (32, distilled)
    return {
        name: train_ours(
            [*common, *changes], rows, options.out / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
        ).accuracy
        for name, (rows, changes) in ways.items()
    }


def report(goals: Sequence[Goal], curves: Sequence[dict[str, dict[int, float]]]) -> str:
    """A row per seed and way.

    >>> print(report([Goal(0.9, 0.05, 100)], [{"GRPO": {0: 0.5, 384: 0.85}, "teacher": {0: 0.5, 128: 0.9}}]))
    | seed | teacher's accuracy % | goal % | learned by | samples to the goal | share of GRPO's | last % |
    |---:|---:|---:|---|---:|---:|---:|
    | 0 | 90.0 | 85.0 | GRPO | 384 | 1.00 | 85.0 after 384 |
    | 0 | 90.0 | 85.0 | teacher | 128 | 0.33 | 90.0 after 128 |
    """
    lines = ["| seed | teacher's accuracy % | goal % | learned by | samples to the goal | share of GRPO's | last % |"]
    lines += ["|---:|---:|---:|---|---:|---:|---:|"]
    for seed, (goal, by_way) in enumerate(zip(goals, curves, strict=True)):
        plain = reached(by_way["GRPO"], goal.accuracy)
        for name, curve in by_way.items():
            samples, last = reached(curve, goal.accuracy), max(curve)
            share = f"{samples / plain:.2f}" if samples is not None and plain else "-"
            cells = (
                seed,
                f"{100 * goal.teacher:.1f}",
                f"{100 * goal.accuracy:.1f}",
                name,
                samples or "not reached",
                share,
            )
            lines.append("| " + " | ".join(map(str, cells)) + f" | {100 * curve[last]:.1f} after {last} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10240, help="responses of a run of GRPO, a multiple of 128")
    parser.add_argument("--distilled", type=int, default=2560, help="responses of a run with the teacher, of 32")
    parser.add_argument("--problems", type=int, default=512, help="held-out problems")
    parser.add_argument("--small", action="store_true", help="GRPO in steps of 32 responses, too")
    parser.add_argument("--teacher", type=Path, help="folder of a teacher that is there already")
    parser.add_argument("--out", type=Path, default=Path("outputs/distillation") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    options = parser.parse_args(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    teacher = options.teacher
    if teacher is None:
        train_ours([*SETTINGS, f"seed={TEACHER_SEED}", "eval.mode=off"], 128, options.out / "teacher")
        teacher = options.out / "teacher" / "hf"
    goals, curves = [], []
    for seed in range(options.seeds):
        goals.append(goal_of(teacher.resolve(), seed, options))
        curves.append(curves_of(seed, teacher.resolve(), options))
        found = {"goals": [asdict(goal) for goal in goals], "curves": curves}
        (options.out / "distillation.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(curves[-1]), flush=True)
    print(report(goals, curves))


if __name__ == "__main__":
    main()
