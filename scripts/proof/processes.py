"""Stage 5: Ray's actors on the GPU, FSDP2 on a mesh of one."""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

import torch
import torch.distributed as dist

from scripts.proof import Finding, Options
from scripts.proof.kernels import learner_of, model, relative, rows_of
from scripts.proof.runs import command, metrics, ran
from sota_grpo.policy import sharding
from sota_grpo.policy.sharding import gather


def fsdp_of_one(options: Options) -> Iterator[Finding]:
    """Sharded over a mesh of one: the losses and gradients of the unsharded model, summed once or after each part."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = sharding.join_ranks(
            0, 1, init_method=f"file://{folder}/rendezvous", device="cuda:0" if options.device == "cuda" else "cpu"
        )
        try:
            cases = [*itertools.product((("fp32", 1e-5), ("bf16", 1e-2)), (True, False), (False, True))]
            for (precision, allowed), reduce_once, fused in cases[::3] if options.small else cases:
                gap = fsdp_gap(options, ranks.device, folder, precision, reduce_once=reduce_once, fused=fused)
                name = f"FSDP2 of one, {precision}, reduce_once={reduce_once}{', compiled' if fused else ''}"
                yield Finding(name, gap <= allowed, {"gap": gap})
        finally:
            dist.destroy_process_group()


def fsdp_gap(
    options: Options, device: torch.device, folder: str, precision: str, *, reduce_once: bool, fused: bool
) -> float:
    """Relative distance of the sharded model's gradient from that of the same model, whole and computed alike."""
    net, rows, budget = model(options, "qwen3", tied=True).to(device), rows_of(options), 100 if options.small else 600
    expected = learner_of(copy.deepcopy(net), precision, folder, fused=fused).gradient(rows, token_budget=budget)
    ranks = sharding.Ranks(0, 1, device, reduce_once)
    own = learner_of(net, precision, folder, ranks=ranks, fused=fused)
    measured = own.gradient(rows, token_budget=budget)
    flat = (
        torch.cat([gather(each[name]).double().cpu().flatten() for name in expected]) for each in (measured, expected)
    )
    return relative(*flat)


def ray_on_one_gpu(options: Options) -> Iterator[Finding]:
    """Collection and training at the same time, in actors that share the GPU; Ray sees it."""
    if find_spec("ray") is None:
        yield Finding("Ray", None, {"skipped": "Ray is not installed"})
        return
    folder = options.out / "async"
    line = command(options, folder, steps=None if options.small else 8)
    line[1] = line[1].replace("grpo.py", "grpo-async.py")
    measured = ran(line)
    yield Finding("grpo-async.py", measured["exit"] == 0, measured | {"steps": len(metrics(folder))})


CHECKS = [fsdp_of_one, ray_on_one_gpu]
