"""Which answer to a row of a table is right: gold answers are, others are not, and no text is too strange."""

from __future__ import annotations

import random

import pytest

from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.tasks.table import MATH_SOURCES, TableTask, is_right

SEED = random.randrange(1 << 30)
WHERE = {
    "tags": "So <answer> {} </answer>.",
    "boxed": "So \\boxed{{{}}}.",
    "hash": "So\n#### {}\nDone",
    "last_number": "So it is {}",
    "any": "So\n#### {}\nDone",
}


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_the_same_number_is_right_and_another_is_not(answer_format: str) -> None:
    rng = random.Random(SEED)
    for _ in range(200):
        number = rng.randint(-(10**6), 10**6)
        written = rng.choice([str(number), f"{number:,}", f"{number}.00", f"{2 * number}/2"])
        truth = rng.choice([number, float(number), str(number), f"{number:,}", [number + 1, number]])
        right = is_right(WHERE[answer_format].format(written), "mine", truth, answer_format)
        wrong = is_right(WHERE[answer_format].format(number + 2), "mine", truth, answer_format)
        assert right, (SEED, written, truth)
        assert not wrong, (SEED, number, truth)


@pytest.mark.parametrize(
    ("response", "truth", "right"),
    [
        ("<answer>Paris</answer>", "paris", True),
        ("  paris ", "Paris", True),
        ("<think>Rome? Paris.</think> Paris", "Paris", True),
        ("The capital is Paris", "Paris", False),
        ("I think 2", "World War 2", False),
        ("2", "World War 2", False),
        ("So \\boxed{11}", "Apollo 11", False),
        ("The answer is 11", "Apollo 11", False),
        ("The answer is Apollo 11.", "Apollo 11", True),
        ("The answer is C", "C", True),
        ("So the answer is **C**, because 3 > 2.", "C", True),
        ("(C)", "C", True),
        ("The answer is (c).", "(C)", True),
        ("The answer is C or D.", "C", False),
        ("The answer is not C.", "C", False),
        ("The answer is C. <answer>D</answer>", "C", False),
        ("The answer is C. So \\boxed{D}.", "D", True),
        ("Yes.", "Yes", True),
        ("The answer to the first part is 18. So in total 36.", "36", True),
        ("The answer is 18 eggs, or 36 halves.", "18", False),
        ("\\boxed{(B)}", "(b)", True),
        ("Section 4 applies", "Section 4 applies", True),
        ("<answer>yes\nno</answer>", "yes no", True),
        ("True", True, True),
        ("false", True, False),
        ("", "Paris", False),
        ("#### 7", ["six", "7"], True),
        ("#### 7", {"cases": []}, False),
    ],
)
def test_text_is_compared_without_case_and_spacing(response: str, truth: object, right: bool) -> None:
    assert is_right(response, "mine", truth, None) is right


def test_gsm8k_of_verl_is_graded_where_its_prompt_asks() -> None:
    assert is_right("#### 1,080", "openai/gsm8k", "1080", None)
    assert not is_right("<answer>1080</answer>", "openai/gsm8k", "1080", None)
    assert is_right("<answer>1080</answer>", "openai/gsm8k", "1080", "any")


@pytest.mark.parametrize("source", MATH_SOURCES)
def test_math_is_graded_by_equivalence(source: str) -> None:
    assert is_right("So \\boxed{\\frac{2}{4}}.", source, "\\frac12", None)
    assert not is_right("So \\boxed{\\frac{3}{4}}.", source, "\\frac12", None)
    assert not is_right("So 1/2.", source, "\\frac12", None)
    example = TableTask().read_row({"data_source": source, "ground_truth": "\\frac{1}{2}"}, "demo")
    assert TableTask().gold_response(example) == "The answer is \\boxed{\\frac{1}{2}}."


@pytest.mark.parametrize("answer_format", [None, *ANSWER_FORMATS])
def test_a_gold_response_is_right_or_there_is_none(answer_format: str | None) -> None:
    rng, task, none = random.Random(SEED), TableTask(answer_format=answer_format), 0
    pieces = [
        "</answer>",
        "}",
        "{",
        "\\",
        "#### ",
        "<think>",
        "</think>",
        "\n",
        "4",
        "-",
        "Paris",
        " ",
        "é",
        "\\boxed{",
    ]
    for _ in range(300):
        truth = rng.choice(["".join(rng.choices(pieces, k=rng.randint(1, 5))), rng.randint(-99, 99), rng.random()])
        if isinstance(truth, str) and not truth.strip():
            continue
        example = task.read_row({"ground_truth": truth}, "demo")
        gold = task.gold_response(example)
        none += gold is None
        assert gold is None or task.score(gold, example).terms == {"correct": 1.0}, (SEED, truth)
        if not isinstance(truth, str) and truth >= 1e-4:  # 1e-05 has an exponent, which last_number does not write
            assert gold is not None, (SEED, truth)
    assert none, "some of these cannot be written in any format"
