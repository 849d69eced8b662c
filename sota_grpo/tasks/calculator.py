"""Arithmetic with a calculator at hand: the example of a task whose responses may call a tool.

A response that ends its turn with ``<calc>347 * 28</calc>`` is answered by a tool turn with the result, and the policy
goes on. Nothing that the model writes is executed: see :mod:`sota_grpo.rewards.expressions`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from fractions import Fraction

from sota_grpo.rewards.expressions import ExpressionError, parse_expression
from sota_grpo.rewards.extract import extract_answer, last_tagged, numbers_equal, without_thinking
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.procedural import ProceduralTask, is_heldout

LARGEST_RESULT = 10**18
SYSTEM_PROMPT = (
    "You have a calculator for +, -, *, / and brackets: write <calc>expression</calc> and end your turn, and you are "
    "given its result. Give the final answer on a last line of the form '#### <number>'."
)
FORMS = (  # of the questions; every letter is a number of two or three digits
    "a * b",
    "a * b + c",
    "a * b - c",
    "(a + b) * c",
    "(a - b) * c",
    "a * b + c * d",
    "a * b - c * d",
)
_TAG = re.compile(r"<(/?)calc>")
_LETTER = re.compile("[a-d]")


class CalculatorTask(ProceduralTask):
    """Products and sums of large numbers; graded by exact match of the number after the last ``####``.

    ``reward = 1`` where that number is the right one, else 0. A response without such a number whose last complete
    ``<calc>`` stands outside the thinking gets the calculator's result, or its complaint, as the turn of a tool. An
    answer ends the dialog, and so does a response with neither. ``info`` has ``tool_calls``: 1 for a response that
    calls the tool, else 0.

    Args:
        seed, num_train, num_heldout, system_prompt: see :class:`~sota_grpo.tasks.procedural.ProceduralTask`.

    Raises:
        ValueError: a split without examples.

    >>> task = CalculatorTask()
    >>> example = Example("What is 347 * 28 + 591?", "#### 10307")
    >>> task.score("First the product: <calc>347 * 28</calc>", example).reply
    {'role': 'tool', 'content': '9716'}
    >>> task.score("#### 10307", example).terms, task.score("#### 10307", example).reply
    ({'correct': 1.0}, None)
    """

    name = "calculator"
    replies = True  # a score answers the response
    calls_tools = True  # so that a response is not the last turn
    term_weights: Mapping[str, float] = {"correct": 1.0}

    default_prompt = SYSTEM_PROMPT

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Draw a form, then numbers until the result is positive and the problem is of this side."""
        form = rng.choice(FORMS)
        while True:
            question = _LETTER.sub(lambda _: str(rng.randint(11, 999)), form)
            value: Fraction = parse_expression(question).value
            if value > 0 and is_heldout((form, value)) == heldout:  # a * b is on the side of b * a
                return Example(query=f"What is {question}?", answer=f"#### {value}")

    def score(self, response: str, example: Example) -> Score:
        """Compare the answer, or answer the call; see the class."""
        answer = extract_answer(response, "hash")
        if answer is not None:
            gold = extract_answer(example.answer, "hash") or example.answer
            success = numbers_equal(answer, gold)
            return Score({"correct": float(success)}, success, info={"tool_calls": 0})
        call = last_tagged(without_thinking(response), _TAG)
        reply = None if call is None else {"role": "tool", "content": calculate(call)}
        return Score({"correct": 0.0}, False, info={"tool_calls": int(call is not None)}, reply=reply)


def calculate(expression: str) -> str:
    """What the calculator shows: the value, 12 significant digits of it where it is no integer, or what is wrong.

    >>> calculate("347 * 28"), calculate("10 / 4"), calculate("2 / 3"), calculate("1 / 0")
    ('9716', '2.5', '0.666666666667', 'error: division by zero')
    """
    try:
        value = parse_expression(expression).value
    except ExpressionError as error:
        return f"error: {error}"
    if abs(value) >= LARGEST_RESULT:
        return "error: the result is too large"
    return str(value) if value.denominator == 1 else f"{float(value):.12g}"
