"""Bytes that cross the link to another node when weights are published to workers there: run on the head of two nodes.

``python -m tests.link_bytes ADDRESS`` prints them as JSON, by way, in multiples of the weights, in both directions.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.workers.base import WorkerSpec, starter
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.ray_cluster import RayLauncher

WORKERS = 3
NUMBERS = 4 << 20  # 16 MiB: what Ray itself says on the link is little beside it


class Holder:
    """A rollout worker without an engine: it keeps what it is sent."""

    def __init__(self) -> None:
        self._weights = WeightPack.of([])

    def ping(self) -> float:
        return 0.0

    def update_weights(self, pack: WeightPack, version: int) -> int:
        self._weights = WeightPack.of(pack.tensors())
        return version

    def weights(self) -> WeightPack:
        return self._weights

    def digest(self) -> str:
        return hashlib.sha256(self._weights.buffers[0][0]).hexdigest()


def crossed_bytes() -> int:
    """In and out, by every interface of this network namespace but loopback."""
    lines = [line.split(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(numbers.split()[column]) for name, numbers in lines if name.strip() != "lo" for column in (0, 8))


def main(address: str) -> None:
    launcher = RayLauncher([{"CPU": 1}] * WORKERS, address=address, strategy="STRICT_PACK")
    placements: list[dict[str, Any]] = [{"bundle": index} for index in range(WORKERS)]
    start = starter(launcher, "rollout", WorkerSpec("tests.link_bytes:Holder"), placements)
    fleet = Fleet("rollout", start, WORKERS, capacity=1)
    fleet.wait_ready()

    def by_object_store(pack: WeightPack, version: int) -> list[int]:
        return [*fleet.broadcast("update_weights", launcher.share(pack), version, deadline_s=120.0).values()]

    def weights_from_there() -> WeightPack:
        """As of a learner that lives on the other node."""
        worker = fleet._slots[0].worker
        assert worker is not None
        return worker.call("weights").result(60)

    ways: dict[str, Callable[[int], list[int]]] = {
        "object_store": lambda version: by_object_store(WeightPack.of([("w", torch.rand(NUMBERS))]), version),
        "object_store_from_there": lambda version: by_object_store(weights_from_there(), version),
    }
    crossed = {}
    for version, (name, publish) in enumerate(ways.items(), 1):
        before = crossed_bytes()
        assert publish(version) == [version] * WORKERS
        crossed[name] = (crossed_bytes() - before) / (4 * NUMBERS)
        assert len(set(fleet.broadcast("digest", deadline_s=60).values())) == 1
    fleet.close()
    launcher.close()
    print(json.dumps(crossed))


if __name__ == "__main__":
    main(sys.argv[1])
