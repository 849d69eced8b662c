"""Stage 5: Ray's actors on the GPU, NCCL with one member, FSDP2 on a mesh of one."""

from __future__ import annotations

import copy
import socket
import tempfile
import uuid
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from scripts.gpu_proof import Finding, Options
from scripts.proof.kernels import learner_of, model, relative, rows_of
from scripts.proof.runs import command, metrics, ran
from sota_grpo.policy import sharding
from sota_grpo.policy.shards import gathered
from sota_grpo.workers.weight_group import Meeting, WeightGroup


def fsdp_of_one(options: Options) -> Iterator[Finding]:
    """Sharded over a mesh of one: the losses and gradients of the unsharded model, summed once or after each part."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = sharding.join_ranks(
            0, 1, init_method=f"file://{folder}/meeting", device="cuda:0" if options.device == "cuda" else "cpu"
        )
        try:
            for precision, allowed in (("fp32", 1e-5), ("bf16", 1e-2)):
                net = model(options, "qwen3", tied=True).to(options.device)
                rows = rows_of(options)
                alone = learner_of(copy.deepcopy(net), precision, folder)
                expected = alone.gradient(rows, token_budget=100 if options.small else 600)
                for reduce_once in (True, False):
                    own = learner_of(copy.deepcopy(net), precision, folder)
                    one = sharding.Ranks(0, 1, ranks.device, reduce_once)
                    sharding.shard_over(own.policy, one)
                    own = learner_of_sharded(own, one)
                    found = own.gradient(rows, token_budget=100 if options.small else 600)
                    flat = [
                        torch.cat([gathered(each[name]).double().cpu().flatten() for name in expected])
                        for each in (found, expected)
                    ]
                    gap = relative(*flat)
                    yield Finding(f"FSDP2 of one, {precision}, reduce_once={reduce_once}", gap <= allowed, {"gap": gap})
        finally:
            dist.destroy_process_group()


def learner_of_sharded(whole, ranks):  # type: ignore[no-untyped-def]
    """The same learner over the sharded policy."""
    from sota_grpo.learner import Learner

    return Learner(
        whole.policy, whole.loss, whole.settings, pad_token_id=whole.pad_token_id, dump_dir=Path(whole.dump_dir),
        ranks=ranks,
    )  # fmt: skip


def nccl_of_one(options: Options) -> Iterator[Finding]:
    """The group that carries weights, with the learner alone in it: made, used within its limit, left."""
    if options.device != "cuda":
        return
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )  # fmt: skip
    backend = "gloo" if "Pretended" in torch.cuda.get_device_name() else "nccl"
    meeting = Meeting("127.0.0.1", port, uuid.uuid4().hex, (), backend, 30.0, 1 << 20)
    group = WeightGroup(meeting, 0, torch.device("cuda", 0))
    flat = torch.arange(1 << 16, dtype=torch.uint8, device="cuda" if backend == "nccl" else "cpu")
    before = flat.clone()
    for _ in range(3):
        group.broadcast(flat)
    group.close()
    del store
    yield Finding(f"a weight group of one by {backend}", bool(torch.equal(flat, before)), {})


def ray_on_one_gpu(options: Options) -> Iterator[Finding]:
    """Collection and training at the same time, in actors that share the GPU; Ray sees it."""
    if find_spec("ray") is None:
        yield Finding("Ray", None, {"skipped": "Ray is not installed"})
        return
    folder = options.out / "async"
    given = command(options, folder, turns=None if options.small else 8)
    given[1] = given[1].replace("grpo.py", "grpo-async.py")
    found = ran(given)
    yield Finding("grpo-async.py", found["exit"] == 0, found | {"turns": len(metrics(folder))})


CHECKS = [nccl_of_one, fsdp_of_one, ray_on_one_gpu]
