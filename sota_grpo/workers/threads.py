"""Workers that are threads of this process: for tests, simulations, and workers that only wait for a server."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from sota_grpo.workers.base import Host, OpenCalls, WorkerSpec, outcome

CLOSING_S = 10.0


class WorkerThread:
    """Runs what it is given, one after the other, and knows for how long it has made no progress.

    Contract. Consumes: functions. Produces: futures of their results or exceptions. Waits for: the next function, and
    for nothing else. A function that never returns holds up those behind it; :meth:`silent_s` then grows, and whoever
    asks decides. The thread is a daemon: it does not keep a process alive.

    Args:
        name: of the thread.

    >>> thread = WorkerThread("adder")
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


class ThreadWorker:
    """A worker in this process, constructed and called on a thread of its own (:class:`~.base.Worker`).

    A thread cannot be killed: :meth:`kill` fails what is open and asks the host to close the worker after the call
    that it is at. A worker that hangs keeps its thread, which does not keep the process alive.
    """

    pid: int | None = None

    def __init__(self, name: str, spec: WorkerSpec) -> None:
        self.name = name
        self._calls = OpenCalls(name)
        self._host = Host(name, lambda: spec)
        self.thread = self._host.serve_on_thread()

    def call(self, method: str, *args: Any) -> Future[Any]:
        def send(number: int) -> None:
            done = self._host.call(method, *args)
            done.add_done_callback(lambda done: self._calls.resolve(number, *outcome(self.name, done)))

        return self._calls.open(send)

    def kill(self) -> None:
        if self._calls.dead is None:
            self._calls.fail("was killed")
            self._host.close()


class ThreadLauncher:
    """Starts :class:`ThreadWorker` (:class:`~.base.Launcher`).

    :meth:`close` waits a while for the threads: one that is in C++ when the interpreter ends takes the process down
    with SIGABRT, after all its work is done.

    >>> launcher = ThreadLauncher()
    >>> worker = launcher.start("counter-0", WorkerSpec("collections:Counter", {"a": 2}))
    >>> worker.call("total").result()
    2
    >>> launcher.close()
    """

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[ThreadWorker] = weakref.WeakSet()
        self._threads: list[threading.Thread] = []  # of workers that are gone, too: a thread cannot be killed

    def start(self, name: str, spec: WorkerSpec, **placement: Any) -> ThreadWorker:
        """Start a worker; a thread has no environment and no device of its own, so ``placement`` changes nothing."""
        worker = ThreadWorker(name, spec)
        self._workers.add(worker)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), worker.thread]
        return worker

    def share(self, value: Any) -> Any:
        """The value itself: it is in this process already."""
        return value

    def close(self) -> None:
        """End the workers, waiting for their threads up to ``CLOSING_S`` in all; idempotent."""
        for worker in list(self._workers):
            worker.kill()
        until = time.monotonic() + CLOSING_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
