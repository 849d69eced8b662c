"""GRPO post-training of language models, TorchRL-native.

``sota_grpo.train`` trains as the command line does (docs/python.md); ``sota_grpo.Result`` reads a run directory.
``import sota_grpo`` is fast: both are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sota_grpo.errors import RunFailed, UserError
    from sota_grpo.run.api import Result, train

__all__ = ["Result", "RunFailed", "UserError", "train"]

_HOMES = {"Result": "run.api", "RunFailed": "errors", "UserError": "errors", "train": "run.api"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "__version__":
        from importlib.metadata import version

        return version("sota-grpo")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
