"""The report of a run that is training: written at its checkpoints and at its end, and never in its way."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sota_grpo.report.page import write_report
from sota_grpo.run_record import METRICS_FILE

REPORT_FILE = "report.html"
_SHARE = 0.005  # of the run's time at most
_FIRST_S = 0.3  # what the first page is taken to cost

logger = logging.getLogger(__name__)


class TrainingReport:
    """``report.html`` in a run's directory.

    Args:
        run_dir: of the run; before its first line of metrics nothing is written.
        enabled: False writes nothing.
        write: makes the page.
        clock: seconds, monotonic.

    >>> import tempfile
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> _ = (run_dir / METRICS_FILE).write_text('{"step": 0, "reward": 0.5}\\n')
    >>> seconds = TrainingReport(run_dir).finish()
    >>> (run_dir / REPORT_FILE).is_file()
    True
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        enabled: bool = True,
        write: Callable[[Sequence[Path], Path], Any] = write_report,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._run_dir, self._enabled, self._write, self._clock = Path(run_dir), enabled, write, clock
        self._began, self._spent, self._last = clock(), 0.0, _FIRST_S

    def checkpoint(self) -> float:
        """:meth:`finish`, unless pages would then have cost more than half a percent of the time since the start."""
        due = self._spent + self._last <= _SHARE * (self._clock() - self._began)
        return self.finish() if due else 0.0

    def finish(self) -> float:
        """Write the page; the seconds that this took. A failure is a warning, and the last attempt."""
        metrics = self._run_dir / METRICS_FILE
        if not self._enabled or not metrics.is_file() or not metrics.stat().st_size:
            return 0.0
        began = self._clock()
        try:
            self._write([self._run_dir], self._run_dir / REPORT_FILE)
        except Exception as error:  # whatever is wrong with a page, it is not worth a run
            self._enabled = False
            logger.warning(
                "The report could not be written (%s: %s); training goes on, and sota-grpo report %s writes it later.",
                *(type(error).__name__, str(error).strip().split("\n")[0], self._run_dir),
            )
        self._last = self._clock() - began
        self._spent += self._last
        return self._last
