"""A user's reward file: its functions, found by name and recognised by their parameters.

The file is the user's own code, named by an explicit path; model text never comes here.

Functions can be passed as objects instead. Graders are processes that do not share the caller's memory. A function of
an importable module travels by its name; one of a notebook or a script travels as its code, with the globals that it
reads.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import importlib.util
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.text import sentence

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


Functions = Mapping[str, Callable[..., Any]]
PICKLED = ".pkl"  # ending of a file of them


def pickled(functions: Functions) -> bytes:
    """The functions as they are written to a file; :func:`unpickled` is its other end.

    Raises:
        RewardFunctionError: one holds what cannot leave this process; the message names it and why.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "reward.pkl"
    >>> size = path.write_bytes(pickled({"brevity": lambda solution_str: 1 / len(solution_str)}))
    >>> unpickled(path)["brevity"]("four")
    0.25
    """
    import cloudpickle

    for name, function in functions.items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # whatever the objects that it holds raise
            raise RewardFunctionError(
                f"the reward function {name} cannot be sent to the processes that grade ({sentence(error)}); "
                "make what it needs inside the function, or grade in this process: env.reward_workers=0."
            ) from error
    return cloudpickle.dumps(dict(functions))


def unpickled(path: Path) -> dict[str, Callable[..., Any]]:
    """The functions of a file that :func:`pickled` filled. Like a reward file, it is code: read it only if it is yours.

    Raises:
        RewardFunctionError: no such file, or what the functions need is not here.
    """
    if not path.is_file():
        raise RewardFunctionError(
            f"there are no reward functions in {path}: they were passed in Python and stayed in that process "
            "(env.reward_workers=0); pass them again, or give a file with reward.path."
        )
    try:
        return pickle.loads(path.read_bytes())
    except Exception as error:  # unpickling imports and calls whatever the functions are made of
        raise RewardFunctionError(
            f"{path}: the reward functions cannot be loaded here ({type(error).__name__}: {error}); they need the "
            "modules that they were defined with."
        ) from error


def fingerprint(functions: Functions) -> str:
    """A digest of what the functions do: names, code, constants, defaults, and what they read around them.

    Equal in every process and under every session of a notebook, as long as the Python version is the same. Of what is
    read, plain values, containers of them, and functions and classes of the same module count by what they are, all
    else by the name of its type. Comments and the place of the code do not count.

    >>> first, again = [eval("lambda solution_str: len(solution_str) > 3  # a note" + note) for note in ("", " more")]
    >>> fingerprint({"f": first}) == fingerprint({"f": again})
    True
    >>> fingerprint({"f": first}) == fingerprint({"f": lambda solution_str: len(solution_str) > 4})
    False
    """
    described = [[name, _Describer(_home(function)).of(function)] for name, function in functions.items()]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _home(function: Any) -> str:
    """The module that a function, or an object that is called like one, was written in."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or type(function).__module__


class _Describer:
    """Turns objects into what JSON holds; code outside the module ``home`` is described by its name alone."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._seen: dict[int, Any] = {}  # the objects too: an id means nothing once its object is gone

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, (bytes, complex)) or value is Ellipsis:
            return repr(value)
        if isinstance(value, tuple):
            return ["tuple", *map(self.of, value)]
        if isinstance(value, frozenset):
            return ["set", *sorted(json.dumps(self.of(item)) for item in value)]
        if isinstance(value, CodeType):
            return [value.co_code.hex(), self.of(value.co_consts), self.of(value.co_names)]
        return self._once(value)

    def _once(self, value: Any) -> Any:
        """What may hold itself is described where it comes up first."""
        if id(value) in self._seen:
            return "seen"
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            return ["map", *([self.of(key), self.of(item)] for key, item in value.items())]
        if isinstance(value, list):
            return ["list", *map(self.of, value)]
        if isinstance(value, set):
            return self.of(frozenset(value))
        if isinstance(value, functools.partial):
            return ["partial", self.of(value.func), self.of(value.args), self.of(value.keywords)]
        if inspect.ismethod(value):
            return ["method", self.of(value.__func__), self.of(value.__self__)]
        return self._named(value)

    def _named(self, value: Any) -> Any:
        """A function, a class, or an instance of one: what it is if it belongs to the home module, else its name."""
        named = value if hasattr(value, "__qualname__") else type(value)
        name = f"{named.__module__}.{named.__qualname__}"
        if named.__module__ != self._home or not (inspect.isfunction(named) or inspect.isclass(named)):
            return name
        if inspect.isfunction(named):
            return ["function", *self._function(named)]
        state = dict(vars(value)) if named is not value and hasattr(value, "__dict__") else {}
        return [name, self.of(_members(named)), self.of(named.__bases__), self.of(state)]

    def _function(self, function: Any) -> list[Any]:
        """Code, defaults, and the values of the closure and of the globals that the code reads."""
        code, around = function.__code__, function.__globals__
        reads = {name: around[name] for name in sorted(_globals_read(code)) if name in around}
        closed = [_content(cell) for cell in function.__closure__ or ()]
        return [self.of(part) for part in (code, function.__defaults__, function.__kwdefaults__, closed, reads)]


def _members(kind: type) -> dict[str, Any]:
    """Methods, properties by their getter, and what else a class holds, but for what Python writes into every one."""
    found = {name: getattr(item, "__func__", getattr(item, "fget", item)) for name, item in vars(kind).items()}
    return {name: item for name, item in found.items() if inspect.isfunction(item) or not name.startswith("__")}


def _globals_read(code: CodeType) -> set[str]:
    """Names of globals in ``code`` and in the functions and comprehensions inside it."""
    found = {one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    return found.union(*(_globals_read(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return "empty"
