"""The thread on which a servant does its long work, so that its host stays free to answer."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class ServantThread:
    """Runs what it is given, one after the other, and knows for how long it has made no progress.

    Contract. Consumes: functions. Produces: futures of their results or exceptions. Waits for: the next function, and
    for nothing else. A function that never returns holds up those behind it; :meth:`silent_s` then grows, and whoever
    asks decides. The thread is a daemon: it does not keep a process alive.

    Args:
        name: of the thread.

    >>> thread = ServantThread("adder")
    >>> thread.submit(lambda a, b: a + b, 2, 3).result(), thread.silent_s()
    (5, 0.0)
    >>> thread.close()
    """

    def __init__(self, name: str) -> None:
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._inbox = queue.SimpleQueue()
        self._since: float | None = None
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue ``function(*args)``; its future has the result or whatever it raised."""
        future: Future[Any] = Future()
        self._inbox.put((future, function, args))
        return future

    def progress(self) -> None:
        """Called by the running function whenever a part of it is done: the silence starts anew."""
        self._since = time.monotonic()

    def silent_s(self) -> float:
        """Seconds for which the running function has made no progress; 0 when none runs."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """End after what is queued."""
        self._inbox.put(None)

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            future, function, args = item
            if not future.set_running_or_notify_cancel():
                continue
            self.progress()
            try:
                result = function(*args)
            except BaseException as error:  # it belongs to whoever asked, and the next one is to be served
                self._since = None
                future.set_exception(error)
            else:
                self._since = None
                future.set_result(result)
