"""Laws of the sinks: a copy never prompts, never ends training, and a resumed run continues it."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sota_grpo.recording.run_log import ROLLOUT_FIELDS, RunLog
from sota_grpo.recording.sinks import RUN_ID_FILE, WandbSink, has_api_key
from sota_grpo.validators import ConfigError
from tests.unit.test_recording import rollout, rows_of


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_a_key_is_found_where_it_may_be(tmp_path):
    path = tmp_path / "netrc"
    environ = {"NETRC": str(path)}
    assert not has_api_key(environ)
    path.write_text("machine api.wandb.ai login user")
    assert not has_api_key(environ)
    path.write_text("machine api.wandb.ai login user password abc")
    assert has_api_key(environ)
    assert not has_api_key({**environ, "WANDB_BASE_URL": "https://wandb.example.org"})
    path.write_text("nonsense here")
    assert not has_api_key(environ)
    assert has_api_key({**environ, "WANDB_API_KEY": "abc"})


def chunks_of(path: Path) -> list[bytes]:
    """The records of a W&B file: LevelDB's log format after a header of 7 bytes."""
    data, at, found, open_chunk = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:  # no record starts in the last bytes of a block
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        open_chunk += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(open_chunk)
            open_chunk = b""
    return found


def records_of(path: Path) -> tuple[str, list[dict]]:
    """The run id and the history rows of one offline file."""
    from wandb.proto.wandb_internal_pb2 import Record

    run_id, history = "", []
    for record in map(Record.FromString, chunks_of(path)):
        run_id = record.run.run_id or run_id
        if record.HasField("history"):
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return run_id, history


def test_wandb_offline_records_every_step_under_one_id_and_touches_no_network(tmp_path, no_key, monkeypatch, caplog):
    pytest.importorskip("wandb")
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    for name in ("WANDB_BASE_URL", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, address)
    monkeypatch.setattr(sys, "stdin", None)  # a prompt would fail
    for first, mode in ((0, "offline"), (1, "online")):  # the second is a resumed run, online in vain
        sink = WandbSink(mode, project="p", run_dir=tmp_path, tags=["t"], config={"a": {"b": 1}}, samples_every=1)
        assert sink.mode == "offline"
        with RunLog(tmp_path, sinks=[sink]) as log:
            log.write_step(first, {"reward": 0.5 + first, "kl": None})
            log.write_rollouts(first, [rollout(1, 0, 1.0, "π 🎲")])
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    found = [records_of(path) for path in files]
    run_id = (tmp_path / RUN_ID_FILE).read_text().strip()
    assert [name for name, _ in found] == [run_id, run_id]
    history = [row for _, rows in found for row in rows]
    assert [(row["step"], row["reward"]) for row in history if "reward" in row] == [(0, 0.5), (1, 1.5)]
    assert not any("kl" in row for row in history)
    tables = [json.loads(path.read_text()) for path in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert [table["columns"] for table in tables] == [["step", *ROLLOUT_FIELDS]] * 2
    assert all("π 🎲" in table["data"][0] for table in tables)
    assert [record.message.count("wandb sync") for record in caplog.records if record.levelname == "WARNING"] == [1]


def test_without_wandb_only_online_is_an_error(tmp_path, no_key, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="needs wandb: pip install"):
        WandbSink("online", project="p", run_dir=tmp_path)
    sink = WandbSink("offline", project="p", run_dir=tmp_path)
    sink.log(0, {"reward": 1.0})
    sink.log_samples(0, [rollout(1, 0, 1.0)])
    sink.close()
    assert sink.mode == "disabled"
    assert "not installed" in caplog.text
    caplog.clear()
    assert WandbSink("disabled", project="p", run_dir=tmp_path).mode == "disabled"
    assert not caplog.records
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"logging\.wandb=on is not one of"):
        WandbSink("on", project="p", run_dir=tmp_path)


class FailingWandb(SimpleNamespace):
    """W&B whose server refuses, and whose run breaks at ``broken``."""

    def __init__(self, broken: str):
        super().__init__(broken=broken, calls=[], Settings=dict)

    def init(self, mode, **_):
        self.calls.append(f"init {mode}")
        if mode == "online" or self.broken == "init":
            raise RuntimeError("no route to host\nand a page of details")
        return SimpleNamespace(
            define_metric=lambda *_, **__: None, log=self.part("log"), finish=self.part("finish"), url=""
        )

    def Table(self, **_):
        return self.part("Table")()

    def part(self, name):
        def call(*_, **__):
            self.calls.append(name)
            if name == self.broken:
                raise BrokenPipeError("service is gone")

        return call


@pytest.mark.parametrize("broken", ["init", "log", "Table", "finish"])
def test_a_wandb_failure_warns_once_and_never_ends_training(broken, tmp_path, no_key, monkeypatch, caplog):
    wandb = FailingWandb(broken)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbSink("offline", project="p", run_dir=tmp_path, samples_every=1)
    with RunLog(tmp_path, sinks=[sink]) as log:
        for step in range(3):
            log.write_step(step, {"reward": 1.0})
            log.write_rollouts(step, [rollout(step, 0, 1.0)])
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert len(caplog.records) == 1
    assert "metrics.jsonl" in caplog.text
    assert wandb.calls.count(broken) <= 1


def test_an_online_run_whose_server_does_not_answer_goes_on_offline(tmp_path, no_key, monkeypatch, caplog):
    wandb = FailingWandb("nothing")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    sink = WandbSink("online", project="p", run_dir=tmp_path)
    assert sink.mode == "offline"
    assert wandb.calls == ["init online", "init offline"]
    assert len(caplog.records) == 1
    assert "no route to host" in caplog.text
    assert "details" not in caplog.text


def test_samples_go_out_every_nth_step(tmp_path, no_key, monkeypatch):
    wandb = FailingWandb("nothing")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbSink("offline", project="p", run_dir=tmp_path, samples_every=4)
    for step in range(9):
        sink.log_samples(step, [rollout(1, 0, 1.0)])
    assert wandb.calls.count("Table") == 3  # steps 0, 4 and 8
