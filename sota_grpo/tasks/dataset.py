"""Rows of a dataset, from a local file or from the hub, with one clear sentence where that fails; and what tasks share
whose problems are a question and an answer.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from sota_grpo.errors import UserError
from sota_grpo.rewards.extract import extract_answer
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import chat
from sota_grpo.text import first_line, sentence

Row = Mapping[str, Any]
_ENCODING = "utf-8-sig"  # UTF-8, with the mark before it that spreadsheets write, or without
_PARQUET_ROWS = 64  # read at once
_MOST_HELD_OUT = 512
_PLAIN_SIZE = 1 << 26  # letters that a parquet file of any size may unpack to
_MOST_COMPRESSED = 200  # times its size: of 10,000 rows with one prompt of 5,000 letters it is about 50

logger = logging.getLogger(__name__)


class DatasetError(UserError, ValueError):
    """The dataset cannot be used; the message says why and what to change."""


def load_rows(name: str, *, split: str = "train", config: str | None = None) -> list[dict[str, Any]]:
    """All rows by column name, in order: of a local file, else of the dataset of that name on the hub.

    Raises:
        DatasetError: no such file, an ending that is not known, a broken line (with its number), a hub that does not
            answer, no rows at all.

    Example::

        rows = load_rows("openai/gsm8k", config="main", split="test")
        rows = load_rows("data/train.jsonl")
    """
    if is_file(name):
        file = Path(name)
        require_file(file)
        try:
            rows = _READERS[file.suffix](file)
        except UnicodeDecodeError as error:
            raise DatasetError(f"{name} is not UTF-8 text ({error.reason} at byte {error.start}).") from error
    else:
        import datasets

        try:
            rows = datasets.load_dataset(name, config, split=split).to_list()
        except Exception as error:  # the hub's client raises dozens of types: network, authentication, name, format
            raise DatasetError(
                f"the dataset {name} (config {config}, split {split}) could not be loaded from the hub "
                f"({sentence(error)}); give a local file with env.dataset_path=FILE or env.eval_path=FILE."
            ) from error
    if not rows:
        raise DatasetError(f"{name} has no rows; give a file with at least one problem.")
    return [{column: present(value) for column, value in row.items()} for row in rows]


def present(value: Any) -> Any:
    """The value; None where it is missing: NaN, as pandas and some writers of JSON have it, is no answer."""
    is_missing = isinstance(value, (float, decimal.Decimal, datetime.date)) and value != value  # NaT is a date
    return None if is_missing or type(value).__name__ == "NAType" else value  # of pandas


def optional_text(row: Row, columns: Iterable[str]) -> str:
    """The first of ``columns`` that holds text in one row; empty where none does."""
    return next((row[name] for name in columns if isinstance(row.get(name), str)), "")


def is_file(name: str) -> bool:
    """Whether a name is that of a local file and not one on the hub.

    >>> is_file("data/train.jsonl"), is_file("/no/such/train"), is_file("openai/gsm8k")
    (True, True, False)
    """
    path = Path(name)
    is_path = name.startswith(("/", "./", "../", "~")) and not path.is_dir()  # a folder is what the hub's library reads
    return is_path or path.suffix in SUFFIXES or path.is_file()


def text_of(row: Row, column: str, place: str) -> str:
    """The text in a column of one row; ``DatasetError`` names the place and the columns found.

    >>> text_of({"answer": "#### 2"}, "answer", "demo, row 1")
    '#### 2'
    """
    if column not in row:
        columns = ", ".join(map(repr, row)) or "none"
        raise DatasetError(f"{place}: column {column!r} is missing; the columns found are {columns}.")
    if not isinstance(row[column], str):
        hint = " (env.dataset=table reads chats)" if isinstance(row[column], list) else ""
        raise DatasetError(f"{place}: column {column!r} holds {type(row[column]).__name__}, not text{hint}.")
    return row[column]


def first_text(row: Row, columns: Sequence[str], place: str) -> str:
    """As :func:`text_of`, of the first of ``columns`` that the row has, where a number will do.

    >>> first_text({"answer": None, "ground_truth": 2}, ("answer", "ground_truth"), "demo, row 1")
    '2'
    """
    for column in columns:
        value = present(row.get(column))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if value is not None:
            return text_of(row, column, place)
    found = ", ".join(map(repr, row)) or "none"
    raise DatasetError(f"{place}: there is no column {' or '.join(map(repr, columns))}; the columns found are {found}.")


def require_file(path: Path) -> None:
    """Check that ``path`` is a file of a kind that can be read; ``DatasetError`` says why it is not."""
    if path.suffix not in _READERS:
        raise DatasetError(f"{path} ends in {path.suffix!r}; give one of {', '.join(_READERS)}.")
    if not path.is_file():
        raise DatasetError(f"there is no file {path}; correct env.dataset_path or env.eval_path (now in {Path.cwd()}).")


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = _json(line, f"{path}, line {number}")
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise DatasetError(f"{path}, line {number}: holds {kind}, not an object with the columns of a row.")
            rows.append(row)
    return rows


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place}: not valid JSON ({error.msg} at character {error.pos}).") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, brackets as deep
        raise DatasetError(f"{place}: not JSON that can be read ({sentence(error)}).") from error


def _read_json(path: Path) -> list[dict[str, Any]]:
    rows = _json(path.read_text(encoding=_ENCODING), str(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{path} does not hold a list of objects; give one object per row.")
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(_PLAIN_SIZE)  # of a cell; the limit of Python is 131,072 letters
    rows: list[dict[str, Any]] = []
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.reader(file, strict=True)  # so that a quotation mark that is not closed is no cell
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise DatasetError(f"{path}: two columns have one name ({', '.join(map(repr, names))}); rename one.")
            for cells in filter(None, reader):
                if len(cells) != len(names):
                    raise DatasetError(
                        f"{path}, row {len(rows) + 1} (line {reader.line_num}): has {len(cells)} cells where the "
                        f"header has {len(names)}; put cells that hold a comma or a line break in quotation marks."
                    )
                rows.append(dict(zip(names, cells, strict=True)))
        except csv.Error as error:
            place = f"{path}, row {len(rows) + 1} (line {reader.line_num})"
            raise DatasetError(f"{place}: not valid CSV ({error}).") from error
    return rows


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    rows: list[dict[str, Any]] = []
    most, read = max(_PLAIN_SIZE, _MOST_COMPRESSED * path.stat().st_size), 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(_PARQUET_ROWS):
            rows += batch.to_pylist()
            read += _size(rows[-len(batch) :])
            if read > most:  # a thousand rows of one text have it once in the file
                raise DatasetError(
                    f"{path} has {path.stat().st_size} bytes and unpacks to more than {most} letters; no data set is "
                    "so repetitive: mend it, or give it as .jsonl."
                )
        return rows
    except (ArrowException, OSError) as error:
        raise DatasetError(f"{path} is not a readable parquet file ({first_line(error)}).") from error


def _size(value: Any) -> int:
    """Letters and other values in nested lists and dictionaries."""
    if isinstance(value, (list, dict)):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return max(1, len(value)) if isinstance(value, (str, bytes)) else 1


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
SUFFIXES = tuple(_READERS)  # of the local files that can be read


def normalised(question: str) -> str:
    """The question with letter case and spacing taken out, for comparison."""
    return " ".join(question.casefold().split())


def unique_examples(examples: Sequence[Example]) -> list[Example]:
    """The examples without those that equal an earlier one in all that a reward can read.

    The prompt counts with letter case and spacing aside, the answer and all other columns as they are.
    """
    kept: dict[tuple[str, ...], Example] = {}
    for example in examples:
        columns = {name: value for name, value in example.extra.items() if name != "prompt"}
        row = json.dumps(columns, sort_keys=True, default=str)
        kept.setdefault((normalised(example.query), example.answer, row), example)
    return list(kept.values())


def hash_ordered(examples: Iterable[Example], data_seed: int = 0) -> list[Example]:
    """The examples by a hash of their questions: the first so many are a random sample of a file in any order."""
    return sorted(examples, key=lambda example: _hash(normalised(example.query), data_seed))


def _hash(question: str, data_seed: int) -> bytes:
    return hashlib.sha256(f"{data_seed}:{question}".encode()).digest()


def two_sides(
    train: Sequence[Example],
    heldout: Sequence[Example] | None,
    *,
    num_heldout: int | None,
    data_seed: int,
    source: str,
) -> tuple[list[Example], list[Example]]:
    """What to train on and what is held out, each row once; a question that stands on both sides is held out.

    Without ``heldout``, held out are all rows of the questions whose hash is smallest, until there are ``num_heldout``.
    So the choice depends on the questions and ``data_seed``, not on their order. What is trained on keeps the file's
    order, what is held out is in the order of its hash (:func:`hash_ordered`).

    Args:
        num_heldout: None is a tenth of the rows, 512 at most.

    Raises:
        DatasetError: nothing is left to train on.
    """
    num_read, train = len(train), unique_examples(train)
    if len(train) < num_read:
        logger.info(
            "%d of %d rows of %s equal an earlier row and are left out.", num_read - len(train), num_read, source
        )
    if heldout is None:
        count = min(_MOST_HELD_OUT, max(1, len(train) // 10)) if num_heldout is None else num_heldout
        rows = Counter(normalised(example.query) for example in train)
        chosen: Counter[str] = Counter()
        for question in sorted(rows, key=lambda question: _hash(question, data_seed)):
            if chosen.total() >= count:
                break
            chosen[question] = rows[question]
        if count and len(chosen) == len(rows):
            fewer = f"env.num_heldout={max(1, len(rows) // 10)}, " if len(rows) > 1 else ""
            raise DatasetError(
                f"{source} has {len(train)} rows with {len(rows)} different questions, and one that is held out is not "
                f"trained on, so env.num_heldout={count} leaves none; give {fewer}other rows to evaluate on "
                "(env.eval_path), or none (env.num_heldout=0 eval.mode=off)."
            )
        heldout = [example for example in train if normalised(example.query) in chosen]
        logger.info("%d of %d rows of %s are held out for evaluation.", len(heldout), len(train), source)
    heldout = hash_ordered(unique_examples(heldout), data_seed)
    taken = {normalised(example.query) for example in heldout}
    kept = [example for example in train if normalised(example.query) not in taken]
    if not kept:
        raise DatasetError(f"every question of {source} is held out; give other problems to train on.")
    return kept, heldout


_FORMS = {  # what the system prompt asks for, and the last line of a response
    "hash": ("on a last line of the form '#### <{}>'", "#### {}"),
    "boxed": ("in the form \\boxed{{<{}>}}", "The answer is \\boxed{{{}}}."),
    "tags": ("in the form <answer><{}></answer>", "<answer>{}</answer>"),
    "last_number": ("as the last number of the response", "The answer is {}."),
}


def asking(answer_format: str, what: str = "answer") -> str:
    """A system prompt that asks for worked steps and for the answer where ``answer_format`` looks for it.

    >>> asking("hash", "number")
    "Solve the problem step by step, then give the final answer on a last line of the form '#### <number>'."
    """
    return f"Solve the problem step by step, then give the final answer {_FORMS[answer_format][0].format(what)}."


def answering(answer_format: str, answer: str) -> str:
    """The last line of a response that gives ``answer`` where ``answer_format`` looks for it.

    >>> answering("boxed", "18"), answering("tags", "18")
    ('The answer is \\\\boxed{18}.', '<answer>18</answer>')
    """
    return _FORMS[answer_format][1].format(answer)


def require_not_negative(**values: float) -> None:
    """Check weights and amounts; ``ValueError`` names the first that is negative."""
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative.")


class ChatTask:
    """Asks a question after a system prompt."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    system_prompt: str | None

    def messages(self, example: Example) -> list[dict[str, str]]:
        """A system turn, unless the system prompt is empty, and the question as it is."""
        return chat(self.system_prompt, example.query)


