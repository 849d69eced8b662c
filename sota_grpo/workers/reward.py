"""The grader as a servant: model text is graded where a hang or a crash costs one process, not the run."""

from __future__ import annotations

import itertools
import os
import struct
import tempfile
import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future

from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Scorer, guarded_scores
from sota_grpo.workers.base import ServantSpec
from sota_grpo.workers.threads import ServantThread

_COUNT = struct.Struct("=q")


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


def reward_spec(score: Scorer, term_names: Collection[str], progress_fd: int | None = None) -> ServantSpec:
    """What a reward worker runs.

    Args:
        score: picklable, best without a data set behind it: :func:`sota_grpo.rl.task.scorer_of`.
        term_names: the terms that it returns.
        progress_fd: as in :class:`RewardServant`.
    """
    options = {"score": score, "term_names": tuple(term_names), "progress_fd": progress_fd}
    return ServantSpec("sota_grpo.workers.reward:RewardServant", options)


class RewardServant:
    """Grades lists of responses on a thread of its own, guarded as :func:`sota_grpo.rl.task.guarded_scores` says.

    Args:
        score: the task's grader; its ``prepare()``, if it has one, is called here, when nobody waits for a response.
        term_names: the terms that it returns.
        progress_fd: descriptor of a :class:`ProgressCounter`: how many of a call's responses are graded.

    >>> servant = RewardServant(lambda text, example: Score({"long": float(len(text) > 2)}, False), ["long"])
    >>> [score.terms for score in servant.run([("yes", Example("?", "yes")), ("no", Example("?", "yes"))]).result()]
    [{'long': 1.0}, {'long': 0.0}]
    >>> servant.close()
    """

    def __init__(self, score: Scorer, term_names: Sequence[str], progress_fd: int | None = None) -> None:
        self._score, self._term_names = score, tuple(term_names)
        prepare = getattr(score, "prepare", None)
        if prepare is not None:
            prepare()
        self._progress_counter = None if progress_fd is None else ProgressCounter(progress_fd)
        self._thread = ServantThread("grader")

    def run(self, asked: Sequence[tuple[str, Example]], page: int = 0) -> Future[list[Score]]:
        """The scores of ``(response, example)`` pairs, in their order; ``page`` is this call's in the counter."""
        return self._thread.submit(self._grade, asked, page)

    def ping(self) -> float:
        """Seconds for which the grader has been at one response."""
        return self._thread.silent_s()

    def close(self) -> None:
        self._thread.close()

    def _grade(self, asked: Sequence[tuple[str, Example]], page: int) -> list[Score]:
        answers = itertools.count(1)

        def tick() -> None:
            self._thread.progress()
            self._note(page, next(answers))

        scores = guarded_scores(self._score, self._term_names, asked, tick=tick)
        self._note(page, len(asked))  # a grader of whole groups has answered once
        return scores

    def _note(self, page: int, graded: int) -> None:
        if self._progress_counter is not None:
            self._progress_counter.note(page, graded)
