"""Several tasks in one run (``env.mixture``): a config per task, made of the run's and of its entry.

An entry names options of one task without their section (``dataset``, ``tools``, ``repeats``), those of ``reward`` and
the token limit with theirs in front (``reward_path``, ``max_tokens``), and its ``weight``.

**Groups are counted, not responses.** A batch has as many groups as it has without group sizes of their own
(:func:`groups_per_step`), and each has its task's number of responses: which tasks a batch is of is a function of the
weights alone, and the bound on the age of tokens counts groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from fractions import Fraction
from operator import attrgetter
from typing import Any, cast

from sota_grpo.config import Config, RewardConfig, responses_per_step
from sota_grpo.config.spelling import changed_options, walk
from sota_grpo.tasks import TASKS, parameters, task_class

READERS = {  # options of some tasks only, by the parameter of a task that reads it; the others refuse them
    **{"env.dataset_path": "path", "env.difficulty": "max_steps"},
    **{f"env.{name}": name for name in ("eval_path", "system_prompt", "prompt_column", "answer_column", "tasks")},
    **{f"env.{name}": name for name in ("answer_format", "format_weight", "sandbox")},
    **{f"reward.{name}": name for name in ("correct", "wrong", "no_answer", "all_weight")},
}
_OFFERS = ("env.tools", "env.environment")  # a task has one of them, so an entry that gives one has no other
_DIALOGS = {name.partition(".")[2]: name for name in (*_OFFERS, "env.max_steps", "env.reasoning")}
#: Options of an entry, by the option of the run that each replaces.
ENTRY_OPTIONS = {
    **{name.partition(".")[2]: name for name in READERS if name.startswith("env.")},
    **{name: f"env.{name}" for name in ("dataset", "max_samples", "num_heldout")},
    **{f"reward_{item.name}": f"reward.{item.name}" for item in fields(RewardConfig) if item.name != "judge"},
    **{f"judge_{name}": f"reward.judge.{name}" for name in ("weight", "rubric", "reference")},
    **{"max_tokens": "inference_model.max_tokens", "repeats": "env.repeats"} | _DIALOGS,
}
_SHORT = {option: name for name, option in ENTRY_OPTIONS.items()}
#: Amounts of responses that are counted in groups.
_IN_GROUPS = ("env.num_envs", "train.dialog_turns_per_batch", "train.optim_batch_size", "train.total_dialog_turns")
WEIGHT = "weight"
_OF_FUNCTIONS = ("reward.name", "reward.weights", "reward.success_above")  # they belong to one reward.path
_NAME = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)


def task_configs(config: Config) -> dict[str, Config]:
    """Return the config of each task of a mixture by name, in the order of the names; else the config of the one task.

    An option that an entry lacks is the run's own where its task reads it. The names and weights of functions belong
    to their ``reward_path``, so an entry with one does not inherit them.

    Raises:
        ValueError: an entry that :func:`a_mixture_names_tasks_and_their_options` refuses.

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
    """Return the weight of each task of a mixture, exactly as written: 0.1 is a tenth."""
    mixture = config.env.mixture or {}
    return {name: Fraction(str(mixture[name].get(WEIGHT, 1))) for name in sorted(mixture)}


def group_sizes(config: Config) -> dict[str, int]:
    """Return the number of responses to a prompt, by task."""
    return _by_task(config, lambda entry: _value(config, entry, "env.repeats"))


def has_own_group_sizes(config: Config) -> bool:
    """Return whether groups of a batch may differ in size from ``env.repeats``."""
    return set(group_sizes(config).values()) != {config.env.repeats}


def groups_per_step(config: Config) -> int:
    """Return the number of prompts of a training step, as if each had ``env.repeats`` responses."""
    return responses_per_step(config) // config.env.repeats


def mean_group_size(config: Config) -> float:
    """Return the number of responses to a prompt, on average over the draws.

    >>> config = Config()
    >>> config.env.mixture = {"hard": {"repeats": 16, "weight": 3}, "easy": {}}
    >>> mean_group_size(config)
    14.0
    """
    sizes = group_sizes(config)
    shares = weights(config) or dict.fromkeys(sizes, Fraction(1))
    return float(sum(shares[name] * size for name, size in sizes.items()) / sum(shares.values()))


def mean_responses_per_step(config: Config) -> int:
    """Return the number of responses of a training step, on average over many where tasks differ, rounded."""
    return round(groups_per_step(config) * mean_group_size(config))


def turns_of_tasks(config: Config) -> dict[str, int]:
    """Return the most turns of a dialog, by task: 1 where a response is not answered."""
    if config.env.mixture is None:
        return {config.env.dataset: config.env.max_steps}
    return _by_task(config, lambda entry: _turns(config, entry))


