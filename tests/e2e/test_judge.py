"""A run that a judge rewards ends when the judge is gone, and continues; no answer is requested again."""

from __future__ import annotations

from pathlib import Path

import pytest

from sota_grpo.rewards.judge.client import JudgeClient, JudgeGone
from sota_grpo.run.app import train
from tests.config.test_config import composed
from tests.e2e.conftest import SMALL, metrics
from tests.unit.fake_judge import FakeJudge

RUN = (
    *(*SMALL, "engine=transformers", "train.export_hf=false", "train.checkpoint_frequency=1", "logging.report=false"),
    *("env.num_heldout=32", "eval.mode=off", "reward.judge.kind=chat", "reward.judge.weight=0.5"),
)


@pytest.mark.slow
def test_a_judge_that_is_gone_ends_the_run_and_a_resumed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"timeout_s": 20.0, "gone_s": 0.5, "first_pause_s": 0.05}.items():
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
        with pytest.raises(JudgeGone, match="has given no usable answer for 0:0"):
            train(config, tmp_path / "run")
        fake.answer = fair
        config.train.resume = str(tmp_path / "run")
        assert train(config, tmp_path / "run") == 4
        assert set(fake.answered.values()) == {1}
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all("reward/a/judge" in row and "reward/b/judge" not in row for row in rows)
    assert not any(row["reward_errors"] for row in rows)
