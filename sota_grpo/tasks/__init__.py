"""Tasks by name, imported only when asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sota_grpo.tasks.base import Task


def _gsm8k(**kwargs: Any) -> Task:
    from sota_grpo.tasks.gsm8k import GSM8KTask

    return GSM8KTask.load(**kwargs)


def _arithmetic(**kwargs: Any) -> Task:
    from sota_grpo.tasks.arithmetic import ArithmeticTask

    return ArithmeticTask(**kwargs)


_MAKERS: dict[str, Callable[..., Task]] = {"arithmetic": _arithmetic, "gsm8k": _gsm8k}
TASKS = tuple(_MAKERS)


def make_task(name: str, **kwargs: Any) -> Task:
    """Build a task: ``gsm8k`` (:meth:`GSM8KTask.load`) or ``arithmetic`` (:class:`ArithmeticTask`), with its keywords.

    Raises:
        ValueError: an unknown name.
        TypeError: a keyword that the task does not take.

    >>> make_task("arithmetic", num_train=4, num_heldout=4).name
    'arithmetic'
    """
    if name not in _MAKERS:
        raise ValueError(f"task {name!r} is not one of {', '.join(TASKS)}.")
    return _MAKERS[name](**kwargs)
