"""The arithmetic of benchmarks.fleet_scale against the event simulation, and against numbers computed by hand."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import pytest

from benchmarks.fleet_constants import Measured
from benchmarks.fleet_scale import Cluster, Job, bounds, publish_of, step_of, step_row
from benchmarks.simulation import Scenario, Simulation
from tests.training_rigs import make_env

FREE = {each.name: 1e9 if each.name.endswith("per_s") else 0.0 for each in fields(Measured)}
COSTS = Measured(**{**FREE, "call_s": 0.001})


def test_a_step_is_its_largest_bound_where_nothing_queues_and_responses_are_equally_long() -> None:
    """Equal to rounding, in virtual time; batches come in bursts of A + 1: 16 steps, of which 4 are left out."""
    for age in (0, 1, 2, 3):
        groups = random.randint(1, 2)
        run = Simulation(
            make_env(num_envs=2, repeats=2, num_train=30),
            Scenario(
                num_workers=age + 1,
                groups_per_worker=groups,
                num_groups=groups,
                max_policy_age=age,
                sigma=0.0,
                generation_ratio=random.choice([0.1, 0.4, 1.0, 3.0]),
                publish_s=random.choice([0.0, 0.3]),
                num_steps=16,
            ),
        )
        least = bounds(run.scenario, 2, run.learn_s + run.scenario.publish_s)
        assert run.run().step_s == pytest.approx(max(least.values()), rel=1e-9), run.scenario


def test_what_a_publish_sends_by_hand() -> None:
    """7B in half precision is 15.23 GB; links of 1 GB/s, memory of 1 GB/s: 15.23 s for each copy or transfer."""
    cluster = Cluster(network=1e9, device_link=1e9)
    job = Job("7B", 80, cluster, COSTS)
    copy_s = job.weight_bytes / 1e9
    assert copy_s == pytest.approx(15.23, abs=0.01)
    # off the GPU, packed, two puts, to the driver: 5; ten nodes from one or four doublings (1, 2, 4, 8 of 10 served)
    assert publish_of(job, "store").seconds["send"] == pytest.approx((5 + 10) * copy_s)
    assert publish_of(job, "tree").seconds["send"] == pytest.approx((5 + 4) * copy_s)


def test_a_driver_of_one_lock_bounds_the_step_from_where_its_seconds_exceed_the_others() -> None:
    """8,000 groups at 10 ms are 80 s, whatever the engines do; at 1 ms the engines or the learner decide."""
    costs = replace(COSTS, dispatcher_s=0.01, save_s=0.001)
    job = Job("7B", 1000, Cluster(), costs, publish="tree", tokens=256, learner_gpus=800)
    slow, fast = step_of(job), step_of(replace(job, costs=COSTS))
    assert slow.bottleneck == "driver"
    # every 10 steps 3 * 8,000 groups are saved at 1 ms: 2.4 s; engines and ranks are notified once, at 1 ms: 1.8 s;
    # 1,000 engines are pinged every 30 s and 800 ranks every 10, at 1 ms
    assert slow.step_s == pytest.approx((80 + 2.4 + 1.8) / (1 - 1 / 30 - 0.08))
    assert slow.drivers == math.ceil(84.2 / slow.floors["sampling"] + 1 / 30 + 0.08)
    assert fast.bottleneck != "driver"


def test_a_driver_whose_pings_take_all_its_time_has_no_step() -> None:
    """1,000 engines every 30 s and 800 ranks every 10 s, at 10 ms: 1.13 s of each second."""
    job = Job("7B", 1000, Cluster(), replace(COSTS, call_s=0.01), tokens=256, learner_gpus=800)
    step = step_of(job)
    assert math.isinf(step.step_s)
    assert step_row(step)[-3:] == ("unbounded", "pings, 113% of the driver", "-")
    assert "inf" not in step_row(step)