class FileTask(ChatTask):
    """Loads rows of a file or of a dataset on the hub; a task reads them, and says which columns hold the question.

    A task with a dataset of its own names it: ``hub_name``, ``hub_config``, and whether its test split is held out.
    """

    hub_name: str
    hub_config: str | None = None
    has_test_split = False
    question_columns: Sequence[str] = ("prompt",)

    def read_row(self, row: Row, place: str) -> Example:
        """An example of a row, whose question may be missing."""
        raise NotImplementedError

    def _problem(self, row: Row, place: str) -> Example:
        """As :meth:`read_row`, of a row that must have a question."""
        question = first_text(row, self.question_columns, place)
        if not question.strip():
            raise DatasetError(f"{place}: the question is empty; mend or remove the row.")
        return replace(self.read_row(row, place), query=question, place=place)

    def _read(self, name: str, split: str = "train") -> list[Example]:
        """The examples of a file, or of a dataset on the hub."""
        rows = load_rows(name, split=split, config=self.hub_config)
        return [self._problem(row, f"{name}, row {number}") for number, row in enumerate(rows, start=1)]

    def _sides(self, name: str, eval_path: str | None) -> tuple[list[Example], list[Example] | None]:
        """The examples of ``name``, and those that are held out by name."""
        train = self._read(name)
        if eval_path is not None:
            return train, self._read(eval_path)
        return train, self._read(name, "test") if self.has_test_split and not is_file(name) else None

    @classmethod
    def load(
        cls,
        *,
        path: str | None = None,
        eval_path: str | None = None,
        num_heldout: int | None = None,
        max_samples: int | None = None,
        data_seed: int = 0,
        **options: Any,
    ) -> Self:
        """From files or the hub; the options are checked before anything is loaded.

        Equal rows are kept once, and a question is never on both sides (:func:`two_sides`).

        Args:
            path: ``.parquet``, ``.jsonl``, ``.json`` or ``.csv``, or a name on the hub; None is the task's own dataset.
            eval_path: the same for the held-out problems; None holds out the test split of a dataset that has one, else
                ``num_heldout`` rows of ``path``, the same for every order of its rows.
            num_heldout: see ``eval_path``; None is a tenth of the rows, 512 at most.
            max_samples: train on the first so many examples only.
            data_seed: of the choice of the held-out rows, and of their order.
            options: of the class.

        Raises:
            DatasetError: rows that cannot be used, with their number, or too few of them.
        """
        task, name = cls(**options), path or cls.hub_name
        train, heldout = task._sides(name, eval_path)
        train, task.heldout = two_sides(train, heldout, num_heldout=num_heldout, data_seed=data_seed, source=name)
        task.train = train[:max_samples]
        return task


class QuestionTask(FileTask):
    """Problems of a data set whose answers stand in a format.

    ``any_format`` is the format that the prompt requests under ``answer_format=any``.

    Raises:
        ValueError: an unknown answer format, or a negative weight.
    """

    has_test_split = True
    any_format = "hash"
    question_columns: Sequence[str] = ("question",)

    def __init__(
        self,
        train: Sequence[Example],
        heldout: Sequence[Example],
        answer_format: str,
        system_prompt: str | None,
        term_weights: Mapping[str, float],
        *,
        what: str = "answer",
    ):
        extract_answer("", answer_format)  # refuses an unknown one
        require_not_negative(**{f"{name}_weight": weight for name, weight in term_weights.items()})
        self.train, self.heldout = train, heldout
        self.answer_format, self.term_weights = answer_format, term_weights
        self._asked_format = self.any_format if answer_format == "any" else answer_format
        self.system_prompt = asking(self._asked_format, what) if system_prompt is None else system_prompt
