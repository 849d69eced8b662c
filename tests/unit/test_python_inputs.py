"""Rows and functions as arguments: what a run makes of them, and what it says to those that it cannot use."""

from __future__ import annotations

import datetime
import functools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import sota_grpo
from sota_grpo.assembly.compose import load_config
from sota_grpo.assembly.python_inputs import PythonInputs, take
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import Config
from sota_grpo.config.spelling import with_options
from sota_grpo.errors import UserError
from sota_grpo.rewards.functions import PASSED, RewardFunctionError, fingerprint, pickled, unpickled
from sota_grpo.rewards.grading import grading_pool
from sota_grpo.rl.custom_objectives import surrogate
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions
from tests.unit.test_api import ROWS as CHAT_ROWS
from tests.unit.test_api import SMALL

ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(40)]


def right(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def brief(completions: list[str], **columns: Any) -> list[float]:
    return [1.0 / (1 + len(text)) for text in completions]


def taken(*overrides: str, **objects: Any) -> tuple[Config, PythonInputs]:
    config = Config()
    return config, take(config, overrides, **objects)


def lines(inputs: PythonInputs, name: str) -> list[dict]:
    content = inputs.inputs[name].files[f"{name}.jsonl"]
    assert content is not None
    return [json.loads(line) for line in content.splitlines()]


def as_dataset() -> Any:
    import datasets

    return datasets.Dataset.from_list(ROWS)


def test_every_table_gives_the_same_rows() -> None:
    import pandas

    for table in (ROWS, iter(ROWS), as_dataset(), pandas.DataFrame(ROWS)):
        config, passed = taken(dataset=table, eval_dataset=ROWS[:3])
        assert (lines(passed, "train"), lines(passed, "eval")) == (ROWS, ROWS[:3])
        assert (config.env.dataset, config.env.dataset_path) == ("table", PASSED)
    overridden = Config()
    overridden.env.dataset = "gsm8k"  # as an override has it
    take(overridden, ["env.dataset=gsm8k"], dataset=ROWS)
    assert overridden.env.dataset == "gsm8k"


def test_columns_keep_their_types_as_far_as_json_has_them_and_a_missing_value_of_pandas_is_none() -> None:
    import pandas

    row = {"prompt": "?", "n": numpy.int64(3), "x": numpy.arange(2), "day": datetime.date(2026, 11, 2), "none": None}
    _, passed = taken(dataset=[row])
    assert lines(passed, "train") == [{"prompt": "?", "n": 3, "x": [0, 1], "day": "2026-11-02", "none": None}]
    table = {"prompt": ["a", None], "ground_truth": [1.0, None], "day": [None, pandas.Timestamp("2026-11-02")]}
    frame = pandas.DataFrame(table).astype({"ground_truth": "Float64"})
    _, passed = taken(dataset=frame)
    assert lines(passed, "train") == [
        {"prompt": "a", "ground_truth": 1.0, "day": None},
        {"prompt": None, "ground_truth": None, "day": "2026-11-02T00:00:00"},
    ]


@pytest.mark.parametrize(
    ("reward", "name", "functions"),
    [
        (right, "right", ["right"]),
        ([right, brief], ["right", "brief"], ["right", "brief"]),
        (["builtin", brief], ["builtin", "brief"], ["brief"]),
        ({"accuracy": right, "short": brief}, ["accuracy", "short"], ["accuracy", "short"]),
        (lambda solution_str: 1.0, "reward", ["reward"]),
        (functools.partial(right, ground_truth="4"), "right", ["right"]),
    ],
)
def test_functions_are_named_as_their_reward_terms(reward: Any, name: Any, functions: list[str]) -> None:
    config, passed = taken(reward=reward)
    assert (config.reward.path, config.reward.name) == (PASSED, name)
    assert list(passed.functions or {}) == functions


@pytest.mark.parametrize(
    ("objects", "sentence"),
    [
        ({"dataset": {"train": ROWS, "test": ROWS}}, r"is a dict with 'train', 'test'; give .*=splits\['train'\]"),
        ({"dataset": 3}, "dataset is a int; give a datasets.Dataset, a list of dicts"),
        ({"dataset": []}, "dataset has no rows"),
        ({"dataset": [ROWS[0], "2 + 2?"]}, "dataset, row 2 is a str, not a dict of its columns"),
        ({"dataset": [{"prompt": "?", "image": b"PNG"}]}, "dataset, row 1: column 'image' holds bytes"),
        ({"reward": "reward.py"}, r"reward: 'reward.py' is not a function; .*reward\.path=FILE"),
        ({"reward": []}, r"reward=\[\] has no function"),
        ({"reward": [right, right]}, r"names \['right', 'right'\] are not distinct; name the functions with a dict"),
        ({"reward": {"a b": right}}, "'a b' cannot be logged"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(objects: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        taken(**objects)


def test_an_object_and_an_option_for_the_same_contradict_each_other() -> None:
    for option, objects in (
        ("env.dataset_path", {"dataset": ROWS}),
        ("env.eval_path", {"eval_dataset": ROWS}),
        ("reward.path", {"reward": right}),
        ("reward.name", {"reward": right}),
    ):
        with pytest.raises(UserError, match=f"{option}=other is set too"):
            take(with_options(Config(), {option: "other"}), [], **objects)


def test_a_run_is_known_by_the_objects() -> None:
    def signature(**objects: Any) -> dict:
        return taken(**objects)[1].signature

    assert signature() == {}
    assert signature(dataset=ROWS) == signature(dataset=as_dataset())
    actual = [
        signature(dataset=ROWS),
        signature(dataset=ROWS[1:]),
        signature(dataset=ROWS, eval_dataset=ROWS[:1]),
        signature(dataset=ROWS, reward=right),
        signature(dataset=ROWS, reward={"other": right}),
    ]
    assert all(one != other for index, one in enumerate(actual) for other in actual[index + 1 :])


def test_the_files_make_the_task_that_the_objects_make(tmp_path: Path) -> None:
    """What reads the config of the run later has the same examples and the same rewards."""
    config, passed = taken(dataset=ROWS, reward=[right, brief])
    passed.write(tmp_path, config)
    assert passed.run_dir == tmp_path
    first, later = task_of(config, passed.functions), task_of(config)
    assert list(first.train) == list(later.train)
    assert (len(first.train), len(first.heldout)) == (36, 4)
    example = first.train[0]
    score = first.score(example.answer, example)
    assert score == later.score(example.answer, example)
    assert score.terms["right"] == 1.0


def test_what_cannot_be_sent_is_graded_in_this_process_if_configured(tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(solution_str: str) -> float:
        with lock:
            return 1.0

    with pytest.raises(UserError, match=r"locked cannot be sent .*env\.reward_workers=0"):
        taken(reward=locked)
    config = Config()
    config.env.reward_workers = 0
    passed = take(config, ["env.reward_workers=0"], dataset=ROWS, reward=locked)
    passed.write(tmp_path, config)
    task = task_of(config, passed.functions)
    assert task.score("4", task.train[0]).terms == {"locked": 1.0}
    with pytest.raises(UserError, match=r"with env.reward_workers=0 those that cannot be pickled are not saved"):
        task_of(config)


ROOT = Path(__file__).resolve().parents[2]
TASK = TableTask([TableTask().read_row({"prompt": "2 + 2?", "answer": "4", "level": 3}, "row 1")])
EXAMPLE = TASK.train[0]
CODE = """
BONUS = 2
class Base:
    longest = 99
class Rule(Base):
    def __init__(self, least): self.least = least
    def allows(self, text): return self.size(text) >= self.least
    @staticmethod
    def size(text): return len(text)
RULE = Rule(3)
upper = str.upper  # has no module
def helper(text): return [BONUS for _ in upper(text) if RULE.allows(text)]
def make(weight):
    def f(solution_str, scale=1.0):
        return weight * scale * len(helper(solution_str))
    return f
f = make(0.5)
"""


def compiled(text: str) -> Callable[..., Any]:
    """The ``f`` of a program, as a notebook would hold it."""
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(text, program)
    return program["f"]


def passed_to(folder: Path, functions: dict[str, Callable[..., Any]], **options: Any) -> Task:
    path = folder / "reward.pkl"
    path.write_bytes(pickled(functions))
    return with_reward_functions(TASK, str(path), list(functions), functions=functions, **options)


def test_equal_code_is_one_function_and_anything_it_reads_makes_another() -> None:
    same = fingerprint({"f": compiled(CODE)})
    assert fingerprint({"f": compiled("# a note\n\n" + CODE.replace("): return", "):\n        return"))}) == same
    changes = [
        ("weight * scale", "weight + scale"),  # code
        ("scale=1.0", "scale=2.0"),  # a default
        ("make(0.5)", "make(0.25)"),  # the closure
        ("BONUS = 2", "BONUS = 3"),  # a global that only a comprehension in a helper reads
        (">= self.least", "> self.least"),  # a method of an object that the helper reads
        ("Rule(3)", "Rule(4)"),  # the state of that object
        ("return len(text)", "return 1 + len(text)"),  # a static method
        ("longest = 99", "longest = 98"),  # an attribute of the base class
    ]
    others = [fingerprint({"f": compiled(CODE.replace(old, new))}) for old, new in changes]
    assert len({same, *others}) == 1 + len(changes)
    assert fingerprint({"g": compiled(CODE)}) != same


def test_a_function_has_the_same_fingerprint_in_every_process() -> None:
    """Hashing is random by process; a set among the constants must not show it."""
    text = "def f(solution_str):\n    return solution_str in {'yes', 'no', 'perhaps', 'never'}\n"
    program = f"exec({text!r})\nfrom sota_grpo.rewards.functions import fingerprint\nprint(fingerprint({{'f': f}}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == fingerprint({"f": compiled(text)}) + "\n"


def test_a_function_of_the_main_program_grades_in_another_process(tmp_path: Path) -> None:
    """It travels with the helper and the constant that it reads, not by a name that the grader does not have."""
    text = "from os import getpid as PID\nBONUS = 0.25\ndef helper(n): return n + BONUS\n"
    verl = "def f(solution_str, ground_truth): return {'score': helper(solution_str == ground_truth), 'pid': PID()}"
    trl = "def f(completions, level, **columns): return [helper(one) for one in level]"
    functions = {"verl": compiled(text + verl), "trl": compiled(text + trl)}
    task = passed_to(tmp_path, functions, weights=[1.0, 2.0])
    here = scorer_of(task)("4", EXAMPLE)
    with grading_pool(task, num_workers=1, timeout_s=30) as pool:
        (there,) = pool.scores([("4", EXAMPLE)]).result(60)
    assert there.error is None
    assert there.terms == here.terms == {"verl": 1.25, "trl": 3.25}
    assert there.info["verl/pid"] != here.info["verl/pid"]


def test_what_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "reward.pkl").write_bytes(b"cno_such_module_anywhere\nf\n.")
    with pytest.raises(RewardFunctionError, match=r"cannot be loaded here \(ModuleNotFoundError"):
        unpickled(tmp_path / "reward.pkl")


def test_an_error_names_the_line_of_the_code(tmp_path: Path) -> None:
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n\ndef f(solution_str):\n    return 1 / 0\n", "cell-7.py", "exec"), program)
    score = scorer_of(passed_to(tmp_path, {"f": program["f"]}))("4", EXAMPLE)
    assert score.error == "ZeroDivisionError: division by zero (cell-7.py, line 4)"


FEW = ["engine=transformers", "train.total_dialog_turns=16", "env.reward_workers=0"]


def objective_of(scale: float) -> Any:
    """A function that travels as code, with what it holds."""

    def scaled(log_ratio: torch.Tensor, advantage: torch.Tensor, dual_clip: float | None = None) -> torch.Tensor:
        return -scale * advantage * log_ratio.exp()

    return scaled


def trained(run_dir: Path, scale: float, *overrides: str) -> sota_grpo.Result:
    objects = {"objective": objective_of(scale), "dataset": CHAT_ROWS}
    objects["reward"] = lambda completions, **_: [float(len(text) % 7) for text in completions]
    return sota_grpo.train("grpo_cpu", **objects, overrides=[*SMALL, *FEW, *overrides], run_dir=run_dir)


def slopes(result: sota_grpo.Result) -> list[float]:
    return result.metrics["grad_norm"].tolist()


def test_it_trains_is_kept_and_continues_under_the_same_function_only(tmp_path: Path) -> None:
    once = "train.total_dialog_turns=8"
    one, two = trained(tmp_path / "one", 1.0), trained(tmp_path / "two", 3.0, once)
    assert slopes(two)[0] == pytest.approx(3 * slopes(one)[0], rel=1e-3)
    assert one.config["algorithm"]["objective"] == f"{tmp_path}/one/inputs/objective.py:scaled"
    before = slopes(one)
    longer = trained(tmp_path / "one", 1.0, "train.total_dialog_turns=24", "train.resume=auto")
    assert (len(slopes(longer)), slopes(longer)[:2]) == (3, before)
    with pytest.raises(UserError, match=r"another"):
        trained(tmp_path / "two", 2.0, once, "train.resume=auto")

    moved = shutil.move(tmp_path / "one", tmp_path / "moved")
    with pytest.raises(UserError, match=rf"asks to run {moved}/inputs/objective.py \(algorithm.objective\)"):
        load_config(Path(moved), ["reward.path=null", "reward.name=null"])
    kept = surrogate(load_config(Path(moved), trust=True).algorithm.objective)
    terms = {"log_prob": torch.zeros(2), "log_ratio": torch.tensor([0.0, 1.0]), "advantage": torch.ones(2)}
    clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    read = {name: value for name, value in (terms | clips).items() if kept.reads(name)}
    assert list(read) == ["log_ratio", "advantage", "dual_clip"]
    torch.testing.assert_close(kept.loss(**read), -terms["log_ratio"].exp())


def test_what_cannot_be_one_is_a_sentence() -> None:
    held = threading.Lock()

    def locked(log_prob: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        with held:
            return -advantage * log_prob

    for objective, why in (
        (lambda log_prob, reward: log_prob, "has the parameters reward"),
        (lambda advantage: advantage, "reads neither log_prob nor log_ratio"),
        (3, "objective is 3, not a function"),
        (locked, "the objective locked cannot be sent to another process .*make what it needs inside"),
    ):
        with pytest.raises(UserError, match=why):
            take(Config(), [], objective=objective)
    cispo = with_options(Config(), {"algorithm.objective": "cispo"})
    with pytest.raises(UserError, match=r"algorithm.objective=cispo is set too"):
        take(cispo, ["algorithm.objective=cispo"], objective=objective_of(1.0))


def test_a_function_without_a_name_has_one_in_the_config() -> None:
    config = Config()
    passed = take(config, [], objective=lambda log_prob, advantage: -advantage * log_prob)
    assert config.algorithm.objective.rpartition(":")[2].isidentifier()
    assert json.loads(json.dumps(passed.signature))["passed"].keys() == {"objective"}
