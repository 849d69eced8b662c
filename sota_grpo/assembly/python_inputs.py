"""Python objects passed to :func:`sota_grpo.train`: rows, reward functions, tools, objectives and transforms.

The run writes them to its directory, and its config has the paths of these files. Until then the config has
:data:`PASSED` in place of the paths. The run's signature (:mod:`sota_grpo.training.runs`) has the objects' digests.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from keyword import iskeyword
from operator import attrgetter
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import set_option
from sota_grpo.config import Config
from sota_grpo.errors import RunFailed, UserError, writing
from sota_grpo.files import atomic_file
from sota_grpo.recording.metrics import term_metric
from sota_grpo.recording.run_files import INPUTS
from sota_grpo.rewards.functions import PASSED, PICKLED, Functions, RewardFunctionError, fingerprint, pickled, recognise
from sota_grpo.rl.custom_objectives import TERMS, surrogate
from sota_grpo.tasks.table import plain_columns
from sota_grpo.tasks.wrappers import BUILTIN

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
class PythonInput:
    """An object passed to :func:`sota_grpo.train`, with its files in the run directory."""

    option: str  # set to the file's path or FILE.py:NAME, such as reward.path
    digest: str  # of the object
    files: Mapping[str, bytes | None]  # content by name; None: the object cannot be pickled
    value: str | list[str]  # of the option, relative to the folder of the files

    def write(self, folder: Path, config: Config) -> None:
        """Write the files (removing a file whose content is None), and set the option in ``config``."""
        for name, content in self.files.items():
            path = folder / name
            with writing(path, "free disk space, or make its folder writable", RunFailed):
                path.parent.mkdir(parents=True, exist_ok=True)
                if content is None:
                    path.unlink(missing_ok=True)
                else:
                    with atomic_file(path) as temporary:
                        temporary.write_bytes(content)
        paths = [f"{folder / path}" for path in ([self.value] if isinstance(self.value, str) else self.value)]
        set_option(config, self.option, paths[0] if isinstance(self.value, str) else paths)


@dataclass
class PythonInputs:
    """All objects passed to :func:`sota_grpo.train`.

    An objective is written as a pickle and a Python file that reads it; the config names it as ``FILE.py:NAME``.
    Transforms are written in the same way. Until the run has a directory, these files are in a temporary one.
    """

    inputs: dict[str, PythonInput] = field(default_factory=dict)  # by their names in the run's signature
    functions: Functions | None = None  # the reward functions by name, to be called in this process
    run_dir: Path | None = None  # None until the run has a directory
    scratch: tempfile.TemporaryDirectory[str] | None = None
    stopped: bool = False  # set by the run: an interrupt came while it trained

    @property
    def signature(self) -> dict[str, dict[str, str]]:
        """The inputs' entry in the run signature, ``{"passed": {name: digest}}``; empty without inputs."""
        digests = {name: item.digest for name, item in self.inputs.items()}
        return {"passed": digests} if digests else {}

    def write(self, run_dir: Path, config: Config) -> None:
        """Write the inputs that can be pickled to ``inputs/`` in ``run_dir``; set the options of all to their paths."""
        self.run_dir = run_dir
        for item in self.inputs.values():
            item.write(run_dir.resolve() / INPUTS, config)

    def add(self, config: Config, option: str, file: str, content: bytes | None, digest: str) -> None:
        """Add an object that has one file, and set its ``option`` in ``config`` to :data:`PASSED`."""
        self.inputs[file.partition(".")[0]] = PythonInput(option, digest, {file: content}, file)
        set_option(config, option, PASSED)

    def add_module(self, config: Config, option: str, name: str, objects: Functions, text: str) -> None:
        """Add ``objects`` as the input ``name``, and set ``option`` in ``config`` to their ``FILE.py:NAME``.

        The file holds ``text``, which reads a pickle in the same temporary folder. UserError if pickling fails.
        """
        pickle = pickled(objects, name, "make what it needs inside the function")
        names = [f"{name}.py:{one}" for one in objects]
        files = {f"{name}{PICKLED}": pickle, f"{name}.py": text.encode()}
        item = PythonInput(option, fingerprint(objects), files, names if name == "transforms" else names[0])
        self.inputs[name] = item
        self.scratch = self.scratch or tempfile.TemporaryDirectory(prefix="sota_grpo_")
        item.write(Path(self.scratch.name), config)


