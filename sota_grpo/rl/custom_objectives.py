"""``algorithm.objective`` and ``algorithm.baseline``: a built-in name, or ``FILE.py:FUNCTION``.

A function in a file is checked by its parameters before the file is run, which happens at the first call. Imports no
torch, because options are checked before torch is loaded.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sota_grpo.errors import UserError
from sota_grpo.files import error_line, run_python
from sota_grpo.functional.surrogates import OPTIONS, SURROGATES, TENSORS, Surrogate, of_terms

if TYPE_CHECKING:
    from torch import Tensor

#: Options whose value may be ``FILE.py:NAME``.
IN_FILES = (
    *("algorithm.objective", "algorithm.baseline", "train.sampler"),
    *("env.dataset", "env.tools", "env.environment", "env.transforms"),
)
#: What the parameters of a surrogate may name.
TERMS = (*TENSORS, *OPTIONS)
#: What the parameters of an advantage estimator may name (see :func:`estimator`).
ESTIMATOR_TERMS = ("rewards", "group_ids", "lengths", "terms")


class ObjectiveError(UserError, ValueError):
    """An objective or an advantage estimator that does not exist or cannot be used; the message says what to change."""


def file_reference(value: str) -> tuple[Path, str] | None:
    """Return the file and the function of ``FILE.py:FUNCTION``; None for another value."""
    file, mark, function = value.rpartition(".py:")
    return (Path(f"{file}.py").expanduser(), function) if mark else None


def surrogate(objective: str | Callable[..., Any]) -> Surrogate:
    """Return the declaration of an objective: a built-in name, ``FILE.py:FUNCTION``, or a function.

    Raises:
        ObjectiveError: there is none of this name, or its function has a parameter that no surrogate has.
    """
    if not callable(objective) and objective in SURROGATES:
        return SURROGATES[objective]
    loss, name = _function("algorithm.objective", objective, TERMS, ("log_prob", "log_ratio"))
    if loss is None:
        raise ObjectiveError(
            f"objective is {name!r}; choose one of {', '.join(map(repr, SURROGATES))}, or FILE.py:FUNCTION."
        )
    return Surrogate(loss, functools.partial(_without_gradient, loss), advantage_only=False)


def estimator(baseline: str | Callable[..., Any]) -> Callable[..., Tensor] | None:
    """Return the advantage estimator of ``FILE.py:FUNCTION``, or the function itself; None for a built-in baseline.

    It returns the advantages ``[N]`` of N responses, which ``algorithm.scale`` then divides. Its parameters are any of
    ``rewards`` (``[N]``), ``group_ids`` (int64 ``[N]``, groups numbered from 0), ``lengths`` (int64 ``[N]``, sampled
    tokens) and ``terms`` (reward terms by name, each ``[N]``, NaN where one does not apply).

    Raises:
        ObjectiveError: there is no such function, or it has another parameter.
    """
    return _function("algorithm.baseline", baseline, ESTIMATOR_TERMS, ("rewards", "terms"))[0]


def _function(
    option: str, value: str | Callable[..., Any], terms: tuple[str, ...], needed: tuple[str, str]
) -> tuple[Callable[..., Any] | None, str]:
    """Return the user's function and its name, after checking its parameters; None for another value."""
    if callable(value):
        function, name = value, getattr(value, "__name__", option)
    elif (reference := file_reference(value)) is not None:
        function, name = _Written(option, *reference), value
    else:
        return None, value
    parameters = signature(function).parameters.values()
    missing = [p.name for p in parameters if p.name not in terms and p.default is p.empty]
    if missing or not {*needed} & {p.name for p in parameters}:
        reads = f"requires {', '.join(missing)}" if missing else f"reads neither {needed[0]} nor {needed[1]}"
        raise ObjectiveError(
            f"{option}: the function {name} {reads}; its parameters are any of {', '.join(terms)}, or have a default."
        )
    return function, name


class _Written:
    """A function in a file. Its signature is parsed; the file is run at the first call."""

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
                f"{location}: {self._option} cannot be imported ({type(error).__name__}: {error}); correct the file."
            ) from error


def _parameters(option: str, path: Path, name: str) -> Signature:
    """Return the parameters of the top-level function ``name`` of a file without running it."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ObjectiveError(f"There is no file {path}; correct {option} (now in {Path.cwd()}).") from error
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
    """Return True where a token has an advantage and ``loss`` gives its log-prob no gradient; bool ``[N, T]``."""
    import torch

    with torch.enable_grad():
        change = torch.zeros_like(terms["log_prob"], requires_grad=True)
        moved = {name: terms[name].detach() + change for name in ("log_prob", "log_ratio")}
        value = of_terms(loss, terms | moved).sum()
        if not value.requires_grad:  # a mistake, which the gate names
            return terms["advantage"].expand_as(change) != 0
        (slope,) = torch.autograd.grad(value, change)
    return (slope == 0) & (terms["advantage"] != 0)
