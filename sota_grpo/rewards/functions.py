"""Load a user's reward functions from a file, recognise their signature (verl's or TRL's), and call them.

Functions can also be passed as Python objects. They are pickled for a grader's process: a function of an importable
module by its name, a function of a notebook or script as code, with the globals that it reads.
"""

from __future__ import annotations

import copy
import dis
import functools
import hashlib
import inspect
import json
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import CellType, CodeType
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import error_line, load_python
from sota_grpo.rewards.grading import graders_error
from sota_grpo.rl.records import LARGEST
from sota_grpo.text import sentence

DEFAULT_NAME = "compute_score"  # verl's

VERL, TRL = "verl", "trl"
PICKLED = ".pkl"  # ending of a file of pickled functions
PASSED = "(passed in Python)"  # the path of Python inputs, until the run has a directory
_VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_PARAMETERS = ("prompts", "completions", "completion_ids", "environments", "log_extra", "log_metric")

Functions = Mapping[str, Callable[..., Any]]

NEEDS_ENVIRONMENTS = "needs environments, which exist only with env.environment=FILE.py:FACTORY"
_NOT_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids")  # as in TRL
_LOOP: list[Any] = []  # the event loop of all coroutines, and the process that made it
_LOOP_LOCK = threading.Lock()  # graders may be called from several threads, and take turns to run the loop


class RewardFunctionError(UserError, ValueError):
    """A reward file or reward function cannot be used; the message names it and says what to change."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and its signature; ``name`` is also the name of its reward term."""

    name: str
    form: str  # verl: called with one response, solution_str; trl: with a list of responses, completions
    call: Callable[..., Any]  # plain or async
    required: tuple[str, ...]  # names of the parameters without a default
    taken: frozenset[str] | None  # names of all parameters; None if the function accepts any (**kwargs)


def load_functions(path: str, names: Sequence[str]) -> list[RewardFunction]:
    """Run a Python file and return its functions ``names``; RewardFunctionError if it or one of them cannot be used.

    If ``names`` is only ``compute_score``, which the file lacks, the file's only public function is returned.
    """
    members = load_python(Path(path), "reward.path", RewardFunctionError)
    defined = [
        name
        for name, value in members.items()
        if inspect.isfunction(value) and value.__module__ == members["__name__"] and not name.startswith("_")
    ]
    if list(names) == [DEFAULT_NAME] and len(defined) == 1 and not callable(members.get(DEFAULT_NAME)):
        names = defined
    for name in names:
        if not callable(members.get(name)):
            raise RewardFunctionError(no_function(path, name, defined))
    return [recognise(members[name], name, path) for name in names]


def no_function(path: str, name: str, names: Iterable[str]) -> str:
    """Return the error message for the file ``path``, which has the functions ``names`` but not ``name``."""
    return f"{path} has no function {name!r}; its functions are {', '.join(names) or 'none'}: correct reward.name."


