"""A judge beside a grader: a model on a server that scores responses (docs/tasks.md).

Here: what each task asks of it, and how its value becomes a term of the reward. The requests are in ``questions``,
the HTTP in ``client``, the kept answers in ``cache``, the term of the reward in ``grader``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sota_grpo.rl.records import Example, Score, task_of_example, total_reward

CHAT, SCORE, CLASSIFY = "chat", "score", "classify"
KINDS = (CHAT, SCORE, CLASSIFY)  # of reward.judge.kind
TERM = "judge"  # the reward term, under the name of its task in a mixture


@dataclass(frozen=True)
class Rules:
    """What one task asks the judge.

    Args:
        term: of the reward, the judge's.
        weight: of the term.
        rubric: what is good.
        shows_reference: the judge sees the right answer.
        success_above: a reward above it is a success; None: the task says what is.
    """

    term: str = TERM
    weight: float = 1.0
    rubric: str = ""
    shows_reference: bool = False
    success_above: float | None = None


@dataclass(frozen=True)
class Judged:
    """The tasks of a run that are judged, and the weights of all terms, theirs and the judge's.

    Args:
        rules: by the name of a task in a mixture; of a task alone, under None.
        own_weights: of the tasks' own terms.

    >>> judged = Judged({None: Rules(weight=0.5)}, {"right": 1.0})
    >>> judged.term_weights
    {'right': 1.0, 'judge': 0.5}
    >>> judged.joined(Score({"right": 1.0}, True), Example("2 + 2?", "4"), 0.25).terms
    {'right': 1.0, 'judge': 0.25}
    """

    rules: Mapping[str | None, Rules]
    own_weights: Mapping[str, float]
    term_weights: Mapping[str, float] = field(init=False)

    def __post_init__(self) -> None:
        theirs = {rules.term: rules.weight for rules in self.rules.values()}
        object.__setattr__(self, "term_weights", {**self.own_weights, **theirs})

    def of(self, example: Example) -> Rules | None:
        """The rules of the example's task; None where it is not judged."""
        return self.rules.get(task_of_example(example.extra))

    def joined(self, score: Score, example: Example, value: float | None) -> Score:
        """The score with the judge's value, None where it says nothing of this response."""
        rules = self.of(example)
        terms = dict.fromkeys(self.term_weights) | dict(score.terms)
        if rules is None or value is None:
            return replace(score, terms=terms)
        terms[rules.term] = value
        if rules.success_above is None:
            return replace(score, terms=terms)
        return replace(score, terms=terms, success=total_reward(terms, self.term_weights) > rules.success_above)
