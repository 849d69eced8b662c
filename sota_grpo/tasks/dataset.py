"""Load rows of a file or hub dataset, split them into training and held-out examples; base classes of tasks.

A bad file, or a bad row in a file, raises :class:`DatasetError`, whose message names the file and the row.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import hashlib
import json
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Self

from sota_grpo import files
from sota_grpo.errors import UserError
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import chat
from sota_grpo.text import first_line, one_line, sentence

Row = Mapping[str, Any]
HELDOUT_SPLITS = ("test", "validation", "train")  # of a hub dataset for evaluation, the first that it has
_ENCODING = "utf-8-sig"  # UTF-8, with or without a byte order mark
_PARQUET_ROWS = 64  # per batch
_MOST_HELD_OUT = 512
_PLAIN_SIZE = 1 << 26  # characters that any Parquet file may decompress to
_MOST_COMPRESSED = 200  # characters per byte of file; 10,000 rows with one prompt of 5,000 characters have about 50

logger = logging.getLogger(__name__)


class DatasetError(UserError, ValueError):
    """The dataset cannot be used; the message says why and what to change."""


class NoSplit(DatasetError):
    """A hub dataset has none of the requested splits."""


class NoConfig(DatasetError):
    """A hub dataset does not have the requested configuration."""


def load_rows(name: str, splits: Sequence[str] = ("train",), config: str | None = None) -> list[dict[str, Any]]:
    """Return the rows of a local file (:func:`is_file`), a folder or a hub dataset, in order, as dicts.

    NaN and NaT become None, except inside lists and dicts. Of a folder or hub dataset, the configuration ``config``
    (None: its only or default one) and the first of ``splits`` that it has are read. DatasetError if the dataset
    cannot be used (NoSplit or NoConfig: it has none of ``splits``, or no ``config``).
    """
    path = os.path.expanduser(name)
    if is_file(name):
        file = Path(path)
        try:
            require_file(file)
            rows = _READERS[file.suffix](file)
        except UnicodeDecodeError as error:
            raise DatasetError(f"{name} is not UTF-8 ({error.reason}); convert the file to UTF-8.") from error
        except OSError as error:
            raise DatasetError(f"{name} cannot be read ({sentence(error).rstrip('.')}); correct this.") from error
    else:
        rows = _from_hub(path, splits, config)
    if not rows:
        raise DatasetError(f"{name} has no rows; give a dataset with at least one.")
    return [{column: present(value) for column, value in row.items()} for row in rows]


def _from_hub(name: str, splits: Sequence[str], config: str | None) -> list[dict[str, Any]]:
    import datasets

    try:
        of_split = datasets.load_dataset(name, config)
        if found := [split for split in splits if split in of_split]:
            return of_split[found[0]].to_list()
    except Exception as error:  # the hub's client raises dozens of types: network, authentication, name, format
        is_missing = isinstance(error, ValueError) and f"BuilderConfig '{config}' not found" in str(error)
        raise (NoConfig if is_missing else DatasetError)(
            f"the dataset {name} (config {config}) could not be loaded ({sentence(error).rstrip('.')}); give a local "
            "file with env.dataset_path=FILE or env.eval_path=FILE."
        ) from error
    raise NoSplit(
        f"the dataset {name} has no split {' or '.join(splits)}; its splits are {', '.join(of_split)}: give a local "
        "file with env.dataset_path=FILE or env.eval_path=FILE."
    )


def present(value: Any) -> Any:
    """Return ``value``, or None if it is NaN (float or Decimal), or NaT or NA of pandas."""
    is_missing = isinstance(value, (float, decimal.Decimal, datetime.date)) and value != value  # NaT is a date
    return None if is_missing or type(value).__name__ == "NAType" else value  # pandas.NA


def is_file(name: str) -> bool:
    """Return whether ``name`` is read as a local file, which need not exist; else it is a folder or a hub dataset.

    >>> is_file("data/train.jsonl"), is_file("/no/such/train"), is_file("openai/gsm8k")
    (True, True, False)
    """
    path = Path(os.path.expanduser(name))
    is_path = name.startswith(("/", "./", "../", "~")) and not path.is_dir()  # datasets.load_dataset reads folders
    return is_path or path.suffix in SUFFIXES or path.is_file()


def optional_text(row: Row, columns: Iterable[str]) -> str:
    """Return the first string in ``columns``, even an empty one; an empty string if there is none."""
    return next((row[name] for name in columns if isinstance(row.get(name), str)), "")


def text_of(row: Row, column: str, location: str) -> str:
    """Return the text in ``column``; ``DatasetError``, which names ``location``, if the row has no text there.

    >>> text_of({"answer": "#### 2"}, "answer", "demo, row 1")
    '#### 2'
    """
    if column not in row:
        raise DatasetError(f"{location}: column {column!r} is missing; {columns_found(row)}.")
    if not isinstance(row[column], str):
        hint = " (use env.dataset=table for chat messages)" if isinstance(row[column], list) else ""
        raise DatasetError(f"{location}: column {column!r} holds {type(row[column]).__name__}, not text{hint}.")
    return row[column]


def number_text(value: float) -> str:
    """Return a number as text; for a value that float32 has, the decimal of at most 6 digits that float32 rounds to it.

    Files have columns of float32, in which 0.1 is 0.10000000149011612. A number without such a decimal stays as it is.

    >>> number_text(0.10000000149011612), number_text(1250000.75), number_text(0.1), number_text(3)
    ('0.1', '1250000.75', '0.1', '3')
    """
    if isinstance(value, float) and not value.is_integer() and abs(value) < 1e30:
        single = struct.pack("f", value)
        if struct.unpack("f", single)[0] == value:
            texts = (f"{value:.{digits}g}" for digits in range(1, 7))
            return next((text for text in texts if struct.pack("f", float(text)) == single), str(value))
    return str(value)


def first_text(row: Row, columns: Sequence[str], location: str) -> str:
    """Return the first value in ``columns`` as text; ``DatasetError`` if there is none or it is no text or number.

    >>> first_text({"answer": None, "ground_truth": 2}, ("answer", "ground_truth"), "demo, row 1")
    '2'
    """
    for column in columns:
        value = present(row.get(column))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return number_text(value)
        if value is not None:
            return text_of(row, column, location)
    raise DatasetError(f"{location}: no column {' or '.join(map(repr, columns))} has a value; {columns_found(row)}.")


def columns_found(row: Row) -> str:
    """Return the columns of a row as a clause of an error message."""
    return f"the columns found are {', '.join(map(repr, row)) or 'none'}"


def require_file(path: Path) -> None:
    """Raise ``DatasetError`` unless ``path`` ends in one of ``SUFFIXES`` and is an existing file."""
    if path.suffix not in _READERS:
        raise DatasetError(f"{path} ends in none of {', '.join(_READERS)}; give a file that ends in one of these.")
    files.require_file(path, "env.dataset_path or env.eval_path", DatasetError)


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding=_ENCODING) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                location = f"{path}, line {number}"
                row = _json(line, location)
                if not isinstance(row, dict):
                    raise DatasetError(f"{location}: holds {type(row).__name__}; write one JSON object per line.")
                rows.append(row)
    return rows


def _json(text: str, location: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{location}: not valid JSON ({error.msg} at character {error.pos}); correct it.") from error
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or deep nesting
        raise DatasetError(f"{location}: the JSON cannot be parsed ({sentence(error)}); correct it.") from error


def _read_json(path: Path) -> list[dict[str, Any]]:
    rows = _json(path.read_text(encoding=_ENCODING), str(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{path} does not hold a list of objects; give one object per row.")
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(_PLAIN_SIZE)  # per cell; Python's default is 131,072 characters
    rows: list[dict[str, Any]] = []
    with path.open(encoding=_ENCODING, newline="") as file:
        reader = csv.reader(file, strict=True)  # an unclosed quotation mark is an error
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise DatasetError(f"{path}: two columns have equal names: {', '.join(map(repr, names))}; rename one.")
            for cells in filter(None, reader):
                if len(cells) != len(names):
                    fix = "put cells that hold a comma or a line break in quotation marks"
                    raise csv.Error(f"has {len(cells)} cells, but the header has {len(names)}; {fix}")
                rows.append(dict(zip(names, cells, strict=True)))
        except csv.Error as error:
            location = f"{path}, row {len(rows) + 1} (line {reader.line_num})"
            raise DatasetError(f"{location}: not valid CSV ({error}); correct it.") from error
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
            if read > most:  # a text that many rows repeat is stored once
                raise DatasetError(
                    f"{path} has {path.stat().st_size} bytes and decompresses to more than {most} characters, which no "
                    "real dataset does; correct the file, or give it as .jsonl."
                )
        return rows
    except (ArrowException, OSError) as error:
        raise DatasetError(
            f"{path} is not a readable Parquet file ({first_line(error).rstrip('.')}); replace it."
        ) from error


def _size(value: Any) -> int:
    """Return the number of characters in nested values; a number counts as 1."""
    if isinstance(value, (list, dict)):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return max(1, len(value)) if isinstance(value, (str, bytes)) else 1


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
SUFFIXES = tuple(_READERS)  # of supported local files


def normalised(question: str) -> str:
    """Return the question case-folded, with single spaces and none at its ends, for comparison."""
    return " ".join(question.casefold().split())


def unique_examples(examples: Sequence[Example]) -> list[Example]:
    """Keep the first of examples with equal answer, :func:`normalised` question, and ``extra`` except ``prompt``."""
    unique: dict[tuple[str, ...], Example] = {}
    for example in examples:
        columns = {name: value for name, value in example.extra.items() if name != "prompt"}
        row = json.dumps(columns, sort_keys=True, default=str)
        unique.setdefault((normalised(example.query), example.answer, row), example)
    return list(unique.values())


def hash_ordered(examples: Iterable[Example]) -> list[Example]:
    """Return the examples sorted by a hash of the question: the first ``n`` are a random sample of questions."""
    return sorted(examples, key=lambda example: _hash(normalised(example.query)))


def _hash(question: str) -> bytes:
    return hashlib.sha256(f"0:{question}".encode("utf-8", "surrogatepass")).digest()


def two_sides(
    train: Sequence[Example],
    heldout: Sequence[Example] | None,
    *,
    num_heldout: int | None,
    source: str,
) -> tuple[list[Example], list[Example]]:
    """Return the training and the held-out split, without duplicates; a question in both splits is only held out.

    If ``heldout`` is None, questions of ``train`` are held out with all their rows, in order of their hash, until at
    least ``num_heldout`` rows are (None: a tenth of the rows, from 1 to 512). So the choice does not depend on the
    order of the rows. Training examples keep the order of ``train``; held-out examples are sorted by
    :func:`hash_ordered`. ``source`` names the data in messages. DatasetError if no question is left for training.
    """
    num_read, train = len(train), unique_examples(train)
    if len(train) < num_read:
        logger.info(
            "%d of %d rows of %s repeat an earlier row and are skipped.", num_read - len(train), num_read, source
        )
    if heldout is None:
        count = min(_MOST_HELD_OUT, max(1, len(train) // 10)) if num_heldout is None else num_heldout
        rows = Counter(normalised(example.query) for example in train)
        ordered = sorted(rows, key=_hash)
        before = accumulate((rows[question] for question in ordered), initial=0)
        chosen = {question for question, held_out in zip(ordered, before) if held_out < count}
        if count and len(chosen) == len(rows):
            fewer = f"env.num_heldout={max(1, len(rows) // 10)}, " if len(rows) > 1 else ""
            raise DatasetError(
                f"{source} has {len(train)} rows with {len(rows)} different questions; holding out {count} rows "
                f"(env.num_heldout) leaves none for training. Use {fewer}other problems for evaluation "
                "(env.eval_path=FILE), or no evaluation (env.num_heldout=0 eval.mode=off)."
            )
        heldout = [example for example in train if normalised(example.query) in chosen]
        logger.info("%d of the %d different rows of %s are held out for evaluation.", len(heldout), len(train), source)
    heldout = hash_ordered(unique_examples(heldout))
    taken = {normalised(example.query) for example in heldout}
    remaining = [example for example in train if normalised(example.query) not in taken]
    if not remaining:
        raise DatasetError(
            f"every question of {source} is in the held-out split; give other problems to train on or to evaluate."
        )
    return remaining, heldout


def require_not_negative(**values: float) -> None:
    """Raise ``ValueError`` that names the first negative value, if there is one."""
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name}={value} must not be negative.")


_CORRECT: Mapping[str, float] = {"correct": 1.0}


@dataclass(eq=False, repr=False)
class BaseTask:
    """Base class of tasks (:class:`~sota_grpo.rl.task.Task`), whose prompt is a system turn, if any, and the question.

    ``system_prompt`` replaces ``default_prompt``; with an empty text there is no system turn. A subclass sets ``name``
    and defines ``score`` and, to read rows of a table, ``read_row``.
    """

    name: ClassVar[str]
    default_prompt = ""
    term_weights = _CORRECT

    train: Sequence[Example] = ()
    heldout: Sequence[Example] = ()
    system_prompt: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.system_prompt is None:
            self.system_prompt = self.default_prompt

    def messages(self, example: Example) -> list[dict[str, str]]:
        """Return the system turn (unless the system prompt is empty) and the question as a user turn."""
        return chat(self.system_prompt, example.query)

    def score(self, response: str, example: Example) -> Score:
        """Grade a response; a subclass defines this and documents its reward terms."""
        raise NotImplementedError

    def gold_response(self, example: Example) -> str | None:
        """Return a response that earns the full reward; None, as here, if none is known."""
        return None

    def read_row(self, row: Row, location: str) -> Example:
        """Define this: return the example of a row, whose question may be missing; errors name ``location``."""
        raise NotImplementedError


class FileTask(BaseTask):
    """Base class of tasks whose rows are in a file or in a hub dataset.

    A subclass sets ``name`` and defines ``score`` and ``read_row``. The question is in the first of
    ``question_columns`` that has a value. ``hub_name``: the default dataset. ``hub_config``: config of hub datasets
    that have one of this name. ``has_test_split``: without an ``eval_path``, a hub dataset's split ``test``, if any, is
    held out. ``max_broken``: fraction of the rows of a hub dataset that may be unreadable; these are skipped.
    """

    hub_name: str
    hub_config: str | None = None
    has_test_split = False
    question_columns: ClassVar[Sequence[str]] = ("prompt",)
    max_broken = 0.0

    def _rows(self, name: str, splits: Sequence[str]) -> Sequence[Row]:
        try:
            return load_rows(name, splits, self.hub_config)
        except NoConfig:
            if name == self.hub_name:
                raise
            return load_rows(name, splits)

    def _problem(self, row: Row, location: str) -> Example:
        question = first_text(row, self.question_columns, location)
        if not question.strip():
            raise DatasetError(f"{location}: the question is empty; mend or remove the row.")
        return replace(self.read_row(row, location), query=question, place=location)

    def read(self, name: str, splits: Sequence[str] = ("train",)) -> list[Example]:
        """Return a dataset's examples; ``DatasetError`` for a bad row (hub: for a fraction above ``max_broken``)."""
        examples, broken = list[Example](), list[DatasetError]()
        for number, row in enumerate(rows := self._rows(name, splits), start=1):
            try:
                examples.append(self._problem(row, f"{name}, row {number}"))
            except DatasetError as error:
                if not self.max_broken or is_file(name):
                    raise
                broken.append(error)
        if len(broken) > self.max_broken * len(rows):
            raise DatasetError(f"{len(broken)} of {len(rows)} rows of {name} cannot be used; the first: {broken[0]}")
        if broken:
            first = one_line(str(broken[0]), None)
            logger.warning("%d of %d rows of %s are skipped; the first: %s", len(broken), len(rows), name, first)
        return examples

    def _sides(self, name: str, eval_path: str | None) -> tuple[list[Example], list[Example] | None]:
        """Return the examples of ``name``, and those of a separate held-out file or split (None without one)."""
        train = self.read(name)
        if eval_path is not None:
            return train, self.read(eval_path, HELDOUT_SPLITS)
        if self.has_test_split and not is_file(name):
            with suppress(NoSplit):
                return train, self.read(name, ["test"])
        return train, None

    @classmethod
    def load(
        cls,
        *,
        path: str | None = None,
        eval_path: str | None = None,
        num_heldout: int | None = None,
        max_samples: int | None = None,
        **options: Any,
    ) -> Self:
        """Return the task with its dataset loaded and split (:func:`two_sides`); ``options`` are keywords of the class.

        DatasetError if the data cannot be used, or no row is left to train on; OSError if a file cannot be opened.

        Args:
            path: ``.parquet``, ``.jsonl``, ``.json`` or ``.csv``, or a hub name; None is the default, ``hub_name``.
            eval_path: file or hub name (its first split of ``test``, ``validation``, ``train``) of the held-out
                problems. None holds out the split ``test`` of a hub dataset if there is one and the class has
                ``has_test_split`` (:class:`~.ifeval.IFEvalTask`: google/IFEval), else ``num_heldout`` rows of ``path``.
            num_heldout: hold out at least so many rows of ``path``; None: a tenth of the rows, from 1 to 512.
            max_samples: train on the first ``max_samples`` examples only; None: all.
        """
        task, name = cls(**options), path or cls.hub_name
        train, heldout = task._sides(name, eval_path)
        train, task.heldout = two_sides(train, heldout, num_heldout=num_heldout, source=name)
        task.train = train[:max_samples]
        return task
