"""``sota-grpo eval``: evaluate a model, or the model of a run, on held-out problems.

It prints the accuracy of greedy responses, avg@k (mean over k sampled responses) and pass@1 to pass@k (probability that
at least one of k is right), each with its standard error over problems. A run is evaluated on its own held-out
problems, with its options and seed, which reproduces its last evaluation::

    sota-grpo eval outputs/2026-01-31/10-00-00 --k 8
    sota-grpo eval Qwen/Qwen2.5-1.5B-Instruct --task math --num-samples 500 --responses responses.jsonl
    sota-grpo eval tiny engine=transformers env.difficulty=2
    sota-grpo eval smollm2 --task ifeval --num-samples 541 env.eval_path=input_data.jsonl --out before.json
    sota-grpo eval RUN --task ifeval --num-samples 541 env.eval_path=input_data.jsonl --against before.json

The last command prints the gain over the other model on the same problems, with its paired standard error.

OPTION=VALUE is an option of ``grpo.py``: env.dataset_path=FILE, inference_model.max_tokens=2048, engine=vllm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from sota_grpo.cli import above_zero, add_parser, add_trust, print_trust, step, whole
from sota_grpo.cli.score import STANDARD, graded_row, row_writer
from sota_grpo.config.mixture import tasks_named
from sota_grpo.errors import RunFailed, UserError

if TYPE_CHECKING:
    from sota_grpo.assembly.evaluation import Target
    from sota_grpo.training.evaluate import Evaluator, Response

_OF_ANOTHER = ("model", "steps", "task", "max_tokens", "problems", "num_problems", "greedy", "counts")  # of --against
_PLAIN_LINE_S = 10.0  # seconds between lines of progress if stderr is no terminal


def add_command(commands: Any) -> None:
    """Add ``eval`` and its options to the parser of ``sota-grpo``."""
    summary = "evaluate a model, or the model of a run, on held-out problems"
    parser = add_parser(commands, "eval", summary, __doc__, run)
    add = parser.add_argument
    add("target", metavar="MODEL_OR_RUN", help="run directory, folder or hub name of a model, or tiny")
    add("overrides", metavar="OPTION=VALUE", nargs="*", help="options of the run or of the preset")
    add("--task", help="env.dataset, or a task in the run's mixture; default: the run's, or gsm8k")
    add("--config-name", "-cn", metavar="NAME", help="preset for a model; default: the task's")
    number = whole("a whole number", least=0)
    add("--k", metavar="K", type=number, help="sampled responses per problem; 0: greedy only; default: eval.avg_at_k")
    add("--num-samples", metavar="N", type=whole("a whole number"), help="problems; default: eval.num_samples")
    add("--engine", metavar="NAME", help="transformers, vllm, vllm_server, ..; default: the run's, for a model auto")
    add("--temperature", metavar="T", type=above_zero("a temperature"), default=1.0, help="of the samples; default: 1")
    add("--seed", metavar="N", type=number, help="of the samples and of generated problems; default: the run's")
    add("--step", metavar="N", type=step, help="evaluate the run's checkpoint after N steps; best: of train.keep_best")
    add("--out", metavar="FILE", help="write the result as JSON; - is stdout")
    add("--responses", metavar="FILE", help="write all responses with their scores to this .jsonl, as sota-grpo score")
    add_trust(parser)
    add("--against", metavar="FILE", help="result (--out) of another model on the same problems: print the gain")


def run(options: argparse.Namespace) -> int:
    """Evaluate the model or run, print the result, write the files of ``--out`` and ``--responses``; return 0."""
    _require_writable(options.out)
    files = [Path(name).resolve() for name in (options.out, options.responses) if name is not None]
    if len(files) != len({*files}):
        raise UserError(f"--out and --responses both write {options.out}; give two files.")
    before = None if options.against is None else _read_result(options.against)
    from sota_grpo.assembly.devices import resolve_device
    from sota_grpo.assembly.evaluation import find_target, open_evaluator
    from sota_grpo.engines import resolve_engine_name, temperature_fault
    from sota_grpo.recording.progress import Heartbeat, Progress, starting
    from sota_grpo.run.entry import quiet_console
    from sota_grpo.training.evaluate import gains

    quiet_console()
    named = {"config_name": options.config_name, "task": options.task, "step": options.step}
    target = find_target(options.target, _overrides(options), **named, trust=options.trust_run)
    print_trust(options, target.config)
    engine = resolve_engine_name(target.config.engine.name, device=resolve_device(target.config))
    if (fault := temperature_fault(engine, options.temperature, "--temperature")) is not None:
        raise UserError(fault)
    began = time.perf_counter()
    with ExitStack() as opened:
        write_row = None
        if options.responses is not None:
            write_row = opened.enter_context(row_writer(options.responses, option="--responses"))
        opened.enter_context(redirect_stdout(sys.stderr))  # libraries and reward functions may print
        with Heartbeat():
            starting(f"Loading {target.name} and starting the engine")
            evaluator = opened.enter_context(open_evaluator(target))
        heading = _heading(target, evaluator)
        if before is not None:
            _require_same_problems(options.against, before, heading)
        total = len(evaluator.examples) * (2 if evaluator.avg_at_k else 1)
        line = opened.enter_context(Progress(total, stream=sys.stderr, every_s=_PLAIN_LINE_S, unit="graded"))
        done, right = count(1), {True: list[bool](), False: list[bool]()}  # of greedy responses, and of samples

        def graded(greedy: bool, problem: int, responses: Sequence[Response]) -> None:
            right[greedy] += [response.score.success for response in responses]
            line.update(next(done), {"success": fmean(right[greedy])})
            if write_row is not None:
                for row in _rows(evaluator, greedy, problem, responses):
                    write_row(row)

        measured = evaluator.evaluate(temperature=options.temperature, on_graded=graded)
    result = heading | measured | {"seconds": round(time.perf_counter() - began, 3)}
    if before is not None:
        summary = {name: before[name] for name in ("model", "steps", "greedy")}
        result["against"] = {**summary, "gain": gains(before["counts"], measured["counts"])}
    show(result, before, sys.stderr if STANDARD in (options.out, options.responses) else sys.stdout)
    _write(options.out, result)
    return 0


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides for the config: from options of this command (--k: eval.avg_at_k), then OPTION=VALUE."""
    known = {"engine": options.engine, "eval.avg_at_k": options.k, "eval.num_samples": options.num_samples}
    known["seed"] = options.seed
    odd = [argument for argument in options.overrides if "=" not in argument]
    if odd:
        raise UserError(f"{odd[0]!r} is not OPTION=VALUE; correct it.")
    return [*(f"{name}={value}" for name, value in known.items() if value is not None), *options.overrides]


