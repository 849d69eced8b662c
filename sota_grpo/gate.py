"""The gate: before the first step, prove on real samples that this run would train on right mathematics.

Each check is one function of :class:`Subject` that returns a :class:`Check`. None of them leaves a trace: parameters,
engine weights, random state and the position in the data are afterwards what they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from tensordict import TensorDictBase, lazy_stack

from sota_grpo import keys
from sota_grpo.batches import finish_group, group_request
from sota_grpo.checkpoint import rng_state, set_rng_state
from sota_grpo.collate import row_list
from sota_grpo.engines.base import Generates
from sota_grpo.envs import TaskEnv, prompt_rows
from sota_grpo.errors import UserError
from sota_grpo.publish import Publisher
from sota_grpo.records import Example, Sampling, Score, sample_seed
from sota_grpo.schedule import LearnerSettings
from sota_grpo.scoring import total_reward
from sota_grpo.tasks.base import Task
from sota_grpo.tasks.splits import normalised

logger = logging.getLogger(__name__)

NUM_GRADED = 64  # examples whose gold and empty answers are graded
ENOUGH = 4  # failures of the grader after which no more are
EXACT = 1e-3  # a tolerance below it says that engine and trainer both compute in float32
ROUNDING = 1e-6  # float32's own error in a mean of ratios


class CheckError(UserError):
    """The gate found something that would make the training wrong."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check; the sentence carries the measured figures."""

    name: str
    passed: bool
    sentence: str
    seconds: float = 0.0


class Answers(Protocol):
    """What the gate asks of a learner, in this process or another: see :class:`sota_grpo.learner.Learner`."""

    settings: LearnerSettings
    version: int

    def log_prob_gaps(self, rows: Sequence[TensorDictBase]) -> torch.Tensor: ...

    def diagnose(self, rows: Sequence[TensorDictBase]) -> dict[str, float | None]: ...

    def gradient_gap(self, rows: Sequence[TensorDictBase], token_budgets: tuple[int, int]) -> tuple[float, float]: ...

    def perturb(self) -> None: ...

    def restore(self) -> None: ...


@dataclass
class Subject:
    """What is checked: the parts of the run as they will train.

    ``transforms`` are those of the source (reference log-probs, advantages). ``tolerance`` is the largest mean gap, in
    nats per token, that the dtypes of engine and trainer allow; the other bounds follow from it.
    """

    task: Task
    env: TaskEnv
    engine: Generates
    learner: Answers
    publisher: Publisher
    sampling: Sampling
    seed: int
    tolerance: float
    transforms: Sequence[Callable[[TensorDictBase], TensorDictBase]] = ()
    rows: list[TensorDictBase] = field(default_factory=list)

    def sample(self, num_prompts: int = 4, num_samples: int = 2, salt: int = 0) -> list[TensorDictBase]:
        """Fresh graded rows of the first training prompts, outside the run's own stream of prompts."""
        examples = list(self.task.train[:num_prompts])
        requests = [
            group_request(
                self.env, index, example, num_samples=num_samples, seed=sample_seed(self.seed, index, 2 + salt)
            )
            for index, example in enumerate(examples)
        ]
        grading = []
        for output in self.engine.generate(requests, self.sampling):
            example = examples[output.group_id]
            prompts = prompt_rows(output.group_id, example, self.env.prompt_ids(example), num_samples)
            grading.append(self.env.begin_grading(finish_group(prompts, output, self.env.tokenizer)))
        return [row for rows in grading for row in rows.result()]


