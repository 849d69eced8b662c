"""How long a worker may take to start: as long as it works at it. What it says from its process, and who judges it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sota_grpo.orphans import descendants

IDLE_METHOD = "__idle_s__"  # answered by every host, at once, while its servant is being constructed too
_SILENCES = 12  # a start that never falls silent is given up after so many times the longest silence
_BUSY = 0.05  # share of one core, below which a process waits (an idle Ray actor takes 0.01)
_MOVED = 1 << 20  # bytes read and written in a second, above which it loads
_SHORTEST_LOOK_S = 0.05
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class Activity:
    """Whether this process and those that it has started do something: compute, read or write.

    Loading a model, compiling it and capturing graphs are calls into other libraries, most of which say nothing for
    minutes; but none of them does nothing. What waits for a lock, for the network or for another rank does nothing, and
    so does what hangs; a thread that waits by spinning looks busy. Elsewhere than on Linux only the processor time of
    this process is seen.

    >>> activity = Activity()
    >>> activity.idle_s()
    0.0
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy_at = self._looked_at = time.monotonic()
        self._seen: dict[int, tuple[float, int]] | None = None

    def idle_s(self) -> float:
        """Seconds since the look at which it was last busy, compared with the look before; 0 at the first."""
        with self._lock:
            now = time.monotonic()
            elapsed_s = now - self._looked_at
            if self._seen is None:
                self._seen, self._busy_at, self._looked_at = _used(), now, now
            elif elapsed_s >= _SHORTEST_LOOK_S:
                used = _used()
                before = [self._seen.get(pid, (0.0, 0)) for pid in used]
                cpu_s = sum(max(0.0, cpu - old) for (cpu, _), (old, _) in zip(used.values(), before))
                moved = sum(max(0, count - old) for (_, count), (_, old) in zip(used.values(), before))
                if cpu_s >= _BUSY * elapsed_s or moved >= _MOVED * elapsed_s:
                    self._busy_at = now
                self._seen, self._looked_at = used, now
            return now - self._busy_at


def _used() -> dict[int, tuple[float, int]]:
    """Processor seconds, and bytes read and written, by process."""
    own = os.getpid()
    found = {pid: (_cpu_s(pid), _moved(pid)) for pid in descendants(own)}
    return found | {own: (time.process_time(), _moved(own))}


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S  # utime and stime


def _moved(pid: int) -> int:
    """By read and write calls, and from storage into mapped files."""
    try:
        lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except OSError:  # it has ended, or there is no /proc
        return 0
    return sum(int(lines[name]) for name in ("rchar", "wchar", "read_bytes"))


@dataclass
class Start:
    """One worker's start, as its owner sees it; times are of one clock of the owner's.

    Args:
        limit_s: longest silence.
        began_s: when it was started.
    """

    limit_s: float
    began_s: float
    is_asked: bool = False

    def __post_init__(self) -> None:
        self.heard_s = self.worked_s = self.began_s

    def answered(self, idle_s: float, now_s: float) -> None:
        """It has answered ``IDLE_METHOD``."""
        self.is_asked, self.heard_s, self.worked_s = False, now_s, max(self.worked_s, now_s - idle_s)

    def verdict(self, now_s: float, beside: Iterable[Start]) -> str | None:
        """Why it is to be given up; None where it is to be waited for.

        Args:
            now_s: on the owner's clock.
            beside: all that start with it. One may wait for another (who downloads, who comes last to a meeting): while
                one of them works, none is silent.

        >>> start, other = Start(10.0, began_s=0.0), Start(10.0, began_s=0.0)
        >>> other.answered(idle_s=0.0, now_s=9.0)
        >>> start.answered(idle_s=9.0, now_s=9.0)
        >>> start.verdict(12.0, [start, other])
        >>> start.answered(idle_s=15.0, now_s=15.0), start.verdict(19.5, [start, other])
        (None, 'it did nothing for 10 s while it was being started')
        >>> other.verdict(19.5, [start, other])
        'it has not answered for 10 s while it was being started'
        >>> start.answered(idle_s=0.0, now_s=120.0), start.verdict(120.0, [start])
        (None, 'it was not ready after 120 s')
        """
        if now_s - self.heard_s >= self.limit_s:
            return f"it has not answered for {self.limit_s:g} s while it was being started"
        if now_s - max((start.worked_s for start in beside), default=self.worked_s) >= self.limit_s:
            return f"it did nothing for {self.limit_s:g} s while it was being started"
        if now_s - self.began_s >= _SILENCES * self.limit_s:
            return f"it was not ready after {_SILENCES * self.limit_s:g} s"
        return None
