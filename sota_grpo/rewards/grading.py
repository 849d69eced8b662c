"""Rewards from processes that may be killed: a grader that hangs or crashes costs its response, nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from tensordict import TensorDictBase, lazy_stack

from sota_grpo import keys
from sota_grpo.records import Example, Score
from sota_grpo.scoring import FailureLog, failed_score
from sota_grpo.transforms.score import graded_text, write_scores
from sota_grpo.workers.base import Worker, WorkerDied
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.futures import gathered, promised, resolve

Asked = list[tuple[str, Example]]

logger = logging.getLogger(__name__)

_TRIES = 2  # workers that a group, and then a response alone, may cost before it is the suspect
_SILENCE_S = 60.0


class GradingPool:
    """Grades finished groups in worker processes; the rows equal those of :meth:`sota_grpo.envs.TaskEnv.grade`.

    Contract. Consumes: groups of finished rows. Produces: the same rows with reward, terms, success and
    ``reward_error`` written in place. Waits for: a worker at most ``timeout_s`` per group; then the worker is killed
    and the group's responses are graded one by one, each with ``timeout_s`` of its own, so that only the response that
    hangs counts as a failure (all terms 0, ``reward_error``) and its siblings keep their scores. A group whose worker
    dies is graded again; the second time its responses are graded one by one, and one that two more workers die of
    counts as a failure. Only what is no response's fault ends the run: no worker starts, or the task returns other
    terms than it names.

    Args:
        start: starts the worker of a slot with :func:`sota_grpo.workers.reward.reward_spec`.
        num_workers: number of slots.
        term_weights: weight of each reward term.
        timeout_s: longest time for a group, and for a response alone.

    Attributes:
        fleet: of the workers; it counts their replacements.
    """

    def __init__(
        self,
        start: Callable[[int], Worker],
        num_workers: int,
        *,
        term_weights: Mapping[str, float],
        timeout_s: float,
    ) -> None:
        self._term_weights, self._timeout_s = dict(term_weights), timeout_s
        self._failures = FailureLog()
        self.fleet = Fleet(
            "reward",
            start,
            num_workers,
            capacity=1,  # so that a worker's end is the doing of one group
            task_deadline_s=timeout_s,
            silence_s=max(_SILENCE_S, 2 * timeout_s),  # the deadline of a task comes first
            max_attempts=_TRIES,
        )

    def wait_ready(self) -> None:
        """Return when every worker can grade.

        Raises:
            WorkerDied: one cannot start; the message has the cause.
        """
        self.fleet.wait_ready()

    def grade(self, rows: Sequence[TensorDictBase]) -> Future[list[TensorDictBase]]:
        """The same rows, once their scores are written in them; rows that have scores already pass unchanged."""
        listed, done = list(rows), promised()
        if listed[0].get(keys.SUCCESS, None) is not None:
            done.set_result(listed)
            return done

        def write(scores: list[Score]) -> list[TensorDictBase]:
            write_scores(lazy_stack(listed), [self._failures.add(score) for score in scores], self._term_weights)
            return listed

        scores = self._scores([graded_text(row) for row in listed])
        scores.add_done_callback(lambda found: resolve(done, lambda: write(found.result())))
        return done

    def close(self) -> None:
        self.fleet.close()

    def _scores(self, asked: Asked) -> Future[list[Score]]:
        """The scores of a group: graded as a whole and, where that cost workers, one by one."""
        done = promised()
        self.fleet.submit(asked).add_done_callback(partial(self._graded, asked, done))
        return done

    def _graded(self, asked: Asked, done: Future[list[Score]], answer: Future[list[Score]]) -> None:
        error = answer.exception()
        if not isinstance(error, (TimeoutError, WorkerDied)):
            resolve(done, answer.result)
            return
        # To grade nothing harms no worker: where even that fails, the fleet is gone and no response is to blame.
        self.fleet.submit([]).add_done_callback(partial(self._suspected, asked, done, error))

    def _suspected(
        self, asked: Asked, done: Future[list[Score]], error: TimeoutError | WorkerDied, nothing: Future[list[Score]]
    ) -> None:
        if nothing.exception() is not None:
            resolve(done, nothing.result)
        elif len(asked) == 1:
            late = isinstance(error, TimeoutError)
            reason = f"TimeoutError: no score within {self._timeout_s:g} s" if late else f"WorkerDied: {error}"
            done.set_result([failed_score(self._term_weights, reason)])
        else:
            logger.info("%d responses are graded one by one, because together: %s", len(asked), error)
            alone = gathered([self._scores([pair]) for pair in asked])
            alone.add_done_callback(lambda found: resolve(done, lambda: [one for (one,) in found.result()]))
