"""TRL's protocol of environments, whole, through dialogs and reward functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from sota_grpo import keys
from sota_grpo.envs import TaskEnv
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.rewards.functions import RewardFunctionError
from sota_grpo.rl.records import SampledText
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions, with_tools
from sota_grpo.workers.instances import Instances, InstanceSpec
from tests.tool_rigs import written

pytestmark = pytest.mark.usefixtures("workers_fork")
SHOP = Path(__file__).parent / "environments" / "shop.py"
TOKENIZER = load_tokenizer("tiny")


def task_of(rows: list[dict[str, Any]], *names: str) -> Any:
    reader = TableTask(answer_required=False)
    table = TableTask([reader.read_row(row, "row 1") for row in rows], answer_required=False)
    return with_reward_functions(table, str(SHOP), names) if names else table


@pytest.fixture(scope="module")
def shop() -> Iterator[TaskEnv]:
    rows = [{"prompt": "Shop!", "purse": 5, "greets": greets, "level": 2} for greets in ("text", "list", None)]
    rows = [{**row, "prompt": f"{row['prompt']} {number}"} for number, row in enumerate(rows)]
    options = {"num_envs": 3, "shuffle": False, "max_steps": 9, "environment": f"{SHOP}:Shop"}
    made = TaskEnv(task_of(rows, "earned", "thrift"), TOKENIZER, **options)
    yield made
    made.close()


def say(env: TaskEnv, row: TensorDictBase, *texts: str) -> TensorDictBase:
    row = row.exclude("reward")
    for each, text in zip(row.unbind(0), texts, strict=True):
        each.set(keys.RESPONSE_TOKENS, torch.tensor([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]))
    return env.step(row)["next"]


def heard(row: TensorDictBase) -> list[str]:
    """What each row was answered last."""
    texts = [TOKENIZER.decode(each["tokens", "prompt"]) for each in row.unbind(0)]
    return [text.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0] for text in texts]


def test_every_part_of_the_protocol(shop: TaskEnv) -> None:
    row = shop.reset()
    begun = [TOKENIZER.decode(each["tokens", "prompt"]) for each in row.unbind(0)]
    assert "Shop! 0 You have 5.<|im_end|>" in begun[0]
    assert "Shop! 1 You have 5.\n[image, not shown]<|im_end|>" in begun[1]
    assert "Shop! 2<|im_end|>" in begun[2]
    names = [schema["function"]["name"] for schema in shop.template_kwargs["tools"]]
    assert sorted(names) == ["buy", "leave", "look"], "no reset, no properties, nothing with an underscore"

    row = say(shop, row, written("look"), written("buy", goods=["tea"]), written("buy", goods=["tea"], bag="gold"))
    assert heard(row)[:2] == ["tea milk\n[image, not shown]", "2"]
    assert "not one of" in heard(row)[2], "arguments are judged by their types"
    row = say(shop, row, written("buy", goods=["milk"], times=2), written("leave"), written("buy", goods=["gold"]))
    assert heard(row) == ["3", "null", "error: KeyError: 'gold'"]
    row = say(shop, row, written("leave"), written("buy", goods=["milk"]), written("buy", goods=["milk", "milk"]))
    assert heard(row)[1:] == ["error: ValueError: The shop is closed.", "3"], "each sample has a shop of its own"
    row = say(shop, row, *["Bye."] * 3)
    assert row["done"].all()
    terms = [each["reward_terms"] for each in row.unbind(0)]
    assert [term["earned"].item() for term in terms[:2]] == [1.0, 1.0]
    assert terms[2]["earned"].isnan(), "a function may not apply"
    assert row["reward"].flatten().tolist() == pytest.approx([1 + 3 / 5, 1 + 2 / 5, 3 / 5])
    assert [term["thrift"].item() for term in terms] == pytest.approx([3 / 5, 2 / 5, 3 / 5])
    infos = [json.loads(each["reward_info"]) for each in row.unbind(0)]
    assert [info["thrift/spent"] for info in infos] == [1, 3, 2], "a property is an attribute"
    assert [info["tool_errors"] for info in infos] == [0, 1, 2]


def test_what_is_no_json_or_private_is_not_there_and_says_so() -> None:
    env = TaskEnv(task_of([{"prompt": "?", "purse": 1}], "nosy"), TOKENIZER, max_steps=2, environment=f"{SHOP}:Shop")
    row = say(env, env.reset(), "Bye.")
    assert row["reward_error"].all()
    reason = json.loads(row[0]["reward_info"])["error"]
    assert "no JSON-serializable attribute 'handle'; it had: " in reason
    assert "s3cret" not in reason
    assert set(reason.partition("it had: ")[2].split(" (")[0].split(", ")) >= {"done", "reward", "purse", "spent"}
    env.close()


def test_the_environments_own_reward_may_be_async() -> None:
    env = TaskEnv(task_of([{"prompt": "?"}]), TOKENIZER, max_steps=3, environment=f"{SHOP}:ScoredShop")
    row = say(env, env.reset(), written("buy", goods=["tea", "milk"]))
    row = say(env, row, "Bye.")
    assert row["reward"].tolist() == [[2.5]]
    env.close()


def test_attributes_are_bounded_and_tools_without_an_environment_have_none(tmp_path: Path) -> None:
    (tmp_path / "hoard.py").write_text(
        "class Hoard:\n    def reset(self, **row):\n        self.a, self.b, self.c = 1, 'x' * 999, 3\n"
        "def now() -> int:\n    'The time.'\n    return 7\n"
    )
    for kind, name, expected in (("factory", "Hoard", {"a": 1}), ("functions", "now", None)):
        made = Instances(InstanceSpec(kind, str(tmp_path / "hoard.py"), (name,)), timeout_s=20.0, max_chars=99)
        key = made.open({}).result().key
        assert made.state(key).result() == expected
        assert made.finish(key).result() is None
        made.close()


def test_functions_that_ask_for_environments_need_one(tmp_path: Path) -> None:
    task = task_of([{"prompt": "?", "purse": 1}], "earned")
    (example,) = task.train
    assert "only with env.environment=FILE.py:FACTORY" in str(task.score("Bye.", example).error)
    record = {"environment": {"reward": 2.0, "done": True}, "messages": []}
    assert task.score(SampledText("Bye.", record=record), example).terms == {"earned": 2.0}
    dialogs = with_tools(task, has_reward=False, adds_task_terms=True)
    score = dialogs.score("Bye.", example)  # as the check before training asks
    assert (score.error, score.terms) == (None, {"earned": None})
    (tmp_path / "r.py").write_text("def f(environments, trainer_state): ...\n")
    with pytest.raises(RewardFunctionError, match="needs trainer_state"):
        with_reward_functions(task, str(tmp_path / "r.py"), ["f"])
