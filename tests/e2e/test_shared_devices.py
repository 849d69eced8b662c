"""Whole runs of several ranks whose engines share their devices: real Ray, real ranks, each in turn."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, SMALL, metrics

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
SHARED = ("mode=sync", "train_model.num_devices=2", "inference_model.num_devices=shared")


def turns(path: Path) -> dict[str, dict[int, list[tuple[int, int]]]]:
    """When who worked: what, pid, begins and ends in order (``tests/e2e/turns``)."""
    actual: dict[str, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        what, began, ended, pid = line.split()
        actual[what][int(pid)].append((int(began), int(ended)))
    return actual


def is_asleep(at: int, sleeps: list[tuple[int, int]], wakes: list[tuple[int, int]]) -> bool:
    """Whether the engine's last sleep had ended before that moment, and no wake has begun since."""
    since = max((ended for _, ended in sleeps if ended <= at), default=None)
    return since is not None and not any(since <= began <= at for began, _ in wakes)


@pytest.mark.slow  # of the fleet alone: tests/unit/test_fleet.py
def test_engines_sleep_whenever_a_rank_or_the_reference_computes(tmp_path: Path, grpo) -> None:
    """Each of their tokens is of the weights of its step: a push that is missed or early would show in the mismatch."""
    log, options = tmp_path / "turns.log", (*SMALL, *SHARED, "engine=transformers", "policy.kl_coef=0.001")
    options += ("optimizer.schedule=constant", "optimizer.lr=1e-3")
    paths = os.pathsep.join((str(Path(__file__).parent / "turns"), str(ROOT)))
    done = grpo(tmp_path / "run", *options, script="grpo-async.py", env={"TURNS": str(log), "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr
    assert "Placement: 2 learner ranks, 2 engines, 1 reference worker on the CPU; engines sleep while" in done.stderr
    assert re.search(r"Checks before training: (\d+) of \1 passed", done.stdout)
    rows = [row for row in metrics(tmp_path / "run") if "reward" in row]
    assert [row["step"] for row in rows] == list(range(4))
    groups = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert sorted({(group["group_id"], group["step"]) for group in groups}) == [(n, n // 4) for n in range(16)]
    assert all(row["mismatch_kl"] < 1e-8 and row["policy_age/max"] == 0 for row in rows)
    assert min(row["grad_norm"] for row in rows[:-1]) > 0
    actual = turns(log)
    assert [len(actual[what]) for what in ("step", "sleep", "wake", "rank", "reference")] == [2, 2, 2, 2, 1]
    computed = [span for what in ("rank", "reference") for spans in actual[what].values() for span in spans]
    for engine, steps in actual["step"].items():
        sleeps, wakes = actual["sleep"][engine], actual["wake"][engine]
        assert len(sleeps) >= 4 + 3  # every training step, and the gate's samples
        for began, ended in computed:
            assert is_asleep(began, sleeps, wakes)
            assert is_asleep(ended, sleeps, wakes)
            assert not any(first < ended and began < last for first, last in steps)
