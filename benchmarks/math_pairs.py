"""How often two judges of mathematical answers are right on the pairs of the tests, and how long they take.

``python -m benchmarks.math_pairs`` prints ours and that of Math-Verify, with the delimiters that it needs. The pairs
were collected with ours at hand, so only the other column says how hard they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module

from sota_grpo.rewards.maths import math_equal

KINDS = ("numbers", "expressions", "collections", "relations", "words")
Judge = Callable[[str, str], bool]


def pairs() -> list[tuple[str, str, bool]]:
    """Gold, answer, and whether they are equal."""
    found = []
    for kind in KINDS:
        for row in import_module(f"tests.unit.test_math_{kind}").TABLE.strip().splitlines():
            equal = " <=> " in row
            gold, answer = row.split(" <=> " if equal else " <!> ")
            found.append((gold, answer, equal))
    return found


def math_verify() -> Judge:
    """Math-Verify with its default extraction and without timeouts, which only a main thread can have."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    read = partial(parse, parsing_timeout=None)
    return lambda gold, answer: bool(verify(read(f"${gold}$"), read(f"${answer}$"), timeout_seconds=None))


def main() -> None:
    table = pairs()
    print(f"{len(table)} pairs, {sum(equal for *_, equal in table)} equal")
    for name, judge in {"ours": math_equal, "Math-Verify": math_verify()}.items():
        judge("1", "2")  # imports
        right, slowest, began = 0, 0.0, time.perf_counter()
        for gold, answer, equal in table:
            before = time.perf_counter()
            right += judge(gold, answer) is equal
            slowest = max(slowest, time.perf_counter() - before)
        total = time.perf_counter() - began
        print(f"{name:<12} right {right} ({right / len(table):.1%}), {total:.2f} s in all, slowest {slowest:.3f} s")


if __name__ == "__main__":
    main()
