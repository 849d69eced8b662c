"""The trainer alone, on rows of random tokens: ``python -m benchmarks.trainer --shape qwen3-0.6b --against trl``.

One step is one :meth:`sota_grpo.training.learner.Learner.update` of one optimizer step: loss, backward, clip, AdamW.
Weights are random, but layers, widths, heads, vocabulary and tied embeddings are those of the named models.
``--tokens`` counts packed tokens: every prompt once for its group, and every response. For each case one line of JSON
per system:

- ``packed_tokens_per_s``; ``row_tokens_per_s`` counts each row's prompt, as a trainer without sharing would compute it;
- ``mfu``: the operations of the system's own layout (:mod:`sota_grpo.functional.flops`), nothing counted twice, over
  time and peak rate; ``recomputed``: what ours computes again to save memory, as a share of these;
- ``times_floor``: its time over that of the operations with shared prompts at the peak rate, equal for all systems;
- ``peak_gib``: parameters, optimizer state and what a step adds at most; null without a GPU.

The peak rate is the device's dense bfloat16 rate by name, or with ``--measure-peak``, and on a CPU always, the rate of
large matrix products measured now. Systems take turns, and medians are reported.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from tensordict import TensorDict, lazy_stack

from benchmarks.trainer_work import (
    PAD,
    SHAPES,
    Case,
    kept_tensors,
    make_model,
    make_rows,
    recomputed_flops,
    shared_loads,
)
from sota_grpo import keys
from sota_grpo.functional.flops import Load, ModelShape, step_flops
from sota_grpo.policy.causal import CausalPolicy, base_model, decoder_layers, fuse_layers
from sota_grpo.policy.decoder_layer import compile_options
from sota_grpo.rl.objectives import GRPOLoss
from sota_grpo.rl.planner import LearnerSettings
from sota_grpo.rl.table import RowTable
from sota_grpo.training.learner import Learner

# dense bfloat16, operations per second, by part of the device's name; the longest that fits counts
PEAKS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}


class System(Protocol):
    """A trainer that takes optimizer steps on one batch."""

    name: str
    load: Load

    def step(self) -> float:
        """One optimizer step; the norm of its gradient before clipping."""
        ...

    def tensors(self) -> Sequence[torch.Tensor]:
        """What it keeps between steps."""
        ...


class Ours:
    """The learner of this package, as a run builds it."""

    def __init__(self, case: Case, rows: list[TensorDict], folder: Path, *, layers: str = "joined"):
        self.name = "ours" if layers == "joined" else f"ours, {layers} layers"
        policy = CausalPolicy(make_model(case))
        if case.device == "cuda" and layers == "joined":
            fuse_layers(base_model(policy.model))
        elif case.device == "cuda" and layers != "eager":
            for layer in decoder_layers(base_model(policy.model)):
                layer.compile(**compile_options())
        loss = GRPOLoss(policy, entropy_bonus=False)
        settings = LearnerSettings(
            lr=1e-6,
            total_steps=1_000_000,
            optim_batch_size=len(rows),
            micro_batch_tokens=case.micro_tokens or case.tokens,
            precision=case.precision,
        )
        self.learner = Learner(policy, loss, settings, pad_token_id=PAD, dump_dir=folder)
        self.rows = RowTable.of(lazy_stack(rows))  # what a source gives
        self.load = shared_loads(rows)

    def step(self) -> float:
        metrics = self.learner.update(self.rows)
        assert metrics["grad_norm"] is not None
        return metrics["grad_norm"]

    def tensors(self) -> Sequence[torch.Tensor]:
        return kept_tensors(self.learner.policy, self.learner.optimizer)


def measured_peak(device: str, dtype: torch.dtype, size: int) -> float:
    """Operations per second of a product of two ``size`` x ``size`` matrices; the median of several."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(12):
        began = now(device)
        left @ right
        seconds.append(now(device) - began)
    return 2 * size**3 / statistics.median(seconds[2:])


def peak_rate(case: Case, measure: bool) -> float:
    """The rate against which utilisation is counted: by the device's name, or measured in the dtype of its products.

    Raises:
        SystemExit: the device is not in :data:`PEAKS`.
    """
    half = case.precision == "bf16" or case.dtype == "bfloat16"
    if measure or case.device == "cpu" or not half:
        size = 8192 if case.device == "cuda" and case.shape != "tiny" else 1024
        return measured_peak(case.device, torch.bfloat16 if half else torch.float32, size)
    name = torch.cuda.get_device_name()
    known = [part for part in PEAKS if re.search(rf"\b{part}\b", name)]
    if not known:
        raise SystemExit(f"the peak rate of {name} is not known here; give --measure-peak")
    return PEAKS[max(known, key=len)]


