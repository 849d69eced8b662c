"""Weights by broadcast between processes: every bit lands, in flight; who dies or hangs meanwhile holds nobody up."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sota_grpo.policy.lora import engine_weights
from sota_grpo.rl.records import Sampling
from sota_grpo.training.learner import Publisher
from sota_grpo.workers.base import WorkerSpec, starter
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.rollout import FleetEngine
from sota_grpo.workers.weight_transfer import WeightSender, WeightTransfer
from tests.contract.test_fsdp_ranks import started
from tests.engine_rigs import CONTEXT, ragged_requests, tiny_model
from tests.forked import ForkLauncher
from tests.process_rigs import wait_for
from tests.rank_rigs import ragged_rows
from tests.weight_rigs import TOKENS_HELD, resources

DEADLINE_S = 2400.0  # half of it for a slice: a test that waited for that would run into its own timeout


@dataclass
class Rig:
    """A learner in this process, two rollout workers in processes of their own."""

    model: torch.nn.Module
    fleet: Fleet
    engine: FleetEngine
    transfer: WeightTransfer
    publisher: Publisher
    version: int = 0

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)

    def publish(self) -> dict[str, torch.Tensor]:
        """New weights to all; what engines that compute in float32 must have then."""
        self.train()
        self.version += 1
        self.publisher.publish(self.version)
        return {name: weight.float().clone() for name, weight in engine_weights(self.model)}

    def wait_at_most(self, deadline_s: float) -> None:
        """The deadline of the transfers that begin now, by a new group."""
        self.transfer._deadline_s, self.transfer._stall_s, self.transfer._rendezvous = deadline_s, deadline_s / 2, None

    def assert_served(self, weights: dict[str, torch.Tensor], count: int) -> None:
        assert [served for served, _ in self.fleet.broadcast("served", deadline_s=60)] == [self.version] * count
        for pack, total in self.fleet.broadcast("weights", deadline_s=60):
            found = dict(pack.tensors())
            assert total == 2.5
            assert found.keys() == weights.keys()
            assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    launcher = ForkLauncher()
    start = starter(launcher, "rollout", WorkerSpec("tests.weight_rigs:watched_rollout"), [{"threads": 1}] * 2)
    fleet = Fleet("rollout", start, 2, capacity=4)
    model = tiny_model(seed=3).train()
    model.model.layers[0].to(torch.bfloat16)  # weights of both dtypes travel
    transfer = WeightTransfer(
        fleet,
        WeightSender(model),
        share=launcher.share,
        backend="gloo",
        deadline_s=DEADLINE_S,
        slice_bytes=1 << 14,  # 18 slices
    )
    engine = FleetEngine(fleet, name="transformers", max_model_len=CONTEXT, share=launcher.share, deadline_s=DEADLINE_S)
    fleet.wait_ready()
    yield Rig(model, fleet, engine, transfer, Publisher(lambda: transfer, [engine]))
    fleet.close()
    transfer.close()
    launcher.close()


def test_every_bit_lands_under_running_groups(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    sampling = Sampling(max_tokens=3 * TOKENS_HELD, ignore_eos=True)
    groups = [rig.engine.submit(request, sampling) for request in ragged_requests(4, 2)]
    wait_for(lambda: min(rig.fleet.broadcast("num_steps", deadline_s=60)) == TOKENS_HELD, 60)
    weights = rig.publish()
    assert not wait(groups, timeout=60).not_done
    for group in groups:
        for sample in group.result().samples:
            old = int((sample.versions == 0).sum())
            assert 1 <= old <= TOKENS_HELD
            assert sample.versions.tolist() == [0] * old + [1] * (3 * TOKENS_HELD - old)
    rig.assert_served(weights, 2)
    assert not caplog.records
    assert rig.fleet.restarts == 0


def test_many_transfers_leave_nothing_behind(rig: Rig) -> None:
    rig.publish()
    name = rig.transfer._rendezvous.group
    gc.collect()  # what others have left in this process
    before = all_resources(rig)
    for _ in range(5):
        weights = rig.publish()
    assert rig.transfer._rendezvous.group == name  # one group for all of them
    for _ in range(5):
        rig.transfer._rendezvous = None  # a new one each time
        weights = rig.publish()
    rig.assert_served(weights, 2)
    wait_for(lambda: all(now <= then for now, then in zip(all_resources(rig), before)))


def all_resources(rig: Rig) -> list[int]:
    """Open files and threads of this process and of the workers."""
    return [number for each in (resources(), *rig.fleet.broadcast("resources", deadline_s=60)) for number in each]


def test_a_killed_worker_is_done_without_and_its_successor_gets_the_version_that_was_announced(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    rig.fleet.broadcast("arm", rig.fleet.pids[0], "SIGKILL", 4, deadline_s=60)
    weights = rig.publish()  # noticed at once: no deadline passes here
    assert "through the object store" in caplog.text
    assert "workers lost: 1" in caplog.text
    rig.assert_served(weights, 1)
    caplog.clear()
    weights = rig.publish()  # to the other one alone, by broadcast again: nobody needs a copy until the new one comes
    rig.train()  # the next step has begun: what the learner holds now was never announced
    wait_for(lambda: len(rig.fleet.broadcast("ping", deadline_s=60)) == 2, 60)
    rig.assert_served(weights, 2)
    rig.assert_served(rig.publish(), 2)  # by a group of the two that live now
    assert not caplog.records
    assert rig.fleet.restarts == 1


@pytest.mark.slow
def test_four_ranks_publish_to_two_fleets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By broadcast to one and the other, and through shared memory; a member that dies in the middle stops no rank."""
    caplog.set_level(logging.WARNING)
    with started(4, tmp_path) as ranks, ExitStack() as stack:
        learner, share = ranks.learner(), ranks.launcher.share
        fleets, transfers, publishers = [], [], []
        for name in ("one", "two"):
            start = starter(ranks.launcher, name, WorkerSpec("tests.weight_rigs:Holder"), [{"threads": 1}] * 2)
            fleet = Fleet(name, start, 2, capacity=1)
            stack.callback(fleet.close)
            options = {"share": share, "deadline_s": DEADLINE_S}
            transfer = WeightTransfer(fleet, learner, backend="gloo", slice_bytes=1 << 10, **options)
            stack.callback(transfer.close)
            engine = FleetEngine(fleet, name=name, max_model_len=CONTEXT, **options)
            fleets.append(fleet)
            transfers.append(transfer)
            publishers += [
                Publisher(lambda transfer=transfer: transfer, [engine]),
                Publisher(learner.weights, [engine]),
            ]
        for fleet in fleets:
            fleet.wait_ready()

        def publish(version: int, *indexes: int) -> None:
            learner.update(ragged_rows(6))
            for index in indexes:
                publishers[index].publish(version)
            expected = dict(learner.weights().tensors())
            for fleet in fleets:
                for pack in fleet.broadcast("weights", deadline_s=60):
                    found = dict(pack.tensors())
                    assert all(torch.equal(value, found[name]) for name, value in expected.items())

        for version in (1, 2, 3):
            publish(version, 0, 2)
        groups = [transfer._rendezvous.group for transfer in transfers]
        publish(4, 1, 3)
        assert not caplog.records
        worker = fleets[1]._slots[0].worker
        worker.call("arm", 4).result(60)
        publish(5, 0, 2)
        assert "workers lost: 1" in caplog.text
        caplog.clear()
        wait_for(lambda: len(fleets[1].broadcast("ping", deadline_s=60)) == 2)
        publish(6, 0, 2)
        assert not caplog.records
        assert transfers[0]._rendezvous.group == groups[0]  # from the first to the last
        assert transfers[1]._rendezvous.group != groups[1]


def test_a_stopped_worker_is_found_within_the_deadline(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    rig.wait_at_most(6.0)
    rig.fleet.broadcast("arm", rig.fleet.pids[1], "SIGSTOP", 4, deadline_s=60)
    weights = rig.publish()
    assert "has not answered served within 3 s" in caplog.text  # and not: a ping, for the fleet's 60 s
    assert "workers lost: 1" in caplog.text
    rig.assert_served(weights, 1)
