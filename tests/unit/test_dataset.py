"""Rows come out of every kind of file alike, and whatever is wrong with a dataset is said in one sentence."""

from __future__ import annotations

import errno
import uuid
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sota_grpo.errors import UserError
from sota_grpo.tasks.dataset import HELDOUT_SPLITS, DatasetError, NoConfig, is_file, load_rows, text_of
from sota_grpo.tasks.questions import GSM8KTask
from tests.data_files import write_rows

ROWS = [{"question": f'{uuid.uuid4()},\n"é"?', "answer": f"#### {number}"} for number in range(5)]


SUFFIXES = pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])


@SUFFIXES
def test_every_kind_of_file_gives_the_same_rows_and_noise_is_refused(tmp_path: Path, suffix: str, monkeypatch) -> None:
    path = tmp_path / f"rows{suffix}"
    assert load_rows(write_rows(path, ROWS)) == ROWS
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_rows(f"~/{path.name}") == ROWS
    assert not is_file("~/")  # a folder, which the hub's client reads
    path.write_bytes(b"\xff\xfe\x00\x80noise")
    assert str(path) in failure(path)
    if suffix != ".parquet":  # a cell may be long, and a file may begin with a byte order mark
        write_rows(path, [{"a": "x" * 200_000}])
        path.write_text(path.read_text(), encoding="utf-8-sig")
        assert load_rows(str(path)) == [{"a": "x" * 200_000}]
    if suffix != ".csv":
        assert load_rows(write_rows(path, [{"a": 1.5}, {"a": float("nan")}])) == [{"a": 1.5}, {"a": None}]


@SUFFIXES
def test_a_file_that_may_not_be_read_is_one_sentence(tmp_path: Path, suffix: str, monkeypatch) -> None:
    path = write_rows(tmp_path / f"rows{suffix}", ROWS)
    if suffix == ".parquet":  # opened by Arrow
        monkeypatch.setattr("pyarrow.parquet.ParquetFile", refused)
    monkeypatch.setattr(Path, "open", refused)
    assert path in failure(path)
    monkeypatch.setattr(Path, "is_file", refused)  # its folder may not be searched
    assert "Permission denied" in failure(path)


def refused(path: Path, *args: object, **options: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


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
        ("a.csv", "a,b\n1,2\n3\n", "row 2 (line 3): not valid CSV (has 1 cells, but the header has 2; put"),
        ("a.csv", 'a,b\n"1\n2",3\n"4,5\n', "row 2 (line 4): not valid CSV"),
        ("a.csv", "a,b,a\n1,2,3\n", "two columns have equal names"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, name, text, sentence) -> None:
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


HUB = {
    ("openai/gsm8k", "main"): ("train", "test"),
    ("openai/gsm8k", "socratic"): ("train", "test"),
    ("some/sums", "small"): ("train",),
    ("some/exams", "default"): ("train", "validation", "test"),
    ("some/dev", "default"): ("train", "validation"),
    ("some/two", "a"): ("train",),
    ("some/two", "b"): ("train",),
}


def test_a_hub_dataset_is_read_with_the_config_and_the_split_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def load_dataset(name: str, config: str | None = None) -> dict[str, datasets.Dataset]:
        requests.append((name, config))
        configs = [key[1] for key in HUB if key[0] == name]
        if not configs:
            raise ConnectionError("no route\nto host")
        if config is None and len(configs) > 1:
            raise ValueError(f"Config name is missing.\nPick one of {configs}")
        if config == "offline":
            raise ValueError(f"Couldn't find cache for {name} for config 'offline'")
        if config not in (None, *configs):
            raise ValueError(f"BuilderConfig {config!r} not found.")
        return {
            split: datasets.Dataset.from_list([{"question": f"{split} {at}", "answer": "#### 4"} for at in range(4)])
            for split in HUB[name, config or configs[0]]
        }

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_rows("openai/gsm8k", ["test"], "main")[0]["question"] == "test 0"
    assert GSM8KTask.load(path="some/sums", num_heldout=1).train[0].query == "train 0"
    assert requests[:3] == [("openai/gsm8k", "main"), ("some/sums", "main"), ("some/sums", None)]
    for name, split in (("some/exams", "test"), ("some/dev", "validation"), ("some/sums", "train")):
        assert load_rows(name, HELDOUT_SPLITS)[0]["question"] == f"{split} 0"
    for name, options, split in (  # where there is no test split, rows are held out
        ("some/sums", {"num_heldout": 1}, "train"),
        ("some/exams", {"num_heldout": 1}, "test"),
        ("some/sums", {"eval_path": "some/dev"}, "validation"),
    ):
        task = GSM8KTask.load(path=name, **options)
        assert (task.train[0].query.split()[0], task.heldout[0].query.split()[0]) == ("train", split)
    with pytest.raises(DatasetError, match=r"some/sums has no split test; its splits are train: .*env.eval_path=FILE"):
        load_rows("some/sums", ["test"])
    with pytest.raises(DatasetError, match=r"some/two .*Config name is missing.*env.dataset_path=FILE"):
        GSM8KTask.load(path="some/two")
    monkeypatch.setattr(GSM8KTask, "hub_config", "misspelt")
    with pytest.raises(NoConfig, match=r"openai/gsm8k \(config misspelt\) could not"):
        GSM8KTask.load()
    monkeypatch.setattr(GSM8KTask, "hub_config", "offline")
    with pytest.raises(DatasetError, match="find cache for some/sums"):
        GSM8KTask.load(path="some/sums")
    with pytest.raises(DatasetError, match=r"other .*ConnectionError: no route\); .*env.dataset_path=FILE") as caught:
        load_rows("some/other", config="main")
    assert "\n" not in str(caught.value)
