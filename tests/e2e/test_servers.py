"""Training against a real inference server: no Ray, and the run continues when the server is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import ENVIRONMENT, SMALL, command, metrics
from tests.e2e.processes import below, hit, require_gone

pytest.importorskip("vllm", reason="needs vLLM (the CPU build will do)")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SERVED = (*SMALL, "engine=vllm_server", "eval.mode=off", "train.export_hf=false", "optimizer.schedule=constant")


class Running:
    """A run in a process of its own, and everything that it ever started."""

    def __init__(self, run_dir: Path, *options: str, script: str):
        self.run_dir = run_dir
        self.seen: dict[int, str] = {}
        line = command(run_dir, *SERVED, *options, script=script)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(line, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=ENVIRONMENT)

    @property
    def _log(self) -> Path:
        return self.run_dir.with_suffix(".console")

    @property
    def console(self) -> str:
        return self._log.read_text()

    def look(self) -> None:
        self.seen |= below(self.process.pid)

    def wait_for(self, condition: Callable[[], object], within_s: float = 500.0) -> None:
        limit = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, self.console
            assert time.monotonic() < limit, self.console
            self.look()
            time.sleep(0.05)

    def end(self, within_s: float = 500.0) -> int:
        limit = time.monotonic() + within_s
        while self.process.poll() is None and time.monotonic() < limit:
            self.look()
            time.sleep(0.05)
        return self.process.wait(0)

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def launchers(self) -> list[str]:
        """Command lines of what watches over the servers."""
        return [text for text in self.seen.values() if "sota_grpo/orphans.py" in text]

    def kill_server(self) -> None:
        launchers = {pid for pid, text in self.seen.items() if "sota_grpo/orphans.py" in text}
        (server,) = {pid for launcher in launchers for pid in below(launcher) if "api_server" in self.seen.get(pid, "")}
        assert hit(server, signal.SIGKILL)


@contextmanager
def running(run_dir: Path, *options: str, script: str) -> Iterator[Running]:
    """Whatever the run started is gone afterwards, and so are the folders it shared with servers; or the test fails."""
    run = Running(run_dir, *options, script=script)
    try:
        yield run
    finally:
        run.look()
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        require_gone(set(run.seen))
    assert not any("raylet" in text or "gcs_server" in text for text in run.seen.values())
    folders = [Path(re.search(r"--launch \d+ (\S+)", text)[1]) for text in run.launchers()]
    assert folders
    assert not any(folder.exists() for folder in folders)


def test_a_run_replaces_a_killed_server_and_trains_every_prompt_once(tmp_path: Path) -> None:
    run_dir, num_prompts = tmp_path / "run", 40
    amount = (f"env.max_samples={num_prompts}", f"train.total_dialog_turns={4 * num_prompts}")
    with running(run_dir, *amount, script="grpo-async.py") as run:
        run.wait_for(lambda: run.steps() >= 3)
        run.kill_server()
        assert run.end() == 0, run.console
    assert re.search(r"Checks before training: (\d+) of \1 passed", run.console)
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(num_prompts // 4))
    assert rows[-1]["workers/restarts"] == 1
    assert max(row["policy_age/max"] for row in rows) == 1  # the new server got newer weights than those it loads
    assert all(row["mismatch_kl"] < 1e-8 for row in rows if row["policy_age/max"] == 0)
    rollouts = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert sorted({row["group_id"] for row in rollouts}) == list(range(num_prompts))
    assert len({(row["group_id"], row["step"]) for row in rollouts}) == num_prompts  # each in one step
    assert len({row["query"] for row in rollouts}) == num_prompts
