"""The stages of :mod:`scripts.gpu_proof`, and what they are given and give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """Of the command line."""

    device: str
    small: bool
    out: Path


@dataclass(frozen=True)
class Finding:
    """One line of the proof; ``passed`` is None where something was only measured."""

    what: str
    passed: bool | None
    figures: dict[str, Any]
