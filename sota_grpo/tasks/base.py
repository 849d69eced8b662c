"""The protocol of a task: examples to train on and to hold out, the chat that asks one, the score of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from sota_grpo.records import Example, Score


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
