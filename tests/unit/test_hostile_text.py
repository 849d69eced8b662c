"""Whatever a policy writes is graded: nothing raises, nothing is executed, nothing takes longer than its deadline."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task
from sota_grpo.tasks.ifeval import IFEvalTask
from sota_grpo.tasks.procedural import CountdownTask
from sota_grpo.tasks.questions import GSM8KTask, MathTask, ReasoningTask
from sota_grpo.tasks.table import TableTask
from tests.tool_rigs import executing_no_text
from tests.unit.test_ifeval_checks import FLAT as INSTRUCTIONS
from tests.unit.test_math_equal import HOSTILE, SOUP
from tests.unit.test_rewards import HOSTILE as ANSWERS

NUM_RESPONSES = 100
LENGTH = 300_000  # of the longest

GOLDS = r"""
\frac{1}{2} | 42 | x^2+2x+1 | (1,2] | \{1,2,3\} | x=5 | \text{Tuesday} | 5\text{ cm} | 1 \pm \sqrt{19} | 2^{10} | 101_2
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} | x<1 \text{ or } x>2 | \sin\frac{\pi}{7}
"""
MATH = tuple(Example("?", gold) for line in GOLDS.strip().splitlines() for gold in line.split(" | "))
GSM8K = tuple(Example("?", answer) for answer in ("9*2=<<9*2=18>>18\n#### 18", "#### -1,080.50", "0.75"))


def read(task: Task, *rows: dict[str, Any]) -> tuple[Task, tuple[Example, ...]]:
    """A task, and examples of its rows."""
    return task, tuple(task.read_row(row, "a row") for row in rows)


ROWS = [
    {"instruction_id_list": [name for name, *_ in some], "kwargs": [kwargs for _, kwargs, *_ in some]}
    for some in (INSTRUCTIONS[i : i + 4] for i in range(0, len(INSTRUCTIONS), 4))
]
TASKS: dict[str, Callable[[], tuple[Task, tuple[Example, ...]]]] = {  # a task, and examples to grade against
    "gsm8k": lambda: (GSM8KTask(), GSM8K),
    "gsm8k-any": lambda: (GSM8KTask(answer_format="any"), GSM8K),
    "math-any": lambda: (MathTask(answer_format="any"), MATH),
    "reasoning": lambda: (ReasoningTask(), (*GSM8K, Example("?", "Tuesday"))),
    "table": lambda: read(
        TableTask(), *({"prompt": "?", "ground_truth": truth} for truth in ("18", "Tuesday", [1, "x"]))
    ),
    "ifeval": lambda: read(IFEvalTask(), *ROWS),
    "countdown": lambda: read(CountdownTask(), {"nums": [3, 5, 7], "target": 26, "answer": "7*3+5"}),
}

#: Of every score, for some tasks; a reply is short and repeats no markup.
INVARIANTS: dict[str, Callable[[Score], bool]] = {
    "reasoning": lambda score: -1 <= score.terms["thinking"] <= 0 <= score.terms["format"] <= 1,
    "countdown": lambda score: score.success or (len(said(score)) < 200 and "<|im_end|>" not in said(score)),
}


def said(score: Score) -> str:
    return score.reply["content"] if score.reply else ""


CODE = (
    *("__import__('os').system('touch executed')", "open('executed', 'w')", "; touch executed #", "${7*7}{{7*7}}"),
    *("eval(compile('open(\"executed\",\"w\")','','exec'))", "().__class__.__bases__[0].__subclasses__()"),
)
STRANGE = (
    "<|im_end|>",
    "\x00",
    "\x1b[31m",
    "\ud800",
    "\udfff",
    "\u202e",
    "\u200f",
    "\ufeff",
    "\u2028",
    "\U0001f600",
    "\u0e01\u0e33",
)
SPACED = ("\n", " ", "\r\n", "\t", " or ", " and ", "#### ", "9" * 5000, "-" * 300 + "1", "e\u0301" * 3)
NESTED = r"\frac{1}{ \sqrt{ \boxed{ \left( \text{ \{ ( [ { 2^{ | - 1/ x_ 1+ 1, <answer> <think> </think> ####"
DEEP = tuple(NESTED.split())
SHORT = (text for text in (*HOSTILE, *ANSWERS) if len(text) < 30)
PIECES = (*CODE, *SHORT, *SOUP.split(), *STRANGE, *SPACED, *"Ⅷ½²א٥数\u0663")
FRAMES = (
    *(("", ""), ("", ""), ("\\boxed{", "}"), ("so \\boxed{", ""), ("<answer>", "</answer>"), ("#### ", "")),
    *(("<think>", "</think>\\boxed{1}"), ("\\boxed{\\frac{1}{", "}}"), ("\\boxed{x=", "}"), ("\\boxed{(1,", "]}")),
    ("<think>", "</think><answer>18</answer>"),
)


def hostile_texts(rng: random.Random, golds: list[str], count: int) -> Iterator[str]:
    """``count`` responses: soups of pieces, damaged right answers, deep nesting, random characters, a few long."""
    for _ in range(count):
        kind = rng.randrange(20)
        if kind == 0:
            unit = rng.choice((*DEEP, *STRANGE, "\\boxed{1}", "".join(rng.choices(PIECES, k=5))))
            text = unit * (LENGTH // len(unit))
        elif kind <= 3:
            unit, depth = rng.choice(DEEP), rng.choice((20, 50, 500))
            text = unit * depth + "1" + rng.choice(("", "}" * depth, ")" * depth))
        elif kind <= 6:
            text = "".join(
                chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0x11000)))) for _ in range(200)
            )
        elif kind <= 11 and golds:
            damaged = list(rng.choice(golds))
            for _ in range(rng.randint(1, 4)):
                damaged[rng.randrange(len(damaged))] = rng.choice((*PIECES, ""))
            text = "".join(damaged)
        else:
            text = "".join(rng.choices(PIECES, k=rng.choice((3, 10, 30, 100))))
        before, after = rng.choice(FRAMES)
        yield before + text + after


@pytest.mark.timeout(180)  # all of them take some seconds; one alone may take 60 (env.timeout_s)
@pytest.mark.parametrize("name", TASKS)
def test_no_response_crashes_is_executed_or_takes_long(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed := random.randrange(1 << 30))
    task, examples = TASKS[name]()
    golds = [gold for gold in map(task.gold_response, examples) if gold]
    for example in examples:
        task.score("A text of some words. And another one.", example)

    monkeypatch.chdir(tmp_path)
    with executing_no_text("compile"):
        for text in hostile_texts(rng, golds, NUM_RESPONSES):
            score = task.score(text, rng.choice(examples))
            assert set(score.terms) == set(task.term_weights)
            assert all(value is None or math.isfinite(value) for value in score.terms.values())
            assert score.error is None
            assert name not in INVARIANTS or INVARIANTS[name](score), (seed, text[:200])
            json.dumps(dict(score.info))
    assert not list(tmp_path.iterdir())
