"""The gold answer earns the most, the splits never overlap, a bad row is named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import DatasetError, normalised
from sota_grpo.tasks.gsm8k import GSM8KTask
from tests.unit.test_tasks import shared_data, write

RNG = random.Random(random.randrange(1 << 30))


def make_rows(count: int) -> list[dict[str, str]]:
    rows = []
    for index in range(count):
        left, right = RNG.randint(-(10**6), 10**6), RNG.randint(1, 999)
        steps = f"{left}+{right}=<<{left}+{right}={left + right}>>{left + right}"
        rows.append({"question": f"No. {index}: {left} plus {right}?", "answer": f"{steps}\n#### {left + right:,}"})
    return rows


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


@pytest.mark.parametrize("answer", ["1 and 8", "#### ", "#### eighteen", "#### 1 or 2"])
def test_a_gold_answer_without_a_number_is_named_by_its_row(tmp_path: Path, answer: str) -> None:
    rows = make_rows(9)
    rows[6]["answer"] = answer
    with pytest.raises(DatasetError, match=r"rows.jsonl, row 7: the gold answer has no number after '####'"):
        GSM8KTask.load(path=write(tmp_path / "rows.jsonl", rows), num_heldout=2)


@pytest.mark.data
@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_every_real_gold_answer_earns_the_most(answer_format: str) -> None:
    task = GSM8KTask.load(path=str(shared_data("gsm8k", "train.jsonl")), answer_format=answer_format, format_weight=0.1)
    assert len(task.heldout) == 512
    assert len(task.train) + len(task.heldout) == 7473
    assert not {normalised(e.query) for e in task.train} & {normalised(e.query) for e in task.heldout}
    assert_gold_is_the_most_and_empty_the_least(task, [*task.train, *task.heldout])
