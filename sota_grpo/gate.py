"""The gate: before the first step, prove on real samples that this run would train on right mathematics.

Each check is one function of :class:`Subject` that returns a :class:`Check`. None of them leaves a trace: parameters,
engine weights, random state and the position in the data are afterwards what they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import nn

from sota_grpo import keys
from sota_grpo.checkpoint import rng_state, set_rng_state
from sota_grpo.collate import row_list
from sota_grpo.engines.base import Engine
from sota_grpo.envs import TaskEnv, finish_row, prompt_rows
from sota_grpo.errors import UserError
from sota_grpo.learner import Learner
from sota_grpo.publish import Publisher
from sota_grpo.records import GroupRequest, Sampling, sample_seed
from sota_grpo.tasks.base import Task

logger = logging.getLogger(__name__)

NUM_GRADED = 64  # examples whose gold and empty answers are graded
PROBE_SCALE = 0.1  # relative size of the change that a push must carry to the engine


class CheckError(UserError):
    """The gate found something that would make the training wrong."""


@dataclass(frozen=True)
class Check:
    """The outcome of one check; the sentence carries the measured figures."""

    name: str
    passed: bool
    sentence: str
    seconds: float = 0.0


@dataclass
class Subject:
    """What is checked: the parts of the run as they will train.

    ``transforms`` are those of the source (reference log-probs, advantages). ``tolerance`` is the largest mean gap,
    in nats per token, that the dtypes of engine and trainer allow.
    """

    task: Task
    env: TaskEnv
    engine: Engine
    learner: Learner
    publisher: Publisher
    sampling: Sampling
    seed: int
    tolerance: float
    split_tolerance: float
    transforms: Sequence[Callable[[TensorDictBase], TensorDictBase]] = ()
    rows: list[TensorDictBase] = field(default_factory=list)

    def sample(self, num_prompts: int = 4, num_samples: int = 2, salt: int = 0) -> list[TensorDictBase]:
        """Fresh graded rows of the first training prompts, outside the run's own stream of prompts."""
        examples = list(self.task.train[:num_prompts])
        requests = [
            GroupRequest(
                index, tuple(self.env.prompt_ids(example)), num_samples, sample_seed(self.seed, index, 2 + salt)
            )
            for index, example in enumerate(examples)
        ]
        found: list[TensorDictBase] = []
        for output in self.engine.generate(requests, self.sampling):
            example = examples[output.group_id]
            prompts = prompt_rows(output.group_id, example, self.env.prompt_ids(example), num_samples)
            rows = [finish_row(row, sample, self.env.tokenizer) for row, sample in zip(prompts, output.samples)]
            found += self.env.grade(rows)
        return found


def gold_answers_earn_the_full_reward(subject: Subject) -> Check:
    """A gold answer is right and earns more than an empty one, for the first training and held-out examples."""
    task = subject.task
    examples = [*task.train[:NUM_GRADED], *task.heldout[:NUM_GRADED]]
    gold = [task.score(task.gold_response(example), example) for example in examples]
    empty = [task.score("", example) for example in examples]
    reward = lambda score: sum(task.term_weights[name] * value for name, value in score.terms.items())  # noqa: E731
    full = max(map(reward, gold))
    bad = [
        example
        for example, right, nothing in zip(examples, gold, empty)
        if not right.success or reward(right) < full or reward(nothing) >= reward(right)
    ]
    sentence = f"{len(examples) - len(bad)} of {len(examples)} gold answers earn the full reward of {full:g}"
    if bad:
        sentence += f"; the first that does not: {bad[0].query[:80]!r} with answer {bad[0].answer[-40:]!r}"
    return Check("gold answers earn the full reward", not bad, sentence)


def no_held_out_question_is_trained_on(subject: Subject) -> Check:
    """The normalised questions of the two splits are disjoint."""
    normal = lambda example: " ".join(example.query.lower().split())  # noqa: E731
    shared = {normal(e) for e in subject.task.heldout} & {normal(e) for e in subject.task.train}
    sentence = f"{len(shared)} held-out questions stand in the training split"
    if shared:
        sentence += f", for example {min(shared)[:80]!r}; take them out of one of the two"
    return Check("no held-out question is trained on", not shared, sentence)


