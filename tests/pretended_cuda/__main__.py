"""Run what is given to Python on the pretended device, its child processes too; see :mod:`tests.pretended_cuda`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.pretended_cuda import guard

SITE = Path(__file__).with_name("site")
ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    """The variables of a process that pretends."""
    before = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = os.pathsep.join([str(SITE), *before, str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}  # Triton's kernels run line by line, in numpy


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tests.pretended_cuda SCRIPT | -m MODULE | -c CODE [ARGUMENTS]")
    guard.compiled()
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())
