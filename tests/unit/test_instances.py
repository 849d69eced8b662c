"""Environments of one worker do not mix; one that misbehaves costs its worker's; nothing is left of any of them."""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from sota_grpo.errors import UserError
from sota_grpo.workers.base import WorkerDied
from sota_grpo.workers.instances import Answer, InstanceLost, Instances, InstanceSpec
from tests.process_rigs import is_gone, newest, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

WAIT_S = 60.0
ENVIRONMENTS = Path(__file__).parent / "environments"
MOODY = InstanceSpec("factory", str(ENVIRONMENTS / "moody.py"), ("Moody",))


@pytest.fixture(scope="module")
def steady() -> Iterator[Instances]:
    """Instances of whose workers none of its tests takes one away."""
    instances = Instances(MOODY, timeout_s=WAIT_S, max_chars=1000)
    yield instances
    instances.close()


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Instances]]:
    """Makes instances whose processes are known by a variable; when they are closed, no process is left."""
    marker, made = secrets.token_hex(16), list[Instances]()
    monkeypatch.setenv("SOTA_GRPO_TEST_MARKER", marker)

    def start(spec: InstanceSpec = MOODY, timeout_s: float = WAIT_S, **options: Any) -> Instances:
        made.append(Instances(spec, timeout_s=timeout_s, **options))
        return made[-1]

    yield start
    for instances in made:
        instances.close()
    assert marked(marker) == []


def marked(marker: str) -> list[int]:
    """The processes that have inherited the variable, however they were started."""
    inherited = {one.pid: one.info["environ"] or {} for one in psutil.process_iter(["environ"])}
    return [pid for pid, names in inherited.items() if names.get("SOTA_GRPO_TEST_MARKER") == marker]


def act(instances: Instances, key: int, *moods: str) -> list[Answer]:
    return instances.call(key, [("act", {"mood": mood}) for mood in moods]).result(WAIT_S)


def opened(instances: Instances, **row: Any) -> int:
    return instances.open(row).result(WAIT_S).key


def reason(future: Future[Any]) -> str:
    error = future.exception(WAIT_S)
    assert isinstance(error, InstanceLost), error
    return str(error)


def test_state_and_random_numbers_are_an_environments_own(make: Callable[..., Instances]) -> None:
    """In three workers as in one: a total, and numbers that the seeds and the calls before alone decide."""
    instances, alone, seeds = make(per_worker=5), make(), [(1, index) for index in range(14)]
    futures = [instances.open({"start": index}, seeds[index]) for index in range(14)]
    keys = [future.result(WAIT_S).key for future in futures]
    seen: dict[int, list[str]] = {key: [] for key in keys}
    for _ in range(2):
        order = random.sample(keys, 14)
        calls = [instances.call(key, [("add", {"number": 3}), ("act", {"mood": "random"})]) for key in order]
        for key, future in zip(order, calls, strict=True):
            seen[key] += [answer.content for answer in future.result(WAIT_S)]
    assert [seen[key][::2] for key in keys] == [[str(index + 3), str(index + 6)] for index in range(14)]
    assert len({chance for contents in seen.values() for chance in contents[1::2]}) == 28
    for index in (3, 11):
        key = alone.open({"start": index}, seeds[index]).result(WAIT_S).key
        answers = alone.call(key, [("add", {"number": 3}), ("act", {"mood": "random"})] * 2).result(WAIT_S)
        assert [answer.content for answer in answers] == seen[keys[index]]
    rewards = [instances.finish(key) for key in keys]
    assert [reward.result(WAIT_S) for reward in rewards] == [index + 6 for index in range(14)]
    opened(instances)
    assert len(instances.workers) == 3, "workers live on"


def test_a_call_that_fails_or_fits_no_tool_answers_the_policy_and_the_instance_continues(steady: Instances) -> None:
    mistakes = {
        "raise no\nreally": "error: ValueError: no",
        "leave 3": "error: SystemExit: 3",
        "rude": "error: Rude",
        "odd": "error: ValueError: no picture of me",
        "deep": "error: RecursionError: ",
    }
    unfit = [("reset", {}), ("_private", {}), ("get_reward", {}), ("add", {}), ("add", {"x": 1})]
    key = opened(steady, start=1)
    calls = [*(("act", {"mood": mood}) for mood in mistakes), ("later", {"number": -3}), *unfit]
    *answers, late, last = steady.call(key, [*calls, ("later", {"number": 1}), ("add", {"number": 2})]).result(WAIT_S)
    unknown = "error: LookupError: there is no tool 'reset'; the tools are act, add, later"
    begins = [*mistakes.values(), "error: RuntimeError: SystemExit", unknown, *["error: "] * 3, "error: TypeError"]
    for answer, begin in zip(answers, begins, strict=True):
        assert answer.is_error
        assert answer.content.startswith(begin)
        assert "\n" not in answer.content
    assert (late, last) == (Answer("1", False), Answer("3", False)), "coroutines share one loop that continues"
    assert steady.finish(key).result(WAIT_S) == 3


