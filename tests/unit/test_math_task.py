"""The gold answer earns the most, the three rewards are told apart, and rows of every usual shape are read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.rewards.extract import ANSWER_FORMATS
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.math import MathTask

RNG = random.Random(random.randrange(1 << 30))
GOLDS = (
    "\\frac{{{0}}}{{7}}",
    "{0}",
    "({0}, \\sqrt{{2}}]",
    "\\text{{case {0}}}",
    "x^2 + {0}x",
    "{0}, {1}",
    "y = {0}x - 1",
)
HALF = Example("What is 1 over 2?", "\\frac{1}{2}")


def make_rows(count: int) -> list[dict[str, Any]]:
    golds = (RNG.choice(GOLDS).format(RNG.randint(2, 99), RNG.randint(100, 999)) for _ in range(count))
    return [
        {"question": f"Question {number}?", "ground_truth": gold, "predicted_answer": "?", "correct": True}
        for number, gold in enumerate(golds)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    return str(path)


def reward(task: Task, response: str, example: Example) -> float:
    terms = task.score(response, example).terms
    assert set(terms) == set(task.term_weights)
    return sum(task.term_weights[name] * value for name, value in terms.items())


@pytest.mark.parametrize("answer_format", ANSWER_FORMATS)
def test_gold_earns_the_most_in_every_format(tmp_path: Path, answer_format: str) -> None:
    path = write(tmp_path / "rows.json", make_rows(30))
    task = make_task("math", path=path, num_heldout=5, answer_format=answer_format, format_weight=0.25)
    assert isinstance(task, Task)
    golds = [(task.gold_response(example), example) for example in [*task.train, *task.heldout]]
    assert len(golds) == 30
    for gold, example in golds:
        if gold is None:
            assert answer_format == "last_number"
            continue
        assert task.score(gold, example).success
        assert reward(task, gold, example) == 1.25
        assert reward(task, "", example) == -0.5
        assert reward(task, gold.replace(example.answer, "999999999"), example) == -0.75


def test_right_wrong_and_missing_answers_earn_what_is_asked() -> None:
    task = MathTask(correct=3.0, wrong=-2.0, no_answer=0.5)
    assert task.score("so \\boxed{0.5}", HALF).terms == {"answer": 3.0, "format": 1.0}
    assert task.score("so \\boxed{2}", HALF).terms == {"answer": -2.0, "format": 1.0}
    assert task.score("so 0.5", HALF).terms == {"answer": 0.5, "format": 0.0}
    assert task.score("so \\boxed{0.5", HALF).terms == {"answer": 0.5, "format": 0.0}
    assert task.score("\\boxed{0.5}", HALF).info == {"extracted": "0.5"}
    assert task.term_weights == {"answer": 1.0, "format": 0.0}


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<think>\\boxed{2}</think>\\boxed{1/2}", 1.0),
        ("<think>\\boxed{1/2}</think> I am not sure", -0.5),
        ("<think>\\boxed{1/2}", -0.5),
        ("\\boxed{\\frac12}, no wait, \\boxed{2}", -1.0),
        ("\\boxed{1/2} \\boxed{1/3", 1.0),
        ("\\boxed{}", -0.5),
        ("\\boxed{0.5 or 2}", -1.0),
        ("\\boxed{" + "1" * 2000 + "}", -1.0),
    ],
)
def test_the_last_complete_box_after_thinking_counts(response: str, answer: float) -> None:
    assert MathTask().score(response, HALF).terms["answer"] == answer


@pytest.mark.parametrize(
    ("row", "gold"),
    [
        ({"question": "?", "ground_truth": "42"}, "42"),
        ({"question": "?", "ground_truth": 42}, "42"),
        ({"question": "?", "ground_truth": 0.5}, "0.5"),
        ({"question": "?", "ground_truth": " $\\frac12$ "}, "$\\frac12$"),
        ({"problem": "?", "solution": "First \\boxed{1}, then \\boxed{\\frac{1}{2}}."}, "\\frac{1}{2}"),
        ({"problem": "?", "solution": "so it is $\\boxed 5$."}, "5"),
        ({"problem": "?", "solution": "so they are $\\boxed{5}$ and $\\boxed{6}$."}, "5 and 6"),
        ({"problem": "?", "solution": "so it is $\\fbox{5}$."}, "5"),
        ({"problem": "?", "answer": "2\\sqrt{3}", "solution": "\\boxed{7}"}, "2\\sqrt{3}"),
        ({"question": "?", "answer": "5 * 2 = <<5*2=10>>10\n#### 10"}, "10"),
        ({"prompt": "?", "answer": "\\boxed{x}", "ground_truth": None}, "x"),
        ({"answer": "7"}, "7"),
    ],
)
def test_gold_answers_are_read_bare_delimited_boxed_or_from_a_solution(row: dict[str, Any], gold: str) -> None:
    example = MathTask().read_row(row, "demo, row 1")
    assert example.answer == gold
    assert example.query == ("?" if len(row) > 1 else "")


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"question": "?"}, r"rows.jsonl, row 3: there is no column 'ground_truth' or .* columns found are 'question'"),
        ({"question": "?", "ground_truth": ["1"]}, r"row 3: column 'ground_truth' holds list, not text"),
        ({"question": "?", "ground_truth": " "}, r"row 3: the gold answer '' \(0 characters\) cannot be compared"),
        ({"question": "?", "ground_truth": "x" * 1001}, r"row 3: the gold answer .* \(1001 characters\) cannot"),
        ({"problem": "?", "solution": "It is 5."}, r"row 3: the solution has no \\boxed{answer} \(it ends in"),
        ({"ground_truth": "1"}, r"row 3: there is no column 'question' or 'problem' or 'prompt'"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    rows = make_rows(6)
    rows[2] = row
    with pytest.raises(DatasetError, match=sentence):
        MathTask.load(path=write(tmp_path / "rows.jsonl", rows), num_heldout=2)


def test_messages_ask_for_the_box() -> None:
    system, user = MathTask().messages(HALF)
    assert user == {"role": "user", "content": HALF.query}
    assert "\\boxed{<answer>}" in system["content"]
    assert "<answer><answer></answer>" in MathTask(answer_format="tags").messages(HALF)[0]["content"]
