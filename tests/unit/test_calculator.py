"""The calculator task: answers end a dialog, calls are answered exactly, and nothing else is."""

from __future__ import annotations

import pickle
import random
from fractions import Fraction

import pytest

from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.procedural import CalculatorTask, CountdownTask, calculate
from sota_grpo.tasks.wrappers import MESSAGE, think_again

SEED = random.randrange(1 << 30)
TASK = CalculatorTask()
EXAMPLE = Example("What is 347 * 28 + 591?", "#### 10307")


def test_every_problem_has_its_own_true_answer() -> None:
    assert isinstance(TASK, Task)
    task = CalculatorTask(seed=SEED, num_train=500, num_heldout=100)
    for example in [*task.train, *task.heldout]:
        question = example.query.removeprefix("What is ").removesuffix("?")
        assert task.score(f"#### {eval(question)}", example).success, (example, SEED)  # a question drawn here
        assert task.score(task.gold_response(example), example).terms == {"correct": 1.0}
    trained, held = ({example.query for example in part} for part in (task.train, task.heldout))
    assert not trained & held
    assert len({query.translate(str.maketrans("", "", "0123456789")) for query in trained}) == 7
    assert task.train[:9] == CalculatorTask(seed=SEED, num_train=1 << 40).train[:9]


@pytest.mark.parametrize(
    ("response", "content"),
    [
        ("<calc>347 * 28</calc>", "9716"),
        ("First: <calc>347×28</calc>\n", "9716"),
        ("<calc>1+1</calc> and <calc>2+2</calc>", "4"),
        ("<calc>1+1</calc> and <calc>2+", "2"),
        ("<think><calc>1+1</calc></think><calc>3*3</calc>", "9"),
        ("<calc>10/4</calc>", "2.5"),
        ("<calc>-7/3</calc>", "-2.33333333333"),
        ("<calc>1/0</calc>", "error: division by zero"),
        ("<calc></calc>", "error: it ends too early"),
        ("<calc>10**10**10</calc>", "error: unexpected '*'"),
        ("<calc>__import__('os').system('ls')</calc>", "error: unexpected '_'"),
        ("<calc>999999999 * 999999999 * 10</calc>", "error: the result is too large"),
        ("<calc>" + "(" * 100_000 + "</calc>", "error: it has more than 200 characters"),
    ],
)
def test_a_call_is_answered_by_the_tool(response: str, content: str) -> None:
    score = TASK.score(response, EXAMPLE)
    assert score == Score({"correct": 0.0}, False, info={"tool_calls": 1}, reply={"role": "tool", "content": content})


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("#### 10307", 1.0),
        ("9716 + 591 = 10307\n#### 10,307", 1.0),
        ("<calc>347*28</calc> is 9716\n#### 10307", 1.0),
        ("<calc>347*28</calc>\n#### 9716", 0.0),
        ("I do not know", 0.0),
        ("", 0.0),
        ("<calc>347 * 28", 0.0),
        ("<think><calc>347 * 28</calc>", 0.0),
        ("</calc>3<calc>", 0.0),
    ],
)
def test_an_answer_ends_the_dialog_and_so_does_silence(response: str, correct: float) -> None:
    assert TASK.score(response, EXAMPLE) == Score({"correct": correct}, correct == 1, info={"tool_calls": 0})


def test_the_calculator_is_exact_for_integers() -> None:
    rng = random.Random(SEED)
    for _ in range(300):
        a, b, c = (rng.randint(-(10**5), 10**5) for _ in range(3))
        assert calculate(f"{a} * ({b}) - ({c})") == str(a * b - c)
        shown = calculate(f"{a} / 7")
        assert abs(Fraction(shown) - Fraction(a, 7)) <= abs(Fraction(a, 7)) * Fraction(1, 10**11)


def test_rows_are_read_and_the_system_turn_explains_the_tool() -> None:
    example = TASK.read_row({"question": "What is 2 * 3?", "answer": "6"}, "here")
    assert TASK.score("#### 6", example).success
    system, user = TASK.messages(example)
    assert "<calc>" in system["content"]
    assert CalculatorTask(system_prompt="").messages(example) == [user]


def test_a_wrong_response_is_asked_to_think_again_and_nothing_else_changes() -> None:
    inner = ArithmeticTask(seed=SEED, num_train=50, num_heldout=5)
    task = think_again(inner)
    assert isinstance(task, Task)
    assert (task.name, task.term_weights, task.train, task.heldout) == (
        *(inner.name, inner.term_weights, inner.train, inner.heldout),
    )
    for example in task.train[:5]:
        gold = task.gold_response(example)
        assert (gold, task.messages(example)) == (inner.gold_response(example), inner.messages(example))
        assert task.score(gold, example) == inner.score(gold, example)
        assert task.score("no", example).reply == {"role": "user", "content": MESSAGE}
        assert task.score("no", example).terms == inner.score("no", example).terms
    assert task.read_row({"answer": "#### 3"}, "here") == inner.read_row({"answer": "#### 3"}, "here")


class Failing(ArithmeticTask):
    def score(self, response: str, example: Example) -> Score:
        return Score({"correct": 0.0}, False, error="ValueError: no")


def test_a_failed_grader_asks_nothing_and_a_reply_of_the_tasks_own_comes_first() -> None:
    assert think_again(Failing()).score("no", EXAMPLE).reply is None
    calculator = think_again(TASK)
    assert calculator.score("<calc>2*3</calc>", EXAMPLE).reply == {"role": "tool", "content": "6"}
    assert calculator.score("#### 1", EXAMPLE).reply == {"role": "user", "content": MESSAGE}
    countdown = CountdownTask()
    example = countdown.train[0]
    assert think_again(countdown).score("no", example) == countdown.score("no", example)


def test_the_scorer_of_a_wrapped_task_travels_without_examples() -> None:
    inner = ArithmeticTask()
    inner.train = [inner.train[i] for i in range(2000)]
    score = scorer_of(think_again(inner, "Again?"))
    travelled = pickle.loads(pickle.dumps(score))
    assert len(pickle.dumps(score)) < 1000
    assert travelled("no", inner.train[0]).reply == {"role": "user", "content": "Again?"}
    assert len(think_again(inner).train) == 2000
    assert len(inner.train) == 2000
    assert pickle.loads(pickle.dumps(think_again(inner))).train == inner.train


def test_a_scorer_of_whole_groups_stays_one() -> None:
    class Together:
        def __call__(self, response: str, example: Example) -> Score:
            return self.score_group([(response, example)])[0]

        def score_group(self, pairs: list[tuple[str, Example]]) -> list[Score]:
            shortest = min(len(response) for response, _ in pairs)
            return [Score({"correct": 0.0}, len(response) == shortest) for response, _ in pairs]

    inner = ArithmeticTask()
    inner.score = Together()
    score = think_again(inner, "Again?").score
    found = score.score_group([("a", EXAMPLE), ("bb", EXAMPLE)])
    assert [one.reply for one in found] == [None, {"role": "user", "content": "Again?"}]
    assert not hasattr(think_again(TASK).score, "score_group")
