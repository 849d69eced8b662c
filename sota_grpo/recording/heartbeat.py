"""What a start is doing, until the first turn is done: a line wherever nothing else is said for some seconds.

The lines are records of the ``sota_grpo`` loggers: they go wherever the other sentences of a run go, whole lines
without control characters. ``training.log`` has the time at which each stage began, the short ones too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

EVERY_S = 6.0  # with the second between two looks, and what an import blocks all threads for, a line within 10 s
_LOOK_S = 1.0

logger = logging.getLogger(__name__)


def starting(stage: str) -> None:
    """Note that ``stage`` begins, and that the one before it is over."""
    logger.info("%s ...", stage, extra={"stage": stage, "file_only": True})


def started() -> None:
    """Note that nothing is being started any more."""
    logger.info("The first turn is done.", extra={"stage": None, "file_only": True})


class Heartbeat(logging.Handler):
    """While it is open, and something is being started: no ``every_s`` seconds without a word on the console.

    Args:
        every_s: longest silence, to within a second.
        clock: seconds, monotonic.
    """

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logging.INFO)
        self._every_s, self._clock = every_s, clock
        self._stage: str | None = None
        self._began = self._spoke = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Take note of what is said, by whomever."""
        now = self._clock()
        if hasattr(record, "stage"):
            self._stage, self._began = record.stage, now
        if not getattr(record, "file_only", False):
            self._spoke = now

    def beat(self) -> None:
        """Say what is being started and since when, if it is time to say something."""
        now, stage = self._clock(), self._stage
        if stage is not None and now - self._spoke >= self._every_s:
            logger.info("%s: %.0f s so far", stage, now - self._began)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.beat()

    def __enter__(self) -> Heartbeat:
        logging.getLogger("sota_grpo").addHandler(self)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        logging.getLogger("sota_grpo").removeHandler(self)
