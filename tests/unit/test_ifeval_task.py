"""The task never trains on what it evaluates on, and says how each instruction fared."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_task
from sota_grpo.tasks.dataset import DatasetError
from sota_grpo.tasks.ifeval import IFEvalTask
from tests.unit.test_tasks import shared_data, write

RNG = random.Random(random.randrange(1 << 30))
ALL_KWARGS = ("num_words", "relation", "keywords", "end_phrase", "num_bullets")
ARGUMENTS = (
    *("N", "quantifier", "end_phrase", "keyword_list", "word", "forbidden_words", "letter", "i", "first_word"),
    *("postscript_marker", "options", "section_splitter", "original_prompt"),
)
UNUSED = dict.fromkeys(ARGUMENTS)  # a constraint names all arguments, null where it has no use for them


def ifeval_row(number: int) -> dict[str, Any]:
    kwargs = {"num_words": RNG.randint(0, 9), "relation": "at least"}
    padded = [dict.fromkeys(ALL_KWARGS), dict.fromkeys(ALL_KWARGS) | kwargs]
    ids = ["punctuation:no_comma", "length_constraints:number_words"]
    return {"key": number, "prompt": f"Prompt {number}, no commas.", "instruction_id_list": ids, "kwargs": padded}


def rlvr_row(number: int, **constraint: Any) -> dict[str, Any]:
    truth = {"func_name": "validate_word_constraint", **UNUSED, "N": 17, "quantifier": "at least", **constraint}
    messages = [{"role": "user", "content": f"Answer with at least 17 words. Question {number}?"}]
    return {"messages": messages, "ground_truth": json.dumps(truth), "dataset": "ifeval", "constraint_type": "Words"}


def of(*instructions: tuple[str, dict[str, Any]], **options: Any) -> tuple[IFEvalTask, Example]:
    ids, kwargs = zip(*instructions, strict=True)
    task = IFEvalTask(**options)
    return task, task.read_row({"instruction_id_list": list(ids), "kwargs": list(kwargs)}, "demo, row 1")


def test_terms_success_and_info_worked_out_by_hand() -> None:
    task, example = of(
        ("punctuation:no_comma", {}),
        ("startend:quotation", {}),
        ("length_constraints:number_words", {"relation": "less than", "num_words": 9}),
        ("detectable_format:title", {}),
        all_weight=0.5,
    )
    assert isinstance(task, Task)
    assert task.term_weights == {"instructions": 1.0, "all": 0.5}
    score = task.score('Here, you are:\n"It is it"', example)
    assert score.terms == {"instructions": 0.25, "all": 0.0}
    assert not score.success
    assert score.info == {
        "follow_instruction_list_strict": [False, False, True, False],
        "follow_instruction_list_loose": [True, True, True, False],
        "prompt_strict": 0.0,
        "prompt_loose": 0.0,
        "instruction_strict": 0.25,
        "instruction_loose": 0.75,
    }
    score = task.score('"<<It>> is it"', example)
    assert score.terms == {"instructions": 1.0, "all": 1.0}
    assert score.success
    assert json.loads(json.dumps(score.info)) == score.info
    assert task.score("", example).terms == {"instructions": 0.0, "all": 0.0}
    assert task.gold_response(example) is None


def test_thinking_and_answer_tags_are_not_graded() -> None:
    task, example = of(("punctuation:no_comma", {}))
    assert task.score("<think>Well, yes</think>\nYes", example).success
    assert task.score("Well, <answer>Yes</answer>", example).success
    assert not task.score("<think>Yes</think>\nWell, yes", example).success
    assert not task.score("<think>Yes", example).success


def test_prompts_of_the_evaluation_are_refused_with_their_number(tmp_path: Path) -> None:
    train, evaluation = [rlvr_row(number) for number in range(9)], [ifeval_row(number) for number in range(4)]
    paths = write(tmp_path / "train.jsonl", train), write(tmp_path / "eval.jsonl", evaluation)
    task = IFEvalTask.load(path=paths[0], eval_path=paths[1], num_heldout=10**6)
    assert (len(task.train), len(task.heldout)) == (9, 4)
    shared = [{**evaluation[i], "prompt": f" {evaluation[i]['prompt'].upper()}\n"} for i in (1, 3)]
    path = write(tmp_path / "shared.jsonl", [*train, *shared])
    with pytest.raises(DatasetError, match=r"2 of the 11 training prompts of .*shared.jsonl stand in .*eval.jsonl too"):
        IFEvalTask.load(path=path, eval_path=paths[1])
    with pytest.raises(DatasetError, match="4 of the 4 training prompts"):
        IFEvalTask.load(path=paths[1], eval_path=paths[1])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    tables = {
        "allenai/RLVR-IFeval": [rlvr_row(number) for number in range(40)],
        "google/IFEval": [ifeval_row(number) for number in range(7)],
    }
    monkeypatch.setattr("sota_grpo.tasks.dataset.load_rows", lambda name, path: tables[name])
    return tables


def test_the_hub_trains_on_rlvr_and_evaluates_on_ifeval(hub: dict[str, list[dict[str, Any]]]) -> None:
    task = make_task("ifeval", max_samples=30)
    assert [len(task.train), len(task.heldout)] == [30, 7]
    assert min(example.query for example in task.heldout) == "Prompt 0, no commas."
    hub["allenai/RLVR-IFeval"][5]["messages"][0]["content"] = "prompt 3,  no COMMAS."
    with pytest.raises(
        DatasetError, match="1 of the 40 training prompts of allenai/RLVR-IFeval stand in google/IFEval"
    ):
        make_task("ifeval")


@pytest.mark.parametrize("name", ["google/IFEval", "google/IFeval"])
def test_the_test_set_is_never_trained_on(name: str) -> None:
    with pytest.raises(DatasetError, match=rf"{name} is what IFEval is evaluated on.*train on allenai/RLVR-IFeval"):
        make_task("ifeval", path=name)


def test_a_few_broken_rows_of_the_hub_are_left_out_and_many_are_refused(
    hub: dict[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    rows = hub["allenai/RLVR-IFeval"]
    rows[3] = rows[3] | {"ground_truth": "{}"}
    with caplog.at_level(logging.WARNING):
        assert len(make_task("ifeval").train) == 39
    assert "1 of 40 rows of allenai/RLVR-IFeval are left out; the first: allenai/RLVR-IFeval, row 4" in caplog.text
    rows[4:6] = [row | {"ground_truth": "{}"} for row in rows[4:6]]
    with pytest.raises(DatasetError, match=r"3 of 40 rows of allenai/RLVR-IFeval cannot be used; the first: .*row 4"):
        make_task("ifeval")


def test_missing_punkt_data_are_told_only_where_they_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nltk.data

    monkeypatch.setattr(nltk.data, "path", [])
    rows = [ifeval_row(number) for number in range(5)]
    IFEvalTask.load(path=write(tmp_path / "rows.jsonl", rows), num_heldout=1)
    assert "Punkt" not in caplog.text
    rows[2]["instruction_id_list"][0] = "change_case:capital_word_frequency"
    rows[2]["kwargs"][0] |= {"capital_frequency": 0, "capital_relation": "at least"}
    IFEvalTask.load(path=write(tmp_path / "rows.jsonl", rows), num_heldout=1)
    assert "python -m nltk.downloader punkt_tab" in caplog.text


@pytest.mark.data
def test_all_541_prompts_of_the_benchmark_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    path, folder = shared_data("ifeval", "input_data.jsonl"), shared_data("nltk_data")
    task = IFEvalTask.load(path=str(path), num_heldout=41, nltk_data=str(folder))
    examples = [*task.train, *task.heldout]
    assert len(examples) == 541
    assert sum(len(example.extra["instruction_id_list"]) for example in examples) == 834
    assert not caplog.records


def test_a_grader_imports_its_libraries_before_its_first_response() -> None:
    """On a busy machine NLTK took longer to import than the deadline of the response that asked for it."""
    code = (
        "import sys; from sota_grpo.rewards.grading import RewardWorker; from sota_grpo.tasks import make_scorer;"
        "from sota_grpo.tasks.wrappers import think_again;"  # through what is wrapped around it, too
        "task = think_again(make_scorer('ifeval')); worker = RewardWorker(task.score, task.term_weights);"
        "print(sorted({'nltk', 'langdetect', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['langdetect', 'nltk']"
