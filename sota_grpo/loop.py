"""The training loop of docs/algorithm.md, the same for every mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def run(
    batches: Iterator[Any],
    learner: Any,
    collector: Any,
    log: Any,
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
        learner: has ``update(batch)``, which returns the step's metrics, and the ``version`` of its weights.
        collector: has ``update_policy_weights_(version=...)``, and ``metrics()`` of the last batch.
        log: has ``write(step, batch, metrics of the update, metrics of the batch)``.
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
