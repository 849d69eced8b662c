"""Whole runs whose samples are episodes of a user's agent."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, metrics
from tests.e2e.test_resume import after_rows

pytest.importorskip("aiohttp", reason="needs aiohttp (the extra agents)")

AGENT = """
import json, urllib.request

def ask(url, key, messages):
    body = json.dumps({"messages": messages}).encode()
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers))
    return json.loads(answer.read())["choices"][0]["message"]

def run(row, base_url, api_key):
    messages = row["prompt"]
    reply, retry = (ask(base_url, api_key, messages) for _ in range(2))
    last = ask(base_url, api_key, [*messages, reply, {"role": "user", "content": "Again?"}])
    return {"reward": float(last["content"].endswith(row["ground_truth"])), "same": reply == retry}
"""
OPTIONS = (
    *(*SMALL, "engine=transformers", "check.mode=off", "eval.mode=off", "train.export_hf=false", "env.max_steps=3"),
    *("train.checkpoint_frequency=1", "logging.report=false"),
)


def drawn(run_dir: Path) -> list[tuple]:
    """Step, group and question of each group that was trained on, in order."""
    rows = map(json.loads, (run_dir / "rollouts.jsonl").read_text().splitlines())
    return [*dict.fromkeys((row["step"], row["group_id"], row["query"]) for row in rows)]


@pytest.mark.slow
def test_an_agents_run_that_is_killed_draws_each_example_in_its_order(tmp_path: Path, grpo, signalled) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    options = (*OPTIONS, f"env.agent={tmp_path}/agent.py:run")
    whole = grpo(tmp_path / "whole", *options)
    assert whole.returncode == 0, whole.stderr
    run_dir, again = tmp_path / "killed", (*options, "train.resume=auto")
    moment = after_rows(run_dir, 1, random.uniform(0, 0.5))  # in the middle of the next step's episodes
    assert signalled(signal.SIGKILL, moment, run_dir, *again).code == -signal.SIGKILL
    last = grpo(run_dir, *again)
    assert last.returncode == 0, last.stderr
    assert drawn(run_dir) == drawn(tmp_path / "whole")
    for row in metrics(run_dir):
        assert row["grader/requests"] == row["turns/mean"] == 3.0
        assert row["mismatch_kl"] < 1e-6


@pytest.mark.slow
def test_an_agents_run_with_workers_keeps_the_age(tmp_path: Path, grpo) -> None:
    pytest.importorskip("ray", reason="needs Ray (the extra ray)")
    (tmp_path / "agent.py").write_text(AGENT)
    options = (*OPTIONS, f"env.agent={tmp_path}/agent.py:run", "inference_model.num_devices=2")
    done = grpo(tmp_path / "run", *options, script="grpo-async.py")
    assert done.returncode == 0, done.stderr
    rows = metrics(tmp_path / "run")
    assert max(row["policy_age/max"] for row in rows) == 1.0
    assert max(row["mismatch_kl"] for row in rows) < 1e-3
