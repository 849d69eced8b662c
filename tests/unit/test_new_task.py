"""A task is known by its class: which options it reads, where its data are, whether it answers."""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.assembly.compose import anchor_paths, needs_consent
from sota_grpo.assembly.preflight import preflight
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import Config
from sota_grpo.config.validators import ConfigError, validate
from sota_grpo.errors import UserError
from sota_grpo.migration.export import model_card
from sota_grpo.rewards.grading import GradingPool
from sota_grpo.rl.task import scorer_of
from sota_grpo.tasks import task_class
from sota_grpo.training.runs import signature
from tests.config.test_config import composed
from tests.data_files import write_rows

SOURCE = """
from sota_grpo.rl.records import Example, Score
from sota_grpo.tasks.dataset import FileTask, text_of

class Rule:
    def __init__(self, gold): self.gold = gold

class Riddles(FileTask):
    name, question_columns, replies = "riddles", ("riddle",), True

    def __init__(self, train=(), heldout=(), *, system_prompt=None, correct=1.0):
        super().__init__(train, heldout, system_prompt=system_prompt)
        self.correct, self.rule = correct, Rule("It is {}.")

    def read_row(self, row, place):
        return Example(str(row.get("riddle", "")), text_of(row, "solution", place))

    def score(self, response, example):
        right = response == self.rule.gold.format(example.answer)
        return Score({"correct": self.correct * right}, success=right)

class Known(Riddles):
    hub_name = "example/riddles"

class Half:
    def score(self, response, example): ...
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "riddles.py").write_text(SOURCE)
    write_rows(tmp_path / "rows.jsonl", [{"riddle": f"No. {n}?", "solution": str(n)} for n in range(9)])
    return f"{tmp_path / 'riddles.py'}:Riddles"


def config_of(dataset: str, correct: float = 1.0, **env: Any) -> Config:
    config = composed("grpo_cpu")
    task = replace(config.env, **{"dataset": dataset, "max_steps": 3, **env})
    return replace(config, env=task, reward=replace(config.reward, correct=correct), seed=7)


def test_a_class_in_a_file_is_a_task_with_its_options_and_its_scores_come_from_a_grader(
    place: str, tmp_path: Path
) -> None:
    data = {"dataset_path": str(tmp_path / "rows.jsonl"), "num_heldout": 2}
    config = config_of(place, 2.0, system_prompt="Hi", **data)
    validate(config)
    assert task_of(config, bare=True).correct == 2.0
    task = task_of(config)
    assert (len(task.train), len(task.heldout), task.messages(task.train[0])[0]["content"]) == (7, 2, "Hi")
    assert copy.copy(task).rule is task.rule
    with closing(GradingPool(scorer_of(task), task.term_weights, num_workers=1, timeout_s=60)) as pool:
        (score,) = pool.scores([(f"It is {task.train[0].answer}.", task.train[0])]).result(120)
    assert score.terms == {"correct": 2.0}
    with pytest.raises(ConfigError, match=r"env.difficulty=2 has no effect on env.dataset=.*riddles.py:Riddles"):
        validate(config_of(place, difficulty=2, **data))
    config.env.mixture = {"own": {"dataset": place, "reward_correct": 3}, "sums": {"dataset": "arithmetic"}}
    config.env.dataset, config.reward.correct, config.env.max_steps = "gsm8k", 1.0, 1
    validate(config)
    assert task_of(config).tasks["own"].correct == 3


def test_an_option_of_other_tasks_names_those_that_read_it() -> None:
    with pytest.raises(ConfigError, match=r"answer_format=tags has no .*env.dataset=arithmetic.*\(gsm8k, math, "):
        validate(config_of("arithmetic", answer_format="tags", max_steps=1))
    with pytest.raises(ConfigError, match=r"choose another env.dataset \(math\)"):
        validate(config_of("gsm8k", 2.0, max_steps=1))


def test_its_data_are_named_by_its_class_and_without_a_hub_it_wants_a_place(place: str) -> None:
    config = config_of(place.replace("Riddles", "Known"))
    validate(config)
    assert "datasets: [example/riddles]" in model_card(config, 1, [])
    with pytest.raises(UserError, match=r"nowhere\.txt"):
        preflight(config_of(place, dataset_path="./nowhere.txt"))
    with pytest.raises(ConfigError, match=r"env\.dataset=.*Riddles has no data of its own"):
        validate(config_of(place))


def test_a_task_file_needs_consent_and_is_known_by_what_it_holds(place: str, tmp_path: Path, monkeypatch) -> None:
    config, mixed = config_of(place), config_of("arithmetic", mixture={"own": {"dataset": place}})
    assert needs_consent(config) == {"env.dataset": f"run {tmp_path / 'riddles.py'}"}
    assert [*needs_consent(mixed)] == ["env.mixture.own.dataset"]
    before = [signature(asdict(one)) for one in (config, mixed)]
    (tmp_path / "riddles.py").write_text(SOURCE.replace("It is", "It was"))
    assert all(one not in before for one in (signature(asdict(config)), signature(asdict(mixed))))
    assert task_class(place)().rule.gold == "It was {}."
    monkeypatch.chdir(tmp_path)
    (tmp_path / "countdown").mkdir()  # the name of a task, not of this folder
    named, own = config_of("countdown"), config_of("riddles.py:Riddles")
    for one in (named, own):
        anchor_paths(one)
    assert (named.env.dataset, own.env.dataset) == ("countdown", place)


@pytest.mark.usefixtures("place")
def test_a_wrong_file_or_class_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("\n1 / 0\n")
    for written, sentence in (
        ("none.py:Riddles", "there is no file .*none.py; correct env.dataset"),
        ("riddles.py:Missing", "riddles.py has no class 'Missing'; its classes are Rule, Riddles, Known, Half"),
        ("riddles.py:Half", "Half has no messages, gold_response, read_row; derive it from .*FileTask"),
        ("broken.py:Riddles", "broken.py, line 2: it cannot be imported .*ZeroDivisionError"),
    ):
        with pytest.raises(UserError, match=sentence):
            validate(config_of(str(tmp_path / written)))
        with pytest.raises(ConfigError, match=f"env.mixture.own: .*{sentence}"):
            validate(config_of("countdown", mixture={"own": {"dataset": str(tmp_path / written)}}))
