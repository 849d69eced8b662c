"""Procedurally generated tasks, with Countdown, which supports multi-turn dialogs.

Arithmetic is exact, and no model text is executed (:mod:`sota_grpo.rewards.expressions`).
"""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sota_grpo.rewards.expressions import ExpressionError, parse_expression
from sota_grpo.rewards.extract import extract_answer, numbers_equal
from sota_grpo.rl.records import Example, Score, sample_seed
from sota_grpo.tasks.dataset import BaseTask, DatasetError, Row, optional_text, require_not_negative, text_of

HELDOUT_SHARE = 8  # one problem in eight is held out


def is_heldout(problem: object) -> bool:
    """Return whether a problem is held out, for every seed: 64-bit ``BLAKE2b(str(problem)) mod 8 == 0``."""
    digest = hashlib.blake2b(str(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


@dataclass(frozen=True)
class DrawnExamples(Sequence[Example]):
    """A split whose example ``i`` is ``draw(rng, heldout)``, with ``rng`` seeded by ``(seed, heldout, i)``.

    Of ``n`` functions ``draws``, which must be picklable, number ``i mod n`` draws example ``i``, seeded by
    ``i div n``. A longer split begins with the shorter one. Examples may repeat. ValueError if ``num_examples`` is
    below 1 for training or negative for held-out.
    """

    draws: Sequence[Callable[[random.Random, bool], Example]]
    seed: int
    heldout: bool
    num_examples: int

    def __post_init__(self) -> None:
        name, least = ("num_heldout", 0) if self.heldout else ("num_train", 1)
        if self.num_examples < least:
            raise ValueError(f"{name}={self.num_examples} must be at least {least}.")

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(self.num_examples)[index]]
        position = operator.index(index)
        if not -self.num_examples <= position < self.num_examples:
            raise IndexError(f"index {position} is outside a split of {self.num_examples} problems.")
        number, turn = divmod(position % self.num_examples, len(self.draws))
        return self.draws[turn](random.Random(sample_seed(self.seed, int(self.heldout), number)), self.heldout)


@dataclass(eq=False, repr=False)
class ProceduralTask(BaseTask):
    """Base class of generated tasks; a subclass defines :meth:`draw`, and its grading unless answers end in ``#### N``.

    Args:
        seed: seed of the problems; which problems are held out does not depend on it.
        num_train, num_heldout: number of examples of the splits, at least 1 and 0; else ValueError.
        system_prompt: replaces the task's system prompt; with an empty text there is no system turn.
    """

    train: Sequence[Example] = field(init=False)
    heldout: Sequence[Example] = field(init=False)
    seed: int = 0
    num_train: int = 8192
    num_heldout: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train = DrawnExamples([self.draw], self.seed, False, self.num_train)
        self.heldout = DrawnExamples([self.draw], self.seed, True, self.num_heldout)

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Return a random problem of the held-out or the training split; a subclass defines this."""
        raise NotImplementedError

    def score(self, response: str, example: Example) -> Score:
        """Return ``correct``: 1 if the answer (``extract_answer``, format ``hash``) equals the gold number, else 0."""
        answer = extract_answer(response, "hash")
        gold = extract_answer(example.answer, "hash") or example.answer
        success = answer is not None and numbers_equal(answer, gold)
        return Score({"correct": float(success)}, success)

    def gold_response(self, example: Example) -> str | None:
        return example.answer

    def read_row(self, row: Row, location: str) -> Example:
        """Return a row's example: ``answer`` (text, else DatasetError), and ``question`` if the row has it."""
        return Example(query=optional_text(row, ["question"]), answer=text_of(row, "answer", location))


LARGEST_NUMBER = 99
TARGETS = range(10, 101)
_AGAIN = "Think again and give another expression between <answer> and </answer>."

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}


@dataclass(eq=False, repr=False, kw_only=True)
class CountdownTask(ProceduralTask):
    """Countdown: find an expression of all given numbers, each once, whose value is the target (Pan et al. 2025).

    The two splits share no problem, whatever the seeds. Rows of TinyZero (``nums``, ``target``) can be used as data.

    ``reward = 1.0 * correct + format_weight * format``. ``format`` is 1 if the last ``<answer>`` outside the thinking
    is a valid expression that uses each number exactly once; ``correct`` is 1 if, in addition, its value is the target.
    The reply to a wrong response is a user turn that describes the mistake.

    Args:
        seed, num_train, num_heldout, system_prompt: see :class:`ProceduralTask`.
        format_weight: weight of ``format``; ValueError if negative.

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
    replies = True  # scores have replies
    default_prompt = (
        "Find an arithmetic expression that has the target as its value. It must use every given number exactly once, "
        "and may use +, -, *, / and brackets. Give it between <answer> and </answer>, for example "
        "<answer>(1 + 2) / 3</answer>."
    )

    format_weight: float = 0.1

    def __post_init__(self) -> None:
        require_not_negative(format_weight=self.format_weight)
        super().__post_init__()
        self.term_weights = {"correct": 1.0, "format": self.format_weight}

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Sample numbers and an expression until its value is in ``TARGETS`` and the problem in the requested split."""
        count = rng.choice((3, 4))
        while True:
            numbers = [rng.randint(1, LARGEST_NUMBER) for _ in range(count)]
            target, solution = _expression(rng, numbers)
            if target in TARGETS and is_heldout((sorted(numbers), target)) == heldout:
                return _example(numbers, target, solution)

    def score(self, response: str, example: Example) -> Score:
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
        """Return a solution in ``<answer>`` tags; None for a dataset row without ``answer``."""
        return f"<answer>{example.answer}</answer>" if example.answer else None

    def read_row(self, row: Row, location: str) -> Example:
        """Return a row's example: ``target``, ``nums`` or ``numbers``, any ``answer``; DatasetError if malformed."""
        numbers: Any = row.get("nums") if row.get("nums") is not None else row.get("numbers")
        target: Any = row.get("target")
        several = isinstance(numbers, (list, tuple)) and len(numbers) >= 2
        if not several or not all(type(value) is int and value > 0 for value in (*numbers, target)):
            raise DatasetError(
                f"{location}: nums must be a list of at least two positive integers and target a positive one, "
                f"found nums={str(numbers)[:40]} and target={str(target)[:40]}."
            )
        return _example(numbers, target, str(row.get("answer") or ""))


def _wrong(what: str, *, well_formed: bool = False) -> Score:
    reply = {"role": "user", "content": f"{what} {_AGAIN}"}
    return Score({"correct": 0.0, "format": float(well_formed)}, success=False, reply=reply)


def _example(numbers: Sequence[int], target: int, solution: str) -> Example:
    extra = {"numbers": list(numbers), "target": target}
    return Example(f"Numbers: {_listed(numbers)}. Target: {target}.", solution, extra)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _expression(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str]:
    """Return (value, expression): random pairs joined until one is left; all values are positive integers."""
    operands = [(number, str(number)) for number in numbers]
    while len(operands) > 1:
        pair = sorted((operands.pop(rng.randrange(len(operands))) for _ in range(2)), reverse=True)
        (larger, larger_text), (smaller, smaller_text) = pair
        sign = rng.choice("+*" + "-" * (larger > smaller) + "/" * (larger % smaller == 0))
        text = f"{larger_text} {sign} {smaller_text}"
        operands.append((_OPERATIONS[sign](larger, smaller), f"({text})" if operands else text))
    return operands[0]


LARGEST_RESULT = 10**18


def calculate(expression: str) -> str:
    """Return the value of an expression as text (12 significant digits if it is not an integer), or the error.

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
