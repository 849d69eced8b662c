"""One contract for workers that are threads, processes and Ray actors."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sota_grpo.workers.base import (
    ConstructionFailed,
    Launcher,
    ProcessLauncher,
    ThreadLauncher,
    Worker,
    WorkerDied,
)
from tests.process_rigs import below, require_gone, wait_for
from tests.worker_rigs import spec

WAIT_S = 60.0
LINUX = sys.platform == "linux"
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed (extra: ray)")


class Place:
    """A launcher and how to start a worker with it; each worker gets a bundle of its own where there are bundles."""

    def __init__(self, kind: str, launcher: Launcher) -> None:
        self.kind, self.launcher = kind, launcher
        self.count = 0

    @functools.cached_property
    def worker(self) -> Worker:
        """One that no test ends."""
        return self.start(env={"SOTA_GRPO_TEST": "yes"})

    def start(self, factory: str = "Echo", env: dict[str, str] | None = None, **options: Any) -> Worker:
        self.count += 1
        placement: dict[str, Any] = {} if self.kind == "thread" else {"env": env, "threads": 1}
        if self.kind == "ray":
            placement["bundle"] = self.count % 2
        return self.launcher.start(f"echo-{self.count}", spec(factory, **options), **placement)


@pytest.fixture(scope="module")
def places() -> Iterator[dict[str, Place]]:
    actual = {"thread": Place("thread", ThreadLauncher()), "process": Place("process", ProcessLauncher())}
    if find_spec("ray") is not None:
        from sota_grpo.workers.ray_cluster import RayLauncher

        os.environ["RAY_AUTH_MODE"] = "disabled"  # whatever the shell says
        on_sigterm = signal.getsignal(signal.SIGTERM)
        actual["ray"] = Place("ray", RayLauncher([{"CPU": 1}] * 2, object_store_bytes=80 * 2**20))
        assert signal.getsignal(signal.SIGTERM) is on_sigterm
    yield actual
    for place in actual.values():
        place.launcher.close()
        place.launcher.close()  # idempotent


@pytest.fixture(scope="module", params=["thread", "process", pytest.param("ray", marks=needs_ray)])
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]


@pytest.fixture(scope="module", params=["process", pytest.param("ray", marks=needs_ray)])
def apart(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    """A place whose workers are processes."""
    return places[request.param]


@pytest.fixture
def worker(place: Place) -> Worker:
    return place.worker


@pytest.fixture
def steady(apart: Place) -> Worker:
    return apart.worker


@pytest.fixture
def own(apart: Place) -> Iterator[Worker]:
    """A worker that a test may end."""
    worker = apart.start()
    worker.call("ping").result(WAIT_S)
    yield worker
    worker.kill()


def require_reaped(pid: int | None) -> None:
    """It neither runs, nor is stopped, nor is a zombie of ours."""
    wait_for(lambda: not psutil.pid_exists(pid), WAIT_S)  # type: ignore[arg-type]


def test_calls_wait_for_the_construction_start_in_order_and_fail_at_a_kill(place: Place, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    worker = place.start("held_echo", pipe=str(pipe))
    ready = worker.call("ping")
    assert not ready.done()
    pipe.write_text("go on")
    noted = [worker.call("note", number) for number in range(50)]
    assert worker.call("notes").result(WAIT_S) == list(range(50))
    assert not wait([ready, *noted], WAIT_S).not_done
    never = worker.call("never")
    worker.kill()
    with pytest.raises(WorkerDied, match=worker.name):
        never.result(0.1)
    with pytest.raises(WorkerDied):
        worker.call("ping").result(0.1)
    worker.kill()  # idempotent
    if worker.pid is not None:  # type: ignore[attr-defined]
        require_reaped(worker.pid)  # type: ignore[attr-defined]


def test_a_long_call_does_not_hold_up_a_quick_one(worker: Worker) -> None:
    never = worker.call("never")
    held = worker.call("hold")
    assert worker.call("run", "quick").result(WAIT_S) == ("quick", 0)
    assert not held.done()
    worker.call("release").result(WAIT_S)
    assert held.result(WAIT_S) == "held"
    assert not never.done()


def test_exceptions_keep_their_type(worker: Worker) -> None:
    with pytest.raises(KeyError, match="missing"):
        worker.call("fail", "key").result(WAIT_S)
    with pytest.raises(ZeroDivisionError, match="later"):
        worker.call("fail_later").result(WAIT_S)
    with pytest.raises(WorkerDied, match="engine is broken"):
        worker.call("cannot_go_on").result(WAIT_S)
    with pytest.raises(AttributeError, match="no_such_method"):
        worker.call("no_such_method").result(WAIT_S)
    with pytest.raises(AttributeError, match="private"):
        worker.call("_lock").result(WAIT_S)
    # the worker continues
    assert worker.call("ping").result(WAIT_S) == 0.0


def test_a_construction_that_raises_fails_every_call_with_its_cause(place: Place, tmp_path: Path) -> None:
    worker = place.start("broken", tries=str(tmp_path / "tries"))
    for _ in range(2):
        with pytest.raises(ConstructionFailed, match=r"echo-.*RuntimeError: no such model"):
            worker.call("ping").result(WAIT_S)
    worker.kill()


def test_a_shared_value_arrives_as_itself(place: Place, worker: Worker) -> None:
    array = np.random.default_rng(random.getrandbits(32)).standard_normal(200_000)
    handle = place.launcher.share(array)
    if place.kind == "ray":
        assert type(handle.reference).__name__ == "ObjectRef"  # Ray's object store fetches it once for each node
    for times in (2, 3):
        doubled, total = worker.call("double", handle, times).result(WAIT_S)
        np.testing.assert_array_equal(doubled, array * times)
        assert total == float(array.sum())
    np.testing.assert_array_equal(worker.call("double", array[::2], 2).result(WAIT_S)[0], array[::2] * 2)
    assert worker.call("double", np.empty(0), 2).result(WAIT_S)[0].size == 0


# What only processes can show


def test_what_cannot_be_pickled_fails_its_call_only_and_failures_and_prints_come_whole(steady: Worker) -> None:
    with pytest.raises(Exception, match="pickle"):
        steady.call("note", lambda: None).result(WAIT_S)
    with pytest.raises(TypeError, match="pickle"):
        steady.call("lock").result(WAIT_S)
    with pytest.raises(RuntimeError, match="Refused: 3: because"):
        steady.call("fail", "odd").result(WAIT_S)
    assert steady.call("notes").result(WAIT_S) == []
    text = "x" * 70_000
    assert steady.call("speak", text).result(WAIT_S) == text  # what it prints disturbs nothing
    error = steady.call("fail", "key").exception(WAIT_S)
    assert "worker_rigs.py" in "".join(error.__notes__)  # the remote traceback


def test_pid_and_environment_are_its_own(steady: Worker) -> None:
    assert steady.call("variable", "SOTA_GRPO_TEST").result(WAIT_S) == "yes"
    assert steady.call("variable", "OMP_NUM_THREADS").result(WAIT_S) == "1"
    assert steady.pid not in (None, os.getpid())  # type: ignore[attr-defined]


@needs_ray
def test_a_terminal_that_closes_ends_the_driver_alone(places: dict[str, Place]) -> None:
    """It sends SIGHUP to the whole process group; workers of a step that is still to be saved must outlive it."""
    assert signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    reached = [one for one in psutil.Process().children(recursive=True) if os.getpgid(one.pid) == os.getpgrp()]
    ignored = {}
    for process in reached:
        if "ray" not in " ".join(process.cmdline()):  # multiprocessing's own, of other tests
            continue
        (line,) = [row for row in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigIgn" in row]
        ignored[" ".join(process.cmdline())[:60]] = bool(int(line.split()[1], 16) & 1 << signal.SIGHUP - 1)
    assert ignored
    assert all(ignored.values()), ignored


def test_ctrl_c_is_for_the_driver(steady: Worker) -> None:
    assert steady.call("ping").result(WAIT_S) == 0.0  # it has begun
    os.kill(steady.pid, signal.SIGINT)  # type: ignore[attr-defined]
    time.sleep(0.2)
    assert steady.call("ping").result(WAIT_S) == 0.0


def test_kill_ends_a_process_that_is_stopped(own: Worker) -> None:
    pid, never = own.pid, own.call("never")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    own.call("note", np.zeros(2_000_000))  # more than any socket buffers: the sender is held up
    own.kill()
    require_reaped(pid)
    assert isinstance(never.exception(0.1), WorkerDied)


def test_kill_from_outside_is_noticed(own: Worker) -> None:
    never, pid = own.call("never"), own.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match=str(pid)):
        never.result(WAIT_S)
    require_reaped(pid)


def test_a_worker_of_a_process_may_print_to_a_lost_terminal_and_its_exit_code_is_reported(
    places: dict[str, Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is on its main thread. A reward function that prints must not fail once the run's stderr is gone."""
    reader, lost = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sota_grpo.workers.base._STDERR", lost)
    worker = places["process"].start()
    for _ in range(3):
        assert worker.call("speak", "x" * 9_000).result(WAIT_S) == "x" * 9_000
    assert worker.call("thread_is_main").result(WAIT_S)
    with pytest.raises(WorkerDied, match="exit code 5"):
        worker.call("exit", 5).result(WAIT_S)
    os.close(lost)


