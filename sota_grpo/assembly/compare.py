"""Several objectives on one optimizer step of a stored training step: their gradients and their tokens side by side.

All are given the same rows and the same weights; each has its own advantages, loss weights and surrogate. Rows, weights
and the way to them are those of :mod:`sota_grpo.assembly.replay`.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from sota_grpo import keys
from sota_grpo.assembly.compose import overrides_under
from sota_grpo.assembly.learning import make_learner, make_settings
from sota_grpo.assembly.replay import (
    COMPARED,
    MEMORY,
    ROUNDING,
    Step,
    by_option,
    in_float32_on_the_cpu,
    not_finite,
    open_step,
    require_stored,
    restored,
    scored_rows,
    under,
)
from sota_grpo.config import Config
from sota_grpo.config.spelling import with_options
from sota_grpo.config.validators import RULES, validate
from sota_grpo.errors import UserError
from sota_grpo.rl.coefficients import CoefficientLoss, RowCoefficients
from sota_grpo.rl.objective_files import surrogate
from sota_grpo.rl.table import Row
from sota_grpo.training.learner import Learner, NonFiniteStep

logger = logging.getLogger(__name__)

_STEPS = ("train.epochs", "train.optim_batch_size")  # into how many optimizer steps the training step is cut
# rules about what a run trains on, which a gradient does not
_ABOUT_TRAINING = (
    "several_steps_of_a_collection_need_a_ratio",
    "an_old_policy_is_weighed_where_its_log_probs_are_computed_again",
    "an_old_policy_needs_a_ratio",
)
_SAME = 1e-5  # of the root mean square of an objective's coefficients: float32's rounding and no more
_NEAR = 12  # tokens of text on either side of a token
_SAMPLES = 3  # that are given whole, or as much of them as _LONGEST tokens
_LONGEST = 600
_CHUNK = 1 << 22  # numbers of a gradient that are read at a time


@dataclass(frozen=True)
class Entry:
    """One of the algorithms that are compared."""

    name: str  # of a preset, FILE.py:FUNCTION, or "run"
    config: Config  # of the run, under this algorithm
    left: tuple[str, ...]  # its options that act while responses are collected, so are the run's here


@dataclass(frozen=True)
class Point:
    """Where the objectives are compared: an optimizer step, and the weights before it."""

    number: int  # of the optimizer step, counted from 1
    count: int  # optimizer steps of the training step
    indexes: list[int]  # its rows among the stored ones
    proximal: list[Tensor] | None  # by stored row [T_i], nats: log-probs before the first optimizer step
    log_ratio: Tensor  # of its sampled tokens [n], nats, float64: of these weights to the behaviour policy


@dataclass(frozen=True)
class Outcome:
    """What one objective does with the ``n`` sampled tokens of the optimizer step, float64 ``[n]``, row after row."""

    metrics: dict[str, float | None]  # of the learner
    sample_advantage: float  # mean absolute advantage of the samples
    coefficient: Tensor  # see RowCoefficients
    surrogate: Tensor
    weight: Tensor
    advantage: Tensor
    clipped: Tensor  # bool

    @cached_property
    def normalised(self) -> Tensor:
        """The coefficients in units of their root mean square, so that a constant factor makes no difference."""
        size = self.coefficient.square().mean().sqrt()
        return self.coefficient / size if size > 0 else torch.zeros_like(self.coefficient)

    def figures(self) -> dict[str, float | None]:
        """Shares of the tokens, and how the gradient is spread over them."""
        moving = self.advantage != 0
        masked = moving & (self.surrogate == 0) & ~self.clipped
        weighed = moving & (self.weight != 0)
        factors = self.surrogate[weighed] / (self.weight * self.advantage)[weighed]
        total, squares = self.coefficient.abs().sum(), self.coefficient.square().sum()
        return {
            "clipped": self.clipped.double().mean().item(),
            "masked": masked.double().mean().item(),
            "without_advantage": (~moving).double().mean().item(),
            "mean_weight": factors.mean().item() if len(factors) else None,
            "ess": (total.square() / squares / len(self.coefficient)).item() if squares > 0 else None,
        }


def compared(
    run_dir: Path,
    number: int | None,
    algorithms: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    optimizer_step: int | None = None,
    num_tokens: int = 20,
    trust: bool = False,
) -> dict[str, Any]:
    """Compute the gradient of one optimizer step under several algorithms; plain values throughout.

    Args:
        run_dir: of the run; nothing is written there.
        number: of the training step; None: the last that can be replayed.
        algorithms: each a preset, ``FILE.py:FUNCTION`` (the run's algorithm with this objective), or ``run``, its own.
        overrides: hold for all: options of the algorithm and of the KL term, ``train.epochs``,
            ``train.optim_batch_size`` and ``train.micro_batch_tokens``.
        optimizer_step: counted from 1; those before it are taken as the run took them. None: the last.
        num_tokens: how many tokens are given of those that differ.
        trust: consent to what the run's own config asks for.

    Returns:
        ``algorithms``: by name ``grad_norm`` (before it is clipped), ``losses``, mean absolute ``advantage`` of the
        samples, and over the sampled tokens the shares ``clipped``, ``masked`` (an advantage, and neither clipped nor a
        gradient of the surrogate) and ``without_advantage``, ``mean_weight`` (of a token with an advantage the factor
        on REINFORCE's gradient) and ``ess`` (``(sum |c|)^2 / (n sum c^2)`` of the gradient coefficients ``c``); None
        where there is none. ``cosines``: by name and name, None beside a gradient of 0. ``tokens``: those whose
        coefficients, in units of their root mean square under each algorithm, differ most, the ``difference`` being
        the largest less the smallest; of a single algorithm the largest coefficients. ``largest_difference`` is that
        of all tokens. ``texts``: whole samples with such tokens. ``ess``: of the ratios to the policy that sampled.
        ``notes``: sentences.

    Raises:
        UserError: the step cannot be replayed, or an algorithm cannot be computed on it.
    """
    step = open_step(run_dir, number, trust=trust)
    own = _own_config(step, run_dir, overrides)
    entries = [_entry(step, run_dir, name, overrides) for name in algorithms]
    point, outcomes, products = _measured(step, own, entries, optimizer_step)
    ratios = point.log_ratio.clamp(-300, 300).exp()  # whose squares are finite
    ess = (ratios.sum().square() / ratios.square().sum() / len(ratios)).item()
    by_name = dict(zip(algorithms, outcomes, strict=True))
    return {
        "run": str(run_dir),
        "step": step.stored.step,
        "checkpoint": None if step.checkpoint is None else step.checkpoint.name,
        "optimizer_step": point.number,
        "optimizer_steps": point.count,
        "samples": len(point.indexes),
        "num_tokens": len(ratios),
        "ess": ess,
        "options": list(overrides),
        **_gradients(by_name, products),
        **_differing(step, point, by_name, ratios, num_tokens),
        "notes": _notes(step, point, entries, ess),
    }


def _measured(
    step: Step, own: Config, entries: Sequence[Entry], number: int | None
) -> tuple[Point, list[Outcome], list[list[float]]]:
    """Where the algorithms are compared, what each does there, and the scalar products of their gradients."""
    outcomes = []
    with restored(step, own) as learner, Gradients(len(entries), learner.parameters) as gradients:
        point = _lead_up(step, learner, own, entries, number)
        for entry in entries:
            logger.info("Computing the gradient under %s.", entry.name)
            rows = scored_rows(step, entry.config).rows()
            if point.proximal is not None and _recomputes(entry.config):
                for row, values in zip(rows, point.proximal, strict=True):
                    row[keys.PROXIMAL_LOG_PROBS] = values
            outcomes.append(_outcome(learner, entry, [rows[index] for index in point.indexes]))
            gradients.add()
        return point, outcomes, gradients.products()


def _gradients(outcomes: dict[str, Outcome], products: list[list[float]]) -> dict[str, Any]:
    """``algorithms`` and ``cosines`` of :func:`compared`."""
    algorithms, cosines = {}, {}
    for i, (name, outcome) in enumerate(outcomes.items()):
        square = products[i][i]
        if not math.isfinite(square):
            raise UserError(f"The gradient under {name} is not finite at this step; leave it out.")
        losses = {loss: value for loss, value in outcome.metrics.items() if loss.startswith("loss/")}
        advantage = outcome.sample_advantage
        figures = outcome.figures()
        algorithms[name] = {"grad_norm": math.sqrt(square), "losses": losses, "advantage": advantage, **figures}
        # not from the norms: the root of a square is exact, so that the cosine of two equal gradients is 1
        sizes = [math.sqrt(square * products[j][j]) for j in range(len(products))]
        cosines[name] = {
            other: products[i][j] / size if size > 0 else None for j, (other, size) in enumerate(zip(outcomes, sizes))
        }
    return {"algorithms": algorithms, "cosines": cosines}


def _own_config(step: Step, run_dir: Path, common: Sequence[str]) -> Config:
    """The run's options, under which the optimizer steps before are taken, cut into steps as asked for."""
    for name, override in by_option(common).items():
        if name not in (MEMORY, *_STEPS, *COMPARED):
            raise UserError(
                f"{override} cannot change a step whose responses, rewards and weights are given; a comparison takes "
                f"algorithm=A,B,.., options of the algorithm, policy.kl_coef, train.kl_coef_in_loss, "
                f"{', '.join(_STEPS)} and {MEMORY}."
            )
    train = under(step, run_dir, common)[0].train
    own = with_options(step.config, {name: getattr(train, name.removeprefix("train.")) for name in (MEMORY, *_STEPS)})
    if any(name in by_option(common) for name in _STEPS):
        validate(own)
    return own


def _entry(step: Step, run_dir: Path, name: str, common: Sequence[str]) -> Entry:
    config, left = under(step, run_dir, overrides_under(name, common))
    require_stored(step, config, by_option(common))
    for rule in RULES:
        for sentence in rule(config) if rule.__name__ not in _ABOUT_TRAINING else ():
            raise UserError(f"{name}: {sentence}")
    return Entry(name, config, left)


def _recomputes(config: Config) -> bool:
    return make_settings(config, "cpu").recompute


def _lead_up(step: Step, learner: Learner, own: Config, entries: Sequence[Entry], number: int | None) -> Point:
    """Take the run's own optimizer steps up to the one that is asked for."""
    rows = scored_rows(step, own).rows()
    batches = learner.batches(rows)
    count = len(batches)
    number = count if number is None else number
    if not 1 <= number <= count:
        raise UserError(
            f"Step {step.stored.step} has {count} optimizer step{'s' if count > 1 else ''}, and --optimizer-step "
            f"{number} is none of them; train.epochs={number} makes more."
        )
    proximal = None
    if any(map(_recomputes, (own, *(entry.config for entry in entries)))):
        proximal = [values for _, values in learner.scored(rows)]
    if proximal is not None and _recomputes(own):
        for row, values in zip(rows, proximal, strict=True):
            row[keys.PROXIMAL_LOG_PROBS] = values
    logger.info("Taking %d optimizer steps as the run did.", number - 1)
    try:
        learner.advance(batches[: number - 1])
    except NonFiniteStep as error:
        raise not_finite(step) from error
    place = {id(row): index for index, row in enumerate(rows)}
    batch = batches[number - 1]
    if not any(bool(row[keys.ASSISTANT_MASK].any()) for row in batch):
        raise UserError(f"Optimizer step {number} of step {step.stored.step} has no sampled token.")
    ratios = [(values - row[keys.LOG_PROBS])[row[keys.ASSISTANT_MASK]] for row, values in learner.scored(batch)]
    return Point(number, count, [place[id(row)] for row in batch], proximal, torch.cat(ratios).double())


def _outcome(learner: Learner, entry: Entry, rows: Sequence[Row]) -> Outcome:
    """Leaves the gradient with the parameters."""
    learner.policy.scorer.entropy_grad = False  # an objective with a bonus asks for it
    config = in_float32_on_the_cpu(entry.config)
    own = make_learner(config, learner.policy, learner.pad_token_id, "cpu", learner.dump_dir, objective=CoefficientLoss)
    own.adopt_entropy_coef(learner)
    metrics = own.loss_gradient(rows)
    known = own.loss.rows  # type: ignore[attr-defined]
    columns: dict[str, list[Tensor]] = {name: [] for name in RowCoefficients.__dataclass_fields__}
    for row in rows:
        mask, advantage = row[keys.ASSISTANT_MASK], row[keys.ADVANTAGE]
        name = (int(row[keys.GROUP_ID]), int(row[keys.SAMPLE_ID]))
        terms = known.get(name) or RowCoefficients.untrained(len(mask), float(advantage.reshape(-1)[0]))
        for column, values in columns.items():
            values.append(getattr(terms, column)[: len(mask)][mask])
    flat = {column: torch.cat(values) for column, values in columns.items()}
    numbers = {column: values.double() for column, values in flat.items() if column != "clipped"}
    sizes = torch.stack([row[keys.ADVANTAGE].abs().mean() for row in rows])
    return Outcome(metrics, sizes.mean().item(), clipped=flat["clipped"], **numbers)


def _differing(
    step: Step, point: Point, outcomes: dict[str, Outcome], ratios: Tensor, num_tokens: int
) -> dict[str, Any]:
    """The tokens that the objectives treat most differently, and the samples that they are from."""
    stacked = torch.stack([outcome.normalised for outcome in outcomes.values()])
    gap = stacked.abs()[0] if len(stacked) == 1 else stacked.amax(0) - stacked.amin(0)
    ranked = gap.argsort(descending=True, stable=True)
    order = ranked[gap[ranked] > _SAME].tolist()
    rows = step.stored.rows.take(point.indexes)
    places = [
        (member, position)
        for member, row in enumerate(rows)
        for position in row[keys.ASSISTANT_MASK].nonzero().flatten().tolist()
    ]
    tokens = []
    for flat in order[: max(0, num_tokens)]:
        member, position = places[flat]
        tokens.append(
            {
                **_text_around(step, point.indexes[member], position),
                "ratio": ratios[flat].item(),
                "difference": gap[flat].item(),
                "algorithms": {
                    name: {
                        "coefficient": outcome.normalised[flat].item(),
                        "advantage": outcome.advantage[flat].item(),
                        "clipped": bool(outcome.clipped[flat]),
                    }
                    for name, outcome in outcomes.items()
                },
            }
        )
    members = list(dict.fromkeys(places[flat][0] for flat in order))[:_SAMPLES]
    texts = [_text(step, point, member, places, gap, outcomes) for member in members]
    return {"tokens": tokens, "largest_difference": gap.max().item() if len(gap) else 0.0, "texts": texts}


def _of_row(row: Row) -> dict[str, int]:
    return {"group_id": int(row[keys.GROUP_ID]), "sample_id": int(row[keys.SAMPLE_ID])}


def _text_around(step: Step, index: int, position: int) -> dict[str, Any]:
    """A token's sample, its position in the response, and its text within that of its neighbours."""
    row, pieces = step.stored.rows[index], step.stored.pieces[index]
    at = position - row[keys.PROMPT_TOKENS].shape[-1]
    return {
        **_of_row(row),
        "position": at,
        "before": "".join(pieces[max(0, at - _NEAR) : at]),
        "text": "".join(pieces[at : at + 1]),
        "after": "".join(pieces[at + 1 : at + 1 + _NEAR]),
    }


def _text(
    step: Step,
    point: Point,
    member: int,
    places: Sequence[tuple[int, int]],
    gap: Tensor,
    outcomes: dict[str, Outcome],
) -> dict[str, Any]:
    """A sample's response by token, around the token that differs most, with the coefficients of each algorithm."""
    index = point.indexes[member]
    row, pieces = step.stored.rows[index], step.stored.pieces[index]
    prompt = row[keys.PROMPT_TOKENS].shape[-1]
    own = {position - prompt: flat for flat, (one, position) in enumerate(places) if one == member}
    most = max(own, key=lambda at: gap[own[at]].item())
    start = max(0, min(most - _LONGEST // 2, len(pieces) - _LONGEST))
    shown = range(start, min(len(pieces), start + _LONGEST))
    reward = row[keys.REWARD].item()
    return {
        **_of_row(row),
        "reward": reward if math.isfinite(reward) else None,
        "start": start,
        "tokens": len(pieces),
        "pieces": [pieces[at] for at in shown],
        "coefficients": {
            name: [round(outcome.normalised[own[at]].item(), 6) if at in own else None for at in shown]
            for name, outcome in outcomes.items()
        },
    }


def _notes(step: Step, point: Point, entries: Sequence[Entry], ess: float) -> list[str]:
    origin, notes = step.stored.origin, []
    if 1 - ess <= ROUNDING:
        notes.append(
            "Every ratio is 1, and surrogates of a ratio have the same gradient there; train.epochs=2, or a smaller "
            "train.optim_batch_size, compares them where optimizer steps have moved the policy."
        )
    else:
        notes += [
            f"{entry.name} reads no ratio: it takes tokens of an older policy for this one's."
            for entry in entries
            if not surrogate(entry.config.algorithm.objective).reads("log_ratio")
        ]
    notes += [
        f"{entry.name}: {', '.join(entry.left)} is read while responses are collected, so left as the run had it."
        for entry in entries
        if entry.left
    ]
    if step.config.train_model.lora.dropout > 0 and step.config.train_model.lora.enabled:
        notes.append("Dropout is off in the gradients; the optimizer steps before them have it, as in the run.")
    if (origin.device, origin.precision) != ("cpu", "fp32"):
        notes.append(f"Computed in float32 on the CPU; the run computed in {origin.precision} on {origin.device}.")
    return notes


class Gradients(ExitStack):
    """Gradients of the same parameters on disk, so that one of them at a time is in memory.

    Args:
        count: how many will be added.
        parameters: whose ``.grad`` is added; None counts as 0.

    Raises:
        UserError: there is no room for them where temporary files are.

    >>> weight = torch.zeros(3, requires_grad=True)
    >>> with Gradients(2, [weight]) as gradients:
    ...     for values in ([1.0, 2.0, 2.0], [0.0, 3.0, 0.0]):
    ...         weight.grad = torch.tensor(values)
    ...         gradients.add()
    ...     gradients.products()
    [[9.0, 6.0], [6.0, 9.0]]
    """

    def __init__(self, count: int, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self._size = sum(parameter.numel() for parameter in self._parameters)
        self._files: list[IO[bytes]] = []
        folder = tempfile.gettempdir()
        needed, free = 4 * self._size * count, shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"{count} gradients take {needed / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB free; name "
                "fewer algorithms, or set TMPDIR to a folder with more room."
            )

    def add(self) -> None:
        """Write what the parameters' ``.grad`` holds, and empty it."""
        try:
            file = self.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (it has no name)
            self._files.append(file)
            for parameter in self._parameters:
                value = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                file.write(value.detach().float().contiguous().numpy().data)
                parameter.grad = None
            file.flush()
        except OSError as error:
            folder = tempfile.gettempdir()
            raise UserError(f"A gradient cannot be written to {folder} ({error.strerror}); set TMPDIR.") from error

    def products(self) -> list[list[float]]:
        """Of every two gradients, in the order added, their scalar product; summed in float64."""
        files = [np.memmap(file, np.float32, "r", shape=(self._size,)) for file in self._files]
        sums = [[0.0] * len(files) for _ in files]
        for start in range(0, self._size, _CHUNK):
            parts = [file[start : start + _CHUNK].astype(np.float64) for file in files]
            for i, one in enumerate(parts):
                for j in range(i, len(parts)):
                    sums[i][j] += float((one * parts[j]).sum())
        return [[sums[min(i, j)][max(i, j)] for j in range(len(files))] for i in range(len(files))]
