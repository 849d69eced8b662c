"""Commands that grade responses: ``sota-grpo eval``, of a model or run, and ``score``, of given ones."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from io import TextIOWrapper
from itertools import count, islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from sota_grpo.cli import above_zero, add_parser, add_trust, overrides_of, print_trust, step, whole
from sota_grpo.config.mixture import tasks_named
from sota_grpo.errors import RunFailed, UserError, writing
from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rewards.ifeval.checks import find_punkt
from sota_grpo.rl.records import Example, Score, total_reward
from sota_grpo.rl.task import Task
from sota_grpo.tasks import TASKS, make_scorer
from sota_grpo.tasks.dataset import DatasetError, text_of
from sota_grpo.text import json_line, os_reason, sentence

if TYPE_CHECKING:
    from sota_grpo.assembly.evaluation import Target
    from sota_grpo.training.evaluate import Evaluator, Response

STANDARD = "-"  # stdin or stdout
_BATCH = 64  # rows per request to a grader
_AHEAD = 4  # most batches per grader that are submitted and not scored yet
_OF_ANOTHER = ("model", "steps", "task", "max_tokens", "problems", "num_problems", "greedy", "counts")  # of --against
_PLAIN_LINE_S = 10.0  # seconds between lines of progress if stderr is no terminal
RowWriter = Callable[[dict[str, Any]], None]
_ENCODING, _ERRORS = "utf-8-sig", "surrogateescape"  # of the input; invalid UTF-8 is escaped in the output


def add_command(commands: Any) -> None:
    """Add ``eval`` and ``score`` to the parser of ``sota-grpo``."""
    summary = "evaluate a model, or the model of a run, on held-out problems"
    parser = add_parser(commands, "eval", summary, evaluate.__doc__, evaluate)
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

    add = add_parser(commands, "score", "grade given responses", score.__doc__, score).add_argument
    add("--task", required=True, choices=TASKS, help="task whose grader is used")
    add("--input", metavar="FILE", help="rows to grade, .jsonl; - is stdin")
    add("--output", metavar="FILE", default=STANDARD, help="file for the graded rows; default: - (stdout)")
    add("--text", metavar="RESPONSE", help="grade this response, in place of --input")
    add("--answer", metavar="ANSWER", help="the right answer to --text")
    add("--answer-format", choices=ANSWER_FORMATS, help="format of the answer; default: the task's")
    add("--reward-path", metavar="FILE", help="Python file with reward functions, which replace the task's reward")
    add("--reward-name", metavar="NAME", action="append", help="function in --reward-path; may be repeated")
    number, seconds, cores = whole("a number of processes"), above_zero("a time"), os.cpu_count() or 1
    add("--workers", metavar="N", type=number, default=cores, help="number of grader processes; default: one per core")
    add("--timeout-s", metavar="S", type=seconds, default=60.0, help="longest seconds for one response; default: 60")


def evaluate(options: argparse.Namespace) -> int:
    """Evaluate a model, or the model of a run, on held-out problems.

    It prints the accuracy of greedy responses, avg@k (mean over k sampled responses) and pass@1 to pass@k (probability
    that at least one of k is right), each with its standard error over problems. A run is evaluated on its own held-out
    problems, with its options and seed, which reproduces its last evaluation::

        sota-grpo eval outputs/2026-01-31/10-00-00 --k 8
        sota-grpo eval Qwen/Qwen2.5-1.5B-Instruct --task math --num-samples 500 --responses responses.jsonl
        sota-grpo eval tiny engine=transformers env.difficulty=2
        sota-grpo eval smollm2 --task ifeval --num-samples 541 env.eval_path=input_data.jsonl --out before.json
        sota-grpo eval RUN --task ifeval --num-samples 541 env.eval_path=input_data.jsonl --against before.json

    The last command prints the gain over the other model on the same problems, with its paired standard error.

    OPTION=VALUE is an option of ``grpo.py``: env.dataset_path=FILE, inference_model.max_tokens=2048, engine=vllm.
    """
    files = [Path(name).resolve() for name in (options.out, options.responses) if name is not None]
    if len(files) != len({*files}):
        raise UserError(f"--out and --responses both write {options.out}; give two files.")
    before = None if options.against is None else _read_result(options.against)
    from sota_grpo.assembly.devices import resolve_device
    from sota_grpo.assembly.evaluation import find_target
    from sota_grpo.engines import resolve_engine_name, temperature_fault
    from sota_grpo.run.entry import quiet_console
    from sota_grpo.training.evaluate import accuracy

    quiet_console()
    named = {"config_name": options.config_name, "task": options.task, "step": options.step}
    target = find_target(options.target, _overrides(options), **named, trust=options.trust_run)
    print_trust(options, target.config)
    engine = resolve_engine_name(target.config.engine.name, device=resolve_device(target.config))
    if (fault := temperature_fault(engine, options.temperature, "--temperature")) is not None:
        raise UserError(fault)
    began = time.perf_counter()
    with ExitStack() as opened:
        write_result, write_row = [
            None if name is None else opened.enter_context(row_writer(name, option=option))
            for option, name in (("--out", options.out), ("--responses", options.responses))
        ]
        result = _evaluated(target, options, before, write_row) | {"seconds": round(time.perf_counter() - began, 3)}
        if before is not None:
            both = [name for name in result["counts"] if name in before["counts"]]
            gain = {name: accuracy(result["counts"][name], before["counts"][name]) for name in both}
            result["against"] = {name: before[name] for name in ("model", "steps", "greedy")} | {"gain": gain}
        show(result, before, sys.stderr if STANDARD in (options.out, options.responses) else sys.stdout)
        if write_result is not None:
            write_result(result)
    return 0


def _evaluated(
    target: Target, options: argparse.Namespace, before: dict[str, Any] | None, write_row: RowWriter | None
) -> dict[str, Any]:
    """Evaluate ``target``; return the header of the result, and what was measured."""
    from sota_grpo.assembly.evaluation import open_evaluator
    from sota_grpo.recording.progress import Heartbeat, Progress, starting

    with ExitStack() as opened:
        opened.enter_context(redirect_stdout(sys.stderr))  # libraries and reward functions may print
        with Heartbeat():
            starting(f"Loading {target.name} and starting the engine")
            evaluator = opened.enter_context(open_evaluator(target))
        problems = json.dumps(
            [(e.query, e.answer, dict(e.extra)) for e in evaluator.examples], sort_keys=True, default=str
        )
        heading = {
            **{"model": target.name, "steps": target.steps, "task": tasks_named(target.config)},
            **{"engine": evaluator.rollouts.engine.name, "max_tokens": evaluator.max_tokens, "seed": evaluator.seed},
            # of the problems in their order: evaluations with the same one are paired
            "problems": hashlib.sha256(problems.encode()).hexdigest(),
        }
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

        return heading | evaluator.evaluate(temperature=options.temperature, on_graded=graded)


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return the overrides for the config: from options of this command (--k: eval.avg_at_k), then OPTION=VALUE."""
    known = {"engine": options.engine, "eval.avg_at_k": options.k, "eval.num_samples": options.num_samples}
    known["seed"] = options.seed
    return [*(f"{name}={value}" for name, value in known.items() if value is not None), *overrides_of(options)]


