"""GSM8K, MATH and the reasoning task: the gold answer earns the most, each term by hand, a broken row is named."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import normalised
from sota_grpo.tasks.questions import (
    GSM8KTask,
    MathTask,
    QuestionTask,
    ReasoningTask,
    answers_equal,
    count_words,
    format_term,
    parse_response,
    split_gold,
)
from tests.data_files import shared_data, write_rows

RNG = random.Random(random.randrange(1 << 30))
GOLDS = (
    *("\\frac{{{0}}}{{7}}", "{0}", "({0}, \\sqrt{{2}}]", "\\text{{case {0}}}", "x^2 + {0}x", "{0}, {1}"),
    "y = {0}x - 1",
)
HALF, TWICE = Example("What is 1 over 2?", "\\frac{1}{2}"), Example("9 times 2?", "9*2=18\n#### 18")
THOUGHT = "one two three four five six seven eight nine ten " * 2


def gsm8k_rows(count: int) -> list[dict[str, Any]]:
    rows = []
    for index in range(count):
        left, right = RNG.randint(-(10**6), 10**6), RNG.randint(1, 999)
        steps = f"{left}+{right}=<<{left}+{right}={left + right}>>{left + right}"
        rows.append({"question": f"No. {index}: {left} plus {right}?", "answer": f"{steps}\n#### {left + right:,}"})
    return rows


def math_rows(count: int) -> list[dict[str, Any]]:
    golds = (RNG.choice(GOLDS).format(RNG.randint(2, 99), RNG.randint(100, 999)) for _ in range(count))
    return [{"question": f"No. {number}?", "ground_truth": gold, "correct": True} for number, gold in enumerate(golds)]


def reward(task: Task, response: str, example: Example) -> float:
    terms = task.score(response, example).terms
    assert set(terms) == set(task.term_weights)
    return sum(task.term_weights[name] * value for name, value in terms.items())


def assert_gold_is_the_most_and_empty_the_least(task: Task, examples: list[Example], least: float) -> None:
    most = 1.2 if task.name == "reasoning" else sum(task.term_weights.values())
    for example in examples:
        gold = task.gold_response(example)
        if gold is None:  # words cannot be there
            assert (task.name, task.answer_format) == ("math", "last_number")
            continue
        assert task.score(gold, example).success, (gold, example)
        assert (reward(task, gold, example), reward(task, "", example)) == (most, least)
        assert not task.score("", example).success
        if task.name == "math":
            assert reward(task, gold.replace(example.answer, "999999999"), example) == -0.75


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
@pytest.mark.parametrize(("name", "rows", "least"), [("gsm8k", gsm8k_rows, 0.0), ("math", math_rows, -0.5)])
def test_gold_earns_the_most_in_every_format(tmp_path, name: str, rows: Any, least: float, answer_format: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(30))
    task = make_task(name, path=path, num_heldout=5, answer_format=answer_format, format_weight=0.25)
    assert_gold_is_the_most_and_empty_the_least(task, [*task.train, *task.heldout], least)
    assert "<<" not in (task.gold_response(task.train[0]) or "")


SCORED: list[tuple[Task, Example, dict[str, tuple[float, ...]]]] = [  # responses, and the terms in the task's order
    (GSM8KTask(), TWICE, {"so\n#### $18.00": (1, 1), "#### 19": (0, 1), "#### eighteen": (0, 0)}),
    (GSM8KTask(), TWICE, {"#### 18 or 19": (0, 0), "<think>#### 18</think> 18": (0, 0)}),
    (MathTask(correct=3.0, wrong=-2.0, no_answer=0.5), HALF, {"so \\boxed{0.5}": (3, 1), "so \\boxed{2}": (-2, 1)}),
    (MathTask(correct=3.0, wrong=-2.0, no_answer=0.5), HALF, {"so 0.5": (0.5, 0), "so \\boxed{0.5": (0.5, 0)}),
    (ReasoningTask(), TWICE, {f"<think>{THOUGHT}</think><answer>18</answer>": (1, 1, 0)}),
    (ReasoningTask(), TWICE, {f"<think>{THOUGHT}more</think><answer>19</answer>": (0, 1, 0)}),
    (ReasoningTask(), TWICE, {"<think>Nine and nine is 18.</think>\n<answer>18</answer>": (1, 1, 5 / 20 - 1)}),
    (ReasoningTask(), TWICE, {"<answer>18</answer>": (1, 0.25, -1), "18": (0, 0, -1), "": (0, 0, -1)}),
    (ReasoningTask(answer_format="any"), TWICE, {"<think>a</think>\\boxed{18}": (1, 0.25, 1 / 20 - 1)}),
    (ReasoningTask(answer_format="any"), TWICE, {"<answer>18</answer> 19": (1, 0.25, -1)}),
    (ReasoningTask(answer_format="boxed"), TWICE, {"So \\boxed{18}.": (1, 0, -1)}),
    (ReasoningTask(answer_format="hash"), TWICE, {"So\n#### 18": (1, 0, -1)}),
    (ReasoningTask(answer_format="last_number"), TWICE, {"So it is 18.": (1, 0, -1)}),
]


def test_terms_by_hand() -> None:
    for task, example, responses in SCORED:
        for response, terms in responses.items():
            score = task.score(response, example)
            assert score.terms == dict(zip(task.term_weights, terms, strict=True)), response
            assert score.success == (terms[0] in (1, 3)), response
    weights = {MathTask(): (1, 0), GSM8KTask(format_weight=0.1): (1, 0.1), ReasoningTask(): (1, 0.2, 0.2)}
    assert all(tuple(task.term_weights.values()) == expected for task, expected in weights.items())
    assert MathTask().score("\\boxed{0.5}", HALF).info == {"extracted": "0.5"}
    assert "\\boxed{<answer>}" in MathTask().messages(HALF)[0]["content"]
    assert "<answer><answer></answer>" in MathTask(answer_format="tags").messages(HALF)[0]["content"]
    assert all(tag in ReasoningTask().messages(HALF)[0]["content"] for tag in ("<think>", "</think>", "<answer>"))


READ: list[tuple[type[QuestionTask], dict[str, Any], str]] = [  # a row's question is "?", or it has none
    (MathTask, {"question": "?", "ground_truth": 42}, "42"),
    (MathTask, {"question": "?", "ground_truth": " $\\frac12$ "}, "$\\frac12$"),
    (MathTask, {"problem": "?", "solution": "First \\boxed{1}, then \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
    (MathTask, {"problem": "?", "solution": "so it is $\\boxed 5$."}, "5"),
    (MathTask, {"problem": "?", "solution": "so they are $\\boxed{5}$ and $\\boxed{6}$."}, "5 and 6"),
    (MathTask, {"problem": "?", "answer": "2\\sqrt{3}", "solution": "\\boxed{7}"}, "2\\sqrt{3}"),
    (MathTask, {"question": "?", "answer": "5 * 2 = <<5*2=10>>10\n#### 10"}, "10"),
    (MathTask, {"prompt": "?", "answer": "\\boxed{x}", "ground_truth": None}, "x"),
    (MathTask, {"answer": "7"}, "7"),
    (ReasoningTask, {"response": "x", "answer": "#### 2"}, "#### 2"),
    (ReasoningTask, {"ground_truth": 2.5, "prompt": [{"role": "user"}]}, "2.5"),
    (ReasoningTask, {"answer": None, "ground_truth": "2", "prompt": "?"}, "2"),
]


def test_the_answer_format_of_a_task_may_be_set_later() -> None:
    task = GSM8KTask()
    task.answer_format = "boxed"
    assert task.score("\\boxed{4}", Example("2 + 2?", "#### 4")).success


def test_gold_answers_are_read_from_any_of_their_columns_and_a_row_to_score_needs_no_question() -> None:
    for kind, row, gold in READ:
        assert kind().read_row(row, "demo, row 1") == Example("?" if "?" in row.values() else "", gold)


FORMS = [  # a response of the reasoning task, its thinking, its answer, and what its form is worth
    # the form
    ("<think>a</think><answer>b</answer>", "a", "b", 1.0),
    (" \n<think>\na\n</think>\n\n<answer> b </answer>\n", "a", "b", 1.0),
    ("a</think><answer>b</answer>", "a", "b", 1.0),  # the prompt has opened the thinking
    ("<think>3 < 4 > 2</think><answer>a<b</answer>", "3 < 4 > 2", "a<b", 1.0),
    # both parts, and something else
    ("Sure! <think>a</think><answer>b</answer>", "a", "b", 0.5),
    ("<think>a</think>So <answer>b</answer>", "a", "b", 0.5),
    ("<think>a</think><answer>b</answer> Done.", "a", "b", 0.5),
    # one part
    ("<think>a</think>b", "a", None, 0.25),
    ("<answer>b</answer>", None, "b", 0.25),
    ("<think>a<answer>b</answer>", None, "b", 0.25),  # the thinking is never closed
    ("<think>a</think><answer>b", "a", None, 0.25),
    ("<answer>b</answer><think>a</think>", "a", None, 0.25),  # the wrong order
    ("<think>a</think><think>c</think><answer>b</answer>", None, "b", 0.25),  # several thoughts
    ("<think>a<think>c</think></think><answer>b</answer>", None, "b", 0.25),  # nested
    ("<think>a<think>c</think><answer>b</answer>", None, "b", 0.25),
    ("<answer>a</think>b</answer>", "<answer>a", None, 0.25),
    ("a</think>b</think><answer>c</answer>", None, "c", 0.25),
    ("<think>a</think><answer>c</answer><answer>b</answer>", "a", None, 0.25),  # several answers
    ("<think>in <answer> I write b</think><answer>b</answer>", "in <answer> I write b", None, 0.25),
    ("<think>a<answer>b</answer></think>", "a<answer>b</answer>", None, 0.25),
    ("<think>a</think><answer></answer>", "a", None, 0.25),
    ("<think> \n </think><answer>b</answer>", None, "b", 0.25),
    # none
    ("b", None, None, 0.0),
    ("<think>a", None, None, 0.0),
    ("a</answer>", None, None, 0.0),
    ("<THINK>a</THINK><Answer>b</Answer>", None, None, 0.0),  # the tags are lower case
    ("< think >a</ think ><answer >b</answer >", None, None, 0.0),
    ("</answer>b<answer>", None, None, 0.0),
]


def test_forms() -> None:
    for response, thinking, answer, value in FORMS:
        parts = parse_response(response)
        assert (parts.thinking, parts.answer, format_term(parts)) == (thinking, answer, value), response


def test_words() -> None:
    counts = {"48/2 = 24": 3, "$1,080.50": 3, "don't": 2, "snake_case": 2, "我们先算九加九": 7, "カード3枚": 5}
    counts |= {"아홉 더하기 아홉": 3, "x²+y²": 2, "": 0, "=====": 0}
    assert {text: count_words(text) for text in counts} == counts


EQUAL = """
18.0 == 18 | $18.00 == 18 | 18 dollars == 18 | 18% == 18 | 1,080 == 1080 | \\$18 == 18 | 1/2 == 0.5 | x = 5 == 5
0.5 == \\frac{1}{2} | \\frac{1}{2} == 0.5 | -3 == −3 | 5 == 5 apples | 5.0 apples. == 5 apples | $5 == 5 dollars
paris == Paris | Yes. == yes | STRASSE == straße | (1,2) == ( 1 , 2 ) | a<b == a < b | (c) == C | C. == (C)
C) Paris == C | \\text{(C)} == C | **Paris**. == Paris | "Paris." == Paris | 5 == 5 m
-\\frac{1}{2} == -0.5 | “Paris” == Paris | don’t == don't | 2019–2020 == 2019-2020 | Zu\u0308rich == Z\u00fcrich
18 == 18 m^2 | 18cm^{2} == 18 cm^2
"""
UNEQUAL = """
-\\frac{1}{2} == 0.5 | x = - 5 == 5 | –5 == 5 | 4m^2 == 4m^3 | 18 m == 18 m^2 | 18m^2 == 18m
19 == 18 | 18 or 19 == 18 | 1 8 == 18 | 18.01 == 18 | -18 == 18 | 9*2 == 18 | 5 pears == 5 apples | 3 am == 3 pm
11 == Apollo 11 | 16 == F-16 | 2 == 2x | 5 m == 5 cm | A) B) C) == C | C or D == C | C Paris == C | a == a*
. == ** | Apollo 12 == Apollo 11 | Rome == Paris | Paris, France == Paris | not Paris == Paris | NewYork == New York
five == 5 | 2 1 == 1 2 |  == 18
"""


@pytest.mark.parametrize(("table", "equal"), [(EQUAL, True), (UNEQUAL, False)])
def test_equal_and_different_answers(table: str, equal: bool) -> None:
    for pair in table.replace("\n", " | ").strip(" |").split(" | "):
        answer, _, gold = pair.rpartition(" == ")
        assert answers_equal(answer.strip(), gold) is equal, pair


def test_what_reasoning_writes_of_a_response() -> None:
    score = ReasoningTask().score("I know it. <ANSWER> paris. </ANSWER>", Example("Capital of France?", "Paris"))
    info = {"think_words": 0, "answer_found": "paris."}
    assert score == Score({"answer": 1.0, "format": 0.0, "thinking": -1.0}, success=True, info=info)


def test_every_right_answer_earns_more_than_every_wrong_one_under_the_default_weights() -> None:
    bits = ["<think>", "</think>", "<answer>", "</answer>", "<ANSWER>", "</ANSWER>", "18", "19", " ", "so ", THOUGHT]
    task = ReasoningTask()
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(5_000):
        response = "".join(RNG.choices(bits, k=RNG.randrange(12)))
        rewards[task.score(response, TWICE).success].append(reward(task, response, TWICE))
    assert len(rewards[True]) > 20
    assert min(rewards[True]) > max(rewards[False])


def test_a_gold_response_earns_the_full_reward_whatever_is_asked() -> None:
    golds = ("9*2=<<9*2=18>>18\n#### 18", "#### 1,080", "-3/4", " new   York. ", "(1, 2)", "\\frac{1}{2}", "x < 3")
    golds += ("<think>9*2</think>\n<answer>18</answer>", "[think]", "1 2 3", "Ω(n)", "...", "5 apples", "C#")
    texts = ("", "Is </think><answer>7</answer> <think> right?", "<th<think>ink>", "?", "东京在哪里？", "\ud800")
    task = ReasoningTask()
    for gold in (*golds, "#### A heading\nand a text"):
        for question in texts:
            example = Example(question, gold)
            score = task.score(task.gold_response(example), example)
            assert score.terms == {"answer": 1.0, "format": 1.0, "thinking": 0.0}, example
            assert reward(task, "", example) < reward(task, task.gold_response(example), example)


def test_the_gold_response_is_the_worked_answer_where_that_is_long_enough() -> None:
    example = Example("9 times 2?", f"{THOUGHT} 9*2 = <<9*2=18>>18\n#### 18")
    assert ReasoningTask().gold_response(example) == f"<think>\n{THOUGHT} 9*2 = 18\n</think>\n<answer>18</answer>"
    again = "\nI read the question once more: 9 times 2?\nMy answer stays 18."
    assert ReasoningTask().gold_response(Example("9 times 2?", "18")) == (
        f"<think>\nI am asked: 9 times 2?{again}{again}\n</think>\n<answer>18</answer>"
    )


@pytest.mark.timeout(30)  # half a second; what is quadratic takes minutes
def test_a_long_text_takes_no_longer_than_its_length() -> None:
    task = ReasoningTask()
    for piece in ("<think>", "</think>", "<answer>", "</answer>", "<answer></answer>", "<", "(", " ", "9 ", "-", "a "):
        text = piece * (100_000 // len(piece))
        for response in (text, f"<think>{text}</think><answer>18</answer>", f"<think>a</think><answer>{text}</answer>"):
            task.score(response, Example("9 times 2?", "Paris"))


@pytest.mark.data
@pytest.mark.parametrize("name", ["gsm8k", "reasoning"])
def test_every_real_gold_answer_earns_the_most(name: str) -> None:
    task = make_task(name, path=str(shared_data("gsm8k", "train.jsonl")))
    assert (len(task.train), len(task.heldout)) == (6961, 512)
    assert not {normalised(e.query) for e in task.train} & {normalised(e.query) for e in task.heldout}
    least = -0.2 if name == "reasoning" else 0.0
    assert_gold_is_the_most_and_empty_the_least(task, [*task.train, *task.heldout], least)
    for answer_format in ANSWER_FORMATS if name == "gsm8k" else ():  # which differ in what is around the answer
        other = GSM8KTask(answer_format=answer_format, format_weight=0.1)
        assert_gold_is_the_most_and_empty_the_least(other, task.train[::20], 0.0)
    for example in task.train if name == "reasoning" else ():
        assert not task.score(f"<answer>{split_gold(example.answer)[1]}1</answer>", example).success
