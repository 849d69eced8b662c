"""The grader as a servant: model text is graded where a hang or a crash costs one process, not the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from sota_grpo.records import Example, Score
from sota_grpo.scoring import Scorer, guarded_score
from sota_grpo.workers.base import ServantSpec
from sota_grpo.workers.servant_thread import ServantThread


def reward_spec(score: Scorer, term_weights: Mapping[str, float]) -> ServantSpec:
    """What a reward worker runs.

    Args:
        score: picklable, best without a data set behind it: :func:`sota_grpo.tasks.base.scorer_of`.
        term_weights: as in :class:`sota_grpo.transforms.ScoreResponse`.
    """
    options = {"score": score, "term_names": tuple(term_weights)}
    return ServantSpec("sota_grpo.workers.reward:RewardServant", options)


class RewardServant:
    """Grades lists of responses on a thread of its own, guarded as :func:`sota_grpo.scoring.guarded_score` says.

    Args:
        score: the task's grader.
        term_names: the terms that it returns.

    >>> servant = RewardServant(lambda text, example: Score({"long": float(len(text) > 2)}, False), ["long"])
    >>> [score.terms for score in servant.run([("yes", Example("?", "yes")), ("no", Example("?", "yes"))]).result()]
    [{'long': 1.0}, {'long': 0.0}]
    >>> servant.close()
    """

    def __init__(self, score: Scorer, term_names: Sequence[str]) -> None:
        self._score, self._term_names = score, tuple(term_names)
        self._thread = ServantThread("grader")

    def run(self, asked: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """The scores of ``(response, example)`` pairs, in their order."""
        return self._thread.submit(self._grade, asked)

    def ping(self) -> float:
        """Seconds for which the grader has been at one response."""
        return self._thread.silent_s()

    def close(self) -> None:
        self._thread.close()

    def _grade(self, asked: Sequence[tuple[str, Example]]) -> list[Score]:
        scores = []
        for response, example in asked:
            scores.append(guarded_score(self._score, self._term_names, response, example))
            self._thread.progress()
        return scores
