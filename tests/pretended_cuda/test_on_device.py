"""The tests of ``on_device/`` in processes that pretend to have a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_cuda import guard


@pytest.mark.skipif(guard.reason_to_skip() is not None, reason=str(guard.reason_to_skip()))
def test_on_the_pretended_device(capfd: pytest.CaptureFixture[str]) -> None:
    folder = str(Path(__file__).parent / "on_device")
    command = [sys.executable, "-m", "tests.pretended_cuda", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run([*command, "-rP", folder], cwd=guard.ROOT, capture_output=True, text=True, timeout=500)
    with capfd.disabled():
        print(done.stdout if done.returncode else "")
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
