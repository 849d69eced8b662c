"""Under which options a stored turn can be computed again, and what its reader must know."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from sota_grpo import keys
from sota_grpo.assembly.replay import Turn
from sota_grpo.compose import load_config
from sota_grpo.config import Config, walk
from sota_grpo.errors import UserError
from sota_grpo.validators import validate

_OF_THE_COLLECTION = (
    "algorithm.overlong_buffer",
    "algorithm.dynamic_sampling",
    "algorithm.dynamic_sampling_max_draws",
)
_ALGORITHM = tuple(name for name, _, _ in walk() if name.startswith("algorithm.") and name != "algorithm.name")
_COMPARED = (
    *(name for name in _ALGORITHM if name not in _OF_THE_COLLECTION),
    *("policy.kl_coef", "train.kl_coef_in_loss"),
)
_MEMORY = "train.micro_batch_tokens"
#: Options that act only beside another one: whether it is there, and what it is.
_ONLY_WITH: dict[str, tuple[Callable[[Config], bool], str]] = {
    "algorithm.clip_low": (lambda config: config.algorithm.objective == "clipped", "algorithm.objective=clipped"),
    "algorithm.clip_high": (
        lambda config: config.algorithm.objective != "reinforce",
        "algorithm.objective=clipped or cispo",
    ),
    "algorithm.correction_mode": (lambda config: config.algorithm.correction != "none", "algorithm.correction"),
    "algorithm.correction_cap": (lambda config: config.algorithm.correction != "none", "algorithm.correction"),
    "train.kl_coef_in_loss": (lambda config: config.policy.kl_coef > 0, "policy.kl_coef above 0"),
}


@dataclass(frozen=True)
class ReplayConfigs:
    """What a turn is replayed under.

    Attributes:
        own: the run's options.
        other: those to compare them with; None: nothing to compare.
        left: options of the preset asked for that act while responses are collected; ``other`` has the run's.
    """

    own: Config
    other: Config | None = None
    left: tuple[str, ...] = ()


def replay_configs(turn: Turn, run_dir: Path, overrides: Sequence[str]) -> ReplayConfigs:
    """The options of the turn's run, and those under ``overrides``.

    Raises:
        UserError: an override that does not exist, contradicts another, cannot matter to a turn whose responses are
            given, or needs what was not stored.
    """
    asked = load_config(run_dir, overrides)
    given = {override.lstrip("+").partition("=")[0]: override for override in overrides}
    for name, override in given.items():
        if name not in ("algorithm", _MEMORY, *_COMPARED):
            raise UserError(
                f"{override} cannot change a turn whose responses, rewards and weights are given; a replay takes "
                f"algorithm=PRESET, options of the algorithm, policy.kl_coef and train.kl_coef_in_loss, and {_MEMORY} "
                "for its memory."
            )
    own = copy.deepcopy(turn.config)
    own.train.micro_batch_tokens = asked.train.micro_batch_tokens
    if all(name == _MEMORY for name in given):
        return ReplayConfigs(own)
    left = tuple(name for name in _OF_THE_COLLECTION if _value(asked, name) != _value(own, name))
    for name in left:
        section, _, option = name.partition(".")
        setattr(getattr(asked, section), option, _value(own, name))
    if all(_value(asked, name) == _value(own, name) for name in _COMPARED):
        raise UserError(f"The run had {' '.join(overrides)} itself, so there is nothing to compare.")
    for name, override in given.items():
        acts, what = _ONLY_WITH.get(name, (None, ""))
        if acts is not None and not acts(asked):
            raise UserError(f"{override} has no effect without {what}.")
    _require_reference(turn, asked, given)
    validate(asked)
    return ReplayConfigs(own, asked, left)


def replay_notes(turn: Turn, left: Sequence[str]) -> list[str]:
    """What keeps a replay from giving the run's very numbers, and what of a preset it cannot show; a sentence each."""
    origin, part = turn.stored.origin, turn.config.train_model
    weights = part.torch_dtype if part.torch_dtype in ("bfloat16", "float16") else "float32"
    notes = []
    if origin.device != "cpu" or origin.precision != "fp32" or weights != "float32":
        notes.append(
            f"The run computed in {origin.precision} with {weights} weights on {origin.device}, the replay in float32 "
            "on the CPU: their differences are the dtype's and the device's."
        )
    if origin.num_ranks > 1:
        notes.append(f"The learner of the run had {origin.num_ranks} ranks, which add up in another order.")
    if part.lora.enabled and part.lora.dropout > 0 and (origin.device != "cpu" or origin.num_ranks > 1):
        notes.append("The run's dropout dropped other inputs than the replay's; losses and gradient differ by that.")
    if left:
        notes.append(f"Read while responses are collected, so left as the run had it: {', '.join(left)}.")
    return notes


def _require_reference(turn: Turn, asked: Config, given: dict[str, str]) -> None:
    """Refuse what the reference's log-probs are needed for, where the turn has none."""
    if turn.stored.rows[0].get(keys.REF_LOG_PROBS, None) is not None:
        return
    asks = [override for name, override in given.items() if name == "algorithm.kl_estimator"]
    if asked.policy.kl_coef > 0:
        asks = [given.get("policy.kl_coef", f"policy.kl_coef={asked.policy.kl_coef:g}")]
    if asks:
        raise UserError(
            f"{asks[0]} needs the reference's log-probs, and turn {turn.stored.step} has none: the run had "
            "policy.kl_coef=0."
        )


def _value(config: Config, name: str) -> Any:
    return reduce(getattr, name.split("."), config)
