"""Ctrl-C, SIGTERM and SIGHUP: the training step at hand is finished, its state saved, then the program ends."""

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

_LAST_S = 5.0  # for closing workers, before the process ends itself; theirs end when it is gone


def interrupt_once() -> None:
    """Of several Ctrl-C the first raises KeyboardInterrupt; the next ones do not disturb what is being closed then.

    One that comes 5 seconds later ends the process at once, with exit code 130: its workers end when it is gone.
    """
    began: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        began.append(time.monotonic())
        if len(began) == 1:
            raise KeyboardInterrupt
        if began[-1] - began[0] > _LAST_S:
            os._exit(130)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody ignores it, or handles it
        signal.signal(signal.SIGINT, handle)
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)  # the interpreter takes its handlers away next


class Interrupted(Exception):
    """A stop was asked for while the run waited; nothing was taken, so the state can be saved as it stands."""


class StopRequest:
    """A context in which the first SIGINT, SIGTERM or SIGHUP only sets :attr:`requested`; a second one interrupts at
    once.

    A preempted node sends SIGTERM and, some time later, SIGKILL. When the step at hand takes longer than ``grace_s``
    after SIGTERM, it is interrupted as by a second signal, so that the run still ends in good order; the last
    checkpoint is then the place to go on from. Where even that is not heeded, the process ends itself.
    A terminal that goes away sends SIGHUP, which is taken as SIGTERM, often twice: further ones are ignored. Where it
    is ignored already (``nohup``), it stays so.
    Outside the main thread, which alone is given signals, it asks for nothing.

    Args:
        grace_s: longest wait for the step at hand after SIGTERM or SIGHUP; None waits for ever.

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
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.step_is_over()

    def step_is_over(self) -> None:
        """The grace was for the step; what is saved after it is not given up."""
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
        logger.warning("%s: stopping after this step; once more stops at once.", signal.Signals(number).name)
        if number != signal.SIGINT and self._grace_s is not None:
            self._after(self._grace_s, self._interrupt)

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _interrupt(self) -> None:
        logger.warning("The step at hand takes longer than train.grace_s=%g; it is given up.", self._grace_s)
        self._after(_LAST_S, lambda: os._exit(128 + signal.SIGTERM))
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # reaches a blocking call too
