"""A task is known by its class: which options it reads, where its data are, whether it answers."""

from __future__ import annotations

import copy
import sys
from contextlib import closing
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sota_grpo import tasks
from sota_grpo.assembly.compose import anchor_paths, needs_consent
from sota_grpo.assembly.preflight import preflight
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import Config
from sota_grpo.config.validators import ConfigError, validate
from sota_grpo.errors import UserError
from sota_grpo.migration.export import model_card
from sota_grpo.rewards.grading import GradingPool
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import chat, scorer_of
from sota_grpo.tasks import task_class
from sota_grpo.training.runs import signature
from tests.config.test_config import composed
from tests.data_files import write_rows


class ParityTask:
    name = "parity"
    hub_name = "somebody/parity"
    replies = True

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


@cache
def preset() -> Config:
    return composed("grpo_cpu")


def config_of(correct: float = 1.0, **env: Any) -> Config:
    config = preset()
    task = replace(config.env, **{"dataset": "parity", "max_steps": 3, **env})
    return replace(config, env=task, reward=replace(config.reward, correct=correct), seed=7)


def test_it_is_built_with_the_options_that_it_takes() -> None:
    config = config_of(2.0, max_samples=2, system_prompt="Hi")
    validate(config)
    task = task_of(config)
    assert (task.correct, task.system_prompt, task.seed, len(task.train)) == (2.0, "Hi", 7, 2)
    assert task_of(config, bare=True).correct == 2.0


def test_options_that_it_does_not_take_are_refused() -> None:
    for options, sentence in (
        ({"answer_format": "tags"}, r"env.answer_format=tags has no effect on env.dataset=parity.*\(gsm8k, math, "),
        ({"eval_path": "x.jsonl"}, "env.eval_path=x.jsonl has no effect on env.dataset=parity"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            validate(config_of(**options))
    validate(config_of(2.0, dataset="math", max_steps=1))
    with pytest.raises(ConfigError, match=r"choose another env.dataset \(math, parity\)"):
        validate(config_of(2.0, dataset="gsm8k", max_steps=1))


def test_its_data_are_named_by_its_class_and_without_a_hub_it_wants_a_place(monkeypatch) -> None:
    config = config_of()
    assert task_of(config).place == "somebody/parity"
    assert "datasets: [somebody/parity]" in model_card(config, 1, [])
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        preflight(config_of(dataset_path="./nowhere.txt"))
    monkeypatch.delattr(ParityTask, "hub_name")
    with pytest.raises(ConfigError, match=r"env\.dataset=parity has no data of its own"):
        validate(config_of())


SOURCE = """
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import FileTask, text_of

class Rule:
    def __init__(self, gold): self.gold = gold

class Riddles(FileTask):
    name, question_columns = "riddles", ("riddle",)

    def __init__(self, train=(), heldout=(), *, system_prompt=None, correct=1.0):
        super().__init__(train, heldout, system_prompt=system_prompt)
        self.correct, self.rule = correct, Rule("It is {}.")

    def read_row(self, row, place):
        return Example(str(row.get("riddle", "")), text_of(row, "solution", place))

    def score(self, response, example):
        right = response == self.rule.gold.format(example.answer)
        return Score({"correct": self.correct * right}, success=right)

class Half:
    def score(self, response, example): ...
"""


def riddles(folder: Path) -> str:
    (folder / "riddles.py").write_text(SOURCE)
    rows = [{"riddle": f"No. {number}?", "solution": str(number)} for number in range(9)]
    write_rows(folder / "rows.jsonl", rows)
    return f"{folder / 'riddles.py'}:Riddles"


def test_a_class_in_a_file_is_a_task_with_its_options_and_its_scores_come_from_a_grader(tmp_path: Path) -> None:
    place = riddles(tmp_path)
    data = {"dataset": place, "max_steps": 1, "dataset_path": str(tmp_path / "rows.jsonl"), "num_heldout": 2}
    config = config_of(2.0, system_prompt="Hi", **data)
    validate(config)
    task = task_of(config)
    assert (len(task.train), len(task.heldout), task.messages(task.train[0])[0]["content"]) == (7, 2, "Hi")
    assert copy.copy(task).rule is task.rule
    with closing(GradingPool(scorer_of(task), task.term_weights, num_workers=1, timeout_s=60)) as pool:
        (score,) = pool.scores([(f"It is {task.train[0].answer}.", task.train[0])]).result(120)
    assert score.terms == {"correct": 2.0}
    with pytest.raises(ConfigError, match=r"env.difficulty=2 has no effect on env.dataset=.*riddles.py:Riddles"):
        validate(config_of(difficulty=2, **data))
    config.env.mixture = {"own": {"dataset": place, "reward_correct": 3}, "sums": {"dataset": "arithmetic"}}
    config.env.dataset, config.reward.correct = "gsm8k", 1.0
    validate(config)
    assert task_of(config).tasks["own"].correct == 3


def test_a_task_file_needs_consent_and_is_known_by_what_it_holds(tmp_path: Path, monkeypatch) -> None:
    place = riddles(tmp_path)
    config = config_of(dataset=place)
    assert needs_consent(config) == {"env.dataset": f"run {tmp_path / 'riddles.py'}"}
    mixed = config_of()
    mixed.env.mixture = {"own": {"dataset": place}}
    assert [*needs_consent(mixed)] == ["env.mixture.own.dataset"]
    before = [signature(asdict(one)) for one in (config, mixed)]
    (tmp_path / "riddles.py").write_text(SOURCE.replace("It is", "It was"))
    assert all(one not in before for one in (signature(asdict(config)), signature(asdict(mixed))))
    assert task_class(place)().rule.gold == "It was {}."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parity").mkdir()  # the name of a task, not of this folder
    named, own = config_of(), config_of(dataset="riddles.py:Riddles")
    for one in (named, own):
        anchor_paths(one)
    assert (named.env.dataset, own.env.dataset) == ("parity", place)


def test_a_wrong_file_or_class_is_one_sentence(tmp_path: Path) -> None:
    riddles(tmp_path)
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    for written, sentence in (
        ("none.py:Riddles", "there is no file .*none.py; correct env.dataset"),
        ("riddles.py:Missing", "riddles.py has no class 'Missing'; its classes are Rule, Riddles, Half"),
        ("riddles.py:Half", "Half has no messages, gold_response, read_row; derive it from .*FileTask"),
        ("broken.py:Riddles", "broken.py, line 2: it cannot be imported .*ZeroDivisionError"),
    ):
        with pytest.raises(UserError, match=sentence):
            validate(config_of(dataset=str(tmp_path / written)))
        with pytest.raises(ConfigError, match=f"env.mixture.own: .*{sentence}"):
            validate(config_of(mixture={"own": {"dataset": str(tmp_path / written)}}))
