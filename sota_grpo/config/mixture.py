"""Several tasks in one run (``env.mixture``): a config per task, made of the run's own and what the entry gives.

An entry names options of one task without their section (``dataset``, ``system_prompt``), those of ``reward`` and the
token limit with theirs in front (``reward_path``, ``max_tokens``), and its ``weight``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from sota_grpo.config import Config, RewardConfig, changed_options, walk
from sota_grpo.tasks import TASKS, parameters, task_class

READERS = {  # options of some tasks only, by the parameter of a task that reads it; the others refuse them
    **{"env.dataset_path": "path", "env.difficulty": "max_steps"},
    **{f"env.{name}": name for name in ("eval_path", "system_prompt", "prompt_column", "answer_column", "tasks")},
    **{f"env.{name}": name for name in ("answer_format", "format_weight", "sandbox", "level_column")},
    **{f"reward.{name}": name for name in ("correct", "wrong", "no_answer", "instructions_weight", "all_weight")},
    **{f"reward.{name}": name for name in ("thinking_weight", "min_think_words")},
}
#: What an entry may give, by the option of the run that it stands for.
ENTRY_OPTIONS = {
    **{name.partition(".")[2]: name for name in READERS if name.startswith("env.")},
    **{name: f"env.{name}" for name in ("dataset", "max_samples", "num_heldout")},
    **{f"reward_{item.name}": f"reward.{item.name}" for item in fields(RewardConfig)},
    "max_tokens": "inference_model.max_tokens",
}
WEIGHT = "weight"
_OF_FUNCTIONS = ("reward.name", "reward.weights", "reward.success_above")  # they belong to one reward.path
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def task_configs(config: Config) -> dict[str, Config]:
    """By its name, in the order of the names, the config of each task of a mixture; else the config under its task's.

    What an entry does not give is the run's own where its task reads it. An entry with a ``reward_path`` has functions
    of its own, so their names and weights are not the run's either.

    Raises:
        ValueError: an entry that :func:`entry_faults` has a sentence on.

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
    """Of each task of a mixture, exactly as it is written: 0.1 is a tenth.

    >>> config = Config()
    >>> config.env.mixture = {"a": {"weight": 0.1}, "b": {}}
    >>> weights(config)
    {'a': Fraction(1, 10), 'b': Fraction(1, 1)}
    """
    mixture = config.env.mixture or {}
    return {name: Fraction(str(mixture[name].get(WEIGHT, 1))) for name in sorted(mixture)}


def tasks_named(config: Config) -> str:
    """The run's tasks, for people.

    >>> tasks_named(Config())
    'gsm8k'
    """
    return config.env.dataset if config.env.mixture is None else " + ".join(sorted(config.env.mixture))


def replies(config: Config) -> bool:
    """Whether the scores of the task of ``config`` may answer a response."""
    return getattr(task_class(config.env.dataset), "replies", False)


def _entry_config(config: Config, entry: Mapping[str, Any]) -> Config:
    from omegaconf import OmegaConf

    given = {ENTRY_OPTIONS[name]: value for name, value in entry.items() if name != WEIGHT}
    defaults = {name: value for name, _, value in walk()}
    read = parameters(given.get("env.dataset", config.env.dataset))
    unread = [name for name, parameter in READERS.items() if parameter not in read]
    unread += _OF_FUNCTIONS if "reward.path" in given else []
    options = {name: defaults[name] for name in unread} | given | {"env.mixture": None}
    node = OmegaConf.structured(config)
    for name, value in options.items():
        OmegaConf.update(node, name, value, merge=False)
    made = OmegaConf.to_object(node)
    assert isinstance(made, Config)
    env = made.env
    if not (env.reasoning or env.tools or env.environment or replies(made)):
        env.max_steps = 1  # nobody answers its responses
    return made


def entry_faults(config: Config) -> Iterator[str]:
    """What is wrong with the entries of ``env.mixture`` by themselves, in sentences."""
    from omegaconf.errors import OmegaConfBaseException

    mixture = config.env.mixture
    if mixture is not None and not (mixture and isinstance(mixture, Mapping)):
        yield f"env.mixture={mixture} names no task; give env.mixture={{NAME: {{dataset: ..}}, ..}} or null."
        return
    for name, entry in (mixture or {}).items():
        before = None if not isinstance(entry, Mapping) else next(_faults(f"env.mixture.{name}", name, entry), None)
        if not isinstance(entry, Mapping):
            before = f"env.mixture.{name}={entry} is no mapping of options; give {{dataset: .., weight: ..}}."
        if before is not None:
            yield before
            continue
        try:
            _entry_config(config, entry)
        except (OmegaConfBaseException, ValueError) as error:
            reason = " ".join(str(error).partition("full_key")[0].split()).rstrip(".")
            yield f"env.mixture.{name}: {reason}."


def _faults(place: str, name: Any, entry: Mapping[str, Any]) -> Iterator[str]:
    if not _NAME.fullmatch(str(name)):
        yield f"{place}: the name of a task is of letters, digits, _ and -, a letter first; rename it."
    for option in entry:
        if option not in ENTRY_OPTIONS and option != WEIGHT:
            near = get_close_matches(str(option), [*ENTRY_OPTIONS, WEIGHT], n=1)
            there = f"did you mean {near[0]}?" if near else f"there are {', '.join([WEIGHT, *ENTRY_OPTIONS])}."
            yield f"{place}.{option} is no option of a task; {there}"
    if "dataset" in entry and str(entry["dataset"]) not in TASKS:
        yield f"{place}.dataset={entry['dataset']} is not one of {', '.join(TASKS)}."
    weight = entry.get(WEIGHT, 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        yield f"{place}.weight={weight} must be a number above 0."


def unread_options(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Name, value and default of options of the run that no task of its mixture reads, or that each gives itself."""
    entries = config.env.mixture
    if entries is None:
        return
    short = {option: name for name, option in ENTRY_OPTIONS.items()}
    for name, (value, default) in changed_options(config).items():
        parameter = READERS.get(name)
        if parameter is not None and not any(
            short[name] not in entry and parameter in parameters(entry.get("dataset", config.env.dataset))
            for entry in entries.values()
        ):
            yield name, value, default
