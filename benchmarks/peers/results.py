"""What was measured, in plain values that JSON holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.peers.work import Case

WHOLE = "whole"


@dataclass
class Measured:
    """One system on one case; lists have one value per repetition, in the order of the repetitions.

    Args:
        asked: ``learn``, ``step`` or both.
        learn: seconds of the learn phase by itself, on given rows.
        steps: seconds of whole steps by phase, ``whole`` among them.
        learn_bytes, step_bytes: peak memory of the first learn phase, and of the first step after it, above what the
            process held before each.
        gradient_distance: relative distance of the gradient from TRL's on the same rows; None where not compared.
        failure: why there is nothing more; None where nothing failed.
    """

    asked: tuple[str, ...] = ("learn", "step")
    learn: list[float] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    learn_bytes: int | None = None
    step_bytes: int | None = None
    gradient_distance: float | None = None
    failure: str | None = None

    def phase(self, name: str) -> float | None:
        """Median seconds of a phase; None where it was not measured, or this system has none.

        >>> Measured(steps=[{"ref": 1.0}, {"ref": 3.0}, {"ref": 2.0}]).phase("ref")
        2.0
        """
        return _median([step[name] for step in self.steps if name in step])

    def learn_median(self) -> float | None:
        """Median seconds of the learn phase by itself."""
        return _median(self.learn)

    def rest(self) -> float | None:
        """Median seconds of a step that no phase accounts for."""
        return _median([2 * step[WHOLE] - sum(step.values()) for step in self.steps])

    def seconds(self, what: str) -> list[float]:
        """Seconds of each repetition of ``learn`` by itself or of the ``whole`` step."""
        return self.learn if what == "learn" else [step[WHOLE] for step in self.steps]


@dataclass
class CaseResult:
    """One case: its systems by name, and the floor with the rates that it was computed from, by repetition."""

    case: Case
    systems: dict[str, Measured] = field(default_factory=dict)
    floor: list[dict[str, float]] = field(default_factory=list)

    def floor_of(self, phase: str) -> float | None:
        """Median seconds of the floor of a phase."""
        return _median([measured[phase] for measured in self.floor])

    def ratio(self, what: str, peer: str, system: str) -> float | None:
        """How many times faster ``system`` is than ``peer``: the median over repetitions, each compared with its own.

        Within a repetition all systems take their turn, so what slows the machine down for long slows both.

        >>> slow, fast = Measured(learn=[2.0, 9.0, 4.0]), Measured(learn=[1.0, 3.0, 1.0])
        >>> CaseResult(Case("base"), {"slow": slow, "fast": fast}).ratio("learn", "slow", "fast")
        3.0
        """
        if peer not in self.systems or system not in self.systems:
            return None
        pairs = zip(self.systems[peer].seconds(what), self.systems[system].seconds(what))
        return _median([theirs / own for theirs, own in pairs])

    def memory_ratio(self, peer: str, system: str) -> float | None:
        """Peak memory of the peer's learn phase over that of ``system``."""
        measured = [self.systems[name].learn_bytes if name in self.systems else None for name in (peer, system)]
        return None if None in measured or not measured[1] else measured[0] / measured[1]  # type: ignore[operator]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