def recognise(call: Callable[..., Any], name: str, location: str) -> RewardFunction:
    """Wrap a callable as a reward function, of verl's or TRL's form according to its parameter names.

    ``name`` is that of the reward term; ``location`` is the callable's, for messages. RewardFunctionError: the
    parameters are neither verl's nor TRL's, or graders do not pass a required one, such as TRL's ``trainer_state``.

    >>> recognise(lambda solution_str, ground_truth: 1.0, "right", "demo").form
    'verl'
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # some written in C have none
        parameters = ()  # type: ignore[assignment]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    keywords = {p.name for p in named if p.kind is not p.POSITIONAL_ONLY}
    required = tuple(p.name for p in named if p.default is p.empty)
    taken = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else frozenset(p.name for p in named)
    written = f"{location}: {name}({', '.join(map(str, parameters))})"
    if "solution_str" in keywords:
        form, reason = VERL, "verl's form (data_source, solution_str, ground_truth, extra_info) lacks"
        missing = [name for name in required if name not in _VERL_PARAMETERS]
    else:  # the columns that a TRL function reads are checked later, with the dataset
        form, reason = TRL, "a grader, which reads only responses, does not have"
        missing = [name for name in required if name in ("prompt_ids", "trainer_state")]
    if missing:
        cure = f"give {'it' if len(missing) == 1 else 'each'} a default value."
        raise RewardFunctionError(f"{written} needs {', '.join(missing)}, which {reason}; {cure}")
    if form == TRL and not keywords & {"completions", "completion_ids", "prompts", "environments"}:
        raise RewardFunctionError(
            f"{written} is neither verl's compute_score(data_source, solution_str, ground_truth, extra_info=None) nor "
            "TRL's function(prompts, completions, **columns); name its parameters like one of these."
        )
    return RewardFunction(name, form, call, required, taken)


@dataclass(frozen=True)
class RewardInputs:
    """One response with its prompt, its dataset row and its dialog: all that a reward function can read."""

    response: str
    prompt: str | Sequence[Mapping[str, Any]]  # plain text, or a chat as a list of messages
    ground_truth: Any  # value of the dataset: text, number, list or dict
    columns: Mapping[str, Any]  # all other columns of the dataset row, by name
    data_source: str
    completion_ids: Sequence[int] | None = None  # None if no engine sampled the response
    #: With tools, the dialog's messages after the prompt; of an agent, those of its last request and the reply.
    turns: Sequence[Mapping[str, Any]] | None = None
    environment: Mapping[str, Any] | None = None  # attributes of the dialog's environment at its end, by name


class EnvironmentState:
    """An object with copies of an environment's JSON-serializable attributes at the end of its dialog.

    >>> state = EnvironmentState({"reward": 0.5})
    >>> state.reward
    0.5
    >>> state.board
    Traceback (most recent call last):
    ...
    AttributeError: the environment had no JSON-serializable attribute 'board'; it had: reward
    """

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy(dict(attributes)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of Python's protocols
            raise AttributeError(name)
        known = ", ".join(vars(self)) or "none"
        raise AttributeError(f"the environment had no JSON-serializable attribute {name!r}; it had: {known}")


@dataclass(frozen=True)
class RewardOutput:
    """The result of a reward function for one response: ``value`` (None: not applicable) and ``info``, or ``error``."""

    value: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


def call_function(function: RewardFunction, path: str, group: Sequence[RewardInputs]) -> list[RewardOutput]:
    """Call ``function`` of the file ``path`` on the responses of one group; return one output per response.

    A verl function is called once per response, a TRL function once for the group, both on the caller's thread.
    Coroutines run concurrently on one persistent event loop of the process, to which a file may bind sessions and
    semaphores; if the caller's thread already runs an event loop, as in a notebook, on another thread.

    An exception or an unusable result becomes the ``error`` of an output. But the exception of a TRL function called
    for several responses propagates, for a retry one by one, and so does the user's Ctrl-C.
    """
    if function.form == VERL:
        calls = [
            (one.data_source, one.response, one.ground_truth, one.columns.get("extra_info", dict(one.columns)))
            for one in group
        ]
        results = _results(function, [dict(zip(_VERL_PARAMETERS, call, strict=True)) for call in calls])
        return [_read(function, path, result) for result in results]

    def failed(fault: str) -> list[RewardOutput]:
        return [RewardOutput(error=fault)] * len(group)

    if "completion_ids" in function.required and any(one.completion_ids is None for one in group):
        return failed(
            f"TypeError: {function.name} needs completion_ids, which only a response sampled by an engine has"
        )
    if "environments" in function.required and any(one.environment is None for one in group):
        return failed(f"TypeError: {function.name} {NEEDS_ENVIRONMENTS}")
    info: list[dict[str, Any]] = [{} for _ in group]
    (result,) = _results(function, [_trl_keywords(group, info)])
    if isinstance(result, Exception):
        if len(group) > 1:
            raise result
        return [_read(function, path, result)]
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        kind = type(result).__name__
        return failed(f"TypeError: {function.name} returned {kind}, not a list of one reward per completion")
    try:
        values = list(result)
    except BaseException as error:  # a generator runs only now
        return [_read(function, path, _as_exception(error))] * len(group)
    if len(values) != len(group):
        return failed(f"ValueError: {function.name} returned {len(values)} rewards for {len(group)} completions")
    return [
        RewardOutput(info=row_info) if value is None else _read_number(function, value, row_info)
        for value, row_info in zip(values, info, strict=True)
    ]


def _trl_keywords(group: Sequence[RewardInputs], info: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the keyword arguments of a TRL function; completions are messages for a chat prompt, else text."""

    def log_extra(column: str, values: Sequence[Any]) -> None:
        for one, value in zip(info, values, strict=True):
            one[column] = plain(value)

    def log_metric(name: str, value: Any) -> None:
        log_extra(name, [value] * len(info))

    def completion(row: RewardInputs) -> str | list[Mapping[str, Any]]:
        if row.turns is not None:
            return copy.deepcopy([*row.turns])
        return row.response if isinstance(row.prompt, str) else [{"role": "assistant", "content": row.response}]

    ids = [list(one.completion_ids) for one in group if one.completion_ids is not None]
    states = [EnvironmentState(one.environment) for one in group if one.environment is not None]
    rows = [{"ground_truth": one.ground_truth, **one.columns} for one in group]
    names = {name: None for row in rows for name in row if name not in _NOT_COLUMNS}  # in the order of the file
    return {name: [row.get(name) for row in rows] for name in names} | {
        "prompts": [one.prompt if isinstance(one.prompt, str) else list(one.prompt) for one in group],
        "completions": [completion(one) for one in group],
        **({"completion_ids": ids} if len(ids) == len(group) else {}),
        **({"environments": states} if len(states) == len(group) else {}),
        "log_extra": log_extra,
        "log_metric": log_metric,
    }


