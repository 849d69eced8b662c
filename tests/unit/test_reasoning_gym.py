"""Tasks of reasoning-gym: who is refused and why, what the others score, and that nothing depends on the process."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from sota_grpo.errors import UserError
from sota_grpo.migration.verl import example_columns, example_of
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rl.records import SUBTASK, Example
from sota_grpo.tasks import make_scorer, make_task
from sota_grpo.tasks.dataset import normalised
from sota_grpo.tasks.reasoning_gym import REFUSED, ReasoningGymTask

factory = pytest.importorskip("reasoning_gym.factory", reason="the extra reasoning-gym is not installed")

ROOT = Path(__file__).resolve().parents[2]
SEED = random.randrange(1 << 30)
ALLOWED = sorted(factory.DATASETS.keys() - REFUSED.keys())
NO_GOLD = {"boxnet", "graph_color", "rush_hour"}
SLOW = {"zebra_puzzles", "futoshiki"}  # half a second
TEN = random.Random(SEED).sample(sorted(set(ALLOWED) - SLOW), 10)


def one_task(name: str, num: int, **options: object) -> ReasoningGymTask:
    return ReasoningGymTask.load(tasks={name: {"weight": 1, **options}}, seed=SEED, num_train=num)


@cache
def examples(name: str) -> list:
    """Made when requested: 84 tasks take four seconds, which every collection would spend."""
    return one_task(name, 2).train[:]


TASK = ReasoningGymTask()


def test_scorers_that_are_offered_execute_nothing(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    touch = f"__import__('pathlib').Path('{touched}').touch()"
    for name in ALLOWED:
        for answer in (touch, f"[{touch}]", f'{{"a": {touch}}}', f"({touch}, 1)", f"x = {touch}", f"$({touch})"):
            assert not TASK.score(f"<answer>{answer}</answer>", examples(name)[0]).success
    assert not touched.exists()
    assert len(ALLOWED) == 106 - len(REFUSED) == 84


@pytest.mark.parametrize("name", ALLOWED)
def test_gold_answers_earn_the_full_reward_and_travel_as_json(name: str) -> None:
    for example in examples(name):
        sent = example_of(json.loads(json.dumps(example_columns(example))))
        assert sent == example
        response = TASK.gold_response(sent)
        assert (response is None) == (name in NO_GOLD)
        if response is not None:
            score = TASK.score(f"<think><answer>no</answer></think>So: {response}", sent)
            assert score.success, (SEED, example)
            assert score.terms == {"correct": 1.0}
            assert score.info == {"task": name}
            assert TASK.counts(score, sent) == {name: (1, 1)}
            boxed = make_scorer("reasoning_gym", answer_format="any")
            assert boxed.score(response, sent).success
        assert not TASK.score("I give up.", sent).success
        assert example == TASK.read_row(
            {"question": example.query, "answer": example.answer or None, "metadata": example.extra["metadata"]}, "here"
        )


HOSTILE = {
    "digits": "9" * 8000,
    "exponent": "1e999999999",
    "negative exponent": "-1E-99999999999",
    "fraction": "1/1e99999999",
    "power": "9**9**9**9",
    "not a number": "nan",
    "numbers that are none": "[NaN, NaN, NaN]",
    "infinite": "-inf",
    "nested lists": "[" * 8000,
    "nested dicts": '{"a":' * 1600,
    "nested brackets": "(" * 4000 + "A" + ")" * 4000,
    "negations": "¬" * 8000 + "P",
    "many moves": "R999999999",
    "long moves": "A+999999999 B-999999999",
    "commas": "," * 8000,
    "equations": "A=1," * 2000,
    "spaces": "x" + " " * 8000 + "x",
    "lines": "x" + "\n" * 8000 + "x",
    "factors": "×".join(["9" * 2000] * 4),
    "bytes": "\0\ud800\x1b[2J",
    "an object": '{"__class__": "x"}',
    "null": "null",
    "empty": "[[]]",
    "too long": "1" * 1_000_000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_scorers_survive_hostile_answers(what: str) -> None:
    rng = random.Random(SEED)
    drawn = (chr(rng.choice([rng.randrange(32, 0xD800), rng.randrange(32, 127)])) for _ in range(3000))
    # one digit may be the right answer, and so may the moves of a sokoban be
    odd = "".join(letter for letter in drawn if not letter.isnumeric() and letter not in "UDLR")
    right = {"0", "0.0", *re.findall(r"\d+", HOSTILE[what])}  # -1e-99999 is 0, and a number in it may be the answer
    for name in ALLOWED:
        for example, answer in zip(examples(name), (HOSTILE[what], HOSTILE[what] + odd), strict=True):
            (score,) = guarded_scores(TASK.score, ["correct"], [(f"<answer>{answer}</answer>", example)])
            assert score.error is None, (name, SEED)
            assert 0 <= score.terms["correct"] <= 1, (name, SEED)
            assert not score.success or example.answer in right, (name, SEED)


def test_no_text_wins_every_problem_of_a_task() -> None:
    texts = [*HOSTILE.values(), "0", "1", "-1", "x", "A", "True", "[]", "{}", "()", "no", ""]
    for name in set(ALLOWED) - SLOW:
        winning, problems = texts, list[Example]()
        for problem in one_task(name, 12).train:  # made as they are read: most texts lose the first
            winning = [text for text in winning if TASK.score(f"<answer>{text}</answer>", problem).success]
            problems.append(problem)
            if not winning:
                break
        assert all(one.answer == text for text in winning for one in problems), (name, SEED)


def test_a_score_above_one_is_no_success() -> None:
    """calendar_arithmetic: the relative error of a wrong number where the right one is negative."""
    example = Example("", "-1", {SUBTASK: "calendar_arithmetic", "metadata": {"task": "count_days"}})
    assert TASK.score("<answer>0</answer>", example).terms == {"correct": 0.0}


def digests(pair: list[Example]) -> list[str]:
    return [hashlib.md5(repr(example).encode()).hexdigest() for example in pair]


def test_problems_are_the_same_whatever_the_hash_seed_and_the_order() -> None:
    """Drawn here forwards, there backwards."""
    code = "import hashlib, json, random, sys\nfrom sota_grpo.tasks.reasoning_gym import Example, ReasoningGymTask\n"
    code += inspect.getsource(digests)
    code += "random.seed()\n"  # problems must not depend on the process's random numbers
    code += "names, seed = json.loads(sys.argv[1]), int(sys.argv[2])\n"
    code += "trains = {name: ReasoningGymTask.load(tasks={name: 1}, seed=seed, num_train=2).train for name in names}\n"
    code += "print(json.dumps({name: digests([train[1], train[0]]) for name, train in trains.items()}))\n"
    other = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    started = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(ALLOWED[::-1]), str(SEED)],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    first = {name: digests(examples(name)[::-1]) for name in ALLOWED}
    second = json.loads(started.communicate()[0])
    assert [name for name in ALLOWED if first[name] != second[name]] == [], SEED


def test_ten_tasks_at_once_come_by_their_weights_and_are_held_out_by_text() -> None:
    weights = {name: 1 + place % 3 for place, name in enumerate(TEN)}
    tasks = [
        ReasoningGymTask.load(tasks=weights, seed=seed, num_train=200, num_heldout=20) for seed in (SEED, SEED + 1)
    ]
    train = tasks[0].train[:]
    drawn = [example.extra[SUBTASK] for example in train]
    assert set(drawn) == set(TEN), SEED
    heavy = sum(weights[name] == 3 for name in drawn) / 200
    assert heavy == pytest.approx(9 / 19, abs=0.2)  # 6 standard errors
    trained = {normalised(example.query) for example in train}
    held = {normalised(example.query) for task in tasks for example in task.heldout}
    assert not trained & held, SEED
    turns = [example.extra[SUBTASK] for example in tasks[0].heldout]
    assert turns == [*weights] * 2, "whatever they weigh"


def test_other_peoples_random_numbers_are_left_as_they_were() -> None:
    numpy = pytest.importorskip("numpy")
    task = ReasoningGymTask.load(tasks={"pool_matrix": 1, "list_functions": 1}, num_train=40)
    random.seed(1)
    numpy.random.seed(1)
    expected = random.random(), numpy.random.random()
    random.seed(1)
    numpy.random.seed(1)
    assert len(task.train[:]) == 40
    assert (random.random(), numpy.random.random()) == expected


def test_options_and_levels_of_a_task_count_and_an_option_comes_before_its_level() -> None:
    terms = {e.extra["metadata"]["num_terms"] for e in one_task("chain_sum", 60, min_terms=3, max_terms=4).train[:]}
    assert terms == {3, 4}, SEED
    curriculum = factory.create_curriculum("chain_sum")
    curriculum.set_global_level(3)
    made = curriculum.generate_configuration()
    levelled = one_task("chain_sum", 300, level=3, max_digits=1, min_digits=1).train[:]
    drawn = {example.extra["metadata"]["num_terms"] for example in levelled}
    assert (min(drawn), max(drawn)) == (made.min_terms, made.max_terms), SEED
    assert {example.extra["metadata"]["num_digits"] for example in levelled} == {1}


@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        ({}, r"give for example env\.tasks=\{chain_sum: 1\}"),
        (None, r"give for example env\.tasks=\{chain_sum: 1\}"),
        ({"chain_sun": 1}, "no task chain_sun in reasoning-gym; did you mean chain_sum"),
        ({"frobnicate": 1}, r"no task frobnicate in reasoning-gym; the tasks are ab, acre"),
        ({"chain_sum": 0, "gcd": {"weight": 0}}, "every task the weight 0"),
        ({"chain_sum": 1.5}, "has the weight 1.5, which must be an integer"),
        ({"chain_sum": {"level": [0, -1]}}, "must be an integer, 0 or more, or a list of them"),
        ({"chain_sum": {"level": [1, 1]}}, r"chain_sum has the levels \[1, 1\]; list at least one, each once"),
        ({"chain_sum": {"level": 99}}, r"level=99, but its highest level is \d+\."),
        ({"acre": {"level": 1}}, "this task has no curriculum"),
        ({"chain_sum": {"seed": 3}}, r"which applies to the whole run; use seed=N\."),
        ({"chain_sum": {"size": 3}}, r"use env\.max_samples=N\."),
        ({"chain_sum": {"terms": 3}}, "no option terms; available: allow_negation, level, max_digits, .*, weight"),
        ({"chain_sum": {"min_terms": 0}}, r"cannot be made with .*min_terms must be positive"),
        ({"chain_sum": {"min_terms": "few"}}, r"cannot be made with .*TypeError"),
        ({"codeio": 1}, "env.tasks names codeio, which is refused: "),
    ],
)  # fmt: skip
def test_tasks_and_options_that_make_no_sense_are_refused(tasks: dict | None, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_task("reasoning_gym", tasks=tasks)


def test_a_task_with_too_few_problems_is_reported() -> None:
    few = {"leg_counting": {"min_animals": 1, "max_animals": 1, "min_instances": 1, "max_instances": 1}}
    task = ReasoningGymTask.load(tasks=few, num_train=5, num_heldout=5)
    prompts = {example.query for example in task.train} | {example.query for example in task.heldout}
    assert 2 <= len(prompts) <= 10
    one = {"count_bits": {"min_n": 5, "max_n": 5}}
    both = ReasoningGymTask.load(tasks=one, num_train=1, num_heldout=1)
    with pytest.raises(UserError, match=r"1000 draws from count_bits gave no .*give env\.tasks\.count_bits options"):
        _ = both.train[0], both.heldout[0]


def test_several_levels_of_a_task_are_drawn_and_scored_each_by_its_own_options() -> None:
    task = ReasoningGymTask.load(
        tasks={"chain_sum": {"level": [0, 2]}, "gcd": 1}, seed=SEED, num_train=40, num_heldout=4
    )
    for example in task.train:
        assert task.score(task.gold_response(example), example).success
    by_level: dict[int | None, list[Example]] = {}
    for example in task.train:
        by_level.setdefault(example.extra.get("level"), []).append(example)
    assert by_level.keys() == {0, 2, None}
    assert {example.extra[SUBTASK] for example in by_level[None]} == {"gcd"}
    texts = {level: "".join(one.query.partition(":")[2] for one in by_level[level]) for level in (0, 2)}
    digits = {level: max(map(len, re.findall(r"\d+", text))) for level, text in texts.items()}
    assert digits[0] < digits[2]
