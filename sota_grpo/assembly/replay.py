"""Recompute a stored training step on the CPU: its advantages, losses and gradients.

Responses and rewards are the stored ones; weights and optimizer state are those of the checkpoint before the step. The
same step can be computed with other algorithms, each with its own advantages, loss weights and surrogate.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from sota_grpo import keys
from sota_grpo.assembly.compose import UNUSED_WITHOUT_SAMPLES, load_config
from sota_grpo.assembly.learning import kl_in_reward, make_advantage, make_learner, make_model, make_policy
from sota_grpo.config import Config, has_reference, model_name
from sota_grpo.config.spelling import walk, with_options
from sota_grpo.config.validators import validate
from sota_grpo.errors import UserError
from sota_grpo.files import file_reference
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.stored_steps import StoredStep, read_step, stored_steps
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import RowTable
from sota_grpo.rl.transforms import write_reference
from sota_grpo.text import one_line
from sota_grpo.training.checkpoint import CheckpointStore
from sota_grpo.training.learner import NonFiniteStep
from sota_grpo.training.runs import CHECKPOINTS

logger = logging.getLogger(__name__)

#: Metrics that are compared, in the order shown: those determined by a step's rows, weights and options.
FIGURES = (
    *("reward", "advantage", "loss/objective", "loss/kl", "loss/entropy", "grad_norm", "kl", "entropy"),
    *("entropy_coef", "entropy_threshold", "distill/reverse_kl"),
    *("clip_fraction", "correction_fraction", "off_policy_fraction", "ess", "gradient_share/max_token"),
    *("tokens/with_advantage", "kl_approx", "mismatch_kl", "lr"),
)
TOLERANCE = 1e-6  # largest relative difference of equal float32 results
_LOSSES = ("loss/objective", "loss/kl", "loss/entropy")
_ROUNDING = 1e-6  # largest 1 - ess (effective sample size) if all ratios are 1 up to float32 rounding
_OF_THE_COLLECTION = ["algorithm.overlong_buffer", "algorithm.dynamic_sampling"]
_COMPARED = [
    *(name for name, _, _ in walk() if name.startswith("algorithm.") and name != "algorithm.name"),
    *("policy.kl_coef", "train.kl_coef_in_loss"),
    *("train.epochs", "train.optim_batch_size"),  # the number of optimizer steps in the training step
]
_OF_THE_RUN = "run"  # names the algorithm of the run
_MEMORY = "train.micro_batch_tokens"
_CHUNK = 1 << 22  # numbers of a gradient read at a time


@dataclass(frozen=True)
class Step:
    """A stored training step, and the checkpoint from which it started."""

    config: Config  # of the run
    stored: StoredStep
    checkpoint: Path | None = None  # None: it started from the initial weights


@dataclass(frozen=True)
class Replay:
    """The result of computing a step with one algorithm."""

    figures: dict[str, float | None]  # metrics of FIGURES by name; None if not measured
    optimizer_steps: int  # taken in the training step
    #: Of all trained parameters, flat, before clipping, summed over the optimizer steps; None: not requested.
    gradient: Tensor | None = None


def replayed(
    run_dir: Path, number: int | None, overrides: Sequence[str] = (), *, trust: bool = False
) -> dict[str, Any]:
    """Recompute a stored step with the run's algorithm and optionally with others; UserError if it cannot be replayed.

    Args:
        number: number of the step; None: the last that can be replayed.
        overrides: ``algorithm=A,B,..`` lists algorithms: a preset, ``FILE.py:FUNCTION`` (the run's algorithm with this
            objective) or ``run`` (the run's algorithm). Other options apply to all of them.
        trust: see :func:`~sota_grpo.assembly.compose.load_config`.

    Returns:
        JSON-serializable values: ``title``; ``step`` and ``checkpoint``; ``figures``: {metric: {``stored``,
        ``replayed`` or algorithm: value, None if not measured}}; ``cosines``: {algorithm: {algorithm: cosine of their
        gradients}}, empty if none is compared; ``agrees``: whether losses and gradient norm equal the stored ones to
        ``TOLERANCE``; ``notes``: list of sentences.
    """
    step = open_step(run_dir, number, trust=trust)
    config_of_run, others, left = replay_configs(step, run_dir, overrides)
    replays: dict[str, Replay] = {}
    with TemporaryDirectory() as folder:
        for name, config in {"replayed": config_of_run, **others}.items():
            logger.info("Computing step %d%s.", step.stored.step, f" under {name}" if replays else " as the run did")
            replays[name] = replay(step, config, Path(folder) / str(len(replays)) if others else None)
        similar = cosines({name: one.gradient for name, one in replays.items() if one.gradient is not None})
    columns = {"stored": step.stored.metrics} | {name: one.figures for name, one in replays.items()}
    figures = {name: {column: values.get(name) for column, values in columns.items()} for name in FIGURES}
    agrees, verdict = compared(step.stored.metrics, replays["replayed"].figures)
    rows, steps = step.stored.rows, replays["replayed"].optimizer_steps
    checkpoint = None if step.checkpoint is None else step.checkpoint.name
    title = (
        f"Step {step.stored.step}, {len(rows)} samples in {len(rows.get(keys.GROUP_ID).unique())} groups, {steps} "
        f"optimizer step{'s' if steps != 1 else ''} from {checkpoint or 'the initial weights'}"
    )
    return {
        "title": title + (f"; under {' '.join(overrides)}" if others else ""),
        "step": step.stored.step,
        "checkpoint": checkpoint,
        "figures": {name: row for name, row in figures.items() if any(value is not None for value in row.values())},
        "cosines": similar,
        "agrees": agrees,
        "notes": [verdict, *_notes(step, [replays[name] for name in others]), *left],
    }


def open_step(run_dir: Path, number: int | None = None, *, trust: bool = False) -> Step:
    """Read step ``number`` (None: the last replayable one); UserError if it cannot be replayed or needs ``trust``."""
    config = load_config(run_dir, trust=trust, unused=UNUSED_WITHOUT_SAMPLES)
    checkpoints = dict(CheckpointStore(run_dir / CHECKPOINTS).paths())
    stored = stored_steps(run_dir)
    replayable = [step for step in stored if step == 0 or step in checkpoints]
    if number is None:
        number = max(replayable or stored, default=0)
    if number in replayable:
        return Step(config, read_step(stored[number]), checkpoints.get(number))
    fault = "stored, but the checkpoint before it is deleted" if number in stored else "not stored"
    there = ", ".join(map(str, replayable)) or "none"
    raise UserError(
        f"Step {number} of {run_dir} is {fault}; steps that can be replayed: {there}. To replay all of a run, train "
        "with logging.store_steps=true train.checkpoint_frequency=1 and a large train.keep_checkpoints."
    )


def replay(step: Step, config: Config, gradient_file: Path | None = None) -> Replay:
    """Compute the step in float32 on the CPU by ``config``'s algorithm; UserError if loss or gradient is not finite.

    ``gradient_file`` holds the returned gradient, 4 bytes per trained parameter; None: no gradient is returned.
    """
    rows, origin, threads = scored_rows(step, config), step.stored.origin, torch.get_num_threads()
    options = {"device": "cpu", "train.precision": "fp32", "train_model.torch_dtype": "float32"}
    if config.model.attn_implementation not in (None, "sdpa", "eager"):  # kernels of GPUs
        options["model.attn_implementation"] = "sdpa"
    config = with_options(config, options)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    try:
        if origin.device == "cpu" and origin.num_ranks == 0:  # the last bits depend on the threads
            torch.set_num_threads(min(origin.num_threads, os.cpu_count() or 1))
        with TemporaryDirectory() as dump, torch.random.fork_rng(devices=[]):
            policy = make_policy(config, make_model(config, torch.device("cpu")), "cpu")
            learner = make_learner(config, policy, tokenizer, "cpu", Path(dump))
            if step.checkpoint is not None:  # read each time: an optimizer changes the moments that it is given
                learner.load_state_dict(CheckpointStore.load(step.checkpoint, ["learner"])["learner"])
            if origin.num_ranks:  # the stream that adapters' dropout reads: of several ranks that of the first
                torch.manual_seed(sample_seed(step.config.seed, learner.version, 0))
            else:
                torch.set_rng_state(origin.rng)
            gradient = None if gradient_file is None else _summed_gradient(learner.parameters, gradient_file)
            before = learner.optimizer_steps
            update = learner.update(rows)
    except NonFiniteStep as error:
        raise UserError(f"Step {step.stored.step}: loss or gradient is not finite; use another algorithm.") from error
    finally:
        torch.set_num_threads(threads)
    advantages, rewards = rows.get(keys.ADVANTAGE).flatten(), rows.get(keys.REWARD).flatten()
    sampled = torch.tensor([float(mask.sum()) for mask in rows.cells(keys.ASSISTANT_MASK)])
    values = {"reward": rewards.mean().item(), "advantage": advantages.abs().mean().item(), **update}
    values["tokens/with_advantage"] = (sampled * (advantages != 0)).sum().item() / (sampled.sum().item() or math.nan)
    figures = {name: values[name] for name in FIGURES if name in values}
    return Replay(figures, learner.optimizer_steps - before, gradient)


def _summed_gradient(parameters: Sequence[Tensor], file: Path) -> Tensor:
    """Return a flat float32 vector, mapped to ``file``, to which each backward pass adds the parameters' gradients."""
    size = sum(parameter.numel() for parameter in parameters)
    free = shutil.disk_usage(file.parent).free
    if 4 * size > free:  # a mapped file that the disk cannot hold kills the process
        raise UserError(
            f"Each algorithm's gradient takes {4 * size / 2**30:.1f} GiB, but {file.parent} has only "
            f"{free / 2**30:.1f} GiB free; set TMPDIR to a folder with more space, or compare fewer algorithms."
        )
    flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)
    for parameter, slice_ in zip(parameters, flat.split([parameter.numel() for parameter in parameters])):

        def add(gradient: Tensor, slice_: Tensor = slice_) -> None:
            slice_.add_(gradient.detach().flatten())

        parameter.register_hook(add)  # type: ignore[no-untyped-call]
    return flat


