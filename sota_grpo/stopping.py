"""Ctrl-C and SIGTERM: the turn at hand is finished, its state saved, then the program ends."""

from __future__ import annotations

import logging
import signal
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)


class StopRequest:
    """A context in which the first SIGINT or SIGTERM only sets :attr:`asked`; a second one interrupts at once.

    >>> with StopRequest() as stop:
    ...     stop.asked
    False
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        logger.warning("%s: stopping after this turn; once more stops at once.", signal.Signals(number).name)
