"""OpenEnv's protocol: against what a real server said, recorded, and against a real server where there is one.

``OPENENV_PYTHON`` names a Python that has OpenEnv 0.10 (``python -m venv openenv``, ``openenv/bin/pip install
openenv==0.10.*``); then ``OPENENV_PYTHON=openenv/bin/python python -m tests.unit.test_openenv`` writes the recording.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import urllib3

pytest.importorskip("websockets", reason="needs the extra openenv")

from websockets.datastructures import Headers
from websockets.http11 import Response
from websockets.sync.client import connect
from websockets.sync.server import serve

from sota_grpo.errors import UserError
from sota_grpo.tasks import server_tools
from sota_grpo.workers.instances import Answer, InstanceLost, Instances, Opened
from tests.tool_rigs import WAIT_S, call, free_port, started

pytestmark = pytest.mark.usefixtures("workers_fork")
ENVIRONMENTS = Path(__file__).parent / "environments"
SERVER, RECORDING = ENVIRONMENTS / "openenv_server.py", ENVIRONMENTS / "openenv_answers.json"
PYTHON = os.environ.get("OPENENV_PYTHON")
KINDS = ("guess", "tower", "notes")
LIST = {"type": "step", "data": {"type": "list_tools"}}


def reset(**row: Any) -> dict[str, Any]:
    return {"type": "reset", "data": {"seed": 3, **row}}


def step(**action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    return step(type="call_tool", tool_name=name, arguments=arguments)


#: What is said to each server in one session, in this order.
SAID = {
    "guess": [
        *(reset(ground_truth="x"), reset(ground_truth="42", other=[1]), step(number=7), step(number="seven")),
        *(step(number=13), step(number=42)),
    ],
    "tower": [reset(other=1), step(kind="up", steps=2), step(kind="say", text="hi"), step(kind="say")],
    "notes": [LIST, reset(), tool("add_note", text="a", times=2), tool("fail", text="no"), tool("add_note")],
}


@contextmanager
def real_servers() -> Iterator[dict[str, str]]:
    """Their addresses, by kind."""
    ports = {kind: free_port() for kind in KINDS}
    process = subprocess.Popen([str(PYTHON), str(SERVER), *(f"{kind}={port}" for kind, port in ports.items())])
    try:
        deadline = time.monotonic() + WAIT_S
        for port in ports.values():
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        yield {kind: f"http://127.0.0.1:{port}" for kind, port in ports.items()}
    finally:
        process.kill()
        process.wait()


def answers_of(url: str, kind: str) -> dict[str, Any]:
    """What a server says: its actions, an answer to each message, and what one hears who comes too late."""
    action = urllib3.request("GET", f"{url}/schema").json()["action"]
    address = f"ws{url.removeprefix('http')}/ws"
    with connect(address, proxy=None) as session:
        exchanges = []
        for message in SAID[kind]:
            session.send(json.dumps(message))
            exchanges.append([message, json.loads(session.recv(WAIT_S))])
        with connect(address, proxy=None) as late:
            full = json.loads(late.recv(WAIT_S))
    return {"action": action, "exchanges": exchanges, "full": full}


class Replay:
    """A server with one session that says what was recorded: each answer to its message, in their order."""

    def __init__(self, recorded: Mapping[str, Any], *, moved_to: str | None = None, says: str | None = None) -> None:
        self.keys: list[str | None] = []  # of those who came
        self._moved_to, self._says = moved_to, says
        self._recorded, self._is_taken = recorded, threading.Lock()
        self._server = serve(self._answer_session, "127.0.0.1", 0, process_request=self._http)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _http(self, _: Any, request: Any) -> Response | None:
        self.keys.append(request.headers.get("Authorization"))
        if request.path == "/ws":
            return self._moved_to and Response(307, "", Headers([("Location", self._moved_to)]), b"")
        known = request.path == "/schema"
        body = json.dumps({"action": self._recorded["action"]}) if known else "{}"
        headers = Headers([("Content-Length", str(len(body))), ("Connection", "close")])
        return Response(200 if known else 404, "", headers, body.encode())

    def _answer_session(self, session: Any) -> None:
        if not self._is_taken.acquire(blocking=False):
            session.send(json.dumps(self._recorded["full"]))
            return
        try:
            left = iter(self._recorded["exchanges"])
            for text in session:
                if self._says is not None:
                    session.send(self._says)
                    continue
                received = json.loads(text)
                if received["type"] == "close":
                    break
                if received["type"] == "reset":
                    received["data"]["seed"] = 3
                answer = next((answer for message, answer in left if message == received), None)
                if answer is None:
                    break
                session.send(json.dumps(answer))
        finally:
            self._is_taken.release()

    def close(self) -> None:
        self._server.shutdown()


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads(RECORDING.read_text())


@pytest.fixture(scope="module", params=["recorded", pytest.param("real", marks=pytest.mark.timeout(120))])
def urls(request: pytest.FixtureRequest, recorded: dict[str, Any]) -> Iterator[dict[str, str]]:
    if request.param == "recorded":
        servers = {kind: Replay(recorded[kind]) for kind in KINDS}
        yield {kind: server.url for kind, server in servers.items()}
        for server in servers.values():
            server.close()
    elif PYTHON is None:
        pytest.skip("OPENENV_PYTHON names no Python that has OpenEnv")
    else:
        with real_servers() as addresses:
            yield addresses


def opened(url: str) -> Any:
    return started(f"openenv+{url}")


def begun(instances: Instances, earns: float | None) -> Opened:
    """A session, which is finished where it ``earns`` something: the server has one at a time."""
    opened = instances.open({"ground_truth": "42", "other": [1]}).result(WAIT_S)
    assert earns is None or instances.finish(opened.key).result(WAIT_S) == earns
    return opened


def test_servers_say_what_was_recorded(urls: dict[str, str], recorded: dict[str, Any]) -> None:
    assert {kind: answers_of(url, kind) for kind, url in urls.items()} == recorded


def test_an_episode(urls: dict[str, str]) -> None:
    with opened(urls["guess"]) as instances:
        instances.wait_ready()
        assert instances.has_reward
        (schema,) = instances.schemas
        assert (schema["function"]["name"], schema["function"]["description"]) == ("guess_number", "Guess the number.")
        parameters = schema["function"]["parameters"]
        assert (list(parameters["properties"]), parameters["required"]) == (["number"], ["number"])
        first, game = (begun(instances, earns) for earns in (0.0, None))
        assert first.observation == game.observation is not None, "siblings begin alike"
        assert game.observation.startswith(" It lies between 0 and 9")
        assert call(instances, game.key, "guess_number", number=7) == Answer("higher", False)
        refused = call(instances, game.key, "guess_number", number="seven").content
        assert refused.startswith("error: ActionFailed: Invalid message; number: Input should be a valid integer")
        assert call(instances, game.key, "guess_number", number=13).content == "error: ActionFailed: unlucky number"
        assert call(instances, game.key, "guess_number", number=42) == Answer("right", False)
        over = call(instances, game.key, "guess_number", number=42)
        assert over == Answer("error: EpisodeOver: the episode is over", True)
        assert instances.finish(game.key).result(WAIT_S) == 1.0, "the last reward, not the sum"


def test_a_union_is_a_tool_for_each_type_of_action(urls: dict[str, str]) -> None:
    with opened(urls["tower"]) as instances:
        instances.wait_ready()
        tools = {one["function"]["name"]: one["function"]["parameters"] for one in instances.schemas}
        assert {name: list(one["properties"]) for name, one in tools.items()} == {"go_up": ["steps"], "say": ["text"]}
        key = instances.open({"other": 1}).result(WAIT_S).key
        assert call(instances, key, "go_up", steps=2).content == '{"height": 2, "said": null}'
        assert call(instances, key, "say", text="hi").content == '{"height": 2, "said": "hi"}'
        assert call(instances, key, "say").content == "error: ActionFailed: Invalid message; say.text: Field required"
        assert instances.finish(key).result(WAIT_S) == 2.0


@pytest.mark.parametrize(("row", "seed"), [({}, 3), ({"seed": None}, 3), ({"seed": 8}, 8)], ids=str)
def test_siblings_share_a_seed_whatever_their_row_has(row: dict[str, Any], seed: int) -> None:
    """An empty cell is no seed: with null, a server draws one for each session."""
    game, sent = server_tools.OpenEnv("http://127.0.0.1:9"), []
    game.seed, game._lists_tools = 3, False
    game._first = lambda message: sent.append(message) or {"observation": {}}
    game.reset(**row, level=1)
    assert sent == [{"type": "reset", "data": {"level": 1, "seed": seed}}]


def test_an_action_whose_schema_has_null_for_what_is_absent_is_a_tool() -> None:
    schema = {"title": "StopAction", "description": None, "oneOf": None, "anyOf": None, "$defs": None, "required": None}
    for properties in (None, {"kind": {"const": "stop"}, "why": True}):
        ((tool, fields),) = server_tools.action_types(schema | {"properties": properties})
        assert (tool["function"]["name"], tool["function"]["parameters"]["required"]) == ("stop", [])
        assert fields == ({"kind": "stop"} if properties else {})
    for action in ({"title": 5}, {"oneOf": [True]}):
        game = server_tools.OpenEnv("http://127.0.0.1:9")
        game._action = action
        with pytest.raises(InstanceLost, match="does not follow the OpenEnv protocol"):
            _ = game.schemas


def test_an_environment_of_mcp_lists_its_tools(urls: dict[str, str]) -> None:
    with opened(urls["notes"]) as instances:
        instances.wait_ready()
        tools = {one["function"]["name"]: one["function"]["parameters"] for one in instances.schemas}
        arguments = {name: list(one["properties"]) for name, one in tools.items()}
        assert arguments == {"add_note": ["text", "times"], "fail": ["text"]}
        notes = instances.open({}).result(WAIT_S)
        assert notes.observation is None
        assert call(instances, notes.key, "add_note", text="a", times=2) == Answer("a, a", False)
        failed = call(instances, notes.key, "fail", text="no")
        assert failed == Answer("error: ActionFailed: Error calling tool 'fail': no", True)
        missing = call(instances, notes.key, "add_note")
        assert missing.is_error
        assert "call[add_note] text Missing required argument" in missing.content
        assert instances.finish(notes.key).result(WAIT_S) == 0.0


def test_a_key_is_sent_with_the_schema_and_the_session_and_to_no_other_server(
    recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOTA_GRPO_TOOLS_KEY", "0123456789abcdef")
    server = Replay(recorded["tower"])
    moved = Replay(recorded["tower"], moved_to=f"ws{server.url.removeprefix('http')}/ws")
    session, lost = server_tools.OpenEnv(server.url), server_tools.OpenEnv(moved.url)
    assert session.schemas
    session.reset(other=1)
    with pytest.raises(InstanceLost, match="no OpenEnv server answers"):
        lost.reset(other=1)
    session.close()
    assert server.keys == ["Bearer 0123456789abcdef"] * 2
    assert moved.keys == ["Bearer 0123456789abcdef"]
    for one in (server, moved):
        one.close()


def test_a_server_without_room_says_so_and_one_that_fails_at_the_reset_too(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_tools, "_ROOM_WITHIN_S", 0.2)
    first, second = server_tools.OpenEnv(urls["guess"]), server_tools.OpenEnv(urls["guess"])
    with pytest.raises(InstanceLost, match=r"the OpenEnv server cannot start an episode .*invalid literal"):
        first.reset(ground_truth="x")
    with pytest.raises(InstanceLost, match=r"accepts no further session .*1/1.*; raise its max_concurrent_envs"):
        second.reset(ground_truth="42", other=[1])
    first.close()
    second.reset(ground_truth="42", other=[1])
    second.close()


@pytest.mark.parametrize(
    "answer",
    [
        "no JSON",
        "[]",
        '{"type": "observation"}',
        '{"type": "observation", "data": {"observation": "text"}}',
        '{"type": "observation", "data": {"observation": {}, "reward": "much"}}',
        '{"type": "error", "data": "odd"}',
        '{"type": "state", "data": {}}',
        "[" * 100_000,
    ],
)
def test_what_no_server_answers_costs_the_sample(answer: str, recorded: dict[str, Any]) -> None:
    server = Replay(recorded["guess"], says=answer)
    refused = pytest.raises(InstanceLost, match="does not follow the OpenEnv protocol")
    with closing(server), closing(server_tools.OpenEnv(server.url)) as game, refused:
        game.reset()


def test_a_server_that_leaves_costs_the_sample_and_none_is_one_sentence(recorded: dict[str, Any]) -> None:
    server = Replay(recorded["guess"])
    with closing(server), opened(server.url) as instances:
        key = begun(instances, None).key
        with pytest.raises(InstanceLost, match="connection to the OpenEnv server failed"):
            call(instances, key, "guess_number", number=99)  # that was not recorded
    with opened(f"http://127.0.0.1:{free_port()}") as instances:
        with pytest.raises(UserError, match=r"openenv\+http.* cannot be used: no OpenEnv server answers at ") as raised:
            instances.wait_ready()
        assert "\n" not in str(raised.value)


if __name__ == "__main__":
    with real_servers() as addresses:
        answers = {kind: answers_of(url, kind) for kind, url in addresses.items()}
    RECORDING.write_text(json.dumps(answers, indent=1) + "\n")
    sys.exit()
