"""The environment takes TorchRL's keywords, grades what is rolled out, and refuses what it cannot honour."""

from __future__ import annotations

import inspect
import json
import random
from pathlib import Path

import pytest
from tensordict import TensorDictBase
from torchrl.envs.utils import check_env_specs

from sota_grpo import keys
from sota_grpo.envs import DatasetEnv, IFEvalEnv
from sota_grpo.tasks.dataset import DatasetError
from tests.unit.test_envs import answering, char_tokenizer
from tests.unit.test_ifeval_task import ifeval_row, write

SEED = random.SystemRandom().randrange(1 << 30)


@pytest.fixture
def ifeval_file(tmp_path: Path) -> str:
    return write(tmp_path / "rows.jsonl", [ifeval_row(number) for number in range(9)])


def test_keywords_are_torchrls_and_rollouts_are_graded(ifeval_file: str) -> None:
    from torchrl.envs.llm import IFEvalEnv as TheirEnv

    theirs = set(inspect.signature(TheirEnv.__init__).parameters) - {"self"}
    ours = [set(inspect.signature(one.__init__).parameters) for one in (IFEvalEnv, DatasetEnv)]
    assert theirs <= set().union(*ours)
    env = IFEvalEnv(
        dataset=ifeval_file, tokenizer=char_tokenizer(), num_envs=4, repeats=2, seed=SEED, num_heldout=3, shuffle=True,
        batch_size_dl=4, group_repeats=True, apply_template=True, compute_reward=True, max_steps=1, all_weight=0.5,
    )  # fmt: skip
    check_env_specs(env)

    def respond(index: int, row: TensorDictBase) -> str:
        return "It is so and so and so and so and so" if index % 2 else "It is so, and so and so and so and so and so"

    rows = env.rollout(max_steps=1, policy=answering(env, respond)).reshape(-1)
    assert rows["next", "reward_terms", "instructions"].flatten().tolist() == [0.5, 1.0, 0.5, 1.0]
    assert rows["next", "reward"].flatten().tolist() == [0.5, 1.5, 0.5, 1.5]
    assert rows["next", "success"].flatten().tolist() == [False, True, False, True]
    infos = [json.loads(row[keys.REWARD_INFO]) for row in rows.unbind(0)]
    assert [info["follow_instruction_list_strict"] for info in infos[:2]] == [[False, True], [True, True]]
    assert env.decode(rows[0][keys.PROMPT_TOKENS]).startswith("user: Prompt ")


@pytest.mark.parametrize(
    ("option", "error", "sentence"),
    [
        ({"input_mode": "history"}, ValueError, "input_mode='history' is not supported"),
        ({"max_steps": 3}, ValueError, "max_steps=3 is not supported.*use max_steps=1"),
        ({"ray_backend": True}, ValueError, "ray_backend=True is not supported"),
        ({"tokenizer": None}, ValueError, "tokenizer=None"),
        ({"dataset": "google/IFEval"}, DatasetError, "is what IFEval is evaluated on"),
        ({"eval_dataset": "missing.jsonl"}, DatasetError, "there is no file missing.jsonl"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_refused(
    ifeval_file: str, option: dict, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        IFEvalEnv(**{"dataset": ifeval_file, "num_heldout": 3, "tokenizer": char_tokenizer()} | option)