def cosines(gradients: Mapping[str, Tensor]) -> dict[str, dict[str, float | None]]:
    """Return {name: {name: cosine}} of flat gradients of one length, summed in float64; None if one of the two is 0."""

    def product(first: Tensor, second: Tensor) -> float:
        return sum(float(a.double() @ b.double()) for a, b in zip(first.split(_CHUNK), second.split(_CHUNK)))

    squares = {name: product(vector, vector) for name, vector in gradients.items()}
    # not from the norms: the root of a square is exact, so that the cosine of two equal gradients is 1
    return {
        name: {
            other: product(gradient, two) / size if (size := math.sqrt(squares[name] * squares[other])) > 0 else None
            for other, two in gradients.items()
        }
        for name, gradient in gradients.items()
    }


def scored_rows(step: Step, config: Config) -> RowTable:
    """Return the stored rows with ``config``'s advantages, and rewards if its KL penalty in the reward differs."""
    rows = step.stored.rows.without(keys.ADVANTAGE)
    coefficient = kl_in_reward(config)
    if coefficient != kl_in_reward(step.config):
        reward = rows.get(keys.GRADED_REWARD, rows.get(keys.REWARD))  # with penalties on length, and users' functions
        rows = rows.without(keys.GRADED_REWARD, keys.KL_TERM)
        rows.set(keys.REWARD, reward)
        write_reference(rows, rows.cells(keys.REF_LOG_PROBS), in_reward_coeff=coefficient)
    (transform,) = make_advantage(config)
    return transform(rows)


