"""Graders with moods, in a module of their own because a worker process imports them (so: nothing heavy here)."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from sota_grpo.rl.records import Example, Score

WEIGHTS = {"right": 1.0, "length": -0.01}
DEADLY = ("hang", "spin", "exit", "crash", "shot")


def _fork_away(name: str) -> None:
    """Leave a process behind, in a session of its own and without a parent, whose id is written to a file."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return
    os.setsid()
    if os.fork() == 0:
        with open(f"{name}.part", "w") as file:
            file.write(str(os.getpid()))
        os.rename(f"{name}.part", name)
        time.sleep(3600)
    os._exit(0)


def _fill_the_memory(_: str) -> None:
    size_mb = int(re.findall(r"VmSize:\s+(\d+)", open("/proc/self/status").read())[0]) // 1024  # noqa: SIM115
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, ((size_mb + 100) << 20, hard))
    taken = []
    try:
        while True:
            taken.append(bytearray(1 << 20))
    finally:
        taken.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


MOODS: dict[str, Callable[[str], object]] = {  # what the first word of a response does to the grader's process
    "hang": lambda _: time.sleep(3600),
    "spin": lambda _: re.match(r"(a+)+$", "a" * 64 + "b"),  # with the interpreter locked: no other thread runs
    "exit": lambda _: os._exit(0),
    "crash": lambda _: signal.raise_signal(signal.SIGSEGV),
    "shot": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "memory": _fill_the_memory,
    "away": _fork_away,
    "flood": lambda _: print("\x1b[2J" + "x" * 997, *["y" * 999] * 1000, sep="\n", flush=True),
}


def moody(response: str, example: Example) -> Score:
    """What the first word of the response says happens; otherwise two terms of odd values."""
    mood, _, rest = response.partition(" ")
    MOODS.get(mood, str)(rest)
    return tame(response, example)


def tame(response: str, example: Example) -> Score:
    """As :func:`moody`, but it raises where that one takes its process down."""
    mood, _, rest = response.partition(" ")
    if mood in DEADLY:
        raise (TimeoutError if mood in ("hang", "spin") else RuntimeError)("not in this process")
    if mood == "slow":
        time.sleep(float(rest))
    if mood == "interrupt":
        raise KeyboardInterrupt
    if mood == "quit":
        raise SystemExit(rest)
    if mood == "nan":
        return Score({"right": float("nan"), "length": 0.0}, False)
    right = rest == example.answer
    return Score({"right": float(right) / 3, "length": len(response) / 7}, right)


def misnamed(response: str, example: Example) -> Score:
    """A grader whose terms are not those of ``WEIGHTS``."""
    return Score({"wrong": 1.0}, True)


class Together:
    """A grader of whole groups: ``right`` says how many of the group are shorter."""

    def __call__(self, response: str, example: Example) -> Score:
        return self.score_group([(response, example)])[0]

    def score_group(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        for response, example in pairs:
            if response.partition(" ")[0] in DEADLY:
                moody(response, example)
        lengths = [len(response) for response, _ in pairs]
        return [Score({"right": sum(map(length.__gt__, lengths)), "length": length}, False) for length in lengths]


class Unloadable:
    """A grader that no other process can load."""

    def __call__(self, response: str, example: Example) -> Score:
        return tame(response, example)

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, ()


def _refuse() -> NoReturn:
    raise ImportError("a package that is missing here")