def gold_answers_earn_the_full_reward(subject: Subject) -> Check:
    """A gold answer is right and earns more than an empty one, for the first training and held-out examples.

    Where the task knows no gold answer, the empty one must be gradable, at least once: as a whole group of them where
    the grader looks at groups.
    """
    task, num_texts, applies = subject.task, 0, False
    known: list[tuple[Example, Score, Score]] = []  # with the scores of the empty and of the gold answer
    errors: list[str] = []
    for example in [*task.train[:NUM_GRADED], *task.heldout[:NUM_GRADED]]:
        gold = task.gold_response(example)
        siblings = subject.env.repeats if hasattr(task.score, "score_group") else 1
        texts = [""] * siblings if gold is None else ["", gold]
        scores = subject.env.grader.scores([(text, example) for text in texts]).result()
        known += [(example, scores[0], scores[1])] if gold is not None else []
        errors += [score.error for score in scores if score.error is not None]
        applies |= any(value is not None for score in scores for value in score.terms.values())
        num_texts += len(scores)
        if len(errors) >= ENOUGH:  # each may have cost the grader's whole deadline
            break
    full = max((_reward(task, right) for *_, right in known), default=0.0)
    bad = [
        example
        for example, nothing, right in known
        if not right.success or _reward(task, right) < full or _reward(task, nothing) >= _reward(task, right)
    ]
    sentence = f"{len(known) - len(bad)} of {len(known)} gold answers earn the full reward of {full:g}"
    if not known:
        sentence = "the task knows no gold answers"
    if bad:
        sentence += f"; the first that does not: {bad[0].query[:80]!r} with answer {bad[0].answer[-40:]!r}"
    if not applies:
        sentence += f"; no reward applies to any of {num_texts} texts, and where that goes on nothing is learned"
    if errors:
        sentence += f"; the grader failed at {len(errors)} of {num_texts} texts, the first: {errors[0]}"
    return Check("gold answers earn the full reward", not bad and len(errors) < num_texts, sentence)


def _reward(task: Task, score: Score) -> float:
    return total_reward(score.terms, task.term_weights)


def no_held_out_question_is_trained_on(subject: Subject) -> Check:
    """The normalised questions of the two splits are disjoint."""
    shared = {normalised(e.query) for e in subject.task.heldout} & {normalised(e.query) for e in subject.task.train}
    sentence = f"{len(shared)} held-out questions stand in the training split"
    if shared:
        sentence += f", for example {min(shared)[:80]!r}; take them out of one of the two"
    return Check("no held-out question is trained on", not shared, sentence)


def engine_and_trainer_agree(subject: Subject) -> Check:
    """Mean over sampled tokens of |log-prob of the engine - log-prob of the trainer|, and its largest value.

    The largest may be 20 times the mean that is allowed: 1 nat where a dtype is half precision. A sharp policy hides a
    wrong temperature in the mean, since most of its tokens are certain under either; see :func:`first_ratio_is_one`.
    """
    gaps = subject.learner.log_prob_gaps(subject.rows).abs()
    mean, largest = float(gaps.mean()), float(gaps.max())
    return Check(
        "engine and trainer agree",
        mean <= subject.tolerance and largest <= 20 * subject.tolerance,
        f"mean log-prob gap {mean:.2g}, largest {largest:.2g}, over {gaps.numel()} tokens "
        f"(allowed {subject.tolerance:g} and {20 * subject.tolerance:g})",
    )


def first_ratio_is_one(subject: Subject) -> Check:
    """The loss's own diagnostics on fresh samples: effective sample size 1, no mismatch, in float32 nothing clipped.

    Normal gaps of mean ``tolerance`` have a variance of pi / 2 of its square, half of which is the mismatch KL and the
    whole 1 - ESS. So the square is allowed for the one and twice it for the other: 2.5e-3 and 5e-3 in half precision.
    Measured on the embedded policy (8 rows, 4 seeds): bfloat16 engine and autocast trainer have a mismatch KL up to
    2.2e-5, 1 - ESS up to 4.3e-5 and a largest gap up to 0.06; an engine at temperature 1 against a trainer at 0.8, both
    bfloat16, 3.1e-3 to 1.3e-2, 4.5e-3 to 1.2e-2 and 0.69 to 1.96, at a mean gap of only 0.019 to 0.038. How many
    tokens half precision clips depends on the clip's width (GSPO's 3e-4 is within the rounding): reported only.
    """
    found = subject.learner.diagnose(subject.rows)
    ess, kl, clipped = (found[name] for name in ("ess", "mismatch_kl", "clip_fraction"))
    assert ess is not None  # every sample has at least one token
    assert kl is not None
    assert clipped is not None
    allowed = max(subject.tolerance**2, ROUNDING)
    return Check(
        "the first ratio is one",
        1 - ess <= 2 * allowed and kl <= allowed and (clipped == 0 or subject.tolerance > EXACT),
        f"effective sample size {ess:.6f} (allowed {1 - 2 * allowed:g}), mismatch KL {kl:.2g} (allowed {allowed:g}), "
        f"{clipped:.2%} of the tokens clipped",
    )


