"""Workers that are threads of this process: for tests, simulations, and servants that only wait for a server."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

from sota_grpo.workers.base import ServantSpec
from sota_grpo.workers.host import Host, OpenCalls, outcome

CLOSING_S = 10.0


class ThreadWorker:
    """A servant in this process, constructed and called on a thread of its own (:class:`~.base.Worker`).

    A thread cannot be killed: :meth:`kill` fails what is open and asks the host to close the servant after the call
    that it is at. A servant that hangs keeps its thread, which does not keep the process alive.
    """

    pid: int | None = None

    def __init__(self, name: str, spec: ServantSpec) -> None:
        self.name = name
        self._calls = OpenCalls(name)
        self._host = Host(name, lambda: spec)
        self.thread = self._host.serve_on_thread()

    def call(self, method: str, *args: Any) -> Future[Any]:
        number, future = self._calls.open()
        if not future.done():
            done = self._host.call(method, *args)
            done.add_done_callback(lambda found: self._calls.resolve(number, *outcome(self.name, found)))
        return future

    def kill(self) -> None:
        if self._calls.dead is None:
            self._calls.fail("was killed")
            self._host.close()


class ThreadLauncher:
    """Starts :class:`ThreadWorker` (:class:`~.base.Launcher`).

    :meth:`close` waits a while for the threads: one that is in C++ when the interpreter ends takes the process down
    with SIGABRT, after all its work is done.

    >>> launcher = ThreadLauncher()
    >>> worker = launcher.start("counter-0", ServantSpec("collections:Counter", {"a": 2}))
    >>> worker.call("total").result()
    2
    >>> launcher.close()
    """

    def __init__(self) -> None:
        self._workers: weakref.WeakSet[ThreadWorker] = weakref.WeakSet()
        self._threads: list[threading.Thread] = []  # of workers that are gone, too: a thread cannot be killed

    def start(self, name: str, spec: ServantSpec, **placement: Any) -> ThreadWorker:
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
