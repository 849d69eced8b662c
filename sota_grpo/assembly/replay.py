"""A stored training step computed again, offline and on the CPU: its advantages, its losses and its gradients.

No engine is started, nothing is sampled or graded: responses and rewards are those that were stored, the weights and
the optimizer those of the checkpoint before the step, and the step is done by the learner that did it.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from sota_grpo import keys
from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, load_config
from sota_grpo.assembly.learning import kl_in_reward, make_advantage, make_learner, make_model, make_policy
from sota_grpo.config import Config, model_name
from sota_grpo.config.spelling import walk, with_options
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.functional.surrogates import OPTIONS, readers
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.run_files import STEPS_FOLDER
from sota_grpo.recording.stored_steps import StoredStep, read_step, step_of, stored_steps
from sota_grpo.rl.objective_files import surrogate
from sota_grpo.rl.objectives import GRPOLoss, GRPOLossOutput, LossTokens
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import write_reference
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.learner import Learner, NonFiniteStep
from sota_grpo.training.runs import CHECKPOINTS

logger = logging.getLogger(__name__)

#: What is compared, in the order shown: metrics of a step that follow from its rows, weights and options alone.
FIGURES = (
    *("reward", "advantage", "loss/objective", "loss/kl", "loss/entropy", "grad_norm", "kl", "entropy"),
    *("entropy_coef", "entropy_threshold"),
    "distill/reverse_kl",
    *("clip_fraction", "correction_fraction", "off_policy_fraction", "ess", "gradient_share/max_token"),
    *("kl_approx", "mismatch_kl", "lr"),
)
TOLERANCE = 1e-6  # relative, of what agrees in float32
_LOSSES = ("loss/objective", "loss/kl", "loss/entropy")
_JUDGED = (*_LOSSES, "grad_norm")
_SAME_ADVANTAGE = 1e-6
ROUNDING = 1e-6  # of the effective sample size, where all ratios are 1 but for that of float32
_OF_THE_COLLECTION = (
    *(f"algorithm.{name}" for name in ("overlong_buffer", "dynamic_sampling", "dynamic_sampling_max_draws")),
)
_ALGORITHM = {name for name, _, _ in walk() if name.startswith("algorithm.")} - {"algorithm.name"}
COMPARED = (_ALGORITHM - {*_OF_THE_COLLECTION}) | {"policy.kl_coef", "train.kl_coef_in_loss"}
MEMORY = "train.micro_batch_tokens"


@dataclass(frozen=True)
class Step:
    """A stored training step, and what it started from."""

    config: Config  # of the run
    stored: StoredStep
    checkpoint: Path | None = None  # with the learner's state before the step; None: it began with the initial weights


@dataclass(frozen=True)
class Replay:
    """A step computed once."""

    figures: dict[str, float | None]  # those of FIGURES that there are; None where nothing could be measured
    advantages: Tensor  # [N], in the order of the stored rows
    #: By group and sample, for each use of the row which of its trained tokens the clip took the gradient of.
    clipped: dict[tuple[int, int], list[Tensor]]
    optimizer_steps: int  # taken in the training step


def replayed(
    run_dir: Path, number: int | None, overrides: Sequence[str] = (), *, trust: bool = False
) -> dict[str, Any]:
    """Replay a stored step as the run did it and, with ``overrides``, under other options; plain values throughout.

    Args:
        run_dir: of the run; nothing is written there.
        number: of the step; None: the last that can be replayed.
        overrides: such as ``["algorithm=dapo"]``.
        trust: run the Python files of the run's model (``model.trust_remote_code`` in its config).

    Returns:
        ``figures``: by name ``stored``, ``replayed`` and ``difference``, with overrides also ``other`` and
        ``other_difference`` (from ``replayed``); None where nothing was measured. ``agrees``: losses and gradient norm
        are the stored ones to ``TOLERANCE``. ``worst``: which of them is furthest from it and how far, relatively; None
        where only one side has it. ``notes``: sentences. With overrides ``advantages`` and ``clip``: what changed.

    Raises:
        UserError: the step cannot be replayed, or not under these options.
    """
    step = open_step(run_dir, number, trust=trust)
    own_config, other_config, left = replay_configs(step, run_dir, overrides)
    logger.info("Computing step %d as the run did.", step.stored.step)
    own = replay(step, own_config)
    other = None
    if other_config is not None:
        logger.info("Computing it under %s.", " ".join(overrides))
        other = replay(step, other_config)
    rows = step.stored.rows
    name, distance = worst_distance(step.stored.metrics, own.figures)
    result: dict[str, Any] = {
        "run": str(run_dir),
        "step": step.stored.step,
        "checkpoint": None if step.checkpoint is None else step.checkpoint.name,
        "samples": len(rows),
        "groups": len(rows.get(keys.GROUP_ID).unique()),
        "optimizer_steps": own.optimizer_steps,
        "overrides": list(overrides),
        "figures": _figures(step, own, other),
        "agrees": distance <= TOLERANCE,
        "worst": {"name": name, "relative_difference": distance if math.isfinite(distance) else None},
        "notes": replay_notes(step, left),
    }
    if other is not None:
        result["notes"] = [*equal_ratios(own), *result["notes"]]
        result |= {"advantages": _advantages(step, own, other), "clip": _clip(own, other)}
    return result


def open_step(run_dir: Path, number: int | None = None, *, trust: bool = False) -> Step:
    """Step ``number`` of a run, or the last that can be replayed.

    Raises:
        UserError: no run, no such step, or its checkpoint is not there; the message names the steps that can be had.
    """
    config = load_config(run_dir, trust=trust, unused=UNUSED_WITHOUT_SAMPLES)
    checkpoints = dict(CheckpointStore(run_dir / CHECKPOINTS).paths())
    stored = {step_of(path): path for path in stored_steps(run_dir)}
    replayable = [one for one in stored if one == 0 or one in checkpoints]
    if not stored:
        raise UserError(f"There is no stored step in {run_dir / STEPS_FOLDER}; logging.store_steps=true writes some.")
    chosen = max(replayable, default=None) if number is None else number
    if chosen in replayable:
        return Step(config, read_step(stored[chosen]), checkpoints.get(chosen))
    others = f"steps that can be replayed: {', '.join(map(str, replayable)) or 'none'}"
    if number is None:
        raise UserError(f"The checkpoints of {run_dir} do not belong to its stored steps; {others}.")
    if number in stored:
        raise UserError(f"Step {number} of {run_dir} is stored, and the checkpoint with its weights is gone; {others}.")
    more = "train.checkpoint_frequency=1 stores more, train.keep_checkpoints keeps them"
    raise UserError(f"Step {number} of {run_dir} is not stored; {others} ({more}).")


def replay(step: Step, config: Config) -> Replay:
    """Compute the step once more, in float32 on the CPU, as the run did or under the algorithm of ``config``.

    Args:
        config: of the run but for its algorithm and its KL term.

    Raises:
        UserError: the model is not there, or the step is not finite under ``config``.
        CheckpointError: the checkpoint is damaged.
    """
    rows = scored_rows(step, config)
    with restored(step, config, ClipWatch) as learner:
        before = learner.optimizer_steps
        try:
            update = learner.update(rows)
        except NonFiniteStep as error:
            raise not_finite(step) from error
    advantages, rewards = rows.get(keys.ADVANTAGE).flatten(), rows.get(keys.REWARD).flatten()
    values = {"reward": rewards.mean().item(), "advantage": advantages.abs().mean().item(), **update}
    return Replay(
        figures={name: values[name] for name in FIGURES if name in values},
        advantages=advantages,
        clipped=learner.loss.clipped,  # type: ignore[attr-defined]
        optimizer_steps=learner.optimizer_steps - before,
    )


@contextmanager
def restored(step: Step, config: Config, objective: type[GRPOLoss] = GRPOLoss) -> Iterator[Learner]:
    """The learner of ``config`` as it stood before the step, in float32 on the CPU, its random streams included.

    Args:
        objective: a subclass watches what the loss does.

    Raises:
        UserError: the model is not there.
        CheckpointError: the checkpoint is damaged.
    """
    config = in_float32_on_the_cpu(config)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    with TemporaryDirectory() as dump, _as_it_was_computed(step):
        policy = make_policy(config, make_model(config, torch.device("cpu")), "cpu")
        learner = make_learner(config, policy, tokenizer.pad_token_id, "cpu", Path(dump), objective=objective)
        if step.checkpoint is not None:  # read each time: an optimizer changes the moments that it is given
            learner.load_state_dict(CheckpointStore.load(step.checkpoint, ["learner"])["learner"])
        if step.stored.origin.num_ranks:  # the stream that adapters' dropout reads: of several ranks that of the first
            torch.manual_seed(sample_seed(step.config.seed, learner.version, 0))
        else:
            torch.set_rng_state(step.stored.origin.rng)
        yield learner


def not_finite(step: Step) -> UserError:
    """What is said where a loss or a gradient is NaN or infinite."""
    return UserError(f"Step {step.stored.step} is not finite when it is computed like this.")


class ClipWatch(GRPOLoss):
    """The objective; it remembers of which tokens its clip took the gradient."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.clipped: dict[tuple[int, int], list[Tensor]] = {}
        self._names: list[tuple[int, int]] = []

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        groups, samples = (tensordict.get(key).reshape(-1).tolist() for key in (keys.GROUP_ID, keys.SAMPLE_ID))
        self._names = list(zip(groups, samples))
        return super().forward(tensordict)

    def _surrogate(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        value, clipped = super()._surrogate(tokens)
        for name, row, mask in zip(self._names, clipped, tokens.mask):
            self.clipped.setdefault(name, []).append(row[mask])
        return value, clipped


def in_float32_on_the_cpu(config: Config) -> Config:
    """The options that a step is computed again with, wherever the run was."""
    options = {"device": "cpu", "train.precision": "fp32", "train_model.torch_dtype": "float32"}
    options["train_model.log_probs"] = "tiled"
    if config.model.attn_implementation not in (None, "sdpa", "eager"):  # kernels of GPUs
        options["model.attn_implementation"] = "sdpa"
    return with_options(config, options)


def scored_rows(step: Step, config: Config) -> RowTable:
    """The rows as stored, their advantages computed anew; their rewards too where another KL is taken off them.

    Penalties on length, and what a user's functions gave, are in the stored rewards.
    """
    rows = step.stored.rows.without(keys.ADVANTAGE)
    coefficient = kl_in_reward(config)
    if coefficient != kl_in_reward(step.config):
        reward = rows.get(keys.GRADED_REWARD, rows.get(keys.REWARD))
        rows = rows.without(keys.GRADED_REWARD, keys.KL_TERM)
        rows.set(keys.REWARD, reward)
        reference = rows.parts(keys.REF_LOG_PROBS)
        write_reference(rows, reference, in_reward_coeff=coefficient)
    for _, transform in make_advantage(config):
        rows = transform(rows)
    return rows


@contextmanager
def _as_it_was_computed(step: Step) -> Iterator[None]:
    """The number of threads of the run, on which the last bits depend; the random streams are given back afterwards."""
    origin, now = step.stored.origin, torch.get_num_threads()
    if origin.device == "cpu" and origin.num_ranks == 0:
        torch.set_num_threads(min(origin.num_threads, os.cpu_count() or 1))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(now)


def replay_configs(
    step: Step, run_dir: Path, overrides: Sequence[str]
) -> tuple[Config, Config | None, tuple[str, ...]]:
    """What a step is replayed under.

    Returns:
        The run's options; those to compare them with, None where there is nothing to compare; the options among the
        overrides' that act while responses are collected, of which the second has the run's.

    Raises:
        UserError: an override that does not exist, contradicts another, cannot matter to a step whose responses are
            given, or needs what was not stored.
    """
    changed, left = under(step, run_dir, overrides)
    by_name = by_option(overrides)
    for name, override in by_name.items():
        if name not in ("algorithm", MEMORY, *COMPARED):
            raise UserError(
                f"{override} cannot change a step whose responses, rewards and weights are given; a replay takes "
                f"algorithm=PRESET, options of the algorithm, policy.kl_coef and train.kl_coef_in_loss, and {MEMORY} "
                "for its memory."
            )
    own = with_options(step.config, {MEMORY: changed.train.micro_batch_tokens})
    if all(name == MEMORY for name in by_name):
        return own, None, ()
    if all(attrgetter(name)(changed) == attrgetter(name)(own) for name in COMPARED):
        raise UserError(f"The run had {' '.join(overrides)} itself, so there is nothing to compare.")
    for name, override in by_name.items():
        missing = _missing(name, changed)
        if missing is not None:
            raise UserError(f"{override} has no effect without {missing}.")
    require_stored(step, changed, by_name)
    validate(changed)
    return own, changed, left


def under(step: Step, run_dir: Path, overrides: Sequence[str]) -> tuple[Config, tuple[str, ...]]:
    """The run's options under ``overrides``, and which of them act while responses are collected: those stay the run's.

    Raises:
        UserError: an override that does not exist, or does not fit.
    """
    changed = load_config(run_dir, overrides, trust=True)  # the step's own config has been consented to
    options = {name: attrgetter(name)(step.config) for name in _OF_THE_COLLECTION}
    left = {name: value for name, value in options.items() if attrgetter(name)(changed) != value}
    return with_options(changed, left), tuple(left)


def by_option(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides by the option that each sets.

    >>> by_option(["algorithm=dapo", "+seed=3"])
    {'algorithm': 'algorithm=dapo', 'seed': '+seed=3'}
    """
    return {override.lstrip("+").partition("=")[0]: override for override in overrides}


def replay_notes(step: Step, left: Sequence[str]) -> list[str]:
    """What keeps a replay from giving the run's very numbers, and what of a preset it cannot show; a sentence each."""
    origin, options = step.stored.origin, step.config.train_model
    weights = options.torch_dtype if options.torch_dtype in ("bfloat16", "float16") else "float32"
    notes = []
    if origin.device != "cpu" or origin.precision != "fp32" or weights != "float32":
        notes.append(
            f"The run computed in {origin.precision} with {weights} weights on {origin.device}, the replay in float32 "
            "on the CPU: their differences are the dtype's and the device's."
        )
    if origin.num_ranks > 1:
        notes.append(f"The learner of the run had {origin.num_ranks} ranks, which add up in another order.")
    if options.lora.enabled and options.lora.dropout > 0 and (origin.device != "cpu" or origin.num_ranks > 1):
        notes.append("The run's dropout dropped other inputs than the replay's; losses and gradient differ by that.")
    if left:
        notes.append(f"Read while responses are collected, so left as the run had it: {', '.join(left)}.")
    return notes


def equal_ratios(own: Replay) -> list[str]:
    """Of a step on the policy's own responses: that no surrogate can show there what it does to a ratio."""
    ess = own.figures.get("ess")
    if own.optimizer_steps > 1 or ess is None or 1 - ess > ROUNDING:
        return []
    return [
        f"The step is a single optimizer step on the policy's own responses: every ratio is 1 (effective sample size "
        f"{ess:.6f}), and surrogates of a ratio have the same gradient there. They differ in a run with several "
        "optimizer steps per collection (train.optim_batch_size below train.dialog_turns_per_batch, or train.epochs)."
    ]


def _missing(name: str, config: Config) -> str | None:
    """What an option has no effect without; None where it has one."""
    algorithm, option = config.algorithm, name.removeprefix("algorithm.")
    if option in OPTIONS and not surrogate(algorithm.objective).reads(option):
        return f"algorithm.objective={readers(option)}"
    if option in ("correction_mode", "correction_cap", "correction_floor") and algorithm.correction == "none":
        return "algorithm.correction"
    return "policy.kl_coef above 0" if name == "train.kl_coef_in_loss" and config.policy.kl_coef == 0 else None


def require_stored(step: Step, changed: Config, by_name: dict[str, str]) -> None:
    """Refuse what needs the weights of the reward terms, or the reference's log-probs, where the step has none."""
    if changed.algorithm.decouple_terms and not step.config.algorithm.decouple_terms:
        raise UserError(
            f"algorithm.decouple_terms=true needs the weights of the reward terms, which step {step.stored.step} has "
            "where the run decoupled them itself."
        )
    if step.stored.rows.has(keys.REF_LOG_PROBS):
        return
    asks = [
        override for name, override in by_name.items() if name in ("algorithm.kl_estimator", "algorithm.kl_unbiased")
    ]
    if changed.policy.kl_coef > 0:
        asks = [by_name.get("policy.kl_coef", f"policy.kl_coef={changed.policy.kl_coef:g}")]
    if changed.algorithm.distill_coef > 0:
        asks = [f"algorithm.distill_coef={changed.algorithm.distill_coef:g}"]
    if asks:
        raise UserError(
            f"{asks[0]} needs the reference's log-probs, and step {step.stored.step} has none: the run had "
            "policy.kl_coef=0 and no teacher."
        )


def worst_distance(stored: Mapping[str, float | None], figures: Mapping[str, float | None]) -> tuple[str, float]:
    """The loss term, or the gradient norm, that is furthest from the stored one, and how far, relatively.

    A loss is a sum of advantages that may cancel, so its distance is in units of the mean absolute advantage where that
    is larger. A figure that only one side has is infinitely far.

    >>> stored = {"loss/objective": 0.0, "grad_norm": 2.0, "advantage": 0.5}
    >>> worst_distance(stored, {"loss/objective": 1e-7, "grad_norm": 2.0})
    ('loss/objective', 2e-07)
    """
    worst = ("grad_norm", 0.0)
    for name in _JUDGED:
        one, two = stored.get(name), figures.get(name)
        if one is None and two is None:
            continue
        floor = (stored.get("advantage") or 0.0) if name in _LOSSES else 0.0
        distance = float("inf")
        if one is not None and two is not None:
            distance = abs(two - one) / max(abs(one), floor, 1e-30)
        if distance > worst[1]:
            worst = (name, distance)
    return worst


def _figures(step: Step, own: Replay, other: Replay | None) -> dict[str, dict[str, float | None]]:
    table: dict[str, dict[str, float | None]] = {}
    for name in FIGURES:
        stored, again = step.stored.metrics.get(name), own.figures.get(name)
        row = {"stored": stored, "replayed": again, "difference": _minus(again, stored)}
        if other is not None:
            changed = other.figures.get(name)
            row |= {"other": changed, "other_difference": _minus(changed, again)}
        if any(value is not None for value in row.values()):
            table[name] = row
    return table


def _minus(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def _advantages(step: Step, own: Replay, other: Replay) -> dict[str, Any]:
    """How many samples have another advantage, and which changed most."""
    gaps = (other.advantages - own.advantages).abs()
    most = int(gaps.argmax())
    changed = int((gaps > _SAME_ADVANTAGE).sum())
    largest = {
        "group_id": int(step.stored.rows.get(keys.GROUP_ID)[most]),
        "sample_id": int(step.stored.rows.get(keys.SAMPLE_ID)[most]),
        "replayed": own.advantages[most].item(),
        "other": other.advantages[most].item(),
    }
    return {"changed": changed, "samples": len(gaps), "largest": largest if changed else None}


def _clip(own: Replay, other: Replay) -> dict[str, int | None]:
    """Uses of tokens in the optimizer steps, and of how many the clip took the gradient.

    ``newly`` and ``no_longer`` are None where the two do not train on the same tokens.
    """
    (uses, before), (other_uses, after) = _joined(own.clipped), _joined(other.clipped)
    counts: dict[str, int | None] = {"tokens": len(before), "replayed": int(before.sum()), "other": int(after.sum())}
    if uses != other_uses:
        return counts | {"newly": None, "no_longer": None}
    return counts | {"newly": int((after & ~before).sum()), "no_longer": int((before & ~after).sum())}


def _joined(clipped: dict[tuple[int, int], list[Tensor]]) -> tuple[list[tuple[tuple[int, int], int]], Tensor]:
    """All tokens in one order, by row and use, and before them whose they are."""
    uses = [(name, flags) for name in sorted(clipped) for flags in clipped[name]]
    none = torch.zeros(0, dtype=torch.bool)
    return [(name, len(flags)) for name, flags in uses], torch.cat([none, *(flags for _, flags in uses)])