def replay_configs(step: Step, run_dir: Path, overrides: Sequence[str]) -> tuple[Config, dict[str, Config], list[str]]:
    """Return (the run's config, {algorithm: config with it}, notes); UserError if an override cannot be replayed.

    The dict is empty if overrides at most save memory. Options of a preset that act while responses are collected stay
    the run's, and a note lists them.
    """

    def values(config: Config, names: Sequence[str]) -> dict[str, Any]:
        return {name: attrgetter(name)(config) for name in names}

    named = [override for override in overrides if override.startswith("algorithm=")]
    common = [override for override in overrides if override not in named]
    algorithms = ",".join(one.removeprefix("algorithm=") for one in named) if named else _OF_THE_RUN
    names = [name.strip() for name in algorithms.split(",")]
    if not all(names) or len(set(names)) < len(names):
        twice = next((name for name in names if names.count(name) > 1), "")
        fault = f"has {one_line(twice)} twice" if all(names) else "has an empty name"
        raise UserError(f"{one_line(' '.join(named))} {fault}; give each algorithm once: algorithm=A,B,C.")
    for override in common:
        name = override.lstrip("+").partition("=")[0]
        if name != _MEMORY and (name not in _COMPARED or name in _OF_THE_COLLECTION):
            raise UserError(
                f"{override} has no effect, because the step's responses, rewards and weights are stored; a replay "
                "allows algorithm=A,B,.., options of the algorithm (but overlong_buffer and dynamic_sampling), "
                f"policy.kl_coef, train.kl_coef_in_loss, train.epochs, train.optim_batch_size, and {_MEMORY}."
            )
    values_of_run, differ = values(step.config, _COMPARED), False
    others, notes = {}, []
    for name in names:
        try:
            chosen = [f"algorithm.objective={name}" if file_reference(name) else f"algorithm={name}"]
            under = [*(chosen if name != _OF_THE_RUN else ()), *common]
            changed = load_config(run_dir, under, trust=True)  # the run's has consent already
            theirs = values(changed, _OF_THE_COLLECTION)
            ignored = [option for option, value in theirs.items() if value != values_of_run[option]]
            changed = others[name] = with_options(changed, {option: values_of_run[option] for option in ignored})
            if values(changed, _COMPARED) != values_of_run:
                differ = True
                _require_stored(step, changed)
                validate(changed)
        except UserError as error:
            raise UserError(f"{name}: {error}" if len(names) > 1 else str(error)) from error
        if ignored:
            notes.append(f"{name}: {', '.join(ignored)} acts on collection only, so the run's value is kept.")
    if not differ and any(not override.startswith(_MEMORY) for override in overrides):
        raise UserError(f"{' '.join(overrides)} changes nothing in the step: nothing to compare; leave it out.")
    config = with_options(step.config, {_MEMORY: others[names[0]].train.micro_batch_tokens})
    return config, others if differ else {}, notes


