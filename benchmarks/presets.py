"""Held-out accuracy against samples of every preset of ``config/algorithm/``, on the embedded policy.

``python -m benchmarks.presets --out FOLDER`` trains each with ``grpo.py --config-name grpo_cpu engine=transformers
algorithm=PRESET``, seeds 0 to 2, until an evaluation (greedy, 256 held-out problems, every 512 responses) says
``--target`` or the ``--samples`` are over; ``OPTIONS`` has what a preset is given beside. After every run a line goes
to ``FOLDER/presets.jsonl``; the same command continues after the last of them. ``--figure FILE`` draws all curves, and
the table of docs/algorithm.md is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.recording.run_files import METRICS_FILE

ROWS_PER_STEP = 128  # of grpo_cpu
LR = 1e-4  # of grpo_cpu
PRESETS = sorted(path.stem for path in (Path(__file__).resolve().parents[1] / "config" / "algorithm").glob("*.yaml"))
#: What a preset is given beside its name.
OPTIONS: dict[str, list[str]] = {}


def options_of(preset: str, options: argparse.Namespace) -> list[str]:
    """What a preset is given beside what all are given."""
    return [*OPTIONS.get(preset, []), *options.overrides]


def curve(lines: Sequence[Mapping[str, Any]], target: float) -> dict[int, float]:
    """Accuracy by samples, of the lines of ``metrics.jsonl``, up to the first that reaches ``target``.

    >>> curve([{"step": 0, "eval/accuracy": 0.5}, {"step": 0}, {"step": 4, "eval/accuracy": 0.9}], 0.85)
    {0: 0.5, 512: 0.9}
    """
    measured: dict[int, float] = {}
    for line in lines:
        if "eval/accuracy" in line:
            measured[line["step"] * ROWS_PER_STEP] = line["eval/accuracy"]
            if line["eval/accuracy"] >= target:
                break
    return measured


def _measured(run_dir: Path, target: float) -> dict[int, float]:
    path = run_dir / METRICS_FILE
    text = path.read_text() if path.exists() else ""
    return curve([json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")], target)


def _stop_at(run_dir: Path, target: float, last: int, over: threading.Event) -> None:
    """Ask the run in this process to stop, as SIGTERM does, when an evaluation before the last reached ``target``."""
    while not over.wait(0.2):
        reached = samples_until(_measured(run_dir, target), target)
        if reached is not None and reached < last:
            os.kill(os.getpid(), signal.SIGTERM)
            return


def train(preset: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run, as a line of ``presets.jsonl``."""
    import sota_grpo

    run_dir, began, over = options.out / f"{preset}_{seed}_{time.time_ns()}", time.perf_counter(), threading.Event()
    watch = threading.Thread(target=_stop_at, args=(run_dir, options.target, options.samples, over), daemon=True)
    changes = [
        *("engine=transformers", f"algorithm={preset}", f"seed={seed}", "eval.avg_at_k=0", "eval.num_samples=256"),
        *(f"train.total_dialog_turns={options.samples}", f"eval.every={options.every // ROWS_PER_STEP}"),
        *("train.checkpoint_frequency=0", "train.export_hf=false", "check.mode=off", "logging.report=false"),
        *options_of(preset, options),
    ]
    watch.start()
    try:
        sota_grpo.train("grpo_cpu", overrides=changes, run_dir=run_dir)
    except KeyboardInterrupt:
        if watch.is_alive():  # another process requested it
            raise
    finally:
        over.set()
        watch.join()
    seconds = round(time.perf_counter() - began, 1)
    measured = {
        "accuracy": _measured(run_dir, options.target),
        "seconds": seconds,
        "options": options_of(preset, options),
    }
    return {"preset": preset, "seed": seed, **measured}


def samples_until(accuracy: Mapping[int, float], target: float) -> int | None:
    """Responses trained on at the first evaluation that reaches ``target``; None: none does.

    >>> samples_until({0: 0.5, 512: 0.86}, 0.85), samples_until({0: 0.5}, 0.85)
    (512, None)
    """
    return next((samples for samples, value in sorted(accuracy.items()) if value >= target), None)


def _lr(options: Sequence[str]) -> float:
    values = [option.partition("=")[2] for option in options if option.startswith("optimizer.lr=")]
    return float(values[-1]) if values else LR


