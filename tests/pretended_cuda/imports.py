"""Something to do around the import of a module, whenever that comes."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def around(name: str, *, after: Callable[[ModuleType], None], before: Callable[[], None] = lambda: None) -> None:
    """Call ``before`` and ``after`` when the module ``name`` is executed; ``after`` now if that has happened."""
    if name in sys.modules:
        after(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watch(name, before, after))


class _Watch(importlib.abc.MetaPathFinder):
    """Finds one module as the others would, with a loader that does more."""

    def __init__(self, name: str, before: Callable[[], None], after: Callable[[ModuleType], None]) -> None:
        self.name, self.before, self.after = name, before, after

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        original = spec.loader.exec_module

        def execute(module: ModuleType) -> None:
            self.before()
            original(module)
            self.after(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec
