"""A killed process costs time, never data: workers, ranks and the driver itself, by SIGKILL, SIGSTOP and SIGTERM."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, command, metrics
from tests.e2e.processes import below, hit, require_gone, workers

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
pytestmark = [pytest.mark.slow, pytest.mark.longest, pytest.mark.timeout(1800)]
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


def epoch_of(num_prompts: int) -> tuple[str, str]:
    """Options of a run that trains every one of so many prompts once."""
    return f"env.max_samples={num_prompts}", f"train.total_dialog_turns={4 * num_prompts}"


@contextmanager
def started(run_dir: Path, *options: str) -> Iterator[subprocess.Popen]:
    """A run of ``grpo-async.py``; whatever it started is gone afterwards, or the test fails."""
    seen: set[int] = set()
    log = (run_dir.parent / "console.log").open("ab")
    line = command(run_dir, *RUN, *options, script="grpo-async.py")
    run = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    run.seen = seen
    try:
        yield run
    finally:
        seen |= set(below(run.pid))
        if run.poll() is None:
            run.kill()
            run.wait()
        require_gone(seen)


def console(run_dir: Path) -> str:
    return (run_dir.parent / "console.log").read_text()


def wait_for(condition: Callable[[], object], run: subprocess.Popen, within_s: float = 400.0) -> object:
    limit = time.monotonic() + within_s
    while time.monotonic() < limit:
        run.seen |= set(below(run.pid))
        if actual := condition():
            return actual
        assert run.poll() is None, "the run ended early"
        time.sleep(0.1)
    raise AssertionError("what was waited for never came")


def steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def require_every_prompt_once(run_dir: Path, num_prompts: int) -> None:
    """Every group of the epoch was trained in one step, and the groups are the prompts, each once."""
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert sorted({row["group_id"] for row in rows}) == list(range(num_prompts))
    turns_of = Counter(group for group, _ in {(row["group_id"], row["step"]) for row in rows})
    assert set(turns_of.values()) == {1}
    assert len({row["query"] for row in rows}) == num_prompts
    trained = [row for row in metrics(run_dir) if "groups/trained" in row]
    assert [row["step"] for row in trained] == list(range(num_prompts // 4))
    assert {row["groups/trained"] for row in trained} == {4}
    assert max(row["policy_age/max"] for row in trained) <= 1


def test_a_hung_engine_and_a_killed_worker_of_each_role_cost_no_prompt(tmp_path: Path) -> None:
    num_prompts, run_dir = 120, tmp_path / "run"
    with started(run_dir, *epoch_of(num_prompts), "ray.timeout_s=20") as run:
        wait_for(lambda: steps(run_dir) >= 2, run)
        (engine,) = wait_for(lambda: one if len(one := engines(run)) == 1 else None, run)
        hit(engine, signal.SIGSTOP)
        wait_for(lambda: engine not in below(run.pid), run, within_s=100)  # the default deadline is 600 s
        for role in ROLES:
            time.sleep(random.uniform(0.0, 1.5))
            wait_for(lambda role=role: kill_one(run, role), run)
        assert run.wait(600) == 0, console(run_dir)
    require_every_prompt_once(run_dir, num_prompts)
    rows = metrics(run_dir)
    assert rows[-1]["workers/restarts"] >= 3  # the last may fall after the last step
    assert not any(row["reward_errors"] for row in rows)
    assert max(row.get("policy_age/max", 0) for row in rows) == 1  # the bound of mode=async, reached


def kill_one(run: subprocess.Popen, role: str) -> bool:
    actual = [pid for pid, text in workers(run.pid).items() if role in text]
    return bool(actual) and hit(random.choice(actual), signal.SIGKILL)


def engines(run: subprocess.Popen) -> list[int]:
    return [pid for pid, text in workers(run.pid).items() if "ray::rollout" in text]


def test_a_dead_rank_a_killed_driver_and_a_preempted_one_lose_and_repeat_no_prompt(tmp_path: Path) -> None:
    """Started four times, it ends by a rank's death, a killed driver, a preemption, and by itself."""
    num_prompts, run_dir = 112, tmp_path / "run"
    options = (*epoch_of(num_prompts), "train.checkpoint_frequency=2", "train.resume=auto")
    with started(run_dir, *options, "train_model.num_devices=2") as run:
        wait_for(lambda: steps(run_dir) >= 5, run)
        victim = random.choice([pid for pid, text in workers(run.pid).items() if "ray::learner" in text])
        hit(victim, signal.SIGKILL)
        assert run.wait(400) == 1, console(run_dir)
    last = console(run_dir).splitlines()[-1]
    assert "The learner stopped: its rank" in last
    assert "train.resume=auto continues from the last checkpoint" in last

    with started(run_dir, *options) as run:  # on one rank now
        goal = steps(run_dir) + random.randint(2, 5)
        wait_for(lambda: steps(run_dir) >= goal, run)
        time.sleep(random.uniform(0.0, 0.5))
        run.kill()
        run.wait()

    with started(run_dir, *options, "train.checkpoint_frequency=0") as run:
        goal = steps(run_dir) + 2
        wait_for(lambda: steps(run_dir) >= goal, run)
        run.terminate()
        assert run.wait(400) == 130
    saved = max((run_dir / "checkpoints").glob("checkpoint_*.pt"))
    assert int(saved.stem.partition("_")[2]) == steps(run_dir) < num_prompts // 4  # it has not gone on to its end

    with started(run_dir, *options) as run:
        assert run.wait(400) == 0, console(run_dir)
    require_every_prompt_once(run_dir, num_prompts)
    assert console(run_dir).count("Continuing") == 3
