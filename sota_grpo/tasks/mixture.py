"""A mixture of tasks: the order of prompts, and a grader that dispatches by task.

The task of draw ``n`` depends only on the weights and ``n``; its example only on the seed and the number of earlier
draws of that task. So a run can resume at any draw, and a task's order does not depend on the other tasks' data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rl.records import TASK, Example, Score
from sota_grpo.rl.task import Task, prepare, without_examples
from sota_grpo.tasks.dataset import DatasetError


def task_of_draw(weights: Sequence[Fraction], draw: int) -> tuple[int, int]:
    """Return (index of the task of draw ``draw``, number of earlier draws of that task), in O(T); all count from 0.

    Draws are split into the first task's and the rest's, recursively. Of the first ``n``, the rest has
    ``R(n) = floor(r n + 1/2)``, ``r = 1 - w_0 / sum(w)``. If ``R(n + 1) > R(n)``, draw ``n`` is the rest's draw
    ``R(n)``; else it is the first task's draw ``n - R(n)``. ``R`` never increases by more than 1, so the draws of each
    task are numbered without gaps. Each rounding is off by at most 1/2, so after ``n`` draws a task of weight ``w`` has
    had ``n w / sum(w)`` to within ``(T - 1) / 2``, and every batch has nearly the mixture of the weights. The weights
    of the ``T`` tasks are above 0; only their ratios count.

    >>> [task_of_draw([Fraction(2), Fraction(1)], draw) for draw in range(6)]
    [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    """
    rest = sum(weights)
    for index, weight in enumerate(weights[:-1]):
        left = (rest - weight) / rest
        before, after = (math.floor(left * number + Fraction(1, 2)) for number in (draw, draw + 1))
        if before == after:
            return index, draw - before
        draw, rest = before, rest - weight
    return len(weights) - 1, draw


class MixedExamples(Sequence[Example]):
    """The examples of several tasks (``examples_of``), each tagged with its task's name, interleaved round-robin.

    So a prefix has all tasks. The ``weights``, one for each task, decide only the training draws (:meth:`drawn`).
    """

    def __init__(self, examples_of: Mapping[str, Sequence[Example]], weights: Mapping[str, Fraction]) -> None:
        self.examples_of = dict(examples_of)
        self.weights = {name: weights[name] for name in examples_of}

    @cached_property
    def _order(self) -> list[tuple[int, int, str]]:
        """Index in its task, number of the task and its name, for each example."""
        numbered = enumerate(self.examples_of.items())
        return sorted((at, task, name) for task, (name, part) in numbered for at in range(len(part)))

    def __len__(self) -> int:
        return sum(map(len, self.examples_of.values()))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.example(name, at) for at, _, name in self._order[index]]
        at, _, name = self._order[index]
        return self.example(name, at)

    def example(self, name: str, index: int) -> Example:
        """Return example ``index`` of the task ``name``, with ``extra["mixture/task"]`` set to the name."""
        example = self.examples_of[name][index]
        return replace(example, extra={TASK: name, **example.extra})

    def only(self, examples: Iterable[Example], *, may_be_empty: bool) -> MixedExamples:
        """Return the mixture of these tagged ``examples``; DatasetError if a task has none, unless ``may_be_empty``."""
        examples_of: dict[str, list[Example]] = {name: [] for name in self.examples_of}
        for example in examples:
            name, untagged = _untagged(example)
            examples_of[name].append(untagged)
        for name in () if may_be_empty else [name for name, remaining in examples_of.items() if not remaining]:
            raise DatasetError(f"No training problem of env.mixture.{name} is left; mend its data or remove the task.")
        return MixedExamples(examples_of, self.weights)

    def drawn(self, draw: int) -> tuple[str, int]:
        """Return (task name of draw ``draw``, number of earlier draws of that task)."""
        which, count = task_of_draw(list(self.weights.values()), draw)
        return list(self.examples_of)[which], count


class MixtureTask:
    """A mixture of several tasks; each example is tagged with the name of its task.

    The reward term ``correct`` of a task ``maths`` becomes ``maths/correct``, with the same weight; it does not apply
    to responses of other tasks.

    Args:
        tasks: tasks by name; the names also prefix their metrics.
        weights: sampling weights by name; a task without one has weight 1.
        max_tokens: maximum response length in tokens by name, for tasks that override the run's limit.
    """

    name = "mixture"

    def __init__(
        self,
        tasks: Mapping[str, Task],
        weights: Mapping[str, Fraction] | None = None,
        max_tokens: Mapping[str, int] | None = None,
    ) -> None:
        names = sorted(tasks)  # independent of the order in a file or command
        shares = dict.fromkeys(names, Fraction(1)) | dict(weights or {})
        self._set_tasks({name: without_examples(tasks[name]) for name in names})
        self.train: Sequence[Example] = MixedExamples({name: tasks[name].train for name in names}, shares)
        self.heldout: Sequence[Example] = MixedExamples({name: tasks[name].heldout for name in names}, shares)
        self._max_tokens = dict(max_tokens or {})

    def _set_tasks(self, tasks: Mapping[str, Task]) -> None:
        self.tasks = dict(tasks)
        self.term_weights: Mapping[str, float] = {
            f"{name}/{term}": weight for name, task in self.tasks.items() for term, weight in task.term_weights.items()
        }
        self.score = MixtureScorer(self.tasks, self.term_weights)

    def with_tasks(self, change: Callable[[str, Task], Task]) -> MixtureTask:
        """Return a copy with every task (without examples) replaced by ``change(name, task)``; the examples stay."""
        changed = copy.copy(self)
        changed._set_tasks({name: change(name, task) for name, task in self.tasks.items()})
        return changed

    def resolve(self, example: Example) -> tuple[str, Task, Example]:
        """Return (task name, task, the example without its tag)."""
        name, untagged = _untagged(example)
        return name, self.tasks[name], untagged

    def messages(self, example: Example) -> list[dict[str, str]]:
        _, task, untagged = self.resolve(example)
        return task.messages(untagged)

    def gold_response(self, example: Example) -> str | None:
        _, task, untagged = self.resolve(example)
        return task.gold_response(untagged)

    def max_tokens(self, example: Example) -> int | float:
        """Return the maximum response length of the example's task, in tokens; infinity if the task sets none."""
        return self._max_tokens.get(self.resolve(example)[0], math.inf)

    def counts(self, score: Score, example: Example) -> dict[str, tuple[float, float]]:
        """Return ``{task: (success, 1)}`` of the example's task, and the task's benchmark counts as ``task/name``."""
        name, task, example = self.resolve(example)
        count = getattr(task, "counts", None)
        terms = {term: score.terms.get(f"{name}/{term}") for term in task.term_weights}
        counted = {} if count is None else count(replace(score, terms=terms), example)
        return {name: (float(score.success), 1.0), **{f"{name}/{each}": pair for each, pair in counted.items()}}

    def read_row(self, row: Mapping[str, Any], location: str) -> Example:
        """Return the row's example by the task in its column ``mixture/task``, tagged; DatasetError for a bad row."""
        name = row.get(TASK)
        if name not in self.tasks:
            raise DatasetError(f"{location}: {TASK}={name} is not one of {', '.join(self.tasks)}; mend the row.")
        example = self.tasks[name].read_row(row, location)
        return replace(example, extra={TASK: name, **example.extra})


def _untagged(example: Example) -> tuple[str, Example]:
    extra = {name: value for name, value in example.extra.items() if name != TASK}
    return example.extra[TASK], replace(example, extra=extra)


class MixtureScorer:
    """The scorer of :class:`MixtureTask`; it has ``score_group`` if the scorer of any task has one."""

    def __init__(self, tasks: Mapping[str, Task], term_names: Iterable[str]) -> None:
        self._tasks, self._term_names = dict(tasks), tuple(term_names)
        if any(hasattr(task.score, "score_group") for task in self._tasks.values()):
            self.score_group = self._score_group

    def __call__(self, response: str, example: Example) -> Score:
        name, untagged = _untagged(example)
        return self._joined(name, self._tasks[name].score(response, untagged))

    def prepare(self) -> None:
        for task in self._tasks.values():
            prepare(task.score)

    def _score_group(self, pairs: Sequence[tuple[str, Example]]) -> list[Score]:
        scores: dict[int, Score] = {}
        for name in dict.fromkeys(example.extra[TASK] for _, example in pairs):
            task, indexes = self._tasks[name], [at for at, (_, each) in enumerate(pairs) if each.extra[TASK] == name]
            task_pairs = [(pairs[at][0], _untagged(pairs[at][1])[1]) for at in indexes]
            task_scores = guarded_scores(task.score, task.term_weights, task_pairs)
            scores |= {at: self._joined(name, score) for at, score in zip(indexes, task_scores, strict=True)}
        return [scores[at] for at in range(len(pairs))]

    def _joined(self, name: str, score: Score) -> Score:
        terms = {f"{name}/{term}": value for term, value in score.terms.items()}
        return replace(score, terms=dict.fromkeys(self._term_names) | terms)
