"""``python faulty.py FAULT PATTERN NUMBER ...``: ``grpo.py ...`` with one fault at a known instant.

``full``: the disk is full when the NUMBER-th file is opened to be written, or folder made, whose path matches PATTERN.
``kill``: ``kill -9`` where such a file is complete and about to get its name. ``push``: in the middle of the push of
version NUMBER to an engine.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import runpy
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def watch(fault: str, pattern: str, number: int) -> None:
    meetings = itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            meets, path = fault == "full" and arguments[2] & (os.O_WRONLY | os.O_RDWR), arguments[0]
        elif event in ("os.mkdir", "os.rename"):
            meets, path = fault == ("full" if event == "os.mkdir" else "kill"), arguments[event == "os.rename"]
        else:
            return
        if not (meets and isinstance(path, (str, Path)) and re.search(pattern, str(path)) and next(meetings) == number):
            return
        if fault == "kill":
            die()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    sys.addaudithook(hook)


def die_while_pushing(version: int) -> None:
    from sota_grpo.engines.transformers_engine import TransformersEngine

    update = TransformersEngine.update_weights

    def half(weights: Iterable[Any]) -> Iterator[Any]:
        yield next(iter(weights))
        die()

    def dying(engine: Any, weights: Iterable[Any], now: int) -> None:
        update(engine, half(weights) if now == version else weights, now)

    TransformersEngine.update_weights = dying  # type: ignore[method-assign]


if __name__ == "__main__":
    fault, pattern, number = sys.argv[1:4]
    del sys.argv[1:4]
    if fault == "push":
        die_while_pushing(int(number))
    else:
        watch(fault, pattern, int(number))
    sys.argv[0] = str(Path(__file__).resolve().parents[2] / "grpo.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
