"""Grade untrusted texts, in this process or in workers, where only the response that hangs fails. Imports no torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import chain
from typing import Protocol

from sota_grpo.rl.records import LARGEST, TASK, Example, Score
from sota_grpo.rl.task import Scorer, Task, prepare, scorer_of
from sota_grpo.text import one_line
from sota_grpo.workers.base import WorkerSpec, pending_future, resolve, starter
from sota_grpo.workers.fleet import Fleet, TaskLost, TaskOverdue
from sota_grpo.workers.processes import ProcessEndedItself, ProcessLauncher

logger = logging.getLogger(__name__)

_SILENCE_S = 60.0


class WrongTerms(KeyError):
    """A grader returned other reward terms than its task declares: an error of the task, not of a response."""


def guarded_score(score: Scorer, term_names: Collection[str], response: str, example: Example) -> Score:
    """Return the score of one response, or :func:`failed_score` if the grader fails.

    A grader fails when it raises, reports an error, or returns a term that is not finite in float32 or an ``info`` that
    is not JSON. WrongTerms if it returns other terms than ``term_names``; KeyboardInterrupt: :func:`graders_error`.

    >>> def ratio(response, example):
    ...     return Score({"ratio": float(response) / float(example.answer)}, success=False)
    >>> guarded_score(ratio, ["ratio"], "two", Example("8 / 2?", "4")).terms
    {'ratio': 0.0}
    """
    try:
        return _checked(score(response, example), term_names, example)
    except WrongTerms:
        raise
    except BaseException as error:  # whatever the model's text makes a grader do must not end the run
        return failed_score(term_names, graders_error(error), example)


def guarded_scores(
    score: Scorer,
    term_names: Collection[str],
    pairs: Sequence[tuple[str, Example]],
    tick: Callable[[], None] = lambda: None,
) -> list[Score]:
    """Return the scores of ``(response, example)`` pairs, in order, each graded as :func:`guarded_score` does.

    A grader with a method ``score_group(pairs) -> list of Score`` gets all pairs at once. If ``score_group`` raises,
    the pairs are graded one by one, so that only the response that the grader cannot grade fails; if it returns another
    number of scores, all responses fail. ``tick`` is called after each response, or once after ``score_group``.
    """
    score_group = getattr(score, "score_group", None)
    if score_group is not None and pairs:
        try:
            answers = score_group(pairs)
            if len(answers) == len(pairs):
                scores = [_checked(answer, term_names, example) for answer, (_, example) in zip(answers, pairs)]
            else:
                reason = f"ValueError: the grader returned {len(answers)} scores for {len(pairs)} responses"
                scores = [failed_score(term_names, reason, example) for _, example in pairs]
            tick()
            return scores
        except WrongTerms:
            raise
        except BaseException as error:
            reason = one_line(graders_error(error))
            logger.debug("%d responses are graded one by one, because score_group failed: %s", len(pairs), reason)
    scores = []
    for response, example in pairs:
        scores.append(guarded_score(score, term_names, response, example))
        tick()
    return scores


def _checked(score: Score, term_names: Collection[str], example: Example) -> Score:
    if score.error is not None:
        return failed_score(term_names, score.error, example)
    if set(score.terms) != set(term_names):
        raise WrongTerms(
            f"the grader returned the terms {sorted(score.terms)} but term_weights names {sorted(term_names)}; "
            "make them the same."
        )
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


class ProgressCounter:
    """The number of finished items of each call, in an anonymous file shared by processes of one machine.

    A worker writes the number before it begins the next item, so that it can be read even if the worker then crashes or
    hangs. ``fd`` is the descriptor of another counter's file, inherited by a child process under the same number
    (``pass_fds``); None creates a file, which exists as long as this object.

    >>> ours = ProgressCounter()
    >>> theirs = ProgressCounter(ours.fd)
    >>> ours.read(7), theirs.note(7, 300), ours.read(7)
    (0, None, 300)
    """

    def __init__(self, fd: int | None = None) -> None:
        if fd is None:
            if hasattr(os, "memfd_create"):
                fd = os.memfd_create("progress")
            else:
                with tempfile.TemporaryFile() as file:
                    fd = os.dup(file.fileno())
            weakref.finalize(self, os.close, fd)  # not before: a late note must not go to another file of that number
        self.fd = fd

    def note(self, call: int, done: int) -> None:
        """Write the number of finished items of the call with number ``call``."""
        os.pwrite(self.fd, done.to_bytes(8, "little"), 8 * call)

    def read(self, call: int) -> int:
        """Return the number of finished items of the call with number ``call``; 0 if none was written."""
        return int.from_bytes(os.pread(self.fd, 8, 8 * call), "little")


class RewardWorker:
    """Grades lists of responses with :func:`guarded_scores`, on a process's main thread: graders may use signals.

    The constructor calls the grader's optional ``prepare()``, so that it counts towards no response's deadline.
    ``progress_fd`` is that of a :class:`ProgressCounter` for the graded responses of each call; None: a new counter.
    """

    def __init__(self, score: Scorer, term_names: Sequence[str], progress_fd: int | None = None) -> None:
        self._score, self._term_names = score, tuple(term_names)
        prepare(score)
        self._progress = ProgressCounter(progress_fd)

    def run(self, pairs: Sequence[tuple[str, Example]], call: int = 0) -> list[Score]:
        """Return the scores of ``pairs``, as :func:`guarded_scores`; note the progress under the number ``call``."""
        answers = itertools.count(1)
        scores = guarded_scores(
            self._score, self._term_names, pairs, tick=lambda: self._progress.note(call, next(answers))
        )
        self._progress.note(call, len(pairs))  # a grader of whole groups has answered once
        return scores

    def ping(self) -> float:
        """Return 0 seconds without progress: the pool reads the progress from the counter instead."""
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
        self._progress = progress = ProgressCounter()
        placement = {"pass_fds": (progress.fd,), "threads": 1}
        options = {"score": score, "term_names": self._term_names, "progress_fd": progress.fd}
        spec = WorkerSpec("sota_grpo.rewards.grading:RewardWorker", options)
        self.fleet = Fleet(
            "reward",
            starter(self._launcher, "reward", spec, [placement] * num_workers),
            num_workers,
            capacity=1,  # so that only one group can be the cause of a worker's end
            task_deadline_s=timeout_s,
            progress=lambda pairs, call: progress.read(call),
            silence_s=max(_SILENCE_S, 2 * timeout_s),  # the deadline of a response comes first
            max_attempts=1,
        )

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
        try:
            return [*map(self._failures.add, await self.fleet.run(pairs, call))]
        except TaskOverdue as error:
            at, is_guilty, reason = error.progress, True, f"TimeoutError: no score within {self._timeout_s:g} s"
        except TaskLost as error:
            at, reason = self._progress.read(call), f"WorkerDied: {error.__cause__ or error}"
            is_guilty = is_suspect or isinstance(error.__cause__, ProcessEndedItself)
        if len(pairs) > 1 and (at >= len(pairs) or (self._grades_groups and at == 0)):
            return [*chain(*await asyncio.gather(*(self._grade([pair]) for pair in pairs)))]  # any may be the cause
        at = min(at, len(pairs) - 1)
        if is_guilty:
            guilty = [self._failures.add(failed_score(self._term_names, reason, pairs[at][1]))]
            before, after = await asyncio.gather(self._grade(pairs[:at]), self._grade(pairs[at + 1 :]))
        else:
            before, guilty, after = await asyncio.gather(
                self._grade(pairs[:at]), self._grade([pairs[at]], is_suspect=True), self._grade(pairs[at + 1 :])
            )
        return [*before, *guilty, *after]


def task_grader(grader: Grader) -> Grader:
    """Return the task's grader that a judge's grader wraps, or ``grader`` itself if it has no judge."""
    return getattr(grader, "grader", grader)


def grading_pool(task: Task, *, num_workers: int, timeout_s: float) -> closing[GradingPool]:
    """Start a :class:`GradingPool` for ``task``; return a context manager that gives the pool and finally closes it."""
    return closing(GradingPool(scorer_of(task), task.term_weights, num_workers=num_workers, timeout_s=timeout_s))
