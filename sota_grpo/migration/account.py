"""The account of a translation: every option of a config is carried over, remarked on, or named as left behind."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from sota_grpo.config import SECRETS, Config, walk
from sota_grpo.config.validators import READERS
from sota_grpo.functional.surrogates import SURROGATES

_WIDTH = 118
#: Options that the data and the reward beside the translation stand for.
FILES = (
    *("env.dataset", "env.max_samples", "env.num_heldout", *READERS),
    *("reward.path", "reward.name", "reward.weights", "reward.success_above", "eval.num_samples"),
)


@dataclass(frozen=True)
class Remark:
    """What is to be said of an option that has no exact counterpart."""

    option: str
    value: Any
    text: str


@dataclass(frozen=True)
class Facts:
    """What a translation needs beside the config.

    Args:
        model: path or hub name of the policy.
        name: of the run.
        longest_prompt: tokens.
        num_train: problems that are trained on.
    """

    model: str
    name: str
    longest_prompt: int
    num_train: int


class Account:
    """Gives the options of a config to whoever translates them, and remembers what nobody asked for.

    >>> account = Account(Config())
    >>> account["env.repeats"]
    8
    >>> account.remark("policy.kl_coef", "there is no reference here.")
    >>> "env.repeats" in account.left(), "policy.kl_coef" in account.left(), "optimizer.lr" in account.left()
    (False, False, True)
    """

    def __init__(self, config: Config) -> None:
        self._values = {name: value for name, _, value in walk(config)}
        self._defaults = {name: value for name, _, value in walk()}
        self._carried = set(FILES)
        self._remarks: dict[str, Remark] = {}

    def __getitem__(self, option: str) -> Any:
        """The value of an option, which counts as carried over."""
        self._carried.add(option)
        return self._values[option]

    def carry(self, *options: str) -> None:
        """These count as carried over."""
        self._carried.update(options)

    def loss_of(self, peer: str, option: str, text: str) -> str:
        """What a ``peer`` (``verl``, ``trl``) calls ``algorithm.objective``, by the value of another ``option``.

        Where it has none it is the clipped loss, and where it has none of this value its first, each with a remark,
        ``text`` the latter.

        >>> config = Config(); config.algorithm.objective = "cispo"
        >>> Account(config).loss_of("verl", "algorithm.ratio", "it takes the ratio per token.")
        'cispo'
        """
        value, names = self[option], getattr(SURROGATES[self["algorithm.objective"]], peer)
        if not names:
            self.remark("algorithm.objective", "there is no such loss; this is the clipped one.")
            names = getattr(SURROGATES["clipped"], peer)
        elif value not in names:
            self.remark(option, text)
        return str(names.get(value, next(iter(names.values()))))

    def remark(self, option: str, text: str) -> None:
        """Say why an option means something else there, or nothing."""
        before = self._remarks.get(option)
        joined = text if before is None else f"{before.text} {text}"
        self._remarks[option] = Remark(option, self._values[option], joined)

    @property
    def carried(self) -> set[str]:
        """Options that the translation was made from."""
        return set(self._carried)

    @property
    def remarks(self) -> list[Remark]:
        """In the order of the schema."""
        return [self._remarks[option] for option in self._values if option in self._remarks]

    def left(self) -> list[str]:
        """Options that nobody asked for and nobody remarked on, in the order of the schema."""
        return [option for option in self._values if option not in self._carried and option not in self._remarks]

    def comment(self) -> list[str]:
        """The account as lines without a comment sign: remarks first, then what is left behind."""
        lines: list[str] = []
        if self._remarks:
            lines += ["Not the same there:", *_items(f"{one.option}={one.value}: {one.text}" for one in self.remarks)]
        changed = [option for option in self.left() if self._values[option] != self._defaults[option]]
        if changed:
            lines += ["Left behind (no counterpart, or off), and not at their defaults here:"]
            lines += _items(option if option in SECRETS else f"{option}={self._values[option]}" for option in changed)
        unchanged = [option for option in self.left() if option not in changed]
        if unchanged:
            lines += ["Left behind, at their defaults:", *textwrap.wrap(", ".join(unchanged), _WIDTH)]
        return [*lines, "In the data and reward files beside this one:", *textwrap.wrap(", ".join(FILES), _WIDTH)]


def _items(texts: Any) -> list[str]:
    return [
        line
        for text in texts
        for line in textwrap.wrap(text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    ]
