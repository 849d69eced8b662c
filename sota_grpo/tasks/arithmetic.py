"""Seeded, procedural word problems in GSM8K's form: one to four steps, a worked solution that ends in ``#### N``.

The training and held-out splits share no problem. A problem is its template and its numbers (names and items are
decoration); a hash of these alone, without the seed, decides its side, so the splits of any two seeds are disjoint too.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sota_grpo.records import Example, Score
from sota_grpo.rewards.extract import extract_answer
from sota_grpo.rewards.numbers import numbers_equal
from sota_grpo.tasks import procedural
from sota_grpo.tasks.arithmetic_templates import CONTAINERS, GIVES, ITEMS, NAMES, TEMPLATES, TRADES, Template, solve
from sota_grpo.tasks.dataset import text_of
from sota_grpo.tasks.procedural import DrawnExamples

LARGEST_NUM_STEPS = max(len(template.steps) for template in TEMPLATES.values())


def is_heldout(template: str, numbers: Mapping[str, int]) -> bool:
    """Whether a problem belongs to the held-out split: ``hash(template, numbers) mod 8 == 0``, for every seed.

    >>> is_heldout("more", {"a": 5, "b": 7}) == is_heldout("more", {"b": 7, "a": 5})
    True
    """
    return procedural.is_heldout(f"{template}:{sorted(numbers.items())}")


def _draw(max_steps: int, rng: random.Random, heldout: bool) -> Example:
    """Draw a problem of this side by rejection: its template first, so that rejection does not favour a template.

    The number of steps is uniform on ``1..max_steps``.
    """
    num_steps = rng.randint(1, max_steps)
    template = rng.choice([t for t in TEMPLATES.values() if len(t.steps) == num_steps])
    while True:
        numbers = {name: rng.randint(low, high) for name, (low, high) in template.ranges.items()}
        worked = solve(template.steps, numbers)
        if worked is not None and is_heldout(template.name, numbers) == heldout:
            break
    lines = [f"{expression}={value}" for expression, value in worked]
    return Example(
        query=_phrase(rng, template, numbers),
        answer="\n".join([*lines, f"#### {worked[-1][1]}"]),
        extra={"template": template.name, "numbers": numbers, "num_steps": num_steps},
    )


def _phrase(rng: random.Random, template: Template, numbers: Mapping[str, int]) -> str:
    people = dict(zip("nmk", rng.sample(NAMES, 3)))
    items = dict(zip("ij", rng.sample(ITEMS, 2)))
    verbs = {"gives": rng.choice(GIVES), "buys": rng.choice(TRADES), "box": rng.choice(CONTAINERS)}
    return template.question.format(**people, **items, **verbs, **numbers)


class ArithmeticTask:
    """Word problems that a policy of a million parameters can master; graded by exact match of the final number.

    ``reward = 1`` where the one number after the last ``####`` equals the gold one, else 0.

    Args:
        seed: of the draw of the problems; the split is the same for every seed.
        num_train: length of ``train``.
        num_heldout: length of ``heldout``.
        max_steps: most steps of a problem, 1 to 4.

    Raises:
        ValueError: a size below 1, or ``max_steps`` outside 1 to 4.

    >>> task = ArithmeticTask(seed=0, num_train=10, num_heldout=10)
    >>> task.score(task.gold_response(task.train[3]), task.train[3]).terms
    {'correct': 1.0}
    >>> task.score("I do not know", task.train[3]).success
    False
    """

    name = "arithmetic"
    term_weights: Mapping[str, float] = {"correct": 1.0}

    def __init__(
        self, seed: int = 0, num_train: int = 8192, num_heldout: int = 256, max_steps: int = LARGEST_NUM_STEPS
    ) -> None:
        if not 1 <= max_steps <= LARGEST_NUM_STEPS:
            raise ValueError(f"max_steps={max_steps} must lie between 1 and {LARGEST_NUM_STEPS}")
        draw = partial(_draw, max_steps)
        self.train: Sequence[Example] = DrawnExamples(draw, seed, False, num_train)
        self.heldout: Sequence[Example] = DrawnExamples(draw, seed, True, num_heldout)

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The chat that asks the question: one user turn and no system prompt, so that sequences stay short."""
        return [{"role": "user", "content": example.query}]

    def score(self, response: str, example: Example) -> Score:
        """Compare the number after the last ``####`` of the response with the gold one."""
        found, gold = extract_answer(response, "hash"), extract_answer(example.answer, "hash")
        success = found is not None and gold is not None and numbers_equal(found, gold)
        return Score(terms={"correct": float(success)}, success=success)

    def gold_response(self, example: Example) -> str:
        """The worked solution; it earns the full reward."""
        return example.answer

    def read_row(self, row: Mapping[str, Any], place: str) -> Example:
        """Of the columns ``answer``, which ends in ``#### N``, and, where it is there, ``question``.

        Raises:
            DatasetError: the answer is missing.
        """
        return Example(query=str(row.get("question", "")), answer=text_of(row, "answer", place))