def take(config: Config, overrides: Sequence[str], **objects: Any) -> PythonInputs:
    """Convert the object arguments of :func:`sota_grpo.train` to inputs, and set their options in ``config``.

    A ``dataset`` or ``eval_dataset`` that is a path becomes ``env.dataset_path`` or ``env.eval_path``. With ``dataset``
    the task is ``table``, unless ``overrides`` set ``env.dataset``. UserError if an argument cannot be used.
    """
    inputs, named = PythonInputs(), {override.lstrip("+").partition("=")[0] for override in overrides}
    for argument, option, file in (
        ("eval_dataset", "env.eval_path", "eval.jsonl"),
        ("dataset", "env.dataset_path", "train.jsonl"),
    ):
        if (table := objects.get(argument)) is None:
            continue
        _require_unset(attrgetter(option)(config), option, argument)
        if isinstance(table, (str, os.PathLike)):
            set_option(config, option, str(table))
            continue
        rows = b"".join(_lines(table, argument))
        if not rows:
            raise UserError(f"{argument} has no rows; pass at least one.")
        inputs.add(config, option, file, rows, hashlib.sha256(rows).hexdigest())
    if objects.get("dataset") is not None and "env.dataset" not in named:
        config.env.dataset = "table"
    if objects.get("reward") is not None:
        _take_functions(config, inputs, objects["reward"])
    _take_tools(config, inputs, objects.get("tools"), objects.get("environment"))
    objective, transforms = objects.get("objective"), objects.get("transforms")
    if objective is not None:
        if "algorithm.objective" in named:
            _require_unset(config.algorithm.objective, "algorithm.objective", "objective")
        if not callable(objective):
            raise UserError(
                f"objective is {objective!r}, not a function; to choose a built-in objective, use "
                "overrides=['algorithm.objective=NAME']."
            )
        surrogate(objective)  # its parameters are those of one; the file has them, so that they are known by reading it
        name = _name_of(objective)
        name = name if name.isidentifier() and not iskeyword(name) else "objective"
        read = [term for term in TERMS if term in signature(objective).parameters]
        text = _OBJECTIVE.format(name=name, read=", ".join(read), given=", ".join(f"{one}={one}" for one in read))
        inputs.add_module(config, "algorithm.objective", "objective", {name: objective}, text)
    if transforms is not None:
        for value in config.env.transforms:
            _require_unset(value.rpartition(":")[0], "env.transforms", "transforms")
        if not isinstance(transforms, (list, tuple)) or not all(map(callable, transforms)):
            raise UserError(
                f"transforms is {transforms!r}; give a list of TorchRL transforms, their classes, or functions without "
                "parameters that return one."
            )
        objects = {f"{_name_of(one)}_{number}": one for number, one in enumerate(transforms)}
        inputs.add_module(config, "env.transforms", "transforms", objects, _TRANSFORMS)
    return inputs


def _require_unset(value: Any, option: str, argument: str) -> None:
    if value is not None and not _is_python_input(value):
        raise UserError(f"{argument} is passed, but {option}={value} is set too; drop one.")


def _is_python_input(path: str | None) -> bool:
    """Whether ``path`` is the file of an object that was passed to the run that is being resumed."""
    return path is not None and Path(path).parent.name == INPUTS


def _lines(table: Any, argument: str) -> Iterable[bytes]:
    rows = table.to_dict("records") if hasattr(table, "iterrows") else table  # a DataFrame iterates over its columns
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        keys = f" with {', '.join(map(repr, rows))}" if isinstance(rows, Mapping) else ""
        raise UserError(
            f"{argument} is a {type(table).__name__}{keys}; give a datasets.Dataset, a list of dicts, a DataFrame or a "
            f"path (of a DatasetDict one split: {argument}=splits['train'])."
        )
    for number, row in enumerate(rows, start=1):
        location = f"{argument}, row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{location} is a {type(row).__name__}, not a dict of its columns; pass such a dict.")
        yield json.dumps(plain_columns(row, location)).encode() + b"\n"


def _take_functions(config: Config, inputs: PythonInputs, reward: Any) -> None:
    _require_unset(config.reward.path, "reward.path", "reward")
    if not _is_python_input(config.reward.path):
        _require_unset(config.reward.name, "reward.name", "reward")
    if isinstance(reward, Mapping):
        pairs = [(str(name), one) for name, one in reward.items()]
    else:
        pairs = [(_name_of(one), one) for one in (reward if isinstance(reward, (list, tuple)) else [reward])]
    for name, one in pairs:
        if not callable(one) and (name, one) != (BUILTIN, BUILTIN):
            raise UserError(
                f"reward: {one!r} is not a function; give a function of verl's or TRL's form, a list of those, "
                "or a dict of them by name (for a file use overrides=['reward.path=FILE'])."
            )
    names = [name for name, _ in pairs]
    for name in names:
        try:
            term_metric(name)
        except ValueError as error:
            raise UserError(str(error)) from error
    if not names:
        raise UserError(f"reward={reward!r} has no function; pass one or more.")
    if len(set(names)) < len(names):
        fix = "name the functions with a dict, reward={'name': function}"
        raise UserError(f"reward's names {names} are not distinct; {fix}.")
    inputs.functions = functions = {name: one for name, one in pairs if one != BUILTIN}
    for name, function in functions.items():
        recognise(function, name, "reward")
    content = None
    try:
        content = pickled(functions)
    except RewardFunctionError:
        if config.env.reward_workers:
            raise
    inputs.add(config, "reward.path", f"reward{PICKLED}", content, fingerprint(functions))
    config.reward.name = names if len(names) > 1 else names[0]


def _take_tools(config: Config, inputs: PythonInputs, tools: Any, environment: Any) -> None:
    if tools is None and environment is None:
        return
    if tools is not None and environment is not None:
        raise UserError("tools and environment are both passed; make the tools methods of the environment.")
    option, value = ("tools", tools) if environment is None else ("environment", [environment])
    _require_unset(getattr(config.env, option), f"env.{option}", option)
    if not isinstance(value, (list, tuple)) or not value or not all(map(callable, value)):
        kind = "a list of functions" if option == "tools" else "a class, or a function that makes objects"
        raise UserError(f"{option} is {tools if environment is None else environment!r}; give {kind}.")
    functions = {_name_of(tool): tool for tool in value}
    if len(functions) < len(value):
        raise UserError(f"tools has the names {[*map(_name_of, value)]}; rename one of those that are equal.")
    content = pickled(functions, "tool", "make what it needs inside the function")
    inputs.add(config, f"env.{option}", f"{option}{PICKLED}", content, fingerprint(functions))


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, str):
        return function
    name = getattr(function, "__name__", type(function).__name__)
    return "reward" if name == "<lambda>" else name
