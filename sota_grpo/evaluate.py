"""Accuracy on held-out problems: greedy, the mean over k samples, and pass@k, the chance that one of k is right."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sota_grpo.batches import group_request
from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv
from sota_grpo.records import Example, Sample, Sampling, Score, sample_seed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Accuracy:
    """A mean over problems, in [0, 1], and its standard error ``std(problem means, ddof=1) / sqrt(problems)``."""

    mean: float
    stderr: float
    num_problems: int

    @classmethod
    def of(cls, problem_means: Sequence[float]) -> Accuracy:
        """Accuracy from the mean success of each problem.

        >>> Accuracy.of([1.0, 0.0, 1.0, 1.0])
        Accuracy(mean=0.75, stderr=0.25, num_problems=4)
        """
        count = len(problem_means)
        spread = statistics.stdev(problem_means) if count > 1 else 0.0
        return cls(statistics.fmean(problem_means), spread / math.sqrt(count), count)


@dataclass(frozen=True)
class Response:
    """A graded response: the text that was graded, its score, its length in tokens, whether it was cut for length."""

    text: str
    score: Score
    num_tokens: int
    truncated: bool


def accuracy(problems: Sequence[Sequence[Response]]) -> Accuracy:
    """The mean success of each problem's responses: avg@k of k responses each, greedy accuracy of one."""
    return Accuracy.of([num_right(responses) / len(responses) for responses in problems])


def pass_accuracy(problems: Sequence[Sequence[Response]], k: int) -> Accuracy:
    """pass@k over problems, from as many responses to each as there are; see :func:`pass_at_k`."""
    return Accuracy.of([pass_at_k(num_right(responses), len(responses), k) for responses in problems])


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """The chance that at least one of ``k`` samples of a problem is right, without bias, from ``n >= k`` samples.

    ``1 - C(n - c, k) / C(n, k)`` with ``c`` right ones of ``n``: the share of the subsets of ``k`` samples that hold a
    right one. (``1 - (1 - c / n)^k`` would be biased.)

    Raises:
        ValueError: ``k`` is not 1 to ``num_samples``, or ``num_right`` not 0 to ``num_samples``.

    Source: Chen et al. 2021 (arXiv:2107.03374, equation 1).

    >>> [pass_at_k(1, 4, k) for k in (1, 2, 4)], pass_at_k(3, 4, 2)
    ([0.25, 0.5, 1.0], 1.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} needs {k} samples or more; there are {num_samples}, {num_right} of them right.")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def num_right(responses: Sequence[Response]) -> int:
    """How many of a problem's responses are right."""
    return sum(response.score.success for response in responses)


def num_failed(problems: Sequence[Sequence[Response]]) -> int:
    """Responses at which the grader failed."""
    return sum(response.score.error is not None for responses in problems for response in responses)


def _nothing(problem: int, responses: Sequence[Response]) -> None:
    """What happens at every graded problem where nobody listens."""


class Evaluator:
    """Measures the engine's policy on held-out problems.

    The random streams derive from ``(seed, problem, sample)`` only, so that two evaluations differ by the policy alone.
    A problem is graded by ``env.grader`` while the engine still generates others; a response at which the grader fails
    is not right, and the log says how many there were.

    Args:
        env: prompts, tokenizer and grader of the task.
        engine: holds the policy to measure.
        examples: the held-out problems.
        max_tokens: most tokens of a response.
        avg_at_k: samples per problem at temperature 1; 0 measures the greedy answer only.
        seed: seed of the run.
    """

    def __init__(
        self,
        env: TaskEnv,
        engine: Generates,
        examples: Sequence[Example],
        *,
        max_tokens: int,
        avg_at_k: int,
        seed: int,
    ):
        self.env = env
        self.engine = engine
        self.examples = tuple(examples)
        self.max_tokens = max_tokens
        self.avg_at_k = avg_at_k
        self.seed = seed

    def measure(self) -> dict[str, float]:
        """``eval/accuracy`` and ``eval/stderr`` (greedy), ``eval/avg_at_k`` with its error, ``time/eval_s``."""
        began = time.perf_counter()
        problems = self.responses(1, temperature=0.0)
        greedy = accuracy(problems)
        found = {"eval/accuracy": greedy.mean, "eval/stderr": greedy.stderr, "eval/num_samples": greedy.num_problems}
        failed = num_failed(problems)
        if self.avg_at_k:
            problems = self.responses(self.avg_at_k, temperature=1.0)
            sampled = accuracy(problems)
            failed += num_failed(problems)
            found |= {"eval/avg_at_k": sampled.mean, "eval/avg_at_k_stderr": sampled.stderr}
        return found | {"eval/grader_errors": failed, "time/eval_s": time.perf_counter() - began}

    def responses(
        self,
        num_samples: int,
        *,
        temperature: float,
        on_graded: Callable[[int, Sequence[Response]], None] = _nothing,
    ) -> list[list[Response]]:
        """``num_samples`` graded responses to each problem, in the order of the problems.

        Args:
            num_samples: per problem.
            temperature: 0 is greedy.
            on_graded: called in this thread with the index of a problem and its responses, once they are graded; in
                the order in which that happens.
        """
        requests = [
            group_request(self.env, index, example, num_samples=num_samples, seed=sample_seed(self.seed, index, 1))
            for index, example in enumerate(self.examples)
        ]
        sampling = Sampling(max_tokens=self.max_tokens, temperature=temperature)
        grading: dict[int, _Grading] = {}
        found: dict[int, list[Response]] = {}

        def collect(index: int) -> None:
            found[index] = grading.pop(index).responses()
            on_graded(index, found[index])

        for output in self.engine.generate(requests, sampling):
            texts = [self.env.response_text(sample) for sample in output.samples]
            scores = self.env.grader.scores([(text, self.examples[output.group_id]) for text in texts])
            grading[output.group_id] = _Grading(output.samples, texts, scores)
            for index in [index for index, one in grading.items() if one.scores.done()]:
                collect(index)
        for index in list(grading):
            collect(index)
        problems = [found[index] for index in range(len(requests))]
        _tell_failures([response.score for responses in problems for response in responses])
        return problems


@dataclass(frozen=True)
class _Grading:
    """A problem whose responses are with the grader."""

    samples: Sequence[Sample]
    texts: Sequence[str]
    scores: Future[list[Score]]

    def responses(self) -> list[Response]:
        """Waits for the grader."""
        graded = zip(self.samples, self.texts, self.scores.result(), strict=True)
        return [Response(text, score, _length(sample), sample.truncated) for sample, text, score in graded]


def _length(sample: Sample) -> int:
    """Tokens that the policy wrote."""
    mask = sample.assistant_mask
    return len(sample.token_ids) if mask is None else int(mask.sum())


def _tell_failures(scores: Sequence[Score]) -> None:
    """How many gradings failed; the first is logged with its cause."""
    errors = [score.error for score in scores if score.error is not None]
    if errors:
        logger.warning(
            "The grader failed at %d of %d responses of this evaluation, which count as wrong; the first: %s",
            *(len(errors), len(scores), errors[0]),
        )
