"""The tests of ``on_device/`` in processes that pretend to have a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_cuda import guard

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(guard.reason_to_skip() is not None, reason=str(guard.reason_to_skip()))
@pytest.mark.parametrize(
    "what",
    [
        "test_tensors.py test_learner.py test_engine.py test_sharding.py",
        pytest.param("test_runs.py", marks=pytest.mark.slow),  # whole runs of what the others hold piece by piece
    ],
)
def test_on_the_pretended_device(what: str, capfd: pytest.CaptureFixture[str]) -> None:
    files = [str(Path(__file__).parent / "on_device" / name) for name in what.split()]
    command = [sys.executable, "-m", "tests.pretended_cuda", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, "-rP", *files], cwd=ROOT, capture_output=True, text=True, timeout=500)
    with capfd.disabled():
        print(done.stdout if done.returncode else "")
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
