"""What the speedrun's table says is what its runs have logged; its presets keep its rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import speedrun
from sota_grpo.config.validators import validate
from sota_grpo.tasks.ifeval import SeenInstructionsTask
from tests.config.test_config import composed


def test_the_table_of_a_run(tmp_path: Path) -> None:
    """Two steps of 8 responses, 10 and 20 tokens each: 240 tokens; of 200 seconds 190 are of the run, 133 of phases."""
    rows = [
        {"step": 0, "dialog_turns": 8, "response_tokens/mean": 10.0},
        {"step": 1, "dialog_turns": 16, "response_tokens/mean": 20.0},
        {"step": 2, "eval/accuracy": 0.303, "eval/num_samples": 541, "eval/task/prompt_strict_unseen": 0.25},
    ]
    rows[2]["eval/task_stderr/prompt_strict_unseen"] = 0.03
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps({"reached": {"step": 2, "accuracy": 0.303, "target": 0.3}}))
    printed = "Held out: greedy 30.3 %\nTime: 3:10, of which learn 50 %, eval 15 %, start 5 %, other 30 %\n"
    row = speedrun.row_of(tmp_path, 3, 200.0, printed)
    assert (row["reached"], row["steps"], row["responses"], row["tokens"]) == (True, 2, 16, 240)
    assert {name: row["phases"][name] for name in ("learn", "eval", "start", "checks", "other")} == {
        **{"learn": 95.0, "eval": 28.5, "start": 9.5, "checks": 0.0, "other": 67.0}
    }
    table = speedrun.tables([row]).splitlines()
    assert table[2] == "| 3 | yes | 3.3 | 30.3 % | 25.0 +/- 3.0 % | 2 | 16 | 240 |"
    assert table[-1] == "| seed 3 | 10 | 0 | 0 | 0 | 95 | 0 | 28 | 0 | 67 |"


@pytest.mark.parametrize(
    ("preset", "problems", "target", "limit"),
    [("smollm_speedrun", 541, 0.3, 512), ("gsm8k_qwen05_speedrun", 1319, 0.543, 1024)],
)
def test_the_presets_keep_the_rules(preset: str, problems: int, target: float, limit: int) -> None:
    config = composed(preset, "env.eval_path=input_data.jsonl")
    validate(config)
    assert (config.eval.num_samples, config.eval.target, config.eval.max_tokens) == (problems, target, limit)
    assert config.check.mode == "strict"


def test_training_prompts_have_the_seen_instructions_alone_and_held_out_ones_any() -> None:
    task = SeenInstructionsTask.load(num_train=400, num_heldout=400)
    trained = {name for example in task.train for name in example.extra["instruction_id_list"]}
    measured = {name for example in task.heldout for name in example.extra["instruction_id_list"]}
    assert len(trained) == 20
    assert measured - trained == task.unseen
    unseen = [example for example in task.heldout if task.unseen & set(example.extra["instruction_id_list"])]
    counts = [task.counts(task.score("", example), example)["prompt_strict_unseen"] for example in task.heldout]
    assert sum(tried for _, tried in counts) == len(unseen) > 0
