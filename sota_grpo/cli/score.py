"""``sota-grpo score``: grade responses that exist already, with the grader that a training run would use.

Rows in, rows out, one JSON object per line and in the same order; each gains ``reward``, ``terms``, ``success`` and
``error``, and what the task's grader gives beside them (IFEval: the outcome of every instruction)::

    {"response": "... #### 18", "answer": "18"}
    {"response": "... #### 18", "answer": "18", "reward": 1.0, "terms": {...}, "success": true, "error": null}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from sota_grpo.cli import above_zero, add_parser, whole
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.rewards import ANSWER_FORMATS
from sota_grpo.rewards.ifeval import find_punkt
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task, total_reward
from sota_grpo.tasks import TASKS, make_scorer
from sota_grpo.tasks.dataset import DatasetError, text_of
from sota_grpo.text import json_line

STANDARD = "-"  # stdin or stdout
_BATCH = 64  # rows that a grader is given at once
_AHEAD = 4  # batches per grader that are read before the first is written
_ENCODING, _ERRORS = "utf-8-sig", "surrogateescape"  # of the input: what is not UTF-8 stands escaped in the output


class RowWriter:
    """Writes rows, one JSON object per line, and counts them.

    Args:
        file: where they go.
        given: option and name of the output, for messages.
        place: where written rows are to be found when the work ends early.

    Raises:
        RunFailed: by ``write`` and ``flush``: the disk is full, or else in the way.
        BrokenPipeError: by them: the reader of stdout has had enough.

    >>> rows = RowWriter(sys.stdout, "-", "stdout")
    >>> rows.write({"reward": 1.0})
    {"reward": 1.0}
    >>> rows.count
    1
    """

    def __init__(self, file: TextIO, given: str, place: str) -> None:
        self.count = 0
        self._file, self._given, self._place = file, given, place

    def write(self, row: dict[str, Any]) -> None:
        with self._told():
            self._file.write(json_line(row, default=str) + "\n")
        self.count += 1

    def flush(self) -> None:
        with self._told():
            self._file.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)  # where what is buffered goes: Python would try again at exit
            os.dup2(nowhere, self._file.fileno())
            os.close(nowhere)
            left = f"{self._place} holds the rows before"
            raise RunFailed(f"{self._given} cannot be written on ({error.strerror}); {left}.") from error


@contextmanager
def row_reader(name: str) -> Iterator[TextIO]:
    """The lines of a file or of stdin; a byte order mark is no part of them, and no byte is refused.

    Raises:
        UserError: the file cannot be read.
    """
    if name == STANDARD:
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(encoding=_ENCODING, errors=_ERRORS)
        yield sys.stdin
        return
    try:
        file = open(name, encoding=_ENCODING, errors=_ERRORS)  # noqa: SIM115
    except OSError as error:
        raise UserError(f"--input {name} cannot be read ({error.strerror}).") from error
    with file:
        yield file


@contextmanager
def row_writer(name: str, read: str | None = None, option: str = "--output") -> Iterator[RowWriter]:
    """The output, under its name only once it is complete; an interrupted one keeps what it has beside it.

    Args:
        name: of the file, or ``-``.
        read: name of the input.
        option: by which the user gave the name.

    Raises:
        UserError: at once, if nothing can be written there.
        RunFailed: something is in the way later.
        KeyboardInterrupt: with the number of rows that are written as its text.
    """
    if name == STANDARD:
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        with _rows(sys.stdout, option, "stdout") as rows:
            yield rows
        return
    partial = Path(f"{name}.partial")
    given = f"{option} {name}"
    if read is not None and Path(read).resolve() in (Path(name).resolve(), partial.resolve()):
        raise UserError(f"{given} would overwrite the input; give another file.")
    try:
        if Path(name).exists() and not Path(name).is_file():
            raise UserError(f"{given} is there and is no file; give a file, or - for stdout.")
        file = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{given} cannot be written ({error.strerror}).") from error
    with file, _rows(file, given, str(partial)) as rows:
        yield rows
    try:
        partial.replace(name)
    except OSError as error:
        raise RunFailed(f"{given} cannot be written ({error.strerror}); {partial} holds all rows.") from error


@contextmanager
def _rows(file: TextIO, given: str, place: str) -> Iterator[RowWriter]:
    rows = RowWriter(file, given, place)
    try:
        yield rows
    except KeyboardInterrupt:
        rows.flush()
        told = [f"rows written to {place}: {rows.count}"] if rows.count else []
        raise KeyboardInterrupt(*told) from None
    rows.flush()


@dataclass(frozen=True)
class Line:
    """A line of the input: its number from 1, its row, and what to grade or why it cannot be."""

    number: int
    row: dict[str, Any]
    asked: tuple[str, Example] | None = None
    error: str | None = None


def add_command(commands: Any) -> None:
    """Add ``score`` and its options to the parser of ``sota-grpo``."""
    parser = add_parser(commands, "score", "grade responses that exist already", __doc__, run)
    add = parser.add_argument
    add("--task", required=True, choices=TASKS, help="whose grader")
    add("--input", metavar="FILE", help="rows to grade, .jsonl; - is stdin")
    add("--output", metavar="FILE", default=STANDARD, help="where the graded rows go; default: stdout")
    add("--text", metavar="RESPONSE", help="one response instead of --input")
    add("--answer", metavar="ANSWER", help="the right answer to --text")
    add("--row", metavar="JSON", help="further columns of --text, as a JSON object")
    add("--answer-format", choices=ANSWER_FORMATS, help="where the answer stands; default: the task's own")
    add("--reward-path", metavar="FILE", help="Python file with reward functions, instead of the task's own reward")
    add("--reward-name", metavar="NAME", action="append", help="function in --reward-path; may be given several times")
    add(
        "--workers",
        metavar="N",
        type=whole("a number of processes"),
        default=os.cpu_count() or 1,
        help="grader processes; default: one a core",
    )
    add(
        "--timeout-s",
        metavar="S",
        type=above_zero("a time"),
        default=60.0,
        help="longest time for one response; default: 60",
    )


def run(options: argparse.Namespace) -> int:
    """Grade what the options name; 0 once everything that can be read is graded.

    Raises:
        UserError: the options contradict each other, or a file cannot be read or written.
    """
    _require_sense(options)
    with redirect_stdout(sys.stderr):  # a file of reward functions runs here, and may print
        task = make_scorer(
            options.task,
            answer_format=options.answer_format,
            reward_path=options.reward_path,
            reward_names=options.reward_name,
        )
    if options.task == "ifeval" and find_punkt() is None:
        print("sota-grpo: NLTK's punkt data is not here (NLTK_DATA): sentences are split by rules.", file=sys.stderr)
    if options.text is not None:
        _score_text(task, options)
        return 0
    with row_reader(options.input) as file, row_writer(options.output, options.input) as out:
        counts = _score_lines(task, file, out, options)
    print(counts.sentence(), file=sys.stderr)
    return 0


def _require_sense(options: argparse.Namespace) -> None:
    """Refuse options that would do nothing."""
    if (options.text is None) == (options.input is None):
        raise UserError("give either --input FILE or --text RESPONSE.")
    if options.text is None and options.answer is not None:
        raise UserError("--answer goes with --text; rows of --input have a column 'answer'.")
    if options.text is None and options.row is not None:
        raise UserError("--row goes with --text; rows of --input have their columns already.")
    if options.reward_name and options.reward_path is None:
        raise UserError("--reward-name names functions of a file; name the file with --reward-path FILE.")


def _score_text(task: Task, options: argparse.Namespace) -> None:
    try:
        row = json.loads("{}" if options.row is None else options.row)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise UserError(f"--row {options.row!r} is not a JSON object.")
    row |= {"response": options.text} | ({} if options.answer is None else {"answer": options.answer})
    line = _line(task, 1, json.dumps(row))
    if line.asked is None:
        raise UserError(f"{line.error}; give --answer, or the columns that the task needs with --row.")
    with row_writer(options.output) as out, _graders(task, options) as pool:
        graded = graded_row(task, line.row, pool.scores([line.asked]).result()[0])
        out.write({name: value for name, value in graded.items() if name not in row})


@dataclass
class _Counts:
    scored: int = 0
    right: int = 0
    failed: int = 0
    broken: int = 0
    reward: float = 0.0

    def sentence(self) -> str:
        sentence = f"{self.scored} responses scored"
        if self.scored:
            sentence += f", mean reward {self.reward / self.scored:.4g}, {self.right / self.scored:.2%} right"
        return f"{sentence}; {self.failed} graders failed; {self.broken} lines could not be read."


def _score_lines(task: Task, file: Iterable[str], out: RowWriter, options: argparse.Namespace) -> _Counts:
    counts = _Counts()
    lines = (_line(task, number, text) for number, text in enumerate(file, start=1) if text.strip())
    with _graders(task, options) as pool:
        for line, score in _scored(pool, lines, _AHEAD * options.workers):
            if score is None:
                counts.broken += 1
                print(f"sota-grpo: {line.error}", file=sys.stderr)
                graded = {**line.row, "reward": None, "terms": {}, "success": False, "error": line.error}
            else:
                graded = graded_row(task, line.row, score)
                counts.scored += 1
                counts.right += score.success
                counts.failed += score.error is not None
                counts.reward += graded["reward"]
            out.write(graded)
    return counts


def _scored(pool: Any, lines: Iterator[Line], ahead: int) -> Iterator[tuple[Line, Score | None]]:
    """Each line with its score, in order; None where there was nothing to grade."""
    waiting: deque[tuple[list[Line], Future[list[Score]]]] = deque()
    batch = list(islice(lines, _BATCH))
    while batch or waiting:
        if batch:
            waiting.append((batch, pool.scores([line.asked for line in batch if line.asked is not None])))
        if not batch or len(waiting) > ahead:
            answered, scores = waiting.popleft()
            left = iter(scores.result())
            for line in answered:
                yield line, (None if line.asked is None else next(left))
        batch = list(islice(lines, _BATCH))


def _line(task: Task, number: int, text: str) -> Line:
    place = f"line {number}"
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Line(number, {"line": number}, error=f"{place}: not valid JSON ({error})")
    if not isinstance(row, dict):
        return Line(number, {"line": number}, error=f"{place}: holds {type(row).__name__}, not an object")
    try:
        return Line(number, row, asked=(text_of(row, "response", place), task.read_row(row, place)))
    except DatasetError as error:
        return Line(number, row, error=str(error).rstrip("."))


def graded_row(task: Task, row: dict[str, Any], score: Score) -> dict[str, Any]:
    """The row with what its grader found, the reward, its terms, the success and the error."""
    reward = total_reward(score.terms, task.term_weights)
    grades = {"reward": reward, "terms": dict(score.terms), "success": score.success, "error": score.error}
    return {**row, **score.info, **grades}


def _graders(task: Task, options: argparse.Namespace) -> AbstractContextManager[Any]:
    from sota_grpo.rewards.grading import grading_pool

    return grading_pool(task, num_workers=options.workers, timeout_s=options.timeout_s)
