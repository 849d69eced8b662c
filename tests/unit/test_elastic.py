"""Workers that come and go: who gets what and when, and what is never lost, whatever the number of those that live."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sota_grpo import keys
from sota_grpo.engines.scripted import ScriptedEngine
from sota_grpo.recording.metrics import declared
from sota_grpo.rl.records import Sampling
from sota_grpo.rl.transforms import GroupAdvantage
from sota_grpo.source.source import Rollouts, RolloutSource
from sota_grpo.workers.base import IDLE_METHOD, Worker, WorkerDied, WorkerSpec, starter
from sota_grpo.workers.elastic import ElasticFleet
from sota_grpo.workers.fleet import worker_metrics
from sota_grpo.workers.processes import ThreadLauncher
from sota_grpo.workers.rollout import FleetEngine, RolloutWorker
from tests.l3_parts import make_env
from tests.unit.test_fleet import WAIT_S, Clock, Puppet, by_hand, clock, until
from tests.worker_rigs import spec

__all__ = ["clock"]


class Actor(Puppet):
    """A puppet that says nothing before it has a machine, as a Ray actor that is pending."""

    has_room = False

    def call(self, method: str, *args: Any):
        if method != IDLE_METHOD:
            return super().call(method, *args)
        future = super().call(method)
        if self.has_room and not future.done():
            future.set_result(0.0)
        return future

    def give_room(self) -> None:
        self.has_room = True
        self.open.pop(IDLE_METHOD).set_result(0.0)

    @property
    def said(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [call for call in self.calls if call[0] not in ("ping", IDLE_METHOD)]


class Machines:
    """Room for so many actors; what is asked for beyond that waits."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.actors: dict[int, list[Actor]] = {}
        self.fleets: list[ElasticFleet] = []
        self._lock = threading.Lock()

    def start(self, index: int) -> Actor:
        with self._lock:
            before = self.actors.setdefault(index, [])
            actor = Actor(f"actor-{index}.{len(before)}")
            actor.has_room = self.alive < self.room
            before.append(actor)
        return actor

    @property
    def alive(self) -> int:
        return sum(actor.has_room and not actor.killed for actors in self.actors.values() for actor in actors)

    def now(self, index: int) -> Actor:
        return self.actors[index][-1]

    def pending(self) -> list[int]:
        return [index for index in self.actors if not self.now(index).has_room]

    def ready(self) -> list[int]:
        return [index for index in self.actors if self.now(index).has_room and not self.now(index).killed]

    def join(self) -> int:
        """A machine comes; the slot whose worker is there now."""
        self.room += 1
        index = self.pending()[0]
        self.now(index).give_room()
        return index

    def leave(self, index: int) -> None:
        """The machine of a slot's worker goes."""
        self.room -= 1
        self.now(index).kill()

    def fleet(self, least: int, most: int, gone_s: float = 600.0, capacity: int = 2, **options: Any) -> ElasticFleet:
        fleet = ElasticFleet("actor", self.start, least, most, gone_s=gone_s, capacity=capacity, **options)
        self.fleets.append(fleet)
        return fleet


@pytest.fixture
def machines() -> Iterator[Callable[[int], Machines]]:
    made: list[Machines] = []
    yield lambda room: made.append(Machines(room)) or made[-1]
    for each in made:
        for fleet in each.fleets:
            fleet.close()


def all_asked(machines: Machines, count: int) -> None:
    """Every slot has a worker, or asks for one."""
    until(lambda: len(machines.actors) == count and all(actors[-1].calls for actors in machines.actors.values()))


def test_it_begins_with_the_least_and_as_many_tasks_run_as_there_is_room_for(machines) -> None:
    there = machines(1)
    fleet = there.fleet(1, 3)
    fleet.wait_ready()
    all_asked(there, 3)
    futures = [fleet.submit(number) for number in range(9)]

    def running() -> int:
        return sum(len(there.now(index).tasks) for index in range(3))

    until(lambda: running() == 2)
    for live in (2, 3):
        there.join()
        until(lambda live=live: running() == 2 * live)
        assert worker_metrics([fleet])["workers/engines"] == fleet.num_live == live
    there.leave(there.ready()[0])
    until(lambda: fleet.num_live == 2 and fleet.requeued == 2)
    while not all(future.done() for future in futures):
        for index in there.ready():
            for task in set(there.now(index).tasks) & there.now(index).open.keys():
                there.now(index).open.pop(task).set_result((index, task))
    assert [future.result()[1] for future in futures] == list(range(9))
    assert declared("workers/engines").unit == "engines"


def test_it_is_not_ready_with_fewer_than_the_least(machines) -> None:
    there = machines(1)
    fleet = there.fleet(2, 3)
    all_asked(there, 3)
    until(lambda: fleet.num_live == 1)
    assert not fleet._ready.done()
    there.join()
    fleet.wait_ready()


