"""``sota-grpo score``: grade given responses with the grader that training would use.

Input and output are JSONL with rows in the same order. The output adds ``reward``, ``terms``, ``success`` and
``error``, and columns that the task's grader reports (IFEval: whether each instruction is followed)::

    {"response": "... #### 18", "answer": "18"}
    {"response": "... #### 18", "answer": "18", "reward": 1.0, "terms": {...}, "success": true, "error": null}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sota_grpo.cli import above_zero, add_parser, whole
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rewards.ifeval import find_punkt
from sota_grpo.rl.records import Example, Score, total_reward
from sota_grpo.rl.task import Task
from sota_grpo.tasks import TASKS, make_scorer
from sota_grpo.tasks.dataset import DatasetError, text_of
from sota_grpo.text import json_line

STANDARD = "-"  # stdin or stdout
_BATCH = 64  # rows per request to a grader
_AHEAD = 4  # most batches per grader that are submitted and not scored yet
RowWriter = Callable[[dict[str, Any]], None]
_ENCODING, _ERRORS = "utf-8-sig", "surrogateescape"  # of the input; invalid UTF-8 is escaped in the output


def _lines_of(name: str) -> AbstractContextManager[TextIO]:
    """Open a file (``-``: stdin) for reading text; a byte order mark is skipped and invalid UTF-8 accepted."""
    if name == STANDARD:
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding=_ENCODING, errors=_ERRORS)
        return nullcontext(sys.stdin)
    try:
        return open(name, encoding=_ENCODING, errors=_ERRORS)
    except OSError as error:
        raise UserError(f"--input {name} cannot be read ({error.strerror}); give another file.") from error


@contextmanager
def row_writer(name: str, read: str | None = None, option: str = "--output") -> Iterator[RowWriter]:
    """Yield a function that writes a row to ``NAME.partial``, renamed to ``NAME`` if the block succeeds; ``-``: stdout.

    ``read`` is the input file, which must be another; ``option`` is the command line option of ``name``, for messages.
    UserError if the file cannot be used, RunFailed if writing fails, BrokenPipeError if the reader of stdout has closed
    it. The message of a KeyboardInterrupt in the block gets the number of rows written.
    """
    partial, target, count = Path(f"{name}.partial"), f"{option} {name}", 0
    try:
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
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror}); give another file.") from error

    def attempt(action: Callable[..., object], *arguments: str) -> None:
        try:
            action(*arguments)
        except BrokenPipeError:
            raise
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # takes what is buffered: Python would try again at exit
            os.dup2(nowhere, file.fileno())
            os.close(nowhere)
            reason = f"{target} cannot be written further ({error.strerror}); {holder} has the rows before."
            raise RunFailed(reason) from error

    def write(row: dict[str, Any]) -> None:
        nonlocal count
        attempt(file.write, json_line(row, default=str) + "\n")
        count += 1

    with nullcontext() if name == STANDARD else file:
        try:
            yield write
        except KeyboardInterrupt:
            attempt(file.flush)
            raise KeyboardInterrupt(*([f"rows written to {holder}: {count}"] if count else [])) from None
        attempt(file.flush)
    try:
        if name != STANDARD:
            partial.replace(name)
    except OSError as error:
        raise RunFailed(f"{target} cannot be written ({error.strerror}); {partial} has all rows.") from error


class Line(NamedTuple):
    """A line of the input: its row, and either ``pair``, (response, example), or ``error``, why it cannot be graded."""

    row: dict[str, Any]
    pair: tuple[str, Example] | None = None
    error: str | None = None


def add_command(commands: Any) -> None:
    """Add ``score`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "score", "grade given responses", __doc__, run)
    add = parser.add_argument
    add("--task", required=True, choices=TASKS, help="task whose grader is used")
    add("--input", metavar="FILE", help="rows to grade, .jsonl; - is stdin")
    add("--output", metavar="FILE", default=STANDARD, help="file for the graded rows; default: - (stdout)")
    add("--text", metavar="RESPONSE", help="grade this response, in place of --input")
    add("--answer", metavar="ANSWER", help="the right answer to --text")
    add("--row", metavar="JSON", help="further columns for --text, as a JSON object")
    add("--answer-format", choices=ANSWER_FORMATS, help="format of the answer; default: the task's")
    add("--reward-path", metavar="FILE", help="Python file with reward functions, which replace the task's reward")
    add("--reward-name", metavar="NAME", action="append", help="function in --reward-path; may be repeated")
    count, cores = whole("a number of processes"), os.cpu_count() or 1
    add("--workers", metavar="N", type=count, default=cores, help="number of grader processes; default: one per core")
    time = above_zero("a time")
    add("--timeout-s", metavar="S", type=time, default=60.0, help="longest seconds for one response; default: 60")


def run(options: argparse.Namespace) -> int:
    """Grade the responses and write the graded rows; return 0, also if some lines could not be read or graded."""
    if (options.text is None) == (options.input is None):
        raise UserError("give either --input FILE or --text RESPONSE.")
    if options.text is None and options.answer is not None:
        raise UserError("--answer is for --text; put the answers of --input into its column 'answer'.")
    if options.text is None and options.row is not None:
        raise UserError("--row is for --text; put further columns of --input into its rows.")
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
    sentence = f"{counts['scored']} responses scored"
    if counts["scored"]:
        mean, share = (counts[name] / counts["scored"] for name in ("reward", "right"))
        sentence += f", mean reward {mean:.4g}, {share:.2%} right"
    print(
        f"{sentence}; grading failed for {counts['failed']}; {counts['broken']} lines could not be read.",
        file=sys.stderr,
    )
    return 0


def _score_text(task: Task, options: argparse.Namespace) -> None:
    try:
        row = json.loads("{}" if options.row is None else options.row)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError(f"--row {options.row!r} is not a JSON object; give the columns as one.")
    row |= {"response": options.text} | ({} if options.answer is None else {"answer": options.answer})
    line = _line(task, 1, json.dumps(row))
    if line.pair is None:
        raise UserError(f"{line.error}; give --answer, or the columns that the task needs with --row.")
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
                score = next(left)
                graded = graded_row(task, line.row, score)
                failed = int(score.error is not None)
                counts.update(scored=1, right=score.success, failed=failed, reward=graded["reward"])
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
