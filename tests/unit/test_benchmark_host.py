"""The process of a benchmarked system: it answers, and whatever ends it is said in one sentence."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from benchmarks.peers import host
from benchmarks.peers.host import LEARN, STEP, Host, SystemFailed, answer_all


class Fake:
    """Steps in no time; what else it does is in its folder's name."""

    def __init__(self, folder: str):
        self.folder = folder

    def learn(self) -> None:
        if self.folder == "dies":
            os._exit(7)
        if self.folder == "hangs":
            time.sleep(60)

    def step(self) -> dict[str, float]:
        raise RuntimeError("out of tokens")

    def close(self) -> None:
        Path(f"{self.folder}.closed").touch()


def serve(connection, name, folder, log) -> None:
    answer_all(connection, lambda: Fake(folder))


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process would import for a second what its system here does not need."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)


def make(folder: str, tmp_path: Path) -> Host:
    return Host("fake", folder, tmp_path / "fake.log", serve)  # type: ignore[arg-type]


def test_a_system_answers_returns_what_it_raises_and_is_closed(tmp_path) -> None:
    system = make(str(tmp_path / "fine"), tmp_path)
    system.ready()
    assert system.ask(LEARN)["seconds"] >= 0
    with pytest.raises(SystemFailed, match=r"RuntimeError: out of tokens \(fake.log\)"):
        system.ask(STEP)
    system.close()
    system.close()
    assert (tmp_path / "fine.closed").exists()


def test_a_process_that_dies_or_hangs_is_ended_and_named(tmp_path, monkeypatch) -> None:
    dying, hanging = (make(folder, tmp_path) for folder in ("dies", "hangs"))
    dying.ready()
    with pytest.raises(SystemFailed, match="exit code 7"):
        dying.ask(LEARN)
    hanging.ready()
    monkeypatch.setattr(host, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(SystemFailed, match="no answer to 'learn' within 0 s"):
        hanging.ask(LEARN)
    assert not hanging._process.is_alive()
