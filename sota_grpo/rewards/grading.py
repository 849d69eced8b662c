"""Rewards of texts: graded in this process, or in processes where a hang or a crash costs one process, not the run.

Imports no torch.
"""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Protocol

from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import FailureLog, Scorer, Task, failed_score, guarded_scores, prepare, scorer_of
from sota_grpo.workers.base import WorkerSpec, WorkerThread, gathered, promised, resolve
from sota_grpo.workers.fleet import Fleet, starter
from sota_grpo.workers.processes import ProcessEndedItself, ProcessLauncher
from sota_grpo.workers.slots import TaskLost, TaskOverdue

Pairs = list[tuple[str, Example]]

_SILENCE_S = 60.0
_COUNT = struct.Struct("=q")


class Grader(Protocol):
    """Gives texts their scores, wherever that happens; may be called from any thread.

    ``scores`` takes ``(response, example)`` pairs, best the siblings of one group, and gives one score each, in their
    order. A response at which the grader fails has an ``error`` and all terms 0; the future itself fails only for what
    is no response's fault. ``close`` is idempotent.
    """

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]: ...

    def close(self) -> None: ...


class LocalGrader:
    """Grades in this process, before :meth:`scores` returns: a text that hangs its grader hangs whoever asks.

    Args:
        score: the task's grader.
        term_names: the terms that it returns.

    >>> grader = LocalGrader(lambda text, example: Score({"right": float(text == example.answer)}, True), ["right"])
    >>> grader.scores([("4", Example("2 + 2?", "4"))]).result()[0].terms
    {'right': 1.0}
    """

    def __init__(self, score: Scorer, term_names: Collection[str]) -> None:
        self._score, self._term_names = score, tuple(term_names)
        self._failures = FailureLog()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """One score per pair; the future is done already."""
        done = promised()
        resolve(done, lambda: list(map(self._failures.add, guarded_scores(self._score, self._term_names, pairs))))
        return done

    def close(self) -> None:
        """Nothing to end."""


class ProgressCounter:
    """One number per open call in a file without a name, which the processes of this machine share.

    A worker notes how many parts of a call are done *before* it begins the next one. To note is one system call (about
    1 µs), so the number is there even when the next thing that the worker does is to crash, or to hang with the
    interpreter locked, where no answer to a ping comes any more. Nobody reads it while all goes well.

    Args:
        fd: descriptor of the file, as :attr:`fd` of the counter that made it; None makes one, which lives as long as
            this object. A child process inherits it under the same number (``pass_fds``).

    >>> ours = ProgressCounter()
    >>> theirs, page = ProgressCounter(ours.fd), ours.open()
    >>> ours.read(page), theirs.note(page, 3), ours.read(page)
    (0, None, 3)
    >>> ours.free(page), ours.open() == page, ours.read(page)
    (None, True, 0)
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _nameless_file() if fd is None else fd
        if fd is None:  # not before: a number that is written to late must not mean another file by then
            weakref.finalize(self, os.close, self.fd)
        self._free: list[int] = []
        self._pages = itertools.count()

    def open(self) -> int:
        """A page for a call, at 0; from any thread."""
        try:
            page = self._free.pop()
        except IndexError:
            page = next(self._pages)
        self.note(page, 0)
        return page

    def note(self, page: int, done: int) -> None:
        """So many parts are done."""
        os.pwrite(self.fd, _COUNT.pack(done), page * _COUNT.size)

    def read(self, page: int) -> int:
        """What was noted last."""
        (done,) = _COUNT.unpack(os.pread(self.fd, _COUNT.size, page * _COUNT.size))
        return done

    def free(self, page: int) -> None:
        """The page may be another call's: nobody writes to it any more."""
        self._free.append(page)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("progress")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RewardWorker:
    """Grades lists of responses on a thread of its own, guarded as :func:`sota_grpo.rl.task.guarded_scores` says.

    Args:
        score, term_names: as in :class:`GradingPool`; the grader's ``prepare()``, if it has one, is called here, when
            nobody waits for a response.
        progress_fd: descriptor of a :class:`ProgressCounter`: how many of a call's responses are graded.

    >>> worker = RewardWorker(lambda text, example: Score({"long": float(len(text) > 2)}, False), ["long"])
    >>> [score.terms for score in worker.run([("yes", Example("?", "yes")), ("no", Example("?", "yes"))]).result()]
    [{'long': 1.0}, {'long': 0.0}]
    >>> worker.close()
    """

    def __init__(self, score: Scorer, term_names: Sequence[str], progress_fd: int | None = None) -> None:
        self._score, self._term_names = score, tuple(term_names)
        prepare(score)
        self._progress_counter = ProgressCounter(progress_fd)
        self._thread = WorkerThread("grader")

    def run(self, pairs: Sequence[tuple[str, Example]], page: int = 0) -> Future[list[Score]]:
        """The scores of ``(response, example)`` pairs, in their order; ``page`` is this call's in the counter."""
        return self._thread.submit(self._grade, pairs, page)

    def ping(self) -> float:
        """Seconds for which the grader has been at one response."""
        return self._thread.silent_s()

    def close(self) -> None:
        self._thread.close()

    def _grade(self, pairs: Sequence[tuple[str, Example]], page: int) -> list[Score]:
        answers = itertools.count(1)

        def tick() -> None:
            self._thread.progress()
            self._progress_counter.note(page, next(answers))

        scores = guarded_scores(self._score, self._term_names, pairs, tick=tick)
        self._progress_counter.note(page, len(pairs))  # a grader of whole groups has answered once
        return scores


