"""What a run takes along to verl: its options, each accounted for, its data, and its grader.

An exported ``reward.py`` calls the grader with the ``config.yaml`` beside it, so that a run that has moved is rewarded
as before; ``query``, ``answer`` and ``extra`` in the exported data hold the example.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sota_grpo.assembly.compose import load_config
from sota_grpo.assembly.sampling import task_of
from sota_grpo.config import AlgorithmConfig, Config
from sota_grpo.config.memory_rules import SHARED
from sota_grpo.config.spelling import walk
from sota_grpo.config.validators import READERS
from sota_grpo.errors import UserError
from sota_grpo.functional.surrogates import SURROGATES
from sota_grpo.rewards.grading import guarded_scores
from sota_grpo.rl.objective_files import surrogate
from sota_grpo.rl.records import Example, total_reward
from sota_grpo.rl.task import Task

_WIDTH = 118
_item = textwrap.TextWrapper(_WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
#: Options that the data and the reward beside the translation stand for.
FILES = (
    *("env.dataset", "env.max_samples", "env.num_heldout", *READERS),
    *("reward.path", "reward.name", "reward.weights", "reward.success_above", "eval.num_samples"),
)


@dataclass(frozen=True)
class Facts:
    """What a translation needs beside the config."""

    model: str  # path or hub name of the policy
    name: str  # of the run
    longest_prompt: int  # tokens
    num_train: int  # problems that are trained on


class Account:
    """The options of a config as they are translated: each is carried over, noted, or left behind.

    Attributes:
        carried: options that the translation was made from.
        notes: why others mean something else there, or nothing.

    >>> account = Account(Config())
    >>> account["env.repeats"]
    8
    >>> account.note("policy.kl_coef", "there is no reference here.")
    >>> "env.repeats" in account.left(), "policy.kl_coef" in account.left(), "optimizer.lr" in account.left()
    (False, False, True)
    """

    def __init__(self, config: Config) -> None:
        self._values = {name: value for name, _, value in walk(config)}
        self._defaults = {name: value for name, _, value in walk()}
        self.notes: dict[str, str] = {}
        self.carried = set(FILES)

    def __getitem__(self, option: str) -> Any:
        """The value of an option, which counts as carried over."""
        self.carried.add(option)
        return self._values[option]

    def carry(self, *options: str) -> None:
        """These count as carried over."""
        self.carried.update(options)

    def num_devices(self, role: str) -> int:
        """Devices of ``train_model`` or ``inference_model``: those that are listed, else so many, else one."""
        devices, count = self[f"{role}.devices"], self[f"{role}.num_devices"]
        if count == SHARED:
            return self.num_devices("train_model")
        return len(devices) if devices else count or 1

    def loss(self) -> str:
        """What verl calls ``algorithm.objective`` under ``algorithm.ratio``.

        Where it has none it is the clipped loss, and where it has none of this ratio that of the ratio per token, each
        with a note.

        >>> config = Config(); config.algorithm.objective = "cispo"
        >>> Account(config).loss()
        'cispo'
        """
        ratio, name = self["algorithm.ratio"], self["algorithm.objective"]
        names = surrogate(name).verl
        if not names:
            self.note("algorithm.objective", "there is no such loss; this is the clipped one.")
            names = SURROGATES["clipped"].verl
        elif ratio not in names:
            self.note("algorithm.ratio", f"verl's {name} takes the ratio per token.")
        return names.get(ratio, names["token"])

    def clips(self) -> tuple[float, float]:
        """``clip_low`` and ``clip_high`` for the loss that :meth:`loss` names, which may be the clipped one instead.

        >>> config = Config(); config.algorithm.objective = "vespo"; config.algorithm.clip_low = 0.4
        >>> Account(config).clips()
        (0.2, 0.2)
        """
        low, high = self["algorithm.clip_low"], self["algorithm.clip_high"]
        name = self["algorithm.objective"]
        if name in SURROGATES and not SURROGATES[name].verl:
            default = AlgorithmConfig()
            if (low, high) != (default.clip_low, default.clip_high):
                self.note("algorithm.clip_low", f"of {name}; the clipped loss has its own default.")
                self.note("algorithm.clip_high", f"of {name}; the clipped loss has its own default.")
            return default.clip_low, default.clip_high
        return low, high

    def note(self, option: str, text: str) -> None:
        """Add to what is said of an option."""
        self.notes[option] = " ".join(filter(None, [self.notes.get(option), text]))

    def left(self) -> list[str]:
        """Options that were neither carried over nor noted, in the order of the schema."""
        return [option for option in self._values if option not in self.carried and option not in self.notes]

    def comment(self) -> list[str]:
        """The account as lines without a comment sign: notes first, then what is left behind."""
        values, left = self._values, self.left()
        changed = [option for option in left if values[option] != self._defaults[option]]
        unchanged = ", ".join(option for option in left if option not in changed)
        notes = [f"{option}={values[option]}: {self.notes[option]}" for option in values if option in self.notes]
        others = [f"{option}={values[option]}" for option in changed]
        lines = []
        for title, texts in (
            ("Not the same there:", notes),
            ("Left behind (no counterpart, or off), and not at their defaults here:", others),
        ):
            lines += [title] if texts else []
            for text in texts:
                lines += _item.wrap(text)
        if unchanged:
            lines += ["Left behind, at their defaults:", *textwrap.wrap(unchanged, _WIDTH)]
        return [*lines, "In the data and reward files beside this one:", *textwrap.wrap(", ".join(FILES), _WIDTH)]


def example_columns(example: Example) -> dict[str, str]:
    """An example as three columns of text, which every table can hold.

    >>> example = Example("2 + 2?", "4", {"level": 1})
    >>> example_columns(example)
    {'query': '2 + 2?', 'answer': '4', 'extra': '{"level": 1}'}
    >>> example_of(example_columns(example)) == example
    True
    """
    return {"query": example.query, "answer": example.answer, "extra": json.dumps(dict(example.extra))}


def example_of(columns: Mapping[str, str]) -> Example:
    """The example of :func:`example_columns`."""
    return Example(columns["query"], columns["answer"], json.loads(columns["extra"]))


def verl_rows(task: Task, examples: Sequence[Example], split: str) -> Iterator[dict[str, Any]]:
    """verl's five columns; the example stands in ``extra_info``, where our grader looks for it.

    >>> from sota_grpo.tasks import make_task
    >>> task = make_task("arithmetic", num_train=1, num_heldout=1)
    >>> list(next(verl_rows(task, task.train, "train")))
    ['data_source', 'prompt', 'ability', 'reward_model', 'extra_info']
    """
    for index, example in enumerate(examples):
        yield {
            "data_source": task.name,
            "prompt": task.messages(example),
            "ability": task.name,
            "reward_model": {"style": "rule", "ground_truth": example.answer},
            "extra_info": {"index": index, "split": split, **example_columns(example)},
        }


def write_parquet(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    """All rows in one file.

    Raises:
        UserError: there are no rows.
        OSError: the file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    listed = list(rows)
    if not listed:
        raise UserError(f"There is nothing to write to {path.name}: the task has no such problems.")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(listed), path)


def verl_reward(config_file: str | Path) -> Callable[..., dict[str, float]]:
    """``compute_score`` for verl: the reward as ``score``, and whether the response is right as ``acc``.

    A response at which the grader fails earns 0, as in training.

    Args:
        config_file: of the run; its folder holds what it names.
    """
    task = _task(Path(config_file))

    def compute_score(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
    ) -> dict[str, float]:
        (score,) = guarded_scores(task.score, task.term_weights, [(solution_str, example_of(extra_info))])
        return {"score": total_reward(score.terms, task.term_weights), "acc": float(score.success)}

    return compute_score


def _task(config_file: Path) -> Task:
    """The task of an exported config; its reward functions stand beside it, and beside the script that calls this."""
    config = load_config(config_file.parent, trust=True)
    if config.reward.path is not None:
        config.reward.path = str(config_file.parent / config.reward.path)
    return task_of(config, bare=True)
