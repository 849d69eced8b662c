"""Processes as the system sees them: to kill, to stop, to prove that none is left; waiting until something holds."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from sota_grpo.workers.fleet import Fleet


def below(root: int) -> dict[int, str]:
    """Command lines of all descendants of ``root`` that are no zombies."""
    actual = {}
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(root).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended
                actual[process.pid] = " ".join(process.cmdline())
    return actual


def workers(root: int) -> dict[int, str]:
    """The worker processes of the run ``root``: Ray's actors, and what the process launcher started."""
    return {
        pid: text
        for pid, text in below(root).items()
        if text.startswith(("ray::rollout", "ray::reference", "ray::learner")) or "serve_child" in text
    }


def members(group: int) -> list[int]:
    """Living processes of a process group."""
    actual = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError):
            if os.getpgid(pid) == group and not is_gone(pid):
                actual.append(pid)
    return actual


def newest(fleet: Fleet) -> list[Any]:
    """The newest worker of each slot that has one, starting and retired ones too."""
    return [slot.worker for slot in fleet._slots if slot.worker is not None]


def wait_for(condition: Callable[[], object], within_s: float = 500.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"this did not happen in {within_s:g} s"
        time.sleep(0.001)  # what is waited for may be a moment to act at


def is_gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def hit(pid: int, number: int) -> bool:
    """Send a signal; False when the process had gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def require_gone(pids: set[int], within_s: float = 60.0) -> None:
    """Fail unless every process is gone (or another program has its number) after so many seconds."""
    left = [process for process in psutil.process_iter() if process.pid in pids]
    limit = time.monotonic() + within_s
    while left := [each for each in left if each.is_running() and not is_gone(each.pid)]:
        if time.monotonic() > limit:
            break
        time.sleep(0.2)
    said = [each.as_dict(["pid", "cmdline"]) for each in left]
    for each in left:
        hit(each.pid, signal.SIGKILL)
    assert not left, f"left behind: {said}"