def _require_stored(step: Step, changed: Config) -> None:
    has = f"step {step.stored.step} has"
    if changed.algorithm.decouple_terms and not step.config.algorithm.decouple_terms:
        raise UserError(
            f"algorithm.decouple_terms=true cannot be replayed: {has} no weights of the reward terms, which are stored "
            "only if the run was trained with that option; leave it out."
        )
    if has_reference(changed) and keys.REF_LOG_PROBS not in step.stored.rows.columns:
        readers = {name: attrgetter(name)(changed) for name in ("policy.kl_coef", "algorithm.distill_coef")}
        names = [f"{name}={value:g}" for name, value in readers.items() if value > 0]
        reader = (names or [f"algorithm.objective={changed.algorithm.objective}"])[0]
        raise UserError(
            f"{reader} needs the reference's log-probs, but {has} none (the run had no reference); leave it unset."
        )


def _notes(step: Step, others: Sequence[Replay]) -> list[str]:
    """Return sentences that explain why algorithms do not differ, or why the replay differs from the run."""
    origin, options = step.stored.origin, step.config.train_model
    weights = options.torch_dtype if options.torch_dtype in ("bfloat16", "float16") else "float32"
    notes = []
    if any(other.optimizer_steps == 1 and 1 - (other.figures.get("ess") or 0.0) <= _ROUNDING for other in others):
        notes.append(
            "The step is a single on-policy optimizer step: every ratio is 1, where surrogates of a ratio have the "
            "same gradient. To compare them after the policy has changed, use train.epochs=2 or a smaller "
            "train.optim_batch_size."
        )
    if (origin.device, origin.precision, weights) != ("cpu", "fp32", "float32") or origin.num_ranks > 1:
        ranks = f" by {origin.num_ranks} ranks" if origin.num_ranks > 1 else ""
        dropout = " Dropout masks differ too." if options.lora.enabled and options.lora.dropout > 0 else ""
        notes.append(
            f"The run computed in {origin.precision} with {weights} weights on {origin.device}{ranks}, the replay in "
            f"float32 on the CPU in one process, so their values differ slightly.{dropout}"
        )
    return notes


def compared(stored: Mapping[str, float | None], figures: Mapping[str, float | None]) -> tuple[bool, str]:
    """Return (whether losses and gradient norm equal the stored ones to ``TOLERANCE``, a sentence that says so).

    Differences are relative to the stored value; for a loss, whose terms may cancel, at least to mean |advantage|.
    """
    distances = {}
    for name in (*_LOSSES, "grad_norm"):
        before, after = stored.get(name), figures.get(name)
        if before is not None and after is not None:
            floor = (stored.get("advantage") or 0.0) if name in _LOSSES else 0.0
            distances[name] = abs(after - before) / max(abs(before), floor, 1e-30)
        elif before is not after:
            return False, f"The replay does not agree with the run: only one of the two has {name}."
    distance, name = max((distance, name) for name, distance in distances.items())
    if distance == 0:
        return True, "The replay gives the losses and the gradient norm of the run exactly."
    agrees = distance <= TOLERANCE
    outcome = "agrees" if agrees else "does not agree"
    return agrees, f"The replay {outcome} with the run: the largest relative difference is {distance:.1e} ({name})."
