"""Held-out accuracy against samples seen, ours and TRL's, from one policy under equal settings.

``python -m benchmarks.learning --seeds 3 --samples 10240 --every 512`` trains the embedded policy on ``arithmetic``
with ``grpo.py --config-name grpo_cpu engine=transformers`` and with TRL's ``GRPOTrainer`` (its settings, and what could
not be made equal: ``benchmarks/learning_trl.py``). Both are measured by our evaluator: greedy responses to the same
held-out problems. A seed draws the problems, their order and the samples, so the two curves of a seed are a pair, and
the standard error of the difference is that of the pairs' differences.

``--preset smollm_ifeval --seeds 1 --samples 2048 --threads 2`` does so with a real chat model and prompts with
instructions, ours with vLLM where that is installed. With one seed the errors are those over problems, and the
difference is that of two independent shares. What follows the options is OPTION=VALUE, for both sides.

Written to the folder ``--out``: the table, ``learning.json`` with everything (after every seed), ``learning.png`` and
the run directories.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.learning_trl import PRESET, Curve, agreement, composed, drawn_examples, train_trl
from sota_grpo.assembly.sampling import task_of
from sota_grpo.recording.run_files import METRICS_FILE, ROLLOUTS_FILE

T = TypeVar("T")
#: What the two are compared by before they train where a step of the preset takes minutes: float32, few rows.
SMALL = (
    *("engine=transformers", "train.precision=fp32", "inference_model.torch_dtype=float32", "env.num_envs=16"),
    *("env.repeats=4", "train.dialog_turns_per_batch=16", "train.optim_batch_size=16", "inference_model.max_tokens=96"),
)
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error ``std(ddof=1) / sqrt(seeds)``; of one seed, that over its problems."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """
        >>> Estimate.of([0.5, 0.6, 0.7]).mean, round(Estimate.of([0.5, 0.6, 0.7]).error, 4)
        (0.6, 0.0577)
        """
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    def percent(self, sign: str = "") -> str:
        return f"{100 * self.mean:{sign}.1f} +/- {100 * self.error:.1f}"


@dataclass(frozen=True)
class Comparison:
    """Ours, TRL's, and ours less TRL's, seed by seed."""

    ours: Estimate
    trl: Estimate
    gain: Estimate

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Comparison:
        """From one pair (ours, TRL's) per seed."""
        ours, theirs = zip(*pairs)
        return cls(Estimate.of(ours), Estimate.of(theirs), Estimate.of([one - other for one, other in pairs]))

    @classmethod
    def of_one(cls, ours: Estimate, trl: Estimate) -> Comparison:
        """From the shares of one seed with their errors over problems, as if these were not paired.

        >>> Comparison.of_one(Estimate(0.5, 0.03), Estimate(0.4, 0.04)).gain.percent("+")
        '+10.0 +/- 5.0'
        """
        return cls(ours, trl, Estimate(ours.mean - trl.mean, math.hypot(ours.error, trl.error)))

    @property
    def spread(self) -> float:
        """Standard error of the difference of the two means, as if the seeds were not paired."""
        return math.hypot(self.ours.error, self.trl.error)

    def holds(self, errors: float) -> bool:
        """Whether ours is at least TRL's less ``errors`` standard errors of the paired differences."""
        return self.gain.mean + errors * self.gain.error >= 0

    def verdict(self) -> str:
        """Within how many standard errors ours is at least TRL's."""
        within = [errors for errors in (0, 1, 2) if self.holds(errors)]
        return ("yes", "within 1 s.e.", "within 2 s.e.")[within[0]] if within else "no"


@dataclass(frozen=True)
class Seed:
    """The two runs of one seed; ``same_prompts``: they asked the same problems in the same order, all through."""

    seed: int
    ours: Curve
    trl: Curve
    same_prompts: bool


def area(accuracy: dict[int, float]) -> float:
    """Mean height of the curve over the samples seen, by the trapezoid rule.

    >>> area({0: 0.0, 10: 0.5, 20: 0.5})
    0.375
    """
    points = sorted(accuracy.items())
    parts = [(x - w) * (y + v) / 2 for (w, v), (x, y) in pairwise(points)]
    return sum(parts) / (points[-1][0] - points[0][0])


def overrides(options: argparse.Namespace, seed: int) -> list[str]:
    """What the preset is changed by, for both sides."""
    step_size = composed(*options.overrides, preset=options.preset).train.dialog_turns_per_batch
    return [
        *(["engine=transformers"] if options.preset == PRESET else []),
        *options.overrides,
        f"seed={seed}",
        f"train.total_dialog_turns={options.samples}",
        f"eval.every={options.every // step_size}",
        "eval.avg_at_k=0",
        "train.checkpoint_frequency=0",
        "train.export_hf=false",
    ]


def train_ours(changes: Sequence[str], rows_per_step: int, run_dir: Path, preset: str = PRESET) -> Curve:
    """A whole run of ``grpo.py``; what it prints goes to a file beside its directory.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, str(ROOT / "grpo.py"), f"--config-name={preset}", f"hydra.run.dir={run_dir}", *changes]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with run_dir.with_suffix(".txt").open("w") as printed:
        subprocess.run(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, check=True
        )
    curve, spent_s = Curve({}, {}, {}), 0.0
    for row in _lines(run_dir / METRICS_FILE):
        if "eval/accuracy" in row:
            samples = row["step"] * rows_per_step
            curve.accuracy[samples], curve.stderr[samples] = row["eval/accuracy"], row["eval/stderr"]
            curve.seconds[samples] = spent_s
        spent_s += row.get("time/step_s", 0.0)
    return curve


def asked(run_dir: Path) -> list[str]:
    """The questions of a run of ours, in the order in which it drew them."""
    by_group = {row["group_id"]: row["query"] for row in _lines(run_dir / ROLLOUTS_FILE)}
    return [query for _, query in sorted(by_group.items())]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` in a process of its own: its memory is free afterwards, and vLLM starts once in each."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def run_seed(options: argparse.Namespace, seed: int) -> Seed:
    """Both runs of ``seed``."""
    changes = overrides(options, seed)
    config = composed(*changes, preset=options.preset)
    run_dir = options.out / f"ours_{seed}"
    ours = train_ours(changes, config.train.dialog_turns_per_batch, run_dir, options.preset)
    print(f"seed {seed}: ours {_summary(ours)}", flush=True)
    theirs = apart(train_trl, config, options.out / f"trl_{seed}", options.threads)
    print(f"seed {seed}: TRL  {_summary(theirs)}", flush=True)
    queries = [example.query for example in drawn_examples(config, task_of(config))]
    return Seed(seed, ours, theirs, asked(run_dir) == queries)


def _summary(curve: Curve) -> str:
    steps = " ".join(f"{100 * value:.1f}" for _, value in sorted(curve.accuracy.items()))
    return f"{steps} %, {curve.train_s:.0f} s of steps"


def compare(runs: Sequence[Seed]) -> dict[int, Comparison]:
    """At every number of samples."""
    if len(runs) == 1:
        ours, trl = runs[0].ours, runs[0].trl
        each = {
            samples: [Estimate(one.accuracy[samples], one.stderr[samples]) for one in (ours, trl)]
            for samples in sorted(ours.accuracy)
        }
        return {samples: Comparison.of_one(*pair) for samples, pair in each.items()}
    return {
        samples: Comparison.of([(run.ours.accuracy[samples], run.trl.accuracy[samples]) for run in runs])
        for samples in sorted(runs[0].ours.accuracy)
    }


def compare_areas(runs: Sequence[Seed]) -> Comparison:
    """The means of the curves."""
    return Comparison.of([(area(run.ours.accuracy), area(run.trl.accuracy)) for run in runs])


def report(runs: Sequence[Seed]) -> str:
    """The table in Markdown, the time, and what follows; of several seeds the area under the curves, too."""
    points = compare(runs)
    lines = ["| samples | ours % | TRL % | ours - TRL | at least TRL's |", "|---:|---:|---:|---:|---|"]
    lines += [_row(str(samples), point) for samples, point in points.items()]
    if len(runs) > 1:
        whole = compare_areas(runs)
        lines += [_row("mean of the curve", whole), _conclusion(list(points.items()), whole)]
    ours, trl = ([getattr(run, side).train_s for run in runs] for side in ("ours", "trl"))
    same = sum(run.same_prompts for run in runs)
    lines += [
        f"Seconds of all steps, evaluation left out: ours {_seconds(ours)}, TRL {_seconds(trl)} (an indication "
        "only: the two did not alternate).",
        f"The same prompts in the same order, all through, in {same} of {len(runs)} pairs of runs.",
    ]
    return "\n".join(lines)


def _row(name: str, one: Comparison) -> str:
    return f"| {name} | {one.ours.percent()} | {one.trl.percent()} | {one.gain.percent('+')} | {one.verdict()} |"


def _conclusion(points: Sequence[tuple[int, Comparison]], whole: Comparison) -> str:
    trained = [point for samples, point in points if samples]
    held = [sum(point.holds(errors) for point in trained) for errors in (0, 1, 2)]
    apart = sum(point.ours.mean + point.spread >= point.trl.mean for point in trained)
    return (
        f"Of {len(trained)} points after the start, ours is at least TRL's in {held[0]}, within one standard error "
        f"of the paired differences in {held[1]}, within two in {held[2]}; within one of the unpaired in {apart}.\n"
        f"Mean of the curve at least TRL's: {whole.verdict()}; unpaired, its difference has a standard error of "
        f"{100 * whole.spread:.1f}."
    )


def _seconds(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.0f}"
    measured = Estimate.of(values)
    return f"{measured.mean:.0f} +/- {measured.error:.0f}"


def plot(runs: Sequence[Seed], path: Path, preset: str = PRESET) -> None:
    """Both curves with their standard errors, against the samples and against the mean time of all steps so far."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    points, config = compare(runs), composed(preset=preset)
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for name, label in (("ours", "sota_grpo"), ("trl", f"TRL {version('trl')}")):
        measured = [getattr(point, name) for point in points.values()]
        heights, errors = ([100 * getattr(one, field) for one in measured] for field in ("mean", "error"))
        minutes = [statistics.fmean(getattr(run, name).seconds[samples] for run in runs) / 60 for samples in points]
        for axis, places in zip(axes, (list(points), minutes)):
            axis.errorbar(places, heights, yerr=errors, marker="o", markersize=3, capsize=2, label=label)
    axes[0].set_ylabel("held-out accuracy, greedy, %")
    for axis, label in zip(axes, ("samples trained on", "minutes of training, evaluations left out")):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    over = f"{len(runs)} seeds" if len(runs) > 1 else "one seed, errors over problems"
    figure.suptitle(f"{config.model.name} on {config.env.dataset}, mean and standard error, {over}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def save(path: Path, options: argparse.Namespace, agreed: str, runs: Sequence[Seed]) -> None:
    """Everything so far, as JSON."""
    packages = {name: version(name) for name in ("torch", "transformers", "trl")}
    names = ("preset", "seeds", "samples", "every", "threads", "overrides")
    values = {name: getattr(options, name) for name in names}
    measured: dict[str, Any] = {
        "options": values,
        "versions": packages,
        "changes": overrides(options, 0),
        "agreement": agreed,
        "runs": [asdict(run) for run in runs],
    }
    measured |= {"points": {samples: asdict(point) for samples, point in compare(runs).items()}}
    if len(runs) > 1:
        measured |= {"mean of the curve": asdict(compare_areas(runs))}
    path.write_text(json.dumps(measured, indent=1))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the preset, for both sides")
    parser.add_argument("--preset", default=PRESET)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10240, help="responses of a run, a multiple of --every")
    parser.add_argument("--every", type=int, default=512, help="responses between evaluations, a multiple of a step's")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1, help="of torch, for both sides")
    parser.add_argument("--out", type=Path, default=Path("outputs/learning") / time.strftime("%Y-%m-%d_%H-%M-%S"))
    parser.add_argument("--figure", type=Path, help="write the figure here, too (docs/learning_smollm_ifeval.png)")
    options = parser.parse_intermixed_args(argv)
    rows_per_step = composed(*options.overrides, preset=options.preset).train.dialog_turns_per_batch
    if options.seeds < 1:
        parser.error("--seeds must be at least 1.")
    if min(options.samples, options.every) < 1 or options.every % rows_per_step or options.samples % options.every:
        parser.error(f"--every must be a multiple of {rows_per_step}, the samples of a step, and --samples of --every.")
    options.out = options.out.resolve()
    if (options.out / "learning.json").exists():
        parser.error(f"{options.out} holds the results of another run; choose another --out.")
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)  # train_ours hands it on
    checked = [*overrides(options, 0), *(SMALL if options.preset != PRESET else ())]
    agreed = str(apart(agreement, checked, options.out / "agreement", options.preset, options.threads))
    print(agreed, flush=True)
    runs: list[Seed] = []
    for seed in range(options.seeds):
        runs.append(run_seed(options, seed))
        save(options.out / "learning.json", options, agreed, runs)
    table = report(runs)
    print(table)
    (options.out / "learning.md").write_text(f"{agreed}\n\n{table}\n")
    for path in filter(None, (options.out / "learning.png", options.figure)):
        plot(runs, path, options.preset)


if __name__ == "__main__":
    main()
