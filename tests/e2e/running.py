"""A run of ``grpo-async.py`` in a process of its own, to whose processes something happens."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.conftest import ENVIRONMENT, command, metrics
from tests.process_rigs import below, require_gone


class Running:
    """The run, and everything that it ever started; what runs in the same directory print is in one file."""

    def __init__(self, run_dir: Path, *options: str):
        self.run_dir, self.seen = run_dir, dict[int, str]()
        self._log = run_dir.with_suffix(".console")
        line = command(run_dir, *options, script="grpo-async.py")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENVIRONMENT)

    @property
    def console(self) -> str:
        return self._log.read_text()

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def look(self) -> None:
        self.seen |= below(self.process.pid)

    def wait_for(self, condition: Callable[[], object], within_s: float = 500.0) -> None:
        limit = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, self.console
            assert time.monotonic() < limit, self.console
            self.look()
            time.sleep(0.1)

    def end(self, within_s: float = 600.0) -> int:
        limit = time.monotonic() + within_s
        while self.process.poll() is None and time.monotonic() < limit:
            self.look()
            time.sleep(0.1)
        return self.process.wait(0)


@contextmanager
def running(run_dir: Path, *options: str) -> Iterator[Running]:
    """Whatever the run started is gone afterwards, or the test fails."""
    run = Running(run_dir, *options)
    try:
        yield run
    finally:
        run.look()
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        require_gone(set(run.seen))


def require_every_prompt_once(run_dir: Path, num_prompts: int) -> None:
    """Every group of the epoch was trained in one step, and the groups are the prompts, each once."""
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert sorted({row["group_id"] for row in rows}) == list(range(num_prompts))
    turns_of = Counter(group for group, _ in {(row["group_id"], row["step"]) for row in rows})
    assert set(turns_of.values()) == {1}
    assert len({row["query"] for row in rows}) == num_prompts
    trained = [row for row in metrics(run_dir) if "groups/trained" in row]
    assert [row["step"] for row in trained] == list(range(num_prompts // 4))
    assert {row["groups/trained"] for row in trained} == {4}
    assert max(row["policy_age/max"] for row in trained) <= 1
