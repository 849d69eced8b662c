"""What the speedrun's table says is what its runs have logged; its presets keep its rules."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.unseen_instructions import KINDS, UnseenInstructions
from scripts import speedrun
from sota_grpo.config.validators import validate
from sota_grpo.rl.records import Example
from sota_grpo.tasks.ifeval import texts
from sota_grpo.tasks.procedural import is_heldout
from tests.config.test_config import composed


def test_the_table_of_a_run(tmp_path: Path) -> None:
    """Two steps of 8 responses, 10 and 20 tokens each: 240 tokens; of 200 seconds 190 are of the run, 133 of phases."""
    rows = [
        {"step": 0, "dialog_turns": 8, "response_tokens/mean": 10.0},
        {"step": 1, "dialog_turns": 16, "response_tokens/mean": 20.0},
        {"step": 2, "eval/accuracy": 0.303, "eval/num_samples": 541},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.json").write_text(json.dumps({"reached": {"step": 2, "accuracy": 0.303, "target": 0.3}}))
    printed = "Held out: greedy 30.3 %\nTime: 3:10, of which learn 50 %, eval 15 %, start 5 %, other 30 %\n"
    row = speedrun.row_of(tmp_path, 3, 200.0, printed) | {"unseen": 0.25, "unseen_stderr": 0.03}
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


RIGHT = {
    "numbers": ("In 1999 there were 3,500.5 bees.", "On days 1,2,3 there were bees.", 2),
    "question": ('Bees fly. "Do they?"\n', "Do they? They fly.", 0),
    "exclamations": ("Bees! Bees!", "Bees!!!", 2),
    "same_word": ("Bees like other bees.", "It’s a bee, is it", 0),
    "numbered": ("1. Bees\n\n2. Wasps", "1. Bees\n2.5 wasps", 0),
    "short_words": ("Bees wouldn't fly.", "Bumblebees fly.", 7),
    "brackets": ("Bees (small) fly (fast).", "Bees (small) fly ().", 2),
    "semicolons": ("Bees; wasps; ants.", "Bees; wasps.", 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kinds_that_no_training_sees_are_checked(kind: str) -> None:
    followed, broken, count = RIGHT[kind]
    task, example = UnseenInstructions(), Example("Write about bees.", "", {"kind": kind, "n": count})
    scores = [task.score(text, example) for text in (followed, broken, "")]
    assert [score.success for score in scores] == [True, False, False]
    assert {name: count for name, count in task.counts(scores[0], example).items() if count != (0, 0)} == {kind: (1, 1)}


def test_each_kind_is_drawn_with_a_request_that_training_does_not_have() -> None:
    task = UnseenInstructions(num_train=1, num_heldout=256)
    requests = itertools.product(texts()["requests"], texts()["topics"])
    trained = [form.format(topic=topic) for form, topic in requests if not is_heldout((form, topic))]
    assert {example.extra["kind"] for example in task.heldout} == set(KINDS)
    assert not any(request in example.query for example in task.heldout for request in trained)
