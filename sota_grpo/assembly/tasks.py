"""The task of a run: its data, its own reward or the user's functions, and what is said between turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sota_grpo.config import Config, reward_names, walk
from sota_grpo.config.validators import READERS
from sota_grpo.errors import UserError
from sota_grpo.rewards.function_file import Functions
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_bare_task, make_task, parameters
from sota_grpo.tasks.dataset import SUFFIXES, DatasetError, load_rows, unique_examples


def task_of(config: Config, functions: Functions | None = None) -> Task:
    """The task that the config names.

    Args:
        functions: reward functions that were passed as objects; in this process they stand for ``reward.path``.

    Raises:
        UserError: its data or its reward functions cannot be used.
    """
    return _with_own_reward(config, _told(lambda: make_task(config.env.dataset, **_keywords(config))), functions)


def heldout_task(config: Config) -> Task:
    """The task for an evaluation: of held-out problems in a file alone where no training data are named.

    Otherwise that of :func:`task_of`, whose training data may have to come from the hub. Nobody draws from ``train``.

    Raises:
        UserError: its data or its reward functions cannot be used.
    """
    path = config.env.eval_path
    is_file = path is not None and Path(path).suffix in SUFFIXES
    if not is_file or config.env.dataset_path is not None or "path" not in parameters(config.env.dataset):
        return task_of(config)
    task = bare_task(config)
    rows = load_rows(config.env.dataset, path=path)
    examples = [task.read_row(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]
    if not all(example.query.strip() for example in examples):
        raise DatasetError(f"{path}: a row of {config.env.dataset} has no question; mend or remove it.")
    task.train = task.heldout = unique_examples(examples)
    return task


def bare_task(config: Config) -> Task:
    """The same without its data, which scoring does not need.

    Raises:
        UserError: its options or its reward functions cannot be used.

    >>> bare_task(Config()).score("#### 4", bare_task(Config()).read_row({"answer": "4"}, "demo, row 1")).success
    True
    """
    return _with_own_reward(config, _told(lambda: make_bare_task(config.env.dataset, **_keywords(config, True))), None)


def _told(make: Callable[[], Task]) -> Task:
    try:
        return make()
    except ValueError as error:  # weights that contradict each other; the sentence says which
        if isinstance(error, UserError):
            raise
        raise UserError(str(error)) from error


def _with_own_reward(config: Config, task: Task, functions: Functions | None) -> Task:
    part = config.reward
    if part.path is not None:
        from sota_grpo.tasks.reward_functions import WithRewardFunctions

        task = WithRewardFunctions(
            task,
            part.path,
            reward_names(config),
            part.weights,
            success_above=part.success_above,
            functions=functions,
        )
    if config.env.reasoning:
        from sota_grpo.tasks.think_again import ThinkAgain

        task = ThinkAgain(task)
    return task


def _keywords(config: Config, bare: bool = False) -> dict[str, Any]:
    """What the task of the config takes, with its data or without; null leaves the task's own default."""
    env = config.env
    values = {option: value for option, _, value in walk(config)}
    given: dict[str, Any] = {parameter: values[option] for option, parameter in READERS.items()}
    given |= {"seed": config.seed, "num_heldout": env.num_heldout}
    given |= {"num_train": env.max_samples, "max_samples": env.max_samples}
    if config.reward.path is not None and "builtin" not in reward_names(config):
        given["answer_required"] = False
    taken = parameters(env.dataset, bare=bare)
    return {name: value for name, value in given.items() if name in taken and value is not None}
