"""A stored training step computed again, offline and on the CPU: its advantages, its losses and its gradients.

No engine is started, nothing is sampled or graded: responses and rewards are those that were stored, the weights and
the optimizer those of the checkpoint before the step, and the step is done by the learner that did it. Other algorithms
take the same step, each with its own advantages, loss weights and surrogate.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, algorithms_of, load_config, overrides_under
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
from sota_grpo.rl.objectives import GRPOLoss, GRPOLossOutput, LossTokens, derivative
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
    *("tokens/with_advantage", "tokens/with_gradient", "kl_approx", "mismatch_kl", "lr"),
)
TOLERANCE = 1e-6  # relative, of what agrees in float32
_LOSSES = ("loss/objective", "loss/kl", "loss/entropy")
_JUDGED = (*_LOSSES, "grad_norm")
_ROUNDING = 1e-6  # of the effective sample size, where all ratios are 1 but for that of float32
_OF_THE_COLLECTION = ("algorithm.overlong_buffer", "algorithm.dynamic_sampling")
_ALGORITHM = {name for name, _, _ in walk() if name.startswith("algorithm.")} - {"algorithm.name"}
_STEPS = ("train.epochs", "train.optim_batch_size")  # into how many optimizer steps the training step is divided
_COMPARED = (_ALGORITHM - {*_OF_THE_COLLECTION}) | {"policy.kl_coef", "train.kl_coef_in_loss", *_STEPS}
_MEMORY = "train.micro_batch_tokens"
_CHUNK = 1 << 22  # numbers of a gradient that are read at a time


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
    optimizer_steps: int  # taken in the training step
    #: Of all trained parameters, before its norm is clipped, summed over the optimizer steps; None: not asked for.
    gradient: Tensor | None = None


def replayed(
    run_dir: Path, number: int | None, overrides: Sequence[str] = (), *, trust: bool = False
) -> dict[str, Any]:
    """Replay a stored step as the run did it and under other algorithms; plain values throughout.

    Every algorithm takes the whole training step as a run under it would: the same responses, rewards and initial
    weights, and then its own optimizer steps.

    Args:
        run_dir: of the run; nothing is written there.
        number: of the step; None: the last that can be replayed.
        overrides: ``algorithm=A,B,..``, each a preset, ``FILE.py:FUNCTION`` (the run's algorithm with this objective)
            or ``run``, its own; further options hold for all of them.
        trust: consent to what the run's own config asks for.

    Returns:
        ``figures``: by name ``stored``, ``replayed``, ``difference`` and, by algorithm, ``under``; None where nothing
        was measured. ``agrees``: losses and gradient norm are the stored ones to ``TOLERANCE``. ``worst``: which of
        them is furthest from it and how far, relatively; None where only one side has it. ``algorithms``: their names.
        ``cosines``: between the gradients of ``replayed`` and of the algorithms, by name and name; None beside a
        gradient of 0; empty without algorithms. ``notes``: sentences.

    Raises:
        UserError: the step cannot be replayed, or not under these options.
    """
    step = open_step(run_dir, number, trust=trust)
    own_config, others, notes = replay_configs(step, run_dir, overrides)
    with TemporaryDirectory() as folder:
        files = {name: Path(folder) / str(index) for index, name in enumerate(["replayed", *others]) if others}
        logger.info("Computing step %d as the run did.", step.stored.step)
        own = replay(step, own_config, files.get("replayed"))
        under = {}
        for name, config in others.items():
            logger.info("Computing it under %s.", name)
            under[name] = replay(step, config, files[name])
        rows = step.stored.rows
        name, distance = worst_distance(step.stored.metrics, own.figures)
        return {
            "run": str(run_dir),
            "step": step.stored.step,
            "checkpoint": None if step.checkpoint is None else step.checkpoint.name,
            "samples": len(rows),
            "groups": len(rows.get(keys.GROUP_ID).unique()),
            "optimizer_steps": own.optimizer_steps,
            "overrides": list(overrides),
            "algorithms": list(under),
            "figures": _figures(step, own, under),
            "agrees": distance <= TOLERANCE,
            "worst": {"name": name, "relative_difference": distance if math.isfinite(distance) else None},
            "cosines": cosines({"replayed": own, **under}) if under else {},
            "notes": [*equal_ratios(under.values()), *replay_notes(step), *notes],
        }


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


def replay(step: Step, config: Config, gradient_file: Path | None = None) -> Replay:
    """Compute the step once more, in float32 on the CPU, as the run did or under the algorithm of ``config``.

    Args:
        config: of the run but for its algorithm and its KL term.
        gradient_file: where the gradient is kept, 4 bytes a trained parameter. None: it is not.

    Raises:
        UserError: the model is not there, the step is not finite under ``config``, or the gradient has no room.
        CheckpointError: the checkpoint is damaged.
    """
    rows = scored_rows(step, config)
    with _restored(step, config) as learner:
        gradient = None if gradient_file is None else _summed_gradient(learner.parameters, gradient_file)
        before = learner.optimizer_steps
        try:
            update = learner.update(rows)
        except NonFiniteStep as error:
            raise UserError(f"Step {step.stored.step} is not finite when it is computed like this.") from error
    advantages, rewards = rows.get(keys.ADVANTAGE).flatten(), rows.get(keys.REWARD).flatten()
    sampled = torch.tensor([float(mask.sum()) for mask in rows.parts(keys.ASSISTANT_MASK)])
    count = sampled.sum().item() or math.nan
    values = {"reward": rewards.mean().item(), "advantage": advantages.abs().mean().item(), **update}
    values["tokens/with_advantage"] = (sampled * (advantages != 0)).sum().item() / count
    values["tokens/with_gradient"] = learner.loss.moved / count / config.train.epochs  # type: ignore[attr-defined]
    figures = {name: values[name] for name in FIGURES if name in values}
    return Replay(figures, learner.optimizer_steps - before, gradient)


@contextmanager
def _restored(step: Step, config: Config) -> Iterator[Learner]:
    """The learner of ``config`` as it was before the step, in float32 on the CPU, its random streams included."""
    options = {"device": "cpu", "train.precision": "fp32", "train_model.torch_dtype": "float32"}
    options["train_model.log_probs"] = "tiled"
    if config.model.attn_implementation not in (None, "sdpa", "eager"):  # kernels of GPUs
        options["model.attn_implementation"] = "sdpa"
    config = with_options(config, options)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    with TemporaryDirectory() as dump, _as_it_was_computed(step):
        policy = make_policy(config, make_model(config, torch.device("cpu")), "cpu")
        learner = make_learner(config, policy, tokenizer.pad_token_id, "cpu", Path(dump), objective=CountedLoss)
        if step.checkpoint is not None:  # read each time: an optimizer changes the moments that it is given
            learner.load_state_dict(CheckpointStore.load(step.checkpoint, ["learner"])["learner"])
        if step.stored.origin.num_ranks:  # the stream that adapters' dropout reads: of several ranks that of the first
            torch.manual_seed(sample_seed(step.config.seed, learner.version, 0))
        else:
            torch.set_rng_state(step.stored.origin.rng)
        yield learner


class CountedLoss(GRPOLoss):
    """The objective; ``moved`` counts the tokens that its surrogate gave a gradient, each use of a token once."""

    moved = 0

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        out = super().forward(tensordict)
        self.moved += int(derivative(out.loss_objective, self._log_prob).count_nonzero())
        del self._log_prob  # it holds the graph
        return out

    def _read(self, batch: TensorDictBase) -> LossTokens:
        tokens = super()._read(batch)
        self._log_prob = tokens.log_prob
        return tokens


def _summed_gradient(parameters: Sequence[Tensor], file: Path) -> Tensor:
    """Return a flat float32 vector in ``file`` to which every backward pass adds the parameters' gradients.

    Raises:
        UserError: the file has no room.
    """
    size = sum(parameter.numel() for parameter in parameters)
    free = shutil.disk_usage(file.parent).free
    if 4 * size > free:  # a mapped file that the disk cannot hold kills the process
        raise UserError(
            f"A gradient takes {4 * size / 2**30:.1f} GiB, and {file.parent} has {free / 2**30:.1f} GiB free; name "
            "fewer algorithms, or set TMPDIR to a folder with more room."
        )
    flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)
    for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):

        def add(gradient: Tensor, part: Tensor = part) -> None:
            part.add_(gradient.detach().flatten())

        parameter.register_hook(add)  # type: ignore[no-untyped-call]
    return flat


def cosines(replays: Mapping[str, Replay]) -> dict[str, dict[str, float | None]]:
    """Cosines between the gradients, by name and name, summed in float64; None beside a gradient of 0.

    >>> one, two, zero = (Replay({}, 1, torch.tensor(values)) for values in ([3.0, 4.0], [4.0, 3.0], [0.0, 0.0]))
    >>> cosines({"a": one, "b": two, "c": zero})["a"]
    {'a': 1.0, 'b': 0.96, 'c': None}
    """
    vectors = {name: replay.gradient for name, replay in replays.items() if replay.gradient is not None}

    def product(one: Tensor, two: Tensor) -> float:
        return sum(float(a.double() @ b.double()) for a, b in zip(one.split(_CHUNK), two.split(_CHUNK)))

    squares = {name: product(vector, vector) for name, vector in vectors.items()}
    # not from the norms: the root of a square is exact, so that the cosine of two equal gradients is 1
    return {
        name: {
            other: product(one, two) / size if (size := math.sqrt(squares[name] * squares[other])) > 0 else None
            for other, two in vectors.items()
        }
        for name, one in vectors.items()
    }


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


def replay_configs(step: Step, run_dir: Path, overrides: Sequence[str]) -> tuple[Config, dict[str, Config], list[str]]:
    """What a step is replayed under.

    Returns:
        The run's options; by name those of the algorithms, none where nothing but memory is changed; a sentence for
        each whose preset sets options that act while responses are collected: those stay the run's.

    Raises:
        UserError: an override that does not exist, contradicts another, cannot matter to a step whose responses are
            given, or needs what was not stored; or no algorithm differs from the run's.
    """
    names, common = algorithms_of(overrides)
    for name, override in by_option(common).items():
        if name not in (_MEMORY, *_COMPARED):
            raise UserError(
                f"{override} cannot change a step whose responses, rewards and weights are given; a replay takes "
                f"algorithm=A,B,.., options of the algorithm, policy.kl_coef, train.kl_coef_in_loss, "
                f"{', '.join(_STEPS)}, and {_MEMORY} for its memory."
            )
    others, notes = {}, []
    for name in names:
        try:
            others[name], left = _under(step, run_dir, overrides_under(name, common))
        except UserError as error:
            raise UserError(f"{name}: {error}" if len(names) > 1 else str(error)) from error
        if left:
            sentence = "is read while responses are collected, so left as the run had it"
            notes.append(f"{name}: {', '.join(left)} {sentence}.")
    own = with_options(step.config, {_MEMORY: others[names[0]].train.micro_batch_tokens})
    if by_option(overrides).keys() <= {_MEMORY}:
        return own, {}, []
    if all(attrgetter(name)(changed) == attrgetter(name)(own) for name in _COMPARED for changed in others.values()):
        raise UserError(f"The run had {' '.join(overrides)} itself, so there is nothing to compare.")
    return own, others, notes


def _under(step: Step, run_dir: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The run's options under ``overrides``, and which of them act while responses are collected: those stay the run's.

    Raises:
        UserError: an override that does not exist, does not fit, has no effect or needs what was not stored.
    """
    changed = load_config(run_dir, overrides, trust=True)  # the step's own config has been consented to
    options = {name: attrgetter(name)(step.config) for name in _OF_THE_COLLECTION}
    left = {name: value for name, value in options.items() if attrgetter(name)(changed) != value}
    changed, by_name = with_options(changed, left), by_option(overrides)
    for name, override in by_name.items():
        missing = _missing(name, changed)
        if missing is not None:
            raise UserError(f"{override} has no effect without {missing}.")
    _require_stored(step, changed, by_name)
    if any(attrgetter(name)(changed) != attrgetter(name)(step.config) for name in _COMPARED):
        validate(changed)
    return changed, list(left)


def by_option(overrides: Sequence[str]) -> dict[str, str]:
    """The overrides by the option that each sets.

    >>> by_option(["algorithm=dapo", "+seed=3"])
    {'algorithm': 'algorithm=dapo', 'seed': '+seed=3'}
    """
    return {override.lstrip("+").partition("=")[0]: override for override in overrides}


def replay_notes(step: Step) -> list[str]:
    """What keeps a replay from giving the run's very numbers; a sentence each."""
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
    return notes


def equal_ratios(replays: Iterable[Replay]) -> list[str]:
    """Of single optimizer steps on the policy's own responses: that no surrogate can show what it does to a ratio."""
    shares = [replay.figures.get("ess") for replay in replays if replay.optimizer_steps == 1]
    if not any(ess is not None and 1 - ess <= _ROUNDING for ess in shares):
        return []
    return [
        "The step is a single optimizer step on the policy's own responses: every ratio is 1, and surrogates of a "
        "ratio have the same gradient there; train.epochs=2, or a smaller train.optim_batch_size, compares them where "
        "optimizer steps have moved the policy."
    ]


def _missing(name: str, config: Config) -> str | None:
    """What an option has no effect without; None where it has one."""
    algorithm, option = config.algorithm, name.removeprefix("algorithm.")
    if option in OPTIONS and not surrogate(algorithm.objective).reads(option):
        return f"algorithm.objective={readers(option)}"
    if option in ("correction_mode", "correction_cap", "correction_floor") and algorithm.correction == "none":
        return "algorithm.correction"
    return "policy.kl_coef above 0" if name == "train.kl_coef_in_loss" and config.policy.kl_coef == 0 else None


def _require_stored(step: Step, changed: Config, by_name: dict[str, str]) -> None:
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


def _figures(step: Step, own: Replay, under: Mapping[str, Replay]) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
        stored, again = step.stored.metrics.get(name), own.figures.get(name)
        others = {algorithm: replay.figures.get(name) for algorithm, replay in under.items()}
        if any(value is not None for value in (stored, again, *others.values())):
            difference = None if stored is None or again is None else again - stored
            table[name] = {"stored": stored, "replayed": again, "difference": difference, "under": others}
    return table
