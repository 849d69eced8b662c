"""Rows come out of every kind of file alike, and whatever is wrong with a dataset is said in one sentence."""

from __future__ import annotations

import csv
import json
import uuid
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.tasks.dataset import DatasetError, load_rows, text_of

ROWS = [{"question": f'{uuid.uuid4()},\n"é"?', "answer": f"#### {number}"} for number in range(5)]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])


@SUFFIXES
def test_every_kind_of_file_gives_the_same_rows_and_noise_is_refused(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", ROWS)
    assert load_rows(str(path)) == ROWS
    path.write_bytes(b"\xff\xfe\x00\x80noise")
    assert str(path) in failure(path)
    if suffix != ".parquet":  # a cell may be long, and a file may begin with a byte order mark
        write(path, [{"a": "x" * 200_000}])
        path.write_text(path.read_text(), encoding="utf-8-sig")
        assert load_rows(str(path)) == [{"a": "x" * 200_000}]
    if suffix != ".csv":
        assert load_rows(str(write(path, [{"a": 1.5}, {"a": float("nan")}]))) == [{"a": 1.5}, {"a": None}]


def failure(path: Path | str) -> str:
    with pytest.raises(DatasetError) as caught:
        load_rows(str(path))
    message = str(caught.value)
    assert isinstance(caught.value, UserError)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("encoded", [True, False])
def test_a_parquet_file_that_unpacks_without_end_is_refused(tmp_path: Path, encoded: bool) -> None:
    """80 million letters in a few thousand bytes."""
    import pyarrow
    import pyarrow.parquet

    text = "x" * 20_000
    answers = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 4_000, "int32"), [text]) if encoded else None
    table = pyarrow.table({"question": ["?"] * 4_000, "answer": [text] * 4_000 if answers is None else answers})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    size = (tmp_path / "rows.parquet").stat().st_size
    assert size < 50_000
    assert f"has {size} bytes and decompresses to more than" in failure(tmp_path / "rows.parquet")
    repeated = table.slice(0, 1_000)  # a long prompt in every row is nothing special
    pyarrow.parquet.write_table(repeated, tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet")) == repeated.to_pylist()


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("no.jsonl", None, "there is no file"),
        ("rows.txt", "x", ".jsonl, .json, .parquet, .csv"),
        *((name, text, "has no rows") for name, text in (("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.csv", "a,b\n"))),
        ("a.jsonl", '{"a": "a"}\n\n{"a": "b"\n', "a.jsonl, line 3: not valid JSON"),
        ("a.jsonl", '{"a": "a"}\n[1]\n', "line 2: holds list"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "9" * 5000 + "}", "line 2: the JSON cannot be parsed"),
        ("a.jsonl", '{"a": 1}\n{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: the JSON cannot be parsed"),
        *(("a.json", text, "does not hold a list of objects") for text in ('{"a": "a"}', "[1]")),
        ("a.csv", "a,b\n1,2\n3\n", "row 2 (line 3): has 1 cells, but the header has 2"),
        ("a.csv", 'a,b\n"1\n2",3\n"4,5\n', "row 2 (line 4): not valid CSV"),
        ("a.csv", "a,b,a\n1,2,3\n", "two columns have equal names"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(
    tmp_path: Path, name: str, text: str | None, sentence: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    message = failure(tmp_path / name)
    assert str(tmp_path / name) in message
    assert sentence in message


def test_a_column_that_is_missing_or_of_another_type_is_named() -> None:
    with pytest.raises(DatasetError, match=r"demo, row 2: column 'answer' is missing; the columns found are 'q', 'a'"):
        text_of({"q": "x", "a": "y"}, "answer", "demo, row 2")
    with pytest.raises(DatasetError, match="row 1: column 'answer' holds int, not text"):
        text_of({"answer": 3}, "answer", "demo, row 1")


def test_the_hub_gets_config_and_split_and_its_failure_points_to_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import datasets

    calls = []

    def load_dataset(*args: object, **options: object) -> datasets.Dataset:
        calls.append((*args, options))
        if len(calls) > 1:
            raise ConnectionError("no route\nto host")
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("openai/gsm8k", split="test", config="main") == ROWS
    assert calls == [("openai/gsm8k", "main", {"split": "test"})]
    with pytest.raises(DatasetError, match=r"gsm8k .*ConnectionError: no route\); .*env.dataset_path=FILE") as caught:
        load_rows("openai/gsm8k", config="main")
    assert "\n" not in str(caught.value)
