"""A task is known by its class: which options it reads, where its data are, whether it answers."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from sota_grpo import tasks
from sota_grpo.assembly.preflight import preflight
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config.validators import ConfigError, validate
from sota_grpo.errors import UserError
from sota_grpo.migration.export import model_card
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import chat
from tests.config.test_config import composed


class ParityTask:
    name = "parity"
    hub_name = "somebody/parity"
    calls_tools = replies = True

    def __init__(self, train=(), heldout=(), *, system_prompt="Even or odd?", correct=1.0):
        self.term_weights = {"correct": 1.0}
        self.train, self.heldout, self.system_prompt, self.correct = train, heldout, system_prompt, correct

    @classmethod
    def load(cls, *, path=None, seed=0, max_samples=None, **options):
        task = cls(**options)
        task.place, task.seed = path or cls.hub_name, seed
        task.train = [Example(str(number), "odd") for number in (1, 3, 5)][:max_samples]
        return task

    def messages(self, example):
        return chat(self.system_prompt, example.query)

    def score(self, response, example):
        return Score({"correct": float(example.answer in response)}, success=example.answer in response)


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sota_grpo.tasks.parity")
    module.ParityTask = ParityTask
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(tasks.TASKS._own, "parity", "sota_grpo.tasks.parity:ParityTask")


def config_of(*overrides: str):
    return composed("grpo_cpu", "env.dataset=parity", "env.max_steps=3", *overrides)


def test_it_is_built_with_the_options_that_it_takes() -> None:
    config = config_of("reward.correct=2", "env.max_samples=2", "seed=7", "env.system_prompt=Hi")
    validate(config)
    task = task_of(config)
    assert (task.correct, task.system_prompt, task.seed, len(task.train)) == (2.0, "Hi", 7, 2)
    assert task_of(config, bare=True).correct == 2.0


def test_options_that_it_does_not_take_are_refused() -> None:
    for overrides, sentence in (
        (["env.answer_format=tags"], r"env.answer_format=tags has no effect on env.dataset=parity.*\(gsm8k, math, "),
        (["env.eval_path=x.jsonl"], "env.eval_path=x.jsonl has no effect on env.dataset=parity"),
        (["env.max_steps=1"], "env.dataset=parity offers a tool"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            validate(config_of(*overrides))
    validate(config_of("env.dataset=math", "env.max_steps=1", "reward.correct=2"))
    with pytest.raises(ConfigError, match=r"choose another env.dataset \(math, parity\)"):
        validate(config_of("env.dataset=gsm8k", "env.max_steps=1", "reward.correct=2"))


def test_its_data_are_told_by_its_class() -> None:
    config = config_of()
    assert task_of(config).place == "somebody/parity"
    assert "datasets: [somebody/parity]" in model_card(config, 1, [])
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        preflight(config_of("env.dataset_path=./nowhere.txt"))


def test_a_task_without_a_hub_wants_a_place(monkeypatch) -> None:
    monkeypatch.delattr(ParityTask, "hub_name")
    with pytest.raises(ConfigError, match=r"env\.dataset=parity is your own data"):
        validate(config_of())
