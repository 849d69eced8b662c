"""A reward file that cannot be used is told before training starts, in one sentence with the place and the fix."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.rewards.functions import TRL, VERL, load_functions
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions

TASK = TableTask([TableTask().read_row({"prompt": "2+2?", "ground_truth": 4, "level": 1}, "demo")])
NEITHER = r"is neither verl's compute_score\(data_source, .*\) nor TRL's function\(prompts, completions, \*\*columns\)"
COMPUTE_SCORE = "def compute_score(solution_str, **kwargs): return 0\n"


def refusal(path: Path, text: str | None, names: list[str], weights: list[float] | None = None) -> str:
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        with_reward_functions(TASK, str(path), names, weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("signature", "form"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", VERL),
        ("solution_str, ground_truth, **kwargs", VERL),
        ("data_source, solution_str, ground_truth, extra_info=None, method='strict', *, score=1.0", VERL),
        ("prompts, completions, **columns", TRL),
        ("completions, level, log_extra=None, **kwargs", TRL),
        ("prompts, completions, completion_ids=None, trainer_state=None", TRL),
        ("completion_ids, **kwargs", TRL),
        ("completions, ground_truth, level", TRL),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_both_forms_are_known_by_their_parameters(tmp_path: Path, signature: str, form: str, kind: str) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(f"{kind} f({signature}): return 0\n")
    (function,) = load_functions(str(path), ["f"])
    assert (function.name, function.form) == ("f", form)
    with_reward_functions(TASK, str(path), ["f"])


def test_objects_that_can_be_called_are_functions_too(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "import functools\n"
        "def base(completions, factor, **kwargs): return [factor] * len(completions)\n"
        "double = functools.partial(base, factor=2.0)\n"
        "class Judge:\n"
        "    def __call__(self, solution_str, ground_truth): return 3.0\n"
        "judge = Judge()\n"
    )
    task = with_reward_functions(TASK, str(path), ["double", "judge"])
    assert task.score("4", TASK.train[0]).terms == {"double": 2.0, "judge": 3.0}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "x = 1\ny = x / 0\n" + COMPUTE_SCORE,
            "rewards.py, line 2: the reward file cannot be imported (ZeroDivisionError",
        ),
        ("x = 1\n\ndef f(:\n", "rewards.py, line 3: the reward file cannot be imported (SyntaxError"),
        (
            "import no_such_package_here\n",
            "line 1: the reward file cannot be imported (ModuleNotFoundError: No module na",
        ),
        ("import sys\n\nsys.exit(1)\n", "rewards.py, line 3: the reward file cannot be imported (SystemExit: 1)"),
        ("\0", "the reward file cannot be imported (SyntaxError"),
        (
            "import os\ndef grade(solution_str): ...\ndef mark(solution_str): ...\ndef _own(): ...\n",
            "has no function 'compute_score'; its functions are grade, mark:",
        ),
        ("compute_score = 3\n", "has no function 'compute_score'"),
    ],
)
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, text: str, sentence: str) -> None:
    found = refusal(tmp_path / "rewards.py", text, ["compute_score"])
    assert sentence in found
    assert str(tmp_path / "rewards.py") in found


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert f"there is no reward file {tmp_path}/a.py; correct reward.path" in refusal(tmp_path / "a.py", None, ["f"])
    assert "there is no reward file" in refusal(tmp_path, None, ["f"]), "a folder"


@pytest.mark.parametrize(
    ("signature", "sentence"),
    [
        ("response, answer, **columns", NEITHER),
        ("", NEITHER),
        ("data_sources, solution_strs, ground_truths, extra_infos", NEITHER),
        (
            "solution_str, ground_truth, judge_url",
            "asks for judge_url, which nothing here has; give it a default value",
        ),
        ("completions, trainer_state, **kwargs", "asks for trainer_state"),
        ("solution_str, /, ground_truth", NEITHER),
        ("completions, solution", "f asks for solution, but the columns of the data are ground_truth, level"),
    ],
)
def test_a_function_of_neither_form_is_told(tmp_path: Path, signature: str, sentence: str) -> None:
    assert re.search(sentence, refusal(tmp_path / "rewards.py", f"def f({signature}): return 0\n", ["f"]))


@pytest.mark.parametrize(
    ("names", "weights", "sentence"),
    [
        ([], None, "give one function or several different ones"),
        (["f", "f"], None, "give one function or several different ones"),
        (["kl"], None, "kl is a reward term already; give the function another name"),
        (["f", "g"], [1.0], "reward.weights has 1 entries for 2 functions (f, g); give as many"),
        (["f"], [], "reward.weights has 0 entries for 1 functions (f)"),
        (["f"], [float("nan")], "holds a number that is not finite"),
    ],
)
def test_names_and_weights_that_do_not_match_are_told(
    tmp_path: Path, names: list[str], weights: list[float] | None, sentence: str
) -> None:
    text = "def f(solution_str): return 0\ndef g(solution_str): return 0\ndef kl(solution_str): return 0\n"
    assert sentence in refusal(tmp_path / "rewards.py", text, names, weights)


def test_a_changed_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though it has the same length and was written in the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "rewards.py"
    for value in (1.0, 2.0, 3.0):
        path.write_text(f"def compute_score(solution_str): return {value}\n")
        assert with_reward_functions(TASK, str(path)).score("", TASK.train[0]).terms == {"compute_score": value}


def test_a_file_may_define_dataclasses_with_deferred_annotations(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass Settings:\n    kind: ClassVar[str] = 'a'\n    factor: float = 2.0\n"
        "def compute_score(solution_str): return Settings().factor\n"
    )
    assert with_reward_functions(TASK, str(path)).score("", TASK.train[0]).terms == {"compute_score": 2.0}


def test_the_only_function_of_a_file_needs_no_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from json import dumps\ndef brief(completions, **columns): return [0.5 for _ in completions]\n")
    task = with_reward_functions(TASK, str(path), weights=[2.0])
    scorer = pickle.loads(pickle.dumps(task.score))  # as a grader's process has it
    assert task.term_weights == {"brief": 2.0}
    assert scorer("four", TASK.train[0]).terms == {"brief": 0.5}
    path.write_text("def kl(completions, **columns): return 0\n")
    assert "kl is a reward term already" in refusal(path, None, ["compute_score"])
    path.write_text("def a(completions): return 0\ndef b(completions): return 0\n")
    assert "has no function 'compute_score'; its functions are a, b" in refusal(path, None, ["compute_score"])
