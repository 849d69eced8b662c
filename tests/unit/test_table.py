"""A user's table keeps all that it holds, each prompt comes once, bad rows are named, and right answers are right."""

from __future__ import annotations

import datetime
import decimal
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rl.records import Example
from sota_grpo.tasks.dataset import DatasetError, normalised
from sota_grpo.tasks.questions import MathTask
from sota_grpo.tasks.table import MATH_SOURCES, TableTask, is_right
from tests.data_files import write_rows

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def verl_row(index: int, split: str = "train") -> dict[str, Any]:
    """A row as the preparation script of verl's documentation makes it of GSM8K."""
    question, answer = f"What is {index} plus {index}?", f"{index}+{index}={2 * index}\n#### {2 * index}"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(2 * index)},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
    }


def random_value(depth: int = 0) -> Any:
    """Anything that JSON holds."""
    kinds: list[Callable[[], Any]] = [
        lambda: random.choice([None, True, False]),
        lambda: random.randint(-(10**15), 10**15),
        lambda: random.uniform(-1, 1) * 10.0 ** random.randint(-20, 20),
        lambda: "".join(random.choices('a "\\\n\0é漢🙂{}', k=random.randint(0, 9))),
        lambda: [random_value(depth + 1) for _ in range(random.randint(0, 3))],
        lambda: {f"k{i}": random_value(depth + 1) for i in range(random.randint(1, 3))},
    ]
    return random.choice(kinds if depth < 3 else kinds[:4])()


def both(task: TableTask) -> list[Example]:
    return [*task.train, *task.heldout]


def test_verls_parquet_is_read_as_it_is(tmp_path: Path) -> None:
    """Written as the documentation writes it: a mapped dataset, ``to_parquet``."""
    raw = datasets.Dataset.from_list([{"index": index} for index in range(12)])
    path = str(tmp_path / "train.parquet")
    raw.map(lambda row: verl_row(row["index"]), remove_columns=["index"]).to_parquet(path)
    task = TableTask.load(path=path, num_heldout=3)
    assert (len(task.train), len(task.heldout)) == (9, 3)
    for example in both(task):
        index = example.extra["columns"]["extra_info"]["index"]
        row = verl_row(index)
        assert task.messages(example) == row["prompt"]
        assert example.query == row["prompt"][0]["content"]
        assert example.answer == example.extra["ground_truth"] == str(2 * index)
        assert example.extra["columns"] == {name: value for name, value in row.items() if name != "prompt"}
        assert task.gold_response(example) == f"#### {2 * index}"
        assert task.score(f"So it is\n#### {2 * index}.00", example).terms == {"correct": 1.0}
        assert not task.score(f"{2 * index}", example).success, "the prompt asks for ####"


def test_right_answers_in_float32_are_those_that_were_written(tmp_path: Path) -> None:
    written, path = ["0.1", "-3.14", "2.5", "1e-07", "123.456", "4"], str(tmp_path / "rows.parquet")
    column = pyarrow.array(map(float, written), pyarrow.float32())
    rows = pyarrow.table({"prompt": [f"{text}?" for text in written], "ground_truth": column})
    pyarrow.parquet.write_table(rows, path)
    for task in (TableTask(), MathTask()):
        for example, text in zip(task.read(path), written, strict=True):
            assert task.score(f"\\boxed{{{text}}}", example).success, text


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_columns_keep_their_types(tmp_path: Path, suffix: str) -> None:
    rows = []
    for index in range(40):
        extra = {"int": index - 20, "float": random.random(), "on": index % 2 == 0, "text": "é\n", "no": None}
        extra |= {"list": [random.random() for _ in range(3)], "dict": {"a": [{"b": index}], "c": "d"}}
        extra |= {"any": random_value()} if suffix == ".jsonl" else {}
        rows.append({"prompt": f"No. {index}?", "ground_truth": index / 4, **extra})
    task = TableTask.load(path=write_rows(tmp_path / f"rows{suffix}", rows), num_heldout=1)
    actual = {example.query: example for example in both(task)}
    for row in rows:
        extra = actual[row.pop("prompt")].extra
        assert extra["columns"] == row
        assert [type(value) for value in extra["columns"].values()] == [type(value) for value in row.values()]
        assert extra["ground_truth"] == row["ground_truth"]
        assert json.loads(json.dumps(dict(extra))) == extra, "rows travel as JSON"


