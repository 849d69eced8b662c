"""Graders with moods, in a module of their own because a worker process imports them (so: nothing heavy here)."""

from __future__ import annotations

import os
import signal
import time

from sota_grpo.records import Example, Score

WEIGHTS = {"right": 1.0, "length": -0.01}
DEADLY = ("hang", "exit", "crash")


def moody(response: str, example: Example) -> Score:
    """What the first word of the response says happens; otherwise two terms of odd values."""
    mood = response.partition(" ")[0]
    if mood == "hang":
        time.sleep(3600)
    if mood == "exit":
        os._exit(0)
    if mood == "crash":
        signal.raise_signal(signal.SIGSEGV)
    return tame(response, example)


def tame(response: str, example: Example) -> Score:
    """As :func:`moody`, but it raises where that one takes its process down."""
    mood, _, rest = response.partition(" ")
    if mood in DEADLY:
        raise RuntimeError("not in this process")
    if mood == "slow":
        time.sleep(float(rest))
    if mood == "quit":
        raise SystemExit(rest)
    if mood == "nan":
        return Score({"right": float("nan"), "length": 0.0}, False)
    right = rest == example.answer
    return Score({"right": float(right) / 3, "length": len(response) / 7}, right)


def misnamed(response: str, example: Example) -> Score:
    """A grader whose terms are not those of ``WEIGHTS``."""
    return Score({"wrong": 1.0}, True)
