"""The speedrun of docs/speedrun.md: train until a score is reached; the clock runs from the start of the process.

``python scripts/speedrun.py input_data.jsonl`` trains SmolLM2-135M-Instruct (preset smollm_speedrun) until 30 % of
IFEval's prompts have all their instructions followed, once for each seed, and prints a table of the runs and one of
their phases. After each run, outside of its time, prompts with kinds of instructions that neither IFEval nor training
has are evaluated (benchmarks/unseen_instructions.py). OPTION=VALUE are options of the runs. The exit code is 0 if every
seed reached the target, else 1.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IFEVAL_PRESET = "smollm_speedrun"
PHASES = ("start", "checks", "generate", "score", "learn", "publish", "eval", "checkpoint", "other")


def command(preset: str, seed: int, run_dir: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command of one run."""
    options = [f"seed={seed}", f"hydra.run.dir={run_dir}", *overrides]
    return [sys.executable, str(ROOT / "grpo.py"), "--config-name", preset, *options]


def measure(argv: Sequence[str]) -> tuple[float, str]:
    """Run a command to its end; return (seconds from its start, its standard output, which is printed as well).

    Raises:
        CalledProcessError: the command failed.
    """
    began, lines = time.monotonic(), list[str]()
    print(shlex.join(argv), flush=True)
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, argv)
    return time.monotonic() - began, "".join(lines)


def measure_unseen(run_dir: Path) -> dict[str, float]:
    """Return accuracy and standard error, greedy, of 256 prompts with kinds of instructions that no training sees."""
    out = run_dir / "unseen.json"
    task = f"{ROOT / 'benchmarks' / 'unseen_instructions.py'}:UnseenInstructions"
    options = ["--task", task, "--k", "0", "--num-samples", "256", "--out", str(out)]
    measure([sys.executable, "-m", "sota_grpo.cli", "eval", str(run_dir), *options])
    greedy = json.loads(out.read_text())["greedy"]
    return {"unseen": greedy["accuracy"], "unseen_stderr": greedy["stderr"]}


def row_of(run_dir: Path, seed: int, seconds: float, printed: str) -> dict[str, Any]:
    """Return the figures of a finished run: score, steps, responses and tokens of training, seconds of each phase.

    The phases are those of the closing line ``Time: 9:20, of which learn 40 %, ..``; the remainder is ``other``.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reached = json.loads((run_dir / "run.json").read_text()).get("reached")
    steps, last = [row for row in rows if "eval/accuracy" not in row], rows[-1]
    size = steps[-1]["dialog_turns"] / len(steps)
    times = next(line for line in printed.splitlines() if line.startswith("Time:"))
    clock = re.findall(r"\d+", times.partition(",")[0])  # hours, minutes and seconds of the run, without its imports
    wall_s = sum(int(digits) * 60**power for power, digits in enumerate(reversed(clock)))
    phases = {name: wall_s * int(percent) / 100 for name, percent in re.findall(r"(\w+) (\d+) %", times)}
    known = {name: phases.get(name, 0.0) for name in PHASES if name != "other"}
    return {
        "seed": seed,
        "reached": reached is not None,
        "seconds": seconds,
        "accuracy": last["eval/accuracy"],
        "problems": last["eval/num_samples"],
        "steps": len(steps),
        "responses": steps[-1]["dialog_turns"],
        "tokens": round(sum(row["response_tokens/mean"] * size for row in steps)),
        "phases": known | {"other": seconds - sum(known.values())},
    }


def write(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the figures of the runs so far to ``speedrun.json``."""
    (folder / "speedrun.json").write_text(json.dumps(rows, indent=1))


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return two tables in markdown: the runs, and the seconds of their phases."""

    def line(cells: Iterable[object]) -> str:
        return f"| {' | '.join(map(str, cells))} |"

    def percent(value: float | None, error: float | None = None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.1f}" + (f" +/- {100 * error:.1f}" if error is not None else "") + " %"

    heads = ("seed", "reached", "minutes", "score", "unseen kinds", "steps", "responses", "tokens")
    lines = [line(heads), "|" + "---|" * len(heads)]
    for row in rows:
        cells = (row["seed"], "yes" if row["reached"] else "no", f"{row['seconds'] / 60:.1f}", percent(row["accuracy"]))
        cells += (percent(row.get("unseen"), row.get("unseen_stderr")), row["steps"], row["responses"], row["tokens"])
        lines.append(line(cells))
    lines += ["", line(("seconds", *PHASES)), "|" + "---|" * (len(PHASES) + 1)]
    lines += [line((f"seed {row['seed']}", *(f"{row['phases'][name]:.0f}" for name in PHASES))) for row in rows]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path, help="file of the held-out problems (env.eval_path): IFEval's input_data.jsonl")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the runs")
    add("--preset", default=IFEVAL_PRESET, help=f"default: {IFEVAL_PRESET}")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    add(
        "--out",
        type=Path,
        default=Path("outputs", "speedrun"),
        help="new folder of the runs; default: outputs/speedrun",
    )
    options = parser.parse_intermixed_args(arguments)
    if not options.file.is_file():
        print(f"speedrun.py: there is no file {options.file}; give IFEval's input_data.jsonl.", file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        run_dir = options.out / str(seed)
        overrides = [f"env.eval_path={options.file.resolve()}", *options.overrides]
        try:
            rows.append(row_of(run_dir, seed, *measure(command(options.preset, seed, run_dir, overrides))))
            write(options.out, rows)
            if options.preset == IFEVAL_PRESET:
                rows[-1] |= measure_unseen(run_dir)
                write(options.out, rows)
        except subprocess.CalledProcessError as error:
            if rows:
                print(tables(rows))
            return int(error.returncode)
    print()
    print(tables(rows))
    return 0 if all(row["reached"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
