"""Scores from worker processes equal those from here, whatever happens to the workers; only failed texts pay."""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sota_grpo.rewards.grading import GradingPool, LocalGrader, grading_pool
from sota_grpo.rl.records import Example, Score
from sota_grpo.rl.task import Scorer
from sota_grpo.tasks.arithmetic import ArithmeticTask
from sota_grpo.tasks.questions import GSM8KTask
from sota_grpo.workers.base import WorkerDied
from tests.process_rigs import newest
from tests.unit.graders import WEIGHTS, Together, Unloadable, misnamed, moody, tame

SEED = random.randrange(1 << 30)
EXAMPLE = Example("2 + 2?", "4")
WAIT_S = 60.0
PoolOf = Callable[..., GradingPool]


def asked(*texts: str) -> list[tuple[str, Example]]:
    return [(text, EXAMPLE) for text in texts]


def here(score: Scorer, pairs: list[tuple[str, Example]], terms: Collection[str] = WEIGHTS) -> list[Score]:
    return LocalGrader(score, terms).scores(pairs).result()


def test_why_a_group_is_graded_one_by_one_is_logged_on_one_line(caplog: pytest.LogCaptureFixture) -> None:
    forged = "a\n2026-01-01 ERROR sota_grpo: forged"
    both = Mock(side_effect=tame, score_group=Mock(side_effect=ValueError(forged)))
    with caplog.at_level(logging.DEBUG):
        here(both, asked(forged))
    assert "ValueError: a\\n2026-01-01 ERROR" in caplog.records[0].getMessage()


def outcomes(scores: list[Score]) -> list[tuple[Any, ...]]:
    """What a response gets, and the kind of its failure."""
    kinds = [re.match(r"\w+", score.error).group() if score.error else None for score in scores]
    same = {"WorkerDied": "RuntimeError"}  # a crash here is a raise there
    return [(score.terms, score.success, score.info, same.get(kind, kind)) for score, kind in zip(scores, kinds)]


@pytest.fixture
def pool_of() -> Iterator[PoolOf]:
    """Grading pools, closed at the end of a test."""
    with ExitStack() as stack:

        def make(score: Scorer, num_workers: int = 1, timeout_s: float = 30.0) -> GradingPool:
            pool = GradingPool(score, WEIGHTS, num_workers=num_workers, timeout_s=timeout_s)
            return stack.enter_context(closing(pool))

        yield make


@pytest.fixture(scope="module")
def pool() -> Iterator[GradingPool]:
    """One worker for several tests, which count the restarts since they began."""
    with closing(GradingPool(moody, WEIGHTS, num_workers=1, timeout_s=3.0)) as made:
        yield made


def test_scores_are_equal_to_those_of_this_process() -> None:
    rng, examples = random.Random(SEED), ArithmeticTask(seed=SEED, num_train=16, num_heldout=1).train
    task = GSM8KTask(examples, [], format_weight=0.3)
    groups = []
    for example in examples:
        texts = [example.answer, f"#### {rng.random()}", "none", "", "#### \ud800 é \0", f"{example.answer}.5"]
        groups.append([(text, example) for text in rng.sample(texts, rng.randint(1, 6))])
    with grading_pool(task, num_workers=2, timeout_s=30.0) as pool:
        futures = [pool.scores(group) for group in (*groups, [])]
        expected = [here(task.score, group, task.term_weights) for group in groups]
        assert [future.result(WAIT_S) for future in futures] == [*expected, []], SEED


@pytest.mark.parametrize("mood", ["spin", "crash"])
def test_one_that_takes_its_grader_down_costs_itself_and_one_worker(pool: GradingPool, mood: str) -> None:
    """A group of 8, one failed: its siblings keep their scores, and no other group waits for a deadline."""
    place = random.randrange(8)
    texts = [f"say {number}" for number in range(8)]
    texts[place] = mood
    before = pool.fleet.restarts
    scores = pool.scores(asked(*texts)).result(WAIT_S)
    assert outcomes(scores) == outcomes(here(tame, asked(*texts))), SEED
    assert [score.error is not None for score in scores] == [number == place for number in range(8)]
    assert pool.fleet.restarts == before + 1  # so one deadline passed at most: a late response costs its worker