def test_what_waits_for_a_machine_is_told_nothing_before_it_is_there_and_the_newest_then(machines) -> None:
    """Weights are large, and Ray would keep each version in the queue of an actor that is pending."""
    there = machines(1)
    fleet = there.fleet(1, 2)
    fleet.wait_ready()
    all_asked(there, 2)
    for version in (1, 2):
        assert len(fleet.broadcast("update", version, deadline_s=WAIT_S, sticky=True)) == 1
    (late,) = there.pending()
    there.now(late).kill()
    until(lambda: len(there.actors[late]) == 2)  # the next one asks for a machine when there are weights already
    until(lambda: there.now(late).calls)
    fleet.broadcast("update", 3, deadline_s=WAIT_S, sticky=True)
    fleet.broadcast("ping", deadline_s=WAIT_S)  # the supervisor has done all that
    assert [method for actor in there.actors[late] for method, _ in actor.calls] == [IDLE_METHOD] * 2
    tasks = [fleet.submit(number) for number in range(4)]
    there.now(late).mute.add("update")
    there.join()
    until(lambda: 3 in there.now(late).open)
    time.sleep(0.05)
    assert not there.now(late).tasks  # it does not hold the newest yet
    there.now(late).open.pop(3).set_result(3)
    until(lambda: len(there.now(late).tasks) == 2)
    assert there.now(late).said[0] == ("update", (3,))
    assert not any(task.done() for task in tasks)


