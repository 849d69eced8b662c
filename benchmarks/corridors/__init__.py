"""Two-sided corridors of what a run logs, per metric and step, from eight healthy seeds.

A corridor is a simultaneous prediction interval: a ninth healthy seed leaves it anywhere with probability ``ALARM`` at
most, if the seeds' values are normal on the metric's scale. Let ``x[i, s]`` be the value of seed ``i`` at step ``s`` on
that scale (logarithmic for positive metrics), ``n`` seeds, ``M`` metrics, ``S`` steps:

- centre: the seeds' mean at that step; half-width: ``t sd sqrt(1 + 1 / n)``, at least the metric's ``slack``, which
  covers what differs between processors and versions of torch.
- ``sd`` is the root mean square over up to ``WINDOW`` neighbouring steps of the seeds' standard deviations (ddof=1).
- ``t`` is Student's two-sided quantile at ``ALARM / 2 / (M S)`` (Bonferroni), its degrees of freedom by Satterthwaite:
  ``(n - 1) w^2 / sum_jk r_jk^2`` for ``w`` steps whose deviations correlate by ``r_jk``: between ``n - 1`` and
  ``(n - 1) w``.
- the mean of each metric over all steps has an interval of its own, at ``ALARM / 2 / M`` with ``n - 1`` degrees of
  freedom: it sees a small shift of every step.

The check is leave-one-out: each seed against the corridor of the others, which ``make`` prints and stores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

ALARM = 0.01  # probability that a healthy seed leaves a corridor anywhere
WINDOW = 7  # steps
Values = NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)


@dataclass(frozen=True)
class Metric:
    """The scale on which a metric is compared.

    Args:
        slack: least half-width, on the scale.
        zero: None: the scale is the metric; a number: it is ``log(metric + zero)``, so that values far below ``zero``
            are equal.
    """

    slack: float
    zero: float | None = None

    def scaled(self, values: Values) -> Values:
        return values if self.zero is None else np.log(np.maximum(values, 0.0) + self.zero)

    def plain(self, scaled: Values) -> Values:
        return scaled if self.zero is None else np.exp(scaled) - self.zero


#: In the order in which departures of one step are named. ``slack`` of a logarithm: 0.05 is 5 %.
METRICS: Mapping[str, Metric] = {
    "tokens": Metric(0.05, zero=1.0),  # prompts and responses of the step
    "advantage_order": Metric(0.001),  # fraction of groups whose best response has the larger advantage
    "mismatch_kl": Metric(1.0, zero=1e-6),
    "kl_approx": Metric(1e-3),
    "kl": Metric(0.1, zero=1e-5),
    "grad_norm": Metric(0.1, zero=1e-6),
    "entropy": Metric(0.1, zero=1e-3),
    "response_tokens/mean": Metric(0.05, zero=1.0),
    "advantage": Metric(0.02),
    "reward": Metric(0.02),
}


def t_tail(t: float, df: float) -> float:
    """Return ``P(T > t)`` of Student's t with ``df`` degrees of freedom, for ``t >= 0``.

    With ``t = sqrt(df) tan(a)`` the density is proportional to ``cos(a)^(df - 1)``; Gauss-Legendre integrates it
    to four digits for ``df`` up to 1000.

    >>> round(t_tail(2.3646, 7), 5), round(t_tail(5.4079, 7), 6)
    (0.025, 0.0005)
    """
    angle = math.atan(t / math.sqrt(df))
    half = (math.pi / 2 - angle) / 2
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(math.pi)
    return float(_WEIGHTS @ np.cos(angle + half + half * _NODES) ** (df - 1)) * half * math.exp(log_scale)


@cache
def t_quantile(tail: float, df: float) -> float:
    """Return the ``t`` with ``P(T > t) = tail``.

    >>> round(t_quantile(0.025, 7), 3), round(t_quantile(0.0005, 20), 3)
    (2.365, 3.85)
    """
    low, high = 0.0, 1e4
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, df) > tail else (low, middle)
    return high


@dataclass(frozen=True)
class Corridor:
    """Limits of one metric: ``low[s]`` and ``high[s]`` per step, and of the mean over all steps on the scale."""

    low: Values
    high: Values
    mean_low: float
    mean_high: float


def corridor(values: Values, metric: Metric, num_metrics: int) -> Corridor:
    """Return the corridor of one metric from its values ``[seeds, steps]``; ``num_metrics`` share the alarm rate."""
    scaled = metric.scaled(values)
    seeds, steps = scaled.shape
    factor = math.sqrt(1 + 1 / seeds)
    centre = scaled.mean(0)
    half = np.empty(steps)
    for step in range(steps):
        first = min(max(0, step - WINDOW // 2), max(0, steps - WINDOW))
        sd, df = pooled(scaled[:, first : first + WINDOW])
        half[step] = factor * sd * t_quantile(ALARM / 4 / (num_metrics * steps), math.floor(df))
    half = np.maximum(half, metric.slack)
    means = scaled.mean(1)
    mean_half = factor * means.std(ddof=1) * t_quantile(ALARM / 4 / num_metrics, seeds - 1)
    mean_half = max(float(mean_half), metric.slack)
    return Corridor(
        metric.plain(centre - half), metric.plain(centre + half), *(means.mean() + mean_half * np.array([-1, 1]))
    )


def pooled(window: Values) -> tuple[float, float]:
    """Return ``(sd, df)``: the pooled standard deviation of ``[seeds, steps]`` and its degrees of freedom.

    >>> alike = np.tile(np.arange(8.0)[:, None], (1, 5))
    >>> pooled(alike)[1]  # equal columns add no information
    7.0
    """
    deviations = window - window.mean(0)
    covariance = deviations.T @ deviations / (len(window) - 1)
    variances = np.diag(covariance)
    if not variances.any():
        return 0.0, float(len(window) - 1)
    return math.sqrt(variances.mean()), (len(window) - 1) * float(variances.sum() ** 2 / (covariance**2).sum())


def corridors(runs: Mapping[str, Values]) -> dict[str, Corridor]:
    """Return the corridor of every metric from its values ``[seeds, steps]``."""
    return {name: corridor(values, METRICS[name], len(runs)) for name, values in runs.items()}


def departures(run: Mapping[str, Sequence[float]], limits: Mapping[str, Corridor]) -> list[str]:
    """Return a sentence for each value of a run outside its corridor: by step, then by metric, means over steps last.

    A run with another number of steps, without a metric, or with a value that is no number departs at once.
    """
    sentences: list[tuple[float, str]] = []
    for name, limit in limits.items():
        values = np.array(run.get(name, ()), dtype=float)
        if len(values) != len(limit.low):
            sentences.append((-1, f"{name} has {len(values)} values instead of {len(limit.low)}."))
            continue
        for step in np.flatnonzero(~((values >= limit.low) & (values <= limit.high))):
            bounds = f"{limit.low[step]:.4g} to {limit.high[step]:.4g}"
            sentences.append((step, f"Step {step}: {name} is {values[step]:.4g}, outside {bounds}."))
        mean = METRICS[name].scaled(values).mean()
        if not limit.mean_low <= mean <= limit.mean_high:
            plain = METRICS[name].plain(np.array([mean, limit.mean_low, limit.mean_high]))
            sentence = f"All steps: {name} is {plain[0]:.4g} on average, outside {plain[1]:.4g} to {plain[2]:.4g}."
            sentences.append((math.inf, sentence))
    return [sentence for _, sentence in sorted(sentences, key=lambda pair: pair[0])]


def left_out(runs: Mapping[str, Values]) -> list[list[str]]:
    """Return, for each seed, its departures from the corridor of all other seeds."""
    num_seeds = len(next(iter(runs.values())))
    return [
        departures(
            {name: values[seed].tolist() for name, values in runs.items()},
            corridors({name: np.delete(values, seed, axis=0) for name, values in runs.items()}),
        )
        for seed in range(num_seeds)
    ]
