"""Stage 4: peaks against the estimate, what sleeping gives back, packing of weights, and gaps between micro-batches."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import CONFIG_MAPPING

from benchmarks.trainer import Ours, device_work
from benchmarks.trainer_work import SHAPES, Case, make_rows
from scripts.proof import Finding, Options
from scripts.proof.kernels import synchronised
from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.estimate import GIB, ByteCounts, Estimate, Learning, Machine, MicroBatch, learner_memory
from sota_grpo.functional.log_probs import max_saved_bytes
from sota_grpo.policy.load import architecture_from
from sota_grpo.policy.lora import engine_weights
from sota_grpo.policy.weight_pack import WeightPack


def case_of(options: Options, shape: str, **how: Any) -> Case:
    if options.small:
        how |= {"tokens": 600, "prompt": 40, "response": 30}
    precision = "bf16" if options.device == "cuda" else "fp32"
    return Case(shape="tiny" if options.small else shape, device=options.device, precision=precision, **how)


def predicted_learner(case: Case) -> ByteCounts:
    """What ``estimate`` says of the learner of this case: one micro-batch, every row of full length."""
    family, sizes = SHAPES[case.shape]
    rows = make_rows(case)
    longest = case.prompt + case.response
    prompts, num_sampled = case.prompt * len({int(row["group_id"]) for row in rows}), case.response * len(rows)
    batch = MicroBatch(prompts + num_sampled, num_sampled, len(rows) * longest)
    half = case.precision != "fp32"
    on_cpu = case.device == "cpu"
    kept = 0 if on_cpu else max_saved_bytes(torch.device(case.device))
    how = Learning(
        product_bytes=2 if half else 4,
        checkpointing=case.checkpointing,
        on_cpu=on_cpu,
        compiled=not on_cpu,
        saved_bytes=kept,
    )
    return learner_memory(architecture_from(CONFIG_MAPPING[family](**sizes)), how, [batch])


def peak_of_an_update(options: Options) -> Iterator[Finding]:
    """Most bytes allocated by the second step, against the estimate: within 15 %."""
    cases = [
        case_of(options, "qwen3-0.6b", tokens=8192),
        case_of(options, "qwen2.5-1.5b", tokens=16384, checkpointing=True),
    ]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            ours = Ours(case, make_rows(case), Path(folder))
            ours.step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            ours.step()
            measured, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
            torch.cuda.empty_cache()
            after = torch.cuda.memory_reserved()
            predicted = sum(predicted_learner(case).values())
            ratio = predicted / measured
            figures = {
                "measured_gib": measured / GIB, "predicted_gib": predicted / GIB, "ratio": ratio,
                "reserved_gib": reserved / GIB, "reserved_after_empty_cache_gib": after / GIB,
            }  # fmt: skip
            yield Finding(
                f"peak of an update, {case.shape}{', checkpointing' * case.checkpointing}",
                options.small or 0.85 <= ratio <= 1.15,
                figures,
            )
            yield from _gate(options, ours, case)
        del ours
        gc.collect()  # a compiled model is a cycle
        torch.cuda.empty_cache()


def _gate(options: Options, ours: Ours, case: Case) -> Iterator[Finding]:
    """Most bytes that the gate's comparison of two gradients takes, in weights of the model."""
    weights = sum(parameter.numel() * parameter.element_size() for parameter in ours.learner.parameters)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    norm, gap, _ = ours.learner.gradient_gap(make_rows(case)[:2], (10**6, 1))
    peak = torch.cuda.max_memory_allocated()
    figures = {"peak_gib": peak / GIB, "of_weights": (peak - before) / weights, "norm": norm, "gap": gap}
    yield Finding(f"peak of the gate, {case.shape}", None if options.small else gap < 0.05, figures)


def weights_for_engines(options: Options) -> Iterator[Finding]:
    """Seconds and bytes to make a push of all weights, in float32 and in the engine's dtype."""
    case = case_of(options, "qwen2.5-1.5b")
    with tempfile.TemporaryDirectory() as folder:
        model = Ours(case, make_rows(case), Path(folder)).learner.policy.model
        for dtype in (torch.float32, torch.bfloat16):
            times = []
            for _ in range(3):
                began = synchronised(options)
                pack = WeightPack.of((name, weight.to(dtype)) for name, weight in engine_weights(model))
                times.append(synchronised(options) - began)
            yield Finding(
                f"weights packed as {dtype}", None, {"seconds": times, "gib": pack.buffers[0][0].nbytes / GIB}
            )


def gaps_between_micro_batches(options: Options) -> Iterator[Finding]:
    """Share of a step of several micro-batches in which the GPU has nothing to do, from the profiler's trace."""
    case = case_of(options, "qwen3-0.6b", tokens=32768, micro_tokens=8192)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(case, make_rows(case), Path(folder))
        for _ in range(2):
            ours.step()
        figures = device_work(ours) if options.device == "cuda" else {"launches": 0}
    good = figures["idle"] < 0.1 if figures["launches"] else options.small
    yield Finding("idle time of the GPU in a step", good, figures)


def whole_runs_fit(options: Options) -> Iterator[Finding]:
    """What the estimate says of the presets on this device."""
    family, sizes = SHAPES["qwen2.5-1.5b"]
    total = torch.cuda.get_device_properties(0).total_memory
    model, machine = architecture_from(CONFIG_MAPPING[family](**sizes)), Machine("cuda", total, 0, 1)
    for device in Estimate(compose("grpo_gsm8k", ["device=cuda"]), model, 512, machine).devices:
        moments = {name: sum(parts.values()) / GIB for name, parts in device.moments.items()}
        yield Finding(f"estimate of the default run, {device.name}", max(moments.values()) < total / GIB, moments)


CHECKS = [peak_of_an_update, gaps_between_micro_batches, weights_for_engines, whole_runs_fit]
