"""A grader whose scores have one term more: what a judge says, who is asked over HTTP.

It is asked from this process, which only waits: all groups share its connections and what it has said before, and a
judge that is away costs no worker its deadline. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from sota_grpo.rewards.grading import FailureLog, Grader, done, failed_score
from sota_grpo.rewards.judge.client import JudgeClient
from sota_grpo.rewards.judge.questions import Material, Verdict, judged_text
from sota_grpo.rl.records import Example, Score, task_of_example, total_reward
from sota_grpo.rl.task import Task
from sota_grpo.workers.base import gathered

TERM = "judge"  # the reward term, under the name of its task in a mixture


@dataclass(frozen=True)
class Rules:
    """What one task asks the judge.

    Args:
        shows_reference: the judge sees the right answer.
        success_above: a reward above it is a success; None: the task says what is.
    """

    term: str = TERM
    weight: float = 1.0
    rubric: str = ""
    shows_reference: bool = False
    success_above: float | None = None


class JudgedGrader:
    """Scores of another grader with one term more, a judge's.

    Contract. Consumes: groups of texts. Produces: their scores. Waits for: the other grader and the judge, who work
    at the same time. A response on which the judge has no verdict has failed, as one has at which a grader fails. Where
    the judge is gone, futures fail, which ends the run.

    Args:
        grader: of the task's own terms; closed with this.
        judge: closed with this.
        task: of the responses, for their prompts and the weights of its own terms.
        rules: by the name of a task in a mixture, those that are judged; of a task alone, under None.

    Attributes:
        term_weights: of all terms, the task's own and the judge's.
    """

    def __init__(self, grader: Grader, judge: JudgeClient, task: Task, rules: Mapping[str | None, Rules]) -> None:
        self.grader, self.judge, self._task, self._rules = grader, judge, task, rules
        self.term_weights = {**task.term_weights, **{each.term: each.weight for each in rules.values()}}
        self._failures = FailureLog()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """A future of one score per pair."""
        verdicts = [self._verdict(text, example) for text, example in pairs]
        return gathered(
            [self.grader.scores(pairs), *verdicts],
            lambda results: [*map(self._joined, pairs, results[0], results[1:])],
        )

    def _verdict(self, text: str, example: Example) -> Future[Any]:
        """The judge's verdict on a response; None where the response's task is not judged."""
        rules = self._rules.get(task_of_example(example.extra))
        if rules is None:
            return done(None)
        reference = (example.answer or None) if rules.shows_reference else None
        material = Material(self._task.messages(example), judged_text(text), reference)
        return self.judge.ask(replace(self.judge.endpoint, rubric=rules.rubric).ask(material))

    def _joined(self, pair: tuple[str, Example], score: Score, verdict: Verdict | None) -> Score:
        weights, example = self.term_weights, pair[1]
        if score.error is not None:  # it was logged where it happened
            return failed_score(weights, score.error, example)
        score = replace(score, terms=dict.fromkeys(weights) | dict(score.terms))
        if verdict is None:
            return score
        if verdict.error is not None:
            return self._failures.add(failed_score(weights, verdict.error, example))
        rules = self._rules[task_of_example(example.extra)]
        terms = {**score.terms, rules.term: verdict.value}
        info = {**score.info, TERM: verdict.said} if verdict.said else score.info
        above = rules.success_above
        success = score.success if above is None else total_reward(terms, weights) > above
        return replace(score, terms=terms, info=info, success=success)

    def metrics(self) -> dict[str, float]:
        """What the judge was asked since the last call."""
        counts = self.judge.take_counts()
        latency_s, requests = counts.pop("latency_s"), counts["requests"]
        return {f"judge/{name}": count for name, count in counts.items()} | (
            {"judge/latency_s": latency_s / requests} if requests else {}
        )

    def close(self) -> None:
        """End both; idempotent."""
        self.judge.close()
        self.grader.close()
