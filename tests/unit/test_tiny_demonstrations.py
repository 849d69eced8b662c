"""What the tiny policy was trained on: habits that earn nothing, true drills, targets that are the response."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import sota_grpo
from sota_grpo.rewards.expressions import parse_expression
from sota_grpo.rl.records import Example
from sota_grpo.tasks.arithmetic import ArithmeticTask

PACKAGE = Path(sota_grpo.__file__).parent
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import tiny_demonstrations as demos  # noqa: E402  (scripts are not a package)

SEED = random.randrange(1 << 30)
THREE_STEPS = Example("?", "3*4=12\n12-5=7\n7+9=16\n#### 16", {"template": "x", "numbers": {"a": 3}, "num_steps": 3})


HABITS = {"guess": "#### 3", "first_step": "3*4=12\n#### 12", "last_step": "3*4=12\n12-5=7\n#### 7"}
HABITS["no_marker"] = "3*4=12\n12-5=7\n7+9=16\nThe answer is 16."


@pytest.mark.parametrize("habit", HABITS)
def test_each_habit_worked_by_hand(habit: str) -> None:
    assert demos.fall_into(habit, THREE_STEPS, random.Random(SEED)) == HABITS[habit]
    assert not ArithmeticTask().score(HABITS[habit], THREE_STEPS).success


def test_habits_almost_never_earn_the_reward() -> None:
    task, rng = ArithmeticTask(seed=SEED, num_train=300), random.Random(SEED)
    lucky = 0
    for example in task.train:
        habit, _ = demos.habit_of(example.extra["template"])
        lucky += task.score(demos.fall_into(habit, example, rng), example).success
    assert lucky < 12  # a guess may name the right number by luck


def test_drill_lines_are_true() -> None:
    rng = random.Random(SEED)
    for _ in range(300):
        expression, value = demos.drill_line(rng).split("=")
        assert parse_expression(expression).value == int(value)


def test_targets_are_the_response_and_nothing_else() -> None:
    task, tokenizer = ArithmeticTask(seed=SEED), AutoTokenizer.from_pretrained(PACKAGE / "assets" / "tiny")
    (demo,) = demos.word_problems(task, tokenizer, task.train[:1], habits=False, rng=random.Random(SEED))
    learned = [token for token, target in zip(demo.ids, demo.is_target) if target]
    assert tokenizer.decode(learned) == f"{task.gold_response(task.train[0])}<|im_end|>"
    (drill,) = demos.drills(tokenizer, 1, random.Random(SEED))
    learned = [token for token, target in zip(drill.ids, drill.is_target) if target]
    lines = tokenizer.decode(drill.ids).split("assistant\n")[1].splitlines()
    assert tokenizer.decode(learned).splitlines() == [line.split("=")[1] for line in lines]
    assert len(lines) == demos.DRILL_LINES
