"""The gate: before the first step, prove on real samples that this run would train on right mathematics.

Each check is one function of :class:`Subject` that returns a :class:`Check`. None of them leaves a trace: parameters,
engine weights, random state and the position in the data are afterwards what they were.

**Bounds of the checks that compare log-probs.** Two systems that compute one policy in half precision differ by
rounding, and how much that is depends on the model: its depth, its logits, how sure it is. So no bound is fitted to
some model. Two invariants hold under any rounding: the mean ratio is 1, and gaps have no slope against the temperature
(:mod:`sota_grpo.functional.divergences`). What is left is a size, and its measure is the rounding of this very model on
these very tokens: the trainer's log-probs in half precision against its own in float32.

The engine rounds too, and more than the trainer, whose residual stream is float32. All in all the gaps were 1.1 to 1.9
times the trainer's rounding; four times is allowed (``MARGIN``). Measured with vLLM on a CPU in bfloat16, on 8
responses of 64 to 128 tokens; ``healthy`` is the largest of all seeds, the others are the smallest:

=============================================  =======  =========  ==============  ===============  =========
figure (what is allowed)                       healthy  one layer  no system turn  T 0.8 against 1  top-p 0.9
=============================================  =======  =========  ==============  ===============  =========
mean gap / rounding (4), SmolLM2                 1.6       6.0          5.0             9.5            3.3
mean square / mean square (16), SmolLM2          2.8       40           27              66             7.9
mean gap / rounding, embedded policy             1.9       20           -               22             5.8
the same, random weights of 4 to 30 layers       1.3       6.5          -               4.7            1.5
slope (0.05), SmolLM2                           0.002       -           -              0.185            -
slope, all others                               0.009       -           -              0.176            -
1 - mean ratio (0.02), SmolLM2                  0.005       -           -               -             0.089
the same, random weights (0.02 to 0.05)         0.010       -           -               -             0.091
=============================================  =======  =========  ==============  ===============  =========

One layer: 1 % of its weights have another sign. SmolLM2-135M-Instruct has 30 layers (10 seeds, ``python -m
benchmarks.gate``); the embedded policy has 4 and is sure of most tokens (4 seeds); random weights (2 seeds each) have 4
to 30 layers, widths of 256 to 576 and vocabularies of 8k to 152k. Their rounding was 0.03 nats, 0.001, and 0.03 to
0.12: a bound for all of them would be one for none.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import torch

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError, memory_for
from sota_grpo.files import write_json
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.functional.divergences import mean_ratio, temperature_slope
from sota_grpo.recording.run_files import GATE_FILE
from sota_grpo.rl.table import RowTable
from sota_grpo.training.checkpoint import rng_state, set_rng_state
from sota_grpo.training.sample_checks import (
    every_sampled_token_is_trained,
    gold_answers_earn_the_full_reward,
    no_held_out_question_is_trained_on,
    responses_end_and_are_graded,
    rewards_and_advantages_belong_to_their_responses,
)
from sota_grpo.training.subject import NUM_SAMPLES, Check, CheckError, Subject, sampled_tokens

NUM_COMPARED = 2 * NUM_SAMPLES  # rows whose gradient is computed twice: those of two prompts
NUM_NAMED = 4  # tensors that are named in a sentence
PROBE_TOKENS = 32  # of a response that shows which weights an engine has
SPLIT = {True: 1e-4, False: 0.2}  # relative distance of two gradients that is allowed, in float32 or not

MARGIN = 4  # times the rounding that was measured, and standard errors
SINGLE = 1e-4  # mean gap that is allowed where both compute in float32
ROUNDING = 1e-6  # float32's own error in a mean of ratios
HALF = 0.1  # mean gap that is allowed where parameters are in half precision: their rounding cannot be measured
SMALLEST = 5e-3  # of what is allowed in half precision: a sharp policy's rounding is that of a handful of tokens
LARGEST = 0.25  # above it nothing is allowed: a trainer that is wrong in half precision would measure that as rounding
FAR = 1.0  # gap of a single token that is far off in half precision, nats
LEFT_OUT = 0.27  # of the gap that a layer makes which a push leaves out: the least of 30 layers made 0.4 of it
SINGLE_FAR = 20 * SINGLE  # in float32
SLOPE = 0.05  # share by which the temperatures may differ
RATIO = 0.01  # of the mean ratio's distance from 1

logger = logging.getLogger(__name__)


class Allowed(NamedTuple):
    """Bounds that follow from rounding, and ``why``: of the mean of ``|gap|``, nats, and of the mean of its square.

    The effective sample size may be ``square`` below 1, the mismatch KL half of it.
    """

    gap: float
    square: float
    why: str


def allowed_gaps(subject: Subject) -> Allowed:
    """What rounding may do to ``subject.rows``; see the module."""
    if subject.exact:
        return Allowed(SINGLE, 2 * ROUNDING, "both compute in float32")
    rounding = subject.rounding
    if rounding is None:  # gaps of a Laplace distribution of mean m have a mean square of 2 m^2
        return Allowed(HALF, 2 * HALF**2, "parameters are in half precision")
    mean, square = float(rounding.abs().mean()), float(rounding.square().mean())
    return Allowed(
        min(max(MARGIN * mean, SMALLEST), LARGEST),
        min(max(MARGIN**2 * square, SMALLEST**2), 2 * LARGEST**2),
        f"half precision alone moves this policy by {mean:.2g}",
    )


def the_reference_is_the_policy_at_its_start(subject: Subject) -> Check:
    """The reference gives the samples the log-probs that the trainer gives them, at the same temperature."""
    ref = subject.rows.flat(keys.REF_LOG_PROBS)[sampled_tokens(subject.rows)]
    gaps, same = subject.said[0] - ref, replace(subject, exact=subject.exact and bool(subject.reference_exact))
    allowed, slope = allowed_gaps(same), temperature_slope(gaps, *subject.said)
    mean, steepest = float(gaps.abs().mean()), SLOPE + MARGIN * slope.error
    return Check(
        "the reference is the policy at its start",
        mean <= allowed.gap and abs(slope.value) <= steepest,
        f"mean log-prob gap {mean:.2g} (allowed {allowed.gap:.2g}: {allowed.why}), temperature {1 - slope.value:.3f} "
        f"times the reference's (allowed 1 +- {steepest:.2g})",
    )


def the_objective_raises_better_responses(subject: Subject) -> Check:
    """A step makes each sampled token of a better response likelier, of a worse one less, by the derivative.

    A surrogate of one's own without the minus sign, or without a gradient, would train all the same.
    """
    rows = subject.rows[:NUM_COMPARED].without(keys.ADVANTAGE)
    signs = torch.tensor([1.0, -1.0]).repeat(len(rows))[: len(rows)]
    rows.set(keys.ADVANTAGE, signs.reshape(-1, 1, 1))
    found = subject.learner.coefficients(rows).split(rows.lengths(keys.FULL_TOKENS))
    values = torch.cat([own * sign for own, sign in zip(found, signs)])[sampled_tokens(rows)]
    right, none = int((values > 0).sum()), int((values == 0).sum())
    sentence = f"{right} of {len(values)} sampled tokens move as their advantage says"
    if none:
        sentence += f"; {none} have no gradient"
    if right + none < len(values):
        sentence += f"; {len(values) - right - none} move the other way: negate the loss of algorithm.objective"
    return Check("the objective raises better responses", right == len(values), sentence)


def engine_and_trainer_have_one_temperature(subject: Subject) -> Check:
    """The slope of the gaps says by which share two temperatures differ: 0.2 for 0.8 against 1."""
    slope = temperature_slope(subject.gaps, *subject.said)
    allowed = SLOPE + MARGIN * slope.error
    return Check(
        "engine and trainer have one temperature",
        abs(slope.value) <= allowed,
        f"the trainer's is {1 - slope.value:.3f} times the engine's, by {subject.gaps.numel()} tokens "
        f"(allowed 1 +- {allowed:.2g})",
    )


def engine_and_trainer_agree(subject: Subject) -> Check:
    """Mean over sampled tokens of |log-prob of the engine - log-prob of the trainer|, and a high quantile of it.

    In float32 the quantile is the largest gap. In half precision as many of the largest gaps are left out as half of
    the responses are, so that a mistake at one token of every response is still found, however long they are.
    """
    gaps, allowed = subject.gaps.abs(), allowed_gaps(subject)
    left_out, far = (0, SINGLE_FAR) if subject.exact else (len(subject.rows) // 2, FAR)
    mean, highest = float(gaps.mean()), gaps.topk(min(left_out + 1, gaps.numel())).values
    within = f", all but {left_out} within {highest[-1]:.2g}" if left_out else ""
    passed = mean <= allowed.gap and float(highest[-1]) <= far
    return Check(
        "engine and trainer agree",
        passed,
        f"mean log-prob gap {mean:.2g}, largest {highest[0]:.2g}{within}, over {gaps.numel()} tokens "
        f"(allowed {allowed.gap:.2g} and {far:g}: {allowed.why}){'' if passed else _whose_gap(subject)}",
    )


def _whose_gap(subject: Subject) -> str:
    """Where half precision is in play and rounding known: which side is far from float32, and what would mend it."""
    if subject.exact or subject.rounding is None:
        return ""
    half = subject.learner.settings.precision != "fp32"
    of_trainer = subject.rounding if half else torch.zeros_like(subject.rounding)
    engine, trainer = (float(gap.abs().mean()) for gap in (subject.gaps - of_trainer, of_trainer))
    mend = "inference_model.torch_dtype=float32" + (" train.precision=fp32" if half else "")
    return (
        f"; from the trainer in float32 the engine is {engine:.2g} away and the trainer {trainer:.2g}: if half "
        f"precision is at fault, as on a CPU without bf16 instructions, use {mend}"
    )


def first_ratio_is_one(subject: Subject) -> Check:
    """Mean ratio 1; by the loss's own diagnostics effective sample size 1 and no mismatch; in float32 nothing clipped.

    Small gaps of mean square ``v`` have an effective sample size of ``1 - v`` and a mismatch KL of ``v / 2``. How many
    tokens half precision clips depends on the clip's width (GSPO's 3e-4 is within the rounding): reported only.
    """
    diagnosis, ratio = subject.diagnosis, mean_ratio(subject.gaps)
    ess, kl, clipped = (diagnosis[name] for name in ("ess", "mismatch_kl", "clip_fraction"))
    assert ess is not None  # every sample has at least one token
    assert kl is not None
    assert clipped is not None
    square, mass = allowed_gaps(subject).square, RATIO + MARGIN * ratio.error
    return Check(
        "the first ratio is one",
        1 - ess <= square and kl <= square / 2 and abs(ratio.value - 1) <= mass and (clipped == 0 or not subject.exact),
        f"mean {ratio.value:.4f} (allowed 1 +- {mass:.2g}), effective sample size {ess:.6f} (allowed {1 - square:g}), "
        f"mismatch KL {kl:.2g} (allowed {square / 2:.2g}), {clipped:.2%} of the tokens clipped",
    )


def prompts_are_computed_once(subject: Subject) -> Check:
    """Where the policy's family is known to pack its rows, it does: padded ones cost several times as much."""
    packed = bool(subject.diagnosis["packed"])
    sentence = "rows are packed, each prompt once" if packed else "rows are padded, each with its prompt"
    if subject.packs and not packed:
        sentence += ", which this model does not need: the log says why; model.attn_implementation=sdpa asks for it"
    return Check("prompts are computed once", packed or not subject.packs, sentence)


