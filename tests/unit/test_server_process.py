"""Servers as child processes: started, guarded, reported when they die, and never left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sota_grpo.engines import EngineOptions
from sota_grpo.engines import server_engine as server_module
from sota_grpo.engines.server_engine import ServerDied, ServerEngine, ServerLate, ServerProcess
from sota_grpo.engines.sglang_server import SGLangEngine
from sota_grpo.engines.vllm_server import KEY_VARIABLE, RequireKey
from sota_grpo.errors import RunFailed
from sota_grpo.http import HttpClient
from sota_grpo.policy.weight_pack import WeightFolder
from tests.process_rigs import members, wait_for

SERVER = """
import http.server, os, subprocess, sys
port = int(sys.argv[1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, "server", os.getpid(), flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def start(folder: Path, script: str = SERVER) -> tuple[ServerProcess, HttpClient]:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)

    class Engine(ServerEngine):
        command = staticmethod(lambda options, port, *_, on_cpu: [sys.executable, "-c", script, str(port)])
        environment = staticmethod(lambda options, key, on_cpu: {KEY_VARIABLE: key})

    log_path = folder / "logs" / "server.log"
    options = EngineOptions("model", eos_token_ids=[1], log_path=log_path)
    return Engine.start(options, scratch, on_cpu=True)


def test_closing_ends_the_server_its_children_and_its_scratch_folder(tmp_path: Path):
    """Of a server whose first port was taken in between."""
    flag = tmp_path / "tried"
    script = f"""
import pathlib, sys
flag = pathlib.Path({str(flag)!r})
if not flag.exists():
    flag.touch(); sys.exit("OSError: [Errno 98] Address already in use")
{SERVER}"""
    process, client = start(tmp_path, script)
    assert flag.exists()
    assert (tmp_path / "scratch").is_dir()
    assert client.host == "127.0.0.1"
    assert len(client._headers["Authorization"].removeprefix("Bearer ")) >= 32
    assert len(members(process.pid)) == 3  # launcher, server, the server's child
    assert os.getsid(process.pid) == process.pid  # a Ctrl-C in this terminal does not reach it
    assert not process.has_ended()
    process.close()
    process.close()
    assert members(process.pid) == []
    assert not (tmp_path / "scratch").exists()


@pytest.mark.parametrize("victim", ["server", "launcher"])
def test_a_killed_server_or_launcher_is_reported_in_one_line_and_takes_the_others_along(tmp_path: Path, victim: str):
    process, _ = start(tmp_path)
    log = tmp_path / "logs" / "server.log"
    os.kill(int(log.read_text().split()[3]) if victim == "server" else process.pid, signal.SIGKILL)
    assert process.has_ended(within_s=60.0)
    wait_for(lambda: members(process.pid) == [])
    error = process.died("while it sampled")
    assert isinstance(error, ServerDied)
    how = "was ended by SIGKILL; the kernel sends it when memory runs out"
    how = how if victim == "server" else "it and its launcher were killed"
    assert str(error) == f"The inference server ended while it sampled ({how}); see its output in {log}."


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_server_ends_when_its_trainer_is_killed(tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    trainer = f"""
import subprocess, sys, time
from pathlib import Path
from sota_grpo.orphans import launcher
command = [*launcher(Path({str(tmp_path / "scratch")!r})), sys.executable, "-c", {SERVER!r}, "0"]
log = Path({str(tmp_path / "log")!r})
launched = subprocess.Popen(command, stdout=log.open("wb"), start_new_session=True)
while b"child" not in log.read_bytes():
    time.sleep(0.01)
print(launched.pid, flush=True)
launched.wait()
"""
    with subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        group = int(running.stdout.readline())
        assert len(members(group)) == 3
        running.kill()
    wait_for(lambda: members(group) == [])
    assert not (tmp_path / "scratch").exists()


def test_a_server_that_does_not_stop_when_asked_is_killed(tmp_path: Path):
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SERVER
    process, _ = start(tmp_path, stubborn)
    process.close(grace_s=0.3)
    assert members(process.pid) == []


def test_a_start_that_fails_is_one_sentence_with_the_cause_from_far_above_the_last_lines(tmp_path: Path):
    lines = ("(1) WARNING KeyError: harmless", "(2) ERROR ValueError: no \x1b[2Jroom for the cache", *40 * ["line"])
    script = f"print({chr(10).join(lines)!r})\nraise RuntimeError('See root cause above')"
    with pytest.raises(ServerDied, match=r"ended before it was ready") as caught:
        start(tmp_path, script)
    assert r"(ended with exit code 1, ValueError: no \x1b[2Jroom for the cache)" in str(caught.value)
    assert isinstance(caught.value, RunFailed)  # printed without a traceback


def test_a_start_that_takes_too_long_is_ended_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log, calls = tmp_path / "logs" / "server.log", itertools.count()

    def late() -> float:
        """1000 s pass once the server has begun; the first call is that for the deadline."""
        return time.monotonic() + 1000 * (next(calls) > 0 and "loading" in log.read_text())

    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=late, sleep=time.sleep))
    script = "import os, time; print('loading', os.getpgid(0), flush=True); time.sleep(600)"
    with pytest.raises(ServerLate, match=r"not ready after 600 s .*server\.log, or raise ray\.timeout_s") as caught:
        start(tmp_path, script)
    assert isinstance(caught.value, RunFailed)  # printed without a traceback
    group = int(log.read_text().split("loading ")[1].split()[0])
    assert members(group) == []


