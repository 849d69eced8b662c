"""Ranks and engines on one GPU in real Ray: its GPUs are logical, as it offers them on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
ROOT = Path(__file__).resolve().parents[2]

DRIVER = """
import json, sys
from pathlib import Path
import ray
from sota_grpo.assembly import cluster as module
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.devices import Placement, Plan
from sota_grpo.engines import EngineOptions

ray.init(address="local", num_gpus=5, num_cpus=8, include_dashboard=False, log_to_driver=False,
         _node_ip_address="127.0.0.1", object_store_memory=80 * 2**20)
kept = "sota_grpo.workers.ray_cluster:AddressWorker"
real = module.WorkerSpec
module.WorkerSpec = lambda factory, options=None: real(factory) if factory == kept else real("tests.worker_rigs:Echo")
config = compose("grpo_cpu", ["ray.address=auto", "device=cuda", "engine=transformers", "policy.kl_coef=0.1"])
config.inference_model.tensor_parallel_size = 2
plan = Plan("cuda", Placement((0, 1, 2, 3), (0, 1, 2, 3), (4,), True), "transformers", True, shared=True)
cluster = module.Cluster(config, plan, Path(sys.argv[1]))
start, reference = cluster.start_rollout(EngineOptions("tiny", eos_token_ids=[2])), cluster.start_reference({})
engines, ranks = [start(0), start(1)], cluster.start_ranks()
engines[0].kill()
workers = {"engine": [start(0), engines[1]], "rank": ranks, "reference": [reference(0)]}
seen = {role: [worker.call("variable", "CUDA_VISIBLE_DEVICES").result(60) for worker in those]
        for role, those in workers.items()}
print(json.dumps(seen | {"left": ray.available_resources().get("GPU", 0)}), flush=True)
cluster.close()
ray.shutdown()
"""


@pytest.mark.timeout(300)
@pytest.mark.slow  # of the assignment alone: tests/unit/test_assembly.py
def test_each_rank_has_a_gpu_of_its_engine_and_no_other_worker_has_it(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CUDA_VISIBLE"))}
    environment = kept | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", DRIVER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    engines = [names.split(",") for names in seen["engine"]]  # the first was replaced
    assert [len(names) for names in engines] == [2, 2]
    assert seen["rank"] == [*engines[0], *engines[1]]
    assert sorted([*seen["rank"], *seen["reference"]]) == ["0", "1", "2", "3", "4"]
    assert seen["left"] == 0