def _read_result(name: str) -> dict[str, Any]:
    """Read a result file that ``--out`` has written."""
    try:
        result = json.loads(Path(name).read_bytes())
        used = {key: result[key] for key in _OF_ANOTHER}
        for counts in used["counts"].values():
            _ = sum(hits for hits, _ in counts) / sum(tried for _, tried in counts)
        return used
    except (OSError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        problem = f"is not a result of sota-grpo eval, or damaged ({sentence(error).rstrip('.')})"
        if isinstance(error, OSError):
            problem = f"cannot be read ({os_reason(error)})"
        raise UserError(f"--against {name} {problem}; give a file that --out has written.") from error


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


def score(options: argparse.Namespace) -> int:
    """Grade given responses with the grader that training would use.

    Input and output are JSONL with rows in the same order. The output adds ``reward``, ``terms``, ``success`` and
    ``error``, and columns that the task's grader reports (IFEval: whether each instruction is followed)::

        {"response": "... #### 18", "answer": "18"}
        {"response": "... #### 18", "answer": "18", "reward": 1.0, "terms": {...}, "success": true, "error": null}
    """
    if (options.text is None) == (options.input is None):
        raise UserError("give either --input FILE or --text RESPONSE.")
    if options.text is None and options.answer is not None:
        raise UserError("--answer is for --text; put the answers of --input into its column 'answer'.")
    if options.reward_name and options.reward_path is None:
        raise UserError("--reward-name names functions of a file; give the file with --reward-path FILE.")
    with redirect_stdout(sys.stderr):  # a file of reward functions runs here, and may print
        task = make_scorer(
            options.task,
            answer_format=options.answer_format,
            reward_path=options.reward_path,
            reward_names=options.reward_name,
        )
    if options.task == "ifeval" and find_punkt() is None:
        print("sota-grpo: NLTK's punkt data is not found (NLTK_DATA): sentences are split by rules.", file=sys.stderr)
    if options.text is not None:
        _score_text(task, options)
        return 0
    with _lines_of(options.input) as file, row_writer(options.output, options.input) as write:
        counts = _score_lines(task, file, write, options)
    summary = f"{counts['scored']} responses scored"
    if counts["scored"]:
        mean, share = (counts[name] / counts["scored"] for name in ("reward", "right"))
        summary += f", mean reward {mean:.4g}, {share:.2%} right"
    failed = f"grading failed for {counts['failed']}; {counts['broken']} lines could not be read."
    print(f"{summary}; {failed}", file=sys.stderr)
    return 0


def _score_text(task: Task, options: argparse.Namespace) -> None:
    row = {"response": options.text} | ({} if options.answer is None else {"answer": options.answer})
    line = _line(task, 1, json.dumps(row))
    if line.pair is None:
        raise UserError(f"{line.error}; give --answer, or a row with the columns that the task needs with --input.")
    with row_writer(options.output) as write, _graders(task, options) as pool:
        graded = graded_row(task, line.row, pool.scores([line.pair]).result()[0])
        write({name: value for name, value in graded.items() if name not in row})


def _score_lines(task: Task, file: Iterable[str], write: RowWriter, options: argparse.Namespace) -> Counter[str]:
    """Grade the lines of ``file``; return counts (scored, right, failed, broken) and the sum of ``reward``."""
    counts: Any = Counter()  # the rewards are no integers
    lines = (_line(task, number, text) for number, text in enumerate(file, start=1) if text.strip())
    waiting: deque[tuple[list[Line], Future[list[Score]]]] = deque()
    with _graders(task, options) as pool:
        while (batch := list(islice(lines, _BATCH))) or waiting:
            if batch:
                waiting.append((batch, pool.scores([line.pair for line in batch if line.pair is not None])))
            if batch and len(waiting) <= _AHEAD * options.workers:
                continue
            answered, scores = waiting.popleft()
            left = iter(scores.result())
            for line in answered:
                if line.pair is None:
                    counts["broken"] += 1
                    print(f"sota-grpo: {line.error}", file=sys.stderr)
                    write({**line.row, "reward": None, "terms": {}, "success": False, "error": line.error})
                    continue
                grade = next(left)
                graded = graded_row(task, line.row, grade)
                failed = int(grade.error is not None)
                counts.update(scored=1, right=grade.success, failed=failed, reward=graded["reward"])
                write(graded)
    return counts


def _line(task: Task, number: int, text: str) -> Line:
    line = f"line {number}"
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line({"line": number}, error=f"{line}: not valid JSON ({error})")
    if not isinstance(row, dict):
        return Line({"line": number}, error=f"{line}: has a {type(row).__name__}, not a JSON object")
    try:
        return Line(row, pair=(text_of(row, "response", line), task.read_row(row, line)))
    except DatasetError as error:
        return Line(row, error=str(error).rstrip("."))


def graded_row(task: Task, row: dict[str, Any], score: Score) -> dict[str, Any]:
    """Return ``row`` with the grader's columns (``score.info``), reward, terms, success and error added or replaced."""
    reward = total_reward(score.terms, task.term_weights)
    grades = {"reward": reward, "terms": dict(score.terms), "success": score.success, "error": score.error}
    return {**row, **score.info, **grades}


def _graders(task: Task, options: argparse.Namespace) -> AbstractContextManager[Any]:
    from sota_grpo.rewards.grading import grading_pool

    return grading_pool(task, num_workers=options.workers, timeout_s=options.timeout_s)


class Line(NamedTuple):
    """A line of the input: its row, and either ``pair``, (response, example), or ``error``, why it cannot be graded."""

    row: dict[str, Any]
    pair: tuple[str, Example] | None = None
    error: str | None = None


def _lines_of(name: str) -> AbstractContextManager[TextIO]:
    """Open a file (``-``: stdin) for reading text; a byte order mark is skipped and invalid UTF-8 accepted."""
    if name == STANDARD:
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding=_ENCODING, errors=_ERRORS)
        return nullcontext(sys.stdin)
    try:
        return open(name, encoding=_ENCODING, errors=_ERRORS)
    except OSError as error:
        raise UserError(f"--input {name} cannot be read ({os_reason(error)}); give another file.") from error


