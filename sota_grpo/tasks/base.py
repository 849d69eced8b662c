"""What a task is: examples to train on and to hold out, the chat that asks one, and the score of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Example:
    """One problem: the raw question, the raw gold answer, and what else the scorer needs (JSON-serialisable)."""

    query: str
    answer: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Score:
    """The graded response: reward terms by name, whether it is right, and why the grader failed, if it did."""

    terms: Mapping[str, float]
    success: bool
    error: str | None = None


@runtime_checkable
class Task(Protocol):
    """The protocol that envs, the gate and the evaluator rely on.

    ``term_weights`` gives the weight of each reward term: reward = sum(weight * term). ``score`` is pure and the task
    is picklable, so that grading can move to a worker process. ``gold_response`` is a response that must earn the
    full reward.
    """

    name: str
    term_weights: Mapping[str, float]
    train: Sequence[Example]
    heldout: Sequence[Example]

    def messages(self, example: Example) -> list[dict[str, str]]: ...

    def score(self, response: str, example: Example) -> Score: ...

    def gold_response(self, example: Example) -> str: ...
