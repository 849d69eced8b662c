"""Containers give 64 MB of shared memory; what does not fit goes over the disk, and a run says so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from sota_grpo.engines import server_engine
from sota_grpo.engines.server_engine import WeightFolder
from sota_grpo.workers import ray_cluster


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path) -> SimpleNamespace:
    """Pretend that shared memory has so much room."""
    found = SimpleNamespace(free=64 << 20)
    for module in (ray_cluster, server_engine):
        monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: found)
    return found


def test_rays_store_on_the_disk_is_told(free_bytes: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    ray = Mock()
    ray.cluster_resources.return_value = {"object_store_memory": 7.1 * 2**30}
    ray_cluster._connect(ray, None, 1, None)
    assert "has 0.06 GiB free and Ray's object store takes 7.1 GiB" in caplog.text
    assert "--shm-size=8g" in caplog.text
    caplog.clear()
    free_bytes.free = 8 << 30
    ray_cluster._connect(ray, None, 1, None)
    ray_cluster._connect(ray, "auto", 1, None)
    assert not caplog.records


def test_weights_for_a_server_on_the_disk_are_told(
    free_bytes: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    shapes = {"w": torch.Size([1 << 14, 1 << 14])}
    folder = WeightFolder(shapes, torch.bfloat16)
    assert "has 0.06 GiB free and a push of weights takes 0.50 GiB" in caplog.text
    folder.close()
    caplog.clear()
    free_bytes.free = 1 << 30
    WeightFolder(shapes, torch.bfloat16).close()
    assert not caplog.records
