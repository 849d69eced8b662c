"""The gate: checks on real samples, before the first training step, that engine, trainer and rewards are correct.

Each check maps :class:`TrainingComponents` to a :class:`Check`. Parameters, engine weights, random state and the
position in the data are restored.

**Bounds of the checks that compare log-probs.** Engine and trainer in half precision differ by rounding, which depends
on the model's depth, logits and confidence. Two invariants hold under any rounding: the mean ratio is 1, and the slope
of :func:`temperature_slope` is 0. The mean gap is compared with the trainer's
rounding error on these tokens, half precision minus float32. The engine rounds more, because the trainer's residual
stream is float32: gaps were 1.1 to 1.9 times the trainer's rounding error; four times is allowed (``MARGIN``,
``benchmarks/gate.py``).
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from sota_grpo import keys
from sota_grpo.envs import PromptSource
from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.errors import RunFailed, UserError, memory_for, writing
from sota_grpo.files import write_json
from sota_grpo.functional.advantages import UnusableValues
from sota_grpo.policy.causal import end_token_ids
from sota_grpo.recording.run_files import GATE_FILE
from sota_grpo.rewards.grading import task_grader
from sota_grpo.rl.records import TASK, Example, SampledText, Sampling, Score, sample_seed, total_reward
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.rl.task import Task
from sota_grpo.rl.transforms import graded_texts
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.tasks.dataset import normalised
from sota_grpo.tasks.mixture import MixtureTask
from sota_grpo.training.checkpoint import rng_state, set_rng_state
from sota_grpo.training.learner import Learner
from sota_grpo.training.remote_learner import RemoteLearner

NUM_PROMPTS, NUM_SAMPLES = 4, 2  # prompts, and responses to each; a mixture has at least one prompt per task
ROWS_TRAINED = 3  # the checks on a row cost at most as much as training on 3 rows (nine forward passes)
FEWEST_TOKENS = 64  # smallest max_tokens of the checks' responses
NUM_COMPARED = 2 * NUM_SAMPLES  # rows (of two prompts) whose gradient is computed twice
NUM_NAMED = 4  # most tensors listed in a sentence
PROBE_TOKENS = 32  # max_tokens of responses that show which weights an engine has
SPLIT = {True: 1e-4, False: 0.2}  # allowed relative distance of two gradients, in float32 or not
NUM_LOOKED_AT = 16  # prompts sampled before "all responses are truncated" is a failure
NUM_GRADED = 64  # examples per split whose gold and empty answers are graded
NUM_GROUPS = 4  # the same for a grader of whole groups or a judge, which may cost a call each
ENOUGH = 4  # grader errors (texts or whole groups) after which grading stops

MARGIN = 4  # multiple of the measured rounding error, and of standard errors
SINGLE = 1e-4  # allowed mean gap in float32
ROUNDING = 1e-6  # error of float32 in a mean ratio
HALF = 0.1  # allowed mean gap if parameters are in half precision: its rounding error cannot be measured
SMALLEST = 5e-3  # smallest bound in half precision: for a confident policy, few tokens show any rounding
LARGEST = 0.25  # largest bound: a trainer that is wrong in half precision would count its mistake as rounding
FAR = 1.0  # allowed gap of a single token in half precision, nats
SINGLE_FAR = 20 * SINGLE  # the same in float32
LEFT_OUT = 0.34  # fraction of the estimated gap of one layer that is not sent; measured: 0.4 or more (30 layers)
SLOPE = 0.05  # allowed relative difference of the temperatures
RATIO = 0.01  # allowed distance of the mean ratio from 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """The result of one check; ``passed`` is None if there was nothing to check, which is not a failure."""

    name: str
    passed: bool | None
    sentence: str  # with the measured values
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return {True: "ok", False: "FAILED", None: "not made"}[self.passed]


class CheckError(UserError):
    """A check failed under ``check.mode=strict``."""

    def __init__(self, check: Check) -> None:
        failed = f"The check before training failed ({check.name}): {check.sentence}"
        super().__init__(f"{failed.rstrip('.')}; check.mode=warn trains despite this.")
        self.check = check


@dataclass(frozen=True)
class NamedReference:
    """A separate reference or teacher model: its name, vocabulary and context length, to compare with the policy."""

    name: str
    policy: str  # name of the policy's model
    vocabulary: Mapping[str, int]
    context: int | None  # its context length in tokens; None: not known
    longest: int  # most tokens of prompt plus response in this run


@dataclass(kw_only=True)
class TrainingComponents:
    """Input of the checks before training: the run's components and shared measurements."""

    task: Task
    rollouts: Rollouts
    learner: Learner | RemoteLearner
    weight_sync: EngineWeightSync
    sampling: Sampling
    seed: int
    exact: bool  # engine and trainer both compute in float32
    num_layers: int  # decoder layers of the policy
    transforms: Sequence[Callable[[RowTable], RowTable]] = ()  # of a batch (reference log-probs, advantages), in order
    packs: bool = False  # rows should be packed: the model family supports it, and padding was not requested
    rows: RowTable = field(default_factory=lambda: RowTable(0, {}))  # samples that the checks use
    reference: NamedReference | None = None  # if it is another model than the policy
    reference_exact: bool | None = None  # if the policy at its start is the reference: whether it has the same dtype
    stop: Sequence[str] = ()  # stop strings, which end a response like the end tokens

    @cached_property
    def diagnosis(self) -> dict[str, float | None]:
        """The loss's diagnostics on ``rows`` (:meth:`sota_grpo.training.learner.Learner.diagnose`), cached."""
        return self.learner.diagnose(self.rows)

    @cached_property
    def _measured(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        measured, rounding = self.learner.measured_with_rounding(self.rows)
        mask = self.rows.flat(keys.ASSISTANT_MASK)
        return measured[:, mask], None if rounding is None else rounding[mask]

    @property
    def measured(self) -> torch.Tensor:
        """The trainer's log-probs and entropies of the sampled tokens of ``rows``, ``[2, n]``, in nats, cached."""
        return self._measured[0]

    @property
    def rounding(self) -> torch.Tensor | None:
        """Half-precision minus float32 log-probs of sampled tokens, ``[n]``; None unless all weights are float32."""
        return self._measured[1]

    @property
    def gaps(self) -> torch.Tensor:
        """Trainer's minus engine's log-prob of the sampled tokens of ``rows``, ``[n]``, in nats."""
        return self.measured[0] - self.rows.flat(keys.LOG_PROBS)[self.rows.flat(keys.ASSISTANT_MASK)]

    @property
    def num_prompts(self) -> int:
        return max(NUM_PROMPTS, _num_tasks(self.task))

    @property
    def max_tokens(self) -> int:
        """``max_tokens`` of the checks: training's, or fewer (at least 64) so that checks cost about a step."""
        step = self.sampling.max_tokens * self.learner.settings.optim_batch_size
        affordable = step // (ROWS_TRAINED * self.num_prompts * NUM_SAMPLES)
        return min(self.sampling.max_tokens, max(affordable, FEWEST_TOKENS))

    def sample(
        self,
        num_prompts: int = NUM_PROMPTS,
        num_samples: int = NUM_SAMPLES,
        salt: int = 0,
        max_tokens: int | None = None,
    ) -> RowTable:
        """Sample graded rows of the first ``max(num_prompts, self.num_prompts)`` examples; ``salt`` changes seeds."""
        num_prompts = max(num_prompts, self.num_prompts)
        sampling = replace(self.sampling, max_tokens=min(max_tokens or self.max_tokens, self.max_tokens))
        prompts = [
            Prompt(index, example, num_samples, sample_seed(self.seed, index, 2 + salt))
            for index, example in enumerate(self.task.train[:num_prompts])
        ]
        groups = sorted(self.rollouts.stream(prompts, sampling), key=lambda group: group.prompt.group_id)
        return RowTable.cat([group.rows for group in groups])


class Allowed(NamedTuple):
    """Upper bounds of the mean ``|gap|`` (nats) and of the mean squared gap; ``why`` explains them."""

    gap: float
    square: float
    why: str


def allowed_gaps(run: TrainingComponents) -> Allowed:
    """Return the bounds on log-prob gaps that follow from rounding; see the module docstring."""
    if run.exact:
        return Allowed(SINGLE, 2 * ROUNDING, "both compute in float32")
    rounding = run.rounding
    if rounding is None:  # gaps of a Laplace distribution of mean m have a mean square of 2 m^2
        return Allowed(HALF, 2 * HALF**2, "parameters are in half precision")
    mean, square = float(rounding.abs().mean()), float(rounding.square().mean())
    return Allowed(
        min(max(MARGIN * mean, SMALLEST), LARGEST),
        min(max(MARGIN**2 * square, SMALLEST**2), 2 * LARGEST**2),
        f"this policy's rounding error in half precision is {mean:.2g}",
    )


class Estimate(NamedTuple):
    """An estimate from sampled tokens, and the estimate's standard error."""

    value: float
    error: float


def mean_ratio(gap: torch.Tensor) -> Estimate:
    """Return the mean of ``p_trainer(x) / p_engine(x)`` over sampled tokens ``x``, and its standard error.

    If the engine samples from the distribution that it reports, this estimates the trainer's probability mass on the
    tokens that the engine can sample: 1, or less if the engine excludes tokens (about ``p`` with top-p). ``gap [n]`` is
    the trainer's minus the engine's log-probs, in nats. The error of one token is 0; the mean of none is NaN.

    >>> round(mean_ratio(torch.tensor([0.9, 0.9, 0.9]).log()).value, 4)
    0.9
    """
    ratio = gap.double().exp()
    return Estimate(float(ratio.mean()), float(ratio.std() / len(ratio) ** 0.5) if len(ratio) > 1 else 0.0)


def temperature_slope(gap: torch.Tensor, log_prob: torch.Tensor, entropy: torch.Tensor) -> Estimate:
    """Estimate ``1 - T_trainer / T_engine`` from log-probs; return the estimate and its standard error.

    At inverse temperature ``b``, logits ``z`` give ``p(x) = exp(b z_x) / Z``, with the entropy ``H`` and the score
    ``s = d log p(x) / d log b = log p(x) + H``, of mean 0. To first order ``gap = (1 - T_trainer / T_engine) s``;
    the estimate is the slope of least squares through the origin, ``sum(gap s) / sum(s^2)``. Rounding errors are
    uncorrelated with ``s`` and give a slope of 0 on average. The standard error is heteroskedasticity-robust:
    ``sqrt(sum (gap - slope s)^2 s^2) / sum(s^2)``.

    ``gap [n]`` is the trainer's minus the engine's log-prob of each sampled token; ``log_prob`` and ``entropy`` ``[n]``
    are the trainer's, all in nats. If all ``s`` are 0 (as for tokens of probability 1), both results are 0.

    Source: White 1980, "A heteroskedasticity-consistent covariance matrix estimator", Econometrica 48.

    Two tokens of probability 3/4 and 1/4, sampled in that proportion; the trainer's logits are 1.25 times the engine's:

    >>> logits, sampled = torch.tensor([3.0, 1.0]).log(), torch.tensor([0, 0, 0, 1])
    >>> engine, trainer = (torch.log_softmax(b * logits, 0) for b in (1.0, 1.25))
    >>> entropy = -(trainer.exp() * trainer).sum().expand(4)
    >>> round(temperature_slope((trainer - engine)[sampled], trainer[sampled], entropy).value, 3)  # 1 - 1 / 1.25
    0.199
    """
    gap, score = gap.double(), (log_prob + entropy).double()
    total = score.square().sum()
    if not total > 0:
        return Estimate(0.0, 0.0)
    slope = (gap * score).sum() / total
    error = ((gap - slope * score).square() * score.square()).sum().sqrt() / total
    return Estimate(float(slope), float(error))


def the_reference_is_the_policy_at_its_start(run: TrainingComponents) -> Check:
    """Check that reference and trainer differ in log-probs of the samples by rounding only, not in temperature."""
    ref = run.rows.flat(keys.REF_LOG_PROBS)[run.rows.flat(keys.ASSISTANT_MASK)]
    gaps, same = run.measured[0] - ref, replace(run, exact=run.exact and bool(run.reference_exact))
    allowed, slope = allowed_gaps(same), temperature_slope(gaps, *run.measured)
    mean, steepest = float(gaps.abs().mean()), SLOPE + MARGIN * slope.error
    return Check(
        "the reference is the policy at its start",
        mean <= allowed.gap and abs(slope.value) <= steepest,
        f"mean log-prob gap {mean:.2g} (allowed {allowed.gap:.2g}: {allowed.why}), temperature {1 - slope.value:.3f} "
        f"times the reference's (allowed 1 +- {steepest:.2g})",
    )


def the_objective_raises_better_responses(run: TrainingComponents) -> Check:
    """Check that ``-d surrogate / d log_prob`` has the sign of the advantage (1 or -1) at sampled tokens of 4 rows."""
    rows = run.rows[:NUM_COMPARED].without(keys.ADVANTAGE)
    signs = torch.tensor([1.0, -1.0]).repeat(len(rows))[: len(rows)]
    rows.set(keys.ADVANTAGE, signs.reshape(-1, 1, 1))
    slopes = run.learner.coefficients(rows).split(rows.lengths(keys.FULL_TOKENS))
    values = torch.cat([slope * sign for slope, sign in zip(slopes, signs)])[rows.flat(keys.ASSISTANT_MASK)]
    right, none = int((values > 0).sum()), int((values == 0).sum())
    wrong = len(values) - right - none
    sentence = f"{right} of {len(values)} sampled tokens move in the direction of their advantage"
    sentence += f"; {none} have no gradient" if none else ""
    sentence += f"; {wrong} move the other way: negate the loss of algorithm.objective" if wrong else ""
    return Check("the objective raises better responses", right == len(values), sentence)


def engine_and_trainer_have_one_temperature(run: TrainingComponents) -> Check:
    """Check on sampled tokens that ``1 - T_trainer / T_engine`` is 0 within 0.05 + 4 standard errors."""
    slope = temperature_slope(run.gaps, *run.measured)
    allowed = SLOPE + MARGIN * slope.error
    return Check(
        "engine and trainer have one temperature",
        abs(slope.value) <= allowed,
        f"the trainer's temperature is {1 - slope.value:.3f} times the engine's, over {run.gaps.numel()} tokens "
        f"(allowed 1 +- {allowed:.2g})",
    )


def engine_and_trainer_agree(run: TrainingComponents) -> Check:
    """Check that the mean and the largest |engine's - trainer's log-prob| of sampled tokens are within their bounds.

    Unless both compute in float32, the ``len(rows) // 2`` largest gaps may exceed the second bound.
    """
    gaps, allowed = run.gaps.abs(), allowed_gaps(run)
    left_out, far = (0, SINGLE_FAR) if run.exact else (len(run.rows) // 2, FAR)
    mean, highest = float(gaps.mean()), gaps.topk(min(left_out + 1, gaps.numel())).values
    within = f", all but {left_out} within {highest[-1]:.2g}" if left_out else ""
    passed = mean <= allowed.gap and float(highest[-1]) <= far
    return Check(
        "engine and trainer agree",
        passed,
        f"mean log-prob gap {mean:.2g}, largest {highest[0]:.2g}{within}, over {gaps.numel()} tokens "
        f"(allowed {allowed.gap:.2g} and {far:g}: {allowed.why}){'' if passed else _whose_gap(run)}",
    )


def _whose_gap(run: TrainingComponents) -> str:
    """Describe how far engine and trainer are each from the trainer in float32, and the options that fix it."""
    if run.exact or run.rounding is None:
        return ""
    half = run.learner.settings.precision != "fp32"
    of_trainer = run.rounding if half else torch.zeros_like(run.rounding)
    engine, trainer = (float(gap.abs().mean()) for gap in (run.gaps - of_trainer, of_trainer))
    mend = "inference_model.torch_dtype=float32" + (" train.precision=fp32" if half else "")
    return (
        f"; from the trainer in float32 the engine is {engine:.2g} away and the trainer {trainer:.2g}: if half "
        f"precision is the cause, as on a CPU without bf16 instructions, use {mend}"
    )


def first_ratio_is_one(run: TrainingComponents) -> Check:
    """Check that before any update mean ratio and effective sample size are 1, the KL 0, and in float32 nothing clips.

    With ``v = allowed_gaps(run).square``, these are allowed: a sample size of at least ``1 - v`` and a KL of at most
    ``v / 2``, which are the effects of small log-prob gaps; a mean ratio within 0.01 + 4 standard errors of 1.
    """
    ratio = mean_ratio(run.gaps)
    ess, kl, clipped = (cast(float, run.diagnosis[name]) for name in ("ess", "mismatch_kl", "clip_fraction"))
    square, mass = allowed_gaps(run).square, RATIO + MARGIN * ratio.error
    return Check(
        "the first ratio is one",
        1 - ess <= square and kl <= square / 2 and abs(ratio.value - 1) <= mass and (clipped == 0 or not run.exact),
        f"mean {ratio.value:.4f} (allowed 1 +- {mass:.2g}), effective sample size {ess:.6f} (allowed {1 - square:g}), "
        f"mismatch KL {kl:.2g} (allowed {square / 2:.2g}), {clipped:.2%} of the tokens clipped",
    )


def prompts_are_computed_once(run: TrainingComponents) -> Check:
    """Check that rows are packed, each prompt computed once; it passes too if the model or an option forbids that."""
    packed = bool(run.diagnosis["packed"])
    sentence = "rows are packed, each prompt once" if packed else "rows are padded, and each contains its prompt"
    if run.packs and not packed:
        sentence += ", though this model can be packed (the log has the reason); to pad all the same, set "
        sentence += "model.attn_implementation=sdpa"
    return Check("prompts are computed once", packed or not run.packs, sentence)


def gradient_does_not_depend_on_the_split(run: TrainingComponents) -> Check:
    """Check that micro-batches of several rows give the same gradient as micro-batches of one row each.

    Rows of two prompts are used, with advantages and log-probs such that no ratio is clipped. In float32 the gradients
    differ by 1e-6 of the norm (allowed: 1e-4); in half precision by 0.011 to 0.069 for 4 to 30 layers (allowed: 0.2).
    Losing or double-counting one of four rows changes about half of the gradient. A zero gradient fails.
    """
    rows = run.rows[:NUM_COMPARED]
    together = max(run.learner.settings.micro_batch_tokens, 2 * max(rows.lengths(keys.FULL_TOKENS)))
    norm, gap, single = run.learner.gradient_gap(rows, (together, 1))
    passed, within = norm > 0 and gap <= SPLIT[single], f"{SPLIT[single]:g}{', both in float32' if single else ''}"
    sentence = f"relative gap {gap:.2g} at gradient norm {norm:.3g} (allowed {within})"
    if not passed and norm > 0:
        sentence += (
            "; the usual cause is an algorithm.objective that mixes the rows of a micro-batch, by a mean, a norm or a "
            "sort over the batch: make the loss of a token depend on its own row only"
        )
    return Check("the gradient does not depend on the split", passed, sentence)


def pushed_weights_landed(run: TrainingComponents) -> Check:
    """Check that the engine samples from changed weights after a push, and from the old weights after a second push.

    Every trainable tensor is changed, sent (pushed), restored and sent again. After the first push the engine has the
    mean gap *new* to the changed weights and *old* to the old ones; after the second, *back* to the old ones. *new*
    must be below *old*. In float32 it may be 1e-4; in half precision the larger of ``1.5 back``, scaled by the ratio of
    both rounding errors, and ``LEFT_OUT old / sqrt(L)``: one missing layer of ``L`` makes a gap of about ``old /
    sqrt(L)``. If rounding is not measurable, the larger of ``2 back`` and ``old / 10`` is allowed. Gaps count for at
    most 1 nat. On SmolLM2 in bfloat16, correct pushes reach 0.40 to 0.81 of the bound, one without a layer 1.2 or more.

    Rounding may hide one missing tensor, so checksums of all tensors are compared if the engine reports them. In
    float32, the effect on log-probs shows which tensors are missing.
    """
    learner, version = run.learner, run.learner.version
    learner.perturb()
    try:
        run.weight_sync.send(version=version, verify=False)
        compared = run.weight_sync.compared()
        probe = run.sample(salt=1, max_tokens=PROBE_TOKENS)
        run.weight_sync.sleep()
        new, rounding = _typical(run, probe)
    finally:
        learner.restore()
    old, _ = _typical(run, probe, round_too=False)
    run.weight_sync.send(version=version, verify=False)
    rows = run.sample(max_tokens=PROBE_TOKENS)
    run.weight_sync.sleep()
    back, usual = _typical(run, rows)
    if run.exact:
        allowed = SINGLE
    elif rounding and usual:
        allowed = max(1.5 * back * rounding / usual, LEFT_OUT * old / math.sqrt(run.num_layers))
    else:
        allowed = max(2 * back, old / 10)
    differing = sorted(compared.differing)
    passed = new <= allowed and back <= allowed_gaps(run).gap and old > new and not differing
    sentence = (
        f"mean log-prob gap {new:.2g} to the pushed weights (allowed {allowed:.2g}), {old:.2g} to the old ones, "
        f"{back:.2g} after the old ones are sent again"
    )
    if count := len(compared.equal) + len(differing):
        sentence += f"; {len(differing)} of {count} tensors have a different checksum in the engine"
    if not run.exact and not compared.reported:
        sentence += f"; not verified: single tensors, because {run.weight_sync.engine.name} reports no checksums"
    if not run.exact and compared.unread:
        sentence += f"; not verified: {_few(sorted(compared.unread))}, which the engine renames or reorders"
    if not passed and not differing and run.exact and back <= SINGLE < min(new, old):
        differing = _left_out(run, probe, allowed)
    if differing:
        sentence += f"; the engine did not load {_few(differing)}"
    return Check("pushed weights are loaded", passed, sentence)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def _left_out(run: TrainingComponents, rows: RowTable, allowed: float) -> list[str]:
    """Return the changed tensors that the engine lacks: one kind in every layer, all of a layer, or a single tensor."""
    learner, names = run.learner, run.learner.trainable_names()
    sets: dict[str, list[str]] = {}
    for name in names:
        numbers = re.findall(r"\.\d+\.", name)
        for label in {re.sub(r"\.\d+\.", ".*.", name), *(f"layer {number}" for number in numbers[:1]), name}:
            sets.setdefault(label, []).append(name)
    for chosen in sorted(sets.values(), key=len, reverse=True):
        learner.perturb(chosen)
        try:
            gap, _ = _typical(run, rows)
        finally:
            learner.restore()
        if gap <= allowed:
            return [name.removeprefix("model.") for name in chosen]  # the scorer's own
    return []


def the_reference_reads_the_policys_tokens(run: TrainingComponents) -> Check:
    """Check that the reference has the policy's token ids, and a context for the run's longest prompt plus response."""
    other = run.reference
    assert other is not None
    ids = run.rollouts.env.tokenizer.get_vocab()
    odd = sorted(token for token, index in ids.items() if other.vocabulary.get(token) != index)
    short = other.context is not None and other.context < other.longest
    sentence = f"{len(ids) - len(odd)} of the {len(ids)} tokens of {other.policy} have the same id in {other.name}"
    if odd:
        sentence += f" (not {odd[0]!r}), so it would read another text: use a ref_model.name with the same tokenizer"
    if short:
        sentence += (
            f"; {other.name} reads {other.context} tokens, but a prompt plus response may have {other.longest}: "
            f"use inference_model.max_model_len={other.context}"
        )
    return Check("the reference reads the policy's tokens", not odd and not short, sentence)


def gold_answers_earn_the_full_reward(run: TrainingComponents) -> Check:
    """Check that gold answers are right, earn the same reward within a task, and earn more than empty answers.

    The first examples of both splits are checked (of a group grader or a judge fewer); one answer must be gradable.
    """
    task, env, lost = run.task, run.rollouts.env, 0
    known: list[tuple[Example, bool, float, float]] = []  # success and reward of the gold answer, reward of the empty
    scores: list[Score] = []
    errors: list[str] = []
    for example, siblings in _examples(run):
        gold = task.gold_response(example)
        texts = [""] * siblings if gold is None else ["", gold]
        graded = env.grader.scores([(_as_sampled(text, env), example) for text in texts]).result()
        failures = [score.error for score in graded if score.error is not None]
        scores += graded
        errors += failures
        if gold is not None:
            empty, earned = (total_reward(score.terms, task.term_weights) for score in graded)
            known.append((example, graded[1].success, earned, empty))
        lost += len(failures) if siblings == 1 else len(failures) == siblings
        if lost >= ENOUGH or (len(errors) == len(scores) and any("TimeoutError" in failure for failure in failures)):
            break  # each failure may have taken the grader's whole timeout
    full: dict[str | None, float] = {}  # highest reward of a gold answer, by task
    for example, _, earned, _ in known:
        full[example.extra.get(TASK)] = max(full.get(example.extra.get(TASK), -math.inf), earned)
    bad = [
        example
        for example, success, earned, empty in known
        if not success or earned < full[example.extra.get(TASK)] or empty >= earned
    ]
    most = ", ".join(f"{full[each]:g}" + ("" if each is None else f" ({each})") for each in full)
    name = "gold answers earn the full reward"
    sentence = f"{len(known) - len(bad)} of {len(known)} gold answers earn the full reward of {most}"
    applies = any(value is not None for score in scores for value in score.terms.values())
    is_graded, num_texts = len(errors) < len(scores), len(scores)
    if not known:
        name = "responses can be graded"
        sentence = "not checked against gold answers, because the task has none"
    if bad:
        sentence += f"; the first that does not: question {bad[0].query[:80]!r} with answer {bad[0].answer[-40:]!r}"
    if not applies:
        sentence += f"; no reward term applies to any of {num_texts} graded texts: without rewards nothing is learned"
    if errors:
        sentence += f"; the grader failed on {len(errors)} of {num_texts} texts, first error: {errors[0]}"
    return Check(name, (not bad and is_graded) if known or applies or not is_graded else None, sentence)


def _as_sampled(text: str, env: PromptSource) -> SampledText:
    """Return ``text`` as if an engine had sampled it: with token ids, including the end token."""
    ids = env.tokenizer(text, add_special_tokens=False)["input_ids"]
    return SampledText(env.decode(torch.tensor(ids, dtype=torch.int64)), [*ids, end_token_ids(env.tokenizer)[0]])


def _num_tasks(task: Task) -> int:
    return len(task.tasks) if isinstance(task, MixtureTask) else 1


def _examples(run: TrainingComponents) -> Iterator[tuple[Example, int]]:
    """Yield (example, number of texts to grade): examples whose gold and empty answers are graded."""
    task = run.task
    if hasattr(task.score, "score_group") or getattr(task, "is_judged", False):
        count = max(NUM_GROUPS, _num_tasks(task))  # of a mixture each task once
        yield from ((example, run.rollouts.env.repeats) for example in task.train[:count])
    else:
        yield from ((example, 1) for example in [*task.train[:NUM_GRADED], *task.heldout[:NUM_GRADED]])


def no_held_out_question_is_trained_on(run: TrainingComponents) -> Check:
    """Check that no normalised question is in both the training and the held-out split."""
    name = "no held-out question is trained on"
    if not run.task.heldout:
        return Check(name, None, "there are no held-out problems")
    heldout, trained = ({normalised(e.query) for e in split} for split in (run.task.heldout, run.task.train))
    shared = heldout & trained
    example = f", for example {min(shared)[:80]!r}; remove them from one of the two splits" if shared else ""
    return Check(name, not shared, f"{len(shared)} held-out questions are in the training split{example}")


def responses_end_and_are_graded(run: TrainingComponents) -> Check:
    """Check that some response ends before max_tokens, and that some response of each task can be graded.

    If none ends, more are sampled. None needs to end under ``ignore_eos`` or if the checks' limit is below training's.
    """
    rows, faults = run.rows, []
    ended = int((~rows.get(keys.TRUNCATED)).sum())
    unseen = not ended and run.max_tokens < run.sampling.max_tokens
    if not ended and not unseen and not run.sampling.ignore_eos:
        run.weight_sync.wake()
        step = run.learner.settings.optim_batch_size // NUM_SAMPLES  # no more than an optimizer step's responses
        more = run.sample(min(NUM_LOOKED_AT, step), salt=2)
        run.weight_sync.sleep()
        if bool(more.get(keys.TRUNCATED).all()):
            faults.append(
                f"all {len(more)} further responses were truncated too: raise inference_model.max_tokens (now "
                f"{run.sampling.max_tokens}), or set inference_model.stop to a string that ends a response"
            )
    failed = rows.get(keys.REWARD_ERROR).flatten()
    reasons = [json.loads(text).get("error") for text in rows.get(keys.REWARD_INFO)]
    tasks = [json.loads(row[keys.EXTRA]).get(TASK) for row in rows.rows(keys.EXTRA)]
    for name, positions in _positions(tasks).items():
        of_task = "" if name is None else f" of {name}"
        if bool(failed[positions].all()):
            faults.append(f"the grader failed on every response{of_task}, first error: {reasons[positions[0]]}")
    counts = f"{ended} of {len(rows)} responses end before max_tokens, {len(rows) - int(failed.sum())} are graded"
    if failed.any() and not faults:
        first = reasons[int(failed.int().argmax())]
        counts += f"; the grader failed on {int(failed.sum())} of {len(rows)}, first error: {first}"
    if unseen:
        counts += f"; not verified: that responses longer than the checks' {run.max_tokens} tokens end"
    return Check("responses end and are graded", not faults, "; ".join([counts, *faults]))


def every_sampled_token_is_trained(run: TrainingComponents) -> Check:
    """Check that the assistant mask covers each sampled turn, from its first to its end token, and no prompt token.

    In an agent's sample: only that some token is trained, and that the same token precedes all turns.
    """
    faults = [fault for row in run.rows.rows() if (fault := _mask_fault(run, row)) is not None]
    end = f"end; in the others {faults[0]}" if faults else "end token"
    trained = f"{len(run.rows) - len(faults)} of {len(run.rows)} responses are trained from their first token"
    return Check("every sampled token is trained", not faults, f"{trained} to their {end}")


def _mask_fault(run: TrainingComponents, row: Row) -> str | None:
    """Return the fault of a row's assistant mask as a clause; None if the mask is right."""
    env, ids, mask = run.rollouts.env, row[keys.FULL_TOKENS], row[keys.ASSISTANT_MASK]
    has_template = bool(getattr(env.tokenizer, "chat_template", None))
    if (parents := row.get(keys.PARENTS)) is not None:  # an agent's: any of its turns may be cut, or there is none
        before = {int(ids[parents[at]]) for at in (mask & ~mask[parents.clamp(min=0)]).nonzero().flatten().tolist()}
        if not before and json.loads(row[keys.DIALOG])["requests"]:
            return "no token is trained"
        differs = has_template and len(before) > 1
        return "different tokens precede the turns, so the first token of a turn is not trained" if differs else None
    start = len(row[keys.PROMPT_TOKENS])
    outside = torch.zeros(1, dtype=torch.int32)
    edges = torch.diff(mask.int(), prepend=outside, append=outside).nonzero().flatten().tolist()
    turns = list(zip(edges[::2], edges[1::2]))  # from, to
    if not turns or turns[0][0] < start:
        return "a token of the prompt is trained" if turns else "no token is trained"
    if not env.multi_turn and turns[0][0] > start:
        return "the first sampled token is not trained"
    if not env.multi_turn and len(turns) > 1:
        return "a sampled token is not trained"
    if turns[-1][1] < len(ids):
        return "the last sampled token is not trained"
    if has_template and len({int(ids[first - 1]) for first, _ in turns}) > 1:
        return "different tokens precede the turns, so the first token of a turn is not trained"
    whole = [*turns[:-1], *([] if bool(row[keys.TRUNCATED]) or run.sampling.ignore_eos else turns[-1:])]
    ends = end_token_ids(env.tokenizer)
    for first, end in whole:
        text = env.tokenizer.decode(ids[first:end]) if run.stop else ""
        if int(ids[end - 1]) not in ends and not any(stop in text for stop in run.stop):
            return "the end token is not trained"
    return None


def rewards_and_advantages_belong_to_their_responses(run: TrainingComponents) -> Check:
    """Check that regrading each sample gives its row's reward, and that better siblings have larger advantages.

    Rewards that differ each time are ignored, and no judge is called again. Advantages come from made-up rewards.
    """
    rows, name = run.rows, "rewards and advantages belong to their responses"
    wrong, steady = _regraded(run)
    swapped, compared = _swapped_advantages(run)
    sentence = f"{steady - len(wrong)} of {steady} responses earn the reward of their row when graded again"
    if wrong:
        index, again = wrong[0]
        sentence += f"; row {index} of {len(rows)} has {float(rows.get(keys.REWARD)[index]):g}, but earns {again:g}"
    sentence += f"; in {compared - swapped} of {compared} groups the better response has the larger advantage"
    return Check(name, (not wrong and not swapped) if steady or compared else None, sentence)


def _regraded(run: TrainingComponents) -> tuple[list[tuple[int, float]], int]:
    """Return ([(row index, new reward)] of rows whose reward differs when graded again, number of rows compared)."""
    weights = run.rollouts.env.task.term_weights
    rows, groups = run.rows.rows(), list(_positions(run.rows.get(keys.GROUP_ID).tolist()).values())

    def pair(row: Row) -> tuple[SampledText, Example]:
        ((text, example),) = graded_texts([row])
        last = int((~row[keys.ASSISTANT_MASK]).nonzero()[-1]) + 1
        record = row.get(keys.DIALOG)
        ids, thinks = row[keys.FULL_TOKENS][last:].tolist(), run.rollouts.env.opens_thinking
        return SampledText(text, ids, record and json.loads(record), thinks), example

    failed = run.rows.get(keys.REWARD_ERROR).flatten().tolist()
    batches = groups if hasattr(run.task.score, "score_group") else [[index] for group in groups for index in group]
    first: dict[int, float] = {}
    second: dict[int, float] = {}
    for rewards in (first, second):
        odd = {index for index, value in first.items() if not _equal(value, float(rows[index][keys.REWARD]))}
        graded = [group for group in batches if rewards is first or odd & {*group}]
        futures = [task_grader(run.rollouts.env.grader).scores([pair(rows[p]) for p in group]) for group in graded]
        for group, future in zip(graded, futures):
            for index, score in zip(group, future.result(), strict=True):
                if score.error is None and not failed[index]:
                    # terms of others than the task's grader (judge, penalties) are taken from the row
                    terms = {key[-1]: float(v) for key, v in rows[index].items() if key[:-1] == keys.REWARD_TERMS}
                    rewards[index] = total_reward({**terms, **score.terms}, {**dict.fromkeys(terms, 1.0), **weights})
    unsteady = {index for index, value in second.items() if index in first and not _equal(value, first[index])}
    wrong = [(index, value) for index, value in second.items() if index in odd and index not in unsteady]
    return wrong, len(first) - len(unsteady)


def _equal(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-5)  # rewards are kept in float32


def _positions(names: Iterable[Hashable]) -> dict[Any, list[int]]:
    positions: dict[Any, list[int]] = {}
    for position, name in enumerate(names):
        positions.setdefault(name, []).append(position)
    return positions


def _swapped_advantages(run: TrainingComponents) -> tuple[int, int]:
    """Return (groups whose better response lacks the larger advantage, groups), for made-up rewards 1, 0, 0, 1, ..."""
    rows = run.rows.without(keys.ADVANTAGE, keys.GRADED_REWARD)
    groups = list(_positions(rows.get(keys.GROUP_ID).tolist()).values())
    better = torch.zeros(len(rows))
    for number, group in enumerate(groups):
        better[group[number % 2 :: 2]] = 1.0
    rows.set(keys.REWARD, better.reshape(-1, 1))
    rows.set(keys.REWARD_ERROR, torch.zeros(len(rows), 1, dtype=torch.bool))
    weights = run.rollouts.env.task.term_weights
    for name in {*weights, *rows.names(keys.REWARD_TERMS)}:
        rows.set((*keys.REWARD_TERMS, name), better.reshape(-1, 1) * (1 if weights.get(name, 1) > 0 else -1))
    for transform in run.transforms:
        rows = transform(rows)
    if not rows.has(keys.ADVANTAGE):
        return 0, 0
    advantage = rows.get(keys.ADVANTAGE).flatten()
    swapped = [
        group
        for group in groups
        if not advantage[[p for p in group if better[p]]].min() > advantage[[p for p in group if not better[p]]].max()
    ]
    return len(swapped), len(groups)


WITHOUT_SAMPLES: tuple[Callable[[TrainingComponents], Check], ...] = (
    the_reference_reads_the_policys_tokens,
    gold_answers_earn_the_full_reward,
    no_held_out_question_is_trained_on,
)
WITH_SAMPLES: tuple[Callable[[TrainingComponents], Check], ...] = (
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
OF_A_REFERENCE = (the_reference_reads_the_policys_tokens, the_reference_is_the_policy_at_its_start)
CHECKS = tuple(check for check in (*WITHOUT_SAMPLES, *WITH_SAMPLES) if check not in OF_A_REFERENCE)  # of every run


def checks_of(run: TrainingComponents) -> list[Callable[[TrainingComponents], Check]]:
    """Return the checks that apply; a reference that is the policy's start is checked only at version 0."""
    at_start = run.reference_exact is not None and run.learner.version == 0
    applies: dict[object, bool] = dict(zip(OF_A_REFERENCE, (run.reference is not None, at_start)))
    return [check for check in (*WITHOUT_SAMPLES, *WITH_SAMPLES) if applies.get(check, True)]


def run_gate(
    run: TrainingComponents,
    mode: str,
    checks: Sequence[Callable[[TrainingComponents], Check]] | None = None,
    *,
    on_check: Callable[[Check], object] = lambda check: None,
) -> list[Check]:
    """Run ``checks`` (None: :func:`checks_of`), call ``on_check`` with each result, and return the results.

    ``mode``: ``off`` runs no check, ``strict`` raises CheckError at the first that fails, ``warn`` runs all.
    ``run.rows`` is filled if it is empty. The random state is restored, except after errors other than CheckError; on
    return, a colocated engine is awake.
    Other UserErrors: the algorithm cannot use the sampled responses, or a device has too little memory.
    """
    if mode == "off":
        return []
    random = rng_state()
    half = max(1, run.learner.settings.micro_batch_tokens // 2)
    fix = f"use train.micro_batch_tokens={half} or train_model.gradient_checkpointing=true"
    done: list[Check] = []
    for check in checks_of(run) if checks is None else checks:
        began = time.perf_counter()  # includes sampling, in the first check that needs samples
        try:
            with memory_for(f"the check '{check.__name__.replace('_', ' ')}'", fix):
                if check not in WITHOUT_SAMPLES and not run.rows:
                    run.rows = graded_rows(run)
                result = replace(check(run), seconds=time.perf_counter() - began)
        except UnusableValues as error:
            raise UserError(f"The responses sampled by the checks cannot be trained on: {error}") from error
        done.append(result)
        on_check(result)
        said = result.outcome, result.name, result.sentence, result.seconds
        logger.info("check %s: %s, %s (%.2f s)", *said, extra={"file_only": True})
        if result.passed is False and mode == "strict":
            set_rng_state(random)
            raise CheckError(result)
    run.weight_sync.wake()
    set_rng_state(random)
    return done


def write_gate(run_dir: Path, mode: str, checks: Sequence[Check]) -> None:
    """Write the results of ``checks`` to ``gate.json`` in the run directory; RunFailed if it cannot be written."""
    path = run_dir / GATE_FILE
    with writing(path, "mend the cause and start again", RunFailed):
        write_json(path, {"mode": mode, "checks": [asdict(check) for check in checks]})


def graded_rows(run: TrainingComponents) -> RowTable:
    """Sample and grade responses, put a colocated engine to sleep, apply ``run.transforms``, and return the rows."""
    batch = run.sample()
    run.weight_sync.sleep()
    for transform in run.transforms:
        batch = transform(batch)
    return batch


def _typical(run: TrainingComponents, rows: RowTable, *, round_too: bool = True) -> tuple[float, float | None]:
    """Return (mean |engine's - learner's log-prob|, mean rounding error or None); tokens count at most 1 nat."""
    if run.exact or not round_too:
        measured, rounding = run.learner.measured(rows), None
    else:
        measured, rounding = run.learner.measured_with_rounding(rows)

    def size(values: torch.Tensor) -> float:
        return float(values[rows.flat(keys.ASSISTANT_MASK)].abs().clamp(max=1.0).mean())

    return size(measured[0] - rows.flat(keys.LOG_PROBS)), None if rounding is None else size(rounding)
