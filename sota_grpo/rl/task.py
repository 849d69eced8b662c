"""What a task is; imports neither torch nor TorchRL, so that a grader's process is small and starts at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from sota_grpo.rl.records import Example, Score

Scorer = Callable[[str, Example], Score]


@runtime_checkable
class Task(Protocol):
    """The protocol that envs, the gate and the evaluator rely on.

    ``term_weights`` gives the weight of each reward term: reward = sum(weight * term). ``score`` is pure (it reads
    its arguments and the task's settings, never its examples) and the task is picklable, so that grading can move to a
    worker process (:func:`scorer_of`). ``gold_response`` is a response that must earn the full reward, or None where
    the task knows none. ``read_row`` makes an example of a row (of the task's data, or of ``sota-grpo score``), whose
    question may be missing where the score does not read it; ``place`` names the row in its ``DatasetError``.

    Optional: ``counts(score, example)``, hits and trials of the benchmark's own accuracies by name
    (:class:`~sota_grpo.tasks.ifeval.IFEvalTask`); ``max_tokens(example)`` and ``group_size(example)``, None where they
    are the run's (:class:`~sota_grpo.tasks.mixture.MixtureTask`).
    """

    name: str
    term_weights: Mapping[str, float]
    train: Sequence[Example]
    heldout: Sequence[Example]

    def messages(self, example: Example) -> list[dict[str, str]]: ...

    def score(self, response: str, example: Example) -> Score: ...

    def gold_response(self, example: Example) -> str | None: ...

    def read_row(self, row: Mapping[str, Any], location: str) -> Example: ...


def chat(system_prompt: str | None, query: str) -> list[dict[str, str]]:
    """A system turn, unless it is empty, and the question as a user turn.

    >>> chat("", "2 + 2?")
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": query}]


def scorer_of(task: Task) -> Scorer:
    """``task.score`` of the task without its examples, which a grader's process does not need."""
    return without_examples(task).score


def without_examples(task: Task) -> Task:
    """A copy of the task that has none; its scores are the same."""
    bare = copy.copy(task)
    bare.train = bare.heldout = ()
    return bare


def prepare(score: Scorer) -> None:
    """Let a grader that has a method ``prepare()`` get ready now: no response's deadline should pay for it."""
    grader = getattr(score, "__self__", score)  # a task's method, or a grader by itself
    if hasattr(grader, "prepare"):
        grader.prepare()
