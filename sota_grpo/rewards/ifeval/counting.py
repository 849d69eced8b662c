"""Comparing a count with its threshold, and counting no further than that needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice


def _tolerance(threshold: int) -> int:
    return max(round(threshold / 10), 1)


RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "less than": lambda count, threshold: count < threshold,
    "at least": lambda count, threshold: count >= threshold,
    # the benchmark has the two above; training data ask for these, too
    "at most": lambda count, threshold: count <= threshold,
    "exactly": lambda count, threshold: count == threshold,
    "around": lambda count, threshold: abs(count - threshold) <= _tolerance(threshold),
}


def compare(count: int, relation: str, threshold: int) -> bool:
    """Whether ``count`` stands in ``relation`` to ``threshold``; ``around`` is a tenth to either side, at least 1.

    >>> compare(3, "at least", 3), compare(3, "less than", 3), compare(33, "around", 30), compare(34, "around", 30)
    (True, False, True, False)
    """
    return RELATIONS[relation](count, threshold)


def compare_number_of(items: Iterable[object], relation: str, threshold: int) -> bool:
    """The same for the number of ``items``, of which no more are asked for than decide it.

    >>> compare_number_of(iter("abc"), "exactly", 3), compare_number_of(iter(int, 1), "at most", 5)
    (True, False)
    """
    enough = threshold + _tolerance(threshold) + 1  # of so many or more, every relation says the same
    return compare(sum(1 for _ in islice(items, enough)), relation, threshold)
