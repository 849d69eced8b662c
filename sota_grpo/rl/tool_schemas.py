"""Tools as JSON schemas, a policy's calls of them, and the check of their arguments.

Only :func:`function_schemas` imports torch and transformers.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from sota_grpo.errors import UserError
from sota_grpo.text import first_line, one_line

MAX_NAME = 128  # characters of a tool's or an argument's name
NAME = re.compile(rf"[A-Za-z_][\w.-]{{0,{MAX_NAME - 1}}}", re.ASCII)
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
_JSON_HINTS = (int, float, str, bool, list, tuple, dict, type(None), Any)


@dataclass(frozen=True)
class ToolCall:
    """A tool call of the policy.

    Args:
        name, arguments: of the tool, JSON-serialisable; empty where they could not be read.
        error: why it cannot be called, as one line; None where it can.
        id: the policy's own, in nine letters and digits; empty where it gave none.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    id: str = field(default="", compare=False)


def call_id(number: int) -> str:
    """Return the id of a call without one: nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def function_schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """The JSON schemas of plain functions, as ``apply_chat_template(tools=..)`` takes them.

    Args:
        functions: each has a name of its own, a docstring in Google's style that describes every argument, and type
            hints that JSON has values for (``int``, ``float``, ``str``, ``bool``, ``None``, ``list``, ``tuple``,
            ``dict``, ``Literal``, ``Any`` and unions of them).

    Raises:
        UserError: a function has not; the sentence names it, and what to write.

    >>> def divide(dividend: int, divisor: int) -> str:
    ...     '''Divide two numbers.
    ...
    ...     Args:
    ...         dividend: What is divided.
    ...         divisor: By what.
    ...     '''
    >>> (schema,) = function_schemas([divide])
    >>> schema["function"]["name"], schema["function"]["parameters"]["properties"]["divisor"]
    ('divide', {'type': 'integer', 'description': 'By what.'})
    """
    schemas = list(map(_schema, functions))
    if schemas:
        parameters_by_name(schemas)  # refuses two of one name
    return schemas


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # a second, and torch once it is called

    name = getattr(function, "__name__", type(function).__name__)
    if not (inspect.isfunction(function) or inspect.ismethod(function)) or not NAME.fullmatch(name):
        raise UserError(
            f"the tool {name!r} has no name that a call could give; define it with def, under a name of letters, "
            "digits and underscores"
        )
    if not inspect.getdoc(function):
        raise UserError(f"the tool {name} has no docstring; write one that says what it does, with Args: if it has any")
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise UserError(
                f"the tool {name} takes {argument}, which no call can give; write out its arguments by name"
            )
        if argument.annotation is argument.empty:
            raise UserError(
                f"the argument {argument.name!r} of the tool {name} has no type hint; write {argument.name}: str, or "
                "what it is"
            )
    try:
        annotations = get_type_hints(function)
        schema = get_json_schema(function)
    except Exception as error:  # a name in a hint, a docstring that cannot be read: transformers says which
        reason = first_line(error)
        if "no description for the argument" in reason:
            reason = f"its docstring does not describe {reason.rpartition(' ')[2]}"
        raise UserError(
            f"the tool {name} makes no JSON schema ({reason}); hint types that JSON has, and describe every argument "
            "under Args: in its docstring, as in 'city: Where to look.'"
        ) from error
    for label, annotation in annotations.items():
        if label != "return" and not _is_json(annotation):
            raise UserError(
                f"the argument {label!r} of the tool {name} has the type {annotation!r}, which JSON has no values for; "
                "use int, float, str, bool, list, dict, Literal or a union of them"
            )
    return schema


def _is_json(annotation: Any) -> bool:
    origin = get_origin(annotation)
    if origin is None:
        return any(annotation is known for known in _JSON_HINTS)
    if origin is Literal:
        return True
    return origin in (list, tuple, dict, Union, types.UnionType) and all(map(_is_json, get_args(annotation)))


def parameters_by_name(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters of each schema, in the form of :func:`function_schemas` or of its ``function``, by name.

    Raises:
        UserError: none at all, one without a name or arguments, two of one name.
    """
    parameters_of: dict[str, Mapping[str, Any]] = {}
    for number, schema in enumerate(schemas):
        function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"the schema of tool {number} has no name that a call could give; write a name of letters")
        parameters = function.get("parameters", {})
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
            raise UserError(f"the schema of the tool {name} has no object of parameters; make it with function_schemas")
        if name in parameters_of:
            raise UserError(f"two tools are called {name!r}; rename one")
        parameters_of[name] = parameters
    if not parameters_of:
        raise UserError("there are no tools; give at least one function")
    return parameters_of


def argument_error(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Why the arguments do not fit the schema, as one line; None where they do.

    Read of the schema are ``type``, ``nullable``, ``enum``, ``const``, ``anyOf``, ``oneOf``, ``items``,
    ``prefixItems``, ``properties``, ``required`` and ``additionalProperties``. Nothing is coerced: ``"7"`` and ``7.0``
    are no integers, ``true`` is no number, ``7`` is a number.

    Args:
        parameters: the schema of a tool's arguments.
        arguments: by name, as JSON gave them.
    """
    properties = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name in properties:
            reason = _misfit(properties[name], value)
        elif parameters.get("additionalProperties"):
            reason = _misfit(parameters["additionalProperties"], value)
        else:
            return f"there is no argument {quoted(name)}; there are: {', '.join(properties) or 'none'}"
        if reason is not None:
            return f"the argument {quoted(name)} {reason}"
    return None


def quoted(text: str) -> str:
    """What a model wrote, on one line and short."""
    return f"'{one_line(text[:40], None)}{'..' if len(text) > 40 else ''}'"


def _misfit(schema: Any, value: Any) -> str | None:
    """Why ``value`` does not fit, as what follows the name of an argument."""
    if not isinstance(schema, Mapping):  # true is everything, false nothing
        return None if schema else "is not allowed"
    if value is None and schema.get("nullable"):
        return None
    for union in ("anyOf", "oneOf"):
        if union in schema and all(_misfit(choice, value) is not None for choice in schema[union]):
            return f"is {_kind(value)}, which fits none of the types that it may have"
    types_of = schema.get("type", ())
    allowed = [types_of] if isinstance(types_of, str) else [*types_of]
    if allowed and not any(_is_a(name, value) for name in allowed):
        return f"is {_kind(value)}, not {' or '.join(map(_article, allowed))}"
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None and not any(type(choice) is type(value) and choice == value for choice in choices):
        return f"is {quoted(json.dumps(value))}, not one of {', '.join(map(json.dumps, choices))}"
    if isinstance(value, list):
        prefix = schema.get("prefixItems")
        if prefix is not None and len(value) != len(prefix):
            return f"has {len(value)} items, not {len(prefix)}"
        for index, item in enumerate(value):
            reason = _misfit(prefix[index] if prefix is not None else schema.get("items", True), item)
            if reason is not None:
                return f"has an item, number {index}, that {reason}"
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                return f"has no entry {name!r}"
        for name, item in value.items():
            reason = _misfit(properties[name] if name in properties else schema.get("additionalProperties", True), item)
            if reason is not None:
                return f"has an entry {quoted(name)} that {reason}"
    return None


def _is_a(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(name, ()))


def _kind(value: Any) -> str:
    return next((_article(name) for name in _PYTHON_TYPES if _is_a(name, value)), type(value).__name__)


def _article(name: str) -> str:
    return "null" if name == "null" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
