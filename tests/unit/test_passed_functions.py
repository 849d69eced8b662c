"""Reward functions as objects: they arrive in other processes, and are known by what they do."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.rewards.functions import RewardFunctionError, fingerprint, pickled, unpickled
from sota_grpo.rewards.grading import grading_pool
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions

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
def helper(text): return [BONUS for _ in text if RULE.allows(text)]
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
    found = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT).stdout
        for _ in range(2)
    }
    assert found == {fingerprint({"f": compiled(text)}) + "\n"}


def test_objects_that_refer_to_each_other_end() -> None:
    text = "class A: pass\na = A(); a.self = a\nthings = [a]; things.append(things)\n"
    one = compiled(text + "def f(solution_str): return f and things and 1.0")
    assert len(fingerprint({"f": one})) == 64


def test_partials_methods_and_callable_objects_count_with_what_they_hold() -> None:
    text = (
        "import functools\nclass Judge:\n    def __init__(self, n): self.n = n\n"
        "    def __call__(self, solution_str): return self.n\n    def m(self, solution_str): return self.n\n"
        "def g(solution_str, n): return n\n"
    )
    forms = ("Judge({})", "Judge({}).m", "functools.partial(g, n={})")
    endings = [f"f = {form.format(n)}" for n in (1, 2) for form in forms]
    prints = [fingerprint({"f": compiled(text + ending)}) for ending in endings]
    assert len(set(prints)) == 6
    assert [fingerprint({"f": compiled(text + ending)}) for ending in endings] == prints


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


def test_an_error_names_the_line_of_the_code(tmp_path: Path) -> None:
    program: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n\ndef f(solution_str):\n    return 1 / 0\n", "cell-7.py", "exec"), program)
    score = scorer_of(passed_to(tmp_path, {"f": program["f"]}))("4", EXAMPLE)
    assert score.error == "ZeroDivisionError: division by zero (cell-7.py, line 4)"


def test_in_this_process_the_object_itself_is_called(tmp_path: Path) -> None:
    seen: list[str] = []

    def f(solution_str: str) -> float:
        seen.append(solution_str)
        return 1.0

    assert scorer_of(passed_to(tmp_path, {"f": f}))("four", EXAMPLE).terms == {"f": 1.0}
    assert seen == ["four"]


def test_what_cannot_travel_is_one_sentence() -> None:
    lock = threading.Lock()
    with pytest.raises(RewardFunctionError, match=r"locked cannot be sent .*cannot pickle.*env\.reward_workers=0\.$"):
        pickled({"fine": len, "locked": functools.partial(lambda solution_str, held: 1.0, held=lock)})


def test_what_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RewardFunctionError, match="stayed in that process"):
        unpickled(tmp_path / "reward.pkl")
    (tmp_path / "reward.pkl").write_bytes(b"cno_such_module_anywhere\nf\n.")
    with pytest.raises(RewardFunctionError, match=r"cannot be loaded here \(ModuleNotFoundError"):
        unpickled(tmp_path / "reward.pkl")


def test_a_name_that_was_not_passed_is_named(tmp_path: Path) -> None:
    (tmp_path / "reward.pkl").write_bytes(pickled({"f": compiled("def f(solution_str): return 1.0")}))
    with pytest.raises(RewardFunctionError, match=r"no function 'g'; its functions are f: correct reward\.name"):
        with_reward_functions(TASK, str(tmp_path / "reward.pkl"), ["g"])