# What Ray alone can show


@needs_ray
def test_bundles_that_do_not_exist_are_refused_in_words(places: dict[str, Place]) -> None:
    from sota_grpo.workers.ray_cluster import RayLauncher

    with pytest.raises(TimeoutError, match=r"'GPU': 64.*the cluster has 2 CPU, 0 GPU, free 0 CPU"):
        RayLauncher([{"CPU": 1, "GPU": 64}], deadline_s=0.5)


ACTOR_WITH_A_BAR = """
import multiprocessing, os, pickle
from multiprocessing import resource_tracker
multiprocessing.set_start_method("spawn")  # as TorchRL does
from sota_grpo.workers.base import WorkerSpec
from sota_grpo.workers.ray_cluster import HostActor
actor = HostActor("bar", pickle.dumps(WorkerSpec("collections:Counter", {})), [])
from tqdm.auto import tqdm
list(tqdm(range(2), disable=True))
print("trackers:", resource_tracker._resource_tracker._fd, flush=True)
os._exit(0)
"""


def test_a_progress_bar_in_an_actor_makes_no_semaphore() -> None:
    """An actor and its descendants are killed, so a named semaphore would stay in /dev/shm."""
    output = subprocess.run([sys.executable, "-c", ACTOR_WITH_A_BAR], capture_output=True, text=True, timeout=WAIT_S)
    assert output.stdout == "trackers: None\n", output.stderr