def table(runs: Sequence[Mapping[str, Any]], target: float) -> str:
    """Markdown: responses until ``target`` by seed and their mean, or the accuracy reached, by preset.

    >>> run = {"preset": "grpo", "seed": 0, "accuracy": {0: 0.5, 512: 0.86}, "options": []}
    >>> print(table([run, run | {"seed": 1, "accuracy": {0: 0.5, 512: 0.6}}], 0.85).splitlines()[2])
    | `grpo` | 0.0001 | 512, not: 60.0 % | |
    """
    by_preset: dict[str, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for run in runs:
        by_preset[run["preset"]][run["seed"]] = run
    lines = ["| `algorithm=` | lr | responses until then, seed by seed | mean |", "|---|---:|---|---:|"]
    for preset, of_seed in sorted(by_preset.items()):
        measured = {seed: samples_until(run["accuracy"], target) for seed, run in sorted(of_seed.items())}
        best = {seed: max(of_seed[seed]["accuracy"].values()) for seed in measured}
        shown = [f"not: {100 * best[s]:.1f} %" if n is None else f"{n:,}" for s, n in measured.items()]
        reached = [n for n in measured.values() if n is not None]
        mean = f" {statistics.fmean(reached):,.0f} " if len(reached) == len(measured) else " "
        lines.append(f"| `{preset}` | {_lr(next(iter(of_seed.values()))['options']):g} | {', '.join(shown)} |{mean}|")
    return "\n".join(lines)


def plot(runs: Sequence[Mapping[str, Any]], target: float, path: Path) -> None:
    """A panel for each preset: the curve of every seed, and the target."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = sorted({run["preset"] for run in runs})
    columns = 6
    figure, axes = pyplot.subplots(
        -(-len(names) // columns), columns, figsize=(11, 7), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names):
        axis.set_title(name, fontsize=8, pad=3)
        axis.axhline(100 * target, color="0.6", linewidth=0.6, linestyle="--")
        for run in (run for run in runs if run["preset"] == name):
            points = sorted(run["accuracy"].items())
            axis.plot(*zip(*((n, 100 * value) for n, value in points)), marker=".", markersize=3, linewidth=1)
        axis.tick_params(labelsize=7)
        axis.grid(axis="y", alpha=0.3, linewidth=0.4)
    figure.supxlabel("responses trained on", fontsize=9)
    figure.supylabel("held-out accuracy, greedy, %", fontsize=9)
    figure.tight_layout(pad=0.6, rect=(0.02, 0.01, 1, 1))
    figure.savefig(path, dpi=80)


def read(path: Path) -> list[dict[str, Any]]:
    """The runs of ``presets.jsonl``; of a preset and seed that were tried again the last."""
    measured = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        run = json.loads(line)
        run["accuracy"] = {int(samples): value for samples, value in run["accuracy"].items()}
        measured[run["preset"], run["seed"]] = run
    return list(measured.values())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the preset, for all")
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=PRESETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=5120, help="most responses of a run, a multiple of --every")
    parser.add_argument("--every", type=int, default=512, help="responses between evaluations, a multiple of 128")
    parser.add_argument("--target", type=float, default=0.85, help="greedy accuracy at which a run ends")
    parser.add_argument("--out", type=Path, default=Path("outputs/presets"))
    parser.add_argument("--figure", type=Path, help="draw the curves here")
    options = parser.parse_intermixed_args(argv)
    if min(options.samples, options.every) < 1 or options.every % ROWS_PER_STEP or options.samples % options.every:
        parser.error(f"--every must be a multiple of {ROWS_PER_STEP}, the samples of a step, and --samples of --every.")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "presets.jsonl"
    for seed in range(options.seeds):
        for preset in options.presets:
            done = [(run["preset"], run["seed"], run["options"]) for run in read(path)]
            if (preset, seed, options_of(preset, options)) in done:
                continue
            run = train(preset, seed, options)
            with path.open("a") as lines:
                lines.write(json.dumps(run) + "\n")
            shown = " ".join(f"{100 * value:.1f}" for value in run["accuracy"].values())
            print(f"{preset}, seed {seed}: {shown} %, {run['seconds']:.0f} s", flush=True)
    runs = read(path)
    print(table(runs, options.target))
    if options.figure is not None:
        plot(runs, options.target, options.figure)


if __name__ == "__main__":
    main()
