"""The examples in the docstrings of sota_grpo.functional are true, and every public function has one."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import sota_grpo.functional as functional

MODULES = [functional.__name__] + [f"{functional.__name__}.{m.name}" for m in pkgutil.iter_modules(functional.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_public_function_has_an_example() -> None:
    members = {name: getattr(functional, name) for name in functional.__all__}
    without = [name for name, member in members.items() if callable(member) and ">>>" not in member.__doc__]
    assert without == []
