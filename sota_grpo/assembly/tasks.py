"""The task of a run: its data, its own reward or the user's functions, and what is said between turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sota_grpo.config import Config, reward_names
from sota_grpo.config.validators import PROCEDURAL, READERS
from sota_grpo.errors import UserError
from sota_grpo.rewards.function_file import Functions
from sota_grpo.rl.task import Task
from sota_grpo.tasks import make_bare_task, make_task
from sota_grpo.tasks.dataset import SUFFIXES, DatasetError, load_rows, unique_examples


def task_of(config: Config, functions: Functions | None = None) -> Task:
    """The task that the config names.

    Args:
        functions: reward functions that were passed as objects; in this process they stand for ``reward.path``.

    Raises:
        UserError: its data or its reward functions cannot be used.
    """
    make = _procedural if config.env.dataset in PROCEDURAL else _from_data
    return _with_own_reward(config, _told(lambda: make(config)), functions)


def heldout_task(config: Config) -> Task:
    """The task for an evaluation: of held-out problems in a file alone where no training data are named.

    Otherwise that of :func:`task_of`, whose training data may have to come from the hub. Nobody draws from ``train``.

    Raises:
        UserError: its data or its reward functions cannot be used.
    """
    path = config.env.eval_path
    is_file = path is not None and Path(path).suffix in SUFFIXES
    if not is_file or config.env.dataset_path is not None or config.env.dataset in PROCEDURAL:
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
    return _with_own_reward(config, _told(lambda: make_bare_task(config.env.dataset, **_own_options(config))), None)


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


def _procedural(config: Config) -> Task:
    env = config.env
    size: dict[str, Any] = {} if env.max_samples is None else {"num_train": env.max_samples}
    if env.dataset == "arithmetic":
        return make_task("arithmetic", seed=config.seed, max_steps=env.difficulty, num_heldout=env.num_heldout, **size)
    if env.dataset == "instructions":
        size["eval_path"] = env.eval_path
    return make_task(env.dataset, seed=config.seed, num_heldout=env.num_heldout, **size, **_own_options(config))


def _from_data(config: Config) -> Task:
    env = config.env
    return make_task(
        env.dataset,
        path=env.dataset_path,
        eval_path=env.eval_path,
        num_heldout=env.num_heldout,
        max_samples=env.max_samples,
        seed=config.seed,
        **_own_options(config),
    )


def _own_options(config: Config) -> dict[str, Any]:
    """What this task reads beside its data; null leaves the task's own default."""
    env, reward = config.env, config.reward
    found = {
        "env.system_prompt": env.system_prompt,
        "env.prompt_column": env.prompt_column,
        "env.answer_column": env.answer_column,
        "env.answer_format": env.answer_format,
        "env.format_weight": env.format_weight,
        "reward.correct": reward.correct,
        "reward.wrong": reward.wrong,
        "reward.no_answer": reward.no_answer,
        "reward.instructions_weight": reward.instructions_weight,
        "reward.all_weight": reward.all_weight,
        "reward.thinking_weight": reward.thinking_weight,
        "reward.min_think_words": reward.min_think_words,
    }
    mine = {name: value for name, value in found.items() if env.dataset in READERS[name] and value is not None}
    if env.dataset == "table" and reward.path is not None and "builtin" not in reward_names(config):
        mine["table.answer_required"] = False
    return {name.partition(".")[2]: value for name, value in mine.items()}
