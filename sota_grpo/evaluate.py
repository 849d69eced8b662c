"""Accuracy on held-out problems: greedy, and the mean over k samples at temperature 1."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from sota_grpo.batches import group_request
from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv
from sota_grpo.records import Example, Sampling, Score, sample_seed

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


class Evaluator:
    """Measures the engine's policy on the first ``num_samples`` held-out problems.

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
        self.sampling = Sampling(max_tokens=max_tokens, temperature=0.0)
        self.avg_at_k = avg_at_k
        self.seed = seed

    def measure(self) -> dict[str, float]:
        """``eval/accuracy`` and ``eval/stderr`` (greedy), ``eval/avg_at_k`` with its error, ``time/eval_s``."""
        began = time.perf_counter()
        self._num_failed = 0
        greedy = self._accuracy(1, self.sampling)
        found = {"eval/accuracy": greedy.mean, "eval/stderr": greedy.stderr, "eval/num_samples": greedy.num_problems}
        if self.avg_at_k:
            sampled = self._accuracy(self.avg_at_k, replace(self.sampling, temperature=1.0))
            found |= {"eval/avg_at_k": sampled.mean, "eval/avg_at_k_stderr": sampled.stderr}
        return found | {"eval/grader_errors": self._num_failed, "time/eval_s": time.perf_counter() - began}

    def _accuracy(self, samples: int, sampling: Sampling) -> Accuracy:
        requests = [
            group_request(self.env, index, example, num_samples=samples, seed=sample_seed(self.seed, index, 1))
            for index, example in enumerate(self.examples)
        ]
        grading: dict[int, Future[list[Score]]] = {}
        for output in self.engine.generate(requests, sampling):
            example = self.examples[output.group_id]
            asked = [(self.env.response_text(sample), example) for sample in output.samples]
            grading[output.group_id] = self.env.grader.scores(asked)
        scores = [grading[index].result() for index in range(len(requests))]
        self._num_failed += _failures([score for group in scores for score in group])
        return Accuracy.of([sum(score.success for score in group) / len(group) for group in scores])


def _failures(scores: Sequence[Score]) -> int:
    """How many gradings failed; the first is logged with its cause."""
    errors = [score.error for score in scores if score.error is not None]
    if errors:
        logger.warning(
            "The grader failed at %d of %d responses of this evaluation, which count as wrong; the first: %s",
            *(len(errors), len(scores), errors[0]),
        )
    return len(errors)
