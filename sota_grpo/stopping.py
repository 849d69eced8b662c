"""On Ctrl-C, SIGTERM or SIGHUP, finish the current training step, save, and exit."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)

_LAST_S = 5.0  # to close the workers before the process exits; remaining workers end with it


def interrupt_once() -> None:
    """Let only the first Ctrl-C raise KeyboardInterrupt, so that further ones do not interrupt the cleanup.

    A Ctrl-C more than 5 seconds after the first ends the process at once with exit code 130. No-op if SIGINT is ignored
    or has a handler other than Python's own; else ValueError outside the main thread.
    """
    began: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        began.append(time.monotonic())
        if len(began) == 1:
            raise KeyboardInterrupt
        if began[-1] - began[0] > _LAST_S:
            os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, or handled
        signal.signal(signal.SIGINT, handle)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # handlers are gone after this


class Interrupted(Exception):
    """A stop was requested while the run waited for a batch; the state can be saved as it is."""


class StopRequest:
    """A context manager: the first SIGINT, SIGTERM or SIGHUP sets :attr:`requested`.

    A further SIGINT or SIGTERM raises KeyboardInterrupt; a further SIGHUP has no effect, because a closed terminal may
    send two. Under ``nohup`` SIGHUP has none at all. A preempted node sends SIGTERM and later SIGKILL. So a step that
    takes more than ``grace_s`` seconds (None: no limit) after SIGTERM or SIGHUP is interrupted as by a second signal;
    if that has no effect for 5 seconds, the process exits with code 143. No-op outside the main thread.

    >>> with StopRequest() as stop:
    ...     stop.requested
    False
    """

    def __init__(self, grace_s: float | None = None) -> None:
        self.requested = False
        self._grace_s = grace_s
        self._timers: list[threading.Timer] = []
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]  # None: set by C code
        self.step_is_over()

    def step_is_over(self) -> None:
        """Cancel the timers of ``grace_s`` and of the exit after it, so that they cannot interrupt the checkpoint."""
        for timer in self._timers:
            timer.cancel()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGHUP:
            return
        if self.requested:
            interrupt = self._before[signal.SIGINT]
            (interrupt if callable(interrupt) else signal.default_int_handler)(number, frame)
            return
        self.requested = True
        logger.warning(
            "%s: stopping after this step; a second SIGINT or SIGTERM stops at once.", signal.Signals(number).name
        )
        if number != signal.SIGINT and self._grace_s is not None:
            self._after(self._grace_s, self._interrupt)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _interrupt(self) -> None:
        logger.warning(
            "The step did not end within train.grace_s=%g s after the signal; it is interrupted.", self._grace_s
        )
        self._after(_LAST_S, lambda: os._exit(128 + signal.SIGTERM))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # reaches a blocking call too
