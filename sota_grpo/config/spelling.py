"""Options as they are written: by dotted name, and as overrides on a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def overrides_of(options: Mapping[str, Any]) -> list[str]:
    """Options by dotted name, as they are written on the command line.

    >>> overrides_of({"train.resume": None, "train.export_hf": False, "reward.name": ["near", "brief"]})
    ['train.resume=null', 'train.export_hf=false', 'reward.name=[near,brief]']
    >>> overrides_of({"env.chat_template_kwargs": {"enable_thinking": False, "date": "1 May"}})
    ["env.chat_template_kwargs={enable_thinking:false,date:'1 May'}"]
    >>> overrides_of({"env.tasks": {"chain_sum": 2, "gcd": {"level": 1}}})
    ['env.tasks={chain_sum:2,gcd:{level:1}}']
    >>> overrides_of({"env.mixture": {"sums": {"dataset": "arithmetic", "system_prompt": "Think, then say it."}}})
    ["env.mixture={sums:{dataset:arithmetic,system_prompt:'Think, then say it.'}}"]
    """
    return [f"{name}={_word(value)}" for name, value in options.items()]


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_quoted, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_quoted(item)}' for name, item in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_NO_TEXTS = ("true", "false", "null", "nan", "inf")  # in Hydra's grammar


def _quoted(value: Any) -> str:
    """A value within others; a text that would end there, or be something else, in quotes."""
    if not isinstance(value, str):
        return _word(value)
    if re.fullmatch(r"[\w./@-]*[A-Za-z][\w./@-]*", value) and value.lower() not in _NO_TEXTS:
        return value
    return "'" + re.sub(r"(\\*)('|$)", lambda at: 2 * at[1] + at[2].replace("'", "\\'"), value) + "'"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a nested config by their dotted names; an empty section is a value.

    >>> flat({"seed": 0, "train": {"epochs": 1, "resume": None}})
    {'seed': 0, 'train.epochs': 1, 'train.resume': None}
    """
    values: dict[str, Any] = {}
    for name, value in config.items():
        dotted = f"{prefix}{name}"
        values |= flat(value, dotted + ".") if isinstance(value, Mapping) and value else {dotted: value}
    return values
