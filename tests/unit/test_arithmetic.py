"""The arithmetic task: deterministic, split by construction, every gold answer right and fully rewarded."""

from __future__ import annotations

import random

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task
from sota_grpo.tasks.arithmetic import ITEMS, LARGEST_VALUE, NAMES, TEMPLATES, ArithmeticTask, solve

SEED = random.randrange(1 << 30)


def test_is_a_task_with_enough_templates_of_every_length() -> None:
    assert isinstance(ArithmeticTask(), Task)
    lengths = [len(template.steps) for template in TEMPLATES.values()]
    assert len(TEMPLATES) >= 20
    assert min(lengths.count(n) for n in (1, 2, 3, 4)) >= 4
    assert len({template.question for template in TEMPLATES.values()}) == len(TEMPLATES)


def test_gold_response_earns_the_full_reward_and_its_working_is_true() -> None:
    task = ArithmeticTask(seed=SEED, num_train=1000, num_heldout=200)
    for example in [*task.train, *task.heldout]:
        score = task.score(task.gold_response(example), example)
        assert sum(task.term_weights[name] * value for name, value in score.terms.items()) == 1.0
        assert score.success
        *work, final = example.answer.split("\n")
        for line in work:
            expression, value = line.split("=")
            operator = next(symbol for symbol in "+-*/" if symbol in expression)
            left, right = map(int, expression.split(operator))
            expected = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[operator]
            assert int(value) == expected
            assert 0 < int(value) <= LARGEST_VALUE
        assert final == f"#### {work[-1].split('=')[1]}"
        assert len(work) == example.extra["num_steps"] <= 4


def test_worked_by_hand() -> None:
    # 3 boxes of 4, minus 5: 12, then 7.
    assert solve(TEMPLATES["packs"].steps, {"a": 3, "b": 4, "c": 5}) == (("3*4", 12), ("12-5", 7))
    # 2 hens and 3 cows: 4 + 12 legs.
    assert solve(TEMPLATES["legs"].steps, {"a": 2, "b": 3}) == (("2*2", 4), ("3*4", 12), ("4+12", 16))
    # 7 apples cannot be shared equally by 2; 5 - 5 leaves nothing; 12 * 20 is too large.
    assert solve(TEMPLATES["shared"].steps, {"a": 7, "b": 2}) is None
    assert solve(TEMPLATES["fewer"].steps, {"a": 5, "b": 5}) is None
    assert solve(TEMPLATES["boxes"].steps, {"a": 12, "b": 20}) is None


def test_every_number_of_the_question_is_in_its_text() -> None:
    for example in ArithmeticTask(seed=SEED, num_train=300).train:
        words = "".join(c if c.isdigit() else " " for c in example.query).split()
        assert sorted(map(int, words)) == sorted(example.extra["numbers"].values())
        assert "{" not in example.query


def test_wording_varies() -> None:
    text = " ".join(example.query for example in ArithmeticTask(seed=SEED, num_train=2000).train)
    assert all(word in text for word in (*NAMES, *ITEMS))


@pytest.mark.parametrize(
    ("response", "success"),
    [
        ("#### 31", True),
        ("30+1=31\n#### 31", True),
        ("#### 30\nno, wait\n#### 31", True),
        ("#### 31\n#### 30", False),
        ("####31", True),
        ("#### 31.", True),
        ("#### $31", True),
        ("#### -31", False),
        ("#### 3", False),
        ("#### 311", False),
        ("The answer is 31.", False),
        ("31", False),
        ("####", False),
        ("", False),
    ],
)
def test_only_the_number_after_the_last_marker_counts(response: str, success: bool) -> None:
    task = ArithmeticTask(num_train=1, num_heldout=1)
    score = task.score(response, Example(query="?", answer="30+1=31\n#### 31"))
    assert score.success is success
    assert score.terms == {"correct": float(success)}


def test_max_steps_bounds_the_difficulty() -> None:
    lengths = {example.extra["num_steps"] for example in ArithmeticTask(seed=SEED, num_train=300, max_steps=2).train}
    assert lengths == {1, 2}


def test_messages_are_the_question_alone() -> None:
    task = ArithmeticTask(num_train=1)
    assert task.messages(task.train[0]) == [{"role": "user", "content": task.train[0].query}]
