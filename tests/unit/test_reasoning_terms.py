"""The three terms by hand, one decision a line."""

from __future__ import annotations

import random

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.tasks.reasoning import (
    ReasoningTask,
    answers_equal,
    count_words,
    format_term,
    read_parts,
    thinking_term,
)

SEED = random.randrange(1 << 30)

FORMS = [
    # the form
    ("<think>a</think><answer>b</answer>", "a", "b", 1.0),
    (" \n<think>\na\n</think>\n\n<answer> b </answer>\n", "a", "b", 1.0),
    ("a</think><answer>b</answer>", "a", "b", 1.0),  # the prompt has opened the thinking
    ("\na\n</think>\n<answer>b</answer>", "a", "b", 1.0),
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
    ("<think>a</think>b</answer>", "a", None, 0.25),
    ("<answer>b</answer><think>a</think>", "a", None, 0.25),  # the wrong order
    ("<think>a</think><think>c</think><answer>b</answer>", None, "b", 0.25),  # several thoughts
    ("<think>a<think>c</think></think><answer>b</answer>", None, "b", 0.25),  # nested
    ("<think>a<think>c</think><answer>b</answer>", None, "b", 0.25),
    ("<think>a</think><answer>c</answer><answer>b</answer>", "a", None, 0.25),  # several answers
    ("<think>a</think><answer><answer>b</answer></answer>", "a", None, 0.25),
    ("<think>in <answer> I write b</think><answer>b</answer>", "in <answer> I write b", None, 0.25),
    ("<think>a<answer>b</answer></think>", "a<answer>b</answer>", None, 0.25),
    ("</think><think>a<answer>b</answer>", None, "b", 0.25),
    ("<think>a</think><answer></answer>", "a", None, 0.25),
    ("<think> \n </think><answer>b</answer>", None, "b", 0.25),
    ("</think><answer>b</answer>", None, "b", 0.25),
    # none
    ("", None, None, 0.0),
    ("b", None, None, 0.0),
    ("<think>a", None, None, 0.0),
    ("a</answer>", None, None, 0.0),
    ("<THINK>a</THINK><Answer>b</Answer>", None, None, 0.0),  # the tags are lower case
    ("< think >a</ think ><answer >b</answer >", None, None, 0.0),
    ("<think/>a<think/><answer/>", None, None, 0.0),
    ("</answer>b<answer>", None, None, 0.0),
    ("&lt;think&gt;a&lt;/think&gt;", None, None, 0.0),
]


@pytest.mark.parametrize(("response", "thinking", "answer", "value"), FORMS)
def test_forms(response: str, thinking: str | None, answer: str | None, value: float) -> None:
    parts = read_parts(response)
    assert (parts.thinking, parts.answer, format_term(parts)) == (thinking, answer, value)


@pytest.mark.parametrize("seed", [SEED], ids=["fresh"])
def test_only_the_exact_form_is_worth_more_than_half(seed: int) -> None:
    """Against a grader of another kind: the exact form is what is left when its pieces are put together again."""
    rng = random.Random(seed)
    bits = ["<think>", "</think>", "<answer>", "</answer>", "a", " ", "b"]
    exact = 0
    for _ in range(20_000):
        pieces = ["<think>", "a", "</think>", " ", "<answer>", "b", "</answer>"]
        for _ in range(rng.randrange(4)):
            place = rng.randrange(len(pieces))
            pieces[place : place + rng.randrange(2)] = rng.choices(bits, k=rng.randrange(2))
        response = "".join(pieces)
        opened = response if response.lstrip().startswith("<think>") else f"<think>{response}"
        head, _, tail = opened.strip().removeprefix("<think>").partition("</think>")
        inner = tail.strip().removeprefix("<answer>").removesuffix("</answer>")
        whole = tail.strip() == f"<answer>{inner}</answer>" and head.strip() != "" and inner.strip() != ""
        whole = whole and not any(tag in part for part in (head, inner) for tag in bits[:4])
        assert (format_term(read_parts(response)) == 1.0) == whole, response
        exact += whole
    assert 2000 < exact < 18_000


