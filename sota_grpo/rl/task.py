"""The protocol of tasks. Imports neither torch nor TorchRL, so that grading processes start fast and stay small."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from sota_grpo.rl.records import Example, Score

Scorer = Callable[[str, Example], Score]


@runtime_checkable
class Task(Protocol):
    """The protocol of a task, used by environments, start-up checks and evaluation.

    ``train`` and ``heldout`` are the examples of the splits. ``term_weights``: weight of each reward term; reward =
    sum(weight * term). ``messages`` returns the prompt of an example as chat messages. ``score`` grades a response; it
    only reads its arguments and the task's settings, never the examples, and the task must be picklable, so that
    worker processes can grade (:func:`scorer_of`). ``gold_response`` returns a response that earns the full reward, or
    None. ``read_row`` converts a dataset row to an example; the question may be missing if ``score`` does not read it;
    ``location`` names the row in error messages.

    Optional: ``counts(score, example)`` returns ``{name: (successes, trials)}`` of a benchmark's accuracies
    (:class:`~sota_grpo.tasks.ifeval.IFEvalTask`); ``max_tokens(example)`` may lower the run's response limit
    (:class:`~sota_grpo.tasks.mixture.MixtureTask`).
    """

    train: Sequence[Example]
    heldout: Sequence[Example]

    @property
    def name(self) -> str: ...

    @property
    def term_weights(self) -> Mapping[str, float]: ...

    def messages(self, example: Example) -> list[dict[str, str]]: ...

    def score(self, response: str, example: Example) -> Score: ...

    def gold_response(self, example: Example) -> str | None: ...

    def read_row(self, row: Mapping[str, Any], location: str) -> Example: ...


def chat(system_prompt: str | None, query: str) -> list[dict[str, str]]:
    """Return the system turn, unless it is empty, and the question as a user turn.

    >>> chat("", "2 + 2?")
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": query}]


def scorer_of(task: Task) -> Scorer:
    """Return the ``score`` method of :func:`without_examples`, to be pickled for grading processes."""
    return without_examples(task).score


def without_examples(task: Task) -> Task:
    """Return a shallow copy of the task without examples; its scores are the same."""
    bare = copy.copy(task)
    bare.train = bare.heldout = ()
    return bare


def prepare(score: Scorer) -> None:
    """Call ``prepare()`` of the scorer or its task, if any, so that no response's time limit includes the set-up."""
    grader = getattr(score, "__self__", score)  # the task of a bound method, else the scorer
    if hasattr(grader, "prepare"):
        grader.prepare()