def gradient_does_not_depend_on_the_split(subject: Subject) -> Check:
    """The gradient over micro-batches of several rows equals the sum over micro-batches of one row each."""
    longest = max(row.get(keys.FULL_TOKENS).shape[-1] for row in subject.rows)
    together = max(subject.learner.settings.micro_batch_tokens, 2 * longest)  # else each row is alone in both
    norm, gap = subject.learner.gradient_gap(subject.rows, (together, 1))
    return Check(
        "the gradient does not depend on the split",
        norm > 0 and gap <= subject.tolerance,
        f"relative gap {gap:.2g} at gradient norm {norm:.3g} (allowed {subject.tolerance:g})",
    )


def pushed_weights_landed(subject: Subject) -> Check:
    """After a push of changed weights the engine samples from them, and from the old ones once those are back.

    Every trainable tensor is changed. The gap to the pushed weights may be twice the gap after the push back, or a
    tenth of the gap to the old ones; in float32 neither is needed, and the gap must stay within the tolerance. A token
    counts for at most 1 nat, else a few that the old weights find impossible drown the rest.

    Measured on the embedded policy with a bfloat16 engine (8 rows, 5 seeds): the gap to the pushed weights is 0.02 to
    0.04 of that to the old ones; 0.43 to 1.5 of it when attention, MLP, norms or embeddings are left out of the push.
    """
    learner, version = subject.learner, subject.learner.version
    learner.perturb()
    try:
        subject.publisher.publish(version)
        rows = subject.sample(salt=1)
        new = _typical_gap(learner, rows)
    finally:
        learner.restore()
    old = _typical_gap(learner, rows)
    subject.publisher.publish(version)
    back = _typical_gap(learner, subject.sample())
    allowed = subject.tolerance if subject.tolerance < EXACT else max(2 * back, old / 10)
    return Check(
        "pushed weights landed",
        new <= allowed and back <= subject.tolerance and old > new,
        f"mean log-prob gap {new:.2g} to the pushed weights (allowed {allowed:.2g}), {old:.2g} to the old ones, "
        f"{back:.2g} after the push back",
    )


CHECKS: tuple[Callable[[Subject], Check], ...] = (
    gold_answers_earn_the_full_reward,
    no_held_out_question_is_trained_on,
    engine_and_trainer_agree,
    first_ratio_is_one,
    gradient_does_not_depend_on_the_split,
    pushed_weights_landed,
)


def run_gate(subject: Subject, mode: str, checks: Sequence[Callable[[Subject], Check]] = CHECKS) -> list[Check]:
    """Make every check; ``strict`` raises at the end with the sentences of those that failed, ``warn`` logs them.

    Raises:
        CheckError: a check failed and ``mode`` is ``strict``.
    """
    if mode == "off":
        return []
    random = rng_state()
    done: list[Check] = []
    batch = lazy_stack(subject.sample())
    for transform in subject.transforms:
        batch = transform(batch)
    subject.rows = row_list(batch)
    for check in checks:
        began = time.perf_counter()
        result = check(subject)
        result = Check(result.name, result.passed, result.sentence, time.perf_counter() - began)
        done.append(result)
        logger.info("check %s: %s, %s (%.2f s)", "passed" if result.passed else "FAILED", result.name, result.sentence,
                    result.seconds)  # fmt: skip
    set_rng_state(random)
    failed = [result for result in done if not result.passed]
    if failed and mode == "strict":
        sentences = "; ".join(f"{result.name}: {result.sentence}" for result in failed)
        raise CheckError(f"The check before training failed. {sentences}. check.mode=warn trains all the same.")
    for result in failed:
        logger.warning("check.mode=warn: %s: %s", result.name, result.sentence)
    return done


def _typical_gap(learner: Answers, rows: Sequence[TensorDictBase]) -> float:
    return float(learner.log_prob_gaps(rows).abs().clamp(max=1.0).mean())
