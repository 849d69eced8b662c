"""Grading one response without trusting it.

Imports neither torch nor TorchRL, so that a grader's process is small and starts at once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import replace

from sota_grpo.records import Example, Score

Scorer = Callable[[str, Example], Score]

logger = logging.getLogger(__name__)


def guarded_score(score: Scorer, term_names: Collection[str], response: str, example: Example) -> Score:
    """The score of one response; a grader that fails is reported in ``error`` with all terms 0, and raises nothing.

    Model text is untrusted: a grader fails when it raises, reports an error, or returns a term that is not finite.

    Args:
        score: the task's grader.
        term_names: the terms that it must return, no others.

    Raises:
        KeyError: if the grader returns other terms than ``term_names``: a mistake of the task, not of the text.

    >>> def ratio(response, example):
    ...     value = float(response) / float(example.answer)
    ...     return Score({"ratio": value}, success=value == 1)
    >>> guarded_score(ratio, ["ratio"], "2", Example("8 / 2?", "4"))
    Score(terms={'ratio': 0.5}, success=False, error=None, info={}, reply=None)
    >>> guarded_score(ratio, ["ratio"], "two", Example("8 / 2?", "4")).terms
    {'ratio': 0.0}
    """
    try:
        found = score(response, example)
    except (Exception, SystemExit) as error:  # whatever the model's text makes a grader do must not end the run
        return failed_score(term_names, f"{type(error).__name__}: {error}")
    if found.error is not None:
        return failed_score(term_names, found.error)
    if set(found.terms) != set(term_names):
        raise KeyError(
            f"the grader returned the terms {sorted(found.terms)} but term_weights names {sorted(term_names)}; "
            "make them the same."
        )
    if not all(value is None or math.isfinite(value) for value in found.terms.values()):
        return failed_score(term_names, f"ValueError: a term is not finite: {dict(found.terms)}")
    terms = {name: None if value is None else float(value) for name, value in found.terms.items()}
    return replace(found, terms=terms, success=bool(found.success))


def failed_score(term_names: Collection[str], error: str) -> Score:
    """The score of a response whose grader failed: every term 0, no success, the reason beside it.

    >>> failed_score(["right"], "TimeoutError: 5 s")
    Score(terms={'right': 0.0}, success=False, error='TimeoutError: 5 s', info={}, reply=None)
    """
    return Score(dict.fromkeys(term_names, 0.0), False, error)


class FailureLog:
    """Tells each kind of grader failure once, so that a thousand of them do not fill the log."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def add(self, score: Score) -> Score:
        """Log the failure of ``score``, if it has one, and return the score."""
        if score.error is not None:
            kind = score.error.partition(":")[0]
            logger.log(logging.DEBUG if kind in self._told else logging.WARNING, "grader failed: %s", score.error)
            self._told.add(kind)
        return score
