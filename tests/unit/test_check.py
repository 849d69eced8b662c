"""``sota-grpo check``: the gate alone, its outcomes and its exit code, and that it leaves nothing behind."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.evaluation import check
from sota_grpo.cli import configs as command
from sota_grpo.errors import UserError
from sota_grpo.training.gate import CHECKS

SMALL = (
    *("engine=transformers", "env.reward_workers=0", "inference_model.max_tokens=8"),
    *("env.max_samples=256", "env.num_heldout=8"),
)


def called(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_command(parser.add_subparsers())
    options = parser.parse_args(["check", "--config-name", "grpo_cpu", *arguments])
    return options.run(options)


def test_a_good_config_passes_every_check_and_leaves_nothing_behind(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert called(*SMALL, "check.mode=off") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("ok  ") for line in lines[:-1]] == [True] * len(CHECKS)
    assert lines[-1].startswith(f"{len(CHECKS)} of {len(CHECKS)} checks passed")
    assert not list(tmp_path.iterdir())


def test_a_reward_function_that_fails_at_every_text_fails_its_check(tmp_path: Path, capsys) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    kept = tmp_path / "kept"
    assert called("--json", "--run-dir", str(kept), *SMALL, f"reward.path={reward}") == 1
    output = json.loads(capsys.readouterr().out)
    failed = [check["name"] for check in output["checks"] if not check["passed"]]
    assert failed == ["responses can be graded", "responses end and are graded"]
    assert output["passed"] is False
    assert json.loads((kept / "gate.json").read_text())


def test_a_config_that_cannot_run_and_a_directory_of_a_run_are_mistakes_and_no_failed_check(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="top_p"):
        called(*SMALL, "engine=scripted", "inference_model.top_p=0.9")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"has a run, whose gate\.json"):
        check(compose("grpo_cpu"), run_dir=tmp_path)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "run.json"]