def test_a_column_that_a_row_lacks_is_none_and_what_json_lacks_becomes_text_or_a_number(tmp_path: Path) -> None:
    """As in parquet, so that a reward function finds every column in every row."""
    rows = [{"prompt": "a", "ground_truth": "1", "level": 3}, {"prompt": "b", "ground_truth": "2", "tags": []}]
    for example in both(TableTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=1)):
        empty = {"level": None, "tags": None}
        assert {**empty, **rows["ab".index(example.query)]} == {"prompt": example.query, **example.extra["columns"]}
    made = datetime.datetime(2026, 11, 2, 12, 30, tzinfo=datetime.UTC)
    prices = [decimal.Decimal("2.50"), decimal.Decimal("3.00")]
    row = {"prompt": "?", "ground_truth": "1", "made": made, "day": made.date(), "prices": prices}
    task = TableTask.load(path=write_rows(tmp_path / "a.parquet", [row, {**row, "prompt": "??"}]), num_heldout=1)
    columns = task.train[0].extra["columns"]
    assert (columns["made"], columns["day"]) == ("2026-11-02T12:30:00+00:00", "2026-11-02")
    assert columns["prices"] == [2.5, 3]


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}
OTHER, REPLY = {"role": "system", "content": "Rhyme."}, {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    ("prompt", "option", "expected"),
    [
        ("2+2?", None, [USER]),
        ([SYSTEM, USER], None, [SYSTEM, USER]),
        ("2+2?", "Rhyme.", [OTHER, USER]),
        ([USER], "Rhyme.", [OTHER, USER]),
        ([SYSTEM, USER], "Rhyme.", [OTHER, USER]),
        ([SYSTEM, USER], "", [USER]),
        ([{**USER, "name": None}], None, [USER]),
        ([USER, REPLY, USER], None, [USER, REPLY, USER]),
    ],
)
def test_prompts_are_asked_as_they_are(prompt: Any, option: str | None, expected: list[dict[str, str]]) -> None:
    task = TableTask(system_prompt=option)
    example = task.read_row({"prompt": prompt, "ground_truth": 4}, "demo")
    assert task.messages(example) == expected
    assert example.query == "2+2?"


def test_each_prompt_comes_once_and_never_on_both_sides(tmp_path: Path) -> None:
    """Three epochs of one table, some of whose chats differ in their first turn alone."""
    chats = [[{"role": "user", "content": f"No. {index}?"}] for index in range(30)]
    chats += [[{"role": "system", "content": f"Voice {index}."}, *chats[index]] for index in range(10)]
    rows = [{"prompt": chat, "ground_truth": 1} for chat in chats] * 3
    splits = []
    for _ in range(2):
        random.shuffle(rows)
        task = TableTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=7)
        assert len(task.train) + len(task.heldout) == len(chats)
        keys = [normalised(example.query) for example in both(task)]
        assert len(set(keys)) == len(chats), "a query tells prompts apart"
        prompts = [json.dumps(task.messages(example)) for example in both(task)]
        assert sorted(prompts) == sorted(map(json.dumps, chats))
        splits.append({example.query for example in task.heldout})
    assert splits[0] == splits[1], "held out whatever the order"


