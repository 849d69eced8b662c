"""Calling a user's reward function as verl or TRL would, and reading what it returns."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sota_grpo.rewards.function_file import VERL, RewardFunction, line_in
from sota_grpo.rl.task import LARGEST, graders_error

_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")  # as in TRL
_MAX_INT_BITS = 1023  # Python refuses to write integers of thousands of digits
_LOOP: list[Any] = []  # the event loop of all coroutines and its thread, once there are any
_LOOP_LOCK = threading.Lock()  # graders may be called from several threads, and share the loop


@dataclass(frozen=True)
class Asked:
    """One response and all that a reward function may read beside it.

    Args:
        response: the model's text.
        prompt: plain text, or the chat as a list of turns.
        ground_truth: as it stands in the data: text, number, list or dict.
        columns: all other columns of the row, by name.
        data_source: where the row is from.
    """

    response: str
    prompt: str | Sequence[Mapping[str, Any]]
    ground_truth: Any
    columns: Mapping[str, Any]
    data_source: str


@dataclass(frozen=True)
class Found:
    """What a function gave for one response: a value (None: it does not apply), what stood beside it, or an error."""

    value: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def call_function(function: RewardFunction, path: str, group: Sequence[Asked]) -> list[Found]:
    """What ``function`` of the file ``path`` gives for each response of ``group``.

    A function of verl's form is called once per response, one of TRL's form once. Coroutines run at the same time, on
    one event loop that stays, in a thread of its own: what a file keeps between calls (a session, a semaphore) belongs
    to that loop, and the caller may be in a loop itself, as every cell of a notebook is.

    Raises:
        Exception: what a function of TRL's form raised, if there are several responses: one of them may be to blame.
    """
    if function.form == VERL:
        results = _results(function, [_verl_keywords(one) for one in group])
        return [_read_one(function, path, result) for result in results]
    info: list[dict[str, Any]] = [{} for _ in group]
    (result,) = _results(function, [_trl_keywords(group, info)])
    if isinstance(result, Exception):
        if len(group) > 1:
            raise result
        return [Found(error=_reason(path, result))]
    return _read_list(function, path, result, info)


def _verl_keywords(asked: Asked) -> dict[str, Any]:
    others = asked.columns
    return {
        "data_source": asked.data_source,
        "solution_str": asked.response,
        "ground_truth": asked.ground_truth,
        "extra_info": others["extra_info"] if "extra_info" in others else dict(others),
    }


def _trl_keywords(group: Sequence[Asked], info: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """TRL's keywords: every column as a list, chats and completions alike as lists of turns, or both as text."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        for one, value in zip(info, values, strict=True):
            one[column] = plain(value)

    def log_metric(name: str, value: Any) -> None:
        for one in info:
            one[name] = plain(value)

    rows = [{"ground_truth": one.ground_truth, **one.columns} for one in group]
    names = {name: None for row in rows for name in row if name not in _NOT_COLUMNS}  # in the order of the file
    return {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": [one.prompt if isinstance(one.prompt, str) else list(one.prompt) for one in group],
        "completions": [_completion(one) for one in group],
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def _completion(asked: Asked) -> str | list[dict[str, str]]:
    return asked.response if isinstance(asked.prompt, str) else [{"role": "assistant", "content": asked.response}]


def _results(function: RewardFunction, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The result of every call, or the exception that it raised."""
    results = [_attempt(function, keywords) for keywords in calls]
    waiting = {index: result for index, result in enumerate(results) if inspect.isawaitable(result)}
    if waiting:
        for index, result in zip(waiting, _await_all(list(waiting.values())), strict=True):
            results[index] = result
    return results


def _attempt(function: RewardFunction, keywords: Mapping[str, Any]) -> Any:
    try:
        return function.call(**function.accepted(keywords))
    except BaseException as error:  # model text may make a user's function do anything
        return error if isinstance(error, Exception) else RuntimeError(graders_error(error))


def _await_all(waiting: Sequence[Awaitable[Any]]) -> list[Any]:
    """The result of each, or the exception that it raised."""
    import asyncio  # only here, because it would double the time in which a grader's process starts

    async def result_of(one: Awaitable[Any]) -> Any:
        try:
            return await one
        except BaseException as error:  # SystemExit would end the loop for all
            return error if isinstance(error, Exception) else RuntimeError(graders_error(error))

    async def gather() -> list[Any]:
        return await asyncio.gather(*map(result_of, waiting))

    with _LOOP_LOCK:
        if not (_LOOP and _LOOP[1].is_alive()):  # a forked process has the loop, and no thread that runs it
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True)
            thread.start()
            _LOOP[:] = loop, thread
    return asyncio.run_coroutine_threadsafe(gather(), _LOOP[0]).result()


def _read_one(function: RewardFunction, path: str, result: Any) -> Found:
    if isinstance(result, Exception):
        return Found(error=_reason(path, result))
    if not isinstance(result, Mapping):
        return _read_number(function, result, {})
    if "score" not in result:
        return Found(error=f"KeyError: {function.name} returned a dict without 'score': it has {list(result)}")
    info = {str(name): plain(value) for name, value in result.items() if name != "score"}
    return _read_number(function, result["score"], info)


def _read_list(function: RewardFunction, path: str, result: Any, info: Sequence[Mapping[str, Any]]) -> list[Found]:
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        error = f"TypeError: {function.name} returned {type(result).__name__}, not a list of one reward per completion"
        return [Found(error=error)] * len(info)
    try:
        values = list(result)
    except BaseException as stopped:  # a generator runs only now
        error = _reason(path, stopped) if isinstance(stopped, Exception) else graders_error(stopped)
        return [Found(error=error)] * len(info)
    if len(values) != len(info):
        error = f"ValueError: {function.name} returned {len(values)} rewards for {len(info)} completions"
        return [Found(error=error)] * len(info)
    return [
        Found(info=beside) if value is None else _read_number(function, value, beside)
        for value, beside in zip(values, info, strict=True)
    ]


def _read_number(function: RewardFunction, value: Any, info: Mapping[str, Any]) -> Found:
    """A number of Python, NumPy or torch; text that looks like one is a mistake."""
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # whatever float() makes of a foreign type
        number = None
    if number is None:
        return Found(error=f"TypeError: {function.name} returned {type(value).__name__}, not a number")
    if not abs(number) <= LARGEST:
        return Found(error=f"ValueError: {function.name} returned {number}, which is not finite in float32")
    return Found(number, info)


def _reason(path: str, error: Exception) -> str:
    line = line_in(path, error)
    return f"{type(error).__name__}: {error}" + ("" if line is None else f" ({path}, line {line})")


def plain(value: Any) -> Any:
    """``value`` as JSON has it: arrays become lists, numbers that are not finite or huge None, the rest text.

    >>> import numpy
    >>> plain({"acc": numpy.float32(0.5), "spans": (numpy.arange(2), float("nan"))})
    {'acc': 0.5, 'spans': [[0, 1], None]}
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= _MAX_INT_BITS else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)
