"""Countdown: write an expression of given numbers that has a given value; wrong ones are told what is wrong with them.

The rules are those of TinyZero's task (Pan et al. 2025): every number exactly once, ``+ - * /`` and brackets. Its rows
(columns ``nums`` and ``target``) can be read. Values are exact here.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping, Sequence
from typing import Any

from sota_grpo.rewards.expressions import ExpressionError, parse_expression
from sota_grpo.rewards.extract import extract_answer
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import DatasetError, require_not_negative
from sota_grpo.tasks.procedural import ProceduralTask, is_heldout

LARGEST_NUMBER = 99
TARGETS = range(10, 101)
SYSTEM_PROMPT = (
    "Find an arithmetic expression that has the target as its value. It must use every given number exactly once, and "
    "may use +, -, *, / and brackets. Give it between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)
_AGAIN = "Think again and give another expression between <answer> and </answer>."

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


class CountdownTask(ProceduralTask):
    """Countdown problems, drawn by the rules above; the two splits share no problem, whatever their seeds.

    ``reward = 1.0 * correct + format_weight * format``. ``format`` is 1 when the last ``<answer>`` outside the thinking
    is an expression that has a value and uses each number exactly once; ``correct`` is 1 when that value is the target
    as well. A response that is not correct is answered by a user turn that says what is wrong with it.

    Args:
        seed, num_train, num_heldout, system_prompt: see :class:`~sota_grpo.tasks.procedural.ProceduralTask`.
        num_numbers: how many numbers a problem may have, at least 2 each; one of these is drawn.
        format_weight: weight of ``format``.

    Raises:
        ValueError: a split without examples, fewer than two numbers, or a negative weight.

    >>> task = CountdownTask()
    >>> example = task.read_row({"nums": [3, 5, 7], "target": 26}, "demo, row 1")
    >>> task.score("<answer>(3 + 5) * 7</answer>", example).terms
    {'correct': 0.0, 'format': 1.0}
    >>> task.score("<answer>(3 + 5) * 7</answer>", example).reply["content"].partition(" Think")[0]
    'The value of that expression is 56, not 26.'
    >>> task.score("<think>7 * 3 is 21.</think> <answer>7 × 3 + 5</answer>", example).success
    True
    """

    name = "countdown"
    replies = True  # a score answers the response
    default_prompt = SYSTEM_PROMPT

    def __init__(
        self,
        seed: int = 0,
        num_train: int = 8192,
        num_heldout: int = 512,
        *,
        num_numbers: Sequence[int] = (3, 4),
        system_prompt: str | None = None,
        format_weight: float = 0.1,
    ):
        if not num_numbers or min(num_numbers) < 2:
            raise ValueError(f"num_numbers={tuple(num_numbers)} must name counts of at least 2 numbers.")
        require_not_negative(format_weight=format_weight)
        super().__init__(seed, num_train, num_heldout, system_prompt=system_prompt)
        self.term_weights: Mapping[str, float] = {"correct": 1.0, "format": format_weight}
        self._counts = tuple(num_numbers)

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Draw numbers and an expression of them until its value is a target and the problem is of this side."""
        count = rng.choice(self._counts)
        while True:
            numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(count)]
            target, solution = _expression(rng, numbers)
            if target in TARGETS and is_heldout((sorted(numbers), target)) == heldout:
                return _example(numbers, target, solution)

    def score(self, response: str, example: Example) -> Score:
        """Evaluate the answer; see the class for the terms and the reply."""
        numbers, target = example.extra["numbers"], example.extra["target"]
        answer = extract_answer(response, "tags")
        if answer is None:
            return _wrong("There is no answer.")
        try:
            expression = parse_expression(answer)
        except ExpressionError as error:
            return _wrong(f"That is not an expression with a value: {error}.")
        if sorted(expression.numbers) != sorted(numbers):
            return _wrong(f"That expression does not use each of the numbers {_listed(numbers)} exactly once.")
        if expression.value != target:
            return _wrong(f"The value of that expression is {expression.value}, not {target}.", well_formed=True)
        return Score({"correct": 1.0, "format": 1.0}, success=True)

    def gold_response(self, example: Example) -> str | None:
        """The solution by which the problem was made; None for a row that came without one."""
        return f"<answer>{example.answer}</answer>" if example.answer else None

    def read_row(self, row: Mapping[str, Any], place: str) -> Example:
        """Of the columns ``target`` and ``nums`` (or ``numbers``), and ``answer``, a solution, where there is one.

        Raises:
            DatasetError: a column is missing or does not hold positive integers.
        """
        numbers: Any = row.get("nums", row.get("numbers"))
        target: Any = row.get("target")
        several = isinstance(numbers, (list, tuple)) and len(numbers) >= 2
        if not several or not all(type(value) is int and value > 0 for value in (*numbers, target)):
            raise DatasetError(
                f"{place}: nums must be a list of at least two positive integers and target one, "
                f"found nums={str(numbers)[:40]} and target={str(target)[:40]}."
            )
        return _example(numbers, target, str(row.get("answer") or ""))


def _wrong(what: str, *, well_formed: bool = False) -> Score:
    reply = {"role": "user", "content": f"{what} {_AGAIN}"}
    return Score({"correct": 0.0, "format": float(well_formed)}, success=False, reply=reply)


def _example(numbers: Sequence[int], target: int, solution: str) -> Example:
    return Example(
        query=f"Numbers: {_listed(numbers)}. Target: {target}.",
        answer=solution,
        extra={"numbers": list(numbers), "target": target},
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _expression(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Join two at random until one is left, by a sign that keeps every value a positive integer."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        pair = sorted((parts.pop(rng.randrange(len(parts))) for _ in range(2)), reverse=True)
        (larger, larger_text), (smaller, smaller_text) = pair
        sign = rng.choice("+*" + "-" * (larger > smaller) + "/" * (larger % smaller == 0))
        text = f"{larger_text} {sign} {smaller_text}"
        parts.append((_OPERATIONS[sign](larger, smaller), f"({text})" if parts else text))
    return parts[0]
