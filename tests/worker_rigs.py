"""Workers that need no model, for the tests of workers and fleets."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

from sota_grpo.workers.base import ThreadWorker, WorkerDied, WorkerSpec


class Refused(ValueError):
    """An exception class of its own, with a constructor that pickle cannot repeat."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number}: {reason}")


class Echo:
    """Answers at once, later, never, or dies; records its calls."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.seen: list[Any] = []
        self._lock = threading.Lock()

    def ping(self) -> float:
        return 0.0

    def run(self, task: Any, delay_s: float = 0.0) -> Future[tuple[Any, int]]:
        """``(task, version when it was started)`` after a while."""
        future: Future[tuple[Any, int]] = Future()
        answer = (task, self.version)
        threading.Timer(delay_s, future.set_result, [answer]).start()
        return future

    def note(self, value: Any) -> None:
        self.seen.append(value)

    def notes(self) -> list[Any]:
        return self.seen

    def update(self, version: int, delay_s: float = 0.0) -> Future[int]:
        if version < 0:
            raise ValueError(f"version {version} is negative")
        self.version = version
        future: Future[int] = Future()
        threading.Timer(delay_s, future.set_result, [version]).start()
        return future

    def never(self) -> Future[None]:
        return Future()

    def hold(self) -> Future[str]:
        """Answered when :meth:`release` is called."""
        self._held: Future[str] = Future()
        return self._held

    def release(self) -> None:
        self._held.set_result("held")

    def fail(self, kind: str) -> None:
        raise {"key": KeyError("missing"), "odd": Refused(3, reason="because")}[kind]

    def fail_later(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(ZeroDivisionError("later"))
        return future

    def cannot_go_on(self) -> Future[None]:
        future: Future[None] = Future()
        future.set_exception(WorkerDied("the engine is broken"))
        return future

    def lock(self) -> Any:
        return self._lock

    def double(self, array: Any, times: int) -> tuple[Any, float]:
        return array * times, float(array.sum())

    def speak(self, text: str) -> str:
        print(text, flush=True)
        print(text, file=sys.stderr, flush=True)
        return text

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def thread_is_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()

    def leave(self) -> int:
        """Start a process in a session of its own; its id."""
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    def exit(self, code: int) -> None:
        os._exit(code)


def held_echo(pipe: str) -> Echo:
    """Is constructed once something was written to this named pipe."""
    Path(pipe).read_text()
    return Echo()


def broken(tries: str) -> Echo:
    """Raises, after leaving a trace of every try."""
    with Path(tries).open("a") as file:
        file.write("x")
    raise RuntimeError("no such model")


def works_once(tries: str) -> Echo:
    """The second construction raises, as where a device is still taken; the third works."""
    with Path(tries).open("a") as file:
        file.write("x")
    if Path(tries).stat().st_size == 2:
        raise RuntimeError("device busy")
    return Echo()


class Raising:
    """Raises what the task names."""

    def run(self, kind: str) -> Future[None]:
        if kind == "cancelled_future":
            future: Future[None] = Future()
            future.cancel()
            return future
        raise {
            "exit": SystemExit(3),
            "cancelled": asyncio.CancelledError(),
            "cancelled_here": CancelledError(),
            "stop": StopIteration(),
            "key": KeyError("missing"),
        }[kind]


def hosted(make_engine: Callable[[], Any], tokenizer: Any = None) -> ThreadWorker:
    """A rollout worker on a thread of its own, which is constructed."""
    worker = ThreadWorker("rollout-0", spec("rollout", make_engine=make_engine, tokenizer=tokenizer))
    worker.call("ping").result()
    return worker


def rollout(make_engine: Callable[[], Any], tokenizer: Any) -> Any:
    from sota_grpo.workers.rollout import RolloutWorker

    return RolloutWorker(make_engine(), tokenizer)


def spec(factory: str = "Echo", **options: Any) -> WorkerSpec:
    return WorkerSpec(f"tests.worker_rigs:{factory}", options)
