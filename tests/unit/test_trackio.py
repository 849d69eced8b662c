"""The real Trackio over a local folder, in a process of its own: it reads where that is when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import json, sys
from pathlib import Path
from sota_grpo.recording.sinks.trackio_sink import TrackioSink

run_dir = Path(sys.argv[1])
row = {"prompt": "1 + 1?", "response": "*2*", "reward": 1.0, "advantage": 0.5, "truncated": False,
       "response_tokens": 2, "group_id": 0, "sample_id": 0}

def sink():
    return TrackioSink(run_dir, project="p", config={"seed": 1, "engine": {"name": "auto"}})

def write(one, step, value):
    with (run_dir / "metrics.jsonl").open("a") as metrics, (run_dir / "rollouts.jsonl").open("a") as rollouts:
        metrics.write(json.dumps({"step": step, "reward": value, "kl": None}) + "\\n")
        rollouts.write(json.dumps({"step": step, **row}) + "\\n")
    one.log(step, {"reward": value, "kl": None})
    one.log_samples(step, [row])

first = sink()
for step in range(3):
    write(first, step, step / 4)
first.close(0)  # the checkpoint that is continued is that before step 1
for name in ("metrics", "rollouts"):
    path = run_dir / f"{name}.jsonl"
    path.write_text(path.read_text().split("\\n")[0] + "\\n")
second = sink()
second.rewind(1)
for step in (1, 2, 3):
    write(second, step, step / 2)
second.close(1)

from trackio.sqlite_storage import SQLiteStorage
from trackio.api import Api
found = [(run.name, run.config, SQLiteStorage.get_logs("p", run.name, run_id=run.id), run.alerts())
         for run in Api().runs("p")]
print(json.dumps(found, default=str))
"""


@pytest.mark.skipif(find_spec("trackio") is None, reason="Trackio is not installed")
def test_a_resumed_run_has_every_step_once_its_config_its_samples_and_its_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "10-00-00" / "3"
    run_dir.mkdir(parents=True)
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(run_dir)], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()  # nothing of Trackio's own words
    ((name, config, logs, alerts),) = json.loads(line)
    assert name == "10-00-00/3"
    assert config["seed"] == 1
    assert config["engine"]["name"] == "auto"
    assert [(log["step"], log["reward"]) for log in logs if "reward" in log] == [(0, 0), (1, 0.5), (2, 1), (3, 1.5)]
    assert not any("kl" in log for log in logs)
    (sample,) = [log["samples"] for log in logs if "samples" in log]
    assert "1 + 1?" in str(sample)
    assert [alert["title"] for alert in alerts] == ["The run failed"]
