"""One module per trainer; ``make(folder)`` returns its :class:`~benchmarks.laws.adapter.Adapter`.

``folder`` is where wheels are unpacked. A trainer is called through its own loss function of a micro-batch, with what
its training loop does before and after, and the file and line of the wheel that does so are named.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from benchmarks.laws.adapter import Adapter

NAMES = (
    *("ours", "trl", "verl", "torchrl", "openrlhf", "skyrl", "ms_swift", "areal", "miles", "torchtitan", "unsloth"),
    *("trinity", "twinkle"),
)


def load(name: str, folder: Path) -> Adapter:
    return import_module(f"{__name__}.{name}").make(folder)
