"""The bound on policy age, against a randomised simulation of admission by slots."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from sota_grpo.functional import max_groups_admitted


class Simulation:
    """Groups that finish in any order; the learner takes K at a time, publishes, frees their slots."""

    def __init__(
        self, slots: int, groups_per_step: int, rng: random.Random, *, in_order: bool, free_first: bool, discard: float
    ):
        self.slots, self.k, self.rng = slots, groups_per_step, rng
        self.in_order, self.free_first, self.discard = in_order, free_first, discard
        self.version, self.held, self.worst_age = 0, 0, 0
        self.running: list[int] = []  # admission versions
        self.ready: list[int] = []

    def fill(self) -> None:
        self.running += [self.version] * (self.slots - self.held)
        self.held = self.slots

    def next_batch(self) -> list[int] | None:
        if len(self.ready) < self.k:
            return None
        if not self.in_order:
            return self.ready[: self.k]
        oldest = sorted(self.running + self.ready)[: self.k]
        short = any(self.ready.count(version) < oldest.count(version) for version in set(oldest))
        return None if short else oldest

    def step(self, pick: Callable[[list[int]], int]) -> None:
        """Finish groups one by one until a batch is ready, train on it, publish, free."""
        self.fill()
        batch = self.next_batch()
        while batch is None:
            self.ready.append(self.running.pop(pick(self.running)))
            if self.rng.random() < self.discard:  # a constant group is discarded and replaced at once
                self.ready.pop()
                self.running.append(self.version)
            batch = self.next_batch()
        for version in batch:
            self.ready.remove(version)
        self.worst_age = max(self.worst_age, *(self.version - version for version in batch))
        if self.free_first:
            self.held -= self.k
            self.fill()
        self.version += 1
        if not self.free_first:
            self.held -= self.k


def worst_age(
    age: int, k: int, *, extra: int = 0, in_order: bool = True, free_first: bool = False, discard: float = 0.0
) -> int:
    """Worst age over three orders of finishing: random, newest first, newest first and then the stragglers."""
    rng = random.Random(random.getrandbits(32))
    orders = {
        "random": lambda running, step: rng.randrange(len(running)),
        "newest": lambda running, step: len(running) - 1,
        "stragglers": lambda running, step: len(running) - 1 if step < 20 else 0,
    }
    worst = 0
    for pick in orders.values():
        slots = max_groups_admitted(age, k) + extra
        simulation = Simulation(slots, k, rng, in_order=in_order, free_first=free_first, discard=discard)
        for step in range(40):
            simulation.step(partial(pick, step=step))
        worst = max(worst, simulation.worst_age)
    return worst


@pytest.mark.parametrize("age", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_no_order_of_finishing_exceeds_the_age(age: int, k: int) -> None:
    assert worst_age(age, k, discard=0.2) <= age
    assert worst_age(age, k) == age


def test_one_slot_more_or_a_rule_less_exceeds_it() -> None:
    for age, k in ((0, 3), (1, 2), (3, 1)):
        assert worst_age(age, k, extra=1) > age
    assert worst_age(0, 3, free_first=True) > 0  # slots freed before the publish
    assert worst_age(1, 2, in_order=False) >= 15  # first finished, first trained


def test_numbers_by_hand_and_errors() -> None:
    assert [max_groups_admitted(a, 8) for a in (0, 1, 4)] == [8, 16, 40]
    with pytest.raises(ValueError, match="max_policy_age is -1"):
        max_groups_admitted(-1, 8)
    with pytest.raises(ValueError, match="groups_per_step is 0"):
        max_groups_admitted(0, 0)
