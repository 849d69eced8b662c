"""Grade untrusted texts, in this process or in workers, where only the response that hangs fails. Imports no torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import mmap
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Protocol

from sota_grpo.rl.records import LARGEST, TASK, Example, Score
from sota_grpo.rl.task import Scorer, Task, prepare, scorer_of
from sota_grpo.text import one_line
from sota_grpo.workers.base import ProcessEndedItself, ProcessLauncher, WorkerSpec, pending_future, resolve, starter
from sota_grpo.workers.fleet import Fleet, TaskLost, TaskOverdue

logger = logging.getLogger(__name__)

_SILENCE_S = 60.0
_CALLS = 1 << 16  # most calls at once


class WrongTerms(KeyError):
    """A grader returned other reward terms than its task declares: an error of the task, not of a response."""


def guarded_scores(
    score: Scorer,
    term_names: Collection[str],
    pairs: Sequence[tuple[str, Example]],
    note: Callable[[int], object] = lambda done: None,
) -> list[Score]:
    """Return the scores of ``(response, example)`` pairs, in order; :func:`failed_score` where the grader fails.

    A grader fails when it raises, reports an error, or returns a term that is not finite in float32 or an ``info`` that
    is not JSON. WrongTerms if it returns other terms than ``term_names``; KeyboardInterrupt: :func:`graders_error`.

    A grader with a method ``score_group(pairs) -> list of Score`` gets all pairs at once. If ``score_group`` raises,
    the pairs are graded one by one, so that only the response that the grader cannot grade fails; if it returns another
    number of scores, all responses fail. ``note`` is called with the number of graded responses after each, or once.

    >>> def ratio(response, example):
    ...     return Score({"ratio": float(response) / float(example.answer)}, success=False)
    >>> [score.terms for score in guarded_scores(ratio, ["ratio"], [("two", Example("8 / 2?", "4"))])]
    [{'ratio': 0.0}]
    """
    score_group = getattr(score, "score_group", None)
    if score_group is not None and pairs:
        try:
            answers = score_group(pairs)
            if len(answers) != len(pairs):
                reason = f"ValueError: the grader returned {len(answers)} scores for {len(pairs)} responses"
                answers = [Score({}, False, reason)] * len(pairs)
            scores = [_checked(answer, term_names, example) for answer, (_, example) in zip(answers, pairs)]
            note(len(pairs))
            return scores
        except WrongTerms:
            raise
        except BaseException as error:
            reason = one_line(graders_error(error))
            logger.debug("%d responses are graded one by one, because score_group failed: %s", len(pairs), reason)
    scores = []
    for number, (response, example) in enumerate(pairs, 1):
        try:
            scores.append(_checked(score(response, example), term_names, example))
        except WrongTerms:
            raise
        except BaseException as error:  # whatever the model's text makes a grader do must not end the run
            scores.append(failed_score(term_names, graders_error(error), example))
        note(number)
    return scores


def _checked(score: Score, term_names: Collection[str], example: Example) -> Score:
    if score.error is not None:
        return failed_score(term_names, score.error, example)
    keys, names = sorted(score.terms), sorted(term_names)
    if keys != names:
        raise WrongTerms(f"the grader returned the terms {keys} but term_weights names {names}; make them the same.")
    terms = {name: None if value is None else float(value) for name, value in score.terms.items()}
    if not all(value is None or abs(value) <= LARGEST for value in terms.values()):
        return failed_score(term_names, f"ValueError: a term is not finite in float32: {terms}", example)
    info = json.loads(json.dumps(dict(score.info))) if score.info else {}
    return replace(score, terms=terms, success=bool(score.success), info=info)


def failed_score(term_names: Collection[str], error: str, example: Example | None = None) -> Score:
    """Return the score of a response that could not be graded: no success, ``error`` as its error, all terms 0.

    If ``example`` is from a mixture of tasks, the terms of the mixture's other tasks are None.
    """
    task = None if example is None else example.extra.get(TASK)
    terms = {name: 0.0 if task is None or name.startswith(f"{task}/") else None for name in term_names}
    return Score(terms, False, one_line(error))


def graders_error(error: BaseException) -> str:
    """Return a grader's error as text; re-raise a KeyboardInterrupt on the main thread, unless SIGINT is ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        raise error
    return f"{type(error).__name__}: {error}"


