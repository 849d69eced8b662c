"""Workers that share devices sleep together, and nobody starts while they do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sota_grpo.workers.base import WorkerDied
from sota_grpo.workers.fleet import Fleet
from tests.unit.test_fleet import WAIT_S, Puppet, Stage, until


class Sleeper(Puppet):
    """A puppet that sleeps and wakes at once, unless it is mute."""

    asleep = False

    def call(self, method: str, *args: Any):
        future = super().call(method, *args)
        if method in ("sleep", "wake") and not self.killed and method not in self.mute:
            self.asleep = method == "sleep"
            self.open.pop(method).set_result(None)
        return future

    def answer(self, method: str) -> None:
        self.asleep = method == "sleep"
        self.open.pop(method).set_result(None)


class SleeperStage(Stage):
    """A stage of sleepers; ``sleep`` and ``wake`` are called on threads, since they wait."""

    def start(self, index: int) -> Sleeper:
        before = self.puppets.setdefault(index, [])
        puppet = Sleeper(f"sleeper-{index}.{len(before)}")
        self.prepare(puppet)
        before.append(puppet)
        return puppet

    def fleet(self, count: int, capacity: int = 2, **options: Any) -> Fleet:
        fleet = Fleet("sleeper", self.start, count, capacity=capacity, shares_devices=True, silence_s=0.2, **options)
        self.fleets.append(fleet)
        fleet.wait_ready()
        return fleet

    def asleep(self) -> list[bool]:
        return [self.now(index).asleep for index in sorted(self.puppets)]

    def lives(self) -> list[int]:
        return [len(self.puppets[index]) for index in sorted(self.puppets)]


@pytest.fixture
def stage() -> Iterator[SleeperStage]:
    stage = SleeperStage()
    yield stage
    for fleet in stage.fleets:
        fleet.close()


def behind(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread


def ended(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_sleep_returns_when_the_last_one_sleeps_and_wake_when_all_are_awake(stage: SleeperStage) -> None:
    fleet = stage.fleet(2)
    stage.now(1).mute = {"sleep"}
    sleeping = behind(fleet.sleep, WAIT_S)
    until(lambda: "sleep" in stage.now(1).open and stage.now(0).asleep)
    assert sleeping.is_alive()
    stage.now(1).answer("sleep")
    assert ended(sleeping)
    fleet.sleep(WAIT_S)  # they do
    assert [call for call, _ in stage.now(0).calls].count("sleep") == 1
    fleet.wake(WAIT_S)
    assert stage.asleep() == [False, False]


def test_one_that_dies_asleep_is_not_replaced_before_the_others_wake(stage: SleeperStage) -> None:
    fleet = stage.fleet(2, start_silence_s=0.05)  # a start that waits is not silent
    fleet.sleep(WAIT_S)
    first = stage.now(0)
    stage.now(0).kill()
    until(lambda: first.killed and fleet._slots[0].state == "starting")
    fleet.sleep(WAIT_S)
    assert stage.lives() == [1, 1]
    fleet.wake(WAIT_S)
    until(lambda: stage.lives() == [2, 1] and fleet._slots[0].state == "ready")
    assert stage.asleep() == [False, False]
    assert "sleep" not in [call for call, _ in stage.now(0).calls]


def test_where_all_died_asleep_wake_waits_for_another(stage: SleeperStage) -> None:
    fleet = stage.fleet(1)
    fleet.sleep(WAIT_S)
    stage.now(0).kill()
    until(lambda: fleet._slots[0].state == "starting")
    fleet.wake(WAIT_S)
    assert stage.lives() == [2]
    task = fleet.submit("a")
    until(lambda: stage.now(0).tasks == ["a"])
    stage.now(0).open["a"].set_result("done")
    assert task.result(WAIT_S) == "done"


def test_one_that_is_being_replaced_is_waited_for_and_sleeps_before_its_first_task(stage: SleeperStage) -> None:
    fleet, constructed = stage.fleet(2), threading.Event()
    first = stage.now(1)
    stage.prepare = lambda puppet: (constructed.wait(WAIT_S), None)[1]
    stage.now(1).kill()
    until(lambda: first.killed)
    sleeping = behind(fleet.sleep, WAIT_S)
    until(lambda: stage.now(0).asleep)
    assert sleeping.is_alive()
    constructed.set()
    assert ended(sleeping)
    assert stage.asleep() == [True, True]
    assert stage.lives() == [1, 2]


def test_nobody_is_told_to_sleep_who_has_a_task(stage: SleeperStage) -> None:
    """It would wake for it, beside others who compute."""
    fleet = stage.fleet(2)
    task = fleet.submit("a")
    until(lambda: any(stage.now(index).tasks for index in range(2)))
    with pytest.raises(RuntimeError, match="1 tasks of sleeper are open"):
        fleet.sleep(WAIT_S)
    (busy,) = (stage.now(index) for index in range(2) if stage.now(index).tasks)
    busy.open["a"].set_result("done")
    assert task.result(WAIT_S) == "done"
    fleet.sleep(WAIT_S)
    assert stage.asleep() == [True, True]


def test_a_task_ends_the_sleep(stage: SleeperStage) -> None:
    """Else one for which no worker is left would wait for ever."""
    fleet = stage.fleet(1)
    fleet.sleep(WAIT_S)
    stage.now(0).kill()
    until(lambda: fleet._slots[0].state == "starting")
    fleet.submit("a")
    until(lambda: stage.now(0).tasks == ["a"])


def test_close_ends_a_wait_for_sleep_and_starts_nobody(stage: SleeperStage) -> None:
    fleet, failures = stage.fleet(2), []
    stage.now(1).mute = {"sleep"}

    def sleep() -> None:
        try:
            fleet.sleep(WAIT_S)
        except WorkerDied as error:
            failures.append(error)

    sleeping = behind(sleep)
    until(lambda: "sleep" in stage.now(1).open)
    fleet.close()
    assert ended(sleeping)
    assert len(failures) == 1
    other = stage.fleet(1)
    lives = stage.lives()
    other.sleep(WAIT_S)
    stage.now(0).kill()
    until(lambda: other._slots[0].state == "starting")
    other.close()
    assert stage.lives() == lives
