"""Hanging and crashing graders in training: the run continues (evaluation: test_evaluate.py, gate: test_gate.py)."""

from __future__ import annotations

import os
import random
import signal
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sota_grpo import keys
from sota_grpo.loop import run
from sota_grpo.rewards.grading import GradingPool, grading_pool
from sota_grpo.rl.records import Example, Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions
from tests.process_rigs import is_gone, newest, wait_for
from tests.training_rigs import MoodyTask, collector_of, make_components, make_env, make_saying
from tests.unit.graders import WEIGHTS, moody

SEED = random.randrange(1 << 30)
SAMPLING = Sampling(max_tokens=64)
EXAMPLE = Example("2 + 2?", "4")


@pytest.fixture
def pool() -> Iterator[GradingPool]:
    with closing(GradingPool(moody, WEIGHTS, num_workers=2, timeout_s=0.5)) as made:
        yield made


def test_training_in_sync_continues_and_counts_what_failed(pool: GradingPool, tmp_path: Path) -> None:
    env, says = make_env(grader=pool, kind=MoodyTask), {(1, 2): "spin", (3, 0): "crash"}  # by group and sample
    engine = make_saying(env, lambda one, i: says.get((one.group_id % 4, i), f"say {one.group_id + i}"))
    sync = EngineWeightSync(lambda: [], engine)
    collector = collector_of(
        env, engine, SAMPLING, num_groups=4, transforms=[GroupAdvantage()], seed=SEED, weight_sync=sync
    )
    learner, batches = make_components(tmp_path).learner, []
    done = run(
        iter(collector),
        learner,
        collector,
        SimpleNamespace(write=lambda step, batch, update, metrics: batches.append((batch, update, metrics))),
        first_step=0,
        num_steps=2,
        before=lambda step: True,
        after=lambda steps: True,
    )
    assert done == 2
    for batch, update, metrics in batches:
        rows = list(batch)
        late = [number for number, row in enumerate(rows) if row[keys.REWARD_TIMEOUT].item()]
        failed = [number for number, row in enumerate(rows) if row[keys.REWARD_ERROR].item()]
        assert (late, failed) == ([6], [6, 12])
        assert all(rows[number][keys.ADVANTAGE].item() == 0 for number in (*late, *failed))
        assert update["grad_norm"] is not None
        assert metrics["time/score_s"] > 0.4
    assert pool.fleet.restarts == 4


def test_functions_that_use_signals_grade_in_a_worker(tmp_path: Path) -> None:
    """As Math-Verify's own ``parse`` and ``verify`` do, which only a main thread can; coroutines too."""
    path = tmp_path / "reward.py"
    path.write_text(
        textwrap.dedent("""
        from math_verify import parse, verify
        def plain(solution_str, ground_truth):
            return float(verify(parse(ground_truth), parse(solution_str)))
        async def one(solution_str, ground_truth):
            return plain(solution_str, ground_truth)
        async def group(completions, ground_truth, **kwargs):
            return [plain(text, truth) for text, truth in zip(completions, ground_truth)]
        """)
    )
    names = ("plain", "one", "group")
    task = with_reward_functions(TableTask(), str(path), names)
    example = TableTask().read_row({"prompt": "1 + 1/2?", "ground_truth": "$1.5$"}, "demo, row 1")
    with grading_pool(task, num_workers=1, timeout_s=60.0) as pool:
        actual = pool.scores([("$3/2$", example), ("$2/3$", example)]).result(120)
    assert [one.error for one in actual] == [None, None]
    assert [one.terms for one in actual] == [dict.fromkeys(names, 1.0), dict.fromkeys(names, 0.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper needs Linux")
@pytest.mark.parametrize("attempt", range(6))  # not each meets the moment between two signals
def test_a_subreaper_that_gets_many_sigterm_ends_all_before_it(attempt: int, tmp_path: Path) -> None:
    """The kernel sends SIGTERM once for each thread of a trainer that is killed, not once."""
    with closing(GradingPool(moody, WEIGHTS, num_workers=1, timeout_s=60.0)) as pool:
        pool.scores([(f"away {tmp_path}/pid", EXAMPLE)]).result()
        wait_for((tmp_path / "pid").exists)
        away, (worker,) = int((tmp_path / "pid").read_text()), newest(pool.fleet)
        subreaper = psutil.Process(worker.pid).parent()
        assert subreaper is not None
        assert subreaper.pid != os.getpid()
        with suppress(psutil.NoSuchProcess):
            while subreaper.status() != psutil.STATUS_ZOMBIE:
                for _ in range(100):
                    subreaper.send_signal(signal.SIGTERM)
        assert is_gone(away)


def test_a_graders_flood_is_cut_and_its_control_characters_are_escaped(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(GradingPool(moody, WEIGHTS, num_workers=1, timeout_s=60.0)) as pool:
        for _ in range(2):
            pool.scores([("flood", EXAMPLE)]).result()
    output = capfd.readouterr().err
    assert output.startswith("\\x1b[2Jxxx")
    assert "\x1b" not in output
    assert 60_000 < len(output) < 66_000
    assert output.splitlines()[-1] == "reward-0 printed more than 64 KiB: the rest of the minute is not shown."
