"""What holds for every task: nothing is trained on and held out, no order matters, scorers travel without examples."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.assembly.compose import compose
from sota_grpo.assembly.sampling import heldout_task, task_of
from sota_grpo.errors import UserError
from sota_grpo.rl.records import Example
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks import TASKS, make_task, task_class
from sota_grpo.tasks.dataset import DatasetError, normalised
from sota_grpo.tasks.procedural import HELDOUT_SHARE, is_heldout
from tests.data_files import write_rows

SEED = random.randrange(1 << 30)
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {  # a row of a task's data, of question {number}
    "gsm8k": lambda number: {"question": f"No. {number}?", "answer": f"so\n#### {number}"},
    "math": lambda number: {"problem": f"No. {number}?", "solution": f"so \\boxed{{\\frac{{{number}}}{{7}}}}"},
    "reasoning": lambda number: {"prompt": f"No. {number}?", "ground_truth": number},
    "table": lambda number: {"prompt": f"No. {number}?", "ground_truth": number},
    "ifeval": lambda number: {"prompt": f"No. {number}?", **NO_COMMA},
}
QUESTIONS = ("question", "problem", "prompt")
FORMATS = ["gsm8k", "math", "reasoning", "table"]


def rows_of(name: str, numbers: Iterable[int]) -> list[dict[str, Any]]:
    return [ROWS[name](number) for number in numbers]


def questions(examples: Any) -> list[str]:
    return [normalised(example.query) for example in examples]


def shouted(row: dict[str, Any]) -> dict[str, Any]:
    """The same question in other letter case and spacing."""
    return {name: f"  {value.upper()}\n " if name in QUESTIONS else value for name, value in row.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_file_is_split_whole_each_question_once_whatever_its_order(tmp_path: Path, name: str) -> None:
    rows = rows_of(name, range(40))
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = make_task(name, path=path, num_heldout=15)
    heldout = set(questions(task.heldout))
    assert len(heldout) == len(task.heldout) == 15
    assert questions(task.train) == [f"no. {i}?" for i in range(40) if f"no. {i}?" not in heldout], "the file's order"
    mixed = write_rows(tmp_path / "mixed.jsonl", random.sample([*rows, *map(shouted, rows)], 80))
    again = make_task(name, path=mixed, num_heldout=15, max_samples=10)
    assert set(questions(again.heldout)) == heldout
    assert len(set(questions(again.train))) == len(again.train) == 10
    assert not heldout & set(questions(again.train))
    with pytest.raises(DatasetError, match=r"40 different questions.*holding out 512 .*num_heldout=4, other problems"):
        make_task(name, path=path, num_heldout=512)
    assert len(make_task(name, path=path).heldout) == 4, "a tenth"


def test_what_is_measured_first_is_a_sample_of_a_sorted_file(tmp_path: Path) -> None:
    """By a hash that no order of the rows and no seed of a run changes; 20 of 200 are expected of each level."""
    rows = [{"prompt": f"No. {index}?", "ground_truth": "1", "level": index // 100} for index in range(1000)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    task = make_task("table", path=write_rows(tmp_path / "train.jsonl", rows_of("table", [5000])), eval_path=path)
    first = task.heldout[:200]
    levels = Counter(example.extra["columns"]["level"] for example in first)
    assert sorted(levels) == list(range(10))
    assert 10 <= min(levels.values()) <= max(levels.values()) <= 35, levels
    mixed = write_rows(tmp_path / "mixed.jsonl", random.sample(rows, 1000))
    config = compose("grpo_cpu", ["env.dataset=table", f"env.eval_path={mixed}", "seed=5"])
    assert questions(heldout_task(config).heldout[:200]) == questions(first)
    config.env.eval_path, config.env.dataset_path = None, mixed
    assert len(task_of(config).heldout) == 100
    config.env.dataset_path = write_rows(tmp_path / "many.jsonl", rows_of("table", range(6000)))
    assert len(task_of(config).heldout) == 512, "the most that are held out of a file"


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_held_out_problems_takes_the_place_of_a_split(tmp_path: Path, name: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows_of(name, range(20)))
    held = [*map(shouted, rows_of(name, range(2, 5))), ROWS[name](40), ROWS[name](40)]
    task = make_task(name, path=path, eval_path=write_rows(tmp_path / "held.jsonl", held), max_samples=9)
    assert sorted(questions(task.heldout)) == ["no. 2?", "no. 3?", "no. 40?", "no. 4?"]
    assert questions(task.train) == [f"no. {i}?" for i in (0, 1, *range(5, 12))]
    with pytest.raises(DatasetError, match=r"every question of .*rows\.jsonl is in the held-out split"):
        make_task(name, path=path, eval_path=path)


@pytest.mark.parametrize("name", ["gsm8k", "math", "reasoning"])
def test_the_hubs_test_split_is_held_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"train": rows_of(name, range(10)), "test": rows_of(name, range(8, 12))}
    requests = []

    def load(source: str, wanted: Sequence[str] = ("train",), config: str | None = None) -> list:
        requests.append((source, wanted[0], config))
        return splits[wanted[0]]

    monkeypatch.setattr("sota_grpo.tasks.dataset.load_rows", load)
    kind = task_class(name)
    for options in ({}, {"eval_path": "mine.jsonl"}):
        task = make_task(name, **options)
        assert questions(task.train) == [f"no. {i}?" for i in range(8)]
        assert set(questions(task.heldout)) == {f"no. {i}?" for i in range(8, 12)}
    assert requests[:2] == [(kind.hub_name, "train", kind.hub_config), (kind.hub_name, "test", kind.hub_config)]
    assert requests[3][0] == "mine.jsonl"


@pytest.mark.parametrize("name", sorted({*TASKS} - {"code"}))  # which may have no sandbox here: test_code.py
def test_a_scorer_and_a_task_travel_and_a_system_prompt_is_what_one_says(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_train": 1 << 40}
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
        options |= {"tasks": {"chain_sum": 1}}
    if name in ROWS:
        options = {"path": write_rows(tmp_path / "rows.jsonl", rows_of(name, range(200))), "num_heldout": 1}
    task = make_task(name, **options)
    example = task.train[5]
    assert isinstance(task, Task)
    assert pickle.loads(pickle.dumps(task)).train[5] == example
    sent = pickle.dumps(scorer_of(task))
    assert len(sent) < 1000, "without the examples"
    for response in ("", task.gold_response(example) or "so it is"):
        assert pickle.loads(sent)(response, example) == task.score(response, example)
        assert set(task.score(response, example).terms) == set(task.term_weights)
    if name != "arithmetic":  # which keeps its sequences short
        user = {"role": "user", "content": example.query}
        assert make_task(name, **options, system_prompt="").messages(example) == [user]
        system = {"role": "system", "content": "Be exact."}
        assert make_task(name, **options, system_prompt="Be exact.").messages(example) == [system, user]
    assert task.messages(example)[-1] == {"role": "user", "content": example.query}


def problem_of(example: Example) -> str:
    """Without names, items and order, which are decoration."""
    numbers = example.extra["numbers"]
    ordered = sorted(numbers.items() if isinstance(numbers, dict) else numbers)
    return f"{example.extra.get('template')} {example.extra.get('target')} {ordered}"


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_problems_that_are_made_up_are_on_one_side_whatever_the_seed(name: str) -> None:
    tasks = [make_task(name, seed=seed, num_train=1000, num_heldout=200) for seed in (SEED, SEED + 1)]
    trained = set(map(problem_of, tasks[0].train))
    held = {problem_of(example) for task in tasks for example in task.heldout}
    assert len(held) > 100
    assert not trained & held


def test_a_share_of_the_problems_is_held_out() -> None:
    share = sum(is_heldout(((a, b), t)) for a in range(40) for b in range(40) for t in (10, 20)) / 3200
    assert share == pytest.approx(1 / HELDOUT_SHARE, abs=0.03)


@pytest.mark.parametrize("name", ["arithmetic", "countdown", "instructions", "reasoning_gym"])
def test_a_made_up_problem_depends_on_the_seed_and_its_place_alone(name: str) -> None:
    options = {"tasks": {"gcd": 1, "chain_sum": 2}} if name == "reasoning_gym" else {}
    short, long = (make_task(name, seed=SEED, num_train=num, num_heldout=30, **options) for num in (20, 1 << 40))
    order = random.sample(range(20), 20)
    sent = pickle.loads(pickle.dumps(long))
    assert [sent.train[place] for place in order] == [short.train[place] for place in order]
    assert short.train[:] == long.train[:20]
    assert short.train[-1] == short.train[19]
    assert list(short.heldout) == sent.heldout[:]
    assert short.train[:] != make_task(name, seed=SEED + 1, num_train=20, **options).train[:]
    with pytest.raises(IndexError, match="20 problems"):
        short.train[20]
    none = make_task(name, num_train=3, num_heldout=0, **options)
    assert (len(none.train), [*none.heldout], none.heldout[:5]) == (3, [], [])
    for size, value in (("num_heldout", -1), ("num_train", 0)):
        with pytest.raises(ValueError, match=f"{size}={value} must be at least {value + 1}"):
            make_task(name, **{size: value}, **options)


CHAT, SYSTEM = {"role": "user", "content": "2+2?"}, {"role": "system", "content": "Be brief."}
IMAGE, SAID = {"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "So"}
GOOD, UNTESTED = {"prompt": "?", "ground_truth": "2"}, ("x = 1", "def test():\n    assert f() == 1", "f(1) == 2")
VERL = {"data_source": "openai/gsm8k", "prompt": "?"}
NAN, HALF = float("nan"), "\ud83d"  # which UTF-8 lacks
GSM8K = "the gold answer must be one number, or end in"
BAD_ROWS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gsm8k": [
        ({"question": "?", "answer": end}, GSM8K) for end in ("1 and 8", "#### ", "#### eighteen", "#### 1 or 2")
    ],
    "math": [
        ({"question": "?"}, "no column 'ground_truth' or .* columns found are 'question'"),
        ({"question": "?", "ground_truth": ["1"]}, "column 'ground_truth' holds list, not text"),
        ({"question": "?", "ground_truth": "x" * 1001}, r"the gold answer .* \(1001 characters\) cannot"),
        ({"problem": "?", "solution": "It is 5."}, r"the solution has no \\boxed{answer} \(it ends in"),
        ({"ground_truth": "1"}, "no column 'question' or 'problem' or 'prompt' has a value"),
        ({"question": "?", "ground_truth": " "}, r"the gold answer '' \(0 characters\) cannot be compared"),
    ],
    "reasoning": [
        ({"answer": "2"}, "no column 'question' or 'prompt' has a value; the columns found are 'answer'"),
        ({"question": "?"}, "no column 'answer' or 'ground_truth' or 'completion' has .* 'question'"),
        ({"question": "?", "answer": "so\n#### "}, r"answer is empty \(it ends in 'so\\n#### '\)"),
        ({"question": " ", "answer": "2"}, "the question is empty"),
        ({"question": "?", "answer": "the </answer> tag"}, "the gold answer .* contains a think"),
        ({"question": "?", "answer": True}, "column 'answer' holds bool, not text"),
        ({"prompt": [{"role": "user"}], "answer": "2"}, "'prompt' holds list.*env.dataset=table"),
    ],
    "table": [
        ({"question": "?", "ground_truth": "2"}, "column 'prompt' holds no prompt; .* 'question'"),
        *(({**GOOD, "prompt": prompt}, "column 'prompt' holds no prompt") for prompt in (NAN, " \n")),
        ({**GOOD, "ground_truth": NAN}, "column 'ground_truth' holds no ground truth"),
        ({**VERL, "reward_model": {"style": "rule", "ground_truth": NAN}}, "no ground truth"),
        ({**VERL, "reward_model": {"style": "rule", "ground_truth": "two"}}, GSM8K),
        ({**GOOD, "ground_truth": ["2", NAN]}, "the ground truth is a list: .* reward.path"),
        ({**GOOD, "ground_truth": {"a": 1}}, 'ground truth is a dict: {"a": 1}, which only .*; set reward.path'),
        ({**GOOD, "chat_template_kwargs": {"enable_thinking": False}}, "set env.chat_template_kwargs"),
        ({**GOOD, "prompt": 3}, "column 'prompt' is neither text nor a chat"),
        ({**GOOD, "prompt": [{"role": "user"}]}, "turn 1: 'content' is missing; role and content must be text"),
        ({**GOOD, "prompt": [CHAT, IMAGE]}, "turn 2: 'content' holds list"),
        ({**GOOD, "prompt": [SYSTEM]}, "a chat must have a user turn"),
        ({**GOOD, "prompt": [CHAT, SAID]}, "not end in an assistant turn"),
        ({"prompt": "?", "solution": "2"}, r"'ground_truth' holds no .*'solution': set env.answer_column"),
        ({"prompt": "?", "answer": "#### 2"}, "column 'ground_truth' holds no ground truth"),
    ],
    "countdown": [
        *(({"nums": nums, "target": 3}, "nums must be") for nums in (None, "1, 2", [1, "2"], [1], [1, True])),
        *(({"nums": [1, 2], "target": target}, "nums must be") for target in (None, 3.0)),
    ],
    "reasoning_gym": [
        ({"answer": "4", "metadata": "text"}, "metadata.source_dataset is missing"),
        ({"answer": 4, "metadata": {"source_dataset": "gcd"}}, "'answer' holds int"),
        ({"answer": "4", "metadata": {"source_dataset": "bitwise_arithmetic", "problem": "1"}}, "is refused"),
        ({"answer": "4", "metadata": {"source_dataset": "gdc"}}, "did you mean gcd"),
    ],
    "code": [
        *(({"tests": text}, "") for text in (None, "", "# nothing", "assert (", 7, *UNTESTED)),
        ({"tests": f"assert f() == '{HALF}'"}, "surrogate"),
        *(({"tests": []}, "at least one"), ({"tests": [7]}, ""), ({"tests": ["x = 1", {}]}, "")),
        *(({"tests": [pair]}, "") for pair in ({"stdin": "1"}, {"stdout": HALF}, {"stdin": HALF, "stdout": "1"})),
    ],
}


@pytest.mark.parametrize(("name", "row", "sentence"), [(name, *bad) for name in BAD_ROWS for bad in BAD_ROWS[name]])
def test_a_row_that_cannot_be_used_is_named(name: str, row: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    task = task_class(name)(**({"sandbox": "http://127.0.0.1:9"} if name == "code" else {}))
    read = partial(task.read_row, row, "rows.jsonl, row 2")
    if name in ROWS:
        read = partial(task.load, path=write_rows(tmp_path / "rows.jsonl", [ROWS[name](1), row]))
    with pytest.raises(DatasetError, match=rf"rows\.jsonl, row 2: .*{sentence}"):
        read()


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        *((name, {"answer_format": "latex"}, "'latex' is not one of tags, boxed") for name in FORMATS),
        *((name, {"format_weight": -0.1}, r"format_weight=-0\.1 must not") for name in ("gsm8k", "math", "reasoning")),
        *(("math", {name: value}, r"reward.correct=1.0 must be greater") for name in ("wrong", "no_answer")
          for value in (1.0, 1.5, float("nan"))),
        *(("arithmetic", {"max_steps": steps}, f"max_steps={steps}") for steps in (0, 6)),
        ("countdown", {"format_weight": -0.1}, r"format_weight=-0\.1"),
        ("ifeval", {"all_weight": -1.0}, "must not be negative"),
        ("table", {"path": "no.csv"}, "there is no file no.csv"),
        ("gsm", {}, "task 'gsm' is not one of gsm8k, math"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, Any], sentence: str) -> None:
    required = {"path": "nothing.jsonl"} if name == "table" else {}
    with pytest.raises((ValueError, UserError), match=sentence):
        make_task(name, **{**required, **options})  # before anything is loaded
