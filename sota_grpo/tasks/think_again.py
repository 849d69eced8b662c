"""Any task as a dialog: a response that is not right is asked to think again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Scorer, Task, scorer_of

MESSAGE = (
    "That does not look right. Can you see what went wrong? Think about it again, step by step, and then give the "
    "final answer in the form that was asked for."
)


class ThinkAgain:
    """``task`` whose responses, unless they are a success, are answered by a user turn.

    A reply of the task's own (what a tool found, what is wrong with the response) takes the place of ``message``. A
    grader that failed ends the dialog: nothing is known about the response. Everything else is the task's.

    Args:
        task: any task.
        message: content of the user turn.

    >>> from sota_grpo.tasks import make_task
    >>> task = ThinkAgain(make_task("arithmetic", num_train=1, num_heldout=1), message="Think again.")
    >>> task.score("#### -1", task.train[0]).reply
    {'role': 'user', 'content': 'Think again.'}
    >>> print(task.score(task.gold_response(task.train[0]), task.train[0]).reply)
    None
    """

    def __init__(self, task: Task, message: str = MESSAGE):
        self.name, self.term_weights = task.name, task.term_weights
        self.train: Sequence[Example] = task.train
        self.heldout: Sequence[Example] = task.heldout
        self._task = copy.copy(task)  # its examples stay behind when this task leaves them behind: see scorer_of
        self._task.train = self._task.heldout = ()
        score = scorer_of(task)
        self.score = (AskGroupAgain if hasattr(score, "score_group") else AskAgain)(score, message)

    def messages(self, example: Example) -> list[dict[str, str]]:
        """The task's chat that asks the question."""
        return self._task.messages(example)

    def gold_response(self, example: Example) -> str | None:
        """The task's."""
        return self._task.gold_response(example)

    def read_row(self, row: Mapping[str, Any], place: str) -> Example:
        """The task's example of a row; it raises the task's ``DatasetError``."""
        return self._task.read_row(row, place)


class AskAgain:
    """The scorer of :class:`ThinkAgain`."""

    def __init__(self, score: Scorer, message: str):
        self._score, self._reply = score, {"role": "user", "content": message}

    def __call__(self, response: str, example: Example) -> Score:
        return self._answered(self._score(response, example))

    def prepare(self) -> None:
        """What the scorer does before its first response."""
        prepare = getattr(self._score, "prepare", None)
        if prepare is not None:
            prepare()

    def _answered(self, score: Score) -> Score:
        ends = score.success or score.error is not None or score.reply is not None
        return score if ends else replace(score, reply=self._reply)


class AskGroupAgain(AskAgain):
    """The same for a scorer that grades a group at once (:func:`sota_grpo.rl.task.guarded_scores`)."""

    def score_group(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        """The scores of a group's responses."""
        return [self._answered(score) for score in self._score.score_group(pairs)]  # type: ignore[attr-defined]
