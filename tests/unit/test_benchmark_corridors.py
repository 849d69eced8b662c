"""Corridors keep what they promise of healthy seeds, and name what leaves; the soak tells a leak from noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.corridors import ALARM, METRICS, corridors, departures, left_out
from benchmarks.corridors.__main__ import FOLDER, values_of
from benchmarks.corridors.runs import RUNS
from benchmarks.soak import ALLOWED, slope

STORED = sorted(path.stem for path in FOLDER.glob("*.json"))


def drawn(seeds: int, steps: int, correlation: float) -> dict[str, np.ndarray]:
    """Values of healthy seeds: normal around a trend on each metric's scale, correlated from step to step."""
    runs = {}
    for name, metric in METRICS.items():
        noise = np.random.standard_normal((seeds, steps))
        for step in range(1, steps):
            noise[:, step] = correlation * noise[:, step - 1] + (1 - correlation**2) ** 0.5 * noise[:, step]
        runs[name] = metric.plain(np.linspace(0, 3, steps) + 3 * metric.slack * noise)
    return runs


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_a_ninth_healthy_seed_leaves_as_rarely_as_promised(correlation: float) -> None:
    """More than 3 of 50 have a chance below 0.002 at a rate of 0.01."""
    left = 0
    for _ in range(50):
        runs = drawn(9, 20, correlation)
        limits = corridors({name: values[:8] for name, values in runs.items()})
        left += bool(departures({name: values[8].tolist() for name, values in runs.items()}, limits))
    assert ALARM == 0.01
    assert left <= 3


def test_the_first_step_and_metric_that_leave_are_named() -> None:
    runs = drawn(8, 20, 0.5)
    healthy = {name: values.mean(0) for name, values in runs.items()}
    limits = corridors(runs)
    assert departures(healthy, limits) == []
    broken = {name: values.copy() for name, values in healthy.items()}
    broken["reward"][7] += 20 * METRICS["reward"].slack * 3
    broken["entropy"][12] = float("nan")
    first, second, *_ = departures(broken, limits)
    assert first.startswith("Step 7: reward is ")
    assert second.startswith("Step 12: entropy is nan")
    shorter = {**healthy, "kl": healthy["kl"][:-1]}
    assert departures(shorter, limits) == ["kl has 19 values instead of 20."]


def test_a_shift_of_every_step_too_small_for_one_step_is_seen_in_the_mean() -> None:
    runs = drawn(8, 20, 0.0)
    limits = corridors(runs)
    shifted = {name: values.mean(0) for name, values in runs.items()}
    half = (limits["reward"].high - limits["reward"].low) / 2
    shifted["reward"] = shifted["reward"] + 0.8 * half.min()
    (sentence,) = departures(shifted, limits)
    assert sentence.startswith("All steps: reward is ")


@pytest.mark.parametrize("name", STORED)
def test_no_stored_seed_leaves_the_corridor_of_the_others(name: str) -> None:
    values = values_of(name)
    assert {rows.shape for rows in values.values()} == {(8, RUNS[name].num_steps)}
    assert left_out(values) == [[]] * 8


@pytest.mark.parametrize(
    ("metric", "moved"),
    [
        ("kl", lambda kl: 9 * kl),  # three times the learning rate
        ("mismatch_kl", lambda kl: kl + 2e-5),  # log-probs 2 % too large: half the square of 0.02 x 0.3 and more
        ("advantage_order", lambda share: share - 1 / 16),  # one group of a step
    ],
)
def test_what_a_fault_moves_leaves_the_corridor_of_the_demonstration(metric: str, moved: Callable) -> None:
    values = values_of("demonstration")
    run = {name: METRICS[name].plain(METRICS[name].scaled(rows).mean(0)) for name, rows in values.items()}
    assert departures(run, corridors(values)) == []
    run[metric] = moved(run[metric])
    assert all(f": {metric} is " in sentence for sentence in departures(run, corridors(values)))
    assert departures(run, corridors(values))


def series(leak: float, noise: float, num: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """Memory of a run whose caches fill in its first third, with noise that lasts for ten moments, and a leak."""
    steps = np.arange(num) * 2000 / num
    wander = np.zeros(num)
    for index in range(1, num):
        wander[index] = 0.9 * wander[index - 1] + noise * 0.19**0.5 * np.random.standard_normal()
    return steps, 8e8 + 2e8 * (1 - np.exp(-steps / 150)) + wander + leak * steps


def test_a_leak_grows_and_noise_does_not() -> None:
    flat, leaking = (
        [slope(*series(leak, noise=1e7)).verdict(*ALLOWED["memory"]) for _ in range(50)] for leak in (0.0, 1e6)
    )
    assert leaking == ["grows"] * 50
    assert flat.count("grows") <= 3  # 99.9 % of the time at a rate of 0.005 or less: the allowance comes on top
    assert flat.count("flat") >= 47
    assert slope(*series(0.0, noise=5e9)).verdict(*ALLOWED["memory"]) == "too noisy"  # which hides such a leak
    steps = np.arange(300)  # handles: one in ten steps
    assert slope(steps, 40 + steps // 10).verdict(*ALLOWED["handles"]) == "grows"
    assert slope(steps, 40 + (steps % 50 == 0)).verdict(*ALLOWED["handles"]) == "flat"
