"""Tasks by name, imported only when asked for; each says by its class what it is.

A task reads the options whose parameters its class or its ``load`` has (:data:`sota_grpo.config.validators.READERS`).
``hub_name`` is the dataset that it loads where no other is given; ``replies`` says that its scores may answer a
response, ``calls_tools`` that a response may call one. No task imports torch: options are judged before.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from sota_grpo.errors import UserError
from sota_grpo.plugins import Registry
from sota_grpo.rl.task import Task

_OWN = {
    "gsm8k": "gsm8k:GSM8KTask",
    "math": "math:MathTask",
    "ifeval": "ifeval:IFEvalTask",
    "instructions": "instructions:InstructionsTask",
    "reasoning": "reasoning:ReasoningTask",
    "table": "table:TableTask",
    "code": "code:CodeTask",
    "arithmetic": "arithmetic:ArithmeticTask",
    "countdown": "procedural:CountdownTask",
    "calculator": "procedural:CalculatorTask",
    "reasoning_gym": "reasoning_gym:ReasoningGymTask",
}
#: The class of each, by name; packages add theirs as entry points of "sota_grpo.tasks".
TASKS: Registry[Any] = Registry("sota_grpo.tasks", {name: f"{__name__}.{place}" for name, place in _OWN.items()})


def make_task(name: str, **kwargs: Any) -> Task:
    """Build a task with its data: by the ``load`` of its class, or, where problems are made up, by the class itself.

    >>> make_task("arithmetic", num_train=4, num_heldout=4).name
    'arithmetic'
    """
    kind = task_class(name)
    return getattr(kind, "load", kind)(**kwargs)


def parameters(name: str, *, bare: bool = False) -> frozenset[str]:
    """What a task takes: the parameters of its class and, unless ``bare``, of its ``load``."""
    kind = task_class(name)
    loaded = frozenset() if bare else frozenset(signature(getattr(kind, "load", kind)).parameters)
    return frozenset(signature(kind).parameters) | loaded


def make_scorer(
    name: str,
    *,
    answer_format: str | None = None,
    reward_path: str | None = None,
    reward_names: list[str] | None = None,
) -> Task:
    """A task without data, which can read rows and score responses.

    Args:
        name: of the task.
        answer_format: where the answer stands in a response; None is the task's own place.
        reward_path: Python file with reward functions that replace the task's own reward.
        reward_names: the functions in it; None is ``compute_score``.

    >>> task = make_scorer("gsm8k", answer_format="any")
    >>> task.score("It is 4.", task.read_row({"answer": "4"}, "demo, row 1")).success
    True
    """
    options: dict[str, Any] = {} if answer_format is None else {"answer_format": answer_format}
    if options and "answer_format" not in parameters(name):
        raise UserError(f"the task {name} has no answer format to choose.")
    if reward_path is not None and "builtin" not in (reward_names or ()) and "answer_required" in parameters(name):
        options["answer_required"] = False
    task = task_class(name)(**options)
    if reward_path is None:
        return task
    from sota_grpo.tasks.wrappers import DEFAULT_NAME, with_reward_functions

    return with_reward_functions(task, reward_path, reward_names or [DEFAULT_NAME])


def task_class(name: str) -> Any:
    """The class of a task; ``ValueError`` for an unknown name."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is not one of {', '.join(TASKS)}.")
    return TASKS[name]
