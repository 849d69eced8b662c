"""Several tasks in one run (``env.mixture``): each entry's options, over the run's, give the config of one task.

An entry has a ``weight`` and options of its task: those of ``env`` without the section (``dataset``, ``tools``,
``max_steps``), those of ``reward`` with a prefix (``reward_path``, ``judge_weight``), and ``max_tokens``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from fractions import Fraction
from operator import attrgetter
from typing import Any, cast

from sota_grpo.config import Config, RewardConfig
from sota_grpo.config.spelling import changed_options, walk
from sota_grpo.tasks import TASKS, parameters, task_class

READERS = {  # {option that only some tasks read: parameter of the task class}; other tasks refuse the option
    **{"env.dataset_path": "path", "env.difficulty": "max_steps"},
    **{f"env.{name}": name for name in ("eval_path", "system_prompt", "prompt_column", "answer_column", "tasks")},
    **{f"env.{name}": name for name in ("answer_format", "format_weight", "sandbox")},
    **{f"reward.{name}": name for name in ("correct", "wrong", "no_answer", "all_weight")},
}
#: Options of which a task has at most one: an entry that sets one inherits none.
_OFFERS = ("env.tools", "env.environment", "env.agent")
_DIALOGS = {name.partition(".")[2]: name for name in (*_OFFERS, "env.max_steps", "env.reasoning")}
#: {name in an entry: option of the run that it replaces for its task}.
ENTRY_OPTIONS = {
    **{name.partition(".")[2]: name for name in READERS if name.startswith("env.")},
    **{name: f"env.{name}" for name in ("dataset", "max_samples", "num_heldout")},
    **{f"reward_{item.name}": f"reward.{item.name}" for item in fields(RewardConfig) if item.name != "judge"},
    **{f"judge_{name}": f"reward.judge.{name}" for name in ("weight", "rubric", "reference")},
    **{"max_tokens": "inference_model.max_tokens"} | _DIALOGS,
}
_SHORT = {option: name for name, option in ENTRY_OPTIONS.items()}
WEIGHT = "weight"
_OF_FUNCTIONS = ("reward.name", "reward.weights", "reward.success_above")  # apply to one reward.path
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def task_configs(config: Config) -> dict[str, Config]:
    """Return {task: its config}, sorted by name, of a valid mixture; without one, only the run's task and config.

    An entry inherits the run's options, except those of other tasks. One with a ``reward_path`` does not inherit
    ``reward.name``, ``reward.weights`` and ``reward.success_above``; one with tools, environment or agent inherits none
    of these three; one with ``judge_weight: 0`` has no judge. ``env.max_steps`` is that of :func:`turns_of_tasks`.

    >>> config = Config()
    >>> config.env.mixture = {"maths": {"dataset_path": "a.jsonl"}, "easy": {"dataset": "arithmetic", "difficulty": 1}}
    >>> [(name, each.env.dataset, each.env.difficulty) for name, each in task_configs(config).items()]
    [('easy', 'arithmetic', 1), ('maths', 'gsm8k', 4)]
    """
    mixture = config.env.mixture
    if mixture is None:
        return {config.env.dataset: config}
    return {name: _entry_config(config, mixture[name]) for name in sorted(mixture)}


def weights(config: Config) -> dict[str, Fraction]:
    """Return {task: weight} of the mixture as exact fractions (0.1 is 1/10); empty without a mixture."""
    mixture = config.env.mixture or {}
    return {name: Fraction(str(mixture[name].get(WEIGHT, 1))) for name in sorted(mixture)}


def groups_per_step(config: Config) -> int:
    """Return the number of prompt groups in a training step."""
    return config.train.dialog_turns_per_batch // config.env.repeats


def turns_of_tasks(config: Config) -> dict[str, int]:
    """Return {task: most turns of a dialog}; in a mixture 1 without replies or tools, unless its entry sets it."""
    if config.env.mixture is None:
        return {config.env.dataset: config.env.max_steps}
    return {name: _turns(config, config.env.mixture[name]) for name in sorted(config.env.mixture)}


def longest_response(config: Config) -> int:
    """Return the most tokens that the policy can generate in one dialog of any task, summed over its turns."""
    entries, turns = config.env.mixture or {config.env.dataset: {}}, turns_of_tasks(config)
    return max(turns[name] * _value(config, entry, "inference_model.max_tokens") for name, entry in entries.items())


def has_dialogs(config: Config) -> bool:
    """Return whether any task has dialogs of several turns."""
    return max(turns_of_tasks(config).values()) > 1


def has_agents(config: Config) -> bool:
    """Return whether any task has an agent."""
    entries = config.env.mixture or {config.env.dataset: {}}
    return any(_value(config, entry, "env.agent") is not None for entry in entries.values())


def tasks_named(config: Config) -> str:
    """Return the names of the run's tasks joined by `` + ``."""
    return config.env.dataset if config.env.mixture is None else " + ".join(sorted(config.env.mixture))


