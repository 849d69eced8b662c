"""A grader whose scores have one term more: what a judge says, who is asked over HTTP.

It is asked from this process, since whoever asks only waits: all groups share its connections and what it has said
before, and a judge that is away costs no worker its deadline. Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain, groupby
from statistics import fmean
from typing import Any

from sota_grpo.errors import RunFailed
from sota_grpo.rewards.grading import FailureLog, Grader, failed_score
from sota_grpo.rewards.judge import TERM, Judged
from sota_grpo.rewards.judge.cache import Verdict, VerdictCache
from sota_grpo.rewards.judge.client import JudgeClient
from sota_grpo.rewards.judge.questions import TIE, Endpoint, Material, Question, judged_text, pairs_of
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Task
from sota_grpo.workers.base import gathered, promised, resolve

Pairs = Sequence[tuple[str, Example]]


class Judge:
    """One judge, with what it has said before; a question that is open or was answered is not asked again.

    Args:
        client: asks it.
        cache: keeps its verdicts; closed with the judge.
    """

    def __init__(self, client: JudgeClient, cache: VerdictCache) -> None:
        self.client, self._cache = client, cache
        self._open: dict[str, Future[Verdict]] = {}
        self._lock = threading.Lock()

    def ask(self, question: Question) -> Future[Verdict]:
        """Its verdict, some day. It is kept before anybody is told.

        The future fails with ``RunFailed`` where the judge is gone, or its verdict cannot be kept.
        """
        key = question.key
        with self._lock:
            pending = self._open.get(key)
            known = self._cache.get(key) if pending is None else None
            if pending is None and known is None:
                verdict = self._open[key] = promised()
        if pending is not None or known is not None:
            self.client.add(cached=1)
            return pending or _done(known)
        try:
            answer = self.client.ask(question)
        except BaseException:
            self._forget(key)
            raise
        answer.add_done_callback(lambda answer: resolve(verdict, partial(self._kept, key, answer)))
        return verdict

    def _forget(self, key: str) -> None:
        with self._lock:
            self._open.pop(key, None)

    def _kept(self, key: str, answer: Future[Verdict]) -> Verdict:
        try:
            verdict = answer.result()
            if verdict.is_final:
                self._cache.put(key, verdict)
        except OSError as error:
            raise RunFailed(f"What the judge says cannot be kept ({error.strerror}); free space there.") from error
        finally:
            self._forget(key)
        return verdict

    def close(self) -> None:
        """Ask nothing more; idempotent."""
        self.client.close()
        self._cache.close()


class JudgedGrader:
    """Scores of another grader with one term more, a judge's.

    Contract. Consumes: groups of texts. Produces: their scores. Waits for: the other grader and the judge, who work
    at the same time. A response on which the judge has no verdict has failed, as one has at which a grader fails. Where
    the judge is gone, futures fail, which ends the run.

    Args:
        grader: of the task's own terms; closed with this.
        judge: see there.
        task: of the responses, for their prompts.
        judged: what of it is judged.

    Attributes:
        grader: of the task's own terms.
    """

    def __init__(self, grader: Grader, judge: Judge, task: Task, judged: Judged) -> None:
        self.grader, self.judge, self._task, self._judged = grader, judge, task, judged
        self._failures = FailureLog()

    def scores(self, pairs: Sequence[tuple[str, Example]]) -> Future[list[Score]]:
        """One score per pair, some day."""
        own_and_judges: list[Future[Any]] = [self.grader.scores(pairs), self._verdicts(pairs)]
        return _then(gathered(own_and_judges), lambda both: [*map(self._joined, pairs, *both)])

    def _verdicts(self, pairs: Pairs) -> Future[list[Verdict | None]]:
        """Of each response the judge's; None where it is not asked."""
        groups = [[*group] for _, group in groupby(pairs, key=lambda pair: pair[1])]
        parts = [self._of_group([text for text, _ in group], group[0][1]) for group in groups]
        return _then(gathered(parts), lambda verdicts: [*chain(*verdicts)])

    def _of_group(self, texts: Sequence[str], example: Example) -> Future[list[Verdict | None]]:
        rules = self._judged.of(example)
        if rules is None:
            return gathered([_done(None) for _ in texts])
        endpoint = replace(self.judge.client.endpoint, rubric=rules.rubric)
        prompt = self._task.messages(example)
        reference = (example.answer or None) if rules.shows_reference else None
        group = [Material(prompt, judged_text(text), reference) for text in texts]
        if not rules.num_rivals:
            verdicts: list[Future[Any]] = [self.judge.ask(endpoint.ask(one)) for one in group]
            return gathered(verdicts)
        return self._tournament(endpoint, group, rules.num_rivals)

    def _tournament(
        self, endpoint: Endpoint, group: Sequence[Material], num_rivals: int
    ) -> Future[list[Verdict | None]]:
        """The share of its comparisons that each response wins, a tie being half a win; None where it has no rival."""
        pairs = pairs_of([one.response for one in group], num_rivals)
        compared = [
            _done(Verdict(TIE))
            if group[first].response == group[second].response
            else self.judge.ask(endpoint.compare(group[first], group[second].response))
            for first, second in pairs
        ]
        return _then(gathered(compared), partial(win_rates, len(group), pairs))

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
        counts = self.judge.client.take_counts()
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


def win_rates(count: int, pairs: Sequence[tuple[int, int]], verdicts: Sequence[Verdict]) -> list[Verdict | None]:
    """Of each of ``count`` responses the mean of its comparisons, each worth 1, 0.5 or 0 to it.

    A comparison without a verdict counts for neither; a response has an error where it has none with one.

    Args:
        pairs: who was compared, the one that was shown first in front.
        verdicts: what each comparison is worth to that one.

    >>> [one.value for one in win_rates(3, [(0, 1), (2, 0)], [Verdict(1.0), Verdict(0.5)])]
    [0.75, 0.0, 0.5]
    """
    worth: list[list[float]] = [[] for _ in range(count)]
    faults: list[list[str]] = [[] for _ in range(count)]
    for (first, second), verdict in zip(pairs, verdicts, strict=True):
        for index, value in ((first, verdict.value), (second, None if verdict.value is None else 1 - verdict.value)):
            if value is None:
                faults[index].append(verdict.error or "")
            else:
                worth[index].append(value)
    return [
        Verdict(fmean(values)) if values else Verdict(None, reasons[0]) if reasons else None
        for values, reasons in zip(worth, faults, strict=True)
    ]


def _then(future: Future[Any], function: Callable[[Any], Any]) -> Future[Any]:
    """What ``function`` makes of the future's result, some day."""
    done = promised()
    future.add_done_callback(lambda future: resolve(done, lambda: function(future.result())))
    return done


def _done(value: Any) -> Future[Any]:
    future = promised()
    future.set_result(value)
    return future
