"""What a task is, and how one response is graded without trusting it.

Imports neither torch nor TorchRL, so that a grader's process is small and starts at once.
"""

from __future__ import annotations

import copy
import json
import logging
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from sota_grpo.rl.records import Example, Score, task_of_example
from sota_grpo.text import one_line

Scorer = Callable[[str, Example], Score]

LARGEST = 3.4028234663852886e38  # of float32, in which rewards are kept

logger = logging.getLogger(__name__)


class SampledText(str):
    """A response's text with the ids that it was decoded from, for a grader that counts tokens; else a plain text.

    Of a dialog with tools it is the last turn, and ``record`` tells of the whole (:class:`~.records.Sample`).

    >>> text = SampledText("4", [52, 2])
    >>> import pickle
    >>> text == "4", list(pickle.loads(pickle.dumps(text)).token_ids)
    (True, [52, 2])
    """

    token_ids: array[int]
    record: Mapping[str, Any] | None

    def __new__(
        cls, text: str, token_ids: Iterable[int] | bytes = (), record: Mapping[str, Any] | None = None
    ) -> SampledText:
        made = super().__new__(cls, text)
        made.token_ids, made.record = array("i", token_ids), record
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return SampledText, (str(self), self.token_ids.tobytes(), self.record)


@runtime_checkable
class Task(Protocol):
    """The protocol that envs, the gate and the evaluator rely on.

    ``term_weights`` gives the weight of each reward term: reward = sum(weight * term). ``score`` is pure (it reads
    its arguments and the task's settings, never its examples) and the task is picklable, so that grading can move to a
    worker process (:func:`scorer_of`). ``gold_response`` is a response that must earn the full reward, or None where
    the task knows none. ``read_row`` makes an example of a row (of the task's data, or of ``sota-grpo score``), whose
    question may be missing where the score does not read it; ``place`` names the row in the ``DatasetError`` that it
    raises on a row that it cannot read.

    A task whose benchmark has accuracies beside the success has a method ``counts(score, example)``, too: by name, hits
    and trials of the response (:meth:`sota_grpo.tasks.ifeval.IFEvalTask.counts`). One whose responses may not all be as
    long has ``max_tokens(example)``, most tokens of a response, and one whose groups are not all as large
    ``group_size(example)``, None where it is the run's (:class:`sota_grpo.tasks.mixture.MixtureTask`). One whose
    problems differ in difficulty or kind has ``level(example)``, a name or a number for each
    (:mod:`sota_grpo.envs.curriculum`).
    """

    name: str
    term_weights: Mapping[str, float]
    train: Sequence[Example]
    heldout: Sequence[Example]

    def messages(self, example: Example) -> list[dict[str, str]]: ...

    def score(self, response: str, example: Example) -> Score: ...

    def gold_response(self, example: Example) -> str | None: ...

    def read_row(self, row: Mapping[str, Any], place: str) -> Example: ...


