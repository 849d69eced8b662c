"""Training against a real inference server: no Ray, and the run continues when the server is killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, metrics
from tests.e2e.running import Running, require_every_prompt_once, running
from tests.process_rigs import below, hit

pytest.importorskip("vllm", reason="needs vLLM (the CPU build will do)")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SERVED = (*SMALL, "engine=vllm_server", "eval.mode=off", "train.export_hf=false", "optimizer.schedule=constant")


def launchers(run: Running) -> dict[int, str]:
    """Command lines of what watches over the servers."""
    return {pid: text for pid, text in run.seen.items() if "sota_grpo/orphans.py" in text}


def kill_server(run: Running) -> None:
    started = {pid for launcher in launchers(run) for pid in below(launcher)}
    (server,) = {pid for pid in started if "api_server" in run.seen.get(pid, "")}
    assert hit(server, signal.SIGKILL)


def test_a_run_replaces_a_killed_server_and_trains_every_prompt_once(tmp_path: Path) -> None:
    """Afterwards the folders that it shared with servers are gone."""
    run_dir, num_prompts = tmp_path / "run", 40
    amount = (f"env.max_samples={num_prompts}", f"train.total_dialog_turns={4 * num_prompts}")
    with running(run_dir, *SERVED, *amount) as run:
        run.wait_for(lambda: run.steps() >= 3)
        kill_server(run)
        assert run.end() == 0, run.console
    log = re.escape(str(run_dir))
    assert re.search(
        rf"server ended while it \w+( weights)? \(was ended by SIGKILL.*; see its output in {log}", run.console
    )
    assert not any("raylet" in text or "gcs_server" in text for text in run.seen.values())
    folders = [Path(re.search(r"--launch \d+ (\S+)", text)[1]) for text in launchers(run).values()]
    assert folders
    assert not any(folder.exists() for folder in folders)
    assert re.search(r"Checks before training: (\d+) of \1 passed", run.console)
    require_every_prompt_once(run_dir, num_prompts)
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(num_prompts // 4))
    assert rows[-1]["workers/restarts"] == 1
    assert max(row["policy_age/max"] for row in rows) == 1  # the new server got newer weights than those it loads
    assert all(row["mismatch_kl"] < 1e-8 for row in rows if row["policy_age/max"] == 0)