def now(device: str) -> float:
    """Seconds, when all work on the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def timed_step(system: System, device: str) -> tuple[float, float | None]:
    """Seconds of one step, and the peak of its memory in GiB: what it keeps, and the most that the step added."""
    began = now(device)
    if device != "cuda":
        system.step()
        return now(device) - began, None
    kept = sum(tensor.numel() * tensor.element_size() for tensor in system.tensors() if tensor.device.type == "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    system.step()
    seconds = now(device) - began
    return seconds, (kept + torch.cuda.max_memory_allocated() - before) / 2**30


def measure(
    case: Case, systems: Sequence[System], rows: Sequence[TensorDict], shape: ModelShape, peak: float, repeat: int
) -> list[dict[str, Any]]:
    """One result per system, from ``repeat`` steps in turn after one to warm up."""
    for system in systems:
        system.step()
    runs = [[timed_step(system, case.device) for system in systems] for _ in range(repeat)]
    shared = shared_loads(rows)
    again = recomputed_flops(shape, shared, checkpointing=case.checkpointing) / step_flops(shape, shared)
    row_tokens = sum(row[keys.FULL_TOKENS].shape[0] for row in rows)
    measured = []
    for system, *of in zip(systems, *runs):
        step_s, gib = statistics.median(seconds for seconds, _ in of), of[-1][1]
        flops = step_flops(shape, system.load)
        measured.append(
            {
                "who": system.name,
                "step_s": round(step_s, 5),
                "packed_tokens_per_s": round(shared.positions / step_s),
                "row_tokens_per_s": round(row_tokens / step_s),
                "mfu": round(flops / step_s / peak, 4),
                "recomputed": round(again, 4) if isinstance(system, Ours) else None,
                "times_floor": round(step_s * peak / step_flops(shape, shared), 3),
                "peak_gib": None if gib is None else round(gib, 3),
                "rows": len(rows),
                "packed_tokens": shared.positions,
                "peak_tflops": round(peak / 1e12, 3),
                "device_name": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
                "threads": torch.get_num_threads(),
                **(device_work(system) if case.device == "cuda" else {}),
                "case": asdict(case),
            }
        )
    return measured


def device_work(system: System) -> dict[str, float]:
    """Return one step's launches, the milliseconds in which a kernel runs, and the idle share between first and last.

    The trace has the device's events only: the CPU's would slow the host down.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        system.step()
        torch.cuda.synchronize()
    on_device = [event for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy = sorted((event.time_range.start, event.time_range.end) for event in on_device)
    if not busy:
        return {"launches": 0}
    idle, end = 0.0, busy[0][1]
    for start, stop in busy:
        idle, end = idle + max(0.0, start - end), max(end, stop)
    span = end - busy[0][0]
    return {"launches": len(busy), "kernels_ms": round((span - idle) / 1e3, 2), "idle": round(idle / span, 4)}


def profile(system: System, device: str) -> str:
    """The kernels that take the most time in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=activities) as measured:
        system.step()
        now(device)
    return measured.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=25, max_name_column_width=60)


def run(
    case: Case, *, against: Sequence[str] = (), measure_peak: bool, repeat: int, profiled: bool
) -> list[dict[str, Any]]:
    """Results of one case; the profile of our step goes to stderr."""
    rows = make_rows(case)
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(case, rows, Path(folder))
        systems: list[System] = [ours]
        systems += [
            Ours(case, rows, Path(folder), layers=name) for name in ("eager", "transformers") if name in against
        ]
        if "trl" in against:
            from benchmarks.trainer_trl import Trl

            systems.append(Trl(case, rows, Path(folder)))
        peak = peak_rate(case, measure_peak)
        measured = measure(case, systems, rows, ours.learner.shape, peak, repeat)
        if profiled:
            print(profile(ours, case.device), file=sys.stderr)
        del systems, ours
        gc.collect()  # a compiled model is a cycle, which would hold the device's memory
    return measured


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3-0.6b" if cuda else "tiny"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384], help="packed tokens of a step")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=1024, help="most tokens of a response")
    parser.add_argument("--group", type=int, default=8, help="responses of a prompt; 1: nothing is shared")
    parser.add_argument("--ragged", type=float, default=0.0, help="responses are up to this share shorter")
    parser.add_argument("--lora", nargs="+", type=int, default=[0], help="rank of the adapter; 0: all weights train")
    parser.add_argument("--checkpointing", action="store_true", help="keep one activation per layer")
    parser.add_argument("--micro-tokens", type=int, default=0, help="packed tokens of a micro-batch; 0: all of them")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the parameters")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16" if cuda else "fp32", help="autocast")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--against",
        nargs="+",
        choices=["trl", "eager", "transformers"],
        default=[],
        help="systems measured in turn with ours on the same rows: TRL's GRPOTrainer; on CUDA ours with transformers' "
        "layers, not compiled (eager) or compiled (transformers)",
    )
    parser.add_argument("--measure-peak", action="store_true", help="measure the peak rate instead of looking it up")
    parser.add_argument("--repeat", type=int, default=5, help="steps of each system")
    parser.add_argument("--profile", action="store_true", help="the kernels of one of our steps, to stderr")
    options = parser.parse_args(arguments)
    fields = ("prompt", "response", "group", "ragged", "checkpointing", "micro_tokens", "dtype", "precision", "device")
    common = {name: getattr(options, name) for name in fields}
    for shape, tokens, lora in itertools.product(options.shape, options.tokens, options.lora):
        results = run(
            Case(shape=shape, tokens=tokens, lora=lora, **common),
            against=options.against,
            measure_peak=options.measure_peak,
            repeat=options.repeat,
            profiled=options.profile,
        )
        for result in results:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
