"""FSDP2 on the device: a mesh of one rank computes, reduces, saves and loads what the whole policy does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from sota_grpo.policy import sharding
from sota_grpo.policy.causal import CausalPolicy, kernel_difference
from sota_grpo.policy.sharding import Ranks
from tests.pretended_cuda.kernels import STAND_INS
from tests.pretended_cuda.on_device.test_learner import CUDA, FULL, build, rows
from tests.pretended_cuda.tensor import PretendedTensor
from tests.unit.tiny_models import make_model


@pytest.fixture(scope="module", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """One rank, joined as ranks on GPUs join."""
    rendezvous = f"file://{tmp_path_factory.mktemp('ranks')}/rendezvous"
    yield sharding.join_ranks(0, 1, init_method=rendezvous, device="cuda", timeout_s=60)
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [False, True])
def test_a_mesh_of_one_is_the_whole(lora: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: gathering one part and summing one gradient change nothing; nor do saving and loading."""
    case = {**FULL, "precision": "bf16", "checkpointing": True, "lora": lora}
    whole = build(tmp_path, "cuda", **case)
    original = CausalPolicy.__init__

    def sharded(policy: CausalPolicy, *args: object, **options: object) -> None:
        original(policy, *args, **options)
        sharding.shard(policy, Ranks(0, 2, CUDA))  # of a size that is sharded, over a mesh of one

    monkeypatch.setattr(sharding, "init_device_mesh", lambda kind, _, **names: init_device_mesh(kind, (1,), **names))
    monkeypatch.setattr(CausalPolicy, "__init__", sharded)
    part, other = (build(tmp_path, "cuda", **case) for _ in range(2))
    assert all(isinstance(value, DTensor) for value in part.parameters)
    assert isinstance(part.parameters[0].to_local(), PretendedTensor)
    for step in range(2):
        actual, expected = (learner.update(rows(9 + step)) for learner in (part, whole))
        for name in ("grad_norm", "loss/objective", "loss/kl", "entropy", "kl"):
            assert actual[name] == expected[name], name
    state = part.state_dict()
    assert all(value.device.type == "cpu" for value in state["model"].values())
    other.load_state_dict(state)
    assert other.update(rows())["grad_norm"] == whole.update(rows())["grad_norm"]


def test_the_kernel_is_probed_where_the_ranks_compute() -> None:
    """A model that lies on the CPU packs there by another kernel."""
    assert kernel_difference(make_model("qwen2", head_dim=8), CUDA) is None


def test_a_kernel_that_is_not_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: object) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(STAND_INS, "sota_grpo::packed_attention", missing)
    assert "no kernel image" in str(kernel_difference(make_model("qwen2", head_dim=8), CUDA))