@contextmanager
def row_writer(name: str, read: str | None = None, option: str = "--output") -> Iterator[RowWriter]:
    """Yield a function that writes a row to ``NAME.partial``, renamed to ``NAME`` if the block succeeds; ``-``: stdout.

    ``read`` is the input file, which must be another; ``option`` is the command line option of ``name``, for messages.
    UserError if the file cannot be used, RunFailed if writing fails, BrokenPipeError if the reader of stdout has closed
    it. If the block raises an exception, ``NAME.partial`` is kept, unless it is empty; the message of a
    KeyboardInterrupt gets the number of rows.
    """
    partial, target, count = Path(f"{name}.partial"), f"{option} {name}", 0
    with writing(target, "give another file"):
        if name == STANDARD:
            if isinstance(sys.stdout, TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")
            file, holder, target = sys.stdout, "stdout", option
        elif read is not None and Path(read).resolve() in (Path(name).resolve(), partial.resolve()):
            raise UserError(f"{target} would overwrite the input; give another file.")
        elif Path(name).exists() and not Path(name).is_file():
            raise UserError(f"{target} exists and is not a file; give a file, or - for stdout.")
        else:
            file, holder = partial.open("w", encoding="utf-8"), str(partial)

    def attempt(action: Callable[..., object], *arguments: str) -> None:
        try:
            action(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # takes what is buffered: Python would try again at exit
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
            reason = f"{target} cannot be written further ({os_reason(error)}); {holder} has the rows before."
            raise RunFailed(reason) from error

    def write(row: dict[str, Any]) -> None:
        nonlocal count
        attempt(file.write, json_line(row, default=str) + "\n")
        count += 1

    with nullcontext() if name == STANDARD else file:
        try:
            yield write
        except BaseException as error:
            if not count and name != STANDARD:
                partial.unlink(missing_ok=True)
            if not count or not isinstance(error, KeyboardInterrupt):
                raise
            attempt(file.flush)
            raise KeyboardInterrupt(f"rows written to {holder}: {count}") from None
        attempt(file.flush)
    if name != STANDARD:
        with writing(target, f"{partial} has all rows", RunFailed):
            partial.replace(name)
