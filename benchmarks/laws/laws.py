"""The laws: functions of an :class:`~benchmarks.laws.adapter.Adapter` that measure whether it keeps one.

A law's docstring is its sentence in the table. Expected losses and gradients are computed here by plain loops over
tokens in float64, from the papers' formulas. A trainer that computes in float32 passes: the tolerance is 1e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.laws.adapter import CISPO_CLIP, CLIP, DUAL_CLIP, Adapter, Rows

HOLDS, FAILS, REFUSES, ABSENT, UNJUDGED = "holds", "does not hold", "refuses", "does not apply", "not judged"
CLOSE = 1e-5  # relative to the largest entry
MASKED = (0, 2)  # row and slot of a token inside a response that a tool inserted
PADDED = (3, 4)  # a slot behind the end of a response
SIDES = {"old": (False, True), "current": (True, False), "both": (True, True)}  # current and old log-probs


class Outcome(NamedTuple):
    """A verdict and what was measured, or why there is none."""

    verdict: str
    measured: str


class NotApplicable(Exception):
    """The trainer has no such part."""


LAWS: dict[str, Callable[[Adapter], Outcome]] = {}


def law(check: Callable[[Adapter], Outcome]) -> Callable[[Adapter], Outcome]:
    name = check.__name__

    @wraps(check)
    def judged(adapter: Adapter) -> Outcome:
        if name in adapter.unjudged:
            return Outcome(UNJUDGED, adapter.unjudged[name])
        try:
            if name in adapter.absent:
                raise NotApplicable(adapter.absent[name])
            return check(adapter)
        except NotApplicable as reason:
            return Outcome(ABSENT, str(reason))
        except Exception as error:  # whatever a trainer raises on such an input is its answer
            return Outcome(REFUSES, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")

    LAWS[name] = judged
    return judged


def verdict(holds: bool, measured: str) -> Outcome:
    return Outcome(HOLDS if holds else FAILS, measured)


# --- the rows ---------------------------------------------------------------------------------------------------------


def rows(*, spread: float = 0.6, with_ref: bool = False) -> Rows:
    """Four responses of 6, 3, 5 and 2 tokens in six slots; a slot of the first is a tool's. Gaps up to ``spread``."""
    stream = torch.Generator().manual_seed(7)
    shape = (4, 6)

    def drawn(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=stream, dtype=torch.float64)

    log_prob, gap, ref = drawn(-3.0, -0.1), drawn(-spread, spread), drawn(-3.0, -0.1)
    mask = torch.arange(6) < torch.tensor([[6], [3], [5], [2]])
    mask[MASKED] = False
    advantage = torch.tensor([1.5, -0.7, 0.6, -1.4], dtype=torch.float64)
    return Rows(log_prob, log_prob - gap, advantage, mask, ref if with_ref else None)


def evaluate(adapter: Adapter, given: Rows, objective: str, split: Sequence[int] | None = None) -> tuple[float, Tensor]:
    """Loss and gradient ``[N, T]`` by the log-probs."""
    log_prob = given.log_prob.clone().requires_grad_()
    loss = adapter.step(replace(given, log_prob=log_prob), objective, split or [len(given.mask)])
    (gradient,) = torch.autograd.grad(loss.sum(), log_prob, allow_unused=True)
    return float(loss.detach()), torch.zeros_like(log_prob) if gradient is None else gradient


