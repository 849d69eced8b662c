"""The tasks whose problems are drawn: gold answers are right, answers are graded exactly, wrong ones are answered."""

from __future__ import annotations

import pickle
import random
from fractions import Fraction

import pytest

from sota_grpo.errors import UserError
from sota_grpo.rl.records import Example, SampledText, Score
from sota_grpo.rl.task import scorer_of
from sota_grpo.tasks.arithmetic import LARGEST_VALUE, TEMPLATES, ArithmeticTask, solve
from sota_grpo.tasks.procedural import TARGETS, CountdownTask, calculate
from sota_grpo.tasks.wrappers import MESSAGE, think_again, with_tools
from tests.unit.test_mixture import GroupScorer

SEED = random.randrange(1 << 30)
COUNTDOWN = CountdownTask()
PRODUCT = Example("What is 347 * 28 + 591?", "#### 10307")
NUMBERS = COUNTDOWN.read_row({"nums": [3, 5, 7, 3], "target": 24}, "here")


def test_arithmetics_working_is_true_and_its_question_has_all_its_numbers() -> None:
    task = ArithmeticTask(seed=SEED, num_train=600, num_heldout=80)
    for example in [*task.train, *task.heldout]:
        assert task.score(task.gold_response(example), example) == Score({"correct": 1.0}, success=True)
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
        words = "".join(c if c.isdigit() else " " for c in example.query).split()
        assert sorted(map(int, words)) == sorted(example.extra["numbers"].values())
        assert "{" not in example.query
    assert {example.extra["template"] for example in task.train} == {
        name for name, template in TEMPLATES.items() if len(template.steps) <= 4
    }
    short = ArithmeticTask(seed=SEED, num_train=100, max_steps=2).train
    assert {example.extra["num_steps"] for example in short} == {1, 2}


def test_arithmetic_worked_by_hand() -> None:
    # 3 boxes of 4, minus 5: 12, then 7.
    assert solve(TEMPLATES["packs"].steps, {"a": 3, "b": 4, "c": 5}) == (("3*4", 12), ("12-5", 7))
    # 2 hens and 3 cows: 4 + 12 legs.
    assert solve(TEMPLATES["legs"].steps, {"a": 2, "b": 3}) == (("2*2", 4), ("3*4", 12), ("4+12", 16))
    # 7 apples cannot be shared equally by 2; 5 - 5 leaves nothing; 12 * 20 is too large.
    assert solve(TEMPLATES["shared"].steps, {"a": 7, "b": 2}) is None
    assert solve(TEMPLATES["fewer"].steps, {"a": 5, "b": 5}) is None
    assert solve(TEMPLATES["boxes"].steps, {"a": 12, "b": 20}) is None


def test_only_the_number_after_the_last_marker_counts() -> None:
    task = ArithmeticTask(num_train=1, num_heldout=1)
    example = Example("?", "30+1=31\n#### 31")
    for response in ("30+1=31\n#### 31", "#### 30\nno, wait\n#### 31", "####31", "#### $31."):
        assert task.score(response, example) == Score({"correct": 1.0}, success=True), response
    for response in ("#### 31\n#### 30", "#### -31", "#### 311", "The answer is 31.", "31", "####", ""):
        assert task.score(response, example) == Score({"correct": 0.0}, success=False), response
    assert task.score("#### 31", task.read_row({"answer": "31"}, "here")).success, "a number alone"
    assert task.read_row({"answer": "31", "question": None}, "here").query == ""


def test_every_problem_of_countdown_is_solved_by_its_gold_response_for_the_full_reward() -> None:
    task = CountdownTask(seed=SEED, num_train=150, num_heldout=50)
    for example in [*task.train, *task.heldout]:
        score = task.score(task.gold_response(example), example)
        assert score == Score({"correct": 1.0, "format": 1.0}, success=True), (example, SEED)
        assert example.extra["target"] in TARGETS
        assert all(1 <= number <= 99 for number in example.extra["numbers"])
    assert {len(example.extra["numbers"]) for example in task.train} == {3, 4}
    assert task.term_weights == {"correct": 1.0, "format": 0.1}


@pytest.mark.parametrize(
    ("response", "well_formed", "said"),
    [
        ("<answer>3 * 7 + 5 - 3</answer>", 1, "The value of that expression is 23, not 24."),
        ("<answer>3 / 7 + 5 + 3</answer>", 1, "is 59/7, not 24."),
        ("<answer>(5 + 3) * 3</answer>", 0, "does not use each of the numbers 3, 5, 7, 3 exactly once."),
        ("<answer>3 * 3 + 5 + 7 + 3</answer>", 0, "does not use each of the numbers"),
        ("<answer>3.5 * 3 + 7</answer>", 0, "does not use each of the numbers"),
        ("<answer>3 * 7 + 3 = 24</answer>", 0, "not an expression with a value: unexpected '='."),
        ("<answer>5 / (3 - 3) + 7</answer>", 0, "not an expression with a value: division by zero."),
        ("<answer>__import__('os')</answer>", 0, "not an expression with a value: unexpected '_'."),
        ("3 * 7 + 5 - 3 + 1", 0, "There is no answer."),
        ("<think><answer>3 * (7 - 3) + 5</answer>", 0, "There is no answer."),
    ],
)
def test_the_mistake_of_a_wrong_expression_is_named(response: str, well_formed: int, said: str) -> None:
    score = COUNTDOWN.score(response, NUMBERS)
    assert score.terms == {"correct": 0.0, "format": float(well_formed)}
    assert not score.success
    assert score.reply["role"] == "user"
    assert said in score.reply["content"]
    assert score.reply["content"].endswith("between <answer> and </answer>.")


