"""Futures that follow from futures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

Result = TypeVar("Result")


def promised() -> Future[Any]:
    """A future that whoever made it will resolve; its reader cannot cancel it."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def resolve(future: Future[Result], compute: Callable[[], Result]) -> None:
    """Give ``future`` what ``compute()`` returns or raises.

    >>> future = promised()
    >>> resolve(future, lambda: 1 / 0)
    >>> type(future.exception()).__name__
    'ZeroDivisionError'
    """
    try:
        result = compute()
    except BaseException as error:  # it belongs to whoever reads the future
        future.set_exception(error)
    else:
        future.set_result(result)


def gathered(futures: Sequence[Future[Result]]) -> Future[list[Result]]:
    """All results in order, once the last future is done; the first failure in that order instead, if there is one.

    >>> parts = [promised(), promised()]
    >>> both = gathered(parts)
    >>> parts[1].set_result("b"), both.done()
    (None, False)
    >>> parts[0].set_result("a")
    >>> both.result()
    ['a', 'b']
    """
    both, lock, left = promised(), threading.Lock(), len(futures)

    def one_is_done(_: Future[Result]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            resolve(both, lambda: [future.result() for future in futures])

    for future in futures:
        future.add_done_callback(one_is_done)
    return both