def error(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected entry; infinite if anything found is not finite."""
    if not found.isfinite().all():
        return math.inf
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def equal(adapter: Adapter, given: Rows, loss: float, gradient: Tensor, objective: str) -> Outcome:
    """Whether the trainer's loss and gradient of ``given`` are these."""
    found, found_gradient = evaluate(adapter, given, objective)
    of_loss = error(torch.tensor(found), torch.tensor(loss))
    of_gradient = error(found_gradient, gradient)
    return verdict(max(of_loss, of_gradient) < CLOSE, f"loss off by {of_loss:.1e}, gradient by {of_gradient:.1e}")


def has(adapter: Adapter, objective: str) -> str:
    if objective not in adapter.weighting:
        raise NotApplicable(adapter.absent.get(objective, f"it has no {objective.replace('_', ' ')}"))
    return objective


def weights(given: Rows, weighting: str) -> Tensor:
    """The weight of every token ``[N, T]``."""
    mask = given.mask.double()
    return mask / mask.sum() if weighting == "token" else mask / mask.sum(-1, keepdim=True) / len(mask)


def by_token(given: Rows, weighting: str, token: Callable[[float, float, float], tuple[float, float]]):
    """Loss and gradient from a function of (log-prob, log-ratio, advantage) of one token to both of it."""
    weight, gradient, loss = weights(given, weighting), torch.zeros_like(given.log_prob), 0.0
    for row, slot in given.mask.nonzero().tolist():
        log_prob, old = float(given.log_prob[row, slot]), float(given.old[row, slot])
        value, slope = token(log_prob, log_prob - old, float(given.advantage[row]))
        loss += float(weight[row, slot]) * value
        gradient[row, slot] = weight[row, slot] * slope
    return loss, gradient


def clipped(dual_clip: float = math.inf) -> Callable[[float, float, float], tuple[float, float]]:
    """``-min(rho A, clip(rho) A)``, for A < 0 at most ``-dual_clip A``, and its slope by the log-prob."""

    def token(log_prob: float, log_ratio: float, advantage: float) -> tuple[float, float]:
        ratio = math.exp(log_ratio)
        low, high = (1 - CLIP, dual_clip) if advantage < 0 else (0.0, 1 + CLIP)
        return -advantage * min(max(ratio, low), high), -advantage * ratio if low < ratio < high else 0.0

    return token


# --- surrogates -------------------------------------------------------------------------------------------------------


@law
def clip(adapter: Adapter) -> Outcome:
    """The clipped surrogate has PPO's closed form, loss and gradient."""
    given, objective = rows(), has(adapter, "clipped")
    ratio = (given.log_prob - given.old).exp()[given.mask]
    assert ratio.min() < 1 - CLIP < 1 + CLIP < ratio.max(), "the rows would not tell the clips apart"
    return equal(adapter, given, *by_token(given, adapter.weighting[objective], clipped()), objective)


@law
def on_policy(adapter: Adapter) -> Outcome:
    """If the old log-probs are the current ones, the gradient is REINFORCE's: minus the advantage, averaged."""
    given = rows(spread=0.0)
    expected = -given.advantage[:, None] * weights(given, adapter.weighting[adapter.default])
    found = evaluate(adapter, given, adapter.default)[1]
    return verdict(error(found, expected) < CLOSE, f"gradient off by {error(found, expected):.1e}")


@law
def dual_clip(adapter: Adapter) -> Outcome:
    """The dual clip bounds the loss of a negative advantage at c times it, with gradient 0 above, and only there."""
    given, objective = rows(spread=2.0), has(adapter, "dual_clip")
    given.old[1, 0], given.old[3, 1] = given.log_prob[1, 0] - 1.3, given.log_prob[3, 1] - 0.9  # ratios 3.7 and 2.5
    return equal(adapter, given, *by_token(given, adapter.weighting[objective], clipped(DUAL_CLIP)), objective)


@law
def cispo(adapter: Adapter) -> Outcome:
    """CISPO's gradient is the clipped ratio times minus the advantage: clipped tokens keep one."""
    given, objective = rows(), has(adapter, "cispo")

    def token(log_prob: float, log_ratio: float, advantage: float) -> tuple[float, float]:
        ratio = min(math.exp(log_ratio), 1 + CISPO_CLIP)
        return -ratio * advantage * log_prob, -ratio * advantage

    _, gradient = by_token(given, adapter.weighting[objective], token)
    found = evaluate(adapter, given, objective)[1]
    return verdict(error(found, gradient) < CLOSE, f"gradient off by {error(found, gradient):.1e}")


@law
def gspo(adapter: Adapter) -> Outcome:
    """GSPO's ratio is the geometric mean over a response; loss and gradient have its closed form."""
    given, objective = rows(spread=0.9), has(adapter, "gspo")
    gap = torch.where(given.mask, given.log_prob - given.old, 0.0)
    mean = gap.sum(-1, keepdim=True) / given.mask.sum(-1, keepdim=True)
    whole = replace(given, old=given.log_prob - mean)
    return equal(adapter, given, *by_token(whole, adapter.weighting[objective], clipped()), objective)


# --- KL ---------------------------------------------------------------------------------------------------------------


def estimator(adapter: Adapter, name: str) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    if name not in adapter.kl:
        raise NotApplicable(adapter.absent.get(name, adapter.absent.get("kl", f"it has no {name}")))

    def value_and_slope(log_prob: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        leaf = log_prob.clone().requires_grad_()
        value = adapter.kl[name](leaf, ref)
        return value.detach().double(), torch.autograd.grad(value.sum(), leaf)[0].double()

    return value_and_slope


def closed_kl(adapter: Adapter, name: str, form: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Outcome:
    log_prob = torch.tensor([-0.2, -1.0, -1.5, -2.5, -0.7], dtype=torch.float64)
    gap = torch.tensor([0.3, -0.4, 1.6, -1.2, 0.02], dtype=torch.float64)
    value, slope = estimator(adapter, name)(log_prob, log_prob - gap)
    expected, expected_slope = form(gap)
    off = max(error(value, expected), error(slope, expected_slope))
    return verdict(off < CLOSE, f"off by {off:.1e}")


@law
def k1(adapter: Adapter) -> Outcome:
    """KL estimator k1: d = log p - log p_ref, slope 1."""
    return closed_kl(adapter, "k1", lambda gap: (gap, torch.ones_like(gap)))


@law
def k2(adapter: Adapter) -> Outcome:
    """KL estimator k2: d^2 / 2, slope d."""
    return closed_kl(adapter, "k2", lambda gap: (gap.square() / 2, gap))


@law
def k3(adapter: Adapter) -> Outcome:
    """KL estimator k3: exp(-d) + d - 1, slope 1 - exp(-d)."""
    return closed_kl(adapter, "k3", lambda gap: ((-gap).exp() + gap - 1, 1 - (-gap).exp()))


@law
def kl_pull(adapter: Adapter) -> Outcome:
    """The KL in the loss still pulls when far away: a slope of 0.5 or more, in the right direction, at d of 4 to 15."""
    if adapter.kl_in_loss is None:
        raise NotApplicable(adapter.absent.get("kl_in_loss", adapter.absent.get("kl", "it has no KL in the loss")))
    gap = torch.tensor([-8.0, -4.0, 4.0, 8.0, 12.0, 15.0], dtype=torch.float64)
    log_prob = torch.tensor([-9.0, -6.0, -0.5, -0.5, -0.5, -0.5], dtype=torch.float64)
    slope = estimator(adapter, adapter.kl_in_loss)(log_prob, log_prob - gap)[1]
    weak = [float(d) for d, pull in zip(gap, slope * gap.sign(), strict=True) if not pull >= 0.5]
    return verdict(not weak, f"no pull at d = {', '.join(f'{d:+.0f}' for d in weak)}" if weak else "pulls at all six")


# --- what is masked, padded, ordered, split ---------------------------------------------------------------------------


def unchanged(adapter: Adapter, cases: dict[str, Rows]) -> Outcome:
    """Whether each of the rows, which differ in masked slots only, gives the loss and gradient of :func:`rows`."""
    loss, gradient = evaluate(adapter, rows(), adapter.default)
    changed = []
    for name, given in cases.items():
        try:
            found, found_gradient = evaluate(adapter, given, adapter.default)
        except Exception as refused:
            changed.append(f"{name}: {type(refused).__name__}")
            continue
        if error(torch.tensor(found), torch.tensor(loss)) >= CLOSE or error(found_gradient, gradient) >= CLOSE:
            broken = "gradient" if error(torch.tensor(found), torch.tensor(loss)) < CLOSE else "loss"
            how = "changed" if math.isfinite(found) and found_gradient.isfinite().all() else "not finite"
            changed.append(f"{name}: {broken} {how}")
    if changed and all("Error" in text for text in changed):
        return Outcome(REFUSES, "; ".join(changed))
    return verdict(not changed, "; ".join(changed) or f"unchanged in {len(cases)} cases")


def with_slots(value: float, *, current: bool, old: bool) -> Rows:
    """The rows with ``value`` in the masked slots of the named log-probs."""

    def put(values: Tensor) -> Tensor:
        values = values.clone()
        values[MASKED] = values[PADDED] = value
        return values

    given = rows()
    return replace(
        given,
        log_prob=put(given.log_prob) if current else given.log_prob,
        old=put(given.old) if old else given.old,
    )


@law
def masked_garbage(adapter: Adapter) -> Outcome:
    """A masked slot with a finite gap of 1000 nats changes neither loss nor gradient."""
    cases = {"old at -1000": (False, True), "current at -1000": (True, False)}
    return _with_slots(adapter, -1000.0, cases)


@law
def masked_inf(adapter: Adapter) -> Outcome:
    """A masked slot of -inf changes neither loss nor gradient."""
    return _with_slots(adapter, -math.inf, SIDES)


@law
def masked_nan(adapter: Adapter) -> Outcome:
    """A masked slot of NaN changes neither loss nor gradient."""
    return _with_slots(adapter, math.nan, SIDES)


def _with_slots(adapter: Adapter, value: float, cases: dict[str, tuple[bool, bool]]) -> Outcome:
    return unchanged(
        adapter, {name: with_slots(value, current=current, old=old) for name, (current, old) in cases.items()}
    )


@law
def empty_row(adapter: Adapter) -> Outcome:
    """A response without a trained token adds nothing, and nothing that is not finite."""
    given = rows()
    mask = given.mask.clone()
    mask[1] = False
    loss, gradient = evaluate(adapter, replace(given, mask=mask), adapter.default)
    fine = math.isfinite(loss) and bool(gradient.isfinite().all()) and not gradient[1].any()
    return verdict(fine, f"loss {loss:.3g}, its gradient at most {float(gradient[1].abs().max()):.1g}")


def _moved(adapter: Adapter, before: Rows, after: Rows, back: Callable[[Tensor], Tensor]) -> Outcome:
    loss, gradient = evaluate(adapter, before, adapter.default)
    found, found_gradient = evaluate(adapter, after, adapter.default)
    off = max(error(torch.tensor(found), torch.tensor(loss)), error(back(found_gradient), gradient))
    return verdict(off < CLOSE, f"off by {off:.1e}")


def _padded(given: Rows, columns: int = 5) -> Rows:
    def wider(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, columns))

    ref = None if given.ref is None else wider(given.ref)
    return replace(given, log_prob=wider(given.log_prob), old=wider(given.old), mask=wider(given.mask), ref=ref)


@law
def padding(adapter: Adapter) -> Outcome:
    """Five more columns of padding change nothing."""
    return _moved(adapter, rows(), _padded(rows()), lambda gradient: gradient[:, :6])


@law
def padding_kl(adapter: Adapter) -> Outcome:
    """Five more columns of padding change nothing with KL in the loss."""
    _needs_kl(adapter)
    given = rows(with_ref=True)
    return _moved(adapter, given, _padded(given), lambda gradient: gradient[:, :6])


@law
def row_order(adapter: Adapter) -> Outcome:
    """The order of the responses changes nothing."""
    order = torch.tensor([2, 0, 3, 1])
    return _moved(adapter, rows(), rows()[order], lambda gradient: gradient[order.argsort()])


def _needs_kl(adapter: Adapter) -> None:
    if adapter.kl_in_loss is None:
        raise NotApplicable(adapter.absent.get("kl_in_loss", adapter.absent.get("kl", "it has no KL in the loss")))


def _split(adapter: Adapter, given: Rows, split: list[int]) -> Outcome:
    whole, parts = (evaluate(adapter, given, adapter.default, part)[1] for part in ([4], split))
    scale = float(parts.norm() / whole.norm())
    return verdict(
        error(parts, whole) < CLOSE, f"gradient off by {error(parts, whole):.1e}, its norm {scale:.3f} times"
    )


@law
def equal_split(adapter: Adapter) -> Outcome:
    """Two micro-batches of two responses, of unequal numbers of tokens, give the gradient of the whole step."""
    return _split(adapter, rows(), [2, 2])


@law
def uneven_split(adapter: Adapter) -> Outcome:
    """So do micro-batches of one and three responses."""
    return _split(adapter, rows(), [1, 3])


@law
def kl_split(adapter: Adapter) -> Outcome:
    """So do two micro-batches of two responses with KL in the loss."""
    _needs_kl(adapter)
    return _split(adapter, rows(with_ref=True), [2, 2])


# --- far tokens, zero advantages --------------------------------------------------------------------------------------


def _with_far_token(gap: float) -> Rows:
    """64 responses of 64 tokens with gaps of 0.02 nats, and one token of a response with A < 0 at ``gap``."""
    stream = torch.Generator().manual_seed(11)
    shape = (64, 64)
    log_prob = -3 * torch.rand(shape, generator=stream, dtype=torch.float64) - 0.05
    old = log_prob - 0.02 * torch.randn(shape, generator=stream, dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(32)
    old[1, 5] = log_prob[1, 5] - gap
    return Rows(log_prob, old, advantage, torch.ones(shape, dtype=torch.bool))


def _far(adapter: Adapter, gap: float) -> Outcome:
    loss, gradient = evaluate(adapter, _with_far_token(gap), adapter.default)
    squared = gradient.square()
    share = float(squared[1, 5] / squared.sum()) if gradient.isfinite().all() else math.nan
    return verdict(
        math.isfinite(loss) and share <= 0.1, f"{100 * share:.0f} % of the squared gradient, loss {loss:.2g}"
    )


@law
def far_token(adapter: Adapter) -> Outcome:
    """One token of 4,096 that is 30 nats likelier than before, A < 0, has at most a tenth of the squared gradient."""
    return _far(adapter, 30.0)


@law
def overflow(adapter: Adapter) -> Outcome:
    """One token of 4,096 that is 1,000 nats likelier than before, A < 0, leaves loss and gradient finite."""
    return _far(adapter, 1000.0)


@law
def zero_advantage(adapter: Adapter) -> Outcome:
    """A response of advantage 0 has exactly no gradient."""
    given = rows()
    advantage = given.advantage.clone()
    advantage[2] = 0.0
    gradient = evaluate(adapter, replace(given, advantage=advantage), adapter.default)[1]
    others = bool(gradient[[0, 1, 3]].abs().sum(-1).all())
    return verdict(others and not gradient[2].any(), f"at most {float(gradient[2].abs().max()):.1g}")


# --- advantages -------------------------------------------------------------------------------------------------------


def _advantages(adapter: Adapter, rewards: Sequence[float], group_size: int) -> Tensor:
    if adapter.advantages is None:
        raise NotApplicable(adapter.absent.get("advantages", "it computes no advantages"))
    return adapter.advantages(torch.tensor(rewards, dtype=torch.float32), group_size).double().reshape(-1)


@law
def advantage_form(adapter: Adapter) -> Outcome:
    """Advantages of a group are the rewards minus their mean, over one positive number, near the std if any."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.25], [0.0, 1.0, 1.0, 1.0]])
    found = _advantages(adapter, rewards.flatten().tolist(), 4).view(2, 4)
    centred = rewards.double() - rewards.double().mean(-1, keepdim=True)
    ratio = (found * centred).sum(-1, keepdim=True) / centred.square().sum(-1, keepdim=True)
    scales = [torch.ones(2, dtype=torch.float64), *(1 / rewards.double().std(-1, correction=ddof) for ddof in (0, 1))]
    off = error(found, ratio * centred)
    near = min(error(ratio.flatten(), scale) for scale in scales)
    return verdict(off < 1e-3 and near < 1e-3, f"off by {off:.1e}, the divisor by {near:.1e}")


@law
def equal_rewards(adapter: Adapter) -> Outcome:
    """Equal rewards give advantage 0, to a millionth, whatever the reward and the group's size."""
    largest = {False: (0.0, ""), True: (0.0, "")}  # by whether the reward is at most 1
    for reward in (0.7, 9.9, 99.9, 0.1, 1 / 3):
        for size in (3, 5, 8, 22):
            found = float(_advantages(adapter, [reward] * size + [0.0, 1.0] * size, size)[:size].abs().max())
            found = math.inf if math.isnan(found) else found
            largest[reward <= 1] = max(largest[reward <= 1], (found, f"{found:.2g} for {size} rewards of {reward:.3g}"))
    return verdict(max(largest.values())[0] <= 1e-6, " and ".join(text for _, text in largest.values() if text) or "0")


@law
def group_of_one(adapter: Adapter) -> Outcome:
    """A group of one response gives advantage 0, or is refused."""
    try:
        found = _advantages(adapter, [1.0, 0.0, 0.5], 1)
    except NotApplicable:
        raise
    except Exception as refused:
        return Outcome(HOLDS, f"refused: {type(refused).__name__}")
    return verdict(not found.any(), f"rewards 1, 0, 0.5 give {', '.join(f'{a:.3g}' for a in found.tolist())}")


@law
def nan_reward(adapter: Adapter) -> Outcome:
    """A reward of NaN is refused, or spoils no other response of its group or batch."""
    try:
        found = _advantages(adapter, [1.0, math.nan, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5], 4)
    except NotApplicable:
        raise
    except Exception as refused:
        return Outcome(HOLDS, f"refused: {type(refused).__name__}")
    others = found[[0, 2, 3, 4, 5, 6, 7]]
    spoilt = int((~others.isfinite()).sum())
    return verdict(not spoilt, f"{spoilt} others not finite; its own advantage is {float(found[1]):.3g}")


@law
def other_groups(adapter: Adapter) -> Outcome:
    """The advantages of a group depend on its own rewards only, and follow the order of its responses."""
    alone = _advantages(adapter, [1.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 1.0], 4)[:4]
    beside = _advantages(adapter, [0.5, 0.0, 0.0, 1.0, 9.0, 2.0, 7.0, 3.0], 4)[:4].flip(0)
    return verdict(error(beside, alone) < CLOSE, f"off by {error(beside, alone):.1e}")
