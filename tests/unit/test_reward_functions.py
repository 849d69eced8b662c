"""Functions written for verl or TRL run unchanged, here and in a grader's process; only the failed response pays."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sota_grpo.envs.prompts import Prompt, Rollouts
from sota_grpo.errors import UserError
from sota_grpo.rewards.functions import TRL, VERL, load_functions
from sota_grpo.rewards.grading import LocalGrader, grading_pool, guarded_scores
from sota_grpo.rl.records import Example, SampledText, Sampling, Score
from sota_grpo.rl.task import Task, scorer_of
from sota_grpo.tasks.procedural import CountdownTask
from sota_grpo.tasks.questions import GSM8KTask, ReasoningTask
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions
from sota_grpo.training.gate import _as_sampled
from tests.training_rigs import make_env, make_saying
from tests.unit.test_table import verl_row

VERL_FILE = '''
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl's GSM8K score, with what it found beside it."""
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train"
    solution = re.search("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    if solution is None:
        return 0
    answer = solution.group(1).replace(",", "")
    return {"score": 1.0 if answer == ground_truth else 0.1, "acc": answer == ground_truth, "pred": answer,
            "index": extra_info["index"]}
'''

TRL_FILE = """
def accuracy(completions, solution, log_extra=None, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    if log_extra:
        log_extra("content", contents)
    return [None if right is None else 2.0 * (content == right) for content, right in zip(contents, solution)]

def shortest(prompts, completions, level, log_metric=None, **kwargs):
    assert all(prompt[-1]["role"] == "user" for prompt in prompts)
    lengths = [len(completion[0]["content"]) for completion in completions]
    log_metric("mean_length", sum(lengths) / len(lengths))
    return [float(length == min(lengths)) * factor for length, factor in zip(lengths, level)]
"""

PLAIN = TableTask(answer_required=False)


def reward_file(folder: Path, text: str, name: str = "reward_function.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def example_of(**row: Any) -> Example:
    return PLAIN.read_row({"prompt": "2+2?", "ground_truth": "4", **row}, "demo")


def task_of(folder: Path, text: str, *names: str, task: Task = PLAIN, **options: Any) -> Task:
    return with_reward_functions(task, reward_file(folder, text), names or ("compute_score",), **options)


def test_a_function_of_trls_form_is_given_the_sampled_ids(tmp_path: Path) -> None:
    """Those of an engine, of TorchRL's rollouts and of the gate's texts; of a text from a file there are none."""
    text = "def length(completion_ids, **kwargs): return [float(len(ids)) for ids in completion_ids]"
    task = task_of(tmp_path, text, "length")
    sampled = [SampledText("4", [9, 2]), SampledText("4", [2])]
    assert [score.terms["length"] for score in scores(task, sampled, example_of())] == [2.0, 1.0]
    (of_a_file,) = scores(task, ["4"], example_of())
    assert of_a_file.error == "TypeError: length needs completion_ids, which only a response sampled by an engine has"
    env, ids_seen = make_env(), []

    def grade(response: SampledText, example: Example) -> Score:
        ids_seen.append(list(response.token_ids))
        return Score({"correct": 1.0}, True)

    env.grader = LocalGrader(grade, ["correct"])
    prompts = [Prompt(0, env.task.train[0], 2, seed=1)]
    (group,) = Rollouts(env, make_saying(env, lambda request, index: "ab" * index)).stream(prompts, Sampling(8))
    assert ids_seen == [sample.token_ids.tolist() for sample in group.samples]
    assert _as_sampled("ab", env).token_ids.tolist() == ids_seen[1]
    reset = env.reset()
    for row in reset.unbind(0):
        row.set(("tokens", "response"), group.samples[1].token_ids)
    env.step(reset)
    assert ids_seen[2:] == [ids_seen[1]] * len(reset)


def scores(task: Task, responses: Sequence[str], example: Example) -> list[Score]:
    return guarded_scores(scorer_of(task), task.term_weights, [(response, example) for response in responses])


def score(task: Task, response: str, example: Example | None = None) -> Score:
    return scores(task, [response], example_of() if example is None else example)[0]


def test_verls_reward_file_runs_unchanged(tmp_path: Path) -> None:
    task = task_of(tmp_path, VERL_FILE)
    example = PLAIN.read_row(verl_row(3), "demo")
    assert task.gold_response(example) is None
    assert scores(task, ["So\n#### 6", "#### -1", "none"], example) == [
        Score({"compute_score": 1.0}, True, info={"acc": True, "pred": "6", "index": 3}),
        Score({"compute_score": 0.1}, False, info={"acc": False, "pred": "-1", "index": 3}),
        Score({"compute_score": 0.0}, False),
    ]


def test_trls_functions_run_unchanged_in_a_process_and_see_the_group(tmp_path: Path) -> None:
    task = task_of(tmp_path, TRL_FILE, "accuracy", "shortest", weights=[1.0, 0.5])
    chat = [{"role": "user", "content": "2+2?"}]
    example = example_of(prompt=chat, solution="4", level=3)
    unsolved = example_of(prompt=chat, solution=None, level=1)
    expected = {"4": (2.0, 0.0, True), "four": (0.0, 0.0, False), "": (0.0, 3.0, True)}
    with grading_pool(task, num_workers=1, timeout_s=60) as pool:
        actual = pool.scores([(text, example) for text in expected]).result(120)
    for one, (text, (accuracy, shortest, success)) in zip(actual, expected.items(), strict=True):
        info = {"accuracy/content": text, "shortest/mean_length": 5 / 3}
        assert one == Score({"accuracy": accuracy, "shortest": shortest}, success, info=info)
    assert score(task, "4", unsolved).terms == {"accuracy": None, "shortest": 1.0}, "a term that does not apply"


ALONE = "(solution_str, **kwargs):\n    if solution_str == 'ok': return 1\n   "


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (f"def f{ALONE} return None", "TypeError: f returned NoneType, not a number"),
        (f"def f{ALONE} return '1.0'", "TypeError: f returned str, not a number"),
        (f"def f{ALONE} return float('nan')", "ValueError: f returned nan, which is not finite"),
        (f"def f{ALONE} return {{'acc': 1}}", "KeyError: f returned a dict without 'score': it has ['acc']"),
        (f"def f{ALONE} import sys; sys.exit(3)", "RuntimeError: SystemExit: 3"),
        (f"async def f{ALONE} import sys; sys.exit(3)", "RuntimeError: SystemExit: 3"),
        (f"def f{ALONE} import numpy; return numpy.arange(3)", "TypeError: f returned ndarray, not a number"),
        ("def f(completions): return [1.0]", "ValueError: f returned 1 rewards for 2 completions"),
        ("def f(completions): return 1.0", "TypeError: f returned float, not a list of one reward per completion"),
        ("def f(completions): return 'ab'", "TypeError: f returned str, not a list"),
        ("def f(completions): return (1 / len(c[2:]) for c in completions)", "ZeroDivisionError: division by zero ("),
        ("def f(completions): return ['1', float('inf')]", "ValueError: f returned inf, which is not finite"),
    ],
)
def test_what_is_no_reward_is_an_error_of_that_response_or_list(tmp_path: Path, text: str, error: str) -> None:
    good, bad = scores(task_of(tmp_path, text, "f"), ["ok", "4"], example_of())
    assert (good.error, good.terms) == (None, {"f": 1.0}) if ALONE in text else good.error is not None
    assert bad.terms == {"f": 0.0}
    assert bad.error.startswith(error)


def test_a_response_that_the_function_cannot_grade_fails_alone(tmp_path: Path) -> None:
    body = "return [(p == '2+2?') / len(c) for p, c in zip(prompts, completions)]"
    task = task_of(tmp_path, f"\n\ndef f(prompts, completions, **columns):\n    {body}\n", "f")
    actual = [(one.terms["f"], one.error) for one in scores(task, ["ab", "", "abcd"], example_of())]
    error = f"ZeroDivisionError: division by zero ({tmp_path}/reward_function.py, line 4)"
    assert actual == [(0.5, None), (0.0, error), (0.25, None)]


def test_numbers_and_arrays_of_any_library_are_rewards_and_findings(tmp_path: Path) -> None:
    text = """
import numpy, torch
def found(solution_str):
    return {"score": 1, "acc": numpy.float32(1), "n": 7**9999, "spans": numpy.arange(2), "at": object}
def array(completions): return numpy.ones(len(completions))
def tensor(completions): return torch.ones(len(completions))
def generated(completions): return (1 for _ in completions)
"""
    names = ["found", "array", "tensor", "generated"]
    values = ("True", "1", "numpy.float32(1)", "numpy.ones(())", "torch.tensor(1.0)", "1 + 0j == 1")
    for i, value in enumerate(values):
        text += f"def verl{i}(solution_str): return {value}\n"
        text += f"def trl{i}(completions): return [{value} for _ in completions]\n"
        names += [f"verl{i}", f"trl{i}"]
    for actual in scores(task_of(tmp_path, text, *names), ["4", "5"], example_of()):
        assert actual.terms == dict.fromkeys(names, 1.0)
        assert actual.info | {"found/acc": 1.0, "found/spans": [0, 1], "found/n": None} == actual.info
        json.dumps(dict(actual.info))


def test_coroutines_run_at_the_same_time_on_a_loop_that_stays(tmp_path: Path) -> None:
    """Each waits until all have begun; a semaphore of the file's own is used from call to call."""
    text = """
import asyncio
begun, gate = [], asyncio.Semaphore(1)
async def compute_score(solution_str, ground_truth, **kwargs):
    begun.append(solution_str)
    while len(begun) % 4:
        await asyncio.sleep(0.001)
    async with gate:
        await asyncio.sleep(0.001)
    return 1 / len(solution_str)
async def f(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]
"""
    task = task_of(tmp_path, text, "compute_score", "f")
    for _ in range(2):
        actual = scores(task, ["a", "bb", "", "cc"], example_of())
        assert [one.terms["compute_score"] for one in actual] == [1.0, 0.5, 0.0, 0.5]
        assert [one.error is not None for one in actual] == [False, False, True, False]
        assert actual[1].terms["f"] == 2.0


def test_coroutines_are_awaited_where_a_loop_runs_already_and_in_a_forked_process(tmp_path: Path) -> None:
    """As in every cell of a notebook."""
    task = task_of(tmp_path, "async def compute_score(solution_str): return float(solution_str)")

    async def in_a_cell() -> float | None:
        return score(task, "0.5").terms["compute_score"]

    with ThreadPoolExecutor(1) as pool:  # a browser's test leaves a loop of its own in the main thread
        assert pool.submit(asyncio.run, in_a_cell()).result() == 0.5
    path = tmp_path / "reward_function.py"  # a forked process has a copy of the loop, and no thread that runs it
    text = f"""
import os
from sota_grpo.rewards.functions import RewardInputs, call_function, load_functions
(function,) = load_functions("{path}", ["compute_score"])
found = lambda text: call_function(function, "{path}", [RewardInputs(text, "2+2?", "4", {{}}, "demo")])[0].value
print(found("0.5"), flush=True)
child = os.fork()
if child == 0:
    print(found("0.25"), flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0.5", "0.25"], done.stderr


@pytest.mark.parametrize(
    ("returned", "success"),
    [
        ("0.5", True),
        ("{'score': -1.0, 'success': True}", True),
        ("{'score': 1.0, 'acc': 'no'}", True),
        ("0.25", False),
        ("{'score': 1.0, 'acc': False}", False),
        ("{'score': 1.0, 'correct': 0.5}", False),
    ],
)
def test_a_success_is_what_the_function_says_or_a_high_reward(tmp_path: Path, returned: str, success: bool) -> None:
    text = f"def compute_score(solution_str): return {returned}"
    assert score(task_of(tmp_path, text, success_above=0.25), "4").success is success


def test_the_tasks_reward_may_be_combined_with_functions(tmp_path: Path) -> None:
    text = "def brevity(solution_str): return -len(solution_str) / 10"
    own = GSM8KTask([Example("9*2?", "9*2=18\n#### 18")], format_weight=0.5)
    task = task_of(tmp_path, text, "builtin", "brevity", task=own, weights=[2.0, 1.0])
    right, wrong = (score(task, response, task.train[0]) for response in ("#### 18", "#### 19"))
    assert (right.terms, right.success) == ({"builtin": 1.5, "brevity": -0.7}, True)
    assert (wrong.terms, wrong.success) == ({"builtin": 0.5, "brevity": -0.7}, False)


def test_functions_replace_the_reward_of_any_task(tmp_path: Path) -> None:
    """They see GSM8K as verl's files have it, and as a chat."""
    text = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float((data_source, solution_str, ground_truth) == ("openai/gsm8k", "#### 1080", "1080")
                 and extra_info["question"] == "?")
def f(prompts, completions, answer, ground_truth):
    assert completions == [[{"role": "assistant", "content": "#### 1080"}]] and prompts[0][-1]["content"] == "?"
    return [float((answer, ground_truth) == (["1000+80\\n#### 1,080"], ["1080"]))]
"""
    own = GSM8KTask([Example("?", "1000+80\n#### 1,080")])
    task = task_of(tmp_path, text, "compute_score", "f", task=own)
    assert score(task, "#### 1080", task.train[0]).terms == {"compute_score": 1.0, "f": 1.0}
    assert task.messages(task.train[0]) == own.messages(own.train[0])
    assert task.read_row({"answer": "#### 3"}, "line 1") == own.read_row({"answer": "#### 3"}, "line 1")
    named = ReasoningTask([Example("Where?", "It is on the Hudson.\n#### Albany, NY")])
    exact = task_of(tmp_path, "def exact(solution_str, ground_truth): return solution_str == ground_truth", task=named)
    assert score(exact, "Albany, NY", exact.train[0]).success


def test_a_function_is_given_its_own_copy_of_the_row(tmp_path: Path) -> None:
    """And as ``extra_info`` the rest of it, where it has no such column."""
    body = "return extra_info.pop('x') + ground_truth.pop()"
    task = task_of(tmp_path, f"def compute_score(solution_str, ground_truth, extra_info): {body}")
    example = example_of(extra_info={"x": 1}, ground_truth=[2])
    assert [one.terms["compute_score"] for one in scores(task, ["a", "b"], example)] == [3.0, 3.0]
    text = "def compute_score(solution_str, extra_info): return extra_info == {'ground_truth': 4, 'k': [1]}"
    assert score(task_of(tmp_path, text), "4", example_of(ground_truth=4, k=[1])).success


def test_a_scorer_loads_its_file_where_it_runs(tmp_path: Path) -> None:
    """In a fresh process with another working directory, from a path that was relative here."""
    (tmp_path / "elsewhere").mkdir()
    reward_file(tmp_path, "import helper_beside\ndef compute_score(solution_str): return helper_beside.VALUE")
    reward_file(tmp_path, "VALUE = 0.75", "helper_beside.py")
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        task = with_reward_functions(TableTask([example_of()] * 1000), "reward_function.py")
    finally:
        os.chdir(here)
    sent = pickle.dumps((scorer_of(task), example_of()))
    assert len(sent) < 2000
    code = "import pickle, sys; score, example = pickle.load(sys.stdin.buffer);"
    code += "print(score('4', example).terms, 'torch' in sys.modules)"
    options = {"cwd": tmp_path / "elsewhere", "env": os.environ | {"PYTHONPATH": str(here)}}
    options["env"]["PYTHONDONTWRITEBYTECODE"] = ""
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True, **options)
    assert done.stdout.decode().strip() == "{'compute_score': 0.75} False"
    assert not list(tmp_path.rglob("reward_function*.pyc"))


def test_what_a_file_imports_does_not_count_against_a_response(tmp_path: Path) -> None:
    text = "import time\ntime.sleep(1.5)\ndef f(completions): return [1.0 for _ in completions]\n"
    with grading_pool(task_of(tmp_path, text, "f"), num_workers=1, timeout_s=1.0) as pool:
        pool.wait_ready()
        (actual,) = pool.scores([("a", example_of())]).result(60)
        assert actual.error is None
        assert pool.fleet.restarts == 0


def test_a_task_answers_turns_whichever_reward_grades_them(tmp_path: Path) -> None:
    own = CountdownTask(num_train=1, num_heldout=1)
    task = task_of(tmp_path, "def f(completions): return [0.5 for _ in completions]", "f", task=own)
    actual = task.score("no", task.train[0])
    assert (actual.reply, actual.terms) == (own.score("no", own.train[0]).reply, {"f": 0.5})
    assert actual.reply["content"].startswith("There is no answer.")


TASK = TableTask([TableTask().read_row({"prompt": "2+2?", "ground_truth": 4, "level": 1}, "demo")])
NEITHER = r"is neither verl's compute_score\(data_source, .*\) nor TRL's function\(prompts, completions, \*\*columns\)"


@pytest.mark.parametrize(
    ("signature", "form"),
    [
        ("solution_str, ground_truth, **kwargs", VERL),
        ("data_source, solution_str, ground_truth, extra_info=None, method='strict', *, score=1.0", VERL),
        ("prompts, completions, completion_ids=None, trainer_state=None", TRL),
        ("completion_ids, **kwargs", TRL),
        ("completions, ground_truth, level, log_extra=None", TRL),
    ],
)
def test_both_forms_are_known_by_their_parameters(tmp_path: Path, signature: str, form: str) -> None:
    path = reward_file(tmp_path, f"def f({signature}): return 0\n")
    (function,) = load_functions(path, ["f"])
    assert (function.name, function.form) == ("f", form)
    with_reward_functions(TASK, path, ["f"])


CALLABLE = """
import functools
def base(completions, factor, **kwargs): return [factor] * len(completions)
double = functools.partial(base, factor=2.0)
class Judge:
    def __call__(self, solution_str, ground_truth): return 3.0
judge = Judge()
"""
DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
@dataclass
class Settings:
    kind: ClassVar[str] = 'a'
    factor: float = 2.0
def compute_score(solution_str): return Settings().factor
"""


@pytest.mark.parametrize(
    ("text", "terms"), [(CALLABLE, {"double": 2.0, "judge": 3.0}), (DATACLASS, {"compute_score": 2.0})]
)
def test_objects_that_can_be_called_are_functions_and_a_file_may_define_dataclasses(
    tmp_path: Path, text: str, terms: dict[str, float]
) -> None:
    assert score(task_of(tmp_path, text, *terms), "4").terms == terms


GRADE = "import os\ndef grade(x): ...\ndef mark(x): ...\ndef _own(): ...\n"
SEVERAL = "".join(f"def {name}(solution_str): return 0\n" for name in ("f", "g", "kl", "std"))


@pytest.mark.parametrize(
    ("text", "names", "weights", "sentence"),
    [
        ("x = 1\ny = x / 0\n", "", None, r"FILE, line 2: it cannot be imported \(ZeroDivisionError"),
        ("x = 1\n\ndef f(:\n", "", None, r"FILE, line 3: it cannot be imported \(SyntaxError"),
        ("import sys\n\nsys.exit(1)\n", "", None, r"FILE, line 3: it cannot be imported \(SystemExit: 1\)"),
        ("\0", "", None, r"FILE.*it cannot be imported \(SyntaxError"),
        (GRADE, "", None, "FILE.*'; its functions are grade, mark:"),
        ("compute_score = 3\n", "", None, "FILE has no function 'compute_score'"),
        ("def kl(completions, **columns): return 0\n", "", None, "kl is the name of a built-in reward term"),
        ("def a(completions): return 0\ndef b(completions): return 0\n", "", None, "FILE.*; its functions are a, b"),
        ("def f(response, answer, **columns): return 0", "f", None, NEITHER),
        ("def f(solution_str, /, ground_truth): return 0", "f", None, NEITHER),
        (
            "def f(solution_str, url): return 0",
            "f",
            None,
            "needs url, which verl.s form .* lacks; give it a default value",
        ),
        ("def f(completions, trainer_state, **kwargs): return 0", "f", None, "needs trainer_state"),
        (
            "def f(completions, n): return 0",
            "f",
            None,
            "f has the parameters n, but the data has the columns ground_tr",
        ),
        (SEVERAL, "f f", None, "is empty or has an empty or repeated name; give different names"),
        (SEVERAL, "kl", None, "kl is the name of a built-in reward term; give the function another name"),
        (SEVERAL, "std", None, "the reward function std has the name of another metric, reward/std; rename it"),
        (SEVERAL, "f g", [1.0], r"reward.weights has 1 entries for 2 functions \(f, g\); give one weight per function"),
        (SEVERAL, "f", [float("nan")], "has a value that is not finite"),
    ],
)
def test_a_file_a_function_and_weights_that_cannot_be_used_are_reported(
    tmp_path: Path, text: str, names: str, weights: list[float] | None, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence.replace("FILE", f"{tmp_path}/reward_function.py")) as caught:
        task_of(tmp_path, text, *names.split(), task=TASK, weights=weights)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "a.py", tmp_path):  # the second is a folder
        with pytest.raises(UserError, match=f"there is no file {path}; correct reward.path"):
            with_reward_functions(TASK, str(path), ["f"])


def test_a_changed_file_is_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, though it has the same length and was written in the same second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (1.0, 2.0, 3.0):
        task = task_of(tmp_path, f"def compute_score(solution_str): return {value}\n")
        assert score(task, "").terms == {"compute_score": value}


def test_a_file_shadows_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    reward_file(tmp_path, "raise RuntimeError('not me')", "tabnanny.py")
    task_of(tmp_path, "import tabnanny\ndef compute_score(solution_str): return tabnanny.verbose")


def test_the_only_function_of_a_file_needs_no_name(tmp_path: Path) -> None:
    text = "from json import dumps\ndef brief(completions, **columns): return [0.5 for _ in completions]\n"
    task = with_reward_functions(TASK, reward_file(tmp_path, text), weights=[2.0])
    scorer = pickle.loads(pickle.dumps(task.score))  # as a grader's process has it
    assert task.term_weights == {"brief": 2.0}
    assert scorer("four", TASK.train[0]).terms == {"brief": 0.5}
