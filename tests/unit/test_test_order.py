"""How tests are run: their order and time, what they draw, and a second try for those of processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path

from tests.forked import Done, ForkServer

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str, **environment: str) -> Done:
    """Pytest on the files of ``folder``, with the options of these tests, in a process that has torch already."""
    (folder / "run.py").write_text("import sys, pytest\nsys.exit(pytest.main())\n")
    own = ("TEST_SEED", "PYTHONHASHSEED", "PYTEST_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    server = ForkServer(folder, variables | {"PYTHONPATH": str(ROOT), **environment})
    try:
        return server.run(["run.py", "-vv", "-p", "tests.conftest", *arguments], cwd=folder)
    finally:
        server.close()


def test_what_has_not_begun_when_the_time_is_over_is_named(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("def test_2(): pass\ndef test_1(): pass\n")
    marked = "@pytest.mark.longest({})\ndef test_{}(): pass\n"
    (tmp_path / "test_d.py").write_text("import pytest\n" + marked.format(4, 2) + marked.format(6, 1))
    tests = [f"test_{name}.py::test_{number}" for name in "dbac" for number in (2, 1)]  # as seed 1 has it
    long = {"test_d.py::test_1": "SKIPPED (may take 6 minutes, of which fewer are left within 5 minutes)"}
    for minutes, outcome, other in ((5, "PASSED", long), (0, "SKIPPED (not reached within 0 minutes)", {})):
        done = run(tmp_path, f"--minutes={minutes}", "--files-by=1", COLUMNS="200")
        outcomes = [line.partition(" [")[0].rstrip() for line in done.stdout.splitlines() if ".py::test" in line]
        assert outcomes == [f"{test} {other.get(test, outcome)}" for test in tests]


def test_draws_follow_from_the_tests_own_name_and_no_file(tmp_path: Path) -> None:
    """And no test sees at which level the one before it has logged."""
    (tmp_path / "test_a.py").write_text(
        "import json, logging, random\nfrom hypothesis import given, settings, strategies as st\n"
        "HERE, SEEN = random.random(), []\n"
        "@given(st.integers())\ndef test_h(x): SEEN.append(x)\n"
        "def test_database(): assert settings().database is None\n"
        "def test_r(): open('drawn', 'w').write(json.dumps([HERE, random.random(), SEEN]))\n"
        "def test_1(): logging.getLogger('sota_grpo').setLevel(logging.ERROR)\n"
        "def test_2(caplog):\n    logging.getLogger('sota_grpo').warning('2')\n    assert caplog.messages == ['2']\n"
    )

    def drawn(**environment: str) -> list:
        done = run(tmp_path, **environment)
        assert done.code == 0, done.stdout
        return json.loads((tmp_path / "drawn").read_text())

    first = drawn()
    names = ("test_a.py", "test_a.py::test_r")
    assert first[:2] == [random.Random(hashlib.sha256(f"0 {name}".encode()).digest()).random() for name in names]
    (tmp_path / "test_0.py").write_text("import random\ndef test_0(): random.random()\n")
    assert drawn() == first  # Hypothesis's too
    assert all(other != one for other, one in zip(drawn(TEST_SEED="1"), first))


def test_a_failed_test_of_processes_has_a_second_try_that_is_reported(tmp_path: Path) -> None:
    begin = "import subprocess, pytest\nfrom pathlib import Path\n"
    (tmp_path / "test_a.py").write_text(
        f"{begin}def test_flaky():\n    tried = Path('tried').exists()\n    Path('tried').touch()\n    assert tried\n"
    )
    (tmp_path / "test_b.py").write_text("def test_of_no_process(): assert 1 == 2\n")
    (tmp_path / "test_c.py").write_text(
        f"{begin}def test_broken():\n    if Path('seen').exists():\n        pytest.skip('it shows nothing')\n"
        "    Path('seen').touch()\n    assert 3 == 4\n"
    )
    done = run(tmp_path, "--processes-again", "-n", "1", "--dist", "loadfile")
    *_, flaky, broken, counts = done.stdout.splitlines()
    assert sorted([flaky, broken]) == [
        "test_a.py::test_flaky (call): failed, then passed in a fresh process",
        "test_c.py::test_broken (call): failed, then failed in a fresh process",
    ]
    assert "2 failed" in counts
    assert "1 flaky" in counts
    assert "    assert tried" in done.stdout
    assert "1 passed in" in done.stdout
    assert done.code == 1
    (tmp_path / "tried").unlink()
    assert run(tmp_path, "--processes-again", "test_a.py").code == 0
