"""``env.environment`` as a server: what it may say, what it asks consent for, and that it is no path."""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from sota_grpo.assembly.compose import anchor_paths, compose, load_config, needs_consent
from sota_grpo.assembly.preflight import preflight
from sota_grpo.config import Config
from sota_grpo.config.validators import ConfigError, validate
from sota_grpo.errors import UserError
from sota_grpo.tasks import servers
from sota_grpo.tasks.servers import instance_spec
from sota_grpo.training.runs import signature

SERVERS = {
    "mcp:python /data/server.py:notes --port 3": "run the command python /data/server.py:notes --port 3",
    "mcp+http://127.0.0.1:8000/mcp": "send calls to http://127.0.0.1:8000/mcp",
    "openenv+https://user-game.hf.space": "send rows and calls to https://user-game.hf.space",
}


@cache
def composed() -> Config:
    return compose("grpo_cpu", ["env.max_steps=4"])


def config_with(environment: str) -> Config:
    config = copy.deepcopy(composed())
    config.env.environment = environment
    return config


def test_a_server_stays_as_it_was_written_and_its_command_is_split_as_a_shell_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers.ToolServer, "require", lambda server: None)
    for written in SERVERS:
        config = config_with(written)
        validate(config)
        anchor_paths(config)
        assert config.env.environment == written == str(instance_spec(written, "factory"))
        assert compose("grpo_cpu", [f"env.environment={written}"]).env.environment == written
    spec = instance_spec("mcp:'my server' \"a b\" $HOME *;ls", "factory")
    assert spec.options == {"command": ("my server", "a b", "$HOME", "*;ls")}, "nothing is expanded"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("mcp:", "has no command"),
        ("mcp:python 'server.py", "No closing quotation"),
        ("mcp:http://127.0.0.1:8000/mcp", r"write mcp\+http://127.0.0.1:8000/mcp"),
        ("mcp+http:///mcp", "has no host"),
        ("mcp+http://h:port/mcp", "is not a valid address"),
        ("openenv+http://me:hunter2@h", "has a user name or password in its address"),
        ("openenv:http://h", r"is no FILE.py:NAME.*openenv\+http://HOST:PORT"),
        ("openenv+ftp://h", "is no FILE.py:NAME"),
    ],
)
def test_what_is_no_server_is_refused_with_a_sentence(written: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        validate(config_with(written))
    assert "hunter2" not in str(refused.value)


def test_tools_are_functions_and_a_server_needs_turns() -> None:
    config = config_with("mcp:python server.py")
    config.env.max_steps = 1
    with pytest.raises(ConfigError, match="leaves no turn"):
        validate(config)
    config.env.max_steps, config.env.environment, config.env.tools = 4, None, "mcp:python server"
    with pytest.raises(ConfigError, match=r"env.tools=mcp:python server is no FILE.py:NAME"):
        validate(config)


@pytest.mark.parametrize("written", SERVERS)
def test_a_received_run_needs_consent(written: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"env: {{environment: {written!r}}}")
    with pytest.raises(UserError) as refused:
        load_config(tmp_path, ["seed=3"])
    assert f"asks to {SERVERS[written]} (env.environment)" in str(refused.value)
    assert load_config(tmp_path, trust=True).env.environment == written
    assert load_config(tmp_path, [f"env.environment={written}"]).env.environment == written
    assert load_config(tmp_path, unused=["env.environment"]).env.environment == written
    with pytest.raises(UserError, match="asks to"):
        load_config(tmp_path, ["env.tools=mine.py:add"])
    assert needs_consent(load_config(tmp_path, ["env.environment=null"])) == {}


def test_a_run_continues_with_the_same_server_only() -> None:
    written = [*SERVERS, *SERVERS, "mcp:python /data/server.py:other"]
    assert len({signature(asdict(config_with(each))) for each in written}) == len(SERVERS) + 1


@pytest.mark.parametrize(("written", "package"), [(f"mcp:{sys.executable}", "mcp"), ("openenv+http://h", "websockets")])
def test_what_is_missing_is_said_before_anything_starts(
    written: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"needs the package {package}, which is not installed; install the extra"):
        preflight(config_with(written))
    monkeypatch.setattr(servers, "find_spec", lambda name: object())
    preflight(config_with(written))
    with pytest.raises(UserError, match="the command 'nowhere-to-be-found' is not found"):
        preflight(config_with("mcp:nowhere-to-be-found --port 3"))
