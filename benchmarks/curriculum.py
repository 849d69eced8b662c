"""Held-out accuracy against samples: a curriculum between five levels against uniform draws, from one policy.

``python -m benchmarks.curriculum --seeds 3 --samples 20480 --every 2560`` trains the embedded policy on ``arithmetic``
with problems of one to five steps, of which it has never seen five: ``grpo.py --config-name grpo_cpu
engine=transformers env.difficulty=5 env.curriculum=level``, once as it is and once with ``env.curriculum_floor=1``,
under which every level gets the same share of the draws and all else is the same. A seed draws the problems, their
order and the samples, so the two runs of a seed are a pair. What follows the options is OPTION=VALUE, for both.

Written to the folder ``--out``: the tables, ``curriculum.json`` with everything (after every seed) and the run
directories.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.learning import Estimate, area, train_ours
from sota_grpo.recording.run_files import METRICS_FILE

LEVELS = 5
ROWS_PER_STEP, GROUPS_PER_STEP = 128, 16  # of the preset
UNIFORM, CURRICULUM = "uniform", "curriculum"
SIDES = {UNIFORM: ["env.curriculum_floor=1"], CURRICULUM: []}
_LEVEL = "eval/task/level_"


@dataclass(frozen=True)
class Run:
    """One run.

    Args:
        accuracy: greedy, of all held-out problems, by samples trained on.
        levels: the same of each level.
        draws: the share of the groups that each level had in all steps.
        zero_advantage: the share of all groups whose rewards are all equal.
        seconds: of all steps, evaluations left out.
    """

    accuracy: dict[int, float]
    levels: dict[int, list[float]]
    draws: list[float]
    zero_advantage: float
    seconds: float


def read_run(rows: Sequence[dict[str, Any]], seconds: float) -> Run:
    """A run by the lines of its ``metrics.jsonl``.

    >>> measured = {"step": 1, "eval/accuracy": 0.5} | {f"eval/task/level_{k}": k / 5 for k in range(1, 6)}
    >>> step = {"step": 0, "curriculum/1/share": 0.75, "curriculum/5/share": 0.25, "groups/zero_advantage": 4}
    >>> run = read_run([step, measured], 9.0)
    >>> run.accuracy, run.levels, run.draws, run.zero_advantage
    ({128: 0.5}, {128: [0.2, 0.4, 0.6, 0.8, 1.0]}, [0.75, 0.0, 0.0, 0.0, 0.25], 0.25)
    """
    measured = {row["step"] * ROWS_PER_STEP: row for row in rows if "eval/accuracy" in row}
    steps = [row for row in rows if any(name.endswith("/share") for name in row)]
    names = range(1, LEVELS + 1)
    return Run(
        accuracy={samples: row["eval/accuracy"] for samples, row in measured.items()},
        levels={samples: [row[f"{_LEVEL}{level}"] for level in names] for samples, row in measured.items()},
        draws=[statistics.fmean(row.get(f"curriculum/{level}/share", 0.0) for row in steps) for level in names],
        zero_advantage=statistics.fmean(row["groups/zero_advantage"] for row in steps) / GROUPS_PER_STEP,
        seconds=seconds,
    )


def train(options: argparse.Namespace, seed: int, side: str) -> Run:
    """A run of ``grpo.py``."""
    changes = [
        *("engine=transformers", "env.difficulty=5", "env.curriculum=level", f"seed={seed}", "eval.avg_at_k=0"),
        *(f"eval.num_samples={options.problems}", f"env.num_heldout={options.problems}"),
        *(f"train.total_dialog_turns={options.samples}", f"eval.every={options.every // ROWS_PER_STEP}"),
        *("train.checkpoint_frequency=0", "train.export_hf=false", *options.overrides, *SIDES[side]),
    ]
    run_dir = options.out / f"{side}_{seed}"
    curve = train_ours(changes, ROWS_PER_STEP, run_dir)
    lines = (run_dir / METRICS_FILE).read_text().splitlines()
    run = read_run([json.loads(line) for line in lines], curve.train_s)
    shown = " ".join(f"{100 * value:.1f}" for value in run.accuracy.values())
    print(f"seed {seed}: {side} {shown} %, {run.seconds:.0f} s of steps", flush=True)
    return run


def _row(name: str, pairs: Sequence[tuple[float, float]]) -> str:
    """Uniform, curriculum, and the difference seed by seed, in percent."""
    uniform, curriculum = zip(*pairs)
    gain = Estimate.of([after - before for before, after in pairs])
    return f"| {name} | {Estimate.of(uniform).percent()} | {Estimate.of(curriculum).percent()} | {gain.percent('+')} |"


def report(runs: Sequence[dict[str, Run]]) -> str:
    """Both tables in Markdown, of pairs of runs: accuracy against samples, and what each level had and became.

    >>> pair = {side: Run({0: 0.5, 128: 0.6}, {0: [0.5] * 5, 128: [0.6] * 5}, [0.2] * 5, 0.5, 1.0) for side in SIDES}
    >>> print(report([pair, pair]).splitlines()[2])
    | 0 | 50.0 +/- 0.0 | 50.0 +/- 0.0 | +0.0 +/- 0.0 |
    """
    last = max(runs[0][UNIFORM].accuracy)
    lines = ["| samples | uniform % | curriculum % | difference |", "|---:|---:|---:|---:|"]
    for samples in runs[0][UNIFORM].accuracy:
        lines.append(
            _row(str(samples), [(r[UNIFORM].accuracy[samples], r[CURRICULUM].accuracy[samples]) for r in runs])
        )
    areas = [(area(run[UNIFORM].accuracy), area(run[CURRICULUM].accuracy)) for run in runs]
    zero = [(run[UNIFORM].zero_advantage, run[CURRICULUM].zero_advantage) for run in runs]
    lines += [_row("mean of the curve", areas), _row("zero-advantage groups", zero), ""]
    lines += [
        "| level | uniform % at the end | curriculum % | difference | share of its draws % |",
        "|---:|" + "---:|" * 4,
    ]
    for level in range(LEVELS):
        pairs = [(run[UNIFORM].levels[last][level], run[CURRICULUM].levels[last][level]) for run in runs]
        share = Estimate.of([run[CURRICULUM].draws[level] for run in runs])
        lines.append(f"{_row(str(level + 1), pairs)} {share.percent()} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the preset, for both sides")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=20480, help="responses of a run, a multiple of --every")
    parser.add_argument(
        "--every", type=int, default=2560, help=f"responses between evaluations, of {ROWS_PER_STEP} each"
    )
    parser.add_argument("--problems", type=int, default=500, help="held-out problems, of all levels")
    parser.add_argument("--out", type=Path, default=Path("outputs/curriculum") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    options = parser.parse_intermixed_args(argv)
    if options.seeds < 2:
        parser.error("--seeds must be at least 2: the error is that over seeds.")
    if min(options.samples, options.every) < 1 or options.every % ROWS_PER_STEP or options.samples % options.every:
        parser.error(f"--every must be a multiple of {ROWS_PER_STEP}, the samples of a step, and --samples of --every.")
    options.out = options.out.resolve()
    if (options.out / "curriculum.json").exists():
        parser.error(f"{options.out} holds the results of another run; choose another --out.")
    options.out.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Run]] = []
    for seed in range(options.seeds):
        runs.append({side: train(options, seed, side) for side in SIDES})
        found = {
            "options": vars(options) | {"out": str(options.out)},
            "runs": [{side: asdict(run) for side, run in pair.items()} for pair in runs],
        }
        (options.out / "curriculum.json").write_text(json.dumps(found, indent=1))
    table = report(runs)
    print(table)
    (options.out / "curriculum.md").write_text(f"{table}\n")


if __name__ == "__main__":
    main()
