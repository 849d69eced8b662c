"""The checks of the gate that compare log-probs: is what the engine samples from what the trainer differentiates?

Two systems that compute one policy in half precision differ by rounding, and how much that is depends on the model:
its depth, its logits (a bfloat16 logit between 16 and 32 has a step of 1/8), how sure it is. So no bound is fitted to
some model. Two laws hold under any rounding: the mean ratio is 1, and gaps have no slope against the temperature
(:mod:`sota_grpo.functional.agreement`). What is left is a size, and its measure is the rounding of this very model on
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

One layer: 1 % of its weights have another sign. SmolLM2-135M-Instruct has 30 layers and was asked to follow made-up
instructions (10 seeds, ``python -m benchmarks.gate``); the embedded policy has 4 and is sure of most tokens (4 seeds);
random weights (2 seeds each) have 4, 8, 12 and 30 layers, widths of 256 to 576 and vocabularies of 8k to 152k. Their
rounding was 0.03 nats, 0.001, and 0.03, 0.06, 0.05 and 0.12: a bound for all of them would be one for none. A top-p of
0.9 hardly touches a sharp policy: on the embedded one it moves the mean square by 19 times, and nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

from sota_grpo.functional.agreement import mean_ratio, temperature_slope
from sota_grpo.gate_subject import Check, Subject

MARGIN = 4  # times the rounding that was measured, and standard errors
SINGLE = 1e-4  # mean gap that is allowed where both compute in float32
ROUNDING = 1e-6  # float32's own error in a mean of ratios
HALF = 0.1  # mean gap that is allowed where parameters are in half precision: their rounding cannot be measured
SMALLEST = 5e-3  # of what is allowed in half precision: a sharp policy's rounding is that of a handful of tokens
LARGEST = 0.25  # above it nothing is allowed: a trainer that is wrong in half precision would measure that as rounding
FAR = 1.0  # gap of a single token that is far off in half precision, nats
SINGLE_FAR = 20 * SINGLE  # in float32
SLOPE = 0.05  # share by which the temperatures may differ
RATIO = 0.01  # of the mean ratio's distance from 1


class Allowed(NamedTuple):
    """Bounds that follow from rounding.

    Args:
        gap: of the mean of |gap|, nats.
        square: of the mean of gap squared; the effective sample size may be as much below 1, the mismatch KL half.
        why: where they come from, for the sentence.
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


def engine_and_trainer_have_one_temperature(subject: Subject) -> Check:
    """The slope of the gaps says by which share two temperatures differ: 0.2 for 0.8 against 1."""
    found = temperature_slope(subject.gaps, *subject.said)
    allowed = SLOPE + MARGIN * found.error
    return Check(
        "engine and trainer have one temperature",
        abs(found.value) <= allowed,
        f"the trainer's is {1 - found.value:.3f} times the engine's, by {subject.gaps.numel()} tokens "
        f"(allowed 1 +- {allowed:.2g})",
    )


def engine_and_trainer_agree(subject: Subject) -> Check:
    """Mean over sampled tokens of |log-prob of the engine - log-prob of the trainer|, and a high quantile of it.

    In float32 the quantile is the largest gap. In half precision some token of thousands is far off by rounding alone:
    as many of the largest gaps are left out as half of the responses are, so that a mistake at one token of every
    response is still found, however long they are.
    """
    gaps, allowed = subject.gaps.abs(), allowed_gaps(subject)
    left_out, far = (0, SINGLE_FAR) if subject.exact else (len(subject.rows) // 2, FAR)
    mean, highest = float(gaps.mean()), gaps.topk(min(left_out + 1, gaps.numel())).values
    within = f", all but {left_out} within {highest[-1]:.2g}" if left_out else ""
    return Check(
        "engine and trainer agree",
        mean <= allowed.gap and float(highest[-1]) <= far,
        f"mean log-prob gap {mean:.2g}, largest {highest[0]:.2g}{within}, over {gaps.numel()} tokens "
        f"(allowed {allowed.gap:.2g} and {far:g}: {allowed.why})",
    )


def first_ratio_is_one(subject: Subject) -> Check:
    """Mean ratio 1; by the loss's own diagnostics effective sample size 1 and no mismatch; in float32 nothing clipped.

    Small gaps of mean square ``v`` have an effective sample size of ``1 - v`` and a mismatch KL of ``v / 2``. How many
    tokens half precision clips depends on the clip's width (GSPO's 3e-4 is within the rounding): reported only.
    """
    found, ratio = subject.diagnosis, mean_ratio(subject.gaps)
    ess, kl, clipped = (found[name] for name in ("ess", "mismatch_kl", "clip_fraction"))
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
