"""Build tool instances from the user's code: typed functions as tools, or an environment in TRL's protocol.

The code is a Python file of the user, or a pickle of Python objects; model output is only used as the name of a tool
and its arguments. Importing this module does not import torch.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import load_python
from sota_grpo.rewards.functions import PICKLED
from sota_grpo.rl.tool_schemas import function_schemas
from sota_grpo.tasks.servers import content_text, is_block
from sota_grpo.text import sentence
from sota_grpo.workers.instances import InstanceSpec

_NO_TOOLS = ("reset", "get_reward")  # methods that the trainer calls


class ToolboxError(UserError, ValueError):
    """A file of tools or of an environment cannot be used; the message says why and what to change."""


def load(spec: InstanceSpec) -> Callable[[], Any]:
    """Execute or unpickle the file of ``spec``, or import its adapter; return a function that makes one instance.

    ToolboxError if the file or a name cannot be used, or if ``spec`` is a factory without exactly one name.
    """
    if ":" in spec.kind:
        module, _, function = spec.kind.partition(":")
        return partial(getattr(import_module(module), function), **spec.options)
    path = Path(spec.path).expanduser()
    wanted, form = ("functions", "NAME,NAME") if spec.kind == "functions" else ("one class or function", "NAME")
    if (not spec.names and path.suffix != PICKLED) or (len(spec.names) > 1 and spec.kind != "functions"):
        raise ToolboxError(f"{spec} does not name {wanted}; write {spec.path}:{form}.")
    if path.suffix != PICKLED:
        members: Mapping[str, Any] = load_python(path, "the path", ToolboxError)
    else:
        try:
            members = pickle.loads(path.read_bytes())
        except Exception as error:
            raise ToolboxError(
                f"{path}, with the tools or the environment that were passed in Python, cannot be loaded "
                f"({sentence(error).rstrip('.')}); give them as FILE.py:NAME instead."
            ) from error
    callables = [_member(members, name, spec) for name in spec.names or members]
    if spec.kind == "functions":
        return partial(Toolbox, callables)
    (factory,) = callables
    return lambda: Environment(factory())


def _member(members: Mapping[str, Any], name: str, spec: InstanceSpec) -> Callable[..., Any]:
    member = members.get(name)
    if not callable(member):
        is_one = inspect.isfunction if spec.kind == "functions" else callable
        home = members.get("__name__")  # to leave out what the file imports
        names = [
            other
            for other, value in members.items()
            if not other.startswith("_") and is_one(value) and getattr(value, "__module__", None) in (home, "__main__")
        ]
        what = "function" if spec.kind == "functions" else "class or function"
        raise ToolboxError(
            f"{spec.path} has no {what} {name!r}; it has {', '.join(names) or 'none'}: correct the name."
        )
    return member


class Toolbox:
    """Functions, plain or ``async``, with type hints and Google-style docstrings as tools, without state."""

    def __init__(self, tools: Sequence[Callable[..., Any]]) -> None:
        self._tools = {getattr(tool, "__name__", repr(tool)): tool for tool in tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools, for chat templates; UserError if a docstring or a type hint is missing."""
        return function_schemas([*self._tools.values()])

    def reset(self, **row: Any) -> Any:
        """No-op: functions have no state."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a tool and return its result: an awaitable for an ``async`` tool, text for a list of content blocks.

        LookupError for an unknown name; exceptions of the tool propagate.
        """
        if name not in self._tools:
            raise LookupError(f"there is no tool {name!r}; the tools are {', '.join(self._tools) or 'none'}")
        return _as_text(self._tools[name](**arguments))


class Environment(Toolbox):
    """Wraps an environment in TRL's protocol: its public methods except ``reset`` and ``get_reward`` are the tools.

    ToolboxError if it has no method ``reset``.
    """

    def __init__(self, environment: Any) -> None:
        methods = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
        if "reset" not in methods:
            raise ToolboxError(
                f"the environment {type(environment).__name__} has no method reset; define reset(self, **row), which "
                "gets the columns of a row."
            )
        super().__init__(
            [getattr(environment, name) for name in methods if not name.startswith("_") and name not in _NO_TOOLS]
        )
        self._environment, self._reset = environment, environment.reset
        if "get_reward" in methods:
            self.get_reward = environment.get_reward

    def attributes(self) -> dict[str, Any]:
        """Return the environment's public instance attributes and properties by name, without properties that raise."""
        kind = type(self._environment)
        members = getattr(self._environment, "__dict__", {})
        names = {**members, **dict(inspect.getmembers(kind, lambda one: isinstance(one, property)))}
        readable = {}
        for name in filter(lambda name: not name.startswith("_"), names):
            with suppress(Exception):  # a property may raise
                readable[name] = getattr(self._environment, name)
        return readable

    def reset(self, **row: Any) -> Any:
        """Call the environment's ``reset`` with the columns that it takes (``**row``: all columns); return its result.

        ToolboxError if a required parameter is not a column. Exceptions of ``reset`` propagate.
        """
        parameters = inspect.signature(self._reset).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        missing = [p.name for p in named if p.default is p.empty and p.name not in row]
        if missing:
            columns = ", ".join(map(str, row)) or "none"
            raise ToolboxError(
                f"reset has the parameters {', '.join(missing)}, which are not columns of the row ({columns}); rename "
                "a column, or give the parameter a default value."
            )
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            row = {p.name: row[p.name] for p in named if p.name in row}
        return _as_text(self._reset(**row))


def _as_text(value: Any) -> Any:
    """Return the value, or a coroutine for an awaitable; a list of content blocks becomes text."""
    if inspect.isawaitable(value):
        return _later(value)
    return content_text(value) if isinstance(value, list) and value and all(map(is_block, value)) else value


async def _later(value: Any) -> Any:
    return _as_text(await value)