def test_rows_of_one_prompt_are_all_trained_on_where_any_column_differs(tmp_path: Path) -> None:
    """What a reward function reads: 64 rows of one prompt, of which the last equals the first."""
    rows = [{**GOOD, "max_words": number % 63} for number in range(64)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = TableTask.load(path=path, num_heldout=0)
    assert [example.extra["columns"]["max_words"] for example in task.train] == list(range(63))
    assert task.heldout == []
    with pytest.raises(DatasetError, match=r"63 rows with 1 different questions.*other problems .*env.num_heldout=0"):
        TableTask.load(path=path)
    other = {**GOOD, "prompt": "2+2?"}
    task = TableTask.load(path=write_rows(tmp_path / "rows.jsonl", [*rows, other]), num_heldout=1)
    assert {len(task.train), len(task.heldout)} == {63, 1}, "all rows of the question that is held out"


def test_a_held_out_chat_is_another_prompt_where_an_earlier_turn_differs(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "a.jsonl", [{"prompt": [OTHER, USER], "ground_truth": 4}])
    evals = write_rows(tmp_path / "b.jsonl", [{"prompt": [SYSTEM, USER], "ground_truth": 4}])
    task = TableTask.load(path=train, eval_path=evals)
    assert [task.messages(example) for example in both(task)] == [[OTHER, USER], [SYSTEM, USER]]
    assert task.train[0].query == "system: Rhyme.\n\nuser: 2+2?"


def test_columns_have_any_names(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.csv", [{"question": f"{n}?", "target": n} for n in range(2)])
    task = TableTask.load(path=path, prompt_column="question", answer_column="target", num_heldout=1)
    assert {example.query: example.answer for example in both(task)} == {"0?": "0", "1?": "1"}


GOOD = {"prompt": "1+1?", "ground_truth": "2"}
VERL = verl_row(1)


def test_without_required_answers_any_ground_truth_will_do(tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "ground_truth": {"cases": [1, 2]}}]
    task = TableTask.load(path=write_rows(tmp_path / "rows.jsonl", rows), num_heldout=1, answer_required=False)
    actual = {example.query: example for example in both(task)}
    assert (actual["a"].answer, actual["a"].extra["ground_truth"]) == ("", None)
    assert json.loads(actual["b"].answer) == actual["b"].extra["ground_truth"] == {"cases": [1, 2]}
    assert [task.gold_response(example) for example in actual.values()] == [None, None]


def test_a_column_that_cannot_travel_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.parquet", [{**GOOD, "image": {"bytes": b"\x89PNG"}}])
    with pytest.raises(DatasetError, match=r"row 1: column 'image' holds bytes, .* remove the column"):
        TableTask.load(path=path, num_heldout=1)
    with pytest.raises(DatasetError, match=r"row 1: column 'price' holds Decimal"):
        TableTask().read_row({**GOOD, "price": decimal.Decimal("Infinity")}, "row 1")


def test_a_row_to_score_needs_no_prompt() -> None:
    task = TableTask()
    assert task.score("It is 4.", task.read_row({"response": "It is 4.", "answer": "4"}, "line 1")).success
    assert task.score("It is 4.", task.read_row({"ground_truth": 4.0, "answer": "5"}, "line 1")).success
    assert task.score("#### 2", task.read_row({k: v for k, v in VERL.items() if k != "prompt"}, "line 1")).success
    with pytest.raises(DatasetError, match="line 3: column 'ground_truth' holds no ground truth"):
        task.read_row({"response": "4"}, "line 3")


WHERE = {
    "tags": "So <answer> {} </answer>.",
    "boxed": "So \\boxed{{{}}}.",
    "hash": "So\n#### {}\nDone",
    "last_number": "So it is {}",
    "any": "So\n#### {}\nDone",
}


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_the_same_number_is_right_and_another_is_not(answer_format: str) -> None:
    for _ in range(40):
        number = random.randint(-(10**6), 10**6)
        written = random.choice([str(number), f"{number:,}", f"{number}.00", f"{2 * number}/2"])
        truth = random.choice([number, float(number), str(number), f"{number:,}", [number + 1, number]])
        for text, right in ((written, True), (number + 2, False)):
            response = WHERE[answer_format].format(text)
            assert is_right(response, "mine", truth, answer_format) is right, (response, truth)


HALF = "\\frac12"
OF_SOURCES = [
    ("#### 1,080", "openai/gsm8k", "1080", True),
    ("<answer>1080</answer>", "openai/gsm8k", "1080", False),
    *(("So \\boxed{\\frac{2}{4}}.", source, HALF, True) for source in MATH_SOURCES),
    *(("So \\boxed{\\frac{3}{4}}.", source, HALF, False) for source in MATH_SOURCES),
    *(("So 1/2.", source, HALF, False) for source in MATH_SOURCES),
]


@pytest.mark.parametrize(("response", "source", "truth", "right"), OF_SOURCES)
def test_answers_of_a_known_source_are_graded_by_its_rule(response: str, source: str, truth: str, right: bool) -> None:
    assert is_right(response, source, truth, None) is right
    assert is_right(f"<answer>{truth}</answer>", source, truth, "any")
    task = TableTask()
    gold = task.gold_response(task.read_row({"data_source": source, "ground_truth": truth}, "demo"))
    assert gold == ("#### 1080" if truth == "1080" else f"The answer is \\boxed{{{truth}}}.")


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("<answer>Paris</answer>", "paris", True),
        ("<think>Rome? Paris.</think> Paris", "Paris", True),
        ("The capital is Paris", "Paris", False),
        ("I think 2", "World War 2", False),
        ("So \\boxed{11}", "Apollo 11", False),
        ("The answer is 11", "Apollo 11", False),
        ("The answer is Apollo 11.", "Apollo 11", True),
        ("So the answer is **C**, because 3 > 2.", "C", True),
        ("The answer is (c).", "(C)", True),
        ("The answer is C or D.", "C", False),
        ("The answer is not C.", "C", False),
        ("The answer is C. <answer>D</answer>", "C", False),
        ("The answer is C. So \\boxed{D}.", "D", True),
        ("The answer to the first part is 18. So in total 36.", "36", True),
        ("The answer is 18 eggs, or 36 halves.", "18", False),
        ("\\boxed{(B)}", "(b)", True),
        ("<answer>yes\nno</answer>", "yes no", True),
        ("True", True, True),
        ("false", True, False),
        ("#### 7", ["six", "7"], True),
        ("#### 7", {"cases": []}, False),
    ],
)
def test_text_is_compared_without_case_and_spacing(response: str, truth: object, right: bool) -> None:
    assert is_right(response, "mine", truth, None) is right


@pytest.mark.parametrize("answer_format", [None, *ANSWER_FORMATS])
def test_a_gold_response_is_right_or_there_is_none(answer_format: str | None) -> None:
    task, none = TableTask(answer_format=answer_format), 0
    pieces = ["</answer>", "}", "{", "\\", "#### ", "<think>", "</think>", "\n", "4", "-", "Paris", " ", "\\boxed{"]
    for _ in range(100):
        text = "".join(random.choices(pieces, k=random.randint(1, 5)))
        truth = random.choice([text, random.randint(-99, 99), random.random()])
        if isinstance(truth, str) and not truth.strip():
            continue
        example = task.read_row({"ground_truth": truth}, "demo")
        gold = task.gold_response(example)
        none += gold is None
        assert gold is None or task.score(gold, example).terms == {"correct": 1.0}, truth
        if not isinstance(truth, str) and truth >= 1e-4:  # 1e-05 has an exponent, which last_number does not write
            assert gold is not None, truth
    assert none, "some of these cannot be written in any format"
