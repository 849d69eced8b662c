"""Run what is given to Python on the pretended device, its child processes too; see :mod:`tests.pretended_cuda`."""

from __future__ import annotations

import sys

from tests.pretended_cuda import guard

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m tests.pretended_cuda SCRIPT | -m MODULE | -c CODE [ARGUMENTS]")
    guard.become(sys.argv[1:])
