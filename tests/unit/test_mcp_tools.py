"""A real MCP server behind instances: over stdin and stdout, and over HTTP."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="needs the extra mcp")

from sota_grpo.envs import PromptSource
from sota_grpo.errors import UserError
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.tasks import make_task
from sota_grpo.tasks.servers import headers_of, instance_spec
from sota_grpo.workers.instances import Answer, InstanceLost, Instances
from tests.process_rigs import wait_for
from tests.tool_rigs import WAIT_S, call, dialog, free_port, started, written

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SERVER = Path(__file__).parent / "environments" / "mcp_server.py"
KEY_OF_NOBODY = "0123456789abcdef"


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class Running:
    """The server over HTTP, which can be ended."""

    def __init__(self, *key: str) -> None:
        self.port = free_port()
        self.process = subprocess.Popen([sys.executable, str(SERVER), str(self.port), *key])
        wait_for(lambda: listens(self.port) or self.process.poll() is not None)

    def __str__(self) -> str:
        return f"mcp+http://127.0.0.1:{self.port}/mcp"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


STDIO = f"mcp:{shlex.join([sys.executable, str(SERVER)])}"


@pytest.fixture(scope="module", params=["stdio", "http"])
def instances(request: pytest.FixtureRequest) -> Iterator[Instances]:
    with ExitStack() as opened:
        opened.enter_context(pytest.MonkeyPatch.context()).setenv("HF_TOKEN", "hf_secret")
        running = Running() if request.param == "http" else None
        if running:
            opened.callback(running.end)
        made = opened.enter_context(started(str(running or STDIO)))
        made.wait_ready()
        yield made


def test_the_tools_are_what_the_server_lists(instances: Instances) -> None:
    functions = {schema["function"]["name"]: schema["function"] for schema in instances.schemas}
    assert list(functions) == ["add_note", "fail", "draw", "look", "leave"]
    assert functions["add_note"]["description"] == "Add a note, and read all."
    parameters = functions["add_note"]["parameters"]
    types = {name: one["type"] for name, one in parameters["properties"].items()}
    assert types == {"text": "string", "times": "integer"}
    assert parameters["required"] == ["text"]
    assert not instances.has_reward


def test_every_sample_has_a_session_of_its_own_which_continues_after_what_fails(instances: Instances) -> None:
    first, second = (instances.open({"question": "?"}).result(WAIT_S) for _ in range(2))
    assert first.observation is second.observation is None
    assert call(instances, first.key, "add_note", text="a") == Answer("a", False)
    assert call(instances, second.key, "add_note", text="b", times=2) == Answer("b\nb", False)
    calls = [("fail", {"text": "no such page"}), *((name, {}) for name in ("add_note", "nothing", "draw"))]
    calls.append(("add_note", {"text": "c"}))
    failed, missing, unknown, drawn, added = instances.call(first.key, calls).result(WAIT_S)
    assert [answer.is_error for answer in (failed, missing, unknown)] == [True] * 3
    assert re.fullmatch(r"error: ToolFailed: .*no such page", failed.content)
    assert "text Field required" in missing.content
    assert "nothing" in unknown.content
    assert (drawn, added) == (Answer("[image, not shown]", False), Answer("a\nc", False))
    assert [instances.finish(one.key).result(WAIT_S) for one in (first, second)] == [None, None]


@pytest.mark.parametrize("instances", ["stdio"], indirect=True)
def test_a_started_server_sees_no_secrets_and_ends_with_its_sample(instances: Instances) -> None:
    keys = [instances.open({}).result(WAIT_S).key for _ in range(3)]
    pids, variables = zip(*(call(instances, key, "look").content.split(" ", 1) for key in keys))
    assert len(set(pids)) == 3
    assert "PATH" in variables[0].split()
    assert "HF_TOKEN" not in variables[0].split()
    instances.finish(keys[0]).result(WAIT_S)
    instances.drop(keys[1])
    wait_for(lambda: not os.path.exists(f"/proc/{pids[0]}") and not os.path.exists(f"/proc/{pids[1]}"))
    assert os.path.exists(f"/proc/{pids[2]}")
    with pytest.raises(InstanceLost, match=r"MCP server failed in a tool call .*Connection closed"):
        instances.call(keys[2], [("leave", {})]).result(WAIT_S)


def test_a_key_is_sent_to_the_server_and_written_nowhere_and_a_server_that_ends_costs_the_samples_that_use_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    running = Running(KEY_OF_NOBODY)
    monkeypatch.setenv("SOTA_GRPO_TOOLS_HEADERS", "X-Team: blue\n")
    try:
        monkeypatch.setenv("SOTA_GRPO_TOOLS_KEY", "other")
        refused = pytest.raises(UserError, match=r"rejects the request with HTTP status 401: set SOTA_GRPO_TOOLS_KEY")
        with started(str(running)) as made, refused as raised:
            made.wait_ready()
        assert "other" not in str(raised.value)
        monkeypatch.setenv("SOTA_GRPO_TOOLS_KEY", KEY_OF_NOBODY)
        with started(str(running)) as made:
            opened = made.open({}).result(WAIT_S).key
            assert call(made, opened, "add_note", text="a") == Answer("a", False)
            commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if is_ours(path)]
            assert len(commands) > 1
            exposed = [command for command in commands if KEY_OF_NOBODY.encode() in command]
            assert all(b"mcp_server" in command for command in exposed)
            running.end()
            with pytest.raises(InstanceLost, match="MCP server failed in a tool call"):
                call(made, opened, "add_note", text="a")
            with pytest.raises(InstanceLost, match=rf"no session with the MCP server .*:{running.port}/mcp"):
                made.open({}).result(WAIT_S)
    finally:
        running.end()
    assert KEY_OF_NOBODY not in repr(instance_spec(str(running), "factory")) + caplog.text + "".join(capfd.readouterr())


def is_ours(command: Path) -> bool:
    """Whether it is of a process below this one."""
    try:
        status = (command.parent / "stat").read_text().rpartition(")")[2].split()
        return int(status[1]) == os.getpid() or int(status[2]) == os.getpgrp()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("url", "variables", "expected"),
    [
        ("http://far.example:80/mcp", {"SOTA_GRPO_TOOLS_KEY": "s3cret"}, r"http://far.example:80/mcp is not encrypted"),
        ("http://127.evil.example/mcp", {"SOTA_GRPO_TOOLS_HEADERS": "A: s3cret"}, "is not encrypted"),
        ("https://far.example/mcp", {"SOTA_GRPO_TOOLS_KEY": "s3cret\nX: y"}, "has a character that a key cannot have"),
        ("https://far.example/mcp", {"SOTA_GRPO_TOOLS_HEADERS": "A: b\ns3cret"}, "is not a valid header"),
        ("https://far.example/mcp", {"SOTA_GRPO_TOOLS_HEADERS": "A: s3cret\x01"}, "is not a valid header"),
    ],
    ids=["http", "like_loopback", "two_lines", "no_name", "control"],
)
def test_a_key_that_would_be_seen_or_cannot_be_sent_is_refused(
    url: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=expected) as raised:
        instance_spec(f"mcp+{url}", "factory")
    assert "s3cret" not in str(raised.value)


def test_a_key_goes_over_https_or_to_this_machine() -> None:
    for url in ("https://far.example", "http://127.0.0.1:9/mcp", "http://localhost/mcp", "http://[::1]:1"):
        assert headers_of(url, {"SOTA_GRPO_TOOLS_KEY": " a.b-c "}) == {"Authorization": "Bearer a.b-c"}
    assert headers_of("http://far.example", {}) == {}


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (f"mcp+http://127.0.0.1:{free_port()}/mcp", r"cannot be used: no session with .* http.*ConnectError"),
        (f"mcp:{sys.executable} -c 'raise SystemExit(3)'", r"no session with the MCP .*Connection closed"),
    ],
    ids=["url", "command"],
)
def test_no_server_is_one_sentence(server: str, expected: str) -> None:
    with started(server) as made, pytest.raises(UserError, match=expected) as raised:
        made.wait_ready()
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(server.split(" ")[0])


@pytest.mark.parametrize("instances", ["stdio"], indirect=True)
def test_a_dialog_uses_the_servers_tools(instances: Instances) -> None:
    lines = [written("add_note", text="milk"), written("fail", text="no"), "There is one note."]
    task = make_task("arithmetic", num_train=1, num_heldout=1)
    options = {"template_kwargs": {"tools": instances.schemas}, "multi_turn": True}
    record = dialog(PromptSource(task, load_tokenizer("tiny"), **options), instances, lines, task.train[0]).record
    replies = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert replies[0] == "milk"
    assert replies[1].startswith("error: ToolFailed: ")
    assert (record["tool_calls"], record["tool_errors"], record["ended"], record["error"]) == (2, 1, "answer", None)
