"""What several files of this folder start."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.desk import write_program
from tests.forked import Done, ForkServer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Done]]:
    """A command line, run in the checkout by a process that dies where it imports torch or another heavy package."""
    folder = tmp_path_factory.mktemp("light")
    program = write_program(folder / "bin", "python3")
    server = ForkServer(folder, os.environ, light=True)

    def run(*words: str, **environment: str) -> Done:
        script = str(program) if words[0] == "sota-grpo" else words[0]
        return server.run([script, *words[1:]], cwd=ROOT, environment=list(environment.items()))

    yield run
    server.close()
