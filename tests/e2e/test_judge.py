"""Runs that a judge rewards: killed with -9 during a request, and continued; no answer is requested again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from sota_grpo.rewards.judge.client import JudgeClient, JudgeGone
from sota_grpo.run.app import train
from tests.config.test_config import composed
from tests.e2e.conftest import SMALL, metrics, without_clock
from tests.unit.fake_judge import FakeJudge

RUN = (
    *(*SMALL, "engine=transformers", "train.export_hf=false", "train.checkpoint_frequency=1", "logging.report=false"),
    *("env.num_heldout=32", "eval.mode=off", "reward.judge.kind=chat", "reward.judge.weight=0.5"),
)


def judged(metrics_of: list[dict]) -> list[dict]:
    """Without what depends on earlier requests."""
    return [{name: row[name] for name in row if not name.startswith("judge/")} for row in without_clock(metrics_of)]


@pytest.mark.slow
def test_a_killed_run_asks_its_judge_nothing_again_and_equals_the_uninterrupted_one(
    tmp_path: Path, grpo, signalled
) -> None:
    with FakeJudge() as fake:
        whole = grpo(tmp_path / "whole", *RUN, f"reward.judge.url={fake.url}")
    assert whole.returncode == 0, whole.stderr
    run_dir, closed_s = tmp_path / "killed", 0.0
    with FakeJudge() as fake:
        options = (*RUN, f"reward.judge.url={fake.url}", "train.resume=auto")

        def is_asking(count: int, step: int) -> bool:
            """In the middle of a step: some answers of it are kept, the others are held back."""
            nonlocal closed_s
            cache, rows = run_dir / "judge.jsonl", run_dir / "metrics.jsonl"
            steps = rows.read_bytes().count(b"\n") if rows.exists() else 0
            if steps >= step and sum(fake.answered.values()) >= count and fake.gate.is_set():
                fake.gate.clear()
                closed_s = time.monotonic()
            kept = cache.read_bytes().count(b"\n") if cache.exists() else 0
            if fake.gate.is_set() or time.monotonic() < closed_s + 0.5:  # who is past the gate answers
                return False
            return kept >= sum(fake.answered.values()) and fake._at_once > 0

        for count, step in ((3, 0), (25, 1)):
            done = signalled(signal.SIGKILL, lambda count=count, step=step: is_asking(count, step), run_dir, *options)
            assert done.code == -signal.SIGKILL
            fake.kill()  # and with it what it had not answered
            fake.gate.set()
            fake.start()
        last = grpo(run_dir, *options)
        assert last.returncode == 0, last.stderr
        assert set(fake.answered.values()) == {1}
        assert sum(fake.asked.values()) > len(fake.answered), "some were open when the run was killed"
    rows = metrics(run_dir)
    assert judged(rows) == judged(metrics(tmp_path / "whole"))
    assert sum(row["reward/judge"] > 0 for row in rows) == 4
    assert all(row["reward_errors"] == 0 for row in rows)
    rollouts = [(path / "rollouts.jsonl").read_text() for path in (run_dir, tmp_path / "whole")]
    assert rollouts[0] == rollouts[1]
    first = json.loads(rollouts[0].splitlines()[0])
    assert first["reward_info"]["judge"].startswith("So:\nVerdict ")


@pytest.mark.slow
def test_a_judge_that_is_gone_ends_the_run_and_a_resumed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"timeout_s": 20.0, "gone_s": 2.0, "first_pause_s": 0.05}.items():
        monkeypatch.setitem(JudgeClient.__init__.__kwdefaults__, name, value)
    with FakeJudge() as fake:
        judged = (f"reward.judge.url={fake.url}", "env.mixture={a: {}, b: {judge_weight: 0}}")
        config = composed("grpo_cpu", *RUN, *judged, "env.reward_workers=0")
        fair = fake.answer

        def until_gone(body: dict) -> object:
            say = fair(body)
            if sum(fake.answered.values()) >= 12:
                say.status, say.body = 503, {"error": "gone"}
            return say

        fake.answer = until_gone
        with pytest.raises(JudgeGone, match="has not answered for 0:0"):
            train(config, tmp_path / "run")
        fake.answer = fair
        config.train.resume = str(tmp_path / "run")
        assert train(config, tmp_path / "run") == 4
        assert set(fake.answered.values()) == {1}
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("reward/a/judge" in row and "reward/b/judge" not in row for row in rows)
    assert not any(row["reward_errors"] for row in rows)