@needs_ray
@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_a_local_ray_listens_on_loopback_only_and_requires_a_token(places: dict[str, Place]) -> None:
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path()).name
    commands = below(os.getpid())
    pids = [pid for pid, text in commands.items() if session in text or text.startswith("ray::")]
    assert len(pids) >= 3
    addresses = {address for pid in pids for address in listening(pid)}
    assert addresses, "nothing listens; this test looks at the wrong processes"
    assert {address for address in addresses if not ip_address(address).is_loopback} == set()
    from ray._raylet import AuthenticationMode, get_authentication_mode

    assert get_authentication_mode() == AuthenticationMode.TOKEN, "any user of this machine could run code in it"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64, "Ray would leave one in a file that everybody may read"


def listening(pid: int) -> set[str]:
    """Local addresses of the TCP sockets on which a process listens."""
    with suppress(psutil.NoSuchProcess):
        sockets = psutil.Process(pid).net_connections("tcp")
        return {one.laddr.ip.removeprefix("::ffff:") for one in sockets if one.status == psutil.CONN_LISTEN}
    return set()


PROCESS_DRIVER = """
from sota_grpo.workers.base import ProcessLauncher
launcher = ProcessLauncher()
placements = [{}, {}]
leaves = True
"""
RAY_DRIVER = """
from sota_grpo.workers.ray_cluster import RayLauncher
launcher = RayLauncher([{"CPU": 1}] * 2, object_store_bytes=80 * 2**20)
placements = [{"bundle": 0}, {"bundle": 1}]
leaves = False
"""
DRIVER = """
import os, signal, sys, time
from tests.worker_rigs import spec
workers = [launcher.start(f"echo-{i}", spec(), **placement) for i, placement in enumerate(placements)]
for worker in workers:
    worker.call("ping").result(60)
left = [workers[0].call("leave").result(60)] if leaves else []
os.kill(workers[1].pid, signal.SIGSTOP)  # a worker that cannot do anything about its end
print("ready", *left, *[worker.pid for worker in workers], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not LINUX, reason="reads /proc")
@pytest.mark.parametrize("head", [PROCESS_DRIVER, pytest.param(RAY_DRIVER, marks=needs_ray)], ids=["process", "ray"])
def test_nothing_outlives_a_killed_driver(head: str, tmp_path: Path) -> None:
    """Started where the temporary folder's path leaves a Unix socket no room, as some batch systems' does."""
    code, folder = textwrap.dedent(head + DRIVER), tmp_path / ("x" * 120)
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder)}
    driver = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=Path.cwd(), env=environment
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line.startswith("ready")
    pids = {*below(driver.pid)}
    assert {int(pid) for pid in line.split()[1:]} <= pids
    driver.kill()
    driver.wait()
    require_gone(pids, WAIT_S)
