"""Rows come out of every kind of file alike, and whatever is wrong with a dataset is said in one sentence."""

from __future__ import annotations

import csv
import json
import uuid
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.tasks.dataset import DatasetError, load_rows, text_of


@pytest.fixture
def rows() -> list[dict[str, str]]:
    return [{"question": f'{uuid.uuid4()},\n"é"?', "answer": f"#### {number}"} for number in range(5)]


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


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, rows: list[dict[str, str]], suffix: str) -> None:
    assert load_rows(str(write(tmp_path / f"rows{suffix}", rows))) == rows


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
    assert f"has {size} bytes and unpacks to more than" in failure(tmp_path / "rows.parquet")
    repeated = table.slice(0, 1_000)  # a long prompt in every row is nothing special
    pyarrow.parquet.write_table(repeated, tmp_path / "rows.parquet")
    assert load_rows(str(tmp_path / "rows.parquet")) == repeated.to_pylist()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "no.jsonl") in failure(tmp_path / "no.jsonl")


def test_an_unknown_ending_names_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("x")
    assert ".jsonl, .json, .parquet, .csv" in failure(tmp_path / "rows.txt")


@pytest.mark.parametrize(("name", "text"), [("a.jsonl", "\n \n"), ("a.json", "[]"), ("a.csv", "question,answer\n")])
def test_an_empty_dataset_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert "has no rows" in failure(tmp_path / name)


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n\n{"question": "b"\n')
    assert f"{path}, line 3: not valid JSON" in failure(path)


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n[1]\n')
    assert "line 2: holds list" in failure(path)


@pytest.mark.parametrize("text", ['{"question": "a"}', "[1]"])
def test_a_json_file_that_is_no_list_of_objects_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    assert "does not hold a list of objects" in failure(tmp_path / "a.json")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_of_noise_is_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"noise{suffix}"
    path.write_bytes(b"\xff\xfe\x00\x80noise")
    assert str(path) in failure(path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n3\n", "row 2 (line 3): has 1 cells where the header has 2"),
        ("a,b\n1,2,3\n", "row 1 (line 2): has 3 cells where the header has 2"),
        ('a,b\n"1\n2",3\n"4,5\n', "row 2 (line 4): not valid CSV"),
        ("a,b,a\n1,2,3\n", "two columns have one name"),
    ],
)
def test_a_broken_row_of_csv_is_named_by_its_number(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    assert sentence in failure(tmp_path / "rows.csv")


def test_a_cell_may_be_long_and_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    rows = [{"a": "x" * 200_000}]
    for suffix in (".csv", ".json", ".jsonl"):
        path = write(tmp_path / f"rows{suffix}", rows)
        path.write_text(path.read_text(), encoding="utf-8-sig")
        assert load_rows(str(path)) == rows


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000 + "]" * 100_000], ids=["digits", "brackets"])
def test_json_that_python_does_not_read_is_named_by_its_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": ' + value + "}")
    assert "line 2: not JSON that can be read" in failure(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_nan_is_a_missing_value_in_every_kind_of_file(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows{suffix}", [{"a": 1.5}, {"a": float("nan")}])
    assert load_rows(str(path)) == [{"a": 1.5}, {"a": None}]


def test_a_missing_column_names_the_columns_found() -> None:
    with pytest.raises(DatasetError, match=r"demo, row 2: column 'answer' is missing; the columns found are 'q', 'a'"):
        text_of({"q": "x", "a": "y"}, "answer", "demo, row 2")


def test_a_column_of_another_type_is_named() -> None:
    with pytest.raises(DatasetError, match="row 1: column 'answer' holds int, not text"):
        text_of({"answer": 3}, "answer", "demo, row 1")


def test_the_hub_is_asked_for_config_and_split(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, str]]) -> None:
    import datasets

    asked = {}

    def load_dataset(source: str, config: str | None, *, split: str) -> datasets.Dataset:
        asked.update(source=source, config=config, split=split)
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("openai/gsm8k", split="test", config="main") == rows
    assert asked == {"source": "openai/gsm8k", "config": "main", "split": "test"}


def test_a_hub_that_does_not_answer_points_to_a_local_file(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DatasetError, match=r"gsm8k .*ConnectionError: no route\); .*env.dataset_path=FILE") as caught:
        load_rows("openai/gsm8k", config="main")
    assert "\n" not in str(caught.value)
