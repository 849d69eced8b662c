"""What an option of the config is: a dataclass field with a default, a sentence and perhaps a list of choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any


def opt(default: Any, text: str, choices: tuple[str, ...] | None = None) -> Any:
    """A config field: its default, what it changes, and the values it accepts when they are few."""
    return field(default=default, metadata={"help": text, "choices": choices})


def part(factory: type, text: str) -> Any:
    """A config field that is a section, or a list, of its own."""
    return field(default_factory=factory, metadata={"help": text, "choices": None})


def leaves(node: Any, prefix: str = "") -> list[tuple[str, Any, Any]]:
    """Every option below ``node`` as ``(dotted name, dataclass field, value)``, in the order of the fields."""
    found: list[tuple[str, Any, Any]] = []
    for item in fields(node):
        value = getattr(node, item.name)
        name = prefix + item.name
        found += leaves(value, name + ".") if is_dataclass(value) else [(name, item, value)]
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested config by their dotted names; an empty section is a value.

    >>> flat({"seed": 0, "train": {"epochs": 1, "resume": None}})
    {'seed': 0, 'train.epochs': 1, 'train.resume': None}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}"
        found |= flat(value, dotted + ".") if isinstance(value, Mapping) and value else {dotted: value}
    return found
