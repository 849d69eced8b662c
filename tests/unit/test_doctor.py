"""``sota-grpo doctor``: each lack is reported with its fix; a machine that has everything passes."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from sota_grpo.cli import doctor, main
from sota_grpo.cli.doctor import FAILED, OK, WARNING, Node


def found(subject: str, folder: Path = Path("outputs")) -> tuple[str, str]:
    """State and sentence of one look, as ``examine`` has it."""
    (one,) = (each for each in doctor.examine(str(folder.absolute())).findings if each.subject == subject)
    return one.state, one.sentence


def one_of(findings) -> tuple[str, str]:
    (one,) = findings
    return one.state, one.sentence


def test_a_node_that_has_everything_exits_with_0(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--run-dir", str(tmp_path / "runs"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert [one["subject"] for one in report["nodes"][0]["findings"]][:3] == ["packages", "GPU", "memory"]
    assert list(tmp_path.iterdir()) == []  # nothing is left


def test_what_is_missing_is_reported_with_its_fix(tmp_path: Path, monkeypatch) -> None:
    """A package out of its range and one that is missing, little shared memory, a full disk, few files."""
    real = doctor.version

    def version(name: str) -> str:
        if name == "peft":
            raise PackageNotFoundError(name)
        return "0.99.0" if name == "tensordict" else real(name)

    monkeypatch.setattr(doctor, "version", version)
    state, sentence = found("packages")
    assert state == FAILED
    assert "tensordict is 0.99.0, but <0.15,>=0.14.3 is needed" in sentence
    assert "peft is missing" in sentence

    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name in ("ray", "setuptools") else real(name))
    state, sentence = found("packages")
    assert (state, "by the extra ray" in sentence, "setuptools" in sentence) == (WARNING, True, False)
    (tmp_path / "file").touch()
    assert found("disk", tmp_path / "file" / "runs")[0] == FAILED
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 * 2**20))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=2**36, total=2**36))
    state, sentence = found("memory")
    assert (state, "--shm-size=" in sentence) == (WARNING, True)
    assert found("disk", tmp_path)[0] == WARNING

    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (256, 1024))
    needs = "at most 256; Ray needs thousands: use `ulimit -n 1024` before the start for more."
    assert found("open files") == (WARNING, needs)


def test_a_folder_that_cannot_be_written_fails_the_node(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "NamedTemporaryFile", Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--run-dir", str(tmp_path)])
    assert end.value.code == 1
    assert "FAILED  disk" in capsys.readouterr().out


def test_a_look_that_breaks_costs_only_itself(monkeypatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: 1 / 0)
    assert found("GPU") == (WARNING, "could not be checked (ZeroDivisionError: division by zero).")
    assert found("open files")[0] in (OK, WARNING)


def test_nodes_are_compared() -> None:
    """Other versions fail, and a node without the package is named."""
    missing = doctor._of_answer("10.0.0.2", ModuleNotFoundError("No module named 'sota_grpo'"))
    assert one_of(missing.findings)[0] == FAILED
    assert "No module named 'sota_grpo'; install the package there" in one_of(missing.findings)[1]
    hung = doctor._of_answer("10.0.0.3", TimeoutError("it said nothing within 9 s"))
    assert one_of(hung.findings) == (FAILED, "it said nothing within 9 s; look at its disks and drivers.")
    here, there = Node("a", [], {"python": "3.11", "ray": "2.60.0"}), Node("b", [], {"python": "3.11"})
    differs = "ray is 2.60.0 on a, missing on b; install the same on all nodes."
    assert one_of(doctor.compare([here, there, missing])) == (FAILED, differs)