def longest_response(config: Config) -> int:
    """Return the most tokens that the policy writes in one dialog of any task, all its turns together."""
    limits = _by_task(config, lambda entry: _value(config, entry, "inference_model.max_tokens"))
    return max(turns * limits[name] for name, turns in turns_of_tasks(config).items())


def has_dialogs(config: Config) -> bool:
    """Return whether responses of any task may have several turns."""
    return max(turns_of_tasks(config).values()) > 1


def tasks_named(config: Config) -> str:
    """Return the names of the run's tasks for messages."""
    return config.env.dataset if config.env.mixture is None else " + ".join(sorted(config.env.mixture))


def replies(config: Config) -> bool:
    """Return whether the scores of the task of ``config`` may answer a response."""
    return getattr(task_class(config.env.dataset), "replies", False)


def _by_task(config: Config, value: Callable[[Mapping[str, Any]], int]) -> dict[str, int]:
    """Return ``value`` of each entry of a mixture, in the order of the names; of one task, that of an empty entry."""
    mixture = config.env.mixture
    return (
        {config.env.dataset: value({})} if mixture is None else {name: value(mixture[name]) for name in sorted(mixture)}
    )


def _value(config: Config, entry: Mapping[str, Any], option: str) -> Any:
    """Return the value of an option of :data:`ENTRY_OPTIONS`: the entry's, else the run's where it is inherited."""
    if _SHORT[option] in entry:
        return entry[_SHORT[option]]
    if option in _OFFERS and any(_SHORT[name] in entry for name in _OFFERS):
        return None
    return attrgetter(option)(config)


def _turns(config: Config, entry: Mapping[str, Any]) -> int:
    replier = getattr(task_class(entry.get("dataset", config.env.dataset)), "replies", False)
    answers = replier or any(_value(config, entry, name) for name in (*_OFFERS, "env.reasoning"))
    return _value(config, entry, "env.max_steps") if answers or "max_steps" in entry else 1


def _entry_config(config: Config, entry: Mapping[str, Any]) -> Config:
    from omegaconf import OmegaConf

    entered = {ENTRY_OPTIONS[name]: value for name, value in entry.items() if name != WEIGHT}
    values = {name: value for name, _, value in walk(config)}
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
    if isinstance(size := entered.get("env.repeats"), int) and size > 0 and config.env.repeats > 0:
        options |= {name: values[name] * size // config.env.repeats for name in _IN_GROUPS}  # as many groups
    node = OmegaConf.structured(config)
    for name, value in options.items():
        OmegaConf.update(node, name, value, merge=False)
    return cast(Config, OmegaConf.to_object(node))


def a_mixture_names_tasks_and_their_options(config: Config) -> Iterator[str]:
    from omegaconf.errors import OmegaConfBaseException

    mixture = config.env.mixture
    if mixture is not None and not (mixture and isinstance(mixture, Mapping)):
        yield f"env.mixture={mixture} names no task; give env.mixture={{NAME: {{dataset: ..}}, ..}} or null."
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
        yield f"{prefix}: the name of a task is of letters, digits, _ and -, a letter first; rename it."
    for option in entry:
        if option not in ENTRY_OPTIONS and option != WEIGHT:
            near = get_close_matches(str(option), [*ENTRY_OPTIONS, WEIGHT], n=1)
            there = f"did you mean {near[0]}?" if near else f"there are {', '.join([WEIGHT, *ENTRY_OPTIONS])}."
            yield f"{prefix}.{option} is no option of a task; {there}"
    if "dataset" in entry and str(entry["dataset"]) not in TASKS:
        yield f"{prefix}.dataset={entry['dataset']} is not one of {', '.join(TASKS)}."
    weight = entry.get(WEIGHT, 1)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
        yield f"{prefix}.weight={weight} must be a number above 0."


def unread_options(config: Config) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, value and default of options of the run that no task of its mixture inherits."""
    entries = config.env.mixture
    for name, (value, default) in changed_options(config).items() if entries is not None else ():
        judged = name in READERS or (name in _DIALOGS.values() and name != "env.reasoning")
        if judged and not any(_SHORT[name] not in entry and _reads(config, entry, name) for entry in entries.values()):
            yield name, value, default


def _reads(config: Config, entry: Mapping[str, Any], option: str) -> bool:
    """Return whether an entry without ``option`` uses the run's value."""
    if option in READERS:
        return READERS[option] in parameters(entry.get("dataset", config.env.dataset))
    return _turns(config, entry) > 1 if option == "env.max_steps" else _value(config, entry, option) is not None
