"""Python inputs of :func:`sota_grpo.train`: rows, reward functions, tools and objectives that are objects.

The run writes them to its directory, and its config names them like a user's own files. Before that the config has
:data:`PASSED`, and the run's signature (:mod:`sota_grpo.training.runs`) their digests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from keyword import iskeyword
from pathlib import Path
from typing import Any

from sota_grpo.config import Config
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.files import atomic_file
from sota_grpo.recording.metrics import term_metric
from sota_grpo.recording.run_files import INPUTS
from sota_grpo.rewards.functions import PASSED, PICKLED, Functions, RewardFunctionError, fingerprint, pickled, recognise
from sota_grpo.rl.objective_files import TERMS, surrogate
from sota_grpo.tasks.table import plain_columns
from sota_grpo.tasks.wrappers import BUILTIN
from sota_grpo.text import sentence

_OBJECTIVE = '''"""An objective of a Python caller; its code is in objective.pkl."""

import pickle
from pathlib import Path

(_PASSED,) = pickle.loads(Path(__file__).with_name("objective.pkl").read_bytes()).values()


def {name}({read}):
    return _PASSED({given})
'''


_TRANSFORMS = '''"""Transforms that were passed in Python; what they do is in transforms.pkl."""

import pickle
from pathlib import Path

globals().update(pickle.loads(Path(__file__).with_name("transforms.pkl").read_bytes()))
'''


@dataclass
class Passed:
    """The Python inputs of a run, as they are written."""

    train_rows: bytes | None = None  # JSON lines
    eval_rows: bytes | None = None
    functions: Functions | None = None  # by name, for calls in this process
    reward_file: bytes | None = None  # pickled, for other processes; None: they cannot be pickled
    tools: Functions | None = None  # functions by name, or under its own name the factory of environments
    tools_file: bytes | None = None
    tools_option: str = "tools"  # of env: tools or environment
    objective: PassedModule | None = None
    transforms: PassedModule | None = None
    run_dir: Path | None = None  # the directory of the run, once it has one

    @property
    def signature(self) -> dict[str, dict[str, str]]:
        """The digests of the objects, for the run's signature."""
        tables = {"train": self.train_rows, "eval": self.eval_rows}
        digests = {name: hashlib.sha256(rows).hexdigest() for name, rows in tables.items() if rows}
        if self.functions is not None:
            digests["reward"] = fingerprint(self.functions)
        if self.tools is not None:
            digests[self.tools_option] = fingerprint(self.tools)
        for name, module in (("objective", self.objective), ("transforms", self.transforms)):
            if module is not None:
                digests[name] = fingerprint(module.objects)
        return {"passed": digests} if digests else {}

    def write(self, run_dir: Path, config: Config) -> None:
        """Write the objects to ``run_dir`` and their paths to ``config``."""
        self.run_dir, folder = run_dir, run_dir.resolve() / INPUTS
        if self.train_rows is not None:
            config.env.dataset_path = _write(folder / "train.jsonl", self.train_rows)
        if self.eval_rows is not None:
            config.env.eval_path = _write(folder / "eval.jsonl", self.eval_rows)
        if self.functions is not None:
            config.reward.path = _write(folder / f"reward{PICKLED}", self.reward_file)
        if self.tools is not None:
            path = _write(folder / f"{self.tools_option}{PICKLED}", self.tools_file)
            setattr(config.env, self.tools_option, path)
        if self.objective is not None:
            (config.algorithm.objective,) = self.objective.write(folder)
        if self.transforms is not None:
            config.env.transforms = self.transforms.write(folder)