def gradient_does_not_depend_on_the_split(subject: Subject) -> Check:
    """The gradient over micro-batches of several rows equals the sum over micro-batches of one row each.

    Of two prompts' rows, under advantages and log-probs that no clip cuts. In float32 the two differ by 1e-6, whatever
    the model; in half precision they were 0.011 to 0.069 of the norm apart, by models of 4 to 30 layers. So 0.2 is
    allowed there: a row of four that is lost or counted twice makes about half of the norm; a single lost token is seen
    in float32 only.
    """
    rows = subject.rows[:NUM_COMPARED]
    longest = max(rows.lengths(keys.FULL_TOKENS))
    budgets = compared_budgets(subject.learner.settings.micro_batch_tokens, longest)
    norm, gap, single = subject.learner.gradient_gap(rows, budgets)
    passed = norm > 0 and gap <= SPLIT[single]
    sentence = f"relative gap {gap:.2g} at gradient norm {norm:.3g} (allowed {SPLIT[single]:g}"
    sentence += f"{', both in float32' if single else ''})"
    if not passed and norm > 0:
        sentence += (
            "; the usual cause is an algorithm.objective that mixes the rows of a micro-batch, by a mean, a norm or a "
            "sort over the batch: the loss of a token may depend on its own row alone"
        )
    return Check("the gradient does not depend on the split", passed, sentence)


