"""How weights are laid out and cut for a broadcast, and what the driver does where there is no way to broadcast."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sota_grpo.policy.lora import engine_weights
from sota_grpo.policy.weight_pack import WeightPack, views
from sota_grpo.workers.base import WorkerSpec, starter
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.processes import ThreadLauncher
from sota_grpo.workers.rollout import FleetEngine
from sota_grpo.workers.slots import OnDemand
from sota_grpo.workers.weight_transfer import WeightLayout, WeightSender, WeightTransfer, _filled
from tests.engine_rigs import tiny_model


def random_state() -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and shapes, an empty one, a scalar, and one under two names."""
    state = {
        "bytes": torch.randint(256, (int(torch.randint(1, 300, ())),), dtype=torch.uint8),
        "none": torch.empty(0, 3),
        "scalar": torch.randn(()),
        "half": torch.randn(7, 5).to(torch.bfloat16),
        "turned": torch.randn(6, 4).T,
        "large": torch.randn(int(torch.randint(1, 400, ())), dtype=torch.float64),
    }
    return state | {"tied": state["half"]}


def test_slices_of_any_size_are_the_bytes_of_the_weights() -> None:
    state = random_state()
    layout = WeightLayout.of(state)
    unique = [(name, value) for name, value in state.items() if name != "tied"]
    for slice_bytes in (64, 192, 1 << 20):
        kept = torch.empty(layout.num_bytes, dtype=torch.uint8)
        parts = [part.clone() for part in _filled(unique, layout, kept, slice_bytes, torch.device("cpu"))]
        assert [part.numel() for part in parts] == [part.numel() for part in kept.split(slice_bytes)]
        for whole in (torch.cat(parts), kept):  # what is sent, and the copy that stays
            found = dict(views(layout.places, whole))
            assert list(found) == list(state)
            assert all(torch.equal(found[name], state[name]) for name in state)
        assert found["tied"].data_ptr() == found["half"].data_ptr()


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("default_group")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_sharded_weights_are_kept_whole_under_the_engines_names(dtype: torch.dtype | None) -> None:
    model = tiny_model(seed=5)
    expected = {name: weight.clone() for name, weight in engine_weights(model, dtype=dtype)}
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    sender = WeightSender(fully_shard(model, mesh=init_device_mesh("cpu", (1,))))
    assert sender.send_weights(None, 3, dtype) is None
    pack, version = sender.kept_weights()
    found = dict(pack.tensors())
    assert version == 3
    assert list(found) == list(expected)
    assert all(weight.dtype == expected[name].dtype for name, weight in found.items())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("others", [torch.bfloat16, torch.float32, None])
def test_weights_come_in_the_dtype_that_all_engines_have(others: torch.dtype | None) -> None:
    fleet = Mock()
    fleet.broadcast.return_value = [torch.bfloat16, others]
    engine = FleetEngine(fleet, name="vllm", max_model_len=8, share=lambda value: value, deadline_s=1.0)
    assert engine.weight_dtype == (torch.bfloat16 if others == torch.bfloat16 else None)


class Unreachable:
    """A rollout worker to which no broadcast finds its way, and which says so at once."""

    def __init__(self, reachable: bool) -> None:
        self.reachable, self.version, self.calls = reachable, 0, []

    def ping(self) -> float:
        return 0.0

    def run(self) -> int:
        return self.version

    def weight_member(self) -> str:
        return "one"

    def receive_weights(self, rendezvous: Any, layout: Any, version: int) -> None:
        self.calls.append(("receive", version))
        self.version = version if self.reachable else self.version

    def update_weights(self, pack: WeightPack, version: int) -> int:
        self.calls.append(("update", version, dict(pack.tensors())["w"].item()))
        self.version = version
        return version

    def served(self) -> tuple[int, str | None]:
        return self.version, None if self.reachable else "no route"

    def told(self) -> list[tuple[Any, ...]]:
        return self.calls


def unreachable(reachable: bool) -> Unreachable:
    return Unreachable(reachable)