def test_every_path_but_health_needs_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(KEY_VARIABLE, "right")
    reached = []

    async def app(scope: dict, receive: object, send: object) -> None:
        reached.append(scope["path"])

    def status(path: str, key: str | None) -> int | None:
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "path": path, "headers": headers}
        with pytest.raises(StopIteration):  # nothing in it waits, and another test may have left a loop running
            RequireKey(app)(scope, None, send).send(None)
        return sent[0]["status"] if sent else None

    assert status("/collective_rpc", None) == 401
    assert status("/pause", "wrong") == 401
    assert status("/health", None) is None
    assert status("/collective_rpc", "right") is None
    assert reached == ["/health", "/collective_rpc"]
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(RuntimeError, match="any user of this machine"):
        RequireKey(app)  # type: ignore[arg-type]


@pytest.mark.parametrize("engine", [ServerEngine, SGLangEngine])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_no_command_line_shows_the_key(engine: type[ServerEngine], on_cpu: bool, tmp_path: Path):
    options = EngineOptions("model", eos_token_ids=[1], dtype="bfloat16", max_rows=33, max_model_len=77)
    command = engine.command(options, 1234, "the-secret", tmp_path, on_cpu=on_cpu)
    assert not [word for word in command if "the-secret" in word]
    for flag, value in {"--host": "127.0.0.1", "--port": "1234", "--dtype": "bfloat16"}.items():
        assert command[command.index(flag) + 1] == value
    assert {"33", "77"} <= set(command)
    for file in tmp_path.iterdir():
        assert file.stat().st_mode & 0o077 == 0
    environment = engine.environment(options, "the-secret", on_cpu=on_cpu)
    is_passed = "the-secret" in environment.values() or "the-secret" in (tmp_path / "server.yaml").read_text()
    assert is_passed


def test_pushed_matrices_are_cast_once_and_only_this_user_can_read_them():
    """Vectors are not cast, because some engines keep some of them in float32."""
    folder = WeightFolder({"w": torch.Size([1, 3])}, torch.bfloat16)
    from safetensors.torch import load_file

    row = torch.tensor([[1.0, 2.0, 1.0 + 2**-12]])
    view = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    push = folder.write({"w": row, "tied": row, "view": view, "vector": row[0]})
    assert push.stat().st_mode & 0o077 == 0
    read = load_file(push / "model.safetensors")
    assert torch.equal(read.pop("vector"), row[0])
    assert {name: tensor.dtype for name, tensor in read.items()} == dict.fromkeys(("w", "tied", "view"), torch.bfloat16)
    assert read["w"].tolist() == read["tied"].tolist() == [[1.0, 2.0, 1.0]]
    assert read["view"].tolist() == view.tolist()
    folder.close()
    folder.close()
    other = WeightFolder({"w": torch.Size([1, 3])}, None)
    assert other.close.atexit  # one that is not closed goes with its process
    path = other.write({"w": row})
    del other
    assert not path.parent.exists()