@pytest.mark.parametrize(
    ("thinking", "min_words", "value"),
    [
        (None, 20, -1.0),
        ("", 20, -1.0),
        ("...!? -- \n", 20, -1.0),
        ("one", 20, -0.95),
        ("one two three four five", 20, -0.75),
        ("word " * 19, 20, -0.05),
        ("word " * 20, 20, 0.0),
        ("word " * 21, 20, 0.0),
        ("word " * 100_000, 20, 0.0),
        (None, 0, 0.0),
        ("one", 1, 0.0),
    ],
)
def test_short_thinking_is_penalised_and_long_thinking_not_rewarded(
    thinking: str | None, min_words: int, value: float
) -> None:
    assert thinking_term(thinking, min_words) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("48/2 = 24", 3),
        ("$1,080.50", 3),
        ("don't", 2),
        ("snake_case", 2),
        ("我们先算九加九", 7),
        ("カード3枚", 5),
        ("아홉 더하기 아홉", 3),
        ("x²+y²", 2),
        ("", 0),
        ("=====", 0),
    ],
)
def test_words(text: str, count: int) -> None:
    assert count_words(text) == count


EQUAL = [
    ("18", "18"),
    ("18.0", "18"),
    ("$18.00", "18"),
    ("18 dollars", "18"),
    ("18%", "18"),
    ("1,080", "1080"),
    ("\\$18", "18"),
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "0.5"),
    ("0.5", "\\frac{1}{2}"),
    ("x = 5", "5"),
    ("-3", "−3"),
    ("5", "5 apples"),
    ("5 Apples", "5 apples"),
    ("5.0 apples.", "5 apples"),
    ("$5", "5 dollars"),
    ("paris", "Paris"),
    (" New\n York ", "new york"),
    ("Yes.", "yes"),
    ("STRASSE", "straße"),
    ("(1,2)", "( 1 , 2 )"),
    ("a<b", "a < b"),
    ("apollo 11", "Apollo 11"),
    ("(c)", "C"),
    ("C.", "(C)"),
    ("C) Paris", "C"),
    ("\\text{(C)}", "C"),
    ("**Paris**.", "Paris"),
    ('"Paris."', "Paris"),
    ("5", "5 m"),
]
UNEQUAL = [
    ("19", "18"),
    ("18 or 19", "18"),
    ("1 8", "18"),
    ("18.01", "18"),
    ("-18", "18"),
    ("9*2", "18"),
    ("5 pears", "5 apples"),
    ("3 am", "3 pm"),
    ("11", "Apollo 11"),
    ("16", "F-16"),
    ("2", "2x"),
    ("5 m", "5 cm"),
    ("A) B) C)", "C"),
    ("C or D", "C"),
    ("C Paris", "C"),
    ("a", "a*"),
    (".", "**"),
    ("Apollo 12", "Apollo 11"),
    ("Saturn 11", "Apollo 11"),
    ("Rome", "Paris"),
    ("Paris, France", "Paris"),
    ("not Paris", "Paris"),
    ("NewYork", "New York"),
    ("yes", "no"),
    ("five", "5"),
    ("2 1", "1 2"),
    ("", "18"),
]


@pytest.mark.parametrize(("answer", "gold"), EQUAL)
def test_equal_answers(answer: str, gold: str) -> None:
    assert answers_equal(answer, gold)


@pytest.mark.parametrize(("answer", "gold"), UNEQUAL)
def test_different_answers(answer: str, gold: str) -> None:
    assert not answers_equal(answer, gold)


def test_no_answer_is_wrong() -> None:
    assert ReasoningTask().score("none", Example("9 * 2?", "18")).terms["answer"] == 0.0