class Learner:
    """Its weight is its version; it sends nothing."""

    copies = 0

    def weight_layout(self, dtype: Any) -> WeightLayout:
        return WeightLayout.of({"w": torch.zeros(())})

    def send_weights(self, rendezvous: Any, version: int, dtype: Any) -> str | None:
        self.kept = WeightPack.of([("w", torch.tensor(float(version)))]), version
        return None

    def kept_weights(self) -> tuple[WeightPack, int]:
        self.copies += 1
        return self.kept


def start(reachable: bool) -> tuple[Fleet, WeightTransfer, Learner]:
    spec = WorkerSpec("tests.unit.test_weight_transfer:unreachable", {"reachable": reachable})
    fleet = Fleet("rollout", starter(ThreadLauncher(), "rollout", spec), 1, capacity=1)
    fleet.wait_ready()
    learner = Learner()
    share = lambda value: value  # noqa: E731
    return fleet, WeightTransfer(fleet, learner, share=share, backend="gloo", deadline_s=30.0), learner


def test_where_no_broadcast_gets_through_the_object_store_is_used_and_after_three_times_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet, transfer, _ = start(reachable=False)
    for version in (1, 2, 3, 4):
        assert transfer.push(version) == [version]
    tried = [call for version in (1, 2, 3) for call in (("receive", version), ("update", version, version))]
    assert fleet.broadcast("told", deadline_s=30) == [[*tried, ("update", 4, 4)]]
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 3
    assert all("no route" in sentence for sentence in warned)
    assert "and so do all later ones" in warned[2]
    fleet.close()
    transfer.close()


def test_an_invitation_names_all_members_and_is_shared_once_while_they_are_the_same() -> None:
    fleet, share = Mock(), Mock(side_effect=lambda value: (value,))
    fleet.broadcast.return_value = ["b", "a"]
    transfer = WeightTransfer(fleet, Learner(), share=share, backend="gloo", deadline_s=30.0)
    rendezvous = transfer._gather(3)
    assert rendezvous is not None
    assert rendezvous.members == ("a", "b")
    layout = Learner().weight_layout(None)
    assert fleet.broadcast.call_args.args == ("receive_weights", (rendezvous,), (layout,), 3)
    assert transfer._gather(4) is rendezvous
    assert fleet.broadcast.call_args.args == ("receive_weights", (rendezvous,), (layout,), 4)
    assert share.call_count == 2
    fleet.broadcast.return_value = ["c", "a"]
    changed = transfer._gather(5)
    assert fleet.broadcast.call_args.args == ("receive_weights", (changed,), (layout,), 5)
    assert changed.members == ("a", "c")
    transfer.close()


def test_a_copy_is_made_when_a_successor_starts_and_not_before() -> None:
    fleet, transfer, learner = start(reachable=True)
    for version in (1, 2):
        assert transfer.push(version) == [version]
    assert learner.copies == 0
    fleet._slots[0].worker.kill()
    assert fleet.submit().result(30) == 2
    assert fleet.broadcast("told", deadline_s=30) == [[("update", 2, 2)]]
    assert learner.copies == 1
    fleet.close()
    transfer.close()


def test_arguments_on_demand_are_made_once_and_again_only_after_a_failure() -> None:
    tries = []

    def make() -> tuple[int]:
        tries.append(0)
        if len(tries) == 1:
            raise OSError("not yet")
        return (len(tries),)

    arguments = OnDemand(make)
    with pytest.raises(OSError, match="not yet"):
        arguments.made().result(30)
    assert [arguments.made().result(30) for _ in range(3)] == [(2,)] * 3


def test_a_copy_that_is_late_does_not_replace_newer_weights() -> None:
    fleet, transfer, _ = start(reachable=True)
    asked, go = threading.Event(), threading.Event()

    def old() -> tuple[WeightPack, int]:
        asked.set()
        assert go.wait(30)
        return WeightPack.of([("w", torch.tensor(1.0))]), 1

    fleet.keep("update_weights", OnDemand(old))
    fleet._slots[0].worker.kill()
    first_task = fleet.submit()
    assert asked.wait(30)
    fleet.keep("update_weights", OnDemand(lambda: (WeightPack.of([("w", torch.tensor(2.0))]), 2)))
    go.set()
    assert first_task.result(30) == 2
    assert fleet.broadcast("told", deadline_s=30) == [[("update", 2, 2)]]
    fleet.close()
    transfer.close()