class PassedModule:
    """Objects that were passed, as two files: their pickle, and a Python file that a config names as ``FILE.py:NAME``.

    So they are loaded like those in a file of the user's. Until the run has a directory, the files are in a temporary
    one.

    Args:
        stem: of the files' names.
        objects: by name.
        text: of the Python file, which reads the pickle next to it.
    """

    def __init__(self, stem: str, objects: Mapping[str, Any], text: str) -> None:
        import cloudpickle

        self.objects, self._stem, self._text = objects, stem, text
        try:
            self._pickle = cloudpickle.dumps(dict(objects))
        except Exception as error:  # whatever the objects that it holds raise
            raise UserError(
                f"the {stem} {', '.join(objects)} cannot be written to the run ({sentence(error)}); make what it needs "
                "inside the function."
            ) from error
        self._scratch = tempfile.TemporaryDirectory(prefix="sota_grpo_")
        self.options = self.write(Path(self._scratch.name))

    def write(self, folder: Path) -> list[str]:
        """Write both files; return ``FILE.py:NAME`` of each object."""
        _write(folder / f"{self._stem}{PICKLED}", self._pickle)
        path = _write(folder / f"{self._stem}.py", self._text.encode())
        return [f"{path}:{name}" for name in self.objects]


def _objective(function: Callable[..., Any]) -> PassedModule:
    """A surrogate as a file whose function has its parameters, so that what is known by reading it holds."""
    surrogate(function)  # its parameters are those of one
    name = _name_of(function)
    name = name if name.isidentifier() and not iskeyword(name) else "objective"
    read = ", ".join(name for name in TERMS if name in signature(function).parameters)
    arguments = ", ".join(f"{name}={name}" for name in read.split(", "))
    return PassedModule("objective", {name: function}, _OBJECTIVE.format(name=name, read=read, given=arguments))


def take(
    config: Config,
    overrides: Sequence[str],
    *,
    reward: Any = None,
    dataset: Any = None,
    eval_dataset: Any = None,
    tools: Sequence[Any] | None = None,
    environment: Any = None,
    objective: Any = None,
    transforms: Sequence[Any] | None = None,
) -> Passed:
    """Convert the objects of :func:`sota_grpo.train`, and set the options of ``config`` for them.

    A path becomes ``env.dataset_path`` or ``env.eval_path``. Unless ``overrides`` name a task, it is ``table``.
    """
    passed, named = Passed(), {override.lstrip("+").partition("=")[0] for override in overrides}
    for argument, option, table in (
        ("eval_dataset", "eval_path", eval_dataset),
        ("dataset", "dataset_path", dataset),
    ):
        if table is None:
            continue
        _require_unset(getattr(config.env, option), f"env.{option}", argument)
        rows = None if isinstance(table, (str, os.PathLike)) else list(_lines(table, argument))
        if rows == []:
            raise UserError(f"{argument} has no rows.")
        setattr(config.env, option, str(table) if rows is None else PASSED)
        setattr(passed, "train_rows" if argument == "dataset" else "eval_rows", rows and b"".join(rows))
    if dataset is not None and "env.dataset" not in named:
        config.env.dataset = "table"
    if reward is not None:
        _take_functions(config, passed, reward)
    if tools is not None or environment is not None:
        _take_tools(config, passed, tools, environment)
    if objective is not None:
        if "algorithm.objective" in named:
            _require_unset(config.algorithm.objective, "algorithm.objective", "objective")
        if not callable(objective):
            raise UserError(
                f"objective is {objective!r}, which is no function; one that has a name is chosen by "
                "overrides=['algorithm.objective=NAME']."
            )
        passed.objective = _objective(objective)
        (config.algorithm.objective,) = passed.objective.options
    if transforms is not None:
        for value in config.env.transforms:
            _require_unset(value.rpartition(":")[0], "env.transforms", "transforms")
        if not isinstance(transforms, (list, tuple)) or not all(map(callable, transforms)):
            raise UserError(
                f"transforms is {transforms!r}; give a list of TorchRL transforms, their classes, or functions without "
                "parameters that return one."
            )
        objects = {f"{_name_of(one)}_{number}": one for number, one in enumerate(transforms)}
        passed.transforms = PassedModule("transforms", objects, _TRANSFORMS)
        config.env.transforms = passed.transforms.options
    return passed


