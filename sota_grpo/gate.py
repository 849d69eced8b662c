"""The gate: before the first step, prove on real samples that this run would train on right mathematics.

Each check is one function of :class:`Subject` that returns a :class:`Check`. None of them leaves a trace: parameters,
engine weights, random state and the position in the data are afterwards what they were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from tensordict import TensorDictBase, lazy_stack

from sota_grpo import keys
from sota_grpo.checkpoint import rng_state, set_rng_state
from sota_grpo.collate import row_list
from sota_grpo.gate_agreement import (
    SINGLE,
    allowed_gaps,
    engine_and_trainer_agree,
    engine_and_trainer_have_one_temperature,
    first_ratio_is_one,
)
from sota_grpo.gate_subject import NUM_SAMPLES, Answers, Check, CheckError, Subject
from sota_grpo.records import Example, Score
from sota_grpo.scoring import total_reward
from sota_grpo.tasks.base import Task
from sota_grpo.tasks.splits import normalised

logger = logging.getLogger(__name__)

NUM_GRADED = 64  # examples whose gold and empty answers are graded
NUM_GROUPS = 4  # examples for which a grader of groups is given a whole group: each may cost a call of a judge
ENOUGH = 4  # failures of the grader, at texts or at whole groups, after which no more are graded
NUM_COMPARED = 2 * NUM_SAMPLES  # rows whose gradient is computed twice: those of two prompts
PROBE_TOKENS = 32  # of a response that shows which weights an engine has
SPLIT = {True: 1e-4, False: 0.2}  # relative distance of two gradients that is allowed, in float32 or not


def gold_answers_earn_the_full_reward(subject: Subject) -> Check:
    """A gold answer is right and earns more than an empty one, for the first training and held-out examples.

    Where the task knows no gold answer, the empty one must be gradable for at least one training example: as a whole
    group where the grader looks at groups, as it will be in training.
    """
    task, num_texts, graded, applies = subject.task, 0, False, False
    known: list[tuple[Example, Score, Score]] = []  # with the scores of the empty and of the gold answer
    errors: list[str] = []
    lost = 0
    for example, siblings in _examples(subject):
        gold = task.gold_response(example)
        texts = [""] * siblings if gold is None else ["", gold]
        scores = subject.env.grader.scores([(text, example) for text in texts]).result()
        failures = [score.error for score in scores if score.error is not None]
        known += [(example, scores[0], scores[1])] if gold is not None else []
        graded |= len(failures) < len(scores)
        applies |= any(value is not None for score in scores for value in score.terms.values())
        errors += failures
        num_texts += len(scores)
        lost += len(failures) if siblings == 1 else len(failures) == siblings
        if lost >= ENOUGH or (not graded and any("TimeoutError" in failure for failure in failures)):
            break  # each may have cost the grader's whole deadline
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
    return Check("gold answers earn the full reward", not bad and graded, sentence)


def _examples(subject: Subject) -> Iterator[tuple[Example, int]]:
    """The examples whose answers are graded, each with the number of its siblings."""
    task = subject.task
    if hasattr(task.score, "score_group"):
        yield from ((example, subject.env.repeats) for example in task.train[:NUM_GROUPS])
    else:
        yield from ((example, 1) for example in [*task.train[:NUM_GRADED], *task.heldout[:NUM_GRADED]])


def _reward(task: Task, score: Score) -> float:
    return total_reward(score.terms, task.term_weights)


def no_held_out_question_is_trained_on(subject: Subject) -> Check:
    """The normalised questions of the two splits are disjoint."""
    shared = {normalised(e.query) for e in subject.task.heldout} & {normalised(e.query) for e in subject.task.train}
    sentence = f"{len(shared)} held-out questions stand in the training split"
    if shared:
        sentence += f", for example {min(shared)[:80]!r}; take them out of one of the two"
    return Check("no held-out question is trained on", not shared, sentence)


def prompts_are_computed_once(subject: Subject) -> Check:
    """Where the policy's family is known to pack its rows, it does: padded ones cost several times as much.

    Why it does not is in the log: something here is older or newer than what was tested.
    """
    packed = bool(subject.diagnosis["packed"])
    sentence = "rows are packed, each prompt once" if packed else "rows are padded, each with its prompt"
    if subject.packs and not packed:
        sentence += ", which this model does not need: the log says why; model.attn_implementation=sdpa asks for it"
    return Check("prompts are computed once", packed or not subject.packs, sentence)


def gradient_does_not_depend_on_the_split(subject: Subject) -> Check:
    """The gradient over micro-batches of several rows equals the sum over micro-batches of one row each.

    Of two prompts' rows, under advantages and log-probs that no clip cuts
    (:meth:`sota_grpo.learner.Learner.gradient_gap`). In float32 the two differ by 1e-6, whatever the model. In half
    precision (CUDA, or parameters that are) each is as far from float32's as rounding takes it: 0.024, 0.049, 0.046 and
    0.103 of its norm for random models of 4, 8, 12 and 30 layers and 0.028 for SmolLM2's 30, and the two are 0.018,
    0.069, 0.011, 0.062 and 0.041 apart on a CPU in bfloat16. So 0.2 is allowed there: a row of four that is lost or
    counted twice makes about half of the norm; a single lost token is seen in float32 only.
    """
    rows = subject.rows[:NUM_COMPARED]
    longest = max(row.get(keys.FULL_TOKENS).shape[-1] for row in rows)
    budgets = compared_budgets(subject.learner.settings.micro_batch_tokens, longest)
    norm, gap, single = subject.learner.gradient_gap(rows, budgets)
    return Check(
        "the gradient does not depend on the split",
        norm > 0 and gap <= SPLIT[single],
        f"relative gap {gap:.2g} at gradient norm {norm:.3g} (allowed {SPLIT[single]:g}"
        f"{', both in float32' if single else ''})",
    )


def compared_budgets(micro_batch_tokens: int, longest: int) -> tuple[int, int]:
    """Tokens of a micro-batch, of several rows and of one; at least twice the longest, else each is alone in both.

    >>> compared_budgets(1000, longest=300), compared_budgets(1000, longest=900)
    ((1000, 1), (1800, 1))
    """
    return max(micro_batch_tokens, 2 * longest), 1


def pushed_weights_landed(subject: Subject) -> Check:
    """After a push of changed weights the engine samples from them, and from the old ones once those are back.

    Every trainable tensor is changed, which makes a policy with another rounding. So the gap to the pushed weights may
    be 1.5 times the gap after the push back, scaled by what half precision does to the one and to the other; or a
    twentieth of the gap to the old ones. Where rounding cannot be measured it may be twice, or a tenth. In float32 none
    of it is needed. A token counts for at most 1 nat, else a few that the old weights find impossible drown the rest.

    Measured on the embedded policy with a bfloat16 engine (8 rows, 5 seeds): the gap to the pushed weights is 0.02 to
    0.04 of that to the old ones; 0.43 to 1.5 of it when attention, MLP, norms or embeddings are left out of the push.
    On SmolLM2 in bfloat16 (9 seeds) a right push comes to 0.50 to 0.73 of what is allowed, one without a single one of
    the 30 layers to 1.5 and more.
    """
    learner, version = subject.learner, subject.learner.version
    learner.perturb()
    try:
        subject.publisher.publish(version)
        rows = subject.sample(salt=1, max_tokens=PROBE_TOKENS)
        subject.publisher.sleep()
        new, rounding = _typical_gap(learner, rows), _typical_rounding(subject, rows)
    finally:
        learner.restore()
    old = _typical_gap(learner, rows)
    subject.publisher.publish(version)
    rows = subject.sample(max_tokens=PROBE_TOKENS)
    subject.publisher.sleep()
    back, usual = _typical_gap(learner, rows), _typical_rounding(subject, rows)
    if subject.exact:
        allowed = SINGLE
    elif rounding and usual:
        allowed = max(1.5 * back * rounding / usual, old / 20)
    else:
        allowed = max(2 * back, old / 10)
    return Check(
        "pushed weights landed",
        new <= allowed and back <= allowed_gaps(subject).gap and old > new,
        f"mean log-prob gap {new:.2g} to the pushed weights (allowed {allowed:.2g}), {old:.2g} to the old ones, "
        f"{back:.2g} after the push back",
    )


CHECKS: tuple[Callable[[Subject], Check], ...] = (
    gold_answers_earn_the_full_reward,
    no_held_out_question_is_trained_on,
    engine_and_trainer_have_one_temperature,
    engine_and_trainer_agree,
    first_ratio_is_one,
    prompts_are_computed_once,
    gradient_does_not_depend_on_the_split,
    pushed_weights_landed,
)


WITHOUT_SAMPLES = (gold_answers_earn_the_full_reward, no_held_out_question_is_trained_on)


def run_gate(
    subject: Subject,
    mode: str,
    checks: Sequence[Callable[[Subject], Check]] = CHECKS,
    *,
    on_check: Callable[[Check], object] = lambda check: None,
) -> list[Check]:
    """Make every check; ``warn`` logs those that fail, ``strict`` raises at the first: the next may wait as long.

    Args:
        on_check: told of each outcome as it comes.

    Raises:
        CheckError: a check failed and ``mode`` is ``strict``.
    """
    if mode == "off":
        return []
    random = rng_state()
    done: list[Check] = []
    for check in checks:
        began = time.perf_counter()  # the first that needs samples waits for them
        if check not in WITHOUT_SAMPLES and not subject.rows:
            subject.rows = graded_rows(subject)
        result = check(subject)
        result = Check(result.name, result.passed, result.sentence, time.perf_counter() - began)
        done.append(result)
        on_check(result)
        logger.info("check %s: %s, %s (%.2f s)", "passed" if result.passed else "FAILED", result.name, result.sentence,
                    result.seconds)  # fmt: skip
        if not result.passed and mode == "strict":
            set_rng_state(random)
            failed = f"The check before training failed ({result.name}): {result.sentence}"
            raise CheckError(f"{failed}; check.mode=warn trains all the same.")
        if not result.passed:
            logger.warning("check.mode=warn: %s: %s", result.name, result.sentence)
    subject.publisher.wake()
    set_rng_state(random)
    return done


def graded_rows(subject: Subject) -> list[TensorDictBase]:
    """The samples as a batch is trained on; what follows needs the learner's device as much as a step does."""
    batch = lazy_stack(subject.sample())
    subject.publisher.sleep()
    for transform in subject.transforms:
        batch = transform(batch)
    return row_list(batch)


def _typical_gap(learner: Answers, rows: Sequence[TensorDictBase]) -> float:
    return float(learner.log_prob_gaps(rows).abs().clamp(max=1.0).mean())


def _typical_rounding(subject: Subject, rows: Sequence[TensorDictBase]) -> float | None:
    """Of the learner's weights as they are; None where it is not needed or cannot be measured."""
    found = None if subject.exact else subject.learner.measured_with_rounding(rows)[1]
    if found is None:
        return None
    sampled = torch.cat([row.get(keys.ASSISTANT_MASK) for row in rows])
    return float(found[sampled].abs().clamp(max=1.0).mean())