def chat(system_prompt: str | None, query: str) -> list[dict[str, str]]:
    """A system turn, unless it is empty, and the question as a user turn.

    >>> chat("", "2 + 2?")
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": query}]


def scorer_of(task: Task) -> Scorer:
    """``task.score`` of the task without its examples, which a grader's process has no use for.

    >>> import pickle
    >>> from sota_grpo.tasks import make_task
    >>> task = make_task("arithmetic", num_train=4, num_heldout=4)
    >>> score = pickle.loads(pickle.dumps(scorer_of(task)))
    >>> score(task.gold_response(task.train[0]), task.train[0]) == task.score(task.train[0].answer, task.train[0])
    True
    """
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


class WrongTerms(KeyError):
    """A grader returns other terms than its task names: a mistake of the task, which no response can make."""


def guarded_score(score: Scorer, term_names: Collection[str], response: str, example: Example) -> Score:
    """The score of one response; a grader that fails is reported in ``error`` with all terms 0, and raises nothing.

    Model text is untrusted: a grader fails when it raises, reports an error, or returns a term that is not finite.

    Args:
        score: the task's grader.
        term_names: the terms that it must return, no others.

    Raises:
        WrongTerms: the grader returns other terms than ``term_names``: a mistake of the task, not of the text.

    >>> def ratio(response, example):
    ...     value = float(response) / float(example.answer)
    ...     return Score({"ratio": value}, success=value == 1)
    >>> guarded_score(ratio, ["ratio"], "2", Example("8 / 2?", "4"))
    Score(terms={'ratio': 0.5}, success=False, error=None, info={}, reply=None)
    >>> guarded_score(ratio, ["ratio"], "two", Example("8 / 2?", "4")).terms
    {'ratio': 0.0}
    """
    try:
        return _checked(score(response, example), term_names, example)
    except WrongTerms:
        raise
    except BaseException as error:  # whatever the model's text makes a grader do must not end the run
        return failed_score(term_names, graders_error(error), example)


def guarded_scores(
    score: Scorer,
    term_names: Collection[str],
    pairs: Sequence[tuple[str, Example]],
    tick: Callable[[], None] = lambda: None,
) -> list[Score]:
    """The scores of ``(response, example)`` pairs, in their order, each guarded as :func:`guarded_score` says.

    A grader that has a method ``score_group(pairs) -> list of Score`` is given all pairs at once. Where that raises,
    they are graded one by one, so that only the response that it cannot grade fails.

    Args:
        tick: called after every answer of the grader.

    Raises:
        WrongTerms: as :func:`guarded_score`.

    >>> class Shortest:
    ...     def score_group(self, pairs):
    ...         least = min(len(response) for response, _ in pairs)
    ...         return [Score({"shortest": float(len(response) == least)}, False) for response, _ in pairs]
    ...     def __call__(self, response, example):
    ...         return self.score_group([(response, example)])[0]
    >>> example = Example("8 / 2?", "4")
    >>> [one.terms for one in guarded_scores(Shortest(), ["shortest"], [("4", example), ("four", example)])]
    [{'shortest': 1.0}, {'shortest': 0.0}]
    """
    score_group = getattr(score, "score_group", None)
    if score_group is not None and pairs:
        try:
            scores = _checked_group(score_group(pairs), term_names, [example for _, example in pairs])
            tick()
            return scores
        except WrongTerms:
            raise
        except BaseException as error:
            reason = graders_error(error)
            logger.debug("%d responses are graded one by one, because together: %s", len(pairs), reason)
    scores = []
    for response, example in pairs:
        scores.append(guarded_score(score, term_names, response, example))
        tick()
    return scores


def _checked_group(scores: Sequence[Score], term_names: Collection[str], examples: Sequence[Example]) -> list[Score]:
    if len(scores) != len(examples):
        reason = f"ValueError: the grader returned {len(scores)} scores for {len(examples)} responses"
        return [failed_score(term_names, reason, example) for example in examples]
    return [_checked(one, term_names, example) for one, example in zip(scores, examples, strict=True)]


def _checked(score: Score, term_names: Collection[str], example: Example) -> Score:
    if score.error is not None:
        return failed_score(term_names, score.error, example)
    if set(score.terms) != set(term_names):
        raise WrongTerms(
            f"the grader returned the terms {sorted(score.terms)} but term_weights names {sorted(term_names)}; "
            "make them the same."
        )
    terms = {name: None if value is None else float(value) for name, value in score.terms.items()}
    if not all(value is None or abs(value) <= LARGEST for value in terms.values()):
        return failed_score(term_names, f"ValueError: a term is not finite in float32: {terms}", example)
    info = json.loads(json.dumps(dict(score.info))) if score.info else {}
    return replace(score, terms=terms, success=bool(score.success), info=info)


def failed_score(term_names: Collection[str], error: str, example: Example | None = None) -> Score:
    """The score of a response whose grader failed: every term 0, no success, the reason beside it.

    Of an ``example`` of a mixture, the terms of the other tasks do not apply.

    >>> failed_score(["right"], "TimeoutError: 5 s")
    Score(terms={'right': 0.0}, success=False, error='TimeoutError: 5 s', info={}, reply=None)
    """
    task = None if example is None else task_of_example(example.extra)
    terms = {name: 0.0 if task is None or name.startswith(f"{task}/") else None for name in term_names}
    return Score(terms, False, one_line(error))


def graders_error(error: BaseException) -> str:
    """What a grader raised, as text.

    Raises:
        KeyboardInterrupt: it was the user's, who can reach nothing but the main thread.
    """
    if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise error
    return f"{type(error).__name__}: {error}"


def total_reward(terms: Mapping[str, float | None], weights: Mapping[str, float]) -> float:
    """``sum_k weight_k * term_k`` over the terms that apply; 0 where none does.

    >>> total_reward({"right": 1.0, "brief": None, "form": 0.5}, {"right": 2.0, "brief": 9.0, "form": -1.0})
    1.5
    """
    return sum((weights[name] * value for name, value in terms.items() if value is not None), 0.0)


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
