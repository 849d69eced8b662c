"""The countdown task: solvable by construction, split by its problems, graded exactly; wrong answers are answered."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.procedural import TARGETS, CountdownTask

SEED = random.randrange(1 << 30)
TASK = CountdownTask()
EXAMPLE = TASK.read_row({"nums": [3, 5, 7, 3], "target": 24}, "here")


def reward(task: CountdownTask, response: str, example: Example = EXAMPLE) -> float:
    return sum(task.term_weights[name] * value for name, value in task.score(response, example).terms.items())


def test_every_problem_is_solved_by_its_gold_response_for_the_full_reward() -> None:
    task = CountdownTask(seed=SEED, num_train=400, num_heldout=100, num_numbers=(2, 3, 4, 5, 6))
    for example in [*task.train, *task.heldout]:
        score = task.score(task.gold_response(example), example)
        assert score.success, (example, SEED)
        assert score.reply is None
        assert reward(task, task.gold_response(example), example) == 1.1
        assert example.extra["target"] in TARGETS
        assert all(1 <= number <= 99 for number in example.extra["numbers"])
    assert {len(example.extra["numbers"]) for example in task.train} == {2, 3, 4, 5, 6}


@pytest.mark.parametrize(
    ("response", "terms", "said"),
    [
        ("<answer>3 * 7 + 5 - 3</answer>", (0, 1), "The value of that expression is 23, not 24."),
        ("<answer>(3 * 7 - 5) * 3</answer>", (0, 1), "is 48, not 24."),
        ("<answer>3 / 7 + 5 + 3</answer>", (0, 1), "is 59/7, not 24."),
        ("<answer>(5 + 3) * 3</answer>", (0, 0), "does not use each of the numbers 3, 5, 7, 3 exactly once."),
        ("<answer>24</answer>", (0, 0), "does not use each of the numbers"),
        ("<answer>3 * 3 + 5 + 7 + 3</answer>", (0, 0), "does not use each of the numbers"),
        ("<answer>3.5 * 3 + 7</answer>", (0, 0), "does not use each of the numbers"),
        ("<answer>3 * 7 + 3 = 24</answer>", (0, 0), "not an expression with a value: unexpected '='."),
        ("<answer>5 / (3 - 3) + 7</answer>", (0, 0), "not an expression with a value: division by zero."),
        ("<answer>__import__('os')</answer>", (0, 0), "not an expression with a value: unexpected '_'."),
        ("<answer></answer>", (0, 0), "There is no answer."),
        ("3 * 7 + 5 - 3 + 1", (0, 0), "There is no answer."),
        ("", (0, 0), "There is no answer."),
        ("<think><answer>3 * (7 - 3) + 5</answer>", (0, 0), "There is no answer."),
    ],
)
def test_a_wrong_response_is_told_what_is_wrong(response: str, terms: tuple[int, int], said: str) -> None:
    score = TASK.score(response, EXAMPLE)
    assert (score.terms["correct"], score.terms["format"]) == terms
    assert not score.success
    assert score.reply["role"] == "user"
    assert said in score.reply["content"]
    assert score.reply["content"].endswith("between <answer> and </answer>.")
    assert reward(TASK, response) == pytest.approx(0.1 * terms[1])


def test_only_the_last_answer_outside_the_thinking_counts() -> None:
    example = TASK.read_row({"nums": [2, 10, 4], "target": 48}, "here")
    right, wrong = "<answer>(2 + 10) × 4</answer>", "<answer>2 + 10 + 4</answer>"
    assert TASK.score(f"<think>{wrong}</think> {wrong} no, {right}", example).success
    assert TASK.score(f"{right} <answer>or perhaps", example).success
    assert not TASK.score(f"{right} no, {wrong}", example).success
    assert not TASK.score(f"<think>{right}</think>{wrong}", example).success
    assert TASK.score("<answer>4*(10--2)</answer>", example).success  # signs are no numbers


def test_the_value_is_exact_where_floats_are_not() -> None:
    example = TASK.read_row({"nums": [49, 1, 49], "target": 1}, "here")
    assert 1 / 49 * 49 != 1.0
    assert TASK.score("<answer>1 / 49 * 49</answer>", example).success
    assert Fraction(1, 49) * 49 == 1


def test_the_rules_are_in_the_system_turn_unless_it_is_left_out() -> None:
    system, user = TASK.messages(EXAMPLE)
    assert "exactly once" in system["content"]
    assert user == {"role": "user", "content": "Numbers: 3, 5, 7, 3. Target: 24."}


def test_rows_are_read_with_or_without_a_solution() -> None:
    assert TASK.gold_response(EXAMPLE) is None
    row = {"numbers": [2, 10, 4], "target": 48, "answer": "(2 + 10) * 4"}
    example = TASK.read_row(row, "here")
    assert TASK.score(TASK.gold_response(example), example).success
    assert example == TASK.read_row({**row, "nums": row.pop("numbers")}, "here")


@pytest.mark.parametrize(
    "row", [{}, {"nums": [1, 2]}, {"target": 3}, {"nums": "1, 2", "target": 3}, {"nums": [1, "2"], "target": 3},
            {"nums": [1], "target": 1}, {"nums": [1, 2], "target": 3.0}, {"nums": [1, True], "target": 2}]
)  # fmt: skip
def test_a_row_that_is_no_problem_is_refused(row: dict) -> None:
    with pytest.raises(DatasetError, match=r"rows\.jsonl, line 3: nums must be"):
        TASK.read_row(row, "rows.jsonl, line 3")
