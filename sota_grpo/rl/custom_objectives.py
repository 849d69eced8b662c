"""``algorithm.objective`` and ``algorithm.baseline``: a built-in name, or ``FILE.py:FUNCTION``.

The parameters of a function in a file are checked by parsing; the file is executed at the first call. Does not import
torch, because options are validated before torch is loaded.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError
from sota_grpo.files import error_line, file_reference, run_python
from sota_grpo.functional.loss_terms import OPTIONS, SURROGATES, TENSORS, Surrogate, of_terms
from sota_grpo.text import os_reason, sentence

if TYPE_CHECKING:
    from torch import Tensor

#: Allowed parameters of a surrogate.
TERMS = (*TENSORS, *OPTIONS)
#: Allowed parameters of an advantage estimator (see :func:`estimator`).
ESTIMATOR_TERMS = ("rewards", "group_ids", "lengths", "terms")


class ObjectiveError(UserError, ValueError):
    """An objective or an advantage estimator does not exist or cannot be used; the message says what to change."""


def surrogate(objective: str | Callable[..., Any]) -> Surrogate:
    """Return the :class:`Surrogate` of an objective: a built-in name, ``FILE.py:FUNCTION``, or a function.

    ObjectiveError if it cannot be used, has a parameter that is not in :data:`TERMS` and has no default, reads neither
    log_prob nor log_ratio, or is a partial that sets one of :data:`TERMS`. A file that cannot be executed raises it at
    the first call of the loss.
    """
    if not callable(objective) and objective in SURROGATES:
        return SURROGATES[objective]
    loss, name = _function("algorithm.objective", objective, TERMS, ("log_prob", "log_ratio"))
    if loss is None:
        raise ObjectiveError(
            f"objective is {name!r}; choose one of {', '.join(map(repr, SURROGATES))}, or FILE.py:FUNCTION."
        )
    if isinstance(objective, functools.partial):
        if fixed := [term for term in TERMS if term in objective.keywords]:
            raise ObjectiveError(
                f"objective is a partial that sets {', '.join(fixed)}; leave this out, and set clip widths in the loss."
            )
        for declared in SURROGATES.values():
            if declared.loss is objective.func:
                return replace(declared, loss=objective)
    return Surrogate(loss, functools.partial(_without_gradient, loss), advantage_only=False)


def estimator(baseline: str | Callable[..., Any]) -> Callable[..., Tensor] | None:
    """Return the advantage estimator in ``FILE.py:FUNCTION``, or a function as it is; None for any other text.

    An estimator returns the advantages ``[N]`` of N responses, which are then divided by the scale. Its parameters are
    any of ``rewards`` (``[N]``), ``group_ids`` (int64 ``[N]``, groups numbered from 0), ``lengths`` (int64 ``[N]``,
    sampled tokens; None if the rows have no assistant mask) and ``terms`` (reward terms by name, each ``[N]``, NaN if a
    term does not apply).

    ObjectiveError if it cannot be used, has another parameter without a default, or reads neither rewards nor terms. If
    the file cannot be executed, the first call raises it.
    """
    return _function("algorithm.baseline", baseline, ESTIMATOR_TERMS, ("rewards", "terms"))[0]


def _function(
    option: str, value: str | Callable[..., Any], terms: tuple[str, ...], needed: tuple[str, str]
) -> tuple[Callable[..., Any] | None, str]:
    """Return the user's function and its name, after checking its parameters; ``(None, value)`` for other values."""
    if callable(value):
        function, name = value, getattr(value, "__name__", option)
    elif (reference := file_reference(value)) is not None:
        function, name = _Written(option, *reference), value
    else:
        return None, value
    try:
        parameters = signature(function).parameters.values()
    except ValueError as error:  # of a partial whose arguments the function does not have
        raise ObjectiveError(f"{option}: the call of {name} does not fit ({error}); correct its partial.") from error
    missing = [p.name for p in parameters if p.name not in terms and p.default is p.empty]
    if missing or not {*needed} & {p.name for p in parameters}:
        reads = f"has the parameters {', '.join(missing)}" if missing else f"reads neither {needed[0]} nor {needed[1]}"
        raise ObjectiveError(
            f"{option}: the function {name} {reads}; parameters must be any of {', '.join(terms)}, or have a default."
        )
    return function, name


class _Written:
    """A function in a file. The signature is parsed; the file is executed at the first call."""

    def __init__(self, option: str, path: Path, name: str) -> None:
        self._option, self._path, self._name = option, path, name
        self.__signature__ = _parameters(option, path, name)

    def __call__(self, **terms: Any) -> Any:
        return self._function(**terms)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        try:
            return getattr(run_python(self._path), self._name)
        except (Exception, SystemExit) as error:
            line = error_line(self._path, error)
            location = self._path if line is None else f"{self._path}, line {line}"
            raise ObjectiveError(
                f"{location}: {self._option} cannot be imported ({sentence(error).rstrip('.')}); correct this file."
            ) from error


def _parameters(option: str, path: Path, name: str) -> Signature:
    """Return the signature of the top-level function ``name`` of a file, without executing the file."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ObjectiveError(
            f"{path} cannot be read ({os_reason(error)}); correct {option} (relative to {Path.cwd()})."
        ) from error
    except (SyntaxError, ValueError) as error:
        raise ObjectiveError(f"{path} is not Python ({error}); correct the file.") from error
    functions = {n.name: n.args for n in tree.body if isinstance(n, ast.FunctionDef)}
    if name not in functions:
        raise ObjectiveError(
            f"{path} defines no function {name!r}; its functions are {', '.join(functions) or 'none'}: correct "
            f"{option}=FILE.py:FUNCTION."
        )
    args = functions[name]
    named = [*args.posonlyargs, *args.args]
    required = [n.arg for n in named[: len(named) - len(args.defaults)]]
    required += [n.arg for n, default in zip(args.kwonlyargs, args.kw_defaults) if default is None]
    every = [n.arg for n in [*named, *args.kwonlyargs]]
    return Signature(
        [Parameter(n, Parameter.KEYWORD_ONLY, default=Parameter.empty if n in required else None) for n in every]
    )


def _without_gradient(loss: Callable[..., Any], **terms: Any) -> Tensor:
    """Return the clipped tokens, bool ``[N, T]``: advantage not 0, but no gradient of ``loss`` in the log-prob."""
    import torch

    with torch.enable_grad():
        change = torch.zeros_like(terms["log_prob"], requires_grad=True)
        moved = {name: terms[name].detach() + change for name in ("log_prob", "log_ratio")}
        value = of_terms(loss, terms | moved).sum()
        if not value.requires_grad:  # a mistake, which the start-up checks report
            return terms["advantage"].expand_as(change) != 0
        (slope,) = torch.autograd.grad(value, change)
    return (slope == 0) & (terms["advantage"] != 0)
