"""Accuracy on held-out problems: greedy, and the mean over k samples at temperature 1."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv
from sota_grpo.records import Example, GroupRequest, Sampling, sample_seed


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

    Args:
        env: prompts, tokenizer and scorer of the task.
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
        greedy = self._accuracy(1, self.sampling)
        found = {"eval/accuracy": greedy.mean, "eval/stderr": greedy.stderr, "eval/num_samples": greedy.num_problems}
        if self.avg_at_k:
            sampled = self._accuracy(self.avg_at_k, replace(self.sampling, temperature=1.0))
            found |= {"eval/avg_at_k": sampled.mean, "eval/avg_at_k_stderr": sampled.stderr}
        return found | {"time/eval_s": time.perf_counter() - began}

    def _accuracy(self, samples: int, sampling: Sampling) -> Accuracy:
        requests = [
            GroupRequest(index, tuple(self.env.prompt_ids(example)), samples, sample_seed(self.seed, index, 1))
            for index, example in enumerate(self.examples)
        ]
        means = {}
        for output in self.engine.generate(requests, sampling):
            example = self.examples[output.group_id]
            scores = [self.env.score_ids(sample.token_ids, example).success for sample in output.samples]
            means[output.group_id] = sum(scores) / len(scores)
        return Accuracy.of([means[index] for index in range(len(requests))])
