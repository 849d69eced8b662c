"""A fleet answers every task exactly once, whatever happens to its workers."""

from __future__ import annotations

import asyncio
import os
import random
import selectors
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from sota_grpo.workers import base
from sota_grpo.workers import fleet as fleet_module
from sota_grpo.workers.base import ProcessLauncher, ThreadLauncher, Worker, WorkerDied, pending_future, starter
from sota_grpo.workers.fleet import Fleet, PatientLoop
from tests.process_rigs import newest, wait_for
from tests.worker_rigs import spec

WAIT_S = 60.0


class Puppet:
    """A worker whose answers the test gives. Other calls than tasks are answered at once unless it is mute."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.open: dict[Any, Future[Any]] = {}
        self.mute: set[str] = set()
        self.quiet_s = 0.0
        self.killed = False

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = pending_future()
        self.calls.append((method, args))
        if self.killed:
            future.set_exception(WorkerDied(f"{self.name} is dead"))
        elif method != "run" and method not in self.mute:
            echo = tuple(arg for arg in args if isinstance(arg, int))
            future.set_result(self.quiet_s if method == "ping" else (self.name, *echo))
        else:
            self.open[args[0] if args else method] = future
        return future

    def kill(self) -> None:
        self.killed = True
        for future in self.open.values():
            if not future.done():
                future.set_exception(WorkerDied(f"{self.name} was killed"))

    @property
    def tasks(self) -> list[Any]:
        return [args[0] for method, args in self.calls if method == "run"]

    @property
    def is_asleep(self) -> bool:
        return [method for method, _ in self.calls if method in ("sleep", "wake")][-1:] == ["sleep"]


class Stage:
    """Starts puppets: ``puppets[slot]`` are those of a slot, oldest first."""

    def __init__(self) -> None:
        self.puppets: dict[int, list[Puppet]] = {}
        self.prepare: Callable[[Puppet], None] = lambda puppet: None
        self.fleets: list[Fleet] = []
        self.later = ThreadPoolExecutor(1).submit  # a call that waits, on another thread

    def fleet(self, count: int, capacity: int = 2, **options: Any) -> Fleet:
        fleet = self.closed_at_the_end(Fleet("puppet", self.start, count, capacity=capacity, **options))
        fleet.wait_ready()
        return fleet

    def closed_at_the_end(self, fleet: Fleet) -> Fleet:
        self.fleets.append(fleet)
        return fleet

    def start(self, index: int) -> Puppet:
        before = self.puppets.setdefault(index, [])
        puppet = Puppet(f"puppet-{index}.{len(before)}")
        self.prepare(puppet)
        before.append(puppet)
        return puppet

    def now(self, index: int) -> Puppet:
        return self.puppets[index][-1]


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    for fleet in stage.fleets:
        fleet.close()


# Dispatch


def test_tasks_go_to_the_least_loaded_worker_and_never_beyond_its_capacity(stage: Stage) -> None:
    fleet = stage.fleet(3, capacity=2)
    futures = [fleet.submit(number) for number in range(8)]
    wait_for(lambda: sum(len(stage.now(index).tasks) for index in range(3)) == 6)
    assert sorted(stage.now(index).tasks for index in range(3)) == [[0, 3], [1, 4], [2, 5]]
    worker = next(stage.now(index) for index in range(3) if 1 in stage.now(index).tasks)
    worker.open[1].set_result("one")
    assert futures[1].result(WAIT_S) == "one"
    wait_for(lambda: worker.tasks == [1, 4, 6])
    worker.open[4].set_exception(KeyError("missing"))  # is the client's, and the worker stays
    with pytest.raises(KeyError, match="missing"):
        futures[4].result(WAIT_S)
    wait_for(lambda: worker.tasks == [1, 4, 6, 7])
    assert fleet.restarts == 0
    assert sum(len(stage.now(index).tasks) for index in range(3)) == 8


def test_tasks_of_a_dead_worker_go_first_in_their_order(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    fleet = stage.fleet(2, capacity=2)
    futures = [fleet.submit(number) for number in range(8)]
    wait_for(lambda: len(stage.now(0).tasks) + len(stage.now(1).tasks) == 4)
    first, second = stage.now(0), stage.now(1)
    mine = list(first.tasks)
    first.kill()
    wait_for(lambda: len(stage.puppets[0]) == 2 and len(stage.now(0).tasks) == 2)
    assert stage.now(0).tasks == mine == sorted(mine)
    for number in second.tasks:
        second.open[number].set_result(number)
    wait_for(lambda: second.tasks[2:] == [4, 5])
    assert (fleet.restarts, fleet.requeued) == (1, 2)
    assert not any(futures[number].done() for number in mine)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [f"{first.name} is replaced: {first.name} was killed. Tasks queued again: 2; given up: 0."]


def test_an_exception_that_ends_event_loops_is_the_tasks_and_the_worker_stays(stage: Stage) -> None:
    fleet = stage.closed_at_the_end(
        Fleet("raising", starter(ThreadLauncher(), "raising", spec("Raising")), 1, capacity=1)
    )
    for kind in ("exit", "cancelled", "stop", "cancelled_here", "cancelled_future"):
        with pytest.raises(RuntimeError, match=r"SystemExit|CancelledError|StopIteration"):
            fleet.submit(kind).result(WAIT_S)
    with pytest.raises(KeyError):
        fleet.submit("key").result(WAIT_S)
    assert fleet.restarts == 0


def test_a_task_that_takes_too_long_fails_and_its_neighbours_are_queued_again(stage: Stage) -> None:
    fleet = stage.fleet(1, capacity=2, task_deadline_s=0.3)
    stuck, old = fleet.submit("stuck"), stage.now(0)
    old.kill = lambda: None  # a worker that continues for a while
    time.sleep(0.15)
    other = fleet.submit("other")
    with pytest.raises(TimeoutError, match=r"puppet-0\.0 did not finish a task within 0\.3 s"):
        stuck.result(WAIT_S)
    wait_for(lambda: len(stage.puppets[0]) == 2 and stage.now(0).tasks == ["other"])
    for task in ("stuck", "other"):
        old.open[task].set_result("from the old one")
    stage.now(0).open["other"].set_result("from the new one")
    assert other.result(WAIT_S) == "from the new one"
    assert (fleet.restarts, fleet.requeued) == (1, 1)


@pytest.mark.parametrize("deadline_s", [None, WAIT_S])
def test_a_caller_that_is_cancelled_leaves_its_worker_to_others(stage: Stage, deadline_s: float | None) -> None:
    fleet, tasks = stage.fleet(1, capacity=1, task_deadline_s=deadline_s), list[asyncio.Task[Any]]()

    async def begin(number: int) -> None:
        tasks.append(asyncio.create_task(fleet.run(number)))

    async def cancel() -> None:
        for task in tasks:
            task.cancel()

    for number in range(3):
        fleet.start(begin(number)).result(WAIT_S)
    wait_for(lambda: stage.now(0).tasks == [0])
    fleet.start(cancel()).result(WAIT_S)
    last = fleet.submit(3)
    wait_for(lambda: stage.now(0).tasks == [0, 3])  # neither waits for 0, nor are 1 and 2 begun
    stage.now(0).open[3].set_result("three")
    assert last.result(WAIT_S) == "three"
    assert fleet.restarts == 0


def test_a_count_of_finished_parts_that_raises_is_its_tasks_error(stage: Stage) -> None:
    counts = {"bad": lambda: 1 / 0, "good": lambda: 0}
    fleet = stage.fleet(1, capacity=1, task_deadline_s=0.4, progress=lambda task: counts[task]())
    with pytest.raises(ZeroDivisionError):
        fleet.submit("bad").result(WAIT_S)
    fleet.submit("good")
    wait_for(lambda: stage.now(0).tasks == ["bad", "good"])


def test_a_task_that_kills_its_workers_is_given_up(stage: Stage) -> None:
    fleet = stage.fleet(1, max_attempts=3)
    poison = fleet.submit("poison")
    for life in range(3):
        wait_for(lambda life=life: len(stage.puppets[0]) == life + 1 and stage.now(0).tasks == ["poison"])
        stage.now(0).kill()
    with pytest.raises(WorkerDied, match=r"3 puppet workers died or hung with it, the last was puppet-0\.2"):
        poison.result(WAIT_S)
    assert (fleet.restarts, fleet.requeued) == (3, 2)


# Silence


def test_a_worker_without_progress_or_an_answer_to_a_ping_is_replaced(stage: Stage) -> None:
    fleet = stage.fleet(1, silence_s=0.4)
    fleet.submit("task")
    wait_for(lambda: stage.now(0).tasks)
    time.sleep(0.6)
    assert fleet.restarts == 0  # it answers, and is not quiet for too long
    stage.now(0).quiet_s = 0.5
    wait_for(lambda: len(stage.puppets[0]) == 2 and stage.now(0).tasks == ["task"])
    stage.now(0).mute.add("ping")
    wait_for(lambda: len(stage.puppets[0]) == 3 and stage.now(0).calls.count(("ping", ())) > 4)
    assert fleet.restarts == 2  # its successor answers


def test_the_clock_stops_while_the_driver_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait of 10 s ends after 10.5: late, but not as if the process had been stopped; one of 49.5 s after 1049.5."""
    now_s, lasts_s = [100.0], iter([10.5, 1049.5])

    def select(self: object, timeout: float | None = None) -> list[Any]:
        now_s[0] += next(lasts_s)
        return []

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr("sota_grpo.workers.fleet.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    loop = PatientLoop(max_late_s=1.0)
    loop._selector.select(10.0)  # type: ignore[attr-defined]
    assert loop.time() == 110.5
    loop._selector.select(49.5)  # type: ignore[attr-defined]
    assert loop.time() == 160.0
    loop.close()


# Broadcasts


def test_the_newest_sticky_call_comes_before_a_replacements_first_task(stage: Stage) -> None:
    fleet = stage.fleet(1)
    for version in (1, 2):
        fleet.broadcast("update", version, deadline_s=WAIT_S, sticky=True)
    fleet.broadcast("update", 3, deadline_s=WAIT_S)  # not sticky
    fleet.submit("task")
    wait_for(lambda: stage.now(0).tasks)
    stage.now(0).kill()
    wait_for(lambda: len(stage.puppets[0]) == 2 and stage.now(0).tasks)
    calls = [call for call in stage.now(0).calls if call[0] != "ping"]
    assert calls == [("update", (2,)), ("run", ("task",))]


def test_a_sticky_broadcast_reaches_a_worker_that_is_being_constructed(stage: Stage) -> None:
    fleet = stage.fleet(2, capacity=1)
    fleet.broadcast("update", 1, deadline_s=WAIT_S, sticky=True)
    stage.prepare = lambda puppet: puppet.mute.update({"ping", "update"})
    fleet.submit("first")
    wait_for(lambda: stage.now(0).tasks)
    stage.now(0).kill()
    wait_for(lambda: len(stage.puppets[0]) == 2 and len(stage.now(0).calls) == 2)
    assert fleet.broadcast("update", 2, deadline_s=WAIT_S, sticky=True) == {"puppet-1.0": ("puppet-1.0", 2)}
    fleet.submit("second")
    worker = stage.now(0)
    worker.mute.clear()
    for answered in (1, "ping"):
        worker.open[answered].set_result(0.0)
    time.sleep(0.05)
    assert not worker.tasks  # it does not hold the second one yet
    worker.open[2].set_result(2)
    wait_for(lambda: worker.tasks)
    updates_first = [call for call in worker.calls if call[0] != "ping"]
    assert updates_first == [("update", (1,)), ("update", (2,)), ("run", ("second",))]


@pytest.mark.parametrize("turns", range(8))
def test_a_worker_that_refuses_a_sticky_broadcast_at_its_start_is_replaced(turns: int, stage: Stage) -> None:
    """However many turns of the fleet's loop after the answer to its first ping the broadcast comes."""
    fleet = stage.fleet(2, silence_s=4.0)  # the death is found by a ping, one a second
    stage.prepare = lambda puppet: puppet.mute.update({"ping", "update"} if puppet.name == "puppet-1.1" else ())
    stage.now(1).kill()
    wait_for(lambda: len(stage.puppets[1]) == 2 and "ping" in stage.now(1).open)
    worker = stage.now(1)

    async def broadcast() -> dict[str, Any]:
        worker.mute.remove("ping")
        worker.open["ping"].set_result(0.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        return await fleet._broadcast("update", (5,), WAIT_S, True)

    pushed = fleet.start(broadcast())
    wait_for(lambda: 5 in worker.open)
    worker.open[5].set_exception(ValueError("refused"))
    if pushed.exception(WAIT_S) is None:  # the worker was not ready yet, so the broadcast did not wait for it
        wait_for(lambda: worker.killed and ("update", (5,)) in stage.now(1).calls)


def test_a_late_worker_is_replaced_and_left_out(stage: Stage) -> None:
    fleet = stage.fleet(2)
    stage.now(0).mute.add("update")
    assert fleet.broadcast("update", 1, deadline_s=0.2, sticky=True) == {"puppet-1.0": ("puppet-1.0", 1)}
    wait_for(lambda: len(stage.puppets[0]) == 2 and ("update", (1,)) in stage.now(0).calls)
    assert stage.puppets[0][0].killed
    wait_for(lambda: len(newest(fleet)) == 2)
    assert fleet.broadcast("update", 7, deadline_s=WAIT_S) == {name: (name, 7) for name in ("puppet-0.1", "puppet-1.0")}


def test_a_broadcast_without_an_answer_names_the_late_workers(stage: Stage) -> None:
    stage.prepare = lambda puppet: puppet.mute.add("update")
    fleet = stage.fleet(2)
    with pytest.raises(TimeoutError, match=r"update within 0\.2 s; late: puppet-[01]\.0, puppet-[01]\.0, puppet-"):
        fleet.broadcast("update", 1, deadline_s=0.2)
    assert fleet.restarts == 4  # the replacements had their chance


def test_what_was_broadcast_is_kept_no_longer_than_needed(stage: Stage) -> None:
    """Weights are large, and a timer of the length of the deadline is left behind by every push."""
    fleet = stage.fleet(1)
    seen = []
    for _ in range(5):
        payload = Stage()  # anything that can be referred to weakly
        seen.append(weakref.ref(payload))
        fleet.broadcast("update", payload, deadline_s=60.0, sticky=True)
        stage.now(0).calls.clear()
        del payload
    wait_for(lambda: [actual() is None for actual in seen] == [True] * 4 + [False])  # late starters get it


def test_a_refused_sticky_broadcast_is_raised_and_forgotten() -> None:
    launcher = ThreadLauncher()
    fleet = Fleet("echo", starter(launcher, "echo", spec()), 2, capacity=1, silence_s=0.4)
    fleet.wait_ready()
    fleet.broadcast("update", 4, deadline_s=WAIT_S, sticky=True)
    with pytest.raises(ValueError, match="version -1 is negative"):
        fleet.broadcast("update", -1, deadline_s=WAIT_S, sticky=True)
    fleet._slots[0].worker.kill()
    wait_for(lambda: [worker.name for worker in newest(fleet)] == ["echo-0.1", "echo-1"])
    assert {fleet.submit(task, 0.1).result(WAIT_S) for task in "ab"} == {("a", 4), ("b", 4)}
    fleet.close()
    launcher.close()
    assert launcher._threads  # those of replaced workers, too: one in C++ at the interpreter's end would abort it
    assert not [thread.name for thread in launcher._threads if thread.is_alive()]


def test_a_callback_cannot_wait_for_a_broadcast(stage: Stage) -> None:
    fleet = stage.fleet(1)
    raised: list[BaseException] = []

    def wait(_: Future[Any]) -> None:
        with pytest.raises(RuntimeError, match="Do not wait for a broadcast in a callback") as refused:
            fleet.broadcast("ping", deadline_s=1.0)
        raised.append(refused.value)

    fleet.submit("task").add_done_callback(wait)
    wait_for(lambda: stage.now(0).open)
    stage.now(0).open["task"].set_result(None)
    wait_for(lambda: raised)


# Starting and ending


def test_a_construction_that_raises_is_not_tried_again_at_the_start(stage: Stage, tmp_path: Path) -> None:
    start = starter(ThreadLauncher(), "echo", spec("broken", tries=str(tmp_path / "tries")))
    fleet = stage.closed_at_the_end(Fleet("echo", start, 1, capacity=1))
    future = fleet.submit("task")
    with pytest.raises(WorkerDied, match=r"echo-0 is not started again after 1 start that failed.*no such model"):
        fleet.wait_ready()
    for failed in (future, fleet.submit("later")):
        with pytest.raises(WorkerDied, match="no such model"):
            failed.result(WAIT_S)
    with pytest.raises(WorkerDied, match="no such model"):
        fleet.broadcast("ping", deadline_s=1.0)
    assert (tmp_path / "tries").read_text() == "x"


def test_a_worker_that_dies_as_it_starts_is_tried_so_often(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr(fleet_module, "_MAX_FAILED_STARTS", 3)
    stage.prepare = Puppet.kill
    with pytest.raises(WorkerDied, match=r"after 3 starts that failed; workers left: 0.* puppet-0\.2 is dead"):
        stage.fleet(1)
    assert len(stage.puppets[0]) == 3


def test_a_replacement_whose_construction_raises_is_tried_again(stage: Stage, tmp_path: Path) -> None:
    start = starter(ThreadLauncher(), "echo", spec("works_once", tries=str(tmp_path / "tries")))
    fleet = stage.closed_at_the_end(Fleet("echo", start, 1, capacity=1, silence_s=0.4))
    fleet.wait_ready()
    fleet._slots[0].worker.kill()
    assert fleet.submit("task").result(WAIT_S) == ("task", 0)
    assert [worker.name for worker in newest(fleet)] == ["echo-0.2"]


def test_a_start_that_takes_too_long_has_failed(stage: Stage, monkeypatch) -> None:
    stage.prepare = lambda puppet: puppet.mute.update({"ping"} if puppet.name == "puppet-0.0" else ())
    fleet = stage.fleet(1, start_s=0.1)
    assert (fleet.restarts, stage.puppets[0][0].killed) == (1, True)
    stage.prepare = lambda puppet: puppet.mute.add("ping")
    monkeypatch.setattr(fleet_module, "_MAX_FAILED_STARTS", 1)
    with pytest.raises(WorkerDied, match=r"after 1 start that failed.* it was not ready after 0\.1 s"):
        stage.fleet(1, start_s=0.1)


def test_others_continue_when_a_slot_is_given_up(stage: Stage, monkeypatch) -> None:
    monkeypatch.setattr(fleet_module, "_MAX_FAILED_STARTS", 2)
    fleet = stage.fleet(2, capacity=1)
    stage.prepare = Mock(side_effect=OSError("no device"))
    first, second = fleet.submit("first"), fleet.submit("second")
    wait_for(lambda: stage.now(0).tasks and stage.now(1).tasks)
    stage.now(0).kill()
    wait_for(lambda: fleet._slots[0].state == "retired")
    stage.now(1).open["second"].set_result(2)
    wait_for(lambda: stage.now(1).tasks == ["second", "first"])
    stage.now(1).open["first"].set_result(1)
    assert (first.result(WAIT_S), second.result(WAIT_S)) == (1, 2)


def test_close_fails_what_is_open_and_what_comes_later(stage: Stage) -> None:
    fleet = stage.fleet(1, capacity=1)
    futures = [fleet.submit(number) for number in range(3)]
    wait_for(lambda: stage.now(0).tasks)
    fleet.close()
    fleet.close()
    for future in (*futures, fleet.submit("later")):
        with pytest.raises(WorkerDied, match="the puppet fleet was closed"):
            future.result(0.1)
    with pytest.raises(WorkerDied, match="closed"):
        fleet.broadcast("ping", deadline_s=1.0)
    assert stage.now(0).killed


@pytest.mark.parametrize("num_turns", range(4))
def test_close_returns_where_a_worker_dies_in_the_same_moment(stage: Stage, num_turns: int) -> None:
    fleet = stage.fleet(1, capacity=1)
    task = fleet.submit(0)
    wait_for(lambda: stage.now(0).tasks == [0])

    async def die_and_close() -> None:
        stage.now(0).kill()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        fleet._stop.set()

    fleet.start(die_and_close())
    fleet._thread.join(WAIT_S)
    if fleet._thread.is_alive():
        stage.fleets.clear()  # close() would wait for ever
    assert not fleet._thread.is_alive()
    with pytest.raises(WorkerDied, match="closed"):
        task.result(WAIT_S)


def test_a_worker_that_arrives_after_the_end_is_killed(stage: Stage) -> None:
    gate = threading.Event()
    stage.prepare = lambda puppet: gate.wait(WAIT_S) and None
    fleet = Fleet("puppet", stage.start, 1, capacity=1)
    wait_for(lambda: 0 in stage.puppets)
    closing = stage.later(fleet.close)
    time.sleep(0.05)
    gate.set()
    closing.result(WAIT_S)
    assert stage.now(0).killed
    with pytest.raises(WorkerDied, match="closed"):
        fleet.wait_ready()


def test_who_waits_for_a_replacement_without_end_hears_what_else_has_ended(stage: Stage, monkeypatch) -> None:
    """A machine dies with its engine and the learner: weights are pushed to an engine that no machine has room for.

    Once there is room, the replacement gets them.
    """
    monkeypatch.setattr("sota_grpo.workers.fleet._POLL_S", 0.01)
    fleet, first, room = stage.fleet(1), stage.now(0), threading.Event()
    stage.prepare = lambda puppet: room.wait(WAIT_S) and None
    first.mute.add("update")
    pushed = stage.later(fleet.broadcast, "update", 1, deadline_s=WAIT_S, sticky=True)
    wait_for(lambda: 1 in first.open)
    first.kill()
    wait_for(lambda: fleet.restarts == 1)
    assert not pushed.done()
    fleet.poll = Mock(side_effect=ConnectionError("the learner is gone"))
    with pytest.raises(ConnectionError, match="the learner is gone"):
        pushed.result(WAIT_S)
    fleet.poll = Mock()
    again = stage.later(fleet.broadcast, "update", 2, deadline_s=WAIT_S, sticky=True)
    room.set()
    assert again.result(WAIT_S) == {"puppet-0.1": ("puppet-0.1", 2)}


# Sleep


@pytest.fixture
def sleepers(stage: Stage) -> Callable[..., Fleet]:
    """Fleets that share their devices and notice a death at once."""
    return lambda count, **options: stage.fleet(count, shares_devices=True, silence_s=0.2, **options)


def dies(fleet: Fleet, puppet: Puppet) -> None:
    puppet.kill()
    wait_for(lambda: puppet not in newest(fleet))


def test_sleep_returns_when_the_last_one_sleeps_and_wake_when_all_are_awake(stage: Stage, sleepers) -> None:
    fleet = sleepers(2)
    stage.now(1).mute.add("sleep")
    sleeping = stage.later(fleet.sleep, WAIT_S)
    wait_for(lambda: "sleep" in stage.now(1).open and stage.now(0).is_asleep)
    assert not sleeping.done()
    stage.now(1).open["sleep"].set_result(None)
    sleeping.result(WAIT_S)
    fleet.sleep(WAIT_S)  # they do
    assert [call for call, _ in stage.now(0).calls].count("sleep") == 1
    fleet.wake(WAIT_S)
    assert not stage.now(0).is_asleep | stage.now(1).is_asleep


@pytest.mark.parametrize(("others", "by"), [(0, "wake"), (1, "wake"), (0, "task")])
def test_one_that_dies_asleep_is_replaced_when_the_others_wake_or_a_task_comes(stage, sleepers, others, by) -> None:
    """Also where all died: wake then waits for another, and a task for which no worker is left ends the sleep."""
    fleet = sleepers(1 + others, start_s=0.05, capacity=2)  # the time of a start that waits does not count
    fleet.sleep(WAIT_S)
    lives = len(stage.puppets[0])
    dies(fleet, stage.now(0))
    time.sleep(0.2)
    fleet.sleep(WAIT_S)
    assert len(stage.puppets[0]) == lives
    tasks = [fleet.submit(number) for number in range(2)] if by == "task" else []
    if by == "wake":
        fleet.wake(WAIT_S)
    wait_for(lambda: len(stage.puppets[0]) > lives and (by == "wake" or len(stage.now(0).tasks) == 2))
    assert "sleep" not in [call for call, _ in stage.now(0).calls]
    assert not any(task.done() for task in tasks)
    if by == "wake" and others:
        assert not stage.now(1).is_asleep


def test_one_that_is_being_replaced_is_waited_for_and_sleeps_before_its_first_task(stage: Stage, sleepers) -> None:
    fleet, constructed = sleepers(2), threading.Event()
    stage.prepare = lambda puppet: constructed.wait(WAIT_S) and None
    dies(fleet, stage.now(1))
    sleeping = stage.later(fleet.sleep, WAIT_S)
    wait_for(lambda: stage.now(0).is_asleep)
    assert not sleeping.done()
    constructed.set()
    sleeping.result(WAIT_S)
    assert len(stage.puppets[1]) == 2
    assert stage.now(1).is_asleep


def test_a_task_while_the_workers_are_put_to_sleep_leaves_starting_ones_to_sleep(stage: Stage, sleepers) -> None:
    fleet, room = sleepers(2), threading.Event()
    stage.prepare = lambda puppet: room.wait(WAIT_S) and None
    dies(fleet, stage.now(0))
    asleep = stage.later(fleet.sleep, WAIT_S)
    wait_for(lambda: stage.now(1).is_asleep)
    task = fleet.submit("late")
    wait_for(lambda: "late" in stage.now(1).open)
    room.set()
    asleep.result(WAIT_S)
    assert stage.now(0).name == "puppet-0.1"
    assert stage.now(0).is_asleep
    stage.now(1).open["late"].set_result("done")
    assert task.result(WAIT_S) == "done"


def test_a_fleet_sleeps_after_its_tasks(stage: Stage, sleepers) -> None:
    """Its worker would wake, while others compute on the device; a client may have left its request behind."""
    fleet = sleepers(1)
    task = fleet.submit("a")
    wait_for(lambda: stage.now(0).tasks)
    with pytest.raises(RuntimeError, match=r"puppet workers to sleep: 1 tasks are pending after 0\.1 s"):
        fleet.sleep(0.1)
    sleeping = stage.later(fleet.sleep, WAIT_S)
    assert not stage.now(0).is_asleep
    stage.now(0).open["a"].set_result("done")
    assert task.result(WAIT_S) == "done"
    sleeping.result(WAIT_S)
    assert stage.now(0).is_asleep


def test_close_ends_a_wait_for_sleep_and_starts_no_worker(stage: Stage, sleepers) -> None:
    fleet = sleepers(2)
    stage.now(1).mute.add("sleep")
    sleeping = stage.later(fleet.sleep, WAIT_S)
    wait_for(lambda: "sleep" in stage.now(1).open)
    fleet.close()
    with pytest.raises(WorkerDied):
        sleeping.result(WAIT_S)
    other, lives = sleepers(1), len(stage.puppets[0])
    other.sleep(WAIT_S)
    dies(other, stage.now(0))
    other.close()
    assert len(stage.puppets[0]) == lives


# Real processes


def test_every_task_is_answered_once_under_random_kills() -> None:
    seed = random.getrandbits(32)
    dice, launcher, pids = random.Random(seed), ProcessLauncher(), []
    start = starter(launcher, "echo", spec(), [{"threads": 1}] * 2)

    def recorded(index: int) -> Worker:
        worker = start(index)
        pids.append(worker.pid)
        return worker

    answered: list[Any] = []
    with closing(launcher), closing(Fleet("echo", recorded, 2, capacity=2, silence_s=2.0)) as fleet:
        fleet.wait_ready()
        fleet.broadcast("update", 1, deadline_s=WAIT_S, sticky=True)
        for task in range(30):
            future = fleet.submit(task, dice.uniform(0.0, 0.15))
            future.add_done_callback(lambda done: answered.append(done.exception() or done.result()))
        for kind in (signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL):
            time.sleep(dice.uniform(0.0, 0.15))
            with suppress(ProcessLookupError, IndexError):  # the one that was drawn is dead already, or all are
                os.kill(dice.choice([worker.pid for worker in newest(fleet)]), kind)
        wait_for(lambda: len(answered) == 30)
    assert sorted(answered) == [(task, 1) for task in range(30)], f"seed {seed}"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()], "a process was left"


def test_processes_that_may_not_be_looked_into_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with /proc mounted with hidepid=1."""
    child, ppid = subprocess.Popen(["sleep", "60"]), psutil.Process.ppid
    refused = Mock(side_effect=psutil.AccessDenied(1))

    def own_ppid(process: psutil.Process) -> int:
        return ppid(process) if process.pid in (os.getpid(), child.pid) else refused()

    monkeypatch.setattr(psutil.Process, "ppid", own_ppid)
    monkeypatch.setattr(psutil.Process, "children", refused)
    try:
        assert [process.pid for process in base.descendants()] == [child.pid]
    finally:
        child.kill()
        child.wait()