def engine_and_trainer_agree(subject: Subject) -> Check:
    """Mean over sampled tokens of |log-prob of the engine - log-prob of the trainer|."""
    gaps = _gaps(subject.learner, subject.rows)
    mean, largest = float(gaps.mean()), float(gaps.max())
    return Check(
        "engine and trainer agree",
        mean <= subject.tolerance,
        f"mean log-prob gap {mean:.2g}, largest {largest:.2g}, over {gaps.numel()} tokens "
        f"(mean allowed {subject.tolerance:g})",
    )


def first_ratio_is_one(subject: Subject) -> Check:
    """The objective's own ratio on fresh samples: effective sample size 1, nothing clipped."""
    metrics = subject.learner.diagnose(subject.rows)
    ess = metrics["ess"]
    allowed = max(20 * subject.tolerance, 1e-3)
    return Check(
        "the first ratio is one",
        abs(1 - ess) <= allowed and metrics["ratio_gap"] <= allowed,
        f"effective sample size {ess:.6f}, mean |ratio - 1| {metrics['ratio_gap']:.2g} (allowed {allowed:g})",
    )


def gradient_does_not_depend_on_the_split(subject: Subject) -> Check:
    """The gradient of one micro-batch equals the sum over micro-batches of one row each."""
    whole = subject.learner.gradient(subject.rows, token_budget=1 << 30)
    split = subject.learner.gradient(subject.rows, token_budget=1)
    scale = float(torch.stack([grad.norm() for grad in whole.values()]).norm())
    gap = float(torch.stack([(whole[name] - split[name]).norm() for name in whole]).norm()) / max(scale, 1e-30)
    return Check(
        "the gradient does not depend on the split",
        scale > 0 and gap <= subject.split_tolerance,
        f"relative gap {gap:.2g} at gradient norm {scale:.3g} (allowed {subject.split_tolerance:g})",
    )


def pushed_weights_landed(subject: Subject) -> Check:
    """After a push of changed weights the engine samples from them, and from the old ones once those are back."""
    learner, version = subject.learner, subject.learner.version
    kept = _perturb(learner.policy)
    try:
        subject.publisher.publish(version)
        rows = subject.sample(num_prompts=2, salt=1)
        new = float(_gaps(learner, rows).mean())
    finally:
        for parameter, value in kept:
            parameter.data.copy_(value)
    old = float(_gaps(learner, rows).mean())
    subject.publisher.publish(version)
    back = float(_gaps(learner, subject.sample(num_prompts=2)).mean())
    passed = new <= max(subject.tolerance, old / 10) and back <= subject.tolerance and old > new
    return Check(
        "pushed weights landed",
        passed,
        f"mean log-prob gap {new:.2g} to the pushed weights, {old:.2g} to the old ones, {back:.2g} after the push back",
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


def _gaps(learner: Learner, rows: Sequence[TensorDictBase]) -> torch.Tensor:
    """|engine - trainer| log-prob of every sampled token, flat."""
    batch = learner.padded(rows)
    mine = learner.log_probs(batch)
    theirs, mask = batch.get(keys.LOG_PROBS), batch.get(keys.ASSISTANT_MASK)
    return (mine - theirs).abs()[mask]


def _perturb(policy: nn.Module) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Change the small trainable parameters and the embeddings in place; returns what they were."""
    named = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    chosen = [(n, p) for n, p in named if p.ndim == 1 or "embed_tokens" in n or "lm_head" in n or "lora_B" in n]
    generator = torch.Generator().manual_seed(0)
    kept = []
    for _, parameter in chosen or named:
        kept.append((parameter, parameter.data.clone()))
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)
        scale = float(parameter.data.float().std()) if parameter.numel() > 1 else 0.0
        parameter.data.add_(noise * PROBE_SCALE * (scale or 1.0))
    return kept
