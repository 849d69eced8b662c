"""Generated word problems in GSM8K's format: one to five steps, a solution that ends in ``#### N``.

The training and held-out splits share no problem, for any two seeds: the split of a problem is a hash of its template
and numbers (names of people and items do not count).

A row of the table of templates has a name, a question, the ranges of its numbers, and its solution as binary steps. An
operand is a number of the question (``a`` to ``e``), the result of an earlier step (``p``, ``q``, ``r``, ``s`` for the
first four) or a literal.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sota_grpo.rl.records import Example
from sota_grpo.tasks.procedural import ProceduralTask, is_heldout

LARGEST_VALUE = 200
_RESULT_NAMES = "pqrst"  # results of the first to the fifth step


@dataclass(frozen=True)
class Template:
    """A problem template. ``ranges``: (lowest, highest) of each number; ``steps``: (left, operator, right) in order."""

    name: str
    question: str
    ranges: Mapping[str, tuple[int, int]]
    steps: tuple[tuple[str, str, str], ...]


NAMES = ("Ann", "Ben", "Carl", "Dana", "Ella", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo", "Mia", "Noah")
ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "toys")
GIVES = ("gives away", "loses", "sells", "breaks")
TRADES = ("buys", "finds", "wins", "gets")
CONTAINERS = ("bags", "boxes", "jars", "packs")

# name | question | ranges | steps; {n} {m} {k} are three different people, {i} {j} two different items.
_TABLE = """
more | {n} has {a} {i}. {m} gives {n} {b} more. How many {i} does {n} have now? | a 5-60 b 3-40 | a+b
fewer | {n} has {a} {i} and {gives} {b} of them. How many {i} are left? | a 15-90 b 3-60 | a-b
boxes | There are {a} {box} with {b} {i} in each. How many {i} are there in all? | a 2-12 b 2-12 | a*b
shared | {n} shares {a} {i} equally among {b} friends. How many {i} does each friend get? | a 6-96 b 2-9 | a/b
pages | {n} reads {a} pages a day. How many pages does {n} read in {b} days? | a 3-20 b 2-9 | a*b
older | {n} is {a} years old and {m} is {b} years older. How old is {m}? | a 4-50 b 2-30 | a+b
packs | {n} {buys} {a} {box} of {b} {i} and {gives} {c} {i}. How many {i} are left? | a 3-12 b 2-9 c 2-20 | a*b p-c
found | {n} has {a} {i}, {buys} {b} more and then {gives} {c}. How many {i} are left? | a 5-60 b 3-40 c 3-40 | a+b p-c
tickets | A ticket costs ${a} and a drink costs ${b}. How many dollars do {c} people pay for both? \
| a 3-12 b 2-6 c 2-9 | a+b p*c
wages | {n} earns ${a} an hour. After {b} hours {n} spends ${c}. How many dollars are left? \
| a 5-15 b 2-9 c 3-30 | a*b p-c
crates | {n} puts {a} {i} into {box} of {b} and sells each for ${c}. How many dollars does {n} get? \
| a 8-72 b 2-9 c 2-9 | a/b p*c
twice | {n} has {a} {i} and {m} has twice as many. How many {i} do they have together? | a 4-45 | a*2 a+p
mixed | {a} red and {b} blue {i} are shared equally among {c} friends. How many {i} does each friend get? \
| a 4-40 b 4-40 c 2-9 | a+b p/c
change | {n} has ${a} and buys {b} {i} at ${c} each. How many dollars are left? | a 20-99 b 2-9 c 2-9 | b*c a-p
legs | A farm has {a} hens and {b} cows. How many legs do they have together? | a 3-30 b 2-20 | a*2 b*4 p+q
basket | {n} buys {a} {i} at ${b} each and {c} {j} at ${d} each. How many dollars does {n} spend? \
| a 2-9 b 2-9 c 2-9 d 2-9 | a*b c*d p+q
savings | {n} saves ${a} a week for {b} weeks, then buys a game for ${c} and a book for ${d}. \
How many dollars are left? | a 5-15 b 3-9 c 5-30 d 3-15 | a*b p-c q-d
bus | A bus has {a} people. Then {b} get off, {c} get on and {d} more get off. How many people are on the bus? \
| a 15-60 b 3-20 c 3-20 d 2-15 | a-b p+c q-d
race | {n} runs {a} miles a day for {b} days and {m} runs {c} miles a day for {d} days. \
How many more miles does {n} run? | a 4-12 b 4-9 c 2-8 d 2-8 | a*b c*d p-q
bakery | {n} bakes {a} trays of {b} rolls, eats {c} and puts the rest into bags of {d}. How many bags are there? \
| a 2-9 b 4-12 c 2-9 d 2-8 | a*b p-c q/d
seats | A hall has {a} rows of {b} seats. {c} people come, then {d} more. How many seats are free? \
| a 4-12 b 5-12 c 5-40 d 3-20 | a*b p-c q-d
teams | {a} girls and {b} boys form teams of {c}. Each team gets {d} balls. How many balls are there? \
| a 4-30 b 4-30 c 2-9 d 2-6 | a+b p/c q*d
paid | {n} buys {a} {i} at ${b} each and {c} {j} at ${d} each and pays ${e}. How many dollars does {n} get back? \
| a 2-8 b 2-8 c 2-8 d 2-8 e 50-150 | a*b c*d p+q e-r
market | A shop has {a} {box} of {b} {i}. It sells {c} on Monday and twice as many on Tuesday. \
How many {i} are left? | a 5-12 b 5-12 c 3-20 | a*b p-c c*2 q-r
three | {n} has {a} {i}, {m} has {b} more than {n}, and {k} has {c} times as many as {m}. \
How many {i} do they have together? | a 3-15 b 2-10 c 2-4 | a+b p*c a+p r+q
jobs | {n} works {a} hours at ${b} an hour and {c} hours at ${d} an hour, then spends ${e}. How many dollars are left? \
| a 2-9 b 5-12 c 2-9 d 5-12 e 5-40 | a*b c*d p+q r-e
clubs | {a} men pay ${b} each and {c} children pay ${d} each. {e} clubs share the money equally. \
How many dollars does each club get? | a 2-9 b 3-12 c 2-9 d 2-6 e 2-6 | a*b c*d p+q r/e
garden | {n} plants {a} rows of {b} roses and {c} tulips. {d} flowers die and half of the rest are cut. \
How many flowers are cut? | a 2-9 b 3-12 c 3-30 d 2-20 | a*b p+c q-d r/2
stall | {n} sells {a} {i} at ${b} each and {c} {j} at ${d} each. {m} sells {e} {i} at the same price as {n}. \
How many more dollars does {n} get? | a 3-9 b 2-8 c 2-9 d 2-8 e 2-9 | a*b c*d p+q e*b r-s
halves | {n} buys {a} {i} at ${b} each and {c} {j} at ${d} each and pays ${e}. Half of what {n} gets back is for {m}. \
How many dollars does {m} get? | a 2-8 b 2-8 c 2-8 d 2-8 e 50-150 | a*b c*d p+q e-r s/2
packed | A shop has {a} {box} of {b} {i}. It sells {c} on Monday and twice as many on Tuesday. The rest is put into \
bags of {d}. How many bags are there? | a 5-12 b 5-12 c 3-20 d 2-9 | a*b p-c c*2 q-r s/d
pooled | {n} has {a} {i}, {m} has {b} more than {n}, and {k} has {c} times as many as {m}. They share all of them \
equally among {d} friends. How many {i} does each friend get? | a 3-15 b 2-10 c 2-4 d 2-9 | a+b p*c a+p r+q s/d
flowers | {n} plants {a} rows of {b} roses and {c} tulips. {d} flowers die and half of the rest are sold at ${e}. \
How many dollars does {n} get? | a 2-9 b 3-12 c 3-30 d 2-20 e 2-6 | a*b p+c q-d r/2 s*e
saved | {n} works {a} hours at ${b} an hour and {c} hours at ${d} an hour, spends ${e} and saves half of the rest. \
How many dollars does {n} save? | a 2-9 b 5-12 c 2-9 d 5-12 e 5-40 | a*b c*d p+q r-e s/2
"""


def _parse_row(row: str) -> Template:
    name, question, ranges, steps = (cell.strip() for cell in row.split("|"))
    words = ranges.split()
    spans = {key: span.partition("-") for key, span in zip(words[::2], words[1::2])}
    bounds = {key: (int(low), int(high)) for key, (low, _, high) in spans.items()}
    parsed = tuple((step[0], step[1], step[2:]) for step in steps.split())
    return Template(name, question, bounds, parsed)


TEMPLATES: Mapping[str, Template] = {row.name: row for row in map(_parse_row, _TABLE.strip().splitlines())}


_OPERATIONS: dict[str, Any] = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": Fraction}


def solve(steps: tuple[tuple[str, str, str], ...], numbers: Mapping[str, int]) -> tuple[tuple[str, int], ...] | None:
    """Return ``(expression, value)`` of each step; None if a value is no integer from 1 to ``LARGEST_VALUE``.

    In the steps, (operand, operator, operand), ``p`` to ``s`` are the results of steps 1 to 4.

    >>> solve((("a", "*", "b"), ("p", "-", "2")), {"a": 3, "b": 4})
    (('3*4', 12), ('12-2', 10))
    """
    values = dict(numbers)
    worked: list[tuple[str, int]] = []
    for result_name, (left, sign, right) in zip(_RESULT_NAMES, steps):
        first, second = (values[operand] if operand in values else int(operand) for operand in (left, right))
        value = _OPERATIONS[sign](first, second)
        if value.denominator > 1 or not 0 < value <= LARGEST_VALUE:
            return None
        values[result_name] = int(value)
        worked.append((f"{first}{sign}{second}", int(value)))
    return tuple(worked)


LARGEST_NUM_STEPS = max(len(template.steps) for template in TEMPLATES.values())


@dataclass(eq=False, repr=False)
class ArithmeticTask(ProceduralTask):
    """Word problems that a model with a million parameters can learn; graded by the final number.

    Reward, ``seed``, ``num_train``, ``num_heldout``: :class:`~sota_grpo.tasks.procedural.ProceduralTask`. ``max_steps``
    is the maximum number of steps of a problem; ValueError unless it is from 1 to 5.

    >>> task = ArithmeticTask(seed=0, num_train=10, num_heldout=10)
    >>> task.score(task.gold_response(task.train[3]), task.train[3]).terms
    {'correct': 1.0}
    >>> task.score("I do not know", task.train[3]).success
    False
    """

    name = "arithmetic"

    max_steps: int = 4
    system_prompt: str | None = field(default=None, init=False)  # there is none: short sequences

    def __post_init__(self) -> None:
        if not 1 <= self.max_steps <= LARGEST_NUM_STEPS:
            raise ValueError(f"max_steps={self.max_steps} must be between 1 and {LARGEST_NUM_STEPS}.")
        super().__post_init__()

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """Sample a problem of the requested split, with a uniform number of steps and then a uniform template."""
        num_steps = rng.randint(1, self.max_steps)
        template = rng.choice([t for t in TEMPLATES.values() if len(t.steps) == num_steps])
        while True:
            numbers = {name: rng.randint(low, high) for name, (low, high) in template.ranges.items()}
            worked = solve(template.steps, numbers)
            if worked is not None and is_heldout(f"{template.name}:{sorted(numbers.items())}") == heldout:
                break
        people = dict(zip("nmk", rng.sample(NAMES, 3)))
        items = dict(zip("ij", rng.sample(ITEMS, 2)))
        verbs = {"gives": rng.choice(GIVES), "buys": rng.choice(TRADES), "box": rng.choice(CONTAINERS)}
        lines = [f"{expression}={value}" for expression, value in worked]
        return Example(
            query=template.question.format(**people, **items, **verbs, **numbers),
            answer="\n".join([*lines, f"#### {worked[-1][1]}"]),
            extra={"template": template.name, "numbers": numbers, "num_steps": num_steps},
        )
