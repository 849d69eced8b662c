"""The loop of docs/algorithm.md, the same text for every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

Batch = TypeVar("Batch")
Read = TypeVar("Read", contravariant=True)


class Collects(Protocol):
    """The collector as the loop uses it."""

    def update_policy_weights_(self, *, version: int) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Trains(Protocol[Read]):
    """The learner as the loop uses it."""

    @property
    def version(self) -> int: ...

    def update(self, rows: Read) -> dict[str, float | None]: ...


class Log(Protocol[Read]):
    """The log as the loop uses it."""

    def write(self, step: int, batch: Read, update: Mapping[str, Any], collected: Mapping[str, float]) -> None: ...


def run(
    batches: Iterator[Batch],
    learner: Trains[Batch],
    collector: Collects,
    log: Log[Batch],
    *,
    first_step: int,
    num_steps: int,
    before: Callable[[int], None],
    after: Callable[[int], bool],
) -> int:
    """Train from ``first_step`` to ``num_steps`` and return the number of steps done.

    Args:
        batches: of complete groups within the age bound: the collector, or the replay buffer that it fills.
        before: called before each step with its number (evaluation).
        after: called with the number of steps done (checkpoint); False ends the loop.
    """
    for step in range(first_step, num_steps):
        before(step)
        batch = next(batches)
        update = learner.update(batch)
        collector.update_policy_weights_(version=learner.version)  # also frees the slots of the batch
        log.write(step, batch, update, collector.metrics())
        if not after(step + 1):
            return step + 1
    return max(first_step, num_steps)
