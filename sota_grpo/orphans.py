"""End processes when the process that started them ends. Standard library only: watchers execute this file alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
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
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded now: not allowed between fork and exec
_LOOK_EVERY_S = 0.2
_GRACE_S = 5.0


def die_with_parent() -> None:
    """Linux: have the kernel kill this process (SIGKILL) when the thread that started it ends."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Linux: make this process a subreaper, the parent of descendants whose own parents have ended."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the process ids of this process's children, adopted ones included; elsewhere than on Linux []."""
    pids: list[int] = []
    for of_thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            pids += map(int, of_thread.read_text().split())
    return pids


def end_group_with(owner: int) -> None:
    """Start a thread that kills the process group of this process (SIGKILL) when the process ``owner`` ends.

    Linux: the thread kills 5 s after ``owner`` ends, so that a subreaper acts first; also :func:`die_with_parent` is
    called. Elsewhere ``owner`` must be the parent.
    """
    die_with_parent()

    def watch() -> None:
        if hasattr(os, "pidfd_open"):
            for handle in _handles([owner]):
                select.select([handle], [], [])
            time.sleep(_GRACE_S)  # the subreaper ends more than the group, this process first
        else:
            while os.getppid() == owner:
                time.sleep(_LOOK_EVERY_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def fork_under_subreaper() -> None:
    """Linux: fork, return in the child only, and make the calling process the child's subreaper; elsewhere a no-op.

    The subreaper adopts descendants of the child whose parents end, also in other sessions. When the child ends, the
    subreaper kills them all and exits with the child's exit code or signal. After SIGTERM, or when the thread that
    started the subreaper ends, it kills the child too. Both ignore SIGINT. The calling process must have one thread.
    """
    if _LIBC is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Waited for, not handled: SIGTERM comes once for each thread of an ending parent, and a handler that raises could
    # run a second time, outside of what catches it.
    signals = signal.SIGTERM, signal.SIGCHLD
    for number in signals:
        signal.signal(number, signal.SIG_DFL)  # Linux sends no SIGCHLD that the parent had ignored
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    adopt_orphans()
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the child has them
    code: int | None = None
    while code is None:
        if signal.sigwait(signals) == signal.SIGTERM:
            code = -signal.SIGTERM
        while code is None:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                code = os.waitstatus_to_exitcode(status)
            if not ended:
                break
    _end_descendants()
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # of SIGKILL
        signal.signal(-code, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    os.kill(os.getpid(), -code)


def _end_descendants() -> None:
    """Kill and reap all children of this subreaper, including those that it adopts during that."""
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(OSError):  # ChildProcessError: there are none any more
        while time.monotonic() < deadline:
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)


def guard(pids: Iterable[int]) -> subprocess.Popen[bytes] | None:
    """Linux: start and return a process that kills ``pids`` (SIGKILL) when this process has ended; elsewhere None.

    A caller that ends these processes itself must kill the guard, which otherwise stays as long as this process.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    command = [sys.executable, "-I", "-S", __file__, "--guard", str(os.getpid()), *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


def launcher(scratch: Path) -> list[str]:
    """Return a command prefix that runs a server's command and ends all its processes when this process ends.

    This process must start the launcher as leader of a process group. When the server ends, SIGTERM comes, or this
    process ends, even by SIGKILL, the launcher prints which of these it was, after ``LAUNCHER_SAYS``. Then it sends
    SIGTERM to the server, waits up to 5 seconds, deletes the folder ``scratch``, and kills its process group.
    """
    return [sys.executable, "-I", __file__, "--launch", str(os.getpid()), str(scratch)]


def ending(code: int) -> str:
    """Return in words how a process ended; ``code`` is negative for a signal.

    >>> ending(3), ending(-11)
    ('ended with exit code 3', 'was ended by SIGSEGV')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    hint = "; the kernel sends it when memory runs out" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


def _handles(pids: Iterable[int]) -> list[int]:
    """Return pidfds of the running processes among ``pids``; a pidfd stays valid when its pid is reused."""
    handles = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handles.append(os.pidfd_open(pid))
    return handles


def _launch(parent: int, scratch: str, *command: str) -> None:
    signalled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: signalled.append(number))
    adopt_orphans()
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    while server.poll() is None and not signalled and os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    if server.returncode is not None:
        what = ending(server.returncode)
    else:
        what = "asked to end" if signalled else f"process {parent} is gone"
    print(f"\n{LAUNCHER_SAYS}{server.pid}: {what}", flush=True)
    if server.returncode is None:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_GRACE_S)
    _end_descendants()
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "--guard":  # wait for the end of the first, then end the others
        watched, *others = map(int, rest)
        others = _handles(others)
        for handle in _handles([watched]):
            select.select([handle], [], [])
        for handle in others:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
    else:
        _launch(int(rest[0]), *rest[1:])
