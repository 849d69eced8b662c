"""The options that bound the slow tests' time: another seed begins with other files, and what has begun is finished."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace as Having

from tests.conftest import pytest_collection_modifyitems as reorder

ROOT = Path(__file__).resolve().parents[2]


def test_files_come_in_the_seeds_order_and_stay_whole() -> None:
    files = [Path(f"test_{letter}.py") for letter in "abcdef"]

    def ordered(seed: str | None, collected: list[Path], longest: str = "") -> list[tuple[Path, int]]:
        items = [
            Having(path=path, number=number, get_closest_marker={"longest": path.name == longest}.get)
            for path in collected
            for number in (1, 0)
        ]
        reorder(Having(getoption={"files_by": seed}.get), items)
        return [(item.path, item.number) for item in items]

    firsts = set()
    for seed in map(str, range(100)):
        order = ordered(seed, files)
        assert order == ordered(seed, files[::-1])  # whatever order they are found in
        assert sorted(order) == [(path, number) for path in files for number in (0, 1)]
        assert [(path, 0) for path, _ in order[::2]] == order[1::2]
        firsts.add(order[0][0])
        first = [(path, number) for path, number in order if path == files[2]]
        assert ordered(seed, files, files[2].name) == first + [item for item in order if item not in first]
    assert firsts == set(files)
    assert [path.name for path, _ in ordered(None, files, "test_c.py")[::2]] == [f"test_{name}.py" for name in "cabdef"]


def test_what_has_not_begun_when_the_time_is_over_is_named(tmp_path: Path) -> None:
    tests = [f"test_{name}.py::test_{number}" for name in "bca" for number in (2, 1)]  # as seed 1 has it
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_2(): pass\ndef test_1(): pass\n")
    for minutes, outcome in ((5, "PASSED"), (0, "SKIPPED (not reached within 0 minutes)")):
        line = [sys.executable, "-m", "pytest", "-vv", "-p", "tests.conftest", f"--minutes={minutes}", "--files-by=1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        outcomes = [line.partition(" [")[0].rstrip() for line in done.stdout.splitlines() if line.startswith("test_")]
        assert outcomes == [f"{test} {outcome}" for test in tests]
