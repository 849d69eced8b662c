"""Evaluation on held-out problems: greedy accuracy, avg@k and pass@k."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from sota_grpo import keys
from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.rl.records import VERDICTS, Example, Sample, Sampling, Score, sample_seed, total_reward

logger = logging.getLogger(__name__)

#: (hits, trials) of one problem: how many responses or checks were right, of how many.
Counts = tuple[float, float]


def accuracy(counts: Sequence[Counts], before: Sequence[Counts] | None = None) -> dict[str, float]:
    """Return ``{"accuracy": .., "stderr": ..}``: total hits / total trials (at least one), and its standard error.

    Problem ``i`` of ``n`` has ``y_i`` hits in ``m_i`` trials, and ``R = sum(y) / sum(m)``. Problems are the independent
    units (clusters). By the ratio estimator,

        stderr = sqrt(n / (n - 1) * sum(e_i^2)),    e_i = (y_i - R m_i) / sum(m).

    If all ``m_i`` are equal, ``stderr`` is ``std(y / m, ddof=1) / sqrt(n)``; with one problem it is 0. With ``before``,
    counts of the same problems (ValueError if their number differs), return the difference to the accuracy of
    ``before``, and its error, in which the difference of the two ``e_i`` is squared.

    Source: Cochran, Sampling Techniques, 3rd ed., sections 2.11 and 9A.1.

    >>> accuracy([(1, 1), (1, 1), (0, 1), (0, 1)], before=[(0, 1), (1, 1), (0, 1), (0, 1)])
    {'accuracy': 0.25, 'stderr': 0.25}
    """
    ratio, terms = _linearised(counts)
    if before is not None:
        old, old_terms = _linearised(before)
        ratio, terms = ratio - old, [new - then for then, new in zip(old_terms, terms, strict=True)]
    count = len(terms)
    error = math.sqrt(count / (count - 1) * math.fsum(term * term for term in terms)) if count > 1 else 0.0
    return {"accuracy": ratio, "stderr": error}


def _linearised(counts: Sequence[Counts]) -> tuple[float, list[float]]:
    trials = math.fsum(tried for _, tried in counts)
    ratio = math.fsum(hits for hits, _ in counts) / trials
    return ratio, [(hits - ratio * tried) / trials for hits, tried in counts]


#: Fraction of the held-out problems, the first, after which an evaluation with a target ends if that is out of reach.
SUBSET = 1 / 4
#: Largest probability that the subset ends an evaluation although all problems together reach the target.
MISSED = 0.1


def num_needed(target: float, num_problems: int) -> int:
    """Return the smallest number of right answers to ``num_problems`` problems with a fraction of at least ``target``.

    >>> num_needed(0.3, 541), num_needed(0.07, 100)
    (163, 7)
    """
    return next(count for count in range(num_problems + 1) if count / num_problems >= target)


def is_out_of_reach(hits: int, num_subset: int, num_problems: int, target: float) -> bool:
    """Return whether ``hits`` right answers in a random subset are too few to reach ``target`` on all problems.

    One-sided exact test: an evaluation that would reach ``target`` is ended with a probability below :data:`MISSED`. If
    ``K =`` :func:`num_needed` of the ``N = num_problems`` problems are right, the hits ``X`` among ``n = num_subset``
    of them are hypergeometric. The target is out of reach if, for ``h = hits``,

        P(X <= h) = sum over i <= h of C(K, i) C(N - K, n - i) / C(N, n) < MISSED.

    >>> [is_out_of_reach(hits, 136, 541, 0.3) for hits in (33, 34, 35, 36)]  # 24.3, 25.0, 25.7 and 26.5 %
    [True, True, False, False]
    """
    needed = num_needed(target, num_problems)
    ways = sum(math.comb(needed, i) * math.comb(num_problems - needed, num_subset - i) for i in range(hits + 1))
    return ways / math.comb(num_problems, num_subset) < MISSED


@dataclass(frozen=True)
class Response:
    """A graded response; of a dialog: the last turn's text, and the tokens of all of the policy's turns."""

    text: str
    score: Score
    num_tokens: int
    truncated: bool
    followed_up: bool = False  # the task answered a turn with a user turn; False with tools and for agents


def pass_at_k(num_right: int, num_samples: int, k: int) -> float:
    """Return the unbiased estimate of pass@k: the probability that at least one of ``k`` samples is right.

    ``1 - C(n - c, k) / C(n, k)`` with ``c`` right of ``n >= k``: the fraction of ``k``-subsets with a right sample.

    ValueError unless ``1 <= k <= n`` and ``0 <= c <= n``. Source: Chen et al. 2021 (arXiv:2107.03374, equation 1).

    >>> [pass_at_k(1, 4, k) for k in (1, 2, 4)], pass_at_k(3, 4, 2)
    ([0.25, 0.5, 1.0], 1.0)
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"need 1 <= k <= n and 0 <= right <= n; got k={k}, right={num_right}, n={num_samples}")
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _shares(problems: Sequence[Sequence[Response]], weights: Mapping[str, float]) -> dict[str, Any]:
    responses = [response for group in problems for response in group]
    right = [(sum(one.score.success for one in group) / len(group), 1.0) for group in problems]
    reward = accuracy([(fmean(total_reward(one.score.terms, weights) for one in group), 1.0) for group in problems])
    return accuracy(right) | {
        "reward": reward["accuracy"],
        "reward_stderr": reward["stderr"],
        "truncated": sum(response.truncated for response in responses) / len(responses),
        "response_tokens": sum(response.num_tokens for response in responses) / len(responses),
    }


