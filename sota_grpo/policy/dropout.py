"""The dropouts of a policy; transformers' own are silenced at load, those of adapters are the user's wish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def dropouts(module: nn.Module) -> list[nn.Dropout]:
    """The dropouts that drop.

    >>> len(dropouts(nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.1))))
    1
    """
    return [child for child in module.modules() if isinstance(child, nn.Dropout) and child.p > 0]


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Every dropout of ``module`` is the identity inside.

    >>> module = nn.Dropout(0.5)
    >>> with without_dropout(module):
    ...     module.p
    0.0
    >>> module.p
    0.5
    """
    rates = [(child, child.p) for child in dropouts(module)]
    for child, _ in rates:
        child.p = 0.0
    try:
        yield
    finally:
        for child, rate in rates:
            child.p = rate
