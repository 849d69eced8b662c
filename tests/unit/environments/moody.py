"""An environment that does to its process whatever a tool can do, and tools without one."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sqlite3
import sys
import time
from typing import Any

DATABASE = sqlite3.connect(":memory:")  # belongs to the thread that runs this file
print("moody.py was run")


class Odd:
    def __str__(self) -> str:
        raise ValueError("no picture of me")


class Rude(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no word from me")


class Moody:
    def reset(self, start: int = 0, mood: str = "", reward: Any = 0) -> Any:
        self.total, self.reward = start, reward
        return do(mood) if mood else None

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: What is added.
        """
        self.total += number
        DATABASE.execute("select 1")
        return self.total

    def act(self, mood: str) -> Any:
        """Do something.

        Args:
            mood: What.
        """
        return do(mood)

    async def later(self, number: int) -> int:
        """Give a number back, later.

        Args:
            number: Any.
        """
        await asyncio.sleep(0.01)
        self.task = getattr(self, "task", None) or asyncio.ensure_future(asyncio.sleep(3600))
        assert self.task.get_loop() is asyncio.get_running_loop()
        if number < 0:
            sys.exit(number)
        return number

    def get_reward(self) -> Any:
        return do(self.reward) if isinstance(self.reward, str) else self.reward if self.reward is None else self.total

    def _private(self) -> None: ...


def do(mood: str) -> Any:
    """Do it.

    Args:
        mood: What.
    """
    word, _, rest = mood.partition(" ")
    return MOODS[word](rest) if word in MOODS else mood


def _raise(error: BaseException) -> Any:
    raise error


def _spin(_: str) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # with the interpreter locked


def _deaf(_: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(3600)


def _away(rest: str) -> str:
    """Leave a process behind, in a session of its own, without a parent, and holding all files."""
    name, _, then = rest.partition(" ")
    first = os.fork()
    if first == 0:
        os.setsid()
        if os.fork() == 0:
            with open(f"{name}.part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{name}.part", name)
            _deaf("")
        os._exit(0)
    os.waitpid(first, 0)
    while not os.path.exists(name):
        time.sleep(0.01)
    return do(then)


def _flood(_: str) -> None:
    while True:
        print("\x1b[2J" + "x" * 100_000)


def _forge(text: str) -> str:
    """Answer in place of the process, on whatever is a socket."""
    for file in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                os.write(int(file), text.encode("latin1"))
        except OSError:
            continue
    return "forged"


def _cycle(_: str) -> list:
    cycle: list = [1]
    cycle.append(cycle)
    return cycle


def _deep(_: str) -> list:
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    return deep


MOODS = {
    "hang": lambda _: time.sleep(3600),
    "spin": _spin,
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda code: os._exit(int(code or 0)),
    "fault": lambda _: signal.raise_signal(signal.SIGSEGV),
    "deaf": _deaf,
    "away": _away,
    "flood": _flood,
    "forge": _forge,
    "shut": lambda _: os.closerange(3, 1 << 16),  # a process with many open files has its pipes above 100
    "raise": lambda text: _raise(ValueError(text)),
    "leave": lambda text: _raise(SystemExit(text)),
    "rude": lambda _: _raise(Rude()),
    "long": lambda count: "é" * int(count),
    "cycle": _cycle,
    "deep": _deep,
    "odd": lambda _: Odd(),
    "bytes": lambda _: b"\xff",
    "nan": lambda _: float("nan"),
    "list": lambda _: [1, {"a": None}],
    "half": lambda _: "\ud800",
    "none": lambda _: None,
    "pid": lambda _: os.getpid(),
    "random": lambda _: random.random(),
}
