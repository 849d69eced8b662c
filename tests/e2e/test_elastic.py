"""Engines that come and go, with real Ray: nodes that join during a run, and one that dies."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, command, metrics
from tests.e2e.processes import below, hit, require_gone

pytest.importorskip("ray", reason="needs Ray (the extra ray)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # Ray starts twice, on a machine that may be busy
RUN = (
    "env.num_envs=16",
    "env.repeats=4",
    "env.max_samples=256",
    "train.dialog_turns_per_batch=16",
    "train.optim_batch_size=16",
    "train.total_dialog_turns=1600000",  # it is stopped when all has been seen
    "inference_model.max_tokens=24",
    "engine=transformers",
    "eval.mode=off",
    "train.export_hf=false",
    "logging.report=false",
)


def free_ports(count: int) -> list[int]:
    """Between those that Ray gives its workers and those that the system gives anybody."""
    found: set[int] = set()
    while len(found) < count:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.add(port)
    return [*found]


class Nodes:
    """Ray's nodes on this machine, each as many CPUs large as it says, which die as machines do: by SIGKILL."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = tempfile.mkdtemp(prefix="r")  # short: Ray's sockets lie in it
        self._seen: set[int] = set()
        self._started: list[subprocess.Popen] = []
        self.environment = {
            **ENVIRONMENT,
            "RAY_TMPDIR": self._temporary,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        port, client_port = free_ports(2)
        self.address = f"127.0.0.1:{port}"
        self._start("--head", f"--port={port}", f"--ray-client-server-port={client_port}", "--include-dashboard=false")

    def _start(self, *options: str) -> subprocess.Popen:
        line = [str(Path(sys.executable).parent / "ray"), "start", *options, "--node-ip-address=127.0.0.1"]
        line += ["--num-cpus=2", "--object-store-memory=100000000", "--block"]
        with (self._folder / f"node{len(self._started)}.log").open("ab") as log:
            node = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment)
        self._started.append(node)
        return node

    def wait_for_head(self) -> None:
        host, _, port = self.address.partition(":")

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, int(port))) == 0

        wait_for(listens)

    def join(self) -> subprocess.Popen:
        return self._start(f"--address={self.address}")

    def kill(self, node: subprocess.Popen) -> None:
        """Everything that runs on a node, as when its power fails."""
        for pid in (*below(node.pid), node.pid):
            self._seen.add(pid)
            hit(pid, signal.SIGKILL)
        node.wait()

    def close(self) -> None:
        for node in reversed(self._started):
            self.kill(node)
        require_gone(self._seen)
        shutil.rmtree(self._temporary, ignore_errors=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    try:
        nodes.wait_for_head()
        yield nodes
    finally:
        nodes.close()


def wait_for(moment: Callable[[], bool], within_s: float = 300.0) -> None:
    deadline = time.monotonic() + within_s
    while not moment():
        assert time.monotonic() < deadline, "the moment to act at never came"
        time.sleep(0.2)


def test_a_run_takes_engines_as_they_come_and_loses_them_and_trains_every_prompt_once(
    nodes: Nodes, tmp_path: Path
) -> None:
    """The head has room for the learner and one engine, the second node for two more."""
    run_dir = tmp_path / "run"
    options = (*RUN, f"ray.address={nodes.address}", "inference_model.num_devices=1:3")
    with (tmp_path / "console.log").open("ab") as console:
        run = subprocess.Popen(
            command(run_dir, *options, script="grpo-async.py"), stdout=console, stderr=console, env=nodes.environment
        )

    def engines() -> list[int]:
        assert run.poll() is None, (tmp_path / "console.log").read_text()
        path = run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        return [json.loads(line)["workers/engines"] for line in lines if line.endswith("\n")]

    try:
        wait_for(lambda: engines()[-2:] == [1, 1])
        second = nodes.join()
        wait_for(lambda: engines()[-2:] == [3, 3])
        nodes.kill(second)
        wait_for(lambda: engines()[-2:] == [1, 1])
        nodes.join()
        wait_for(lambda: engines()[-2:] == [3, 3])
    finally:
        os.kill(run.pid, signal.SIGTERM)
        code = run.wait(timeout=120)
    assert code == 130
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert max(row["policy_age/max"] for row in rows) <= 1
    assert rows[-1]["workers/restarts"] >= 2
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    steps = {(line["group_id"], line["step"]) for line in lines}
    assert sorted(group for group, _ in steps) == list(range(4 * len(rows)))
    log = (run_dir / "training.log").read_text()
    assert log.count("which joins the run") >= 4
    assert "pushed weights landed: " not in log  # no newcomer was refused
