"""The reasoning task: its gold responses, and what its three terms add up to."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task
from sota_grpo.tasks.reasoning import ReasoningTask

ROOT = Path(__file__).resolve().parents[2]
SEED = random.randrange(1 << 30)
THOUGHT = "one two three four five six seven eight nine ten " * 2


def reward(task: ReasoningTask, response: str, example: Example) -> float:
    terms = task.score(response, example).terms
    assert set(terms) == set(task.term_weights)
    return sum(task.term_weights[name] * value for name, value in terms.items())


def test_reward_by_hand() -> None:
    task, example = ReasoningTask(), Example("9 times 2?", "18")
    assert isinstance(task, Task)
    assert reward(task, f"<think>{THOUGHT}</think><answer>18</answer>", example) == pytest.approx(1.2)
    assert reward(task, f"<think>{THOUGHT}</think><answer>19</answer>", example) == pytest.approx(0.2)
    assert reward(task, "<think>Nine and nine is 18.</think>\n<answer>18</answer>", example) == pytest.approx(
        1 + 0.2 + 0.2 * (5 / 20 - 1)
    )
    assert reward(task, "<answer>18</answer>", example) == pytest.approx(1 + 0.2 * 0.25 - 0.2)
    assert reward(task, "18", example) == pytest.approx(-0.2)
    assert reward(task, "", example) == pytest.approx(-0.2)
    heavy = ReasoningTask(format_weight=2.0, thinking_weight=0.5, min_think_words=10)
    assert reward(heavy, "<think>a b c d e</think><answer>no</answer>", example) == pytest.approx(2.0 - 0.25)


def test_success_is_the_answer_alone() -> None:
    task, example = ReasoningTask(), Example("Capital of France?", "Paris")
    right = task.score("I know it. <ANSWER> paris. </ANSWER>", example)
    assert right.success
    assert right.terms == {"answer": 1.0, "format": 0.0, "thinking": -1.0}
    assert right.info == {"think_words": 0, "answer_found": "paris."}
    wrong = task.score(f"<think>{THOUGHT}</think><answer>Rome</answer>", example)
    assert not wrong.success
    assert wrong.terms == {"answer": 0.0, "format": 1.0, "thinking": 0.0}
    assert wrong.info == {"think_words": 20, "answer_found": "Rome"}


@pytest.mark.parametrize("seed", [SEED], ids=["fresh"])
def test_every_right_answer_earns_more_than_every_wrong_one_under_the_default_weights(seed: int) -> None:
    rng = random.Random(seed)
    bits = [
        *["<think>", "</think>", "<answer>", "</answer>", "<ANSWER>", "</ANSWER>", "18", "19"],
        " ",
        "so ",
        THOUGHT,
        "\n",
    ]
    task, example = ReasoningTask(), Example("9 times 2?", "#### 18")
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(20_000):
        response = "".join(rng.choices(bits, k=rng.randrange(12)))
        rewards[task.score(response, example).success].append(reward(task, response, example))
    assert len(rewards[True]) > 50
    assert min(rewards[True]) > max(rewards[False])


def test_answers_inside_the_thinking_or_before_it_do_not_count() -> None:
    task, example = ReasoningTask(), Example("9 times 2?", "18")
    for response in (
        "<think><answer>18</answer></think>",
        "<think><answer>18</answer>",
        "<answer>18</answer><think>Nine and nine.</think>",
        "<think>18</think>18",
        "<think>a</think><answer>18</answer><answer>19</answer>",
        "<think>a</think><answer>18</answer> no: <think>b</think>",
    ):
        assert not task.score(response, example).success, response
    assert task.score("<think>a</think><answer>19</answer><answer>18</answer>", example).success  # the last one


GOLDS = [
    "9*2=<<9*2=18>>18\n#### 18",
    "#### 1,080",
    "18",
    "-3/4",
    "Paris",
    " new   York. ",
    "(1, 2)",
    "\\frac{1}{2}",
    "<think>9*2</think>\n<answer>18</answer>",
    "x < 3",
    "[think]",
    "1 2 3",
    "Ω(n)",
    "...",
    "5 apples",
    "C#",
    "#### A heading\nand a text",
]
QUESTIONS = [
    "What is it?",
    "Is </think><answer>7</answer> <think> right?",
    "<th<think>ink>",
    "?",
    "东京在哪里？",
    "\ud800",
]


@pytest.mark.parametrize("min_think_words", [0, 1, 20, 500])
@pytest.mark.parametrize("gold", GOLDS)
def test_a_gold_response_earns_the_full_reward_whatever_is_asked(gold: str, min_think_words: int) -> None:
    task = ReasoningTask(min_think_words=min_think_words)
    for question in ["", *QUESTIONS]:
        example = Example(question, gold)
        score = task.score(task.gold_response(example), example)
        assert score.terms == {"answer": 1.0, "format": 1.0, "thinking": 0.0}
        assert score.success
        assert reward(task, "", example) < reward(task, task.gold_response(example), example)


def test_the_gold_response_is_the_worked_answer_where_that_is_long_enough() -> None:
    example = Example("9 times 2?", "9*2 = <<9*2=18>>18\n#### 18")
    assert ReasoningTask(min_think_words=3).gold_response(example) == (
        "<think>\n9*2 = 18\n</think>\n<answer>18</answer>"
    )
    assert ReasoningTask(min_think_words=8).gold_response(Example("9 times 2?", "18")) == (
        "<think>\nI am asked: 9 times 2?\nI read the question once more: 9 times 2?\nMy answer stays 18.\n</think>\n"
        "<answer>18</answer>"
    )


def test_messages_ask_for_both_tags() -> None:
    system, user = ReasoningTask().messages(Example("9 times\n2?", "18"))
    assert user == {"role": "user", "content": "9 times\n2?"}
    assert all(tag in system["content"] for tag in ("<think>", "</think>", "<answer>", "</answer>"))


@pytest.mark.parametrize(
    ("answer_format", "response"),
    [
        ("any", "<think>a</think>\\boxed{18}"),
        ("boxed", "So \\boxed{18}."),
        ("hash", "So\n#### 18"),
        ("last_number", "So it is 18."),
        ("any", "<answer>18</answer> 19"),
    ],
)
def test_the_answer_may_be_looked_for_elsewhere(answer_format: str, response: str) -> None:
    example = Example("9 times 2?", "18")
    assert ReasoningTask(answer_format=answer_format).score(response, example).success
    assert ReasoningTask().score(response, example).success == ("<answer>" in response)


@pytest.mark.timeout(120)  # about a second; what is quadratic takes minutes
def test_a_long_text_takes_no_longer_than_its_length() -> None:
    task = ReasoningTask()
    for piece in ("<think>", "</think>", "<answer>", "</answer>", "<answer></answer>", "<", "(", " ", "9 ", "-", "a "):
        text = piece * (400_000 // len(piece))
        for response in (text, f"<think>{text}</think><answer>18</answer>", f"<think>a</think><answer>{text}</answer>"):
            task.score(response, Example("9 times 2?", "Paris"))
