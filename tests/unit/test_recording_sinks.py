"""Invariants of the sinks: a copy never prompts, never ends training, and a resumed run continues it."""

from __future__ import annotations

import json
import os
import socket
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from sota_grpo.config import Config, LoggingConfig
from sota_grpo.config.validators import ConfigError
from sota_grpo.recording.run_log import ROLLOUT_FIELDS, RunLog
from sota_grpo.recording.sinks import (
    FOLDER,
    RUN_ID_FILE,
    TensorBoardSink,
    WandbSink,
    has_api_key,
    make_sinks,
    require_sinks,
)
from tests.sink_files import event_files, wandb_config, wandb_history
from tests.unit.test_recording import rollout, rows_of

HOSTILE = "π 🎲 \ud800 | **bold** <script>alert(1)</script>"


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_a_key_is_found_where_it_may_be(tmp_path, no_key, monkeypatch):
    pytest.importorskip("requests")
    path = tmp_path / "netrc"
    assert not has_api_key()
    login = "machine api.wandb.ai login user"
    for text, has_key in ((login, False), ("nonsense here", False), (f"{login} password abc", True)):
        path.write_text(text)
        assert has_api_key() == has_key, text
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_api_key()
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert has_api_key()


def test_wandb_without_a_key_records_every_step_and_touches_no_network(tmp_path, no_key, monkeypatch, caplog):
    pytest.importorskip("wandb")
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    for name in ("WANDB_BASE_URL", "HTTPS_PROXY", "HTTP_PROXY"):
        monkeypatch.setenv(name, address)
    monkeypatch.setattr(sys, "stdin", None)  # a prompt would fail
    config = {"seed": 1, "engine": {"url": None}}
    monkeypatch.setattr(sys, "argv", ["mine.py", "engine.api_key=sesame"])  # W&B keeps the command line
    sink = WandbSink("online", run_dir=tmp_path, config=config, arguments={"project": "p", "tags": ["t"]})
    sink.samples_every = 1
    assert sink.mode == "offline"
    with RunLog(tmp_path, sinks=[sink]) as log:
        log.rewind(0)
        log.write_step(0, {"reward": 0.5, "kl": None})
        log.write_rollouts(0, [rollout(1, 0, 1.0, HOSTILE)])
    with pytest.raises(TimeoutError):
        server.accept()
    server.close()
    run_id = (tmp_path / RUN_ID_FILE).read_text().strip()
    ((name, history),) = wandb_history(tmp_path)
    assert name == run_id
    assert [(row["step"], row["reward"]) for row in history if "reward" in row] == [(0, 0.5)]
    assert not any("kl" in row for row in history)
    (path,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["step", *ROLLOUT_FIELDS]
    assert HOSTILE.replace("\ud800", "\\ud800") in table["data"][0]
    assert [record.message.count("wandb sync") for record in caplog.records if record.levelname == "WARNING"] == [1]
    assert wandb_config(tmp_path) == config
    assert not any(b"sesame" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"wandb": "online"}, r"wandb=online needs wandb"),
        ({"sinks": ["tensorboard"]}, r"sinks=\[tensorboard\] needs tensorboard"),
    ],
)
def test_a_package_that_is_missing_is_one_sentence_unless_it_may_be(options, given, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sota_grpo.recording.sinks.find_spec", lambda name: None)
    assert make_sinks(Config(), tmp_path) == []
    with pytest.raises(ConfigError, match=rf"^logging\.{given}, which is not installed: `pip install .*\.$"):
        require_sinks(Config(logging=LoggingConfig(**options)))
    assert not caplog.records
    require_sinks(Config(logging=LoggingConfig(wandb="offline")))
    assert make_sinks(Config(logging=LoggingConfig(wandb="offline")), tmp_path) == []
    assert caplog.text.count("which is not installed") == 1


class FailingWandb(SimpleNamespace):
    """W&B whose server refuses, and whose run breaks at ``broken``."""

    def __init__(self, broken: str):
        super().__init__(broken=broken, calls=[], options={}, Settings=dict)

    def init(self, mode, **options):
        self.calls.append(f"init {mode}")
        self.options = options
        if mode == "online" or self.broken == "init":
            raise RuntimeError("no route to host\nand a page of details")
        parts = {name: partial(self.call, name) for name in ("log", "finish")}
        return SimpleNamespace(define_metric=lambda *_, **__: None, url="", **parts)

    def Table(self, **_):
        self.call("Table")

    def call(self, name, *_, **__):
        self.calls.append(name)
        if name == self.broken:
            raise BrokenPipeError("service is gone")


@pytest.mark.parametrize("broken", ["init", "Table", "finish"])
def test_a_wandb_failure_warns_once_and_never_ends_training(broken, tmp_path, no_key, monkeypatch, caplog):
    wandb = FailingWandb(broken)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    sink = WandbSink("offline", run_dir=tmp_path, arguments={"project": "p"})
    sink.samples_every = 1
    with RunLog(tmp_path, sinks=[sink]) as log:
        for step in range(3):
            log.write_step(step, {"reward": 1.0})
            log.write_rollouts(step, [rollout(step, 0, 1.0)])
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert len(caplog.records) == 1
    assert "metrics.jsonl" in caplog.text
    assert wandb.calls.count(broken) <= 1


def test_an_online_run_whose_server_does_not_answer_continues_offline(tmp_path, no_key, monkeypatch, caplog):
    wandb = FailingWandb("nothing")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    sink = WandbSink("online", run_dir=tmp_path / "10-00-00" / "3", arguments={"project": "p"})
    assert sink.mode == "offline"
    assert wandb.options["name"] == "10-00-00/3"  # the last folder alone is a clock time, or a number in a sweep
    assert wandb.calls == ["init online", "init offline"]
    assert len(caplog.records) == 1
    assert "no route to host" in caplog.text
    assert "details" not in caplog.text


def test_what_a_resumed_run_writes_again_replaces_what_tensorboard_had(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.summary.writer import event_file_writer

    # files of one second are read in the order of the process's writers as text, in which the tenth precedes the ninth
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(10))
    for first, values in ((0, [0.0, 1.0, 2.0, 3.0]), (2, [20.0, 30.0, 40.0])):
        with RunLog(tmp_path, sinks=[TensorBoardSink(tmp_path)]) as log:
            log.rewind(first)
            for step, value in enumerate(values, first):
                log.write_step(step, {"reward": value})
    assert len(list((tmp_path / FOLDER).iterdir())) == 2
    events = event_files(tmp_path / FOLDER).Scalars("reward")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 1.0), (2, 20.0), (3, 30.0), (4, 40.0)]