class FailureLog:
    """Logs the first grader failure of each exception type as a warning, later ones at debug level."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def add(self, score: Score) -> Score:
        """Log the failure of ``score``, if it has one, and return the score."""
        if score.error is not None:
            kind = score.error.partition(":")[0]
            logger.log(logging.DEBUG if kind in self._logged else logging.WARNING, "grader failed: %s", score.error)
            self._logged.add(kind)
        return score


class Grader(Protocol):
    """Interface of graders; callable from any thread.

    ``scores`` takes ``(response, example)`` pairs, preferably one group, and returns a future of one score per pair, in
    order. A response that cannot be graded gets :func:`failed_score`; the future fails only for errors that no response
    causes. ``close`` is idempotent.
    """

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]: ...

    def close(self) -> None: ...


class LocalGrader:
    """A :class:`Grader` in this process: :meth:`scores` grades at once, and a scorer that hangs blocks the caller.

    >>> grader = LocalGrader(lambda text, example: Score({"right": float(text == example.answer)}, True), ["right"])
    >>> grader.scores([("4", Example("2 + 2?", "4"))]).result()[0].terms
    {'right': 1.0}
    """

    def __init__(self, score: Scorer, term_names: Collection[str]) -> None:
        self._score, self._term_names = score, tuple(term_names)
        self._failures = FailureLog()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """Return a future, already done, of one score per pair."""
        scores = pending_future()
        resolve(scores, lambda: list(map(self._failures.add, guarded_scores(self._score, self._term_names, pairs))))
        return scores

    def close(self) -> None:
        """No-op: there are no workers to end."""


def _counters(fd: int) -> memoryview:
    """Return the numbers of graded responses by call, modulo ``_CALLS``, in memory that processes share by ``fd``."""
    return memoryview(mmap.mmap(fd, 8 * _CALLS)).cast("Q")


class RewardWorker:
    """Grades lists of responses with :func:`guarded_scores`, on a process's main thread: graders may use signals.

    The constructor calls the grader's optional ``prepare()``, so that it counts towards no response's deadline. The
    worker writes the number of graded responses of a call to ``progress_fd`` (-1: to memory of its own) before it
    begins the next response, so that the pool can read the number even if the worker then crashes or hangs.
    """

    def __init__(self, score: Scorer, term_names: Sequence[str], progress_fd: int = -1) -> None:
        self._score, self._term_names = score, tuple(term_names)
        prepare(score)
        self._done = _counters(progress_fd)

    def run(self, pairs: Sequence[tuple[str, Example]], call: int = 0) -> list[Score]:
        """Return the scores of ``pairs``, as :func:`guarded_scores`; write the progress under the number ``call``."""
        return guarded_scores(self._score, self._term_names, pairs, partial(self._done.__setitem__, call % _CALLS))

    def ping(self) -> float:
        """Return 0 seconds without progress: the pool reads the progress itself."""
        return 0.0


class GradingPool:
    """A :class:`Grader` with worker processes: a worker that hangs or crashes is replaced, and only its response fails.

    A worker that takes longer than ``timeout_s`` seconds for a response is killed within an eighth more. The response
    at which a worker hung or crashed gets :func:`failed_score`, and another worker grades the other responses. After
    SIGKILL, SIGTERM, SIGHUP or SIGINT, which a user or the kernel's OOM killer may send, the response is graded once
    more, alone, and fails if that worker dies, too. A grader of whole groups (``score_group``) has ``timeout_s`` for
    the call; after a hang or crash its responses are graded one by one. A future fails only if no worker starts, the
    pool is closed, or the grader returns other terms than ``term_names``. ``score`` must be picklable
    (:func:`sota_grpo.rl.task.scorer_of`).
    """

    def __init__(self, score: Scorer, term_names: Collection[str], *, num_workers: int, timeout_s: float) -> None:
        self._term_names, self._timeout_s = tuple(term_names), timeout_s
        self._grades_groups = hasattr(score, "score_group")
        self._failures, self._launcher = FailureLog(), ProcessLauncher()
        self._calls = itertools.count()
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("progress")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, 8 * _CALLS)
        self._done = done = _counters(fd)
        placement = {"pass_fds": (fd,), "threads": 1}
        options = {"score": score, "term_names": self._term_names, "progress_fd": fd}
        spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", options)
        self.fleet = Fleet(
            "reward",
            starter(self._launcher, "reward", spec, [placement] * num_workers),
            num_workers,
            capacity=1,  # so that only one group can be the cause of a worker's end
            task_deadline_s=timeout_s,
            progress=lambda pairs, call: done[call % _CALLS],
            silence_s=max(_SILENCE_S, 2 * timeout_s),  # the deadline of a response comes first
            max_attempts=1,
        )
        weakref.finalize(self.fleet, os.close, fd)  # which starts workers with it

    def wait_ready(self) -> None:
        """Wait until every worker can grade; raise ``WorkerDied`` if one cannot start."""
        self.fleet.wait_ready()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """Return a future of one score per pair; workers need not be ready yet."""
        return self.fleet.start(self._grade(list(pairs)))

    def close(self) -> None:
        """End the workers; pending futures fail. Idempotent."""
        self.fleet.close()
        self._launcher.close()

    async def _grade(self, pairs: list[tuple[str, Example]], is_suspect: bool = False) -> list[Score]:
        """Return the scores of a group, or of a part of it; ``is_suspect``: a worker was killed at this response."""
        if not pairs:
            return []
        call = next(self._calls)
        self._done[call % _CALLS] = 0
        try:
            return [*map(self._failures.add, await self.fleet.run(pairs, call))]
        except TaskOverdue as error:
            at, is_guilty, reason = error.progress, True, f"TimeoutError: no score within {self._timeout_s:g} s"
        except TaskLost as error:
            at, reason = self._done[call % _CALLS], f"WorkerDied: {error.__cause__ or error}"
            is_guilty = is_suspect or isinstance(error.__cause__, ProcessEndedItself)
        if len(pairs) > 1 and (at >= len(pairs) or (self._grades_groups and at == 0)):
            each = await asyncio.gather(*(self._grade([pair]) for pair in pairs))  # any may be the cause
            return [score for (score,) in each]
        at = min(at, len(pairs) - 1)
        failed = [self._failures.add(failed_score(self._term_names, reason, pairs[at][1]))] if is_guilty else []
        before, again, after = await asyncio.gather(
            self._grade(pairs[:at]),
            self._grade([] if is_guilty else [pairs[at]], is_suspect=True),
            self._grade(pairs[at + 1 :]),
        )
        return [*before, *failed, *again, *after]


def task_grader(grader: Grader) -> Grader:
    """Return the task's grader that a judge's grader wraps, or ``grader`` itself if it has no judge."""
    return getattr(grader, "grader", grader)


def grading_pool(task: Task, *, num_workers: int, timeout_s: float) -> closing[GradingPool]:
    """Start a :class:`GradingPool` for ``task``; return a context manager that gives the pool and finally closes it."""
    return closing(GradingPool(scorer_of(task), task.term_weights, num_workers=num_workers, timeout_s=timeout_s))