def test_only_the_last_answer_outside_the_thinking_counts_and_its_value_is_exact() -> None:
    example = COUNTDOWN.read_row({"nums": [2, 10, 4], "target": 48}, "here")
    right, wrong = "<answer>(2 + 10) × 4</answer>", "<answer>2 + 10 + 4</answer>"
    assert COUNTDOWN.score(f"<think>{wrong}</think> {wrong} no, {right}", example).success
    assert COUNTDOWN.score(f"{right} <answer>or perhaps", example).success
    assert not COUNTDOWN.score(f"{right} no, {wrong}", example).success
    assert not COUNTDOWN.score(f"<think>{right}</think>{wrong}", example).success
    assert COUNTDOWN.score("<answer>4*(10--2)</answer>", example).success  # signs are no numbers
    assert 1 / 49 * 49 != 1.0
    example = COUNTDOWN.read_row({"nums": [49, 1, 49], "target": 1}, "here")
    assert COUNTDOWN.score("<answer>1 / 49 * 49</answer>", example).success


def test_rows_of_countdown_are_read_with_or_without_a_solution() -> None:
    assert COUNTDOWN.gold_response(NUMBERS) is None
    assert COUNTDOWN.messages(NUMBERS)[1]["content"] == "Numbers: 3, 5, 7, 3. Target: 24."
    row = {"numbers": [2, 10, 4], "target": 48, "answer": "(2 + 10) * 4"}
    example = COUNTDOWN.read_row(row, "here")
    assert COUNTDOWN.score(COUNTDOWN.gold_response(example), example).success
    assert example == COUNTDOWN.read_row({**row, "nums": None}, "here")
    assert example == COUNTDOWN.read_row({**row, "nums": row.pop("numbers")}, "here")


def test_the_calculator_is_exact_for_integers() -> None:
    rng = random.Random(SEED)
    for _ in range(100):
        a, b, c = (rng.randint(-(10**5), 10**5) for _ in range(3))
        assert calculate(f"{a} * ({b}) - ({c})") == str(a * b - c)
        shown = calculate(f"{a} / 7")
        assert abs(Fraction(shown) - Fraction(a, 7)) <= abs(Fraction(a, 7)) * Fraction(1, 10**11)
    assert calculate("999999999 * 999999999 * 10") == "error: the result is too large"


def test_a_wrong_response_is_asked_to_think_again_and_nothing_else_changes() -> None:
    inner = ArithmeticTask(seed=SEED, num_train=50, num_heldout=5)
    task = think_again(inner)
    assert all(getattr(task, name) == getattr(inner, name) for name in ("name", "term_weights", "train", "heldout"))
    for example in task.train[:5]:
        gold = task.gold_response(example)
        assert (gold, task.messages(example)) == (inner.gold_response(example), inner.messages(example))
        assert task.score(gold, example) == inner.score(gold, example)
        assert task.score("no", example).reply == {"role": "user", "content": MESSAGE}
        assert task.score("no", example).terms == inner.score("no", example).terms
    travelled = pickle.loads(pickle.dumps(scorer_of(think_again(inner, "Again?"))))
    assert travelled("no", inner.train[0]).reply == {"role": "user", "content": "Again?"}


def test_a_failed_grader_asks_nothing_and_a_reply_of_the_tasks_own_comes_first() -> None:
    failing = ArithmeticTask()
    failing.score = lambda response, example: Score({"correct": 0.0}, False, error="ValueError: no")
    assert think_again(failing).score("no", PRODUCT).reply is None
    assert think_again(COUNTDOWN).score("no", NUMBERS) == COUNTDOWN.score("no", NUMBERS)


def test_a_scorer_of_whole_groups_stays_one() -> None:
    inner = ArithmeticTask()
    inner.score = GroupScorer()
    actual = think_again(inner, "Again?").score.score_group([("a", PRODUCT), ("bb", PRODUCT)])
    assert [one.reply for one in actual] == [None, {"role": "user", "content": "Again?"}]
    assert not hasattr(think_again(COUNTDOWN).score, "score_group")
    lost = SampledText("", record={"error": "InstanceLost: gone"})
    pairs = [(SampledText("bb", record={"ended": "answer"}), PRODUCT), (lost, PRODUCT)]
    actual = with_tools(inner, has_reward=False, adds_task_terms=True).score.score_group(pairs)
    assert [(one.success, one.error) for one in actual] == [(True, None), (False, "InstanceLost: gone")], "not compared"
    inner.term_weights = {"environment": 1.0}  # its value would be lost
    with pytest.raises(UserError, match="environment names the environment's reward; give the function another name"):
        with_tools(inner, has_reward=False, adds_task_terms=True)
