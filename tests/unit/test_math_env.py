"""MATH as an environment: TorchRL's keywords, the three rewards, refusals in a sentence."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from torchrl.envs.utils import check_env_specs

from sota_grpo import keys
from sota_grpo.envs import DatasetEnv, MATHEnv
from tests.unit.test_envs import answering, char_tokenizer


@pytest.fixture
def math_file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    rows = [{"problem": f"Half of {n}?", "solution": f"It is $\\boxed{{\\frac{{{n}}}{{2}}}}$."} for n in range(1, 13)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_it_takes_torchrls_keywords_and_grades_boxes(math_file: str) -> None:
    from torchrl.envs.llm.datasets.math import MATHEnv as TheirEnv

    theirs = set(inspect.signature(TheirEnv.__init__).parameters) - {"self"}
    ours = [set(inspect.signature(one.__init__).parameters) for one in (MATHEnv, DatasetEnv)]
    assert theirs <= set().union(*ours)
    env = MATHEnv(
        dataset=math_file, tokenizer=char_tokenizer(), num_envs=4, repeats=2, num_heldout=3, correct=2.0,
        batch_size_dl=4, group_repeats=True, apply_template=True, compute_reward=True, max_steps=1,
    )  # fmt: skip
    check_env_specs(env)
    rows = env.rollout(max_steps=1, policy=answering(env, lambda index, row: f"so \\boxed{{{row['answer']} + 0}}"))
    assert rows["next", "reward"].flatten().tolist() == [2.0] * 4
    assert "\\boxed{<answer>}" in env.decode(rows[0, 0][keys.PROMPT_TOKENS])
    wrong = env.rollout(max_steps=1, policy=answering(env, lambda index, row: ("\\boxed{-1}", "1")[index % 2]))
    assert torch.equal(wrong["next", "reward"].flatten(), torch.tensor([-1.0, -0.5, -1.0, -0.5]))


def test_a_value_that_cannot_be_honoured_is_refused(math_file: str) -> None:
    for option, sentence in (
        ({"input_mode": "history"}, "input_mode='history' is not supported.*use input_mode='tokens'"),
        ({"max_steps": 3}, "max_steps=3 is not supported.*use max_steps=1"),
        ({"tokenizer": None}, "tokenizer=None"),
        ({"wrong": 5.0}, "reward.correct=1.0 must be greater"),
    ):
        with pytest.raises(ValueError, match=sentence):
            MATHEnv(**{"dataset": math_file, "num_heldout": 3, "tokenizer": char_tokenizer()} | option)
