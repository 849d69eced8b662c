"""The processes below a run, as the system sees them: to kill, to stop, and to prove that none is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def _stat(pid: int) -> tuple[int, str, str, int] | None:
    """Parent, state, command line and moment of its start; None when the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1]), fields[0], text, int(fields[19])


def table() -> dict[int, tuple[int, str, str, int]]:
    """Every process of this machine that is not a zombie."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: row for pid in pids if (row := _stat(pid)) is not None and row[1] != "Z"}


def below(root: int) -> dict[int, str]:
    """Command lines of all descendants of ``root``."""
    children: dict[int, list[int]] = {}
    rows = table()
    for pid, (parent, *_) in rows.items():
        children.setdefault(parent, []).append(pid)
    actual, frontier = dict[int, str](), [root]
    while frontier:
        for pid in set(children.get(frontier.pop(), [])) - set(actual):
            actual[pid] = rows[pid][2]
            frontier.append(pid)
    return actual


def workers(root: int) -> dict[int, str]:
    """The worker processes of the run ``root``: Ray's actors, and what the process launcher started."""
    return {
        pid: text
        for pid, text in below(root).items()
        if text.startswith(("ray::rollout", "ray::reference", "ray::learner")) or "serve_child" in text
    }


def hit(pid: int, number: int) -> bool:
    """Send a signal; False when the process had gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def require_gone(pids: set[int], within_s: float = 60.0) -> None:
    """Fail unless every process is gone (or another program has its number) after so many seconds."""
    left = {pid: row for pid, row in table().items() if pid in pids}
    limit = time.monotonic() + within_s
    while left and time.monotonic() < limit:
        time.sleep(0.2)
        now = table()
        left = {pid: row for pid, row in left.items() if pid in now and now[pid][3] == row[3]}  # texts may change
    for pid in left:
        hit(pid, signal.SIGKILL)
    assert not left, f"left behind: { {pid: row[2] for pid, row in left.items()} }"
