"""Rows graded in worker processes equal rows graded here, whatever happens to the workers; only guilty texts pay."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from sota_grpo.records import Example
from sota_grpo.rewards.grading import GradingPool
from sota_grpo.scoring import Scorer
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.base import scorer_of
from sota_grpo.tasks.gsm8k import GSM8KTask
from sota_grpo.transforms import ScoreResponse
from sota_grpo.workers.base import ServantSpec, WorkerDied
from sota_grpo.workers.fleet import starter
from sota_grpo.workers.processes import ProcessLauncher
from sota_grpo.workers.reward import RewardServant, reward_spec
from tests.unit.graders import WEIGHTS, misnamed, moody, tame

SEED = random.SystemRandom().randrange(1 << 30)


def finished(texts: list[str], example: Example) -> list[TensorDictBase]:
    """Rows as a collector finishes them, as far as a grader reads them."""
    fields = {"query": example.query, "answer": example.answer, "extra": json.dumps(dict(example.extra))}
    return [
        TensorDict({**fields, "text": {"response": NonTensorData(text)}, "next": {"done": torch.tensor([True])}})
        for text in texts
    ]


def moods(*texts: str) -> list[TensorDictBase]:
    return finished(list(texts), Example("2 + 2?", "4"))


def graded_here(score: Scorer, weights: Mapping[str, float], rows: list[TensorDictBase]) -> list[dict[str, Any]]:
    copies = [row.clone() for row in rows]
    ScoreResponse(score, weights)(lazy_stack(copies))
    return [values(row) for row in copies]


def values(row: TensorDictBase) -> dict[str, Any]:
    flat = row.get("next").flatten_keys(".")
    return {key: (value.dtype, value.shape, value.tolist()) for key, value in flat.items()}


class Pools:
    """Grading pools over one launcher, closed at the end of a test."""

    def __init__(self) -> None:
        self.launcher, self.open = ProcessLauncher(), list[GradingPool]()

    def make(self, score: Scorer, weights: Mapping[str, float] = WEIGHTS, **options: Any) -> GradingPool:
        return self.start(reward_spec(score, weights), term_weights=weights, **options)

    def start(self, spec: ServantSpec, *, num_workers: int = 1, timeout_s: float = 30.0, **options: Any) -> GradingPool:
        start = starter(self.launcher, "reward", spec)
        self.open.append(GradingPool(start, num_workers, timeout_s=timeout_s, **options))
        return self.open[-1]


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    for pool in made.open:
        pool.close()
    made.launcher.close()


def test_rows_are_bit_equal_to_those_graded_here(pools: Pools) -> None:
    rng, examples = random.Random(SEED), ArithmeticTask(seed=SEED, num_train=16, num_heldout=1).train
    task = GSM8KTask(examples, [], format_weight=0.3)
    pool = pools.make(scorer_of(task), task.term_weights)
    groups = []
    for example in examples:
        texts = [example.answer, f"#### {rng.random()}", "none", "", "#### \ud800 é \0", f"{example.answer}.5"]
        groups.append(finished(rng.sample(texts, rng.randint(1, 6)), example))
    expected = [graded_here(task.score, task.term_weights, rows) for rows in groups]
    for rows, future, want in zip(groups, [pool.grade(rows) for rows in groups], expected, strict=True):
        assert all(one is other for one, other in zip(future.result(60), rows, strict=True))
        assert [values(row) for row in rows] == want, SEED
    again = pool.grade(groups[0])
    assert again.done(), "rows that have scores pass at once"
    assert [values(row) for row in again.result()] == expected[0]


def test_what_takes_the_process_down_is_counted_alone(pools: Pools) -> None:
    """A hang and a crash among siblings, and a group of one that ends its process without a word."""
    pool = pools.make(moody, num_workers=2, timeout_s=2.0)
    groups = [moods("say 4", "hang", "say 5", "quit 0"), moods("say 4", "crash", "nan"), moods("exit")]
    expected = [graded_here(tame, WEIGHTS, rows) for rows in groups]
    futures = [pool.grade(rows) for rows in groups]
    for rows, future, want in zip(groups, futures, expected, strict=True):
        future.result(60)
        assert [values(row) for row in rows] == want
    assert [row["next", "reward_error"].item() for row in groups[0]] == [False, True, False, True]
    assert pool.fleet.restarts == 2 + 4 + 2, "a hang costs its group and itself one worker each; a crash two each"


def test_killing_workers_from_outside_changes_no_result(pools: Pools) -> None:
    rng, pool = random.Random(SEED), pools.make(moody, num_workers=2)
    groups = [moods(*(f"slow {rng.random() / 50}" for _ in range(4))) for _ in range(40)]
    expected = [graded_here(tame, WEIGHTS, rows) for rows in groups]
    pool.wait_ready()
    futures = [pool.grade(rows) for rows in groups]
    for _ in range(3):
        time.sleep(rng.random() / 5)
        with suppress(ProcessLookupError):  # it is being replaced already
            os.kill(rng.choice(pool.fleet.pids), signal.SIGKILL)
    for future in futures:
        future.result(60)
    assert [[values(row) for row in rows] for rows in groups] == expected, SEED
    assert pool.fleet.restarts > 0


def test_a_mistake_of_the_task_is_told_and_is_no_ones_reward(pools: Pools) -> None:
    pool, rows = pools.make(misnamed), moods("say 4", "say 5")
    with pytest.raises(KeyError, match=r"\['wrong'\] but term_weights names \['length', 'right'\]"):
        pool.grade(rows).result(60)
    assert ("next", "reward") not in rows[0].keys(True)


def test_workers_that_cannot_start_and_a_closed_pool_blame_no_response(pools: Pools) -> None:
    broken = pools.start(ServantSpec("sota_grpo.workers.reward:RewardServant", {}), term_weights=WEIGHTS)
    rows = moods("say 4", "hang")
    early = broken.grade(rows)
    with pytest.raises(WorkerDied, match="missing 2 required positional arguments"):
        broken.wait_ready()
    closed, pending = pools.make(moody), moods("hang", "say 4")
    open_call = closed.grade(pending)
    closed.close()
    for future in (early, broken.grade(rows), open_call, closed.grade(pending)):
        with pytest.raises(WorkerDied):
            future.result(60)
    assert not any(("next", "reward") in row.keys(True) for row in rows + pending)


def test_a_graders_process_lives_without_torch() -> None:
    """It starts in a fraction of a second and takes a few megabytes, so that killing it costs little."""
    modules = ("workers.processes", "workers.reward", "tasks.arithmetic", "tasks.gsm8k")
    code = f"import sys, {', '.join('sota_grpo.' + name for name in modules)}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_scorer_travels_without_the_examples() -> None:
    examples = [Example(f"{i} + 1?", f"#### {i + 1}") for i in range(5000)]
    task = GSM8KTask(examples, examples[:1], answer_format="boxed", format_weight=0.25)
    sent = pickle.dumps(scorer_of(task))
    assert len(sent) < 1000
    text = "It is \\boxed{8}."
    assert pickle.loads(sent)(text, examples[7]) == task.score(text, examples[7])
    assert len(task.train) == 5000


def test_the_servant_says_how_long_its_grader_has_been_at_one_response() -> None:
    enter, leave = threading.Event(), threading.Event()

    def waits(response: str, example: Example):
        enter.set()
        leave.wait(10)
        return tame(response, example)

    servant = RewardServant(waits, tuple(WEIGHTS))
    assert servant.ping() == 0
    answer = servant.run([("say 4", Example("?", "4"))])
    enter.wait(10)
    first = servant.ping()
    time.sleep(0.05)
    assert servant.ping() >= first + 0.05
    leave.set()
    assert answer.result(10)[0].success
    assert servant.ping() == 0
    servant.close()
