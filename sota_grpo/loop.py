"""The training loop of docs/algorithm.md, the same for every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

Batch = TypeVar("Batch")
Read = TypeVar("Read", contravariant=True)


class Collects(Protocol):
    """The methods of a collector that the loop calls."""

    def update_policy_weights_(self, *, version: int) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Trains(Protocol[Read]):
    """The methods of a learner that the loop calls."""

    @property
    def version(self) -> int: ...

    def update(self, rows: Read) -> dict[str, float | None]: ...


class Log(Protocol[Read]):
    """The method of a log that the loop calls."""

    def write(self, step: int, batch: Read, update: Mapping[str, Any], collected: Mapping[str, float]) -> None: ...


def run(
    batches: Iterator[Batch],
    learner: Trains[Batch],
    collector: Collects,
    log: Log[Batch],
    *,
    first_step: int,
    num_steps: int,
    before: Callable[[int], bool],
    after: Callable[[int], bool],
) -> int:
    """Run the training steps ``first_step`` to ``num_steps - 1``; return the steps completed, earlier ones included.

    Args:
        batches: batches of complete groups within the age bound, from the collector (synchronous) or its replay buffer;
            StopIteration if they end before the last step.
        before: called before each step with the step's number, to evaluate; returning False ends the loop.
        after: called after each step with the number of completed steps, to save; returning False ends the loop.
    """
    for step in range(first_step, num_steps):
        if not before(step):
            return step
        batch = next(batches)
        update = learner.update(batch)
        collector.update_policy_weights_(version=learner.version)  # to the engines; then new prompts are drawn
        log.write(step, batch, update, collector.metrics())
        if not after(step + 1):
            return step + 1
    return max(first_step, num_steps)
