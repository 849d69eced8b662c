"""Tasks by name; a task is imported when its name is first used.

The options of ``env`` and ``reward`` that a task reads are the parameters of its class and of its ``load``. A class may
have three optional attributes: ``hub_name``, its default dataset; ``has_test_split``, True if a hub dataset's split
``test`` is held out; ``replies``, True if its scores may have a ``reply``. Importing a built-in task does not import
torch, because options are validated before torch is imported.
"""

from __future__ import annotations

import copyreg
from functools import cache
from inspect import isclass, signature
from pathlib import Path
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.files import file_reference, load_python
from sota_grpo.plugins import Registry
from sota_grpo.rl.task import Task

_OWN = {
    "gsm8k": "questions:GSM8KTask",
    "math": "questions:MathTask",
    "ifeval": "ifeval:IFEvalTask",
    "instructions": "ifeval:InstructionsTask",
    "reasoning": "questions:ReasoningTask",
    "table": "table:TableTask",
    "code": "code:CodeTask",
    "arithmetic": "arithmetic:ArithmeticTask",
    "countdown": "procedural:CountdownTask",
    "reasoning_gym": "reasoning_gym:ReasoningGymTask",
}
_METHODS = ("messages", "score", "gold_response", "read_row")  # required methods


class TaskFileError(UserError, ValueError):
    """``env.dataset=FILE.py:CLASS`` cannot be used as a task; the message says why and what to change."""


class Tasks(Registry[Any]):
    """Task classes by name: built-in tasks, entry points ``sota_grpo.tasks``, and ``FILE.py:CLASS`` of the user.

    Reading a ``FILE.py:CLASS`` executes the file, or raises TaskFileError; iteration and ``len`` leave these names out.
    """

    def __getitem__(self, name: str) -> Any:
        reference = file_reference(name)
        if reference is None:
            return super().__getitem__(name)
        path, member = reference[0].resolve(), reference[1]  # a grading process may have another working directory
        return _class_of_file(path, member, path.read_bytes() if path.is_file() else b"")

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or file_reference(str(name)) is not None


TASKS = Tasks("sota_grpo.tasks", {name: f"{__name__}.{target}" for name, target in _OWN.items()})


@cache
def _class_of_file(path: Path, name: str, content: bytes) -> Any:
    """Execute a user's file, once per ``content``, and return its task class ``name``."""
    members = load_python(path, "env.dataset", TaskFileError)
    kind = members.get(name)
    if not isclass(kind):
        classes = [key for key, value in members.items() if isclass(value) and value.__module__ == members["__name__"]]
        raise TaskFileError(
            f"{path} has no class {name!r}; its classes are {', '.join(classes) or 'none'}: correct the CLASS of "
            "FILE.py:CLASS."
        )
    if missing := [method for method in _METHODS if not callable(getattr(kind, method, None))]:
        raise TaskFileError(
            f"{path}: {name} has no {', '.join(missing)}; derive it from sota_grpo.tasks.dataset.FileTask, or define "
            "these methods."
        )
    # pickled as FILE.py:CLASS, because a user's file cannot be imported as a module
    copyreg.pickle(kind, lambda task: (_blank, (f"{path}:{name}",), vars(task)))
    return kind


def _blank(path: str) -> Any:
    """Return an instance of the class ``FILE.py:CLASS`` without attributes, for unpickling."""
    return object.__new__(TASKS[path])


def task_class(name: str) -> Any:
    """Return the class of a task; ValueError if the name is unknown, UserError if the class cannot be used."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not one of {', '.join(TASKS)}, and not FILE.py:CLASS.")
    return TASKS[name]


def make_task(name: str, **kwargs: Any) -> Task:
    """Return a task with its data: ``load(**kwargs)`` of its :func:`task_class`, or else ``class(**kwargs)``.

    >>> make_task("arithmetic", num_train=4, num_heldout=4).name
    'arithmetic'
    """
    kind = task_class(name)
    return getattr(kind, "load", kind)(**kwargs)


def parameters(name: str, *, bare: bool = False) -> frozenset[str]:
    """Return the parameter names of a task's class (:func:`task_class`) and, unless ``bare``, of its ``load``."""
    kind = task_class(name)
    sources = [kind] if bare else [kind, getattr(kind, "load", kind)]
    return frozenset(parameter for source in sources for parameter in signature(source).parameters)


def make_scorer(
    name: str,
    *,
    answer_format: str | None = None,
    reward_path: str | None = None,
    reward_names: list[str] | None = None,
) -> Task:
    """Return a task to convert rows and score responses; no dataset is read.

    ValueError for an unknown name or answer format; UserError if an option or a reward function cannot be used.

    Args:
        answer_format: where a response gives the answer; None is the task's default.
        reward_path: Python file with the reward functions that replace the task's reward; it is executed.
        reward_names: functions in that file (``builtin``: the task's reward); None: ``compute_score``, or the only one.

    >>> task = make_scorer("gsm8k", answer_format="any")
    >>> task.score("It is 4.", task.read_row({"answer": "4"}, "demo, row 1")).success
    True
    """
    options: dict[str, Any] = {} if answer_format is None else {"answer_format": answer_format}
    if options and "answer_format" not in parameters(name):
        raise UserError(f"the task {name} has no option answer_format; remove it.")
    if reward_path is not None and "builtin" not in (reward_names or ()) and "answer_required" in parameters(name):
        options["answer_required"] = False
    task = task_class(name)(**options)
    if reward_path is None:
        return task
    from sota_grpo.tasks.wrappers import DEFAULT_NAME, with_reward_functions

    return with_reward_functions(task, reward_path, reward_names or [DEFAULT_NAME])
