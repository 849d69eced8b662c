"""Who is alive in a process group, and waiting for something to become true."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sota_grpo.workers.fleet import Fleet


def children(pid: int) -> list[int]:
    """What the main thread of a process has started and not reaped."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def members(group: int) -> list[int]:
    """Living processes of a process group, from /proc."""
    actual = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, process_group = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(process_group) == group and state != "Z":
                actual.append(int(entry.name))
    return sorted(actual)


def newest(fleet: Fleet) -> list[Any]:
    """The newest worker of each slot that has one, starting and retired ones too."""
    return [slot.worker for slot in fleet._slots if slot.worker is not None]


def wait_for(condition: Callable[[], object], within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"this did not happen in {within_s:g} s"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
