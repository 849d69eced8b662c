"""The loop of docs/algorithm.md, the same text for every mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

Batch = TypeVar("Batch")
Given = TypeVar("Given", contravariant=True)


class Source(Protocol[Batch]):
    """Where batches come from: complete groups, none older than the bound."""

    def next_batch(self, version: int) -> Batch: ...

    def release(self, batch: Batch) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Trains(Protocol[Given]):
    """What the loop needs of a learner."""

    @property
    def version(self) -> int: ...

    def update(self, rows: Given) -> dict[str, float | None]: ...


class Publishes(Protocol):
    """What the loop needs of a publisher."""

    def publish(self, version: int) -> None: ...


class Log(Protocol[Given]):
    """What the loop needs of a log."""

    def write(self, step: int, batch: Given, update: Mapping[str, Any], source: Mapping[str, float]) -> None: ...


def run(
    source: Source[Batch],
    learner: Trains[Batch],
    publisher: Publishes,
    log: Log[Batch],
    *,
    first_step: int,
    num_steps: int,
    before: Callable[[int], None],
    after: Callable[[int], bool],
) -> int:
    """Go round the loop from ``first_step`` to ``num_steps`` and return the number of steps done.

    Args:
        before: called with the number of each step, before it (evaluation).
        after: called with the number of steps done (checkpoint); False ends the loop there.
    """
    for step in range(first_step, num_steps):
        before(step)
        batch = source.next_batch(learner.version)
        update = learner.update(batch)
        publisher.publish(learner.version)
        source.release(batch)
        log.write(step, batch, update, source.metrics())
        if not after(step + 1):
            return step + 1
    return max(first_step, num_steps)
