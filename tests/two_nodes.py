"""Two nodes on one machine: network namespaces with addresses of their own, joined by a virtual link; Ray on both."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE

from tests.process_rigs import hit, require_gone

_BIN = Path(sys.executable).parent
_PORT = 6379
_ALIVE = """
import sys, time, ray
while not ray.is_initialized():
    try:
        ray.init(sys.argv[1], logging_level=40)
    except Exception:  # nobody listens yet
        time.sleep(0.5)
before = None
while True:
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    if alive != before:
        print("ALIVE", *alive, flush=True)  # Ray itself prints what it has to say of nodes
    before = alive
    time.sleep(0.2)
"""


def why_not() -> str | None:
    """What this machine lacks for it; None where it can be had."""
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    probe = f"sgp{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"needs the right to make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return None


class TwoNodes:
    """Nodes 0 (Ray's head, where runs are started) and 1, the far one.

    Args:
        cpus: logical CPUs of each: Ray gives every worker one.
        settings: further variables, on both nodes.
    """

    def __init__(self, folder: Path, cpus: tuple[int, int], settings: Mapping[str, str] | None = None) -> None:
        mark = secrets.token_hex(3)
        subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
        self.names = [f"sg{mark}{index}" for index in (0, 1)]
        self.addresses = [f"{subnet}.{index + 1}" for index in (0, 1)]
        self.address = f"{self.addresses[0]}:{_PORT}"
        self._folder, self._cpus = folder, cpus
        self._temporary = Path(tempfile.mkdtemp(prefix="r"))  # short: Ray's sockets lie in it
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "GLOO_"))}
        self.environment = {
            **kept,  # without what a cluster of this process alone has left in it
            "OMP_NUM_THREADS": "1",
            "RAY_TMPDIR": str(self._temporary),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_memory_monitor_refresh_ms": "0",  # what else runs on this machine is no reason to kill workers
            **(settings or {}),
        }
        self._rays: dict[int, subprocess.Popen] = {}
        self._seen: set[int] = set()

    def open(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        first, second = (f"v{name}" for name in self.names)
        _ip(
            "link", "add", first, "netns", self.names[0], "type", "veth", "peer", "name", second, "netns", self.names[1]
        )
        for name, address in zip(self.names, self.addresses):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", f"v{name}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"v{name}", "up")
        self.join(0)
        self.join(1)

    def join(self, index: int) -> None:
        """Start Ray on a node."""
        where = (
            ["--head", f"--port={_PORT}", "--include-dashboard=false"] if index == 0 else [f"--address={self.address}"]
        )
        size = [f"--num-cpus={self._cpus[index]}", "--object-store-memory=200000000"]
        line = [str(_BIN / "ray"), "start", *where, f"--node-ip-address={self.addresses[index]}", *size, "--block"]
        with self._alive() as alive:
            before = next(alive, None) if index else set()  # the head at least; one that was killed, for some seconds
            assert before is not None, f"the head does not answer: {self.console(0)}"
            self._rays[index] = self.start(index, *line)
            joined = any(now - before for now in alive)
        assert joined, f"node {index} did not join: {self.console(index)}"

    @contextmanager
    def _alive(self) -> Iterator[Iterator[set[str]]]:
        """Ids of the nodes that Ray takes for alive, whenever they change; for four minutes."""
        inside = ["ip", "netns", "exec", self.names[0], sys.executable, "-c", _ALIVE, self.address]
        with (
            (self._folder / "watcher.log").open("ab") as log,
            subprocess.Popen(inside, stdout=PIPE, stderr=log, text=True, env=self.environment) as watcher,
        ):
            limit = threading.Timer(240, watcher.kill)
            limit.start()
            try:
                assert watcher.stdout is not None
                yield (set(line.split()[1:]) for line in watcher.stdout if line.startswith("ALIVE "))
            finally:
                limit.cancel()
                watcher.kill()

    def start(self, index: int, *line: str) -> subprocess.Popen:
        """Start a command on a node; what it writes goes to :meth:`console`."""
        log = (self._folder / f"console{index}.log").open("ab")
        inside = ["ip", "netns", "exec", self.names[index], *line]
        return subprocess.Popen(inside, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment)

    def run(self, index: int, *line: str) -> subprocess.CompletedProcess:
        """A command on a node, to its end."""
        inside = ["ip", "netns", "exec", self.names[index], *line]
        return subprocess.run(inside, capture_output=True, text=True, timeout=300, env=self.environment)

    def console(self, index: int) -> str:
        return (self._folder / f"console{index}.log").read_text(errors="replace")

    def pids(self, index: int) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True, check=True)
        return [int(pid) for pid in done.stdout.split()]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Without the link between them."""
        _ip("-n", self.names[0], "link", "set", f"v{self.names[0]}", "down")
        try:
            yield
        finally:
            _ip("-n", self.names[0], "link", "set", f"v{self.names[0]}", "up")

    def workers(self, index: int) -> list[str]:
        """The roles of the run's workers on a node: ``["learner", "rollout"]``."""
        titles = []
        for pid in self.pids(index):
            with suppress(OSError):  # it has just ended
                titles.append(Path(f"/proc/{pid}/cmdline").read_text())
        # Ray writes "ray::learner.call" for the time of a call; meanwhile it may read "ray::learner\0call"
        roles = [actual[1] for title in titles if (actual := re.search(r"ray::(\w+)", title))]
        return sorted(role for role in roles if role in ("learner", "reference", "rollout"))

    def kill(self, index: int) -> None:
        """SIGKILL for everything that runs on a node, as when its power fails."""
        for pid in self.pids(index):
            self._seen.add(pid)
            hit(pid, signal.SIGKILL)
        self._rays[index].wait()

    def wait_end(self, index: int) -> None:
        """Return when Ray on a node has ended by itself, as one does that was taken for dead and hears of it."""
        self._rays[index].wait(timeout=180)

    def close(self) -> None:
        for index in (1, 0):
            self._seen |= set(self.pids(index))
            for pid in self.pids(index):
                hit(pid, signal.SIGKILL)
        for process in self._rays.values():
            process.wait()
        require_gone(self._seen)
        for name in self.names:
            _ip("netns", "delete", name)
        shutil.rmtree(self._temporary, ignore_errors=True)


@contextmanager
def two_nodes(folder: Path, cpus: tuple[int, int], settings: Mapping[str, str] | None = None) -> Iterator[TwoNodes]:
    """Two nodes with Ray on both; nothing of them is left afterwards."""
    nodes = TwoNodes(folder, cpus, settings)
    try:
        nodes.open()
        yield nodes
    finally:
        nodes.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
