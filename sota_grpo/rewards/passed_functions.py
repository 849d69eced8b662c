"""Reward functions that are passed as objects, not named in a file: how they travel, and what they are known by.

Graders are processes that do not share the caller's memory. A function of an importable module travels by its name; one
of a notebook or a script travels as its code, with the globals that it reads.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from sota_grpo.rewards.function_file import RewardFunctionError

Functions = Mapping[str, Callable[..., Any]]
PICKLED = ".pkl"  # ending of a file of them


def pickled(functions: Functions) -> bytes:
    """The functions as they are written to a file; :func:`unpickled` is its other end.

    Raises:
        RewardFunctionError: one holds what cannot leave this process; the message names it and why.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "reward.pkl"
    >>> size = path.write_bytes(pickled({"brevity": lambda solution_str: 1 / len(solution_str)}))
    >>> unpickled(path)["brevity"]("four")
    0.25
    """
    import cloudpickle

    for name, function in functions.items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # whatever the objects that it holds raise
            reason = next(iter(str(error).splitlines()), "no message")
            raise RewardFunctionError(
                f"the reward function {name} cannot be sent to the processes that grade ({type(error).__name__}: "
                f"{reason}); make what it needs inside the function, or grade in this process: env.reward_workers=0."
            ) from error
    return cloudpickle.dumps(dict(functions))


def unpickled(path: Path) -> dict[str, Callable[..., Any]]:
    """The functions of a file that :func:`pickled` filled. Like a reward file, it is code: read it only if it is yours.

    Raises:
        RewardFunctionError: no such file, or what the functions need is not here.
    """
    if not path.is_file():
        raise RewardFunctionError(
            f"there are no reward functions in {path}: they were passed in Python and stayed in that process "
            "(env.reward_workers=0); pass them again, or give a file with reward.path."
        )
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # unpickling imports and calls whatever the functions are made of
        raise RewardFunctionError(
            f"{path}: the reward functions cannot be loaded here ({type(error).__name__}: {error}); they need the "
            "modules that they were defined with."
        ) from error


def fingerprint(functions: Functions) -> str:
    """A digest of what the functions do: names, code, constants, defaults, and what they read around them.

    Equal in every process and under every session of a notebook, as long as the Python version is the same. Of what is
    read, plain values, containers of them, and functions and classes of the same module count by what they are, all
    else by the name of its type. Comments and the place of the code do not count.

    >>> first, again = [eval("lambda solution_str: len(solution_str) > 3  # a note" + note) for note in ("", " more")]
    >>> fingerprint({"f": first}) == fingerprint({"f": again})
    True
    >>> fingerprint({"f": first}) == fingerprint({"f": lambda solution_str: len(solution_str) > 4})
    False
    """
    described = [[name, _Describer(_home(function)).of(function)] for name, function in functions.items()]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _home(function: Any) -> str:
    """The module that a function, or an object that is called like one, was written in."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


class _Describer:
    """Turns objects into what JSON holds; code outside the module ``home`` is described by its name alone."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._seen: dict[int, Any] = {}  # the objects too: an id means nothing once its object is gone

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (bytes, complex)) or value is Ellipsis:
            return repr(value)
        if isinstance(value, tuple):
            return ["tuple", *map(self.of, value)]
        if isinstance(value, frozenset):
            return ["set", *sorted(json.dumps(self.of(item)) for item in value)]
        if isinstance(value, CodeType):
            return [value.co_code.hex(), self.of(value.co_consts), self.of(value.co_names)]
        return self._once(value)

    def _once(self, value: Any) -> Any:
        """What may hold itself is described where it comes up first."""
        if id(value) in self._seen:
            return "seen"
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            return ["map", *([self.of(key), self.of(item)] for key, item in value.items())]
        if isinstance(value, list):
            return ["list", *map(self.of, value)]
        if isinstance(value, set):
            return self.of(frozenset(value))
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if inspect.ismethod(value):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        return self._named(value)

    def _named(self, value: Any) -> Any:
        """A function, a class, or an instance of one: what it is if it belongs to the home module, else its name."""
        named = value if hasattr(value, "__qualname__") else type(value)
        name = f"{named.__module__}.{named.__qualname__}"
        if named.__module__ != self._home or not (inspect.isfunction(named) or inspect.isclass(named)):
            return name
        if inspect.isfunction(named):
            return ["function", *self._function(named)]
        state = dict(vars(value)) if named is not value and hasattr(value, "__dict__") else {}
        return [name, self.of(_members(named)), self.of(named.__bases__), self.of(state)]

    def _function(self, function: Any) -> list[Any]:
        """Code, defaults, and the values of the closure and of the globals that the code reads."""
        code, around = function.__code__, function.__globals__
        reads = {name: around[name] for name in sorted(_globals_read(code)) if name in around}
        closed = [_content(cell) for cell in function.__closure__ or ()]
        return [self.of(part) for part in (code, function.__defaults__, function.__kwdefaults__, closed, reads)]


def _members(kind: type) -> dict[str, Any]:
    """Methods, properties by their getter, and what else a class holds, but for what Python writes into every one."""
    found = {name: getattr(item, "__func__", getattr(item, "fget", item)) for name, item in vars(kind).items()}
    return {name: item for name, item in found.items() if inspect.isfunction(item) or not name.startswith("__")}


def _globals_read(code: CodeType) -> set[str]:
    """Names of globals in ``code`` and in the functions and comprehensions inside it."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals_read(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return "empty"