def replies(task: str) -> bool:
    """Return whether the task (a value of ``env.dataset``) answers responses: its scores may contain a reply."""
    return getattr(task_class(task), "replies", False)


def _value(config: Config, entry: Mapping[str, Any], option: str) -> Any:
    """Return the value of ``option`` for an entry's task: the entry's, else the run's if it is inherited, else None."""
    if _SHORT[option] in entry:
        return entry[_SHORT[option]]
    if option in _OFFERS and any(_SHORT[name] in entry for name in _OFFERS):
        return None
    return attrgetter(option)(config)


def _turns(config: Config, entry: Mapping[str, Any]) -> int:
    answers = replies(entry.get("dataset", config.env.dataset))
    answers = answers or any(_value(config, entry, name) for name in (*_OFFERS, "env.reasoning"))
    return _value(config, entry, "env.max_steps") if answers or "max_steps" in entry else 1


def _entry_config(config: Config, entry: Mapping[str, Any]) -> Config:
    from omegaconf import OmegaConf

    entered = {ENTRY_OPTIONS[name]: value for name, value in entry.items() if name != WEIGHT}
    defaults = {name: value for name, _, value in walk()}
    read = parameters(entered.get("env.dataset", config.env.dataset))
    unread = [name for name, parameter in READERS.items() if parameter not in read]
    unread += _OF_FUNCTIONS if "reward.path" in entered else []
    offers = {name: _value(config, entry, name) for name in _OFFERS}
    if entered.get("reward.judge.weight") == 0:  # the judge is not asked about this task
        entered = {name: value for name, value in entered.items() if not name.startswith("reward.judge.")}
        unread += [name for name in defaults if name.startswith("reward.judge.")]
    options = {name: defaults[name] for name in unread} | offers | entered | {"env.mixture": None}
    options["env.max_steps"] = _turns(config, entry)
    node = OmegaConf.structured(config)
    for name, value in options.items():
        OmegaConf.update(node, name, value, merge=False)
    return cast(Config, OmegaConf.to_object(node))


def a_mixture_names_tasks_and_their_options(config: Config) -> Iterator[str]:
    from omegaconf.errors import OmegaConfBaseException

    mixture = config.env.mixture
    if mixture is not None and not (mixture and isinstance(mixture, Mapping)):
        yield f"env.mixture={mixture} has no task; give env.mixture={{NAME: {{dataset: ..}}, ..}} or null."
        return
    for name, entry in (mixture or {}).items():
        if (fault := next(_faults(f"env.mixture.{name}", name, entry), None)) is not None:
            yield fault
            continue
        try:
            _entry_config(config, entry)
        except (OmegaConfBaseException, ValueError) as error:
            reason = " ".join(str(error).partition("full_key")[0].split()).rstrip(".")
            yield f"env.mixture.{name}: {reason}."


def _faults(prefix: str, name: Any, entry: Any) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"{prefix}={entry} is no mapping of options; give {{dataset: .., weight: ..}}."
        return
    if not _NAME.fullmatch(str(name)):
        yield f"{prefix}: the name of a task must be of letters, digits, _ and -, a letter or _ first; rename it."
    if name == "accuracy":
        yield f"{prefix} has the name of the accuracy on all tasks; rename it."
    for option in entry:
        if option not in ENTRY_OPTIONS and option != WEIGHT:
            near = get_close_matches(str(option), [*ENTRY_OPTIONS, WEIGHT], n=1)
            there = f"did you mean {near[0]}?" if near else f"use {', '.join([WEIGHT, *ENTRY_OPTIONS])}."
            yield f"{prefix}.{option} is no option of an entry; {there}"
    if "dataset" in entry and str(entry["dataset"]) not in TASKS:
        yield f"{prefix}.dataset={entry['dataset']} is not one of {', '.join(TASKS)}."
    weight = entry.get(WEIGHT, 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        yield f"{prefix}.weight={weight} must be a number above 0."


def unread_options(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield (name, default) of each changed option of a task that no task of the run's mixture reads."""
    entries = config.env.mixture
    for name, (_, default) in changed_options(config).items() if entries is not None else ():
        judged = name in READERS or (name in _DIALOGS.values() and name != "env.reasoning")
        if judged and not any(_SHORT[name] not in entry and _reads(config, entry, name) for entry in entries.values()):
            yield name, default


def _reads(config: Config, entry: Mapping[str, Any], option: str) -> bool:
    """Return whether the task of an entry that lacks ``option`` reads the run's value."""
    if option in READERS:
        return READERS[option] in parameters(entry.get("dataset", config.env.dataset))
    return _turns(config, entry) > 1 if option == "env.max_steps" else _value(config, entry, option) is not None
