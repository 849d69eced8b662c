"""A user's reward file: its functions, found by name and recognised by their parameters.

The file is the user's own code, named by an explicit path; model text never comes here.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from sota_grpo.errors import UserError

VERL, TRL = "verl", "trl"
VERL_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL_PARAMETERS = ("prompts", "completions", "log_extra", "log_metric")

_TRL_NOT_HERE = ("completion_ids", "completions_ids", "prompt_ids", "trainer_state", "environments")
_FORMS = (
    "verl's compute_score(data_source, solution_str, ground_truth, extra_info=None) nor "
    "TRL's function(prompts, completions, **columns)"
)


class RewardFunctionError(UserError, ValueError):
    """A reward file or function that cannot be used; the message says which and what to change."""


@dataclass(frozen=True)
class RewardFunction:
    """A function of a reward file.

    Args:
        name: of the function, and of its reward term.
        form: ``verl`` (one response, by ``solution_str``) or ``trl`` (a list of them, by ``completions``).
        call: the function, plain or ``async``.
        required: parameters without a default.
        optional: parameters with one.
        takes_any: it has ``**kwargs``.
    """

    name: str
    form: str
    call: Callable[..., Any]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    takes_any: bool

    def accepted(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the ``offered`` keywords that the function takes."""
        taken = {*self.required, *self.optional}
        return {name: value for name, value in offered.items() if self.takes_any or name in taken}


def load_functions(path: str, names: Sequence[str]) -> list[RewardFunction]:
    """The functions ``names`` of the Python file ``path``, which is run once, as an import would.

    The file's folder is put at the end of ``sys.path``, so that it can import what lies beside it.

    Raises:
        RewardFunctionError: no such file or function, an import that fails (with its line), or parameters that are
            neither verl's nor TRL's.

    Example::

        (function,) = load_functions("reward_function.py", ["compute_score"])
        function.call(solution_str="#### 4", ground_truth="4", data_source="openai/gsm8k", extra_info={})
    """
    module = _run_file(Path(path))
    return [_function(module, name, path) for name in names]


def line_in(path: str, error: BaseException) -> int | None:
    """The last line of the file ``path`` that ``error`` came through."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    line, trace = None, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def require_file(path: Path) -> None:
    """Check that ``path`` is a file.

    Raises:
        RewardFunctionError: it is not.
    """
    if not path.is_file():
        raise RewardFunctionError(f"there is no reward file {path}; correct reward.path (now in {Path.cwd()}).")


def _run_file(path: Path) -> ModuleType:
    require_file(path)
    name = f"reward_file_{hashlib.sha256(bytes(path)).hexdigest()[:12]}"
    loader = SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))  # type: ignore[arg-type]
    sys.modules[name] = module  # dataclasses look their module up by its name
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file beside it must not shadow a package
    try:
        # Not loader.exec_module: it would leave compiled files beside the user's own, and believe stale ones.
        exec(loader.source_to_code(path.read_bytes(), str(path)), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = line_in(str(path), error)
        place = str(path) if line is None else f"{path}, line {line}"
        raise RewardFunctionError(
            f"{place}: the reward file cannot be imported ({type(error).__name__}: {error}); mend it there."
        ) from error
    return module


def _function(module: ModuleType, name: str, path: str) -> RewardFunction:
    call = getattr(module, name, None)
    if not callable(call):
        found = ", ".join(_functions_of(module)) or "none"
        raise RewardFunctionError(f"{path} has no function {name!r}; its functions are {found}: correct reward.name.")
    return recognise(call, name, path)


def recognise(call: Callable[..., Any], name: str, place: str) -> RewardFunction:
    """``call`` as a reward function: its form, told by its parameters, and what it takes.

    Args:
        call: a function, or an object that is called like one.
        name: of its reward term.
        place: where it is from, for messages.

    Raises:
        RewardFunctionError: its parameters are neither verl's nor TRL's.

    >>> recognise(lambda solution_str, ground_truth: 1.0, "right", "demo").form
    'verl'
    """
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # some written in C have none
        parameters = ()  # type: ignore[assignment]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    function = RewardFunction(
        name=name,
        form=_form({p.name for p in named if p.kind is not p.POSITIONAL_ONLY}),
        call=call,
        required=tuple(p.name for p in named if p.default is p.empty),
        optional=tuple(p.name for p in named if p.default is not p.empty),
        takes_any=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
    _require_form(function, f"{place}: {name}({', '.join(map(str, parameters))})")
    return function


def _functions_of(module: ModuleType) -> list[str]:
    """The public functions that are written in the module itself."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _form(parameters: Collection[str]) -> str:
    if "solution_str" in parameters:
        return VERL
    return TRL if "completions" in parameters or "prompts" in parameters else ""


def _require_form(function: RewardFunction, place: str) -> None:
    """Columns that a function of TRL's form asks for are checked where the rows are known."""
    missing: Sequence[str]
    if function.form == VERL:
        missing = [name for name in function.required if name not in VERL_PARAMETERS]
    else:
        missing = [name for name in function.required if name in _TRL_NOT_HERE]
    if function.form == "" and not missing:
        raise RewardFunctionError(f"{place} is neither {_FORMS}; name its parameters like one of these.")
    if missing:
        reason = "nothing here has" if function.form == VERL else "a grader, which reads text only, does not have"
        raise RewardFunctionError(f"{place} asks for {', '.join(missing)}, which {reason}; give it a default value.")