def test_values_become_text_of_bounded_length(steady: Instances) -> None:
    values = {"list": '[1, {"a": null}]', "none": "null", "nan": "nan", "bytes": r"b'\xff'", "half": "?", "é": "é"}
    values |= {"cycle": "[1, [...]]", "long 1000": "é" * 1000}
    answers = act(steady, opened(steady), *values, "long 30000000")
    assert [answer.content for answer in answers[:-1]] == list(values.values())
    assert 990 <= len(answers[-1].content) <= 1000
    assert answers[-1].content.endswith("of 30000000 characters shown]")
    assert not any(answer.is_error for answer in answers)


def test_an_instance_that_cannot_be_reset_is_lost(steady: Instances) -> None:
    for row, expected in (
        ({"mood": "raise no"}, "reset raised ValueError: no"),
        ({"mood": "list"}, "reset returned a value of type list, not a str or None"),
        ({"start": threading.Lock()}, "TypeError: cannot pickle"),
    ):
        assert reason(steady.open(row)).startswith(expected)
    assert steady.open({"mood": "hello", "unknown": 1}).result(WAIT_S).observation == "hello"


def test_a_reward_is_a_number_or_none_and_ends_the_instance(steady: Instances) -> None:
    key = opened(steady, reward=None)
    assert steady.finish(key).result(WAIT_S) is None
    assert "finished" in reason(steady.finish(key))
    for reward, expected in (
        ("nan", "get_reward returned nan, not None or a number that is finite in float32"),
        ("list", "get_reward returned a value of type list, not None or"),
        ("4", "get_reward returned a value of type str, not None or"),
        ("raise no", "get_reward raised ValueError: no"),
    ):
        key = opened(steady, reward=reward)
        assert reason(steady.finish(key)).startswith(expected)
        assert "finished" in reason(steady.finish(key))


LATE = "TimeoutError: no answer within 2 s"
FATES = {
    "spin": LATE,
    "stop": LATE,
    "flood": LATE,
    "shut": LATE,
    "exit 7": "ended with exit code 7",
    "fault": "was ended by SIGSEGV",
    "forge \x00\x00\x00\x02[]": "WorkerDied: ",
}


def test_one_that_misbehaves_costs_its_worker_and_delays_no_other(make: Callable[..., Instances], capfd) -> None:
    instances = make(timeout_s=2.0, per_worker=1)
    good, *bad = [future.result(WAIT_S).key for future in [instances.open({"start": 1}) for _ in range(1 + len(FATES))]]
    pids = [int(act(instances, key, "pid")[0].content) for key in bad]
    assert len({*pids}) == len(FATES)
    lost = [instances.call(key, [("act", {"mood": fate})]) for key, fate in zip(bad, FATES, strict=True)]
    assert instances.call(good, [("add", {"number": 1})]).result(WAIT_S)[0].content == "2"
    for key, pid, future, (fate, expected) in zip(bad, pids, lost, FATES.items(), strict=True):
        assert expected in reason(future), fate
        wait_for(lambda pid=pid: is_gone(pid))
        assert reason(instances.finish(key)), fate
    assert instances.finish(good).result(WAIT_S) == 2.0
    assert [worker.restarts for worker in instances.workers] == [0] + [1] * len(FATES)
    printed = capfd.readouterr().err
    assert "\x1b" not in printed
    assert len(printed) < 1 << 18, "of a flood only the beginning is shown"


