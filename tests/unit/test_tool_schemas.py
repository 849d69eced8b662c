"""Functions as JSON schemas: what makes none is named, and arguments are checked as jsonschema would check them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from transformers.utils import get_json_schema

from sota_grpo.errors import UserError
from sota_grpo.rl.tool_schemas import argument_error, function_schemas, parameters_by_name
from tests.unit.test_tool_calls import look_up


def _undocumented(city: str) -> None: ...


def _unhinted(city) -> None:  # type: ignore[no-untyped-def]
    """Look.

    Args:
        city: Where.
    """


def _undescribed(city: str) -> None:
    """Look."""


def _odd(city: Path) -> None:
    """Look.

    Args:
        city: Where.
    """


def _open(*city: str) -> None:
    """Look.

    Args:
        city: Where.
    """


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ([_undocumented], "the tool _undocumented .*because it has no docstring"),
        ([_unhinted], "the tool _unhinted .*city is missing a type hint.*as in city: str"),
        ([_undescribed], r"the tool _undescribed .* does not describe 'city'\); .*describe it under Args:"),
        ([_odd], "the argument 'city' of the tool _odd has the type .*Path.*; use int"),
        ([_open], r"the tool _open takes \*city: .*; declare"),
        ([look_up, look_up], "two tools are called 'look_up'; rename one"),
        ([print], "the tool 'print' cannot be called by name; define it with def"),
    ],
)
def test_functions_that_make_no_schema_are_named(functions: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"^{reason}"):
        function_schemas(functions)


def test_schemas_are_those_of_transformers_and_hints_become_checks() -> None:
    def tool(mode: Literal["a", 1], either: int | str, pair: tuple[int, str], table: dict[str, list[int]]) -> None:
        """Try.

        Args:
            mode: One.
            either: Two.
            pair: Three.
            table: Four.
        """

    (schema,) = function_schemas([tool])
    fine = {"mode": 1, "either": "x", "pair": [1, "x"], "table": {"k": [1]}}

    def reason(**changes: Any) -> str | None:
        return argument_error(schema["function"]["parameters"], {**fine, **changes})

    assert reason() is None
    assert "is a boolean, not" in str(reason(mode=True))
    assert "not one of" in str(reason(mode="b"))
    assert reason(either=1.5) == "the argument 'either' is a number, not an integer or a string"
    assert reason(pair=[1]) == "the argument 'pair' has 1 items, not 2"
    assert reason(pair=["x", 1]) == "the argument 'pair' has an item, number 0, that is a string, not an integer"
    assert "an entry 'k' that has an item" in str(reason(table={"k": [None]}))
    assert function_schemas([look_up]) == [get_json_schema(look_up)]


NAMES = st.sampled_from("abc")
ATOMS = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from((0.5, 1.5)) | st.sampled_from(("", "x", "y"))
JSON = st.recursive(ATOMS, lambda i: st.lists(i, max_size=2) | st.dictionaries(NAMES, i, max_size=2), max_leaves=5)
TYPES = st.sampled_from(("string", "integer", "number", "boolean", "array", "object", "null"))
SCHEMAS = st.recursive(
    st.builds(dict, type=TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True))
    | st.builds(dict, enum=st.lists(ATOMS, min_size=1, max_size=3))
    | st.just({}),
    lambda inner: (
        st.builds(dict, anyOf=st.lists(inner, min_size=1, max_size=2))
        | st.builds(dict, type=st.just("array"), items=inner)
        | st.builds(dict, type=st.just("object"), additionalProperties=inner | st.booleans())
        | st.builds(
            dict,
            type=st.just("object"),
            properties=st.dictionaries(NAMES, inner, max_size=2),
            required=st.lists(NAMES, max_size=1),
        )
    ),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, value=JSON)
def test_arguments_are_checked_as_jsonschema_does(schema: dict[str, Any], value: Any) -> None:
    reason = argument_error({"type": "object", "properties": {"it": schema}}, {"it": value})
    assert (reason is None) == Draft202012Validator(schema).is_valid(value), reason


KEYWORDS = ("type", "nullable", "enum", "anyOf", "oneOf", "items", "prefixItems", "properties", "required")
IGNORED = [{name: odd} for name in (*KEYWORDS, "additionalProperties") for odd in (None, True)]
IGNORED += [None, {"type": [None]}, {"type": [{}, "null"]}, {"type": ""}, {"type": "any"}, {"required": [{}]}]
IGNORED += [{"type": ["boolean", "integer", "string", "array", "object"], "nullable": True, "const": None}]
IGNORED += [{"anyOf": []}, {"enum": []}, {"properties": []}, {"properties": {"k": None}}]


@pytest.mark.parametrize("schema", IGNORED, ids=str)
def test_keywords_without_a_value_that_can_be_used_are_ignored(schema: Any) -> None:
    """Servers send null for what is absent, and draft 3's ``"required": true``: neither refuses an argument."""
    nested = {"properties": {"k": schema}, "items": schema, "anyOf": [schema]}
    for value in ({"k": 1}, [1], "x", True, None):
        assert argument_error({"properties": {"it": schema}}, {"it": value}) is None
        assert argument_error({"properties": {"it": nested}}, {"it": value}) is None


@pytest.mark.parametrize("none", [None, [], {}, {"properties": None}, {"additionalProperties": None}], ids=str)
def test_a_tool_may_have_no_arguments(none: Any) -> None:
    tool = parameters_by_name([{"name": "a", "parameters": none}])["a"] | {"required": None}
    assert argument_error(tool, {}) is None
    assert argument_error(tool, {"x": 1}) == "there is no argument 'x'; available: none"
    assert argument_error(tool | {"additionalProperties": {}}, {"x": 1}) is None


@pytest.mark.parametrize(
    ("schemas", "reason"),
    [
        ([], "there are no tools; give"),
        ([{"type": "function"}], r"tool 0 \(from 0\) has the name None; use"),
        ([{"name": "a b"}], r"tool 0 \(from 0\) has the name 'a b'; use"),
        ([{"name": "a", "parameters": [1]}], "the parameters of the tool a are no JSON schema; use"),
        ([{"name": "a"}, {"type": "function", "function": {"name": "a"}}], "two tools are called 'a'; rename"),
    ],
)
def test_schemas_that_say_nothing_are_refused(schemas: list[Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"^{reason}"):
        parameters_by_name(schemas)
