"""Containers give 64 MB of shared memory; what does not fit goes over the disk, and a run says so."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sota_grpo.policy import weight_pack
from sota_grpo.policy.weight_pack import WeightFolder
from sota_grpo.workers import ray_cluster


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path) -> SimpleNamespace:
    """Pretend that shared memory has so much room."""
    actual = SimpleNamespace(free=64 << 20)
    for module in (ray_cluster, weight_pack):
        monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: actual)
    return actual


def test_rays_store_on_the_disk_is_reported(
    free_bytes: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_require_cluster", lambda address: None)
    ray = Mock(**{"cluster_resources.return_value": {"object_store_memory": 7.1 * 2**30}})
    ray_cluster._connect(ray, None, 1, None)
    assert "has 0.06 GiB free, but Ray's object store takes 7.1 GiB" in caplog.text
    assert "--shm-size=8g" in caplog.text
    caplog.clear()
    free_bytes.free = 8 << 30
    ray_cluster._connect(ray, None, 1, None)
    ray_cluster._connect(ray, "auto", 1, None)
    assert not caplog.records


def test_server_weights_on_the_disk_are_reported(free_bytes: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    shapes = {"w": torch.Size([1 << 14, 1 << 14])}
    WeightFolder(shapes, torch.bfloat16).close()
    assert "has 0.06 GiB free and a push of weights takes 0.50 GiB" in caplog.text
    caplog.clear()
    free_bytes.free = 1 << 30
    WeightFolder(shapes, torch.bfloat16).close()
    assert not caplog.records


@pytest.mark.parametrize("length", [30, 60])
def test_paths_of_sockets_are_short(length: int, free_bytes: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system's TMPDIR may be long, and the path of a Unix socket has 107 bytes at most."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * (length - 1))
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix, dir: f"{dir}/{prefix}12345678")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    ray = Mock(**{"cluster_resources.return_value": {}})
    ray_cluster._connect(ray, None, 1, 1)
    rays, servers = ray.init.call_args.kwargs["_temp_dir"], WeightFolder({"w": torch.Size([9999, 9999])}, None).path
    assert len(f"{rays}/session_2026-11-26_14-32-10_123456_4194304/sockets/plasma_store") <= 107
    assert len(f"{servers}/01234567-89ab-cdef-0123-456789abcdef") <= 107
    folder = tempfile.tempdir if length == 30 else "/tmp"
    assert (rays, servers.parent) == (f"{folder}/ray", Path(folder))
