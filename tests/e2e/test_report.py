"""A run leaves a report that shows what it did, its gate and its stored steps included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sota_grpo.run.app import train
from sota_grpo.training.gate import CHECKS
from tests.config.test_config import composed
from tests.e2e.conftest import SMALL, metrics

OPTIONS = (
    *("engine=transformers", "policy.kl_coef=0.01", "train.checkpoint_frequency=2", "train.export_hf=false"),
    *("eval.mode=off", "train.total_dialog_turns=48", "env.reward_workers=0"),
)


def test_a_run_leaves_a_report_of_what_it_did(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert train(composed("grpo_cpu", *SMALL, *OPTIONS), run_dir) == 3
    page = (run_dir / "report.html").read_text(encoding="utf-8")
    shown = json.loads(page.partition('id="data">')[2].partition("</script>")[0])["runs"][0]
    assert (shown["state"], shown["done"]) == ("finished", 3)
    checks = [check["passed"] for check in shown["gate"]["checks"]]
    assert checks == [True] * (len(CHECKS) + 1)  # that of the reference, too
    rewards = [row["reward"] for row in metrics(run_dir) if "reward" in row]
    assert [value for value in shown["columns"]["reward"]["v"] if value is not None] == pytest.approx(rewards, rel=1e-4)
    assert shown["record"]["stored"] == [0, 2]
    first, *_ = (group for group in shown["groups"] if group["whole"])
    assert len(first["samples"]) == 4
    for sample in first["samples"]:  # the first policy is engine, trainer and reference in one
        assert "".join(sample["pieces"])
        assert sample["ratio"] == pytest.approx([1.0] * len(sample["pieces"]), abs=1e-3)
        assert sample["kl"] == pytest.approx([0.0] * len(sample["pieces"]), abs=1e-6)
        assert max(sample["entropy"]) > 0
