"""``gate.json``: what the gate found before the first step of the latest start, for those who read the run later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sota_grpo.errors import RunFailed
from sota_grpo.run_record import write_json

GATE_FILE = "gate.json"


class Outcome(Protocol):
    """What a check of the gate says of itself; the record keeps exactly this."""

    @property
    def name(self) -> str: ...
    @property
    def passed(self) -> bool: ...
    @property
    def sentence(self) -> str: ...
    @property
    def seconds(self) -> float: ...


def write_gate(run_dir: str | os.PathLike[str], mode: str, checks: Sequence[Outcome]) -> None:
    """Replace the run's ``gate.json`` by the outcome of these checks; atomic.

    Args:
        run_dir: exists already.
        mode: ``check.mode``; with ``off`` there are no checks, and the file says so.

    Raises:
        RunFailed: the file cannot be written.

    >>> import json, tempfile
    >>> from types import SimpleNamespace
    >>> run_dir = Path(tempfile.mkdtemp())
    >>> write_gate(run_dir, "warn", [SimpleNamespace(name="ratio", passed=True, sentence="it is 1", seconds=0.25)])
    >>> json.loads((run_dir / GATE_FILE).read_text())["checks"]
    [{'name': 'ratio', 'passed': True, 'sentence': 'it is 1', 'seconds': 0.25}]
    """
    path = Path(run_dir) / GATE_FILE
    found = [{"name": c.name, "passed": c.passed, "sentence": c.sentence, "seconds": c.seconds} for c in checks]
    try:
        write_json(path, {"mode": mode, "checks": found})
    except OSError as error:
        raise RunFailed(f"{path} cannot be written ({error.strerror}); free space there and start again.") from error