def _require_unset(value: Any, option: str, argument: str) -> None:
    if value is not None and not _was_passed(value):
        raise UserError(f"{argument} is passed, and {option}={value} names another; leave one of them out.")


def _was_passed(path: str | None) -> bool:
    """Whether a resumed run had an object there, which is passed again."""
    return path is not None and Path(path).parent.name == INPUTS


def _lines(table: Any, argument: str) -> Iterable[bytes]:
    rows = table.to_dict("records") if hasattr(table, "iterrows") else table  # a DataFrame iterates over its columns
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        keys = f" with {', '.join(map(repr, rows))}" if isinstance(rows, Mapping) else ""
        raise UserError(
            f"{argument} is a {type(table).__name__}{keys}; give a datasets.Dataset, a list of dicts, a DataFrame or a "
            f"path (of several splits one: {argument}=splits['train'])."
        )
    for number, row in enumerate(rows, start=1):
        place = f"{argument}, row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{place} is a {type(row).__name__}, not a dict of its columns.")
        yield json.dumps(plain_columns(row, place)).encode() + b"\n"


def _take_functions(config: Config, passed: Passed, reward: Any) -> None:
    _require_unset(config.reward.path, "reward.path", "reward")
    if not _was_passed(config.reward.path):
        _require_unset(config.reward.name, "reward.name", "reward")
    if isinstance(reward, Mapping):
        pairs = [(str(name), one) for name, one in reward.items()]
    else:
        pairs = [(_name_of(one), one) for one in (reward if isinstance(reward, (list, tuple)) else [reward])]
    for name, one in pairs:
        if not callable(one) and (name, one) != (BUILTIN, BUILTIN):
            raise UserError(
                f"reward holds {one!r}, which is no function; give a function of verl's or TRL's form, a list of them, "
                "or a dict of them by name (a file: overrides=['reward.path=FILE'])."
            )
    names = [name for name, _ in pairs]
    for name in names:
        try:
            term_metric(name)
        except ValueError as error:
            raise UserError(str(error)) from error
    if len(set(names)) < len(names) or not names:
        raise UserError(f"reward has the names {names}; give different ones with a dict, reward={{'name': function}}.")
    passed.functions = {name: one for name, one in pairs if one != BUILTIN}
    for name, function in passed.functions.items():
        recognise(function, name, "reward")
    try:
        passed.reward_file = pickled(passed.functions)
    except RewardFunctionError:
        if config.env.reward_workers:
            raise
    config.reward.path, config.reward.name = PASSED, names if len(names) > 1 else names[0]


def _take_tools(config: Config, passed: Passed, tools: Any, environment: Any) -> None:
    if tools is not None and environment is not None:
        raise UserError("tools and environment are both passed: make the functions methods of the environment.")
    option, value = ("tools", tools) if environment is None else ("environment", [environment])
    _require_unset(getattr(config.env, option), f"env.{option}", option)
    if not isinstance(value, (list, tuple)) or not value or not all(map(callable, value)):
        kind = "a list of functions" if option == "tools" else "a class, or a function that makes objects"
        raise UserError(f"{option} is {tools if environment is None else environment!r}; give {kind}.")
    passed.tools, passed.tools_option = {_name_of(one): one for one in value}, option
    if len(passed.tools) < len(value):
        raise UserError(f"tools has the names {[*map(_name_of, value)]}; rename one of those that are alike.")
    passed.tools_file = pickled(passed.tools, "tool", "make what it needs inside the function")
    setattr(config.env, option, PASSED)


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, str):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name


def _write(path: Path, content: bytes | None) -> str:
    """Write ``content``, or without any remove the file; return the path for the config."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            with atomic_file(path) as temporary:
                temporary.write_bytes(content)
    except OSError as error:
        raise RunFailed(
            f"{path} cannot be written ({error.strerror}); free space there, or choose another run_dir."
        ) from error
    return str(path)
