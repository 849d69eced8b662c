"""A real model on a real benchmark: measure it, train it, measure it again, and say what it gained.

``python scripts/real.py input_data.jsonl`` makes the checks before training, measures SmolLM2-135M-Instruct on IFEval's
own prompts, trains it with the preset smollm_ifeval, measures it on the same prompts, and writes a report; ``--preset
smollm_gsm8k train.jsonl`` does the same with GSM8K, 512 questions of which are held out (env.num_heldout). Each step is
a command of its own, which is printed, and is not done twice: after Ctrl-C or ``kill -9`` the same line continues,
training from its last checkpoint.

OPTION=VALUE are options of the run: ``train.total_dialog_turns=4096``. ``make real`` installs what is needed first.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2"
CLI = (sys.executable, "-m", "sota_grpo.cli")


@dataclass(frozen=True)
class Benchmark:
    """A task, the option that takes its file, how many problems are measured, the longest response to one."""

    task: str
    option: str
    num_samples: int
    max_tokens: int


BENCHMARKS = {
    "smollm_ifeval": Benchmark("ifeval", "env.eval_path", 541, 512),
    "smollm_gsm8k": Benchmark("gsm8k", "env.dataset_path", 300, 256),
}


@dataclass(frozen=True)
class Step:
    """What a step says, its command, and the file that is there once it is done.

    Where ``takes_out``, ``--out`` names the command's output; the file gets its name when it is whole.
    """

    said: str
    command: Sequence[str]
    target: Path
    takes_out: bool = True


def steps(options: argparse.Namespace) -> list[Step]:
    benchmark, out = BENCHMARKS[options.preset], options.out
    file, run_dir, before = f"{benchmark.option}={options.file.resolve()}", out / "run", out / "before.json"
    overrides = [f"seed={options.seed}", *options.overrides]
    measured = [
        *("--task", benchmark.task, "--k", "0", "--num-samples", str(options.num_samples or benchmark.num_samples)),
        *(file, f"inference_model.max_tokens={options.max_tokens or benchmark.max_tokens}"),
    ]
    train = [sys.executable, str(ROOT / "grpo.py"), "--config-name", options.preset, f"hydra.run.dir={run_dir}"]
    # the steps around it measure all problems, which training need not do once more
    train += [file, "train.resume=auto", "eval.mode=off", *overrides]
    checked = [*CLI, "check", "--config-name", options.preset, "--run-dir", str(out / "check"), file, *overrides]
    return [
        Step("Checking", checked, out / "check" / "gate.json", takes_out=False),  # before an hour is spent on measuring
        Step("Measuring the model", [*CLI, "eval", MODEL, "-cn", options.preset, *overrides, *measured], before),
        Step("Training it", train, run_dir / "hf" / "config.json", takes_out=False),
        Step(
            "Measuring it again", [*CLI, "eval", str(run_dir), *measured, "--against", str(before)], out / "after.json"
        ),
        Step("Writing the report", [*CLI, "report", str(run_dir)], out / "report.html"),
    ]


def refuse_others(options: argparse.Namespace) -> str | None:
    """Why these options cannot continue in the folder, which keeps those that it was begun with; None if they can."""
    if not options.file.is_file():
        return f"there is no file {options.file}; give IFEval's input_data.jsonl, or GSM8K's train.jsonl."
    options.out.mkdir(parents=True, exist_ok=True)
    kept, content = (
        options.out / "options.json",
        json.dumps({name: str(value) for name, value in vars(options).items()}),
    )
    if not kept.exists():
        kept.write_text(content)
    if kept.read_text() != content:
        return f"{options.out} was begun with other options ({kept}); give those, or another --out."
    return None


def do(step: Step) -> None:
    """Make the step's file, unless it is there.

    Raises:
        CalledProcessError: the command failed, and has said why.
    """
    if step.target.exists():
        print(f"{step.said}: done, {step.target} is there", flush=True)
        return
    began = time.monotonic()
    print(f"{step.said}: {shlex.join(step.command)}", flush=True)
    unfinished = step.target.with_name(f"unfinished_{step.target.name}")
    out = ["--out", str(unfinished)] if step.takes_out else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    shown = subprocess.DEVNULL if out else None  # the closing lines say it
    try:
        subprocess.run([*step.command, *out], check=True, env=environment, stdout=shown)
    except subprocess.CalledProcessError:
        step.target.unlink(missing_ok=True)  # checks that failed are in a file as well
        raise
    if out:
        unfinished.rename(step.target)
    print(f"{step.said}: {time.monotonic() - began:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("file", type=Path, help="IFEval's input_data.jsonl, or GSM8K's train.jsonl")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the run")
    add("--preset", choices=BENCHMARKS, default="smollm_ifeval")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder; default: outputs/real/PRESET_SEED")
    add("--num-samples", type=int, help="problems that are measured; default: 541 of IFEval, 300 of GSM8K")
    add("--max-tokens", type=int, help="of a response that is measured; default: 512 in IFEval, 256 in GSM8K")
    options = parser.parse_intermixed_args(arguments)
    options.out = options.out or Path("outputs", "real", f"{options.preset}_{options.seed}")
    refusal = refuse_others(options)
    if refusal:
        print(f"real.py: {refusal}", file=sys.stderr)
        return 2
    began = time.monotonic()
    try:
        for step in steps(options):
            do(step)
    except subprocess.CalledProcessError as error:
        if error.returncode == 130:
            print("Stopped; the same command continues.", file=sys.stderr)
        return error.returncode
    except KeyboardInterrupt:
        print("Stopped; the same command continues.", file=sys.stderr)
        return 130
    from sota_grpo.cli.responses import show

    print()
    show(json.loads((options.out / "after.json").read_text()), None, sys.stdout)
    print(f"{(time.monotonic() - began) / 60:.0f} minutes; {options.out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
