"""No process outlives the one that it belongs to, however that one ended.

Standard library only, and nothing of ours: what watches is this file, run alone, and does not load torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

LAUNCHER_SAYS = "[launcher] server process "
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # between fork and exec nothing may be loaded
_LOOK_EVERY_S = 0.2
_GRACE_S = 5.0


def die_with_parent() -> None:
    """Linux: have the kernel kill this process (SIGKILL) when the thread ends that started it."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group_with(parent: int) -> None:
    """End with the process ``parent``, which started this one, whatever this one is at; so does its process group."""
    die_with_parent()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_EVERY_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def guard(pids: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """Start a process that sends SIGKILL to ``pids`` once this one is gone; None elsewhere than on Linux.

    It is meant for processes that a killed parent leaves behind. Whoever has ended them himself kills the guard.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    command = [sys.executable, "-I", "-S", __file__, "--guard", str(os.getpid()), *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def launcher(scratch: Path) -> list[str]:
    """What stands before a server's command, so that no process of it outlives this one.

    The launcher is to lead a process group. It runs the server until that ends, SIGTERM comes, or this process is gone,
    even by SIGKILL. Whichever it is: the server is asked to end and given 5 seconds, the folder ``scratch`` is deleted,
    and the whole group, the launcher included, is killed. It prints how the server ended, after ``LAUNCHER_SAYS``.
    """
    return [sys.executable, "-I", __file__, "--launch", str(os.getpid()), str(scratch)]


def ending(code: int) -> str:
    """How a process ended, in words.

    >>> ending(3), ending(-11)
    ('ended with exit code 3', 'was ended by SIGSEGV')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    hint = "; the kernel sends it when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


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


def _guard(watched: int, *pids: int) -> None:
    """Wait for the end of ``watched``, then end the others."""
    others = _handles(pids)
    for handle in _handles([watched]):
        select.select([handle], [], [])
    for handle in others:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)


def _handles(pids: Iterable[int]) -> list[int]:
    """Descriptors, which still mean the same processes when the pids mean others."""
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def _launch(parent: int, scratch: str, *command: str) -> None:
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    while server.poll() is None and not asked_to_end and os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    if server.returncode is not None:
        what = ending(server.returncode)
    else:
        what = "asked to end" if asked_to_end else f"process {parent} is gone"
    print(f"\n{LAUNCHER_SAYS}{server.pid}: {what}", flush=True)
    if server.returncode is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "--guard":
        _guard(*map(int, rest))
    else:
        _launch(int(rest[0]), *rest[1:])
