"""What a step passes through can be read in one sitting: few files, whatever else the package has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT
from tests.forked import ForkServer


@pytest.mark.parametrize(
    ("options", "most"), [([], 29), pytest.param(["--workers"], 32, marks=pytest.mark.slow)], ids=["here", "workers"]
)
def test_a_step_passes_through_few_files(
    options: list[str], most: int, fork_server: ForkServer, tmp_path: Path
) -> None:
    command = [str(ROOT / "scripts/files_per_step.py"), "--files", *options]
    done = fork_server.run(command, cwd=tmp_path)
    done.require(command)
    files = [line for line in done.stdout.splitlines() if line.endswith(".py")]
    assert {"training/learner.py", "source/collector.py", "engines/transformers_engine.py"} <= set(files)  # it counts
    assert len(files) <= most, files
    of_torchrl = done.stdout.rpartition("of TorchRL: ")[2]
    assert all(name in of_torchrl for name in ("ReplayBuffer.sample", "ReplayBuffer.add"))
