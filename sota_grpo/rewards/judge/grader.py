"""A grader whose scores have one term more: what a judge says, who is asked over HTTP.

It is asked from this process, since whoever asks only waits: all groups share its connections and what it has said
before, and a judge that is away costs no worker its deadline. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sota_grpo.rewards.grading import FailureLog, Grader, failed_score
from sota_grpo.rewards.judge import TERM, Judged
from sota_grpo.rewards.judge.cache import Verdict
from sota_grpo.rewards.judge.client import JudgeClient, done
from sota_grpo.rewards.judge.questions import Material, judged_text
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task
from sota_grpo.workers.base import gathered, promised, resolve


class JudgedGrader:
    """Scores of another grader with one term more, a judge's.

    Contract. Consumes: groups of texts. Produces: their scores. Waits for: the other grader and the judge, who work
    at the same time. A response on which the judge has no verdict has failed, as one has at which a grader fails. Where
    the judge is gone, futures fail, which ends the run.

    Args:
        grader: of the task's own terms; closed with this.
        judge: closed with this.
        task: of the responses, for their prompts.
        judged: what of it is judged.

    Attributes:
        grader: of the task's own terms.
    """

    def __init__(self, grader: Grader, judge: JudgeClient, task: Task, judged: Judged) -> None:
        self.grader, self.judge, self._task, self._judged = grader, judge, task, judged
        self._failures = FailureLog()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """A future of one score per pair."""
        verdicts = gathered([self._verdict(text, example) for text, example in pairs])
        own_and_judges: list[Future[Any]] = [self.grader.scores(pairs), verdicts]
        scores = promised()
        gathered(own_and_judges).add_done_callback(
            lambda both: resolve(scores, lambda: [*map(self._joined, pairs, *both.result())])
        )
        return scores

    def _verdict(self, text: str, example: Example) -> Future[Any]:
        """The judge's of a response; None where it is not asked."""
        rules = self._judged.of(example)
        if rules is None:
            return done(None)
        reference = (example.answer or None) if rules.shows_reference else None
        material = Material(self._task.messages(example), judged_text(text), reference)
        return self.judge.ask(replace(self.judge.endpoint, rubric=rules.rubric).ask(material))

    def _joined(self, pair: tuple[str, Example], score: Score, verdict: Verdict | None) -> Score:
        weights, example = self._judged.term_weights, pair[1]
        if score.error is not None:  # it was told where it happened
            return failed_score(weights, score.error, example)
        if verdict is None:
            return self._judged.joined(score, example, None)
        if verdict.error is not None:
            return self._failures.add(failed_score(weights, verdict.error, example))
        if verdict.said:
            score = replace(score, info={**score.info, TERM: verdict.said})
        return self._judged.joined(score, example, verdict.value)

    def metrics(self) -> dict[str, float]:
        """What the judge was asked since the last call."""
        counts = self.judge.take_counts()
        metrics = {
            "judge/requests": float(counts.requests),
            "judge/cached": float(counts.cached),
            "judge/retries": float(counts.retries),
            "judge/prompt_tokens": float(counts.prompt_tokens),
            "judge/completion_tokens": float(counts.completion_tokens),
        }
        if counts.requests:
            metrics["judge/latency_s"] = counts.latency_s / counts.requests
        return metrics

    def close(self) -> None:
        """End both; idempotent."""
        self.judge.close()
        self.grader.close()