def compared_budgets(micro_batch_tokens: int, longest: int) -> tuple[int, int]:
    """Tokens of a micro-batch, of several rows and of one; at least twice the longest, else each is alone in both."""
    return max(micro_batch_tokens, 2 * longest), 1


def pushed_weights_landed(subject: Subject) -> Check:
    """After a push of changed weights the engine samples from them, and from the old ones once those are back.

    Every trainable tensor is changed, which makes a policy with another rounding. So the gap to the pushed weights may
    be 1.5 times the gap after the push back, scaled by what half precision does to the one and to the other; or a share
    of the gap to the old ones. One of ``L`` layers that was left out of the push is about ``1 / sqrt(L)`` of that gap,
    as changes of layers add up like independent errors; :data:`LEFT_OUT` of it is allowed. Where rounding cannot be
    measured it may be twice, or a tenth. In float32 none of it is needed. A token counts for at most 1 nat, else a few
    that the old weights find impossible drown the rest.

    Measured on the embedded policy with a bfloat16 engine (8 rows, 5 seeds): the gap to the pushed weights is 0.02 to
    0.04 of that to the old ones; 0.43 to 1.5 of it when attention, MLP, norms or embeddings are left out of the push.
    On SmolLM2 in bfloat16 (9 seeds) a right push comes to 0.50 to 0.73 of what is allowed, one without a single one of
    the 30 layers to 1.5 and more.

    A single tensor may be within the rounding. So engines that can say have the checksum of each compared, and what is
    not compared is told; in float32, where none is within it, those that did not land are found by their effect.
    """
    learner, version = subject.learner, subject.learner.version
    learner.perturb()
    try:
        subject.weight_sync.send(version=version)
        compared = subject.weight_sync.compared()
        probe = subject.sample(salt=1, max_tokens=PROBE_TOKENS)
        subject.weight_sync.sleep()
        new, rounding = _typical(subject, probe)
    finally:
        learner.restore()
    old, _ = _typical(subject, probe, round_too=False)
    subject.weight_sync.send(version=version)
    rows = subject.sample(max_tokens=PROBE_TOKENS)
    subject.weight_sync.sleep()
    back, usual = _typical(subject, rows)
    if subject.exact:
        allowed = SINGLE
    elif rounding and usual:
        allowed = max(1.5 * back * rounding / usual, LEFT_OUT * old / math.sqrt(subject.num_layers))
    else:
        allowed = max(2 * back, old / 10)
    differing = sorted(compared.differing)
    passed = new <= allowed and back <= allowed_gaps(subject).gap and old > new and not differing
    sentence = (
        f"mean log-prob gap {new:.2g} to the pushed weights (allowed {allowed:.2g}), {old:.2g} to the old ones, "
        f"{back:.2g} after the push back"
    )
    if count := len(compared.equal) + len(differing):
        sentence += f"; {len(differing)} of {count} tensors have another checksum in the engine"
    if not subject.exact and not compared.reported:
        sentence += f"; not verified: single tensors, which {subject.weight_sync.engine.name} does not read back"
    if not subject.exact and compared.unread:
        sentence += f"; not verified: {_few(sorted(compared.unread))}, which the engine holds in another form"
    if not passed and not differing and subject.exact and back <= SINGLE < min(new, old):
        differing = _left_out(subject, probe, allowed)
    if differing:
        sentence += f"; these did not land: {_few(differing)}"
    return Check("pushed weights landed", passed, sentence)


