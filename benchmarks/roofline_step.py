"""The step that :mod:`benchmarks.roofline` predicts, and the table of it."""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from benchmarks.roofline_rates import DEVICES
from benchmarks.roofline_trace import Kernel, Trace, compiled_blocks, phase, record, traced
from benchmarks.trainer import Ours
from benchmarks.trainer_work import Case, make_rows, recomputed_flops
from sota_grpo.functional import log_probs
from sota_grpo.functional.flops import step_flops
from sota_grpo.training.learner import Learner
from tests.pretended_cuda.counters import MEMORY, HostTraffic, host_traffic
from tests.pretended_cuda.layer_code import ROWS
from tests.pretended_cuda.shapes import shapes_only


def predict(
    options: dict[str, Any], device: str, *, code: dict[str, Any] | None, plain_head: bool = False, top: int = 12
) -> dict[str, Any]:
    """The figures of one step at the rates of ``device``.

    Args:
        options: fields of :class:`benchmarks.trainer_work.Case`.
        device: of :data:`~benchmarks.roofline_rates.DEVICES`.
        code: what :mod:`tests.pretended_cuda.layer_code` prints of the shape, and ``layers``; None: layers are not
            compiled.
        plain_head: the head without its kernels.
        top: how many kernels are named.
    """
    case, rates = Case(device="cuda", **options), DEVICES[device]
    with mock.patch.object(log_probs, "_takes_kernels", log_probs._takes_kernels if not plain_head else _never):
        trace, traffic, ours = trace_step(case, code)
    kernels = trace.kernels
    parts: defaultdict[tuple[str, str], list[Kernel]] = defaultdict(list)
    names: defaultdict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        kind = f"{kernel.kind} {kernel.rate}".strip() if kernel.kind == "product" else kernel.kind
        parts[kernel.phase, kind].append(kernel)
        names[kernel.phase, kernel.name].append(kernel)

    def figures(of: list[Kernel]) -> dict[str, float]:
        return {
            "kernels": len(of),
            "gb": sum(kernel.bytes for kernel in of) / 1e9,
            "tflop": sum(kernel.flops for kernel in of) / 1e12,
            "ms": 1e3 * sum(kernel.seconds(rates) for kernel in of),
        }

    total_s = sum(kernel.seconds(rates) for kernel in kernels)
    useful = step_flops(ours.learner.shape, ours.load)
    slowest = sorted(names.items(), key=lambda item: -sum(kernel.seconds(rates) for kernel in item[1]))[:top]
    again = recomputed_flops(ours.learner.shape, ours.load, checkpointing=case.checkpointing)
    return {
        "case": options | {"device": device, "compiled": code is not None, "plain_head": plain_head},
        "packed_tokens": ours.load.positions,
        "parts": [{"phase": where, "kind": kind, **figures(of)} for (where, kind), of in parts.items()],
        "slowest": [{"phase": where, "name": name, **figures(of)} for (where, name), of in slowest],
        "total": figures(kernels),
        "mfu": useful / total_s / rates.peak,
        "packed_tokens_per_s": ours.load.positions / total_s,
        "useful_tflop": useful / 1e12,
        "recomputed_tflop": again / 1e12,
        "peak_gib": MEMORY.peak / 2**30,
        "host_waits": traffic.waits.total(),
        "unpinned_copies": traffic.copies.total(),
    }


def _never(*unused: Any) -> bool:
    return False


def trace_step(case: Case, code: dict[str, Any] | None = None) -> tuple[Trace, HostTraffic, Ours]:
    """The second step: the first one makes the optimizer's state."""
    with _kernels_recorded(), shapes_only(), tempfile.TemporaryDirectory() as folder:
        ours = Ours(case, make_rows(case), Path(folder))
        if not ours.learner.policy.shared_prompt:
            raise RuntimeError("the policy does not take packed rows")
        inductor = compiled_blocks(code, code["layers"], ROWS) if code else nullcontext()
        with _phases(), inductor:
            ours.step()
            torch.cuda.reset_peak_memory_stats()
            with traced() as trace, host_traffic() as traffic:
                ours.step()
    return trace, traffic, ours


@contextmanager
def _phases() -> Iterator[None]:
    """The head's two passes are "head", the rest of loss and backward pass "body", and what follows "optimizer"."""
    head, run, step = log_probs._TiledLogProbs, Learner._run, Learner._step

    def within(name: str, function: Any) -> Any:
        def inside(*args: Any, **options: Any) -> Any:
            with phase(name):
                return function(*args, **options)

        return inside

    with (
        mock.patch.object(head, "forward", staticmethod(within("head", head.forward))),
        mock.patch.object(head, "backward", staticmethod(within("head", head.backward))),
        mock.patch.object(Learner, "_run", within("body", run)),
        mock.patch.object(Learner, "_step", within("optimizer", step)),
    ):
        yield


@contextmanager
def _kernels_recorded() -> Iterator[None]:
    """Triton's kernels by what they read and write."""
    module = ModuleType("sota_grpo.functional.tile_kernels")

    def scan(
        raw: Any, index: Any, top: Any, own: Any, mass: Any, moment: Any, *, weights: Any = None, **options: Any
    ) -> None:
        state = [top, own, mass, moment]
        record("scan of a logit tile", [raw, index, *state], [weights, *state])

    def pull(raw: Any, index: Any, top: Any, by_p: Any, by_zp: Any, at_target: Any, grad: Any, **options: Any) -> None:
        record("gradient of a logit tile", [raw, index, top, by_p, by_zp, at_target], [grad])

    module.scan, module.pull, module.MAX_COLUMNS = scan, pull, 16384  # type: ignore[attr-defined]  # as the real one
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        yield


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    case = ", ".join(f"{name} {value}" for name, value in found["case"].items() if value)
    lines = [case, "", f"{'phase':15s} {'kernels':28s} {'count':>6s} {'GB':>8s} {'TFLOP':>8s} {'ms':>8s}"]
    total = found["total"]

    def line(where: str, name: str, of: dict[str, Any]) -> str:
        return f"{where:15s} {name:28s} {of['kernels']:6d} {of['gb']:8.1f} {of['tflop']:8.2f} {of['ms']:8.1f}"

    lines += [line(part["phase"], part["kind"], part) for part in found["parts"]]
    lines += [line("total", "", total), "", "the slowest:"]
    lines += [line(each["phase"], each["name"], each) for each in found["slowest"]]
    lines += [
        "",
        f"{found['packed_tokens_per_s']:.0f} packed tokens/s, MFU {found['mfu']:.1%} of {found['useful_tflop']:.1f} "
        f"TFLOP ({found['recomputed_tflop']:.1f} more recomputed), peak memory {found['peak_gib']:.1f} GiB, "
        f"{found['host_waits']} host waits, {found['unpinned_copies']} unpinned copies",
    ]
    return "\n".join(lines)
