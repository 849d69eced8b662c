"""A stored turn computed again, offline and on the CPU: its advantages, its losses and its gradients.

No engine is started, nothing is sampled or graded: responses and rewards are those that were stored, the weights and
the optimizer those of the checkpoint before the turn, and the turn is done by the learner that did it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from sota_grpo import keys
from sota_grpo.assembly.learning import add_adapter, make_advantage, make_learner, make_model, make_policy
from sota_grpo.checkpoint import CheckpointStore
from sota_grpo.collate import row_list
from sota_grpo.compose import load_config
from sota_grpo.config import Config, model_name
from sota_grpo.errors import UserError
from sota_grpo.learner import NonFiniteStep
from sota_grpo.loss_inputs import LossTokens
from sota_grpo.objectives import GRPOLoss, GRPOLossOutput
from sota_grpo.policy.load import load_tokenizer
from sota_grpo.recording.steps import STEPS_FOLDER, StoredStep, read_step, step_of, stored_steps
from sota_grpo.records import sample_seed
from sota_grpo.runs import CHECKPOINTS
from sota_grpo.transforms.penalties import write_reference

#: What is compared, in the order shown: metrics of a turn that follow from its rows, weights and options alone.
FIGURES = (
    *("reward", "advantage", "loss/objective", "loss/kl", "loss/entropy", "grad_norm", "kl", "entropy"),
    *("clip_fraction", "correction_fraction", "ess", "kl_approx", "mismatch_kl", "lr"),
)


@dataclass(frozen=True)
class Turn:
    """A stored turn, and what it started from.

    Attributes:
        config: of the run.
        stored: the turn.
        checkpoint: with the learner's state before the turn; None: the turn started from the initial weights.
    """

    config: Config
    stored: StoredStep
    checkpoint: Path | None = None


@dataclass(frozen=True)
class Replay:
    """A turn computed once.

    Attributes:
        figures: those of :data:`FIGURES` that there are; None where nothing could be measured.
        advantages: ``[N]``, in the order of the stored rows.
        clipped: by group and sample, for each use of the row which of its trained tokens the clip took the gradient of.
        optimizer_steps: taken in the turn.
    """

    figures: dict[str, float | None]
    advantages: Tensor
    clipped: dict[tuple[int, int], list[Tensor]]
    optimizer_steps: int


def open_turn(run_dir: Path, step: int | None = None) -> Turn:
    """Turn ``step`` of a run, or the last that can be replayed.

    Raises:
        UserError: no run, no such turn, or its checkpoint is not there; the message names the turns that can be had.
    """
    config = load_config(run_dir)
    checkpoints = dict(CheckpointStore(run_dir / CHECKPOINTS).paths())
    stored = {step_of(path): path for path in stored_steps(run_dir)}
    replayable = [number for number in stored if number == 0 or number in checkpoints]
    if not stored:
        raise UserError(f"There is no stored turn in {run_dir / STEPS_FOLDER}; logging.store_steps=true writes some.")
    chosen = max(replayable, default=None) if step is None else step
    if chosen is None or chosen not in replayable:
        raise UserError(_not_there(run_dir, step, step in stored, replayable))
    return Turn(config, read_step(stored[chosen]), checkpoints.get(chosen))


def _not_there(run_dir: Path, step: int | None, is_stored: bool, replayable: list[int]) -> str:
    others = f"turns that can be replayed: {', '.join(map(str, replayable)) or 'none'}"
    if step is None:
        return f"The checkpoints of {run_dir} do not belong to its stored turns; {others}."
    if is_stored:
        return f"Turn {step} of {run_dir} is stored, and the checkpoint with its weights is gone; {others}."
    return f"Turn {step} of {run_dir} is not stored; {others}."


def replay(turn: Turn, config: Config | None = None) -> Replay:
    """Compute the turn once more, in float32 on the CPU, as the run did or under the algorithm of ``config``.

    Args:
        config: of the run but for its algorithm and its KL term; None: as the run did.

    Raises:
        UserError: the model is not there, or the turn is not finite under ``config``.
        CheckpointError: the checkpoint is damaged.
    """
    config = _in_float32_on_the_cpu(config or turn.config)
    tokenizer = load_tokenizer(model_name(config), trust_remote_code=config.model.trust_remote_code)
    rows = _scored_rows(turn, config)
    with TemporaryDirectory() as dump, _as_it_was_computed(turn):
        model = add_adapter(config, make_model(config, torch.device("cpu")))
        policy = make_policy(config, model, "cpu")
        learner = make_learner(config, policy, tokenizer.pad_token_id, "cpu", Path(dump), objective=ClipWatch)
        if turn.checkpoint is not None:  # read each time: an optimizer changes the moments that it is given
            learner.load_state_dict(CheckpointStore.load(turn.checkpoint)["learner"])
        before = learner.optimizer_steps
        _seed(turn, learner.version)
        try:
            update = learner.update(rows)
        except NonFiniteStep as error:
            raise UserError(f"Turn {turn.stored.step} is not finite when it is computed like this.") from error
    advantages = torch.stack([row.get(keys.ADVANTAGE).reshape(()) for row in row_list(rows)])
    rewards = torch.stack([row.get(keys.REWARD).reshape(()) for row in row_list(rows)])
    found = {"reward": rewards.mean().item(), "advantage": advantages.abs().mean().item(), **update}
    return Replay(
        figures={name: found[name] for name in FIGURES if name in found},
        advantages=advantages,
        clipped=learner.loss.clipped,  # type: ignore[attr-defined]
        optimizer_steps=learner.optimizer_steps - before,
    )


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


def kl_in_reward(config: Config) -> float:
    """Coefficient of the KL that is taken off the reward; 0 where it stands in the loss."""
    return 0.0 if config.train.kl_coef_in_loss else config.policy.kl_coef


def _in_float32_on_the_cpu(config: Config) -> Config:
    config = copy.deepcopy(config)
    config.device = "cpu"
    config.train.precision, config.train_model.torch_dtype = "fp32", "float32"
    config.train_model.log_probs = "tiled"
    if config.model.attn_implementation not in (None, "sdpa", "eager"):  # kernels of GPUs
        config.model.attn_implementation = "sdpa"
    return config


def _scored_rows(turn: Turn, config: Config) -> TensorDictBase:
    """The rows as stored, their advantages computed anew; their rewards too where another KL is taken off them.

    Penalties on length, and what a user's functions gave, are in the stored rewards.
    """
    rows: TensorDictBase = lazy_stack([row.exclude(keys.ADVANTAGE).copy() for row in turn.stored.rows])
    coefficient = kl_in_reward(config)
    if coefficient != kl_in_reward(turn.config):
        graded = rows.get(keys.GRADED_REWARD, None)
        reward = rows.get(keys.REWARD) if graded is None else graded
        rows = lazy_stack([row.exclude(keys.GRADED_REWARD, keys.KL_TERM) for row in row_list(rows)])
        rows.set(keys.REWARD, reward)
        reference = [row.get(keys.REF_LOG_PROBS) for row in row_list(rows)]
        write_reference(rows, reference, in_reward_coeff=coefficient or None)
    for _, transform in make_advantage(config):
        rows = transform(rows)
    return rows


@contextmanager
def _as_it_was_computed(turn: Turn) -> Iterator[None]:
    """The number of threads of the run, on which the last bits depend; the random streams are given back afterwards."""
    origin, now = turn.stored.origin, torch.get_num_threads()
    if origin.device == "cpu" and origin.num_ranks == 0:
        torch.set_num_threads(min(origin.num_threads, os.cpu_count() or 1))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(now)


def _seed(turn: Turn, version: int) -> None:
    """The stream that adapters' dropout reads: that of the run, or, of several ranks, that of the first."""
    if turn.stored.origin.num_ranks:
        torch.manual_seed(sample_seed(turn.config.seed, version, 0))
    else:
        torch.set_rng_state(turn.stored.origin.rng)
