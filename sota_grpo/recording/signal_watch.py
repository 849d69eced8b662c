"""Says so when turns go by from which nothing can be learned: no run should end in silence about that."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)

_PATIENCE = 3  # turns in a row; one alone happens to good runs, and a run may be shorter


class SignalWatch:
    """Watches the rewards of a run; each warning is given once.

    >>> watch = SignalWatch(total=2)
    >>> watch.turn(0, {"advantage": 0.0, "reward": 1.0})
    >>> watch.turn(1, {"advantage": 0.0, "reward": 1.0})  # logs the warning
    >>> watch.flat
    2

    Args:
        total: turns of the run.

    Attributes:
        flat: turns in a row, up to the last, without a group whose rewards differ.
    """

    def __init__(self, total: int) -> None:
        self._patience = min(_PATIENCE, total)
        self.flat = 0
        self._told_flat = self._told_failed = False

    def turn(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Look at the metrics of a turn: ``advantage`` (mean of its size), ``reward``, ``reward_errors``, responses."""
        responses = (metrics.get("dialog_turns") or 0) / (step + 1)
        failed = metrics.get("reward_errors") or 0
        self.flat = self.flat + 1 if metrics.get("advantage") == 0 else 0
        if failed and failed >= responses and not self._told_failed:
            self._told_failed = True
            logger.warning(
                "The grader failed at all %d responses of turn %d, and their reward is 0: `sota-grpo check` with the "
                "same options shows its error.",
                *(failed, step + 1),
            )
        elif self.flat >= self._patience and not self._told_flat:
            self._told_flat = True
            logger.warning(
                "In %d %s in a row every group's rewards were equal (mean %.2f), so nothing was learned from them: "
                "read the responses (sota-grpo report RUN), then change the reward, the problems or the temperature.",
                *(self.flat, "turn" if self.flat == 1 else "turns", metrics.get("reward") or 0.0),
            )