def _heading(target: Target, evaluator: Evaluator) -> dict[str, Any]:
    """Return the header of the result: model, steps, task, engine, max_tokens, seed, digest of the problems."""
    problems = [[example.query, example.answer, dict(example.extra)] for example in evaluator.examples]
    text = json.dumps(problems, sort_keys=True, default=str)
    return {
        "model": target.name,
        "steps": target.steps,
        "task": tasks_named(target.config),
        "engine": evaluator.rollouts.engine.name,
        "max_tokens": evaluator.max_tokens,
        "seed": evaluator.seed,
        # of the problems in their order: evaluations with the same one are paired
        "problems": hashlib.sha256(text.encode()).hexdigest(),
    }


def _read_result(name: str) -> dict[str, Any]:
    """Read a result file that ``--out`` has written."""
    try:
        result = json.loads(Path(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--against {name} cannot be read ({error}); give a file that --out has written.") from error
    try:
        used = {key: result[key] for key in _OF_ANOTHER}
        for counts in used["counts"].values():
            _ = sum(hits for hits, _ in counts) / sum(tried for _, tried in counts)
    except (LookupError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise UserError(
            f"--against {name} is not a result of sota-grpo eval, or damaged; give a file that --out has written."
        ) from error
    return used


def _require_same_problems(name: str, before: dict[str, Any], heading: dict[str, Any]) -> None:
    """Raise UserError unless both evaluations have the same problems and token limit, as paired errors need."""
    if before["problems"] != heading["problems"]:
        measured = f"--against {name} was evaluated on other problems ({before['num_problems']} of {before['task']})"
        raise UserError(f"{measured}; use the same --task, --num-samples, --seed and env.eval_path for both.")
    if before["max_tokens"] != heading["max_tokens"]:
        limit = f"at most {before['max_tokens']} tokens per response, not {heading['max_tokens']}"
        raise UserError(f"--against {name} was evaluated with {limit}; use the same eval.max_tokens for both.")


def _rows(evaluator: Evaluator, greedy: bool, problem: int, responses: Sequence[Response]) -> Iterator[dict[str, Any]]:
    """Yield one row per response of a problem, with the columns that ``sota-grpo score`` writes."""
    example = evaluator.examples[problem]
    extra = dict(example.extra)
    columns = {"question": example.query, "answer": example.answer, **extra.pop("columns", {}), **extra}
    for sample, response in enumerate(responses):
        row = columns | {
            "group_id": problem,
            "sample_id": sample,
            "greedy": greedy,
            "response": response.text,
            "response_tokens": response.num_tokens,
            "truncated": response.truncated,
        }
        yield graded_row(evaluator.rollouts.env.task, row, response.score)


def show(result: dict[str, Any], before: dict[str, Any] | None, stream: Any) -> None:
    """Print the result of an evaluation, and the gain over the result ``before``, if any, to ``stream`` as tables."""
    from rich.console import Console

    from sota_grpo.recording.progress import figures, percent
    from sota_grpo.training.evaluate import accuracy as share_of

    def accuracy(share: dict[str, float]) -> str:
        return percent(share["accuracy"], share["stderr"])

    def cells(share: dict[str, float]) -> tuple[str, ...]:
        reward = f"{share['reward']:.3g} +/- {share['reward_stderr']:.2g}"
        truncated = f"{share['truncated']:.0%}".replace("%", " %")
        return accuracy(share), reward, truncated, f"{share['response_tokens']:,.0f}"

    after = "" if result["steps"] is None else f" after {result['steps']} steps"
    title = f"{result['model']}{after} on {result['num_problems']:,} problems of {result['task']} ({result['engine']})"
    table = figures("", "accuracy", "reward", "truncated", "tokens")
    table.add_row("greedy", *cells(result["greedy"]))
    for name in result["counts"]:
        if name != "accuracy":
            table.add_row(f"  {name}", accuracy(share_of(result["counts"][name])))
    if "sampled" in result:
        table.add_row(f"avg@{result['k']}", *cells(result["sampled"]))
        for k, share in result["pass_at_k"].items():
            if k != "1":  # which is avg@k
                table.add_row(f"pass@{k}", accuracy(share))
    console = Console(file=stream, soft_wrap=True, highlight=False, markup=False)
    console.print(title)
    console.print(table)
    if before is not None:
        table = figures("the same problems", "before", "after", "gain, points")
        for name, gain in result["against"]["gain"].items():
            shares = [share_of(one["counts"][name]) for one in (before, result)]
            points = f"{100 * gain['accuracy']:+.1f} +/- {100 * gain['stderr']:.1f}"
            table.add_row(name, *map(accuracy, shares), points)
        console.print(table)
    if result["grader_errors"]:
        console.print(f"The grader failed on {result['grader_errors']} responses, which count as wrong.")


def _require_writable(name: str | None) -> None:
    """Raise UserError if the result file cannot be written, before the evaluation starts."""
    if name is None or name == STANDARD:
        return
    path = Path(name)
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError(f"--out {name} cannot be written ({error.strerror}); give another file.") from error


def _write(name: str | None, result: dict[str, Any]) -> None:
    if name is None:
        return
    counts = json.dumps(result["counts"])  # thousands of numbers on one line
    text = json.dumps(result | {"counts": 0}, indent=2, ensure_ascii=False) + "\n"
    text = text.replace('\n  "counts": 0', f'\n  "counts": {counts}', 1)
    if name == STANDARD:
        sys.stdout.write(text)
        return
    try:
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunFailed(f"--out {name} cannot be written ({error.strerror}); the result: {text}") from error