def _few(names: Sequence[str]) -> str:
    """The first of them, and how many there are besides."""
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def _left_out(subject: Subject, rows: RowTable, allowed: float) -> list[str]:
    """The tensors without whose change the trainer gives the rows' log-probs; empty where no such are found.

    All of a kind (of every layer), all of a layer, and single ones are tried.
    """
    learner, names = subject.learner, subject.learner.trainable_names()
    sets: dict[str, list[str]] = {}
    for name in names:
        numbers = re.findall(r"\.\d+\.", name)
        for label in {re.sub(r"\.\d+\.", ".*.", name), *(f"layer {number}" for number in numbers[:1]), name}:
            sets.setdefault(label, []).append(name)
    for chosen in sorted(sets.values(), key=len, reverse=True):
        learner.perturb(chosen)
        try:
            gap, _ = _typical(subject, rows)
        finally:
            learner.restore()
        if gap <= allowed:
            return [name.removeprefix("model.") for name in chosen]  # the scorer's own
    return []


def the_reference_reads_the_policys_tokens(subject: Subject) -> Check:
    """Every token of the policy has the same id in the reference, which reads the longest sample."""
    other = subject.reference
    assert other is not None
    own = subject.rollouts.env.tokenizer.get_vocab()
    odd = sorted(token for token, index in own.items() if other.vocabulary.get(token) != index)
    short = other.context is not None and other.context < other.longest
    sentence = f"{len(own) - len(odd)} of the {len(own)} tokens of {other.policy} have the same id in {other.name}"
    if odd:
        sentence += f" (not {odd[0]!r}), so it would judge other texts: use a ref_model.name with the same tokenizer"
    if short:
        sentence += (
            f"; {other.name} reads {other.context} tokens, and a prompt with its response may have {other.longest}: "
            f"use inference_model.max_model_len={other.context}"
        )
    return Check("the reference reads the policy's tokens", not odd and not short, sentence)


