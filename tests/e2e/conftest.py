"""Whole runs of ``grpo.py`` in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from sota_grpo.recording.metrics import declared
from sota_grpo.run.app import train
from tests.config.test_config import composed
from tests.forked import Done, ForkServer
from tests.process_rigs import hit, wait_for

collect_ignore = ["turns"]  # for other processes, which it watches
ROOT = Path(__file__).resolve().parents[2]
# one thread each: equal bits need equal thread counts (docs/design.md, decision 8)
# Ray is to end no worker for the memory that other tests take
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_memory_monitor_refresh_ms": "0"}
SMALL = (
    "env.num_envs=16",
    "env.repeats=4",
    "env.max_samples=256",  # every prompt is tokenized at the start
    "env.num_heldout=32",
    "train.dialog_turns_per_batch=16",
    "train.optim_batch_size=16",
    "train.total_dialog_turns=64",
    "inference_model.max_tokens=24",
    "eval.num_samples=8",
    "eval.avg_at_k=1",
    "eval.every=2",
)


def command(run_dir: Path, *overrides: str, config: str = "grpo_cpu", script: str = "grpo.py") -> list[str]:
    return [
        sys.executable,
        str(ROOT / script),
        f"--config-name={config}",
        *(flag for flag in overrides if flag.startswith("-")),
        f"hydra.run.dir={run_dir}",
        *(override for override in overrides if not override.startswith("-")),
    ]


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    opened = ForkServer(tmp_path_factory.mktemp("forked"), ENVIRONMENT)
    yield opened
    opened.close()


@pytest.fixture
def grpo(tmp_path: Path, fork_server: ForkServer) -> Callable[..., subprocess.CompletedProcess]:
    """Run ``grpo.py`` to its end; stdin is closed, so that a prompt would fail.

    Forked from a process that has imported torch, but for what vLLM takes part in: it is hidden there.
    """

    def run(
        run_dir: Path, *overrides: str, config: str = "grpo_cpu", script: str = "grpo.py", **kwargs
    ) -> subprocess.CompletedProcess:
        arguments = command(run_dir, *overrides, config=config, script=script)
        if "engine=vllm" not in overrides:
            defaults = {"environment": list(kwargs.get("env", {}).items()), "timeout_s": kwargs.get("timeout", 300)}
            done = fork_server.run(arguments[1:], cwd=tmp_path, **defaults)
            return subprocess.CompletedProcess(arguments, done.code, done.stdout, done.stderr)
        return subprocess.run(
            arguments,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            cwd=tmp_path,
            timeout=kwargs.pop("timeout", 300),
            env={**ENVIRONMENT, **kwargs.pop("env", {})},
        )

    return run


@pytest.fixture
def signalled(fork_server: ForkServer, tmp_path: Path) -> Callable[..., Done]:
    """Run ``grpo.py`` and send it a signal, or some, as soon as ``moment()`` holds; what became of it."""

    def run(number: int, moment: Callable[[], bool], run_dir: Path, *options: str, times: int = 1) -> Done:
        process = fork_server.start(command(run_dir, *options)[1:], cwd=tmp_path)
        try:
            wait_for(moment)
        finally:
            for sent in range(times):
                time.sleep(0.1 * bool(sent))
                hit(process, number)  # if it has ended, its exit code shows it
            done = fork_server.finish()
        return done

    return run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that has trained an adapter, with a checkpoint of each and an export."""
    options = ("engine=transformers", "check.mode=off", "train.total_dialog_turns=32", "train.checkpoint_frequency=1")
    options += ("env.reward_workers=0", "env.num_heldout=32", "env.max_samples=40", "optimizer.lr=1e-3")
    options += ("eval.num_samples=16", "eval.avg_at_k=4", "eval.every=0", "inference_model.max_tokens=48")
    options += ("train_model.lora.enabled=true", "train_model.lora.r=4")
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train(composed("grpo_cpu", *SMALL, *options), folder) == 2
    return folder


def metrics(run_dir: Path) -> list[dict]:
    whole = (run_dir / "metrics.jsonl").read_text().rpartition("\n")[0]  # a run may be writing its next line
    return [json.loads(line) for line in whole.splitlines()]


def of_machine(name: str) -> bool:
    return declared(name).unit in ("s", "tokens/s") or name.startswith("system/")


def without_clock(rows: list[dict]) -> list[dict]:
    return [{name: row[name] for name in row if not of_machine(name)} for row in rows]


def final_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    newest = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    return torch.load(newest, weights_only=True)["learner"]["model"]
