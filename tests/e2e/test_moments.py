"""A full disk at every file of a run, and kills in the middle of a push, a checkpoint, the report and the export."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import SMALL, command, final_weights, metrics, without_clock
from tests.forked import ForkServer

OPTIONS = (
    *(*SMALL, "engine=transformers", "train.checkpoint_frequency=1", "train.resume=auto"),
    *("env.reward_workers=0", "env.max_samples=64", "inference_model.max_tokens=12", "eval.num_samples=4"),
)
FULL = (  # files in the order in which a run opens them; steps done before; exit code; the sentence
    (r"/\.hydra$", 1, 0, 2, "set hydra.run.dir."),
    (r"training\.log", 1, 0, 2, "choose a writable run directory"),
    (r"gate\.json", 1, 0, 1, "mend the cause and start again"),
    (r"rollouts\.jsonl", 1, 0, 2, "choose a writable run directory"),
    (r"metrics\.jsonl", 1, 0, 2, "choose a writable run directory"),
    (r"/\.config\.yaml", 1, 0, 2, "set hydra.run.dir"),
    (r"/\.run\.json", 1, 0, 2, "set hydra.run.dir"),
    (r"steps/", 1, 0, 1, "free disk space or set logging.store_steps=false"),
    (r"checkpoints/\.", 1, 0, 1, "checkpoint"),
    (r"checkpoints/\.", 3, 1, 1, "checkpoint_000001.pt is the last good one"),
)
KILLS = (("push", "-", 3, 2), ("kill", r"checkpoint_0+3\.pt", 1, 2), ("kill", r"/hf$", 1, 4))
EXPORT = ("full", r"/\.hf", 1, 4)
REPORT = ("kill", r"report\.html$", 1, 4)  # the last of all files


@pytest.mark.slow
@pytest.mark.timeout(580)
def test_nothing_is_lost_whatever_is_full_and_whenever_it_is_killed(tmp_path: Path, fork_server: ForkServer) -> None:
    """One run, continued after each fault, ends as the undisturbed one did, bit for bit.

    The checks before training are made by the undisturbed run, and where their file is full.
    """

    def run(run_dir: Path, *fault: object):
        is_checked = not fault or r"gate\.json" in fault
        script, *options = command(run_dir, *OPTIONS, f"check.mode={'warn' if is_checked else 'off'}")[1:]
        faulty = [str(Path(__file__).with_name("faulty.py")), *map(str, fault)]
        return fork_server.run([*(faulty if fault else [script]), *options], cwd=tmp_path)

    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run(whole).require("undisturbed")

    def meet(kind: str, pattern: str, number: int, steps: int) -> tuple[int, str]:
        done = run(run_dir, kind, pattern, number)
        assert "Traceback" not in done.stderr, (pattern, done.stderr)
        folder = run_dir / "checkpoints"
        names = [path.name for path in folder.glob("checkpoint_*.pt")] if folder.exists() else []
        assert len(names) == min(steps, 3), (pattern, names)
        assert steps == 0 or f"checkpoint_{steps:06d}.pt" in names
        return done.code, done.stderr.splitlines()[-1]

    for pattern, number, steps, code, words in FULL:
        actual, last = meet("full", pattern, number, steps)
        assert actual == code, (pattern, last)
        assert words in last
        assert "No space left on device" in last
    for kind, pattern, number, steps in KILLS:
        assert meet(kind, pattern, number, steps)[0] == -signal.SIGKILL, pattern
    code, last = meet(*EXPORT)
    assert code == 1
    assert "No space left on device" in last
    assert "then write it with train.resume=auto" in last
    assert meet(*REPORT)[0] == -signal.SIGKILL
    assert not list(run_dir.glob("report*"))
    run(run_dir).require("the last start")
    assert without_clock(metrics(run_dir)) == without_clock(metrics(whole))
    assert all(torch.equal(value, final_weights(whole)[name]) for name, value in final_weights(run_dir).items())
    assert (run_dir / "hf" / "config.json").read_bytes() == (whole / "hf" / "config.json").read_bytes()
    left = {path.name for path in run_dir.rglob("*")} - {path.name for path in whole.rglob("*")}
    assert not left  # of killed writers either
