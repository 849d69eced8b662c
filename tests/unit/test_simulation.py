"""The simulation of a whole asynchronous run: its clock, its workers, and what must hold in every scenario."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks.simulation import Scenario, Simulation, VirtualClock, Workers
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sampling
from tests.training_rigs import make_env

SCRIPT = torch.tensor([5, 6, 2])
SAMPLING = Sampling(max_tokens=1)


def decode(ids: torch.Tensor, **_: bool) -> str:
    return str(ids.tolist())


def simulation(**options) -> Simulation:
    return Simulation(make_env(num_envs=2, repeats=2, num_train=30), Scenario(**options))


def requests(count: int, samples: int = 2) -> list[GroupRequest]:
    return [GroupRequest(index, (1, 2), samples, random.getrandbits(60)) for index in range(count)]


def test_a_group_takes_as_long_as_its_longest_response_and_waits_for_a_place() -> None:
    """Sigma 0: every response has 10 tokens of 0.5 s. Two places, three groups: done at 5, 5 and 10 s."""
    clock = VirtualClock()
    scenario = Scenario(num_workers=1, groups_per_worker=2, response_tokens=10, sigma=0.0, token_s=0.5)
    workers = Workers(clock, scenario, SCRIPT, decode)
    ended: list[float] = []
    for request in requests(3):
        workers.submit(request, SAMPLING).add_done_callback(lambda future: ended.append(clock.now))
    assert workers.in_flight == 3
    while workers.in_flight:
        clock.run_next()
    assert ended == [5.0, 5.0, 10.0]
    assert workers.busy_s() == 15.0
    assert scenario.batch_s(2) == pytest.approx(5.0 * scenario.num_groups / 2)


def test_tokens_have_the_version_that_was_served_at_their_own_time() -> None:
    """Ten tokens at 0, 0.5, ... 4.5 s; version 1 arrives at 1.2 s and version 2 at 3 s."""
    clock = VirtualClock()
    workers = Workers(clock, Scenario(response_tokens=10, sigma=0.0, token_s=0.5), SCRIPT, decode)
    future = workers.submit(requests(1)[0], SAMPLING)
    for when in (1.2, 3.0):
        clock.at(when, workers.serve)
    while not future.done():
        clock.run_next()
    output: GroupOutput = future.result()
    assert output.samples[0].versions.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert output.samples[0].token_ids.tolist() == [5, 6, 5, 6, 5, 6, 5, 6, 5, 2]


def test_lengths_have_the_requested_mean_and_a_tail() -> None:
    scenario, draw = Scenario(response_tokens=200, sigma=1.0), random.Random(random.getrandbits(32))
    lengths = [scenario.length(draw) for _ in range(20_000)]
    assert sum(lengths) / len(lengths) == pytest.approx(196, rel=0.06)  # the cut at 8 means takes 2 % off
    assert max(lengths) == 1600
    assert sorted(lengths)[10_000] == pytest.approx(200 * 0.6065, rel=0.06)  # exp(-sigma^2 / 2)


def test_no_scenario_exceeds_the_age_and_shares_are_shares() -> None:
    for _ in range(5):
        bounds = {"num_workers": (1, 6), "groups_per_worker": (1, 4), "num_groups": (1, 8), "max_policy_age": (0, 3)}
        options = {name: random.randint(*bound) for name, bound in bounds.items()}
        options |= {"sigma": random.choice([0.0, 0.5, 1.5]), "generation_ratio": random.choice([0.3, 1.0, 3.0])}
        options |= {"publish_s": random.choice([0.0, 0.2]), "seed": random.getrandbits(30)}
        run = simulation(**options, num_steps=9)
        actual, scenario = run.run(), run.scenario  # next_batch raises above the bound
        assert 0 <= actual.policy_age_mean <= actual.policy_age_max <= scenario.max_policy_age, scenario
        assert actual.token_age_mean <= actual.policy_age_mean + 1e-9, scenario
        assert 0 <= actual.learner_idle < 1, scenario
        assert -1e-9 <= actual.worker_idle < 1, scenario
        assert actual.most_in_flight == (scenario.max_policy_age + 1) * scenario.num_groups, scenario


def test_without_a_tail_sync_is_the_sum_and_age_1_the_larger_of_both() -> None:
    """Sigma 0, 8 places, 8 groups of 16 tokens of 0.02 s: 0.32 s to sample, 0.16 s to learn."""
    options = {"num_workers": 2, "groups_per_worker": 4, "num_groups": 8, "sigma": 0.0, "generation_ratio": 2.0}
    synchronous = simulation(max_policy_age=0, num_steps=8, **options).run()
    ahead = simulation(max_policy_age=1, num_steps=8, **options).run()
    assert synchronous.step_s == pytest.approx(0.48)
    assert synchronous.learner_idle == pytest.approx(2 / 3)
    assert synchronous.worker_idle == pytest.approx(1 / 3)
    assert ahead.step_s == pytest.approx(0.32)
    assert ahead.worker_idle == pytest.approx(0.0, abs=1e-9)
