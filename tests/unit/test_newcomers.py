"""An engine that comes later is checked like those that were there, by whoever has the learner, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from sota_grpo.engines.stepping import Inbox
from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.policy.load import load_model, load_tokenizer
from sota_grpo.policy.lora import packed_weights
from sota_grpo.training.checkpoint import rng_state
from sota_grpo.training.newcomers import Newcomers
from sota_grpo.workers.base import Worker, WorkerSpec
from sota_grpo.workers.elastic import ElasticFleet
from sota_grpo.workers.processes import ThreadLauncher
from sota_grpo.workers.rollout import FleetEngine, RolloutWorker
from tests.l3_parts import make_subject
from tests.process_rigs import wait_for


class Deaf(TransformersEngine):
    """Says that it has the weights it was sent, and has not."""

    def update_weights(self, weights, version: int) -> None:
        self.version = version


class Dying(TransformersEngine):
    """Ends at its first push."""

    def update_weights(self, weights, version: int) -> None:
        raise RuntimeError("no memory")


def worker(kind: type[TransformersEngine]) -> RolloutWorker:
    tokenizer = load_tokenizer("tiny")
    ids = {"eos_token_ids": [tokenizer.eos_token_id], "pad_token_id": tokenizer.pad_token_id}
    return RolloutWorker(lambda: kind(load_model("tiny"), **ids))


class Rig:
    """One engine that is there, and one that comes when it is told of what kind it is."""

    def __init__(self, tmp_path: Path, mode: str) -> None:
        self.kinds: list[type[TransformersEngine] | None] = [TransformersEngine, None]
        self.launcher = ThreadLauncher()
        self.fleet = ElasticFleet("rollout", self.start, 1, 2, gone_s=60.0, capacity=4, silence_s=8.0)
        self.fleet.wait_ready()
        self.front = FleetEngine(
            self.fleet, name="transformers", max_model_len=2048, share=lambda value: value, deadline_s=60.0
        )
        self.subject = make_subject(tmp_path)
        self.weights = partial(packed_weights, self.subject.learner.policy.model)
        self.newcomers = Newcomers(self.fleet, self.front, self.weights, mode)

    def start(self, index: int) -> Worker:
        wait_for(lambda: self.kinds[index] is not None)
        kind = self.kinds[index]
        self.kinds[1] = None
        return self.launcher.start(f"rollout-{index}", WorkerSpec("tests.unit.test_newcomers:worker", {"kind": kind}))

    def join(self, kind: type[TransformersEngine]) -> None:
        self.kinds[1] = kind
        wait_for(self.fleet.newcomers)

    def close(self) -> None:
        self.kinds = [Deaf, Deaf]  # nobody waits any more
        self.fleet.close()
        self.launcher.close()


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(tmp_path, getattr(request, "param", "strict"))
    yield rig
    rig.close()


def replaced(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of workers that are replaced."""
    return [record.getMessage() for record in caplog.records if "is replaced" in record.getMessage()]


def test_one_whose_weights_land_is_admitted_and_one_whose_do_not_is_refused(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.newcomers.begin(rig.subject)
    before = {name: value.clone() for name, value in rig.subject.learner.policy.model.state_dict().items()}
    random = rng_state()["torch"]
    rig.fleet._longest_pause_s = 0.0
    for times, (kind, why) in enumerate({Deaf: "pushed weights landed", Dying: "no memory"}.items(), start=1):
        rig.join(kind)
        rig.newcomers.attend()
        wait_for(lambda times=times: rig.fleet.restarts == times == len(replaced(caplog)))  # counted, then told
        assert why in replaced(caplog)[-1]
        assert rig.fleet.num_live == 1
    rig.join(TransformersEngine)
    Inbox(rig.front, [rig.newcomers.attend]).run_once(0.0)  # as whoever waits for samples
    wait_for(lambda: rig.fleet.num_live == 2)
    assert rig.fleet.newcomers() == []
    after = rig.subject.learner.policy.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(rng_state()["torch"], random)
    assert rig.fleet.broadcast("served", deadline_s=60.0) == [(0, None)] * 2


def test_before_the_gate_has_passed_one_is_admitted_only_where_no_other_is_left(rig: Rig) -> None:
    rig.join(Deaf)
    rig.newcomers.attend()
    assert len(rig.fleet.newcomers()) == 1
    rig.kinds[0] = None
    rig.fleet._slots[0].worker.kill()
    wait_for(lambda: rig.fleet.num_live == 0)
    rig.newcomers.attend()
    wait_for(lambda: rig.fleet.num_live == 1)  # the gate samples with it


@pytest.mark.parametrize("rig", ["off"], indirect=True)
def test_without_a_gate_nobody_is_held(rig: Rig) -> None:
    rig.kinds[1] = TransformersEngine
    wait_for(lambda: rig.fleet.num_live == 2)