def _results(function: RewardFunction, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the result or exception of each call; keywords that the function does not accept are left out."""
    results: list[Any] = []
    for keywords in calls:
        names = keywords if function.taken is None else function.taken
        taken = {name: value for name, value in keywords.items() if name in names}
        try:
            results.append(function.call(**taken))
        except BaseException as error:  # model text may make a user's function do anything
            results.append(_as_exception(error))
    if not any(map(inspect.isawaitable, results)):
        return results
    import asyncio  # only here, because it would double the time in which a grader's process starts

    async def awaited(result: Any) -> Any:
        try:
            return await result if inspect.isawaitable(result) else result
        except BaseException as error:  # SystemExit would end the loop for all
            return _as_exception(error)

    async def all_awaited() -> list[Any]:
        return await asyncio.gather(*map(awaited, results))

    with _LOOP_LOCK:
        if not _LOOP or _LOOP[1] != os.getpid():  # a forked process shares the selector of its parent's loop
            _LOOP[:] = asyncio.new_event_loop(), os.getpid()
        if asyncio._get_running_loop() is None:  # on the caller's thread: on the main thread, signals can be used
            return _LOOP[0].run_until_complete(all_awaited())  # type: ignore[no-any-return]
        with ThreadPoolExecutor(1) as other:
            return other.submit(lambda: _LOOP[0].run_until_complete(all_awaited())).result()


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(graders_error(error))


def _read(function: RewardFunction, path: str, result: Any) -> RewardOutput:
    """Return the output for an exception or a verl result: a number, or a dict with ``score`` and further info."""
    if isinstance(result, Exception):
        line = error_line(path, result)
        location = "" if line is None else f" ({path}, line {line})"
        return RewardOutput(error=f"{type(result).__name__}: {result}{location}")
    if not isinstance(result, Mapping):
        return _read_number(function, result, {})
    if "score" not in result:
        return RewardOutput(error=f"KeyError: {function.name} returned a dict without 'score': it has {list(result)}")
    info = {str(name): plain(value) for name, value in result.items() if name != "score"}
    return _read_number(function, result["score"], info)


def _read_number(function: RewardFunction, value: Any, info: Mapping[str, Any]) -> RewardOutput:
    """Return the output for a number of Python, NumPy or torch; a text such as "1" is an error."""
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # of a foreign type
        number = None
    if number is None:
        return RewardOutput(error=f"TypeError: {function.name} returned {type(value).__name__}, not a number")
    if not abs(number) <= LARGEST:
        return RewardOutput(error=f"ValueError: {function.name} returned {number}, which is not finite in float32")
    return RewardOutput(number, info)


def plain(value: Any) -> Any:
    """Return ``value`` as JSON types: arrays become lists, infinite, NaN and huge numbers None, other objects text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return value if value.bit_length() < 1024 else None  # Python writes no longer ones
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def pickled(
    functions: Functions,
    kind: str = "reward function",
    cure: str = "create such objects inside the function, or set env.reward_workers=0 to grade in this process",
) -> bytes:
    """Return the pickled functions, for a file that :func:`unpickled` reads; RewardFunctionError if one is unpicklable.

    ``kind`` (of the functions) and ``cure`` are words of the error message.
    """
    import cloudpickle

    for name, function in functions.items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # of the objects that it holds
            raise RewardFunctionError(
                f"the {kind} {name} cannot be sent to another process ({sentence(error).rstrip('.')}); {cure}."
            ) from error
    return cloudpickle.dumps(dict(functions))


def unpickled(path: Path) -> dict[str, Callable[..., Any]]:
    """Return {name: function} from a file of :func:`pickled`, executing its code; RewardFunctionError if that fails."""
    if not path.is_file():
        raise RewardFunctionError(
            f"the reward functions of the run are not in {path}: with env.reward_workers=0 those that cannot be "
            "pickled are not saved; pass the same functions again, or put them into a file and set reward.path to it."
        )
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # unpickling imports modules and calls code
        raise RewardFunctionError(
            f"{path}: the reward functions cannot be loaded here ({sentence(error).rstrip('.')}); make the modules "
            "that they use importable, or pass the functions again."
        ) from error


def fingerprint(functions: Functions) -> str:
    """Return a SHA-256 digest of functions: names, bytecode, constants, defaults, global and closure values.

    It is equal in every process of one Python version, and independent of comments and line numbers. Plain values,
    containers, tensors, and functions, classes and their instances of the same module count by content, other objects
    by name or type.
    """
    described = []
    for name, function in functions.items():
        written = function
        while isinstance(written, functools.partial):
            written = written.func
        home = getattr(written, "__module__", None) or type(written).__module__
        described.append([name, _describe(function, home, {})])
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _describe(value: Any, home: str, seen: dict[int, Any]) -> Any:
    """Return an object as JSON, code outside the module ``home`` as its name; ``seen`` by id, which may be reused."""
    parts: list[Any]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, complex)) or value is Ellipsis:
        return repr(value)
    if not isinstance(value, (tuple, frozenset, CodeType)):  # others may contain themselves
        if id(value) in seen:
            return "seen"
        seen[id(value)] = value
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(json.dumps(_describe(item, home, seen)) for item in value)]
    if isinstance(value, Mapping):
        return ["map", *([_describe(key, home, seen), _describe(item, home, seen)] for key, item in value.items())]
    named = value if hasattr(value, "__qualname__") else type(value)
    module = getattr(named, "__module__", None)  # a method of a type written in C has none
    name = f"{module}.{named.__qualname__}"
    if isinstance(value, (tuple, list)):
        parts = ["tuple" if isinstance(value, tuple) else "list", *value]
    elif isinstance(value, CodeType):
        parts = [value.co_code.hex(), value.co_consts, value.co_names]
    elif isinstance(value, functools.partial):
        parts = ["partial", value.func, value.args, value.keywords]
    elif inspect.ismethod(value):
        parts = ["method", value.__func__, value.__self__]
    elif type(value).__module__ == "torch" and hasattr(value, "tolist"):  # a tensor
        parts = ["tensor", str(value.tolist())]
    elif module != home or not (inspect.isfunction(named) or inspect.isclass(named)):
        return name
    elif inspect.isfunction(named):
        code, around = named.__code__, named.__globals__
        reads = {name: around[name] for name in sorted(_globals_read(code)) if name in around}
        cells = named.__closure__ or ()
        closed = ["empty" if cell == CellType() else cell.cell_contents for cell in cells]  # no value yet
        parts = ["function", code, named.__defaults__, named.__kwdefaults__, closed, reads]
    else:
        state = dict(vars(value)) if named is not value and hasattr(value, "__dict__") else {}
        # methods, properties by their getter, and other members, without those of every class
        members = {name: getattr(item, "__func__", getattr(item, "fget", item)) for name, item in vars(named).items()}
        shown = {name: item for name, item in members.items() if inspect.isfunction(item) or not name.startswith("__")}
        parts = [name, shown, named.__bases__, state]
    return [_describe(part, home, seen) for part in parts]


def _globals_read(code: CodeType) -> set[str]:
    """Return the globals that ``code`` and the functions inside it read."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    return names.union(*(_globals_read(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
