"""A trainer's own loop, let go for one step at a time, so that systems can take turns."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable


class Paced:
    """Runs ``train`` in a thread that stops wherever it calls :meth:`boundary`, once per step.

    Contract. The loop waits at its boundary for :meth:`step`, and :meth:`step` for the loop's next boundary. An error
    of the loop is raised where the step was requested. After :meth:`end` the loop is left by an exception.

    >>> paced, seen = Paced(), []
    >>> paced.start(lambda: [(paced.boundary(), seen.append(index)) for index in range(9)])
    >>> list(seen), paced.step() < 1, seen, paced.end()
    ([], True, [0], None)
    """

    def __init__(self) -> None:
        self._turns: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[float | BaseException] = queue.SimpleQueue()
        self._began = time.perf_counter()
        self._thread: threading.Thread | None = None

    def start(self, train: Callable[[], object]) -> None:
        """Start the loop and wait until it is before its first step."""

        def run() -> None:
            try:
                train()
                self._done.put(RuntimeError("the training loop ended by itself"))
            except BaseException as error:  # raised where the step was requested
                self._done.put(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._answer()

    def boundary(self) -> None:
        """Called by the loop before each step."""
        self._done.put(time.perf_counter() - self._began)
        if not self._turns.get():
            raise _Ended
        self._began = time.perf_counter()

    def step(self) -> float:
        """One step; its seconds, from boundary to boundary."""
        self._turns.put(True)
        return self._answer()

    def _answer(self) -> float:
        measured = self._done.get()
        if isinstance(measured, BaseException):
            raise measured
        return measured

    def end(self) -> None:
        """Leave the loop."""
        self._turns.put(False)
        if self._thread is not None:
            self._thread.join(timeout=10)


class _Ended(Exception):
    """The loop is left."""
