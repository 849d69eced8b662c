"""A system in a process of its own, fresh for every case: it gets one request at a time and idle in between."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Folder

BUILD_TIMEOUT_S, ANSWER_TIMEOUT_S, CLOSE_TIMEOUT_S = 300.0, 600.0, 20.0
READY, LEARN, STEP, CLOSE = "ready", "learn", "step", "close"


class SystemFailed(Exception):
    """The system cannot be built, raised, died or did not answer; the text says which."""


class Host:
    """The parent's end.

    Contract. Consumes: nothing. Produces: one answer per question. Waits for: the child, at most the deadline given.
    A child that fails, dies or misses its deadline is ended, and :class:`SystemFailed` says so.

    Args:
        name: of the system.
        folder: the work.
        log: where everything that the child prints goes.
        serve: the child's main function; tests have their own.
    """

    def __init__(self, name: str, folder: Folder, log: Path, serve: Callable[..., None] | None = None):
        context = multiprocessing.get_context("spawn")
        self.name, self.log = name, log
        self._connection, theirs = context.Pipe()
        # not a daemon: ours starts a grader of its own
        self._process = context.Process(target=serve or serve_system, args=(theirs, name, folder, log), daemon=False)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the system is built."""
        self._answer(READY, BUILD_TIMEOUT_S)

    def ask(self, question: str, **options: Any) -> Any:
        """The answer to one question, see :func:`serve_system`."""
        try:
            self._connection.send((question, options))
        except OSError as error:
            raise SystemFailed(self._ended()) from error
        return self._answer(question, ANSWER_TIMEOUT_S)

    def _answer(self, question: str, timeout_s: float) -> Any:
        if not self._connection.poll(timeout_s):
            self.kill()
            raise SystemFailed(f"no answer to {question!r} within {timeout_s:.0f} s ({self.log.name})")
        try:
            failed, value = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SystemFailed(self._ended()) from error
        if failed:
            raise SystemFailed(f"{value} ({self.log.name})")
        return value

    def _ended(self) -> str:
        self._process.join(CLOSE_TIMEOUT_S)
        return f"its process ended with exit code {self._process.exitcode} ({self.log.name})"

    def close(self) -> None:
        """End the child, in peace if it can; idempotent."""
        if self._process.is_alive():
            with contextlib.suppress(OSError):  # it has just ended
                self._connection.send((CLOSE, {}))
            self._process.join(CLOSE_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the child now."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def serve_system(connection: Connection, name: str, folder: Folder, log: Path) -> None:
    """The child: build the system, then answer ``learn`` and ``step`` until ``close``.

    ``learn`` answers ``{"seconds", "bytes"}`` and ``step`` its phases and ``bytes``; ``bytes`` only where ``memory`` is
    requested, None otherwise. ``learn`` with ``gradient=path`` writes what the optimizer was given to that file.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted and ends this process
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    from benchmarks.peers.systems import SYSTEMS

    answer_all(connection, lambda: SYSTEMS[name][1](folder))
    os._exit(0)  # engines and trainers leave threads behind that would be waited for


def answer_all(connection: Connection, make: Callable[[], Any]) -> None:
    """Answer with what the system does, or with the error that it raised, which ends the service."""
    system = None
    try:
        system = make()
        connection.send((False, None))
        while (message := connection.recv())[0] != CLOSE:
            question, options = message
            connection.send((False, {LEARN: _learn, STEP: _step}[question](system, **options)))
    except EOFError:
        pass  # the parent is gone
    except BaseException as error:
        traceback.print_exc()
        connection.send((True, " ".join(f"{type(error).__name__}: {error}".split())[:300]))
    if system is not None:
        system.close()
    sys.stdout.flush()
    sys.stderr.flush()


def _learn(system: Any, *, memory: bool = False, gradient: Path | None = None) -> dict[str, Any]:
    from benchmarks.peers.memory import peak_bytes

    handle = None if gradient is None else _keep_gradient(system, gradient)
    measured: dict[str, Any] = {"bytes": None}

    def phase() -> None:
        began = time.perf_counter()
        system.learn()
        measured["seconds"] = time.perf_counter() - began

    if memory:
        measured["bytes"] = peak_bytes(phase)
    else:
        phase()
    if handle is not None:
        handle.remove()
    return measured


def _step(system: Any, *, memory: bool = False) -> dict[str, Any]:
    from benchmarks.peers.memory import peak_bytes

    if not memory:
        return system.step() | {"bytes": None}
    measured: dict[str, Any] = {}
    peak = peak_bytes(lambda: measured.update(system.step()))
    return measured | {"bytes": peak}


def _keep_gradient(system: Any, path: Path) -> Any:
    """Write the gradient by parameter name when the optimizer steps; nothing is copied before that."""
    import torch

    def keep(*_: Any) -> None:
        torch.save({name: parameter.grad for name, parameter in system.named_parameters().items()}, path)

    return system.optimizer.register_step_pre_hook(keep)
