"""JSON schemas of tools, records of the policy's tool calls, and validation of their arguments.

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
        name: name of the tool; empty if it could not be parsed.
        arguments: JSON-serialisable arguments by name; empty if they could not be parsed or the tool is unknown.
        error: one line that says why the call cannot be executed; None for a valid call.
        id: the call id that the policy wrote, if it is nine letters and digits; else empty.
        is_misfit: the tool is known and the arguments were parsed, but they do not fit its schema.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    id: str = field(default="", compare=False)
    is_misfit: bool = field(default=False, compare=False)


def call_id(number: int) -> str:
    """Return an id for call ``number`` (below 100,000): nine letters and digits, as Mistral's templates require."""
    return f"call{number:05d}"


def function_schemas(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schemas of Python functions or methods, in the form of ``apply_chat_template(tools=..)``.

    Args:
        functions: each with a unique name of letters, digits and underscores, a Google-style docstring that describes
            every argument, and type hints that JSON can represent (``int``, ``float``, ``str``, ``bool``, ``None``,
            ``list``, ``tuple``, ``dict``, ``Literal``, ``Any`` and unions of them).

    UserError if a function lacks one of these, or takes arguments that are not passed by name.

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
        parameters_by_name(schemas)  # refuses duplicate names
    return schemas


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema  # imports torch, and takes a second

    name = getattr(function, "__name__", type(function).__name__)
    if not (inspect.isfunction(function) or inspect.ismethod(function)) or not NAME.fullmatch(name):
        raise UserError(
            f"the tool {name!r} cannot be called by name; define it with def, under a name of letters, digits and "
            "underscores"
        )
    for argument in inspect.signature(function).parameters.values():
        if argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            raise UserError(
                f"the tool {name} takes {argument}, which is not passed by name; declare it without *, ** or /"
            )
    try:
        annotations = get_type_hints(function)
        schema = get_json_schema(function)
    except Exception as error:  # such as an undefined name in a hint, or no docstring
        reason = first_line(error).rstrip(".")
        if "no description for the argument" in reason:
            reason = f"its docstring does not describe {reason.rpartition(' ')[2]}"
        raise UserError(
            f"the tool {name} cannot be described by a JSON schema ({reason}); give every argument a type hint that "
            "JSON has, as in city: str, and describe it under Args: in the docstring, as in 'city: Where to look.'"
        ) from error
    for label, annotation in annotations.items():
        if label != "return" and not _is_json(annotation):
            raise UserError(
                f"the argument {label!r} of the tool {name} has the type {annotation!r}, which JSON does not have; "
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
    """Return ``{tool name: parameters}`` of schemas of :func:`function_schemas` or of their ``function`` entries.

    UserError unless there are schemas, all with different valid names and with parameters that are a JSON schema.
    """
    parameters_of: dict[str, Mapping[str, Any]] = {}
    for number, schema in enumerate(schemas):
        function = schema.get("function", schema) if isinstance(schema, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise UserError(f"tool {number} (from 0) has the name {name!r:.60}; use letters, digits and underscores")
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties") or {}, Mapping):
            raise UserError(f"the parameters of the tool {name} are no JSON schema; use function_schemas")
        if name in parameters_of:
            raise UserError(f"two tools are called {name!r}; rename one")
        parameters_of[name] = parameters
    if not parameters_of:
        raise UserError("there are no tools; give at least one function")
    return parameters_of


def argument_error(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """Return one line that says why the arguments (JSON values by name) do not fit the schema; None if they fit.

    The check reads ``type``, ``nullable``, ``enum``, ``const``, ``anyOf``, ``oneOf``, ``items``, ``prefixItems``,
    ``properties``, ``required`` and ``additionalProperties``, without which an unknown argument does not fit. Nothing
    is coerced: ``"7"`` and ``7.0`` are not integers, ``true`` is not a number, ``7`` is a number. Keywords whose value
    JSON Schema does not allow, such as ``null`` or draft 3's ``"required": true``, and unknown types are ignored.
    """
    properties, others = keyword(parameters, "properties", {}), parameters.get("additionalProperties")
    for name in _names(parameters, "required"):
        if name not in arguments:
            return f"the argument {name!r} is missing"
    for name, value in arguments.items():
        if name not in properties and others in (None, False):
            return f"there is no argument {quoted(name)}; available: {', '.join(properties) or 'none'}"
        if reason := _misfit(properties.get(name, others), value):
            return f"the argument {quoted(name)} {reason}"
    return None


def keyword(schema: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of a schema's keyword if it is an object or a list as ``default`` is; else ``default``.

    >>> keyword({"properties": None}, "properties", {})
    {}
    """
    value = schema.get(name)
    return value if isinstance(value, type(default)) else default


def _names(schema: Mapping[str, Any], name: str) -> list[str]:
    """Return the strings of a keyword that is a string or a list of strings; an empty list for any other."""
    value = schema.get(name)
    names = [value] if isinstance(value, str) else keyword(schema, name, [])
    return names if all(isinstance(one, str) for one in names) else []


def quoted(text: str) -> str:
    """Return the first 40 characters of untrusted text, in quotes and on one line, with ``..`` if there are more."""
    return f"'{one_line(text[:40], None)}{'..' if len(text) > 40 else ''}'"


def _misfit(schema: Any, value: Any) -> str | None:
    """Return why ``value`` does not fit the schema, as a phrase that follows the argument's name; None if it fits."""
    if not isinstance(schema, Mapping):  # false allows no value
        return "is not allowed" if schema is False else None
    if value is None and schema.get("nullable"):
        return None
    for union in ("anyOf", "oneOf"):
        branches = keyword(schema, union, [])
        if branches and all(_misfit(branch, value) is not None for branch in branches):
            return f"is {_kind(value)}, which fits none of the allowed types"
    allowed = _names(schema, "type")
    if allowed and not any(_is_a(name, value) for name in allowed):
        return f"is {_kind(value)}, not {' or '.join(map(_article, allowed))}"
    is_fixed = "const" in schema and (schema["const"] is not None or not allowed or "null" in allowed)
    choices = keyword(schema, "enum", [schema["const"]] if is_fixed else [])
    if choices and not any(type(choice) is type(value) and choice == value for choice in choices):
        return f"is {quoted(json.dumps(value))}, not one of {', '.join(map(json.dumps, choices))}"
    if isinstance(value, list):
        prefix = keyword(schema, "prefixItems", [])
        if prefix and len(value) != len(prefix):
            return f"has {len(value)} items, not {len(prefix)}"
        for index, item in enumerate(value):
            if reason := _misfit(prefix[index] if prefix else schema.get("items"), item):
                return f"has an item, number {index}, that {reason}"
    if isinstance(value, dict):
        properties = keyword(schema, "properties", {})
        for name in _names(schema, "required"):
            if name not in value:
                return f"has no entry {name!r}"
        for name, item in value.items():
            if reason := _misfit(properties.get(name, schema.get("additionalProperties")), item):
                return f"has an entry {quoted(name)} that {reason}"
    return None


def _is_a(name: str, value: Any) -> bool:
    if isinstance(value, bool) and name in _PYTHON_TYPES:
        return name == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(name, object))


def _kind(value: Any) -> str:
    return next((_article(name) for name in _PYTHON_TYPES if _is_a(name, value)), type(value).__name__)


def _article(name: str) -> str:
    return "null" if name == "null" else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