def test_a_hang_costs_the_environments_of_its_worker_only(make: Callable[..., Instances]) -> None:
    instances = make(timeout_s=2.0, per_worker=2)
    bad, sibling, other = (opened(instances) for _ in range(3))
    lost = instances.call(bad, [("act", {"mood": "hang"})])
    behind, spared = (instances.call(key, [("add", {"number": 1})]) for key in (sibling, other))
    assert spared.result(WAIT_S) == [Answer("1", False)]
    assert reason(lost) == "TimeoutError: no answer within 2 s"
    assert reason(behind) == "the environment's worker process died or was replaced"
    later = opened(instances, start=5)
    assert [instances.finish(key).result(WAIT_S) for key in (later, other)] == [5, 1]
    assert "finished" in reason(instances.finish(sibling))


def test_a_worker_that_dies_between_two_calls_costs_its_environments(make: Callable[..., Instances]) -> None:
    instances = make()
    keys = [opened(instances) for _ in range(2)]
    (pid,) = (worker.pid for worker in newest(instances.workers[0]))
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: is_gone(pid))
    assert all(reason(instances.finish(key)) for key in keys)
    assert instances.finish(opened(instances, start=5)).result(WAIT_S) == 5
    assert instances.workers[0].restarts == 1


def test_what_an_environment_leaves_behind_ends_with_it(make: Callable[..., Instances], tmp_path: Path) -> None:
    instances = make()
    for then in ("none", "drop", "exit 1"):
        note, key, sibling = tmp_path / then[:4], opened(instances), opened(instances)
        future = instances.call(key, [("act", {"mood": f"away {note} {then}"})])
        wait_for(note.exists)
        pid = int(note.read_text())
        if then == "exit 1":
            assert "exit code 1" in reason(future)
        else:
            future.result(WAIT_S)
            instances.finish(sibling).result(WAIT_S)
            assert not is_gone(pid), "its environment still lives"
            (instances.drop if then == "drop" else instances.finish)(key)
        wait_for(lambda pid=pid: is_gone(pid))


def test_closing_ends_everything_at_once(make: Callable[..., Instances], tmp_path: Path) -> None:
    instances, note = make(), tmp_path / "pid"
    keys = [opened(instances) for _ in range(3)]
    futures = [instances.call(key, [("act", {"mood": f"away {note} deaf"})]) for key in keys]
    wait_for(note.exists)
    late = instances.open({})
    instances.close()
    instances.close()
    for future in (*futures, late, instances.open({}), instances.finish(keys[0])):
        assert future.done()
        assert future.exception() is None or isinstance(future.exception(), (WorkerDied, InstanceLost))
    assert isinstance(instances.open({}).exception(), WorkerDied)
    instances.drop(keys[0])


def test_plain_functions_are_tools_without_a_reward(make: Callable[..., Instances]) -> None:
    plain = make(InstanceSpec("functions", MOODY.path, ("do",)))
    key = opened(plain, anything=1)
    assert plain.call(key, [("do", {"mood": "hello"})]).result(WAIT_S) == [Answer("hello", False)]
    assert plain.finish(key).result(WAIT_S) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import nowhere", r"env.py, line 1: it cannot be imported \(ModuleNotFoundError: .*correct the file"),
        ("", r"env.py has no class or function 'Env'; it has none: correct the name."),
        ("def Env(): raise OSError('offline')", r"used: the environment's construction raised OSError: offline"),
        ("import os\nclass Env:\n  def __init__(self): os._exit(3)", "WorkerDied: .* ended with exit code 3"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    make: Callable[..., Instances], tmp_path: Path, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sota_grpo.workers.fleet._FIRST_PAUSE_S", 0.0)
    path = tmp_path / "env.py"
    path.write_text(text)
    instances = make(InstanceSpec("factory", str(path), ("Env",)))
    with pytest.raises(UserError, match=expected) as raised:
        instances.wait_ready()
    assert "\n" not in str(raised.value)
    assert not hasattr(raised.value, "__notes__")


def test_an_adapter_may_be_asynchronous_throughout_and_is_closed(make: Callable[..., Instances], tmp_path) -> None:
    note = tmp_path / "note"
    instances = make(InstanceSpec("tests.unit.environments.adapter:Adapter", options={"note": str(note)}))
    made = instances.open({"b": 1, "a": 2}).result(WAIT_S)
    assert made.observation == "['a', 'b']"
    answers = instances.call(made.key, [("shout", {"word": "x"})] * 3).result(WAIT_S)
    assert not any(answer.is_error for answer in answers)
    assert instances.finish(made.key).result(WAIT_S) == 0.25
    wait_for(note.exists)
