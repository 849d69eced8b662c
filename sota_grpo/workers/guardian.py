"""Ends processes after another one has ended, however that happened; runs alone, on the standard library only."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def guard(pids: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """Start a process that sends SIGKILL to ``pids`` once this one is gone; None elsewhere than on Linux.

    It is meant for processes that a killed parent leaves behind. Whoever has ended them himself kills the guardian.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def descendants(pid: int) -> set[int]:
    """The children of a process, theirs, and so on, as far as ``/proc`` shows them.

    >>> os.getpid() in descendants(os.getppid()) or not Path("/proc").exists()
    True
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended while we looked
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    left = [pid]
    while left:
        new = children.get(left.pop(), [])
        found.update(new)
        left += new
    return found


def _handles(pids: Iterable[int]) -> list[int]:
    """Descriptors, which still mean the same processes when the pids mean others."""
    found = []
    for pid in pids:
        try:
            found.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
    return found


def main(watched: int, *pids: int) -> None:
    """Wait for the end of ``watched``, then end the others."""
    others = _handles(pids)
    for handle in _handles([watched]):
        select.select([handle], [], [])
    for handle in others:
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