def test_a_machine_may_come_after_any_time(machines, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    there = machines(1)
    fleet, wait = by_hand(clock, monkeypatch, lambda: there.fleet(1, 2, start_silence_s=10.0, silence_s=8.0))
    wait(1000.0)
    assert (fleet.num_live, fleet.restarts, len(there.pending())) == (1, 0, 1)
    there.join()
    wait(1.0)
    assert (fleet.num_live, fleet.restarts) == (2, 0)


def test_fewer_than_the_least_go_on_for_a_while_and_then_it_ends(
    machines, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = machines(3)
    options = {"gone_s": 100.0, "advice": "add machines; train.resume=auto continues", "silence_s": 8.0}
    fleet, wait = by_hand(clock, monkeypatch, lambda: there.fleet(2, 3, **options))
    wait(1000.0)
    there.leave(0)
    there.leave(1)
    task = fleet.submit("task")
    wait(99.0)
    assert there.now(2).tasks == ["task"]
    said = "Only 1 of at least 2 actor workers are left; in 100 s without enough of them the run ends."
    assert [record.getMessage() for record in caplog.records if "are left" in record.getMessage()] == [said]
    there.join()
    wait(1000.0)  # there were enough again
    there.leave(2)
    wait(99.0)
    assert not task.done()
    wait(2.0)
    sentence = r"For 100 s there were fewer than 2 actor workers, 1 at last; add machines; train\.resume=auto continues"
    with pytest.raises(WorkerDied, match=sentence):
        task.result(0)
    assert there.alive == 0


def test_one_that_is_starting_at_the_end_of_the_wait_is_waited_for(
    machines, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = machines(0)
    fleet, wait = by_hand(clock, monkeypatch, lambda: there.fleet(1, 1, gone_s=100.0, start_silence_s=50.0))
    wait(90.0)
    there.now(0).mute.add("ping")  # it loads
    there.join()
    wait(40.0)
    assert fleet._dead is None
    there.now(0).open.pop("ping").set_result(0.0)
    wait(100.0)
    assert fleet.num_live == 1
    assert fleet._dead is None


def test_no_number_of_failed_starts_ends_the_tries_once_one_has_worked(machines) -> None:
    there = machines(1)
    fleet = there.fleet(1, 2)
    fleet._longest_pause_s = 0.0
    fleet.wait_ready()
    all_asked(there, 2)
    (late,) = there.pending()
    fleet._slots[late].failed_starts = 2000  # of a day and a half
    for life in range(7):  # more than max_start_failures
        there.now(late).kill()
        until(lambda life=life: len(there.actors[late]) == life + 2 and there.now(late).calls)
    there.join()
    until(lambda: fleet.num_live == 2)


def test_a_construction_that_raises_ends_it_at_the_start_alone(tmp_path) -> None:
    start = starter(ThreadLauncher(), "echo", spec("broken", tries=str(tmp_path / "tries")))
    fleet = ElasticFleet("echo", start, 1, 2, gone_s=600.0, capacity=1)
    with pytest.raises(WorkerDied, match=r"given up after 1 start that failed, 0 left: .*no such model"):
        fleet.wait_ready()
    fleet.close()


def test_newcomers_get_broadcasts_and_no_task_before_they_are_admitted(machines) -> None:
    there = machines(1)
    fleet = there.fleet(1, 3, capacity=1)
    fleet.wait_ready()
    all_asked(there, 3)
    fleet.hold_newcomers()
    futures = [fleet.submit(number) for number in range(3)]
    there.join()
    until(fleet.newcomers)
    (newcomer,) = fleet.newcomers()
    assert len(fleet.broadcast("update", 1, deadline_s=WAIT_S)) == 2
    assert (newcomer.broadcast("update", 2, deadline_s=1.0), fleet.num_live) == ([(newcomer.worker.name, 2)], 1)
    newcomer.submit("probe")
    assert there.now(newcomer.index).tasks == ["probe"]
    heard = threading.Event()
    fleet._post(heard.wait, WAIT_S)
    fleet.admit(newcomer)
    assert fleet.newcomers() == []  # before the supervisor has heard of it: nobody changes its weights again
    heard.set()
    until(lambda: there.now(newcomer.index).tasks == ["probe", 1])
    assert (fleet.num_live, fleet.newcomers()) == (2, [])
    assert not any(future.done() for future in futures)


def test_a_newcomer_that_is_refused_is_replaced_and_its_slot_given_up_at_last(machines) -> None:
    there = machines(1)
    fleet = there.fleet(1, 2)
    fleet._longest_pause_s = 0.0
    fleet.wait_ready()
    all_asked(there, 2)
    fleet.hold_newcomers()
    late = there.join()
    for life in range(5):
        until(lambda life=life: [one.worker for one in fleet.newcomers()] == there.actors[late][life : life + 1] != [])
        fleet.refuse(fleet.newcomers()[0], "its weights did not land")
    until(lambda: fleet._slots[late].state == "retired")
    assert len(there.actors[late]) == 5
    assert all(actor.killed and not actor.tasks for actor in there.actors[late])
    assert fleet.num_live == 1


# A whole source over engines in threads


class Herd:
    """Engines in threads, for which there is room or not; each notes the version of whatever it samples."""

    def __init__(self, env, least: int, most: int) -> None:
        self.env, self.seen = env, []
        self.room = threading.Semaphore(least)
        self.workers: list[tuple[Worker, RolloutWorker]] = []
        self.closing = threading.Event()
        self.launcher = ThreadLauncher()
        self.fleet = ElasticFleet("rollout", self.start, least, most, gone_s=WAIT_S, capacity=2, silence_s=4.0)
        self.fleet.wait_ready()

    def start(self, index: int) -> Worker:
        while not self.room.acquire(timeout=0.01):
            if self.closing.is_set():
                raise RuntimeError("closed")
        return self.launcher.start(f"rollout-{index}", WorkerSpec("tests.unit.test_elastic:engine", {"herd": self}))

    def script(self, request, sample: int, version: int) -> list[int]:
        self.seen.append((version, request.group_id))
        return [5] * (1 + (request.seed + sample) % 3)

    def leave(self) -> None:
        """The machine of one that lives goes."""
        random.choice([slot.worker for slot in self.fleet._slots if slot.state == "ready"]).kill()

    def close(self) -> None:
        self.closing.set()
        self.fleet.close()
        self.launcher.close()


def engine(herd: Herd) -> RolloutWorker:
    eos = herd.env.tokenizer.eos_token_id
    return RolloutWorker(lambda: ScriptedEngine(herd.script, eos_token_id=eos, max_model_len=2048, duration_s=0.004))


def test_engines_come_and_go_and_every_prompt_is_trained_once_and_none_too_old() -> None:
    """A new engine has version 0 until weights land in it: used before that, its tokens would be too old."""
    env = make_env(num_envs=3, repeats=3, num_train=200)
    herd = Herd(env, 1, 4)
    front = FleetEngine(herd.fleet, name="scripted", max_model_len=2048, share=lambda value: value, deadline_s=WAIT_S)
    age, num_groups, steps = 2, 4, 24
    source = RolloutSource(
        Rollouts(env, front),
        Sampling(max_tokens=8),
        num_groups=num_groups,
        max_policy_age=age,
        transforms=[("advantage", GroupAdvantage())],
        wait_deadline_s=WAIT_S,
        metrics_extra=lambda: worker_metrics([herd.fleet]),
    )
    trained: list[int] = []
    live: set[float] = set()
    for version in range(steps):
        batch = source.next_batch(version)  # asserts the bound for every row
        live.add(source.metrics()["workers/engines"])
        trained += sorted({int(row.get(keys.GROUP_ID)) for row in batch})
        if version % 6 in (1, 2, 3):
            herd.room.release()
        elif version % 6 == 5 and herd.fleet.num_live > 1:
            herd.leave()
        marked = len(herd.seen)
        front.update_weights([("weight", torch.ones(1))], version + 1)
        source.release(batch)
        assert all(sampled >= version - age for sampled, _ in herd.seen[marked:])
    source.close()
    herd.close()
    assert len(live) > 2, "the number of engines did not change"
    assert len(set(trained)) == len(trained) == steps * num_groups
    assert max(trained) < steps * num_groups + age * num_groups


def test_wrong_ends_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 to 1"):
        ElasticFleet("actor", Machines(0).start, 2, 1, gone_s=1.0, capacity=1)