@dataclass(eq=False)
class Evaluator:
    """Evaluates the engine's policy on held-out problems.

    Seeds depend only on ``seed`` and the indices of problem and sample. A response with a grader error counts as wrong.
    """

    rollouts: Rollouts
    examples: Sequence[Example]  # the held-out problems
    _: KW_ONLY
    max_tokens: int  # per response
    avg_at_k: int  # sampled responses per problem, at temperature 1; 0: one greedy response only
    seed: int
    success_above: float | None = None  # a response is right if its reward is above this and no verdict is given
    by_reward: bool = field(default=False, init=False)  # the last evaluation used success_above: no verdicts
    _has_warned: bool = field(default=False, init=False)

    def measure(self, target: float | None = None) -> dict[str, float]:
        """Evaluate the policy and return the metrics; accuracies are fractions.

        Of greedy responses: ``eval/accuracy``, ``eval/stderr``, ``eval/reward``, ``eval/reward_stderr``,
        ``eval/reward/<term>``; for each accuracy of :meth:`benchmark` ``eval/task/<name>`` and
        ``eval/task_stderr/<name>``; if a response was followed up (:class:`Response`), ``eval/first_turn_accuracy``. Of
        sampled responses, unless ``avg_at_k`` is 0: ``eval/avg_at_k``, ``eval/avg_at_k_stderr``. Of both:
        ``eval/num_samples`` (evaluated problems), ``eval/grader_errors``, ``time/eval_s``. With a ``target`` (a
        fraction) that :func:`is_out_of_reach` after the first :data:`SUBSET` of the problems, only these are evaluated.
        """
        began, count, problems = time.perf_counter(), len(self.examples), list[list[Response]]()
        for share in (1.0,) if target is None else (SUBSET, 1.0):
            problems += self.responses(1, temperature=0.0, problems=range(len(problems), math.ceil(share * count)))
            hits = sum(one.score.success for (one,) in problems)
            if target is not None and is_out_of_reach(hits, len(problems), count, target):
                break
        measured = self.evaluate(problems)
        greedy = measured["greedy"]
        metrics = {"eval/accuracy": greedy["accuracy"], "eval/stderr": greedy["stderr"]}
        metrics |= {"eval/num_samples": len(problems)}
        metrics |= {f"eval/{name}": greedy[name] for name in ("reward", "reward_stderr")} | self._terms(problems)
        for name in [name for name in measured["counts"] if name != "accuracy"]:
            counted = accuracy(measured["counts"][name])  # greedy may have another figure of this name
            metrics |= {f"eval/task/{name}": counted["accuracy"], f"eval/task_stderr/{name}": counted["stderr"]}
        if any(response.followed_up for responses in problems for response in responses):
            at_once = [fmean(one.score.success and not one.followed_up for one in responses) for responses in problems]
            metrics["eval/first_turn_accuracy"] = fmean(at_once)
        if self.avg_at_k:
            sampled = measured["sampled"]
            metrics |= {"eval/avg_at_k": sampled["accuracy"], "eval/avg_at_k_stderr": sampled["stderr"]}
        return metrics | {"eval/grader_errors": measured["grader_errors"], "time/eval_s": time.perf_counter() - began}

    def evaluate(
        self,
        greedy: list[list[Response]] | None = None,
        *,
        temperature: float = 1.0,
        on_graded: Callable[[bool, int, Sequence[Response]], None] = lambda greedy, problem, responses: None,
    ) -> dict[str, Any]:
        """Return the accuracy of greedy responses; unless ``k = avg_at_k`` is 0, also avg@k and pass@1, 2, 4, ..., k.

        Args:
            greedy: graded greedy responses to the first problems, if sampled before: only these problems are evaluated.
            temperature: of the ``k`` samples per problem.
            on_graded: called for each problem with (is greedy, problem index, graded responses), not for ``greedy``.

        Returns:
            JSON-serializable dict: ``num_problems``, ``grader_errors``, ``greedy``, ``counts``; if ``k`` is not 0, also
            ``k``, ``temperature``, ``sampled`` and ``pass_at_k``, whose keys are texts. Accuracies are fractions with
            the standard error over problems; ``counts`` has (hits, trials) per problem of each greedy accuracy, which
            ``greedy`` has by the same name, unless it has another figure of this name (``reward``).
        """
        problems = greedy or self.responses(1, temperature=0.0, on_graded=partial(on_graded, True))
        indices = range(len(problems))
        counted, weights = self.benchmark(problems), self.rollouts.env.task.term_weights
        counts = {"accuracy": [(float(one.score.success), 1.0) for (one,) in problems], **counted}
        shares = {name: accuracy(counted[name]) for name in counted} | _shares(problems, weights)
        result: dict[str, Any] = {"num_problems": len(problems), "greedy": shares, "counts": counts}
        responses, count = [one for group in problems for one in group], self.avg_at_k
        if count:
            graded = partial(on_graded, False)
            problems = self.responses(count, temperature=temperature, problems=indices, on_graded=graded)
            responses += [one for group in problems for one in group]
            right = [sum(one.score.success for one in group) for group in problems]
            ks = sorted({count, *(1 << power for power in range(count.bit_length()))})
            passes = {str(k): accuracy([(pass_at_k(share, count, k), 1.0) for share in right]) for k in ks}
            result |= {"k": count, "temperature": temperature, "sampled": _shares(problems, weights)}
            result |= {"pass_at_k": passes}
        return result | {"grader_errors": sum(one.score.error is not None for one in responses)}

    def sentence(self, steps: int, metrics: Mapping[str, float]) -> str:
        """Return a sentence, without its period, on the metrics of :meth:`measure` after ``steps`` training steps."""
        percent, reward = 100 * metrics["eval/accuracy"], metrics["eval/reward"]
        after = "after 1 step" if steps == 1 else f"after {steps} steps"
        if metrics["eval/num_samples"] < len(self.examples):
            after += f", on the first {metrics['eval/num_samples']} of {len(self.examples)} problems"
        if reward == metrics["eval/accuracy"]:
            return f"Held-out accuracy {after}: {percent:.1f} %"
        if self.by_reward:
            above = f"reward.success_above={self.success_above:g}"
            return f"Held-out mean reward {after}: {reward:.3g} ({percent:.1f} % of the responses above {above})"
        return f"Held-out accuracy {after}: {percent:.1f} %, mean reward {reward:.3g}"

    def _terms(self, problems: Sequence[Sequence[Response]]) -> dict[str, float]:
        """Return the mean of each reward term; warn once if rewards vary, but all or none are above the limit."""
        weights, metrics = self.rollouts.env.task.term_weights, dict[str, float]()
        scores = [response.score for responses in problems for response in responses]
        for name in weights:
            values = [value for value in (score.terms.get(name) for score in scores) if value is not None]
            metrics |= {f"eval/reward/{name}": fmean(values)} if values else {}
        rewards = [total_reward(score.terms, weights) for score in scores]
        lowest, highest, above = min(rewards), max(rewards), self.success_above
        names = {name.rpartition("/")[2] for score in scores for name in score.info}
        self.by_reward = above is not None and names.isdisjoint(VERDICTS)
        varies = lowest < highest and not self._has_warned
        if above is not None and self.by_reward and varies and (lowest > above or highest <= above):
            logger.warning(
                "The rewards of all %d greedy held-out responses, from %.3g to %.3g, are %s reward.success_above=%g: "
                "accuracy is not informative. Read eval/reward, or set reward.success_above between the rewards of "
                "wrong and right responses.",
                *(len(scores), lowest, highest, "above" if lowest > above else "not above", above),
            )
            self._has_warned = True
        return metrics

    def benchmark(self, problems: Sequence[Sequence[Response]]) -> dict[str, list[Counts]]:
        """Return {accuracy name: [(hits, trials) of each problem]} by the task's ``counts``; {} if it has none.

        ``problems`` has the graded responses to the first problems, in order. A name without any trial is left out, and
        so is ``accuracy``, that of all problems.
        """
        count = getattr(self.rollouts.env.task, "counts", None)
        counts: dict[str, list[Counts]] = {}
        if count is None:
            return counts
        for example, responses in zip(self.examples, problems):
            each = [count(response.score, example) for response in responses]
            for name in each[0]:
                hits, trials = zip(*(one[name] for one in each))
                counts.setdefault(name, []).append((sum(hits), sum(trials)))
        return {name: pairs for name, pairs in counts.items() if name != "accuracy" and any(m for _, m in pairs)}

    def responses(
        self,
        num_samples: int,
        *,
        temperature: float,
        problems: range | None = None,
        on_graded: Callable[[int, Sequence[Response]], object] = lambda problem, responses: None,
    ) -> list[list[Response]]:
        """Return ``num_samples`` graded responses to each problem, in order of problems; temperature 0 is greedy.

        ``problems`` are the indices of the problems; None: all of them. ``on_graded(problem index, responses)`` is
        called in this thread as problems are graded, in any order. Grader errors are logged as one warning.
        """
        indices = range(len(self.examples)) if problems is None else problems
        prompts = [
            Prompt(index, self.examples[index], num_samples, sample_seed(self.seed, index, 1)) for index in indices
        ]
        sampling = Sampling(max_tokens=self.max_tokens, temperature=temperature)
        graded: dict[int, list[Response]] = {}
        for group in self.rollouts.stream(prompts, sampling):
            index, texts = group.prompt.group_id, group.rows.get(keys.RESPONSE_TEXT)
            graded[index] = [_response(*one) for one in zip(texts, group.samples, group.scores, strict=True)]
            on_graded(index, graded[index])
        scores = [response.score for index in indices for response in graded[index]]
        errors = [score.error for score in scores if score.error is not None]
        if errors:
            logger.warning(
                "The grader failed on %d of %d responses of this evaluation, and these count as wrong. First error: %s",
                *(len(errors), len(scores), errors[0]),
            )
        return [graded[index] for index in indices]


def _response(text: str, sample: Sample, score: Score) -> Response:
    mask, replies = sample.assistant_mask, (sample.record or {}).get("replies", ())
    followed_up = any(turn["role"] == "user" for turns in replies for turn in turns)
    num_tokens = len(sample.token_ids) if mask is None else int(mask.sum())
    return Response(text, score, num_tokens, sample.truncated, followed_up)
