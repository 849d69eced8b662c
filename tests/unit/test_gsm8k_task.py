"""The gold answer earns the most, the splits never overlap, a bad row is named."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path

import pytest

from sota_grpo.rewards import ANSWER_FORMATS
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import DatasetError, normalised
from sota_grpo.tasks.gsm8k import GSM8KTask

RNG = random.Random(random.SystemRandom().randrange(1 << 30))


def make_rows(count: int) -> list[dict[str, str]]:
    rows = []
    for index in range(count):
        left, right = RNG.randint(-(10**6), 10**6), RNG.randint(1, 999)
        steps = f"{left}+{right}=<<{left}+{right}={left + right}>>{left + right}"
        rows.append({"question": f"No. {index}: {left} plus {right}?", "answer": f"{steps}\n#### {left + right:,}"})
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def reward(task: Task, response: str, example: Example) -> float:
    terms = task.score(response, example).terms
    assert set(terms) == set(task.term_weights)
    return sum(task.term_weights[name] * value for name, value in terms.items())


def assert_gold_is_the_most_and_empty_the_least(task: Task, examples: list[Example]) -> None:
    most = sum(task.term_weights.values())
    for example in examples:
        gold = task.gold_response(example)
        assert task.score(gold, example).success, (gold, example)
        assert reward(task, gold, example) == most
        assert reward(task, "", example) == 0.0
        assert not task.score("", example).success


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_gold_earns_the_most_in_every_format(tmp_path: Path, answer_format: str) -> None:
    path = write(tmp_path / "rows.jsonl", make_rows(30))
    task = make_task("gsm8k", path=path, num_heldout=5, answer_format=answer_format, format_weight=0.25)
    assert isinstance(task, Task)
    assert_gold_is_the_most_and_empty_the_least(task, [*task.train, *task.heldout])
    assert "<<" not in task.gold_response(task.train[0])


def test_terms_of_right_wrong_and_unformatted_answers() -> None:
    example = Example("9 times 2?", "9*2=18\n#### 18")
    task = GSM8KTask([example], [], format_weight=0.1)
    assert task.score("so\n#### $18.00", example).terms == {"correct": 1.0, "format": 1.0}
    assert task.score("#### 19", example).terms == {"correct": 0.0, "format": 1.0}
    assert task.score("#### eighteen", example).terms == {"correct": 0.0, "format": 0.0}
    assert task.score("#### 18 or 19", example).terms == {"correct": 0.0, "format": 0.0}
    assert task.score("<think>#### 18</think> 18", example).terms == {"correct": 0.0, "format": 0.0}
    assert reward(task, "#### 19", example) == pytest.approx(0.1)


def test_messages_carry_the_raw_question() -> None:
    example = Example("9 times\n2?", "#### 18")
    system, user = GSM8KTask([example], []).messages(example)
    assert user == {"role": "user", "content": "9 times\n2?"}
    assert system["role"] == "system"
    assert "#### <number>" in system["content"]
    assert "\\boxed{<number>}" in GSM8KTask([example], [], answer_format="boxed").messages(example)[0]["content"]
    assert GSM8KTask([example], [], system_prompt="Hi").messages(example)[0]["content"] == "Hi"
    assert GSM8KTask([example], [], system_prompt="").messages(example) == [user]


def test_splits_are_disjoint_whole_and_independent_of_the_order(tmp_path: Path) -> None:
    rows = make_rows(60)
    task = GSM8KTask.load(path=write(tmp_path / "a.jsonl", rows), num_heldout=15, seed=3)
    shuffled = RNG.sample(rows, len(rows))
    again = GSM8KTask.load(path=write(tmp_path / "b.jsonl", shuffled), num_heldout=15, seed=3)
    other = GSM8KTask.load(path=write(tmp_path / "a.jsonl", rows), num_heldout=15, seed=4)
    heldout = {example.query for example in task.heldout}
    assert len(heldout) == 15
    assert heldout == {example.query for example in again.heldout} != {example.query for example in other.heldout}
    assert heldout | {example.query for example in task.train} == {row["question"] for row in rows}
    assert len(task.train) == 45
    assert [e.query for e in task.train] == [r["question"] for r in rows if r["question"] not in heldout]


def test_repeated_questions_never_stand_on_both_sides(tmp_path: Path) -> None:
    rows = make_rows(20)
    repeated = rows + [{**row, "question": f"  {row['question'].upper()}\n "} for row in rows]
    task = GSM8KTask.load(path=write(tmp_path / "rows.jsonl", RNG.sample(repeated, 40)), num_heldout=10)
    questions = [normalised(example.query) for example in [*task.train, *task.heldout]]
    assert len(questions) == len(set(questions)) == 20


def test_a_file_of_held_out_problems_takes_the_place_of_a_split(tmp_path: Path) -> None:
    rows = make_rows(20)
    train, held = write(tmp_path / "train.jsonl", rows[:15]), write(tmp_path / "held.jsonl", rows[10:])
    task = GSM8KTask.load(path=train, eval_path=held)
    assert [example.query for example in task.heldout] == [row["question"] for row in rows[10:]]
    assert [example.query for example in task.train] == [row["question"] for row in rows[:10]]
    with pytest.raises(DatasetError, match=r"every question of .*train\.jsonl is held out"):
        GSM8KTask.load(path=train, eval_path=train)


def test_the_hubs_test_split_is_held_out_and_never_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows(12)
    splits = {"train": rows[:10], "test": rows[8:]}

    def load_rows(source: str, *, path: str | None = None, split: str = "train", config: str) -> list[dict]:
        return splits[split]

    monkeypatch.setattr("sota_grpo.tasks.dataset.load_rows", load_rows)
    task = make_task("gsm8k", max_samples=5)
    assert [example.query for example in task.train] == [row["question"] for row in rows[:5]]
    assert [example.query for example in task.heldout] == [row["question"] for row in rows[8:]]
    assert len(make_task("gsm8k").train) == 8


@pytest.mark.parametrize("answer", ["1 and 8", "#### ", "#### eighteen", "#### 1 or 2"])
def test_a_gold_answer_without_a_number_is_named_by_its_row(tmp_path: Path, answer: str) -> None:
    rows = make_rows(9)
    rows[6]["answer"] = answer
    with pytest.raises(DatasetError, match=r"rows.jsonl, row 7: the gold answer has no number after '####'"):
        GSM8KTask.load(path=write(tmp_path / "rows.jsonl", rows), num_heldout=2)


def test_a_file_too_small_to_hold_out_says_what_to_use(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"has 30 different questions.*num_heldout=512.*use env.num_heldout=3"):
        GSM8KTask.load(path=write(tmp_path / "rows.jsonl", make_rows(30)))


def test_the_task_can_be_pickled(tmp_path: Path) -> None:
    task = GSM8KTask.load(path=write(tmp_path / "rows.jsonl", make_rows(5)), num_heldout=2)
    copy = pickle.loads(pickle.dumps(task))
    assert copy.score("#### 1", copy.train[0]) == task.score("#### 1", task.train[0])
    assert copy.train == task.train


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="'latex' is not one of"):
        GSM8KTask([], [], answer_format="latex")
    with pytest.raises(ValueError, match=r"format_weight=-0.1"):
        GSM8KTask([], [], format_weight=-0.1)
    with pytest.raises(ValueError, match="task 'gsm' is not one of gsm8k, math"):
        make_task("gsm")
    with pytest.raises(TypeError, match="answers"):  # before anything is loaded
        make_task("gsm8k", answers=3)


def data_file() -> Path:
    folder = os.environ.get("SOTA_GRPO_DATA") or Path(__file__).resolve().parents[2].parent / "shared" / "data"
    path = Path(folder) / "gsm8k" / "train.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; SOTA_GRPO_DATA names the data folder")
    return path


@pytest.mark.data
@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_every_real_gold_answer_earns_the_most(answer_format: str) -> None:
    task = GSM8KTask.load(path=str(data_file()), answer_format=answer_format, format_weight=0.1)
    assert len(task.heldout) == 512
    assert len(task.train) + len(task.heldout) == 7473
    assert not {normalised(e.query) for e in task.train} & {normalised(e.query) for e in task.heldout}
    assert_gold_is_the_most_and_empty_the_least(task, [*task.train, *task.heldout])
