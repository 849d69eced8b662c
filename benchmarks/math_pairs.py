"""How often two judges of mathematical answers are right on three sets of pairs, and how long they take.

``python -m benchmarks.math_pairs`` prints ours and that of Math-Verify, with the delimiters that it needs, over pairs
of answers, responses with boxes, and responses in sentences (``math_pairs.txt``). The pairs were collected with ours at
hand, so only the other column says how hard they are; the responses were written before either had read them.
``--wrong`` adds the rows that are judged wrong.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sota_grpo.rewards.maths import math_equal
from sota_grpo.rl.records import Example
from sota_grpo.tasks.questions import MathTask

PAIRS = Path(__file__).with_suffix(".txt")
Judge = Callable[[str, str], bool]
Row = tuple[str, str, bool]


def tables() -> dict[str, list[Row]]:
    """By set: gold, answer or response, and whether they are equal."""
    measured: dict[str, list[Row]] = {}
    rows: list[Row] = []
    for line in PAIRS.read_text().splitlines():
        if row := re.fullmatch("(.*) <([=!])> (.*)", line):
            rows.append((row[1], row[3].replace("⏎", "\n"), row[2] == "="))
        elif line.startswith("["):
            rows = measured[line.strip("[]")] = []
    return measured


def math_verify(*, bare: bool) -> Judge:
    """Math-Verify with its default extraction and without timeouts, which only a main thread can have."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    read = partial(parse, parsing_timeout=None)
    form = "${}$" if bare else "{}"
    return lambda gold, text: bool(verify(read(f"${gold}$"), read(form.format(text)), timeout_seconds=None))


def responses(answer_format: str) -> Judge:
    """The task's own reward of a whole response."""
    task = MathTask(answer_format=answer_format)
    return lambda gold, response: task.score(response, Example("?", gold)).success


def measure(name: str, judge: Judge, table: list[Row], *, show: bool) -> None:
    """Print one line for a judge, and with ``show`` the rows in which it is wrong."""
    judge("1", "2")  # imports
    wrong, slowest, began = [], 0.0, time.perf_counter()
    for gold, text, equal in table:
        before = time.perf_counter()
        if judge(gold, text) is not equal:
            wrong.append(f"  {gold} {'<=>' if equal else '<!>'} {text!r}")
        slowest = max(slowest, time.perf_counter() - before)
    total, right = time.perf_counter() - began, len(table) - len(wrong)
    print(f"  {name:<12} right {right} ({right / len(table):.1%}), {total:.2f} s in all, slowest {slowest:.3f} s")
    print("\n".join(wrong) + "\n" * bool(wrong) if show else "", end="")


def main() -> None:
    judges = {"pairs": math_equal, "boxed responses": responses("boxed"), "answers in sentences": responses("any")}
    for kind, table in tables().items():
        print(f"{len(table)} {kind}, {sum(equal for *_, equal in table)} equal")
        for name, judge in {"ours": judges[kind], "Math-Verify": math_verify(bare=kind == "pairs")}.items():
            measure(name, judge, table, show="--wrong" in sys.argv)


if __name__ == "__main__":
    main()
