"""Registries of the names that options accept: built-in ones, and entry points of installed packages.

A package adds, for example, a task by a line in its ``pyproject.toml``::

    [project.entry-points."sota_grpo.tasks"]
    riddles = "my_package.riddles:RiddlesTask"

after which ``env.dataset=riddles`` trains on it. The other groups are ``sota_grpo.engines``, ``sota_grpo.optimizers``
and ``sota_grpo.sinks``. A package cannot replace a built-in name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from sota_grpo.errors import UserError
from sota_grpo.text import sentence

Value = TypeVar("Value")


class Registry(Mapping[str, Value], Generic[Value]):
    """A mapping from names to built-in values and to the entry points of ``group``, which are imported at first access.

    A value ``"module:name"`` in ``builtin`` is imported at first access, too.
    """

    def __init__(self, group: str, builtin: Mapping[str, Value | str]) -> None:
        self._group, self._own = group, builtin

    @cached_property
    def _installed(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self._group) if entry.name not in self._own}

    def __getitem__(self, name: str) -> Value:
        """Return the value of ``name``; UserError if its entry point cannot be imported, KeyError if it is unknown."""
        builtin = self._own.get(name)
        if isinstance(builtin, str):
            module, _, member = builtin.partition(":")
            return getattr(import_module(module), member)  # type: ignore[no-any-return]
        if builtin is not None:
            return builtin
        entry = self._installed[name]
        try:
            return entry.load()  # type: ignore[no-any-return]
        except Exception as error:  # of the package: any kind
            package = "a package" if entry.dist is None else f"the package {entry.dist.name}"
            raise UserError(
                f"The entry point {name} ({self._group}) of {package} names {entry.value}, which cannot be imported "
                f"({sentence(error).rstrip('.')}); reinstall or remove the package."
            ) from error

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._installed

    def __iter__(self) -> Iterator[str]:
        yield from (*self._own, *self._installed)

    def __len__(self) -> int:
        return len(self._own) + len(self._installed)
