"""Hanging and crashing graders in training, evaluation and the gate: the run continues, or ends with a sentence."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from sota_grpo import keys
from sota_grpo.envs import TaskEnv
from sota_grpo.envs.prompts import Rollouts
from sota_grpo.loop import run
from sota_grpo.rewards.grading import GradingPool, grading_pool
from sota_grpo.rl.records import Example, GroupRequest, Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.collector import PromptGroupCollector
from sota_grpo.source.weight_sync import EngineWeightSync
from sota_grpo.tasks.table import TableTask
from sota_grpo.tasks.wrappers import with_reward_functions
from sota_grpo.training import gate
from sota_grpo.training.evaluate import Evaluator
from sota_grpo.training.gate import CheckError, run_gate
from tests.process_rigs import is_gone, newest, wait_for
from tests.training_rigs import MoodyTask, collector_of, make_components, make_env, make_saying
from tests.unit.graders import WEIGHTS, Unloadable, moody

SEED = random.randrange(1 << 30)
SAMPLING = Sampling(max_tokens=64)
EXAMPLE = Example("2 + 2?", "4")


@pytest.fixture(scope="module")
def pool() -> Iterator[GradingPool]:
    with closing(GradingPool(moody, WEIGHTS, num_workers=2, timeout_s=0.5)) as made:
        yield made


@pytest.fixture
def env(pool: GradingPool) -> TaskEnv:
    return make_env(grader=pool, kind=MoodyTask)


def moods(num_groups: int, **at: tuple[int, int]):
    """What samples say: ``hang=(2, 1)`` is sample 1 of group 2."""
    says = {place: mood for mood, place in at.items()}
    return lambda request, index: says.get((request.group_id % num_groups, index), f"say {request.group_id + index}")


def test_training_in_sync_continues_and_counts_what_failed(env: TaskEnv, pool: GradingPool, tmp_path: Path) -> None:
    before = pool.fleet.restarts
    engine = make_saying(env, moods(4, spin=(1, 2), crash=(3, 0)))
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
    assert pool.fleet.restarts == before + 4


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


def test_an_evaluation_ends_and_says_what_failed(
    env: TaskEnv, pool: GradingPool, caplog: pytest.LogCaptureFixture
) -> None:
    right = [f"say {example.answer}" for example in env.task.heldout[:6]]

    def say(request: GroupRequest, index: int) -> str:
        return {2: "hang", 4: "exit"}.get(request.group_id, right[request.group_id])

    before = pool.fleet.restarts
    engine = make_saying(env, say)
    actual = Evaluator(Rollouts(env, engine), env.task.heldout[:6], max_tokens=64, avg_at_k=0, seed=SEED).measure()
    assert actual["eval/accuracy"] == 4 / 6
    assert "failed on 2 of 6 responses of this evaluation" in caplog.text
    assert pool.fleet.restarts == before + 2


def test_the_gate_refuses_a_grader_that_hangs_at_gold_answers(env: TaskEnv, tmp_path: Path) -> None:
    components = make_components(tmp_path)
    components.rollouts, task = Rollouts(env, components.rollouts.engine), env.task
    components.task = SimpleNamespace(
        train=task.train,
        heldout=task.heldout,
        term_weights=WEIGHTS,
        gold_response=lambda example: "hang",
        score=task.score,
    )
    sentence = r"0 of 4 gold answers .* failed on 4 of 8 texts, first error: TimeoutError: no score within 0\.5 s"
    with pytest.raises(CheckError, match=sentence):
        run_gate(components, "strict", [gate.gold_answers_earn_the_full_reward])


def test_graders_that_cannot_start_end_the_run_with_their_cause() -> None:
    with closing(GradingPool(Unloadable(), WEIGHTS, num_workers=1, timeout_s=1.0)) as pool:
        env = make_env(grader=pool, kind=MoodyTask)
        engine = make_saying(env, moods(4))
        collector = PromptGroupCollector(env, engine, sampling=SAMPLING, dialog_turns_per_batch=16)
        with pytest.raises(Exception, match="could not be constructed: ImportError: a package that is missing here"):
            collector.next_batch()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_grader_outlives_a_killed_trainer(tmp_path: Path) -> None:
    """Not even one that hangs with its interpreter locked, nor what a grader has sent away."""
    code = f"""
    import time
    from sota_grpo.rl.records import Example
    from sota_grpo.rewards.grading import GradingPool
    from tests.process_rigs import newest
    from tests.unit.graders import WEIGHTS, moody
    pool = GradingPool(moody, WEIGHTS, num_workers=2, timeout_s=600.0)
    pool.wait_ready()
    pool.scores([("away {tmp_path}/pid", Example("2 + 2?", "4"))]).result()
    pool.scores([("spin", Example("2 + 2?", "4"))])
    print(*(worker.pid for worker in newest(pool.fleet)), flush=True)
    time.sleep(600)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    pids += [child.pid for child in psutil.Process(trainer.pid).children(recursive=True)]
    pids.append(sent_away(tmp_path / "pid"))
    time.sleep(0.3)  # it hangs by now
    trainer.kill()
    trainer.wait()
    wait_for(lambda: all(map(is_gone, pids)))


def sent_away(path: Path) -> int:
    wait_for(path.exists)
    return int(path.read_text())


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper needs Linux")
def test_what_a_grader_sends_away_ends_with_it(tmp_path: Path) -> None:
    with closing(GradingPool(moody, WEIGHTS, num_workers=1, timeout_s=0.5)) as pool:
        for end in ("crash", "spin", "close"):
            pool.scores([(f"away {tmp_path}/{end}", EXAMPLE)]).result()
            pid = sent_away(tmp_path / end)
            assert not is_gone(pid)
            if end != "close":
                pool.scores([(end, EXAMPLE)]).result()
                wait_for(lambda pid=pid: is_gone(pid))
    wait_for(lambda: is_gone(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper needs Linux")
@pytest.mark.parametrize("attempt", range(6))  # not each meets the moment between two signals
def test_a_subreaper_that_gets_many_sigterm_ends_all_before_it(attempt: int, tmp_path: Path) -> None:
    """The kernel sends SIGTERM once for each thread of a trainer that is killed."""
    with closing(GradingPool(moody, WEIGHTS, num_workers=1, timeout_s=60.0)) as pool:
        pool.scores([(f"away {tmp_path}/pid", EXAMPLE)]).result()
        away, (worker,) = sent_away(tmp_path / "pid"), newest(pool.fleet)
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
