"""Two real nodes: other network namespaces, another Ray node; links that are cut, nodes that die and join."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from subprocess import Popen

import pytest

from tests.docs.markdown import ROOT, blocks, commands
from tests.e2e.conftest import command, metrics
from tests.e2e.running import require_every_prompt_once
from tests.process_rigs import wait_for
from tests.two_nodes import TwoNodes, two_nodes, why_not

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.longest(4),
    pytest.mark.timeout(1800),  # two of Ray's nodes start, on a machine that may be busy
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
STEPS = 30  # of which the first few go by before anything is done to the run
RUN = (
    "env.num_envs=32",
    "env.repeats=4",
    "env.max_samples=256",
    "train.dialog_turns_per_batch=16",
    "train.optim_batch_size=16",
    f"train.total_dialog_turns={16 * STEPS}",
    "train.checkpoint_frequency=2",
    "train.resume=auto",
    "inference_model.max_tokens=24",
    "inference_model.num_devices=2",
    "engine=transformers",
    "check.mode=off",
    "eval.mode=off",
    "train.export_hf=false",
)
WITH_REFERENCE = ("policy.kl_coef=0.01", "ref_model.num_devices=1")
# docs/cluster.md: on every node, and where the run is started
PATIENT = dict(
    setting.split("=", 1)
    for block in blocks(ROOT / "docs" / "cluster.md")
    if "RAY_grpc_keepalive_timeout_ms" in block.text
    for export in commands(block)
    for setting in export.words[1:]
)
# a node that does not answer is dead after some 35 s: 65 where Ray is as it is
HASTY = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "8000",
    "RAY_health_check_failure_threshold": "4",
}


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_text().count('"reward"') if path.is_file() else 0


def train(nodes: TwoNodes, run_dir: Path, *more: str) -> Popen:
    """Start a run on the head's node."""
    options = (*RUN, *more, f"ray.address={nodes.address}")
    return nodes.start(0, *command(run_dir, *options, script="grpo-async.py"))


def require_shared(nodes: TwoNodes, run_dir: Path) -> None:
    """``sota-grpo doctor`` sees both nodes, and that both can write to the run directory."""
    line = ("-m", "sota_grpo.cli", "doctor", "--address", nodes.address, "--run-dir", str(run_dir), "--json")
    probe = nodes.run(0, sys.executable, *line)
    findings = [one for node in json.loads(probe.stdout)["nodes"] for one in node["findings"]]
    assert [one["state"] for one in findings if one["subject"] == "run directory"] == ["ok", "ok"]


def require_at_work(run: Popen, run_dir: Path) -> None:
    """The run is not over: it has to bear what was done to it until now, or is done next."""
    assert run.poll() is None
    assert steps_done(run_dir) < STEPS


def require_cut_is_borne(nodes: TwoNodes, run: Popen, run_dir: Path, seconds: float) -> None:
    with nodes.cut():
        time.sleep(seconds)
        require_at_work(run, run_dir)


def ends_well(nodes: TwoNodes, run: Popen) -> None:
    """The run ends by itself and leaves no process on either node."""
    assert run.wait(timeout=300) == 0, nodes.console(0)
    wait_for(lambda: not nodes.workers(0) + nodes.workers(1), within_s=120)


def test_a_link_that_is_cut_costs_no_prompt(tmp_path: Path) -> None:
    """For a minute, with the settings of docs/cluster.md: no worker is taken for dead and no call is lost."""
    run_dir = tmp_path / "run"
    with two_nodes(tmp_path, cpus=(1, 3), settings=PATIENT) as nodes:
        require_shared(nodes, run_dir)
        run = train(nodes, run_dir, *WITH_REFERENCE)
        wait_for(lambda: steps_done(run_dir) >= 3)
        assert nodes.workers(1)
        require_cut_is_borne(nodes, run, run_dir, 60.0)
        ends_well(nodes, run)
    require_every_prompt_once(run_dir, 4 * STEPS)
    assert metrics(run_dir)[-1]["workers/restarts"] == 0


def test_a_node_that_is_taken_for_dead_ends_and_the_run_continues(tmp_path: Path) -> None:
    """The learner and all engines are lost; the far node ends with its workers, joins again, and the run continues."""
    run_dir = tmp_path / "run"
    with two_nodes(tmp_path, cpus=(0, 3), settings=HASTY) as nodes:
        run = train(nodes, run_dir)
        wait_for(lambda: steps_done(run_dir) >= 3)
        assert nodes.workers(1) == ["learner", "rollout", "rollout"]
        with nodes.cut():
            assert run.wait(timeout=240) == 1
        assert "its rank 0 (learner-0) failed" in nodes.console(0)
        assert "train.resume=auto" in nodes.console(0)
        nodes.wait_end(1)
        assert not nodes.workers(1)
        nodes.join(1)
        ends_well(nodes, train(nodes, run_dir))
    require_every_prompt_once(run_dir, 4 * STEPS)


def test_a_node_that_dies_and_one_that_joins_cost_no_prompt(tmp_path: Path) -> None:
    """A cut of five seconds costs nothing; engines move to the node that joins, and a lost learner ends the run."""
    run_dir = tmp_path / "run"
    with two_nodes(tmp_path, cpus=(2, 2)) as nodes:  # the learner on one, the engines on the other, as Ray has it
        run = train(nodes, run_dir)
        wait_for(lambda: steps_done(run_dir) >= 3)
        had_learner = "learner" in nodes.workers(1)
        require_cut_is_borne(nodes, run, run_dir, 5.0)
        goal = steps_done(run_dir) + 2  # of groups that were requested behind the cut
        wait_for(lambda: steps_done(run_dir) >= goal)
        assert metrics(run_dir)[-1]["workers/restarts"] == 0
        require_at_work(run, run_dir)
        nodes.kill(1)
        if had_learner:
            assert run.wait(timeout=240) == 1
            assert "train.resume=auto" in nodes.console(0)
        nodes.join(1)
        if had_learner:
            run = train(nodes, run_dir)
        ends_well(nodes, run)
    require_every_prompt_once(run_dir, 4 * STEPS)
