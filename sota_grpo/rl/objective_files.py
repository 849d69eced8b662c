"""``algorithm.objective``: the name of a surrogate, or ``FILE.py:FUNCTION``, one of the user's own.

A file of one's own is judged by the parameters of its function before it is run, as the declared surrogates are; it is
run when the loss is first computed. Imports no torch.
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

TERMS = (*TENSORS, *OPTIONS)
_MARK = ".py:"


class ObjectiveError(UserError, ValueError):
    """An objective that there is not, or that cannot be used; the message says which and what to change."""


def in_file(objective: str) -> tuple[Path, str] | None:
    """File and function of an objective of one's own; None of a declared one."""
    file, mark, function = objective.rpartition(_MARK)
    return (Path(file + mark[:-1]).expanduser(), function) if mark else None


def surrogate(objective: str | Callable[..., Any]) -> Surrogate:
    """What is known of an objective: a declared one by its name, ``FILE.py:FUNCTION``, or a function.

    Raises:
        ObjectiveError: there is none, or its function reads what no surrogate is given.
    """
    if callable(objective):
        return _own(objective, getattr(objective, "__name__", "objective"))
    if objective in SURROGATES:
        return SURROGATES[objective]
    place = in_file(objective)
    if place is None:
        raise ObjectiveError(
            f"objective is {objective!r}; choose one of {', '.join(map(repr, SURROGATES))}, or FILE.py:FUNCTION."
        )
    return _own(_Written(*place), objective)


def _own(loss: Callable[..., Any], name: str) -> Surrogate:
    parameters = signature(loss).parameters.values()
    missing = [one.name for one in parameters if one.name not in TERMS and one.default is one.empty]
    if missing or not {"log_prob", "log_ratio"} & {one.name for one in parameters}:
        reads = f"asks for {', '.join(missing)}" if missing else "reads neither log_prob nor log_ratio"
        raise ObjectiveError(
            f"The objective {name} {reads}; its parameters are any of {', '.join(TERMS)}, or have a default."
        )
    return Surrogate(loss, functools.partial(_without_gradient, loss))


class _Written:
    """A function in a file, which is run when it is first called; before that only its parameters are known."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self.__signature__ = _parameters(path, name)

    def __call__(self, **terms: Any) -> Any:
        return self._function(**terms)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        try:
            return getattr(run_python(self._path), self._name)
        except (Exception, SystemExit) as error:
            line = error_line(self._path, error)
            place = self._path if line is None else f"{self._path}, line {line}"
            raise ObjectiveError(
                f"{place}: the objective cannot be imported ({type(error).__name__}: {error}); mend it there."
            ) from error


def _parameters(path: Path, name: str) -> Signature:
    """Those of the function ``name`` at the top of a file, which is read and not run."""
    try:
        tree = ast.parse(path.read_bytes())
    except OSError as error:
        raise ObjectiveError(f"There is no file {path}; correct algorithm.objective (now in {Path.cwd()}).") from error
    except (SyntaxError, ValueError) as error:
        raise ObjectiveError(f"{path} is no Python ({error}); mend it there.") from error
    functions = {one.name: one.args for one in tree.body if isinstance(one, ast.FunctionDef)}
    if name not in functions:
        raise ObjectiveError(
            f"{path} defines no function {name!r}; its functions are {', '.join(functions) or 'none'}: correct "
            "algorithm.objective=FILE.py:FUNCTION."
        )
    args = functions[name]
    named = [*args.posonlyargs, *args.args]
    required = [one.arg for one in named[: len(named) - len(args.defaults)]]
    required += [one.arg for one, default in zip(args.kwonlyargs, args.kw_defaults) if default is None]
    every = [one.arg for one in [*named, *args.kwonlyargs]]
    return Signature(
        [Parameter(one, Parameter.KEYWORD_ONLY, default=Parameter.empty if one in required else None) for one in every]
    )


def _without_gradient(loss: Callable[..., Any], **terms: Any) -> Tensor:
    """True where a token has an advantage and ``loss`` gives its log-prob no gradient; bool ``[N, T]``."""
    import torch

    with torch.enable_grad():
        change = torch.zeros_like(terms["log_prob"], requires_grad=True)
        moved = {name: terms[name].detach() + change for name in ("log_prob", "log_ratio")}
        value = of_terms(loss, terms | moved).sum()
        if not value.requires_grad:  # a mistake, which the gate names
            return terms["advantage"].expand_as(change) != 0
        (slope,) = torch.autograd.grad(value, change)
    return (slope == 0) & (terms["advantage"] != 0)
