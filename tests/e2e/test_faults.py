"""A killed process costs time, never data: workers, ranks and the driver itself, by SIGKILL, SIGSTOP and SIGTERM."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import metrics
from tests.e2e.running import Running, require_every_prompt_once, running
from tests.process_rigs import below, hit, workers

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
pytestmark = [pytest.mark.slow, pytest.mark.longest(4), pytest.mark.timeout(1800)]
ROLES = ("ray::rollout", "ray::reference", "serve_child")
RUN = (
    "env.num_envs=32",
    "env.repeats=4",
    "train.dialog_turns_per_batch=16",
    "train.optim_batch_size=16",
    "inference_model.max_tokens=32",
    "engine=transformers",
    "policy.kl_coef=0.001",
    "optimizer.schedule=constant",
    "check.mode=off",
    "eval.mode=off",
    "train.export_hf=false",
)


def epoch_of(num_prompts: int) -> tuple[str, ...]:
    """Options of a run that trains every one of so many prompts once."""
    return *RUN, f"env.max_samples={num_prompts}", f"train.total_dialog_turns={4 * num_prompts}"


def of_role(run: Running, role: str) -> list[int]:
    return [pid for pid, text in workers(run.process.pid).items() if role in text]


def kill_one(run: Running, role: str) -> bool:
    actual = of_role(run, role)
    return bool(actual) and hit(random.choice(actual), signal.SIGKILL)


def test_a_hung_engine_and_a_killed_worker_of_each_role_cost_no_prompt(tmp_path: Path) -> None:
    num_prompts, run_dir = 120, tmp_path / "run"
    with running(run_dir, *epoch_of(num_prompts), "ray.timeout_s=20") as run:
        run.wait_for(lambda: run.steps() >= 2)
        run.wait_for(lambda: len(of_role(run, "ray::rollout")) == 1)
        (engine,) = of_role(run, "ray::rollout")
        hit(engine, signal.SIGSTOP)
        run.wait_for(lambda: engine not in below(run.process.pid), within_s=100)  # the default deadline is 600 s
        for role in ROLES:
            time.sleep(random.uniform(0.0, 1.5))
            run.wait_for(lambda role=role: kill_one(run, role))
        assert run.end() == 0, run.console
    require_every_prompt_once(run_dir, num_prompts)
    rows = metrics(run_dir)
    assert rows[-1]["workers/restarts"] >= 3  # the last may fall after the last step
    assert not any(row["reward_errors"] for row in rows)
    assert max(row.get("policy_age/max", 0) for row in rows) == 1  # the bound of mode=async, reached


def test_a_dead_rank_a_killed_driver_and_a_preempted_one_lose_and_repeat_no_prompt(tmp_path: Path) -> None:
    """Started four times, it ends by a rank's death, a killed driver, a preemption, and by itself."""
    num_prompts, run_dir = 112, tmp_path / "run"
    options = (*epoch_of(num_prompts), "train.checkpoint_frequency=2", "train.resume=auto")
    with running(run_dir, *options, "train_model.num_devices=2") as run:
        run.wait_for(lambda: run.steps() >= 5)
        hit(random.choice(of_role(run, "ray::learner")), signal.SIGKILL)
        assert run.end() == 1, run.console
    last = run.console.splitlines()[-1]
    assert "The learner stopped: its rank" in last
    assert "train.resume=auto continues from the last checkpoint" in last

    with running(run_dir, *options) as run:  # on one rank now
        goal = run.steps() + random.randint(2, 5)
        run.wait_for(lambda: run.steps() >= goal)
        time.sleep(random.uniform(0.0, 0.5))
        run.process.kill()

    with running(run_dir, *options, "train.checkpoint_frequency=0") as run:
        goal = run.steps() + 2
        run.wait_for(lambda: run.steps() >= goal)
        run.process.terminate()
        assert run.end() == 130
    saved = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    assert int(saved.stem.partition("_")[2]) == run.steps() < num_prompts // 4  # it has not gone on to its end

    with running(run_dir, *options) as run:
        assert run.end() == 0, run.console
    require_every_prompt_once(run_dir, num_prompts)
    assert run.console.count("Continuing") == 3
