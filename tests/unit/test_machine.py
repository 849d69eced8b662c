"""Which code and machine made a run, and how busy that machine was."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from sota_grpo.recording import machine, run_log
from sota_grpo.recording.metrics import declared
from sota_grpo.report import data
from tests.report_rigs import write_run


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", "-C", folder, *own, *arguments], check=True, capture_output=True, text=True).stdout


def test_a_start_has_the_commit_of_the_tree_that_it_is_in(tmp_path: Path, monkeypatch) -> None:
    """A package that is only installed below a tree has none; a tree with changed tracked files says so."""
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "venv" / "sota_grpo" / "recording" / "machine.py"))
    monkeypatch.setattr(machine.sys, "orig_argv", ["python", "my run.py", "engine.api_key=abc", "seed=1"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "venv" / "sota_grpo").mkdir(parents=True)
    assert not {"commit", "working_tree"} & machine.this_start.__wrapped__().keys()
    git(tmp_path, "init")
    (tmp_path / "code.py").write_text("1")
    git(tmp_path, "add", "code.py")
    git(tmp_path, "commit", "-m", "A first one")
    git(tmp_path, "tag", "v1")  # the commit is wanted, not its name
    start, commit = machine.this_start.__wrapped__(), git(tmp_path, "rev-parse", "HEAD").strip()
    assert "commit" not in start
    assert start["working_tree"] == commit
    assert start["command"] == "python 'my run.py' 'engine.api_key=***' seed=1"
    (tmp_path / "code.py").write_text("22")
    assert machine.this_start.__wrapped__()["working_tree"] == f"{commit}-dirty"


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        ("{api_key: 'a,b}c', n: 1}", "{api_key: ***, n: 1}"),
        ('{"api-key": "a\\"b,c", n: 1}', '{"api-key": ***, n: 1}'),
        (r"{a: {b.token:s\,4}, n: 1}", "{a: {b.token:***}, n: 1}"),
        ("{a_key: [s, t], n: 1}", "{a_key: ***"),
        ("{a_key: {b: s, c: t}, n: 1}", "{a_key: ***"),
        ("{hub_token: null, max_tokens: 9}", "{hub_token: null, max_tokens: 9}"),
    ],
)
def test_no_secret_of_a_mapping_is_recorded(value: str, recorded: str) -> None:
    assert machine.without_secrets([f"a.b={value}"]) == [f"a.b={recorded}"]


def test_starts_of_another_program_are_no_failure(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=1)
    for starts in (None, 3, [3], [{"versions": 3, "cpus": "\x1b[2J"}], [{"commit": "a"}]):
        (run_dir / "run.json").write_text(json.dumps({"starts": starts}))
        assert "\x1b" not in str(data.read_run(run_dir).starts)


def test_what_is_measured_is_declared_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "utilization", {0: 50, 1: 100}.get)
    values = run_log.system_metrics()
    assert {declared(name).name for name in values} == set(values)
    assert (values["system/gpu_memory_gib"], values["system/gpu"]) == (3.0, 0.75)
    assert values["system/memory_gib"] > 0.01
    assert 0 < values["system/host_memory"] < 1