class GradingPool:
    """Grades in worker processes: a text that hangs or crashes its grader costs itself and one worker.

    Contract. Consumes: groups of texts. Produces: their scores, equal to those of :class:`LocalGrader`. Waits for: a
    worker, at one response no longer than ``timeout_s`` (at most an eighth more); then it is killed. Workers note which
    response they are at (:class:`ProgressCounter`), so the one that a worker hangs or crashes at is known, counts as a
    failure (all terms 0) at once, and only its siblings are graded by another worker. Where a worker was ended by
    SIGKILL or SIGTERM, somebody else may have done it (a person, the kernel out of memory): the response is graded
    once more, alone, and counts as a failure when that worker dies, too. A grader of whole groups (``score_group``)
    has ``timeout_s`` for the call; it does not show at which response it is, so after a hang or a crash its
    responses are graded one by one. Only what is no response's fault fails a future: no worker starts, the pool is
    closed, or the task returns other terms than it names.

    Args:
        score: the task's grader, picklable (:func:`sota_grpo.rl.task.scorer_of`).
        term_names: the terms that it returns.
        num_workers: processes.
        timeout_s: longest time for one response.

    Attributes:
        fleet: of the workers; it counts their replacements.
    """

    def __init__(self, score: Scorer, term_names: Collection[str], *, num_workers: int, timeout_s: float) -> None:
        self._term_names, self._timeout_s = tuple(term_names), timeout_s
        self._grades_groups = hasattr(score, "score_group")
        self._failures, self._launcher = FailureLog(), ProcessLauncher()
        self._progress_counter = progress_counter = ProgressCounter()
        placement = {"pass_fds": (progress_counter.fd,), "threads": 1}
        options = {"score": score, "term_names": self._term_names, "progress_fd": progress_counter.fd}
        spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", options)
        self.fleet = Fleet(
            "reward",
            starter(self._launcher, "reward", spec, [placement] * num_workers),
            num_workers,
            capacity=1,  # so that a worker's end is the doing of one group
            task_deadline_s=timeout_s,
            progress=lambda pairs, page: progress_counter.read(page),
            silence_s=max(_SILENCE_S, 2 * timeout_s),  # the deadline of a response comes first
            max_attempts=1,
        )

    def wait_ready(self) -> None:
        """Return when every worker can grade; ``WorkerDied`` says why one cannot start."""
        self.fleet.wait_ready()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """One score per pair, some day; workers that are not ready yet hold up nobody but the future."""
        return self._grade(list(pairs))

    def close(self) -> None:
        """End the workers; futures that are open fail."""
        self.fleet.close()
        self._launcher.close()

    def _grade(self, pairs: Pairs, is_suspect: bool = False) -> Future[list[Score]]:
        done = promised()
        if not pairs:
            done.set_result([])
            return done
        page = self._progress_counter.open()
        self.fleet.submit(pairs, page).add_done_callback(partial(self._answered, pairs, is_suspect, page, done))
        return done

    def _answered(
        self, pairs: Pairs, is_suspect: bool, page: int, done: Future[list[Score]], answer: Future[list[Score]]
    ) -> None:
        error = answer.exception()
        if not isinstance(error, (TaskOverdue, TaskLost)):
            self._progress_counter.free(page)
            resolve(done, lambda: list(map(self._failures.add, answer.result())))
            return
        # The page is not freed: a worker that is about to be killed may still write to it.
        num_graded = error.progress if isinstance(error, TaskOverdue) else self._progress_counter.read(page)
        parts = self._again(pairs, num_graded, error, is_suspect)
        gathered(parts).add_done_callback(lambda graded: resolve(done, lambda: list(chain(*graded.result()))))

    def _again(
        self, pairs: Pairs, num_graded: int, error: TaskOverdue | TaskLost, is_suspect: bool
    ) -> list[Future[list[Score]]]:
        """The group in parts: whom the worker was at, who came before, who comes after; their scores in order."""
        is_unclear = num_graded >= len(pairs) or (self._grades_groups and num_graded == 0)
        if is_unclear and len(pairs) > 1:
            return [self._grade([pair]) for pair in pairs]
        at = min(num_graded, len(pairs) - 1)
        if is_suspect or isinstance(error, TaskOverdue) or isinstance(error.__cause__, ProcessEndedItself):
            late = isinstance(error, TaskOverdue)
            died = f"WorkerDied: {error.__cause__ or error}"
            reason = f"TimeoutError: no score within {self._timeout_s:g} s" if late else died
            failed = promised()
            failed.set_result([self._failures.add(failed_score(self._term_names, reason, pairs[at][1]))])
        else:
            failed = self._grade([pairs[at]], is_suspect=True)
        return [self._grade(pairs[:at]), failed, self._grade(pairs[at + 1 :])]


def own_grader(grader: Grader) -> Grader:
    """Who grades the task's own terms, where ``grader`` adds those of a judge; else ``grader``."""
    return getattr(grader, "grader", grader)


def grading_pool(task: Task, *, num_workers: int, timeout_s: float) -> closing[GradingPool]:
    """Reward workers of ``task`` for the length of a ``with`` block."""
    return closing(GradingPool(scorer_of(task), task.term_weights, num_workers=num_workers, timeout_s=timeout_s))
