"""Rows of a dataset, from a local file or from the hub, with one clear sentence where that fails."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError

Row = Mapping[str, Any]


class DatasetError(UserError, ValueError):
    """The dataset cannot be used; the message says why and what to change."""


def load_rows(
    source: str, *, path: str | None = None, split: str = "train", config: str | None = None
) -> list[dict[str, Any]]:
    """All rows, as dictionaries by column name, in the order of the file.

    Args:
        source: the hub's name of the dataset; not asked when ``path`` is given.
        path: a local ``.jsonl``, ``.json`` (a list of objects), ``.parquet`` or ``.csv``.
        split: of the hub dataset.
        config: of the hub dataset.

    Raises:
        DatasetError: no such file, an ending that is not known, a broken line (with its number), a hub that does not
            answer, no rows at all.

    Example::

        rows = load_rows("openai/gsm8k", config="main", split="test")
        rows = load_rows("openai/gsm8k", path="data/train.jsonl")
    """
    rows = _read_file(Path(path)) if path is not None else _read_hub(source, config, split)
    if not rows:
        raise DatasetError(f"{path or source} has no rows; give a file with at least one problem.")
    return rows


def require_columns(rows: Sequence[Row], columns: Sequence[str], source: str) -> None:
    """Check that every row has text in every column.

    Raises:
        DatasetError: naming the row (from 1), the column and the columns found.

    >>> require_columns([{"question": "1+1?", "answer": "#### 2"}], ("question", "answer"), "demo")
    >>> require_columns([{"prompt": "1+1?"}], ("question",), "demo")
    Traceback (most recent call last):
        ...
    sota_grpo.tasks.dataset.DatasetError: demo, row 1: column 'question' is missing; the columns found are 'prompt'.
    """
    for number, row in enumerate(rows, start=1):
        for column in columns:
            text_of(row, column, f"{source}, row {number}")


def text_of(row: Row, column: str, place: str) -> str:
    """The text in a column of one row.

    Raises:
        DatasetError: naming the place, the column and the columns found.

    >>> text_of({"answer": "#### 2"}, "answer", "demo, row 1")
    '#### 2'
    """
    if column not in row:
        found = ", ".join(map(repr, row)) or "none"
        raise DatasetError(f"{place}: column {column!r} is missing; the columns found are {found}.")
    if not isinstance(row[column], str):
        raise DatasetError(f"{place}: column {column!r} holds {type(row[column]).__name__}, not text.")
    return row[column]


def number_or_text(row: Row, column: str, place: str) -> str:
    """The text in a column of one row, where a number will do.

    Raises:
        DatasetError: as :func:`text_of`.

    >>> number_or_text({"answer": 2}, "answer", "demo, row 1")
    '2'
    """
    value = row.get(column)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number else text_of(row, column, place)


def require_file(path: Path) -> None:
    """Check that ``path`` is a file of a kind that can be read.

    Raises:
        DatasetError: it is not.
    """
    if path.suffix not in _READERS:
        raise DatasetError(f"{path} ends in {path.suffix!r}; give one of {', '.join(_READERS)}.")
    if not path.is_file():
        raise DatasetError(f"there is no file {path}; correct env.dataset_path or env.eval_path (now in {Path.cwd()}).")


def _read_file(path: Path) -> list[dict[str, Any]]:
    require_file(path)
    try:
        return _READERS[path.suffix](path)
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from error


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_object(line, f"{path}, line {number}"))
    return rows


def _object(text: str, place: str) -> dict[str, Any]:
    value = _json(text, place)
    if not isinstance(value, dict):
        raise DatasetError(f"{place}: holds {type(value).__name__}, not an object with the columns of a row.")
    return value


def _json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{place}: not valid JSON ({error.msg} at character {error.pos}).") from error


def _read_json(path: Path) -> list[dict[str, Any]]:
    rows = _json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DatasetError(f"{path} does not hold a list of objects; give one object per row.")
    return rows


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise DatasetError(f"{path} is not a readable parquet file ({_first_line(error)}).") from error


def _read_hub(source: str, config: str | None, split: str) -> list[dict[str, Any]]:
    import datasets

    try:
        return datasets.load_dataset(source, config, split=split).to_list()
    except Exception as error:  # the hub's client raises dozens of types: network, authentication, name, format
        raise DatasetError(
            f"the dataset {source} (config {config}, split {split}) could not be loaded from the hub "
            f"({type(error).__name__}: {_first_line(error)}); give a local file with env.dataset_path=FILE."
        ) from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "no message")


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
SUFFIXES = tuple(_READERS)  # of the local files that can be read