WITHOUT_SAMPLES: tuple[Callable[[Subject], Check], ...] = (
    the_reference_reads_the_policys_tokens,
    gold_answers_earn_the_full_reward,
    no_held_out_question_is_trained_on,
)
WITH_SAMPLES: tuple[Callable[[Subject], Check], ...] = (
    responses_end_and_are_graded,
    every_sampled_token_is_trained,
    rewards_and_advantages_belong_to_their_responses,
    the_objective_raises_better_responses,
    engine_and_trainer_have_one_temperature,
    engine_and_trainer_agree,
    first_ratio_is_one,
    the_reference_is_the_policy_at_its_start,
    prompts_are_computed_once,
    gradient_does_not_depend_on_the_split,
    pushed_weights_landed,
)
OF_A_REFERENCE = {
    the_reference_reads_the_policys_tokens: "reference",  # with what the subject has it to be about
    the_reference_is_the_policy_at_its_start: "reference_exact",
}
CHECKS = tuple(check for check in (*WITHOUT_SAMPLES, *WITH_SAMPLES) if check not in OF_A_REFERENCE)  # of every run


def checks_of(subject: Subject) -> list[Callable[[Subject], Check]]:
    """Return the checks that apply: a reference's only where there is one that they are about."""
    left_out = {check for check, about in OF_A_REFERENCE.items() if getattr(subject, about) is None}
    return [check for check in (*WITHOUT_SAMPLES, *WITH_SAMPLES) if check not in left_out]


def run_gate(
    subject: Subject,
    mode: str,
    checks: Sequence[Callable[[Subject], Check]] | None = None,
    *,
    on_check: Callable[[Check], object] = lambda check: None,
) -> list[Check]:
    """Make these checks, or every one; ``warn`` logs those that fail, ``strict`` raises at the first.

    ``on_check`` receives each outcome as it comes.

    Raises:
        CheckError: a check failed and ``mode`` is ``strict``.
        UserError: the responses that were sampled cannot be trained on.
        RunFailed: a device lacks memory for a check.
    """
    if mode == "off":
        return []
    random = rng_state()
    half = max(1, subject.learner.settings.micro_batch_tokens // 2)
    fix = f"use train.micro_batch_tokens={half} or train_model.gradient_checkpointing=true"
    done: list[Check] = []
    for check in checks_of(subject) if checks is None else checks:
        began = time.perf_counter()  # the first that needs samples waits for them
        try:
            with memory_for(f"the check '{check.__name__.replace('_', ' ')}'", fix):
                if check not in WITHOUT_SAMPLES and not subject.rows:
                    subject.rows = graded_rows(subject)
                result = replace(check(subject), seconds=time.perf_counter() - began)
        except UnusableValues as error:
            raise UserError(f"The responses sampled before training cannot be trained on: {error}") from error
        done.append(result)
        on_check(result)
        logger.info("check %s: %s, %s (%.2f s)", result.outcome, result.name, result.sentence, result.seconds)
        if result.passed is False and mode == "strict":
            set_rng_state(random)
            raise CheckError(result)
        if result.passed is False:
            logger.warning("check.mode=warn: %s: %s", result.name, result.sentence)
    subject.weight_sync.wake()
    set_rng_state(random)
    return done


def write_gate(run_dir: Path, mode: str, checks: Sequence[Check]) -> None:
    """Replace the run's ``gate.json`` by the outcome of these checks; RunFailed where it cannot be written."""
    path = run_dir / GATE_FILE
    try:
        write_json(path, {"mode": mode, "checks": [asdict(check) for check in checks]})
    except OSError as error:
        raise RunFailed(f"{path} cannot be written ({error.strerror}); free space there and start again.") from error


def graded_rows(subject: Subject) -> RowTable:
    """The samples as a batch is trained on; what follows needs the learner's device as much as a step does."""
    batch = subject.sample()
    subject.weight_sync.sleep()
    for transform in subject.transforms:
        batch = transform(batch)
    return batch


def _typical(subject: Subject, rows: RowTable, *, round_too: bool = True) -> tuple[float, float | None]:
    """Size of the gaps to the learner's weights as they are, and of their rounding where that is needed and known."""
    learner, mask, rounding = subject.learner, sampled_tokens(rows), None
    if subject.exact or not round_too:
        measured = learner.measured(rows)
    else:
        measured, rounding = learner.measured_with_rounding(rows)
    gaps = measured[0] - rows.flat(keys.LOG_PROBS)

    def size(values: torch.Tensor) -> float:
        return float(values[mask].abs().clamp(max=1.0).mean())

    return size(gaps), None if rounding is None else size(rounding)
