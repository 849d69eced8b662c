"""What this machine and this program take per group, per worker and per byte: the constants of benchmarks.fleet_scale.

With whatever runs beside it, the garbage collector set as a run sets it. Calls and bytes: best of three repetitions,
ten of Ray's store; main thread and dispatcher: means of six steps; the checkpoint and the fleet's tasks: once. Costs of
the driver are CPU seconds of all its threads, as if each held the one interpreter lock (Ray's own do not, so they are
overcounted); rates of bytes are wall time.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scale import make_env, tune_gc
from benchmarks.simulation import Scenario, Simulation
from sota_grpo.functional.flops import ModelShape
from sota_grpo.policy.tensor_files import Piece, write_tensors
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.planner import LearnerSettings, Planner
from sota_grpo.rl.records import GroupOutput, GroupRequest, Sample, Sampling
from sota_grpo.training.remote_learner import RemoteLearner
from sota_grpo.workers.base import WorkerSpec
from sota_grpo.workers.fleet import Fleet
from sota_grpo.workers.ray_cluster import RayLauncher
from sota_grpo.workers.rollout import FleetEngine  # noqa: F401 (registers the pickle of groups)

GROUP = 8  # samples
_RANKS = 8  # that rows are sent to where it is measured
_BYTES = 256 << 20
_PROMPT = 512


@dataclass(frozen=True)
class Measured:
    """Constants; seconds are CPU seconds of the driver's process, per group of :data:`GROUP` responses or per call.

    Args:
        main_s: of the main thread per group: taking the batch, its transforms, admission.
        dispatcher_s: of the dispatcher per group: rows, grades, buffer.
        task_s: of the fleet's supervisor per group, workers answer at once.
        ray_s: per group: one call of a Ray actor with a request, whose answer is a group.
        rows_s: per group: the plan of a training step, its rows packed and pickled for 8 ranks.
        save_s: per finished group that waits when a checkpoint is written.
        call_s: per worker of a call to all: one call of a Ray actor that answers a pair of numbers. What the fleet adds
            is not in it (``python -m benchmarks.fleet_scale fleet``).
        in_flight_bytes, finished_bytes, saved_bytes: per group, in memory and in a checkpoint.
        wire_bytes: per group, from the worker to the driver.
        rows_bytes: per group, from the driver to the ranks.
        pack_bytes_per_s, put_bytes_per_s: of weights packed; into pages of Ray's object store that were used before.
        shard_bytes_per_s: of a rank's file, with its SHA-256, into the page cache.
    """

    main_s: float
    dispatcher_s: float
    task_s: float
    ray_s: float
    rows_s: float
    save_s: float
    call_s: float
    in_flight_bytes: float
    finished_bytes: float
    saved_bytes: float
    wire_bytes: float
    rows_bytes: float
    pack_bytes_per_s: float
    put_bytes_per_s: float
    shard_bytes_per_s: float

    def described(self) -> list[tuple[str, str]]:
        """Each constant with its unit, for people."""
        rows = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("per_s"):
                rows.append((field.name.removesuffix("_bytes_per_s"), f"{value / 1e9:.2f} GB/s"))
            elif field.name.endswith("bytes"):
                rows.append((field.name.removesuffix("_bytes"), f"{value / 1024:.3g} KiB"))
            else:
                rows.append((field.name.removesuffix("_s"), f"{1e3 * value:.3g} ms"))
        return rows


def measure(tokens: int, *, groups: int = 192, workers: int = 200) -> Measured:
    """All constants, at ``tokens`` per response on average.

    Args:
        groups: that are sampled, graded and trained on where costs per group are measured.
        workers: of the fleet whose supervisor is measured.
    """
    tune_gc()
    with_ray = _ray_costs(tokens)
    memory = _group_memory(tokens, groups)
    _, task_s, _ = fleet_costs(workers)
    return Measured(**_group_costs(tokens, groups), **memory, task_s=task_s, **with_ray, **_byte_rates())


def best(work: Callable[[], object], times: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
    """Least seconds of some runs."""
    measured = []
    for _ in range(times):
        began = clock()
        work()
        measured.append(clock() - began)
    return min(measured)


def make_group(tokens: int, group_id: int = 0) -> GroupOutput:
    """A group as a worker sends it, all responses of one length."""
    ids, log_probs = torch.arange(tokens) % 100, torch.full((tokens,), -1.0)
    return GroupOutput(
        group_id, tuple(Sample(ids, log_probs, torch.zeros(tokens, dtype=torch.int64), False) for _ in range(GROUP))
    )


class Recorder:
    """A rank of a learner that pickles what it is sent, as every transport does, and computes nothing."""

    name = "rank"

    def __init__(self, planner: Planner) -> None:
        self.planner, self.sent = planner, 0

    def call(self, method: str, *args: Any) -> Future[Any]:
        buffers: list[pickle.PickleBuffer] = []
        body = pickle.dumps(args, protocol=5, buffer_callback=buffers.append)
        self.sent += len(body) + sum(buffer.raw().nbytes for buffer in buffers)
        answer: Future[Any] = Future()
        answer.set_result(self.planner if method == "run_method" else {})
        return answer

    def kill(self) -> None:
        pass


def _group_costs(tokens: int, groups: int) -> dict[str, float]:
    """Of the real source, and of its batch on its way to the ranks."""
    scenario = Scenario(
        num_workers=groups // 8,
        groups_per_worker=8,
        num_groups=groups // 4,
        max_policy_age=3,
        response_tokens=float(tokens),
        num_steps=8,
    )
    simulation = Simulation(make_env(GROUP), scenario)
    outcome = simulation.run()
    while not simulation.collector.is_ready():
        simulation._happen()
    batch = simulation.collector.next_batch()
    count = scenario.num_groups
    settings = LearnerSettings(lr=1e-6, total_steps=1, optim_batch_size=count * GROUP)
    ranks = [Recorder(Planner(settings, 0, _RANKS, True, True, False, ModelShape(10**9, 0, 4096, 10**8)))] * _RANKS
    learner = RemoteLearner(ranks, settings)
    learner.update(batch)
    ranks[0].sent = 0
    seconds = best(lambda: learner.update(batch), clock=time.process_time)
    return {
        "main_s": outcome.main_s / count,
        "dispatcher_s": outcome.dispatcher_s / count,
        "rows_s": seconds / count,
        "rows_bytes": ranks[0].sent / 3 / count,
        "wire_bytes": len(pickle.dumps(make_group(tokens), protocol=5)),
    }


def _group_memory(tokens: int, groups: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale", "memory-case", "--groups", str(groups), "--size", str(GROUP)]
    line = subprocess.run([*command, "--tokens", str(tokens)], capture_output=True, text=True, check=True).stdout
    in_flight, finished, saved, save_ms = map(float, line.split())
    kib = {"in_flight_bytes": in_flight, "finished_bytes": finished, "saved_bytes": saved}
    return {name: 1024 * value for name, value in kib.items()} | {"save_s": save_ms / 1000}


class Instant:
    """A worker that answers at once."""

    def __init__(self, name: str) -> None:
        self.name = name

    def call(self, method: str, *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result(0.0 if method == "ping" else None)
        return answer

    def kill(self) -> None:
        pass


def _wait_ready(fleet: Fleet) -> None:
    fleet.wait_ready()
    time.sleep(0.1)  # the threads that started its workers end


def make_fleet(workers: int, capacity: int = 4) -> Fleet:
    return Fleet("rollout", lambda index: Instant(f"rollout-{index}"), workers, capacity=capacity, silence_s=120.0)


def fleet_costs(workers: int, tasks: int = 4000) -> tuple[float, float, float]:
    """Process CPU seconds of a real fleet: of all starts, per task, per worker of a call to all."""
    began = time.process_time()
    with closing(make_fleet(workers)) as fleet:
        _wait_ready(fleet)
        started = time.process_time() - began
        began = time.process_time()
        for answer in [fleet.submit(number) for number in range(tasks)]:
            answer.result()
        task_s = (time.process_time() - began) / tasks
        calls = best(lambda: fleet.broadcast("served", deadline_s=600.0), clock=time.process_time)
    return started, task_s, calls / workers


class _Stub:
    """What the Ray actor runs: a worker whose groups are made beforehand."""

    def __init__(self, tokens: int) -> None:
        self.group = make_group(tokens)

    def run(self, request: GroupRequest, sampling: Sampling) -> GroupOutput:
        return self.group

    def served(self) -> tuple[int, None]:
        return 0, None


def stub_worker(tokens: int) -> _Stub:
    return _Stub(tokens)


def _ray_costs(tokens: int, calls: int = 300) -> dict[str, float]:
    """Of a real actor behind the product's own worker: CPU time of this process, all its threads."""
    spec = WorkerSpec("benchmarks.fleet_constants:stub_worker", {"tokens": tokens})
    with closing(RayLauncher([{"CPU": 1}], object_store_bytes=1 << 30)) as launcher:
        worker = launcher.start("rollout-0", spec, bundle=0)
        request = GroupRequest(0, tuple(range(_PROMPT)), GROUP, 1), Sampling(max_tokens=tokens)

        def ask(method: str, *args: Any) -> None:
            for answer in [worker.call(method, *args) for _ in range(calls)]:
                answer.result()

        ask("run", *request)
        run_s = best(lambda: ask("run", *request), clock=time.process_time) / calls
        told_s = best(lambda: ask("served"), clock=time.process_time) / calls
        block = np.ones(_BYTES, dtype=np.uint8)
        put_s = best(lambda: launcher.share(block), times=10)  # the first touch the store's pages, ten times as slow
    return {"ray_s": run_s, "call_s": told_s, "put_bytes_per_s": _BYTES / put_s}


def _byte_rates() -> dict[str, float]:
    block = torch.ones(_BYTES, dtype=torch.uint8)
    weights = [(str(number), torch.ones(8 << 20, dtype=torch.bfloat16)) for number in range(_BYTES >> 24)]
    pack_s = best(lambda: WeightPack.of(weights))
    with tempfile.TemporaryDirectory() as folder:

        def write() -> None:
            name = f"{time.monotonic_ns()}.safetensors"
            write_tensors(Path(folder) / name, {"w": Piece.of(block, (0,))}, iter([block]))

        shard_s = best(write)
    seconds = {"pack": pack_s, "shard": shard_s}
    return {f"{name}_bytes_per_s": _BYTES / value for name, value in seconds.items()}
