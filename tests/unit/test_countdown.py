"""The countdown task: solvable by construction, split by its problems, graded exactly; wrong answers are answered."""

from __future__ import annotations

import pickle
import random
from fractions import Fraction

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks.countdown import TARGETS, CountdownTask
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.procedural import HELDOUT_SHARE, DrawnExamples, is_heldout

SEED = random.SystemRandom().randrange(1 << 30)
TASK = CountdownTask()
EXAMPLE = TASK.read_row({"nums": [3, 5, 7, 3], "target": 24}, "here")


def reward(task: CountdownTask, response: str, example: Example = EXAMPLE) -> float:
    return sum(task.term_weights[name] * value for name, value in task.score(response, example).terms.items())


def problem_of(example: Example) -> tuple:
    return tuple(sorted(example.extra["numbers"])), example.extra["target"]


def test_is_a_task_that_travels_to_graders_without_its_examples() -> None:
    assert isinstance(TASK, Task)
    task = CountdownTask(num_train=1 << 40)
    assert len(pickle.dumps(scorer_of(task))) < 1000
    assert pickle.loads(pickle.dumps(task)).train[5] == task.train[5]


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


def test_the_splits_share_no_problem_even_across_seeds() -> None:
    trained = {problem_of(example) for example in CountdownTask(seed=SEED, num_train=3000, num_numbers=[2]).train}
    held = {problem_of(e) for s in (SEED, SEED + 1) for e in CountdownTask(s, num_heldout=500, num_numbers=[2]).heldout}
    assert len(held) > 200
    assert not trained & held
    share = sum(is_heldout(((a, b), t)) for a in range(40) for b in range(40) for t in (10, 20)) / 3200
    assert share == pytest.approx(1 / HELDOUT_SHARE, abs=0.03)


def test_a_split_depends_on_its_seed_only_and_a_longer_one_begins_with_a_shorter() -> None:
    short, long = CountdownTask(SEED, num_train=20), CountdownTask(SEED, num_train=1 << 40)
    assert short.train[:] == long.train[:20]
    assert short.train[-1] == short.train[19]
    assert CountdownTask(SEED + 1, num_train=20).train[:] != short.train[:]
    with pytest.raises(IndexError, match="20 problems"):
        short.train[20]


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


def test_hostile_text_is_graded_and_its_reply_is_short() -> None:
    rng = random.Random(SEED)
    pieces = [
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        *"()+-*/0357",
        "9" * 99,
        "\x00",
        "<|im_end|>",
        "×",
        "\ud800",
    ]
    pieces += ["10**10**10", "__import__('os')", "٣", "\u202e", "\\boxed{", "<answer>" * 9000, "(" * 9000]
    for _ in range(10_000):
        score = TASK.score("".join(rng.choices(pieces, k=rng.randint(0, 60))), EXAMPLE)
        assert score.success or len(score.reply["content"]) < 200
        assert score.success or "<|im_end|>" not in score.reply["content"]


def test_the_rules_are_in_the_system_turn_unless_it_is_left_out() -> None:
    system, user = TASK.messages(EXAMPLE)
    assert "exactly once" in system["content"]
    assert user == {"role": "user", "content": "Numbers: 3, 5, 7, 3. Target: 24."}
    assert CountdownTask(system_prompt="").messages(EXAMPLE) == [user]
    assert CountdownTask(system_prompt="Count.").messages(EXAMPLE)[0]["content"] == "Count."


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


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_train": 0}, "num_train=0"),
        ({"num_heldout": 0}, "num_heldout=0"),
        ({"num_numbers": ()}, r"num_numbers=\(\)"),
        ({"num_numbers": (1, 3)}, r"num_numbers=\(1, 3\)"),
        ({"format_weight": -0.1}, "format_weight=-0.1"),
    ],
)
def test_an_impossible_task_is_refused(arguments: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CountdownTask(**arguments)


def test_a_procedural_split_needs_an_example() -> None:
    with pytest.raises(ValueError, match="num_heldout=0"):
        DrawnExamples(lambda rng, heldout: EXAMPLE, 0, True, 0)
