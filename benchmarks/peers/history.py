"""The ratios of ``--quick`` per commit in ``benchmarks/history.jsonl``, and whether one fell."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.results import WHOLE, CaseResult
from benchmarks.peers.systems import OURS, OURS_VLLM, TRL
from benchmarks.peers.table import MEMORY, Promise
from benchmarks.peers.work import BASE

FILE = Path(__file__).parents[1] / "history.jsonl"
TOLERANCE = 0.2  # of two runs of one commit, a ratio's difference on a machine with other work
LAST = 5  # lines of the same CPU that a new one is compared with
RATIOS = (
    Promise("learn", BASE.name, TRL, OURS, 0.0),
    Promise(WHOLE, BASE.name, TRL, OURS_VLLM, 0.0),
    Promise(WHOLE, BASE.name, TRL, OURS, 0.0),
    Promise(MEMORY, BASE.name, TRL, OURS, 0.0),
)


def ratios(results: Sequence[CaseResult]) -> dict[str, float]:
    """Return how many times better than TRL each measured quantity is, by its name."""
    measured = {f"{ratio.what}: {ratio.system}": ratio.ratio(results) for ratio in RATIOS}
    return {name: round(value, 2) for name, value in measured.items() if value is not None}


def fallen(entry: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence per ratio more than ``TOLERANCE`` below the median of the last lines of the same CPU.

    >>> fallen({"cpu": "A", "ratios": {"learn": 2.0}}, [{"cpu": "A", "ratios": {"learn": 4.0}}])
    ['learn is 2.00 times TRL, 50 % below 4.00, the median of the last 1 on this CPU (tolerance 20 %).']
    >>> fallen({"cpu": "A", "ratios": {"learn": 3.3}}, [{"cpu": "A", "ratios": {"learn": 4.0}}])
    []
    """
    alike = [line["ratios"] for line in before if line["cpu"] == entry["cpu"]][-LAST:]
    sentences = []
    for name, ratio in entry["ratios"].items():
        if (known := [line[name] for line in alike if name in line]) and ratio < (1 - TOLERANCE) * (
            usual := statistics.median(known)
        ):
            sentences.append(
                f"{name} is {ratio:.2f} times TRL, {1 - ratio / usual:.0%} below {usual:.2f}, the median of the last "
                f"{len(known)} on this CPU (tolerance {TOLERANCE:.0%}).".replace("%", " %")
            )
    return sentences


def compare_and_store(entry: Mapping[str, Any], file: Path = FILE) -> list[str]:
    """Return :func:`fallen` against the lines of the file, and append the entry."""
    before = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with file.open("a") as lines:
        lines.write(json.dumps(entry) + "\n")
    return fallen(entry, before)