def test_what_a_grader_raises_for_its_process_is_a_failure_of_the_response_alone(pool: GradingPool) -> None:
    before = pool.fleet.restarts
    scores = pool.scores(asked("say 4", "memory", "interrupt", "say 4")).result(WAIT_S)
    errors = [(score.error or "").partition(":")[0] for score in scores]
    assert errors == ["", "MemoryError", "KeyboardInterrupt", ""]
    assert pool.fleet.restarts == before
    (worker,) = newest(pool.fleet)
    badness = Path(f"/proc/{worker.pid}/oom_score_adj").read_text()
    assert int(badness) == 1000, "the kernel ends it before the trainer"


def test_one_that_is_shot_is_graded_once_more_alone(pool: GradingPool) -> None:
    """SIGKILL may have come from outside: the second worker proves it."""
    before = pool.fleet.restarts
    scores = pool.scores(asked("say 4", "shot", "say 4")).result(WAIT_S)
    assert [(score.error or "").partition(" ")[0] for score in scores] == ["", "WorkerDied:", ""]
    assert "SIGKILL" in scores[1].error
    assert pool.fleet.restarts == before + 2
    pool.wait_ready()
    group = asked(*["slow 0.3"] * 3)
    waiting = pool.scores(group)
    time.sleep(0.2)
    os.kill(newest(pool.fleet)[0].pid, signal.SIGKILL)
    assert waiting.result(WAIT_S) == here(tame, group), "killed from outside"


def test_a_group_graded_at_once_is_graded_one_by_one_after_a_fault(pool_of: PoolOf) -> None:
    pool, whole = pool_of(Together(), timeout_s=0.5), asked("a", "abc", "ab")
    scores = pool.scores(whole).result(WAIT_S)
    assert [score.terms["right"] for score in scores] == [0, 2, 1]
    assert scores == here(Together(), whole)
    for mood, restarts in (("hang", 2), ("crash", 4)):
        scores = pool.scores(asked("say 4", mood, "say 12")).result(WAIT_S)
        assert [score.error is not None for score in scores] == [False, True, False]
        assert [score.terms["length"] for score in scores] == [5, 0, 6]
        assert pool.fleet.restarts == restarts, "one for the group, one for the failed"


def test_the_deadline_is_that_of_one_response(pool: GradingPool) -> None:
    before, group = pool.fleet.restarts, asked(*["slow 0.3"] * 5)
    assert pool.scores(group).result(WAIT_S) == here(tame, group[:1]) * 5
    assert pool.fleet.restarts == before


def test_a_mistake_of_the_task_is_reported_and_is_no_score(pool_of: PoolOf) -> None:
    for grader in (pool_of(misnamed), LocalGrader(misnamed, WEIGHTS)):
        with pytest.raises(KeyError, match=r"\['wrong'\] but term_weights names \['length', 'right'\]"):
            grader.scores(asked("say 4", "say 5")).result(WAIT_S)


def test_workers_that_cannot_start_and_a_closed_pool_blame_no_response(pool_of: PoolOf) -> None:
    broken = pool_of(Unloadable())
    early = broken.scores(asked("say 4", "hang"))
    with pytest.raises(WorkerDied, match="a package that is missing here"):
        broken.wait_ready()
    closed = pool_of(moody)
    open_call = closed.scores(asked("hang", "say 4"))
    closed.close()
    closed.close()  # idempotent
    for future in (early, broken.scores(asked("say 4")), open_call, closed.scores(asked("say 4", "say 5"))):
        with pytest.raises(WorkerDied):
            future.result(WAIT_S)


@pytest.mark.parametrize("place", ["processes", "here"])
def test_a_failure_is_logged_once_for_each_kind(pool: GradingPool, place: str, caplog) -> None:
    grader = pool if place == "processes" else LocalGrader(tame, WEIGHTS)
    grader.scores(asked("quit 3", "quit 4", "nan")).result(WAIT_S)
    messages = [record.getMessage() for record in caplog.records if "grader failed" in record.getMessage()]
    assert len([text for text in messages if "SystemExit" in text]) == 1
    assert len(messages) == 2
