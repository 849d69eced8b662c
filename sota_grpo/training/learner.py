"""The learner: rows in, optimizer steps, metrics out."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.tensor import DTensor

from sota_grpo import keys
from sota_grpo.engines import Engine
from sota_grpo.errors import UserError, memory_for
from sota_grpo.functional import adapted_entropy_coef, top_entropy_tokens
from sota_grpo.policy.causal import ENTROPY, CausalPolicy, layer_matrices
from sota_grpo.policy.optimizers import make_optimizer
from sota_grpo.policy.sharding import (
    Ranks,
    divided,
    gathered,
    is_first_holder,
    load_optimizer_state,
    local,
    optimizer_state,
    reduce_gradients,
    replicated,
)
from sota_grpo.policy.weight_pack import Checksum
from sota_grpo.recording.metrics import reduce_updates
from sota_grpo.rl.collate import known_tokens, pad_rows, row_prompts
from sota_grpo.rl.objectives import GRPOLoss, diagnostic_means, mismatch
from sota_grpo.rl.records import GradientGap
from sota_grpo.rl.table import Key, Row, RowTable, plain_rows
from sota_grpo.training.changed_weights import Changed, perturb, restore
from sota_grpo.training.forward_passes import (
    ForwardPasses,
    LearnerSettings,
    Pass,
    Planner,
    Share,
    dropouts,
    learning_rate_factor,
    without_dropout,
)

METRIC_NAMES = {
    "ESS": "ess",
    "kl_to_ref": "kl",
    "loss_objective": "loss/objective",
    "loss_kl_to_ref": "loss/kl",
    "loss_entropy": "loss/entropy",
    "reverse_kl": "distill/reverse_kl",
}
SHARE = "gradient_share/max_token"


class NonFiniteStep(UserError):
    """A loss or a gradient was not finite; the batch that caused it lies beside the run."""


class Learner(ForwardPasses):
    """Trains ``policy`` with ``loss``.

    Contract. Consumes: complete batches of graded rows. Produces: new weights, ``version`` raised by one per
    :meth:`update`. Waits for: nobody. When a step is not finite it stops with the batch dumped.

    Args:
        policy: gives log-probs of padded rows; its trainable parameters are optimised.
        loss: the objective around the same policy.
        settings: see :class:`LearnerSettings`.
        pad_token_id: fills the padding.
        dump_dir: where a batch that gave a non-finite step is written.
        seed: order of the groups in the second and later epochs.
        ranks: the processes that train this policy together, each of which holds a part of it (see
            :func:`sota_grpo.policy.sharding.shard`) and is given the same calls with the same rows. None: this one.
    """

    def __init__(
        self,
        policy: CausalPolicy,
        loss: GRPOLoss,
        settings: LearnerSettings,
        *,
        pad_token_id: int,
        dump_dir: Path,
        seed: int = 0,
        ranks: Ranks | None = None,
    ):
        super().__init__(policy, settings, pad_token_id, ranks)
        self.loss = loss
        self.dump_dir = dump_dir
        self.seed = seed
        self.version = 0
        self.optimizer_steps = 0
        # the scorer's names: they are those of checkpoints
        self.trainable = {name: p for name, p in policy.scorer.named_parameters() if p.requires_grad}
        self.parameters = list(self.trainable.values())
        self.drops_out = bool(dropouts(policy))
        self.changed: list[Changed] = []
        #: Called before a parameter or what the optimizer keeps of one changes: somebody may be copying them.
        self.before_change: Callable[[], object] = lambda: None
        self.optimizer = make_optimizer(settings.optimizer, self.parameters, layer_matrices(policy), settings.rates)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, settings)
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.precision == "fp16")
        self.entropy_coef = loss.entropy_coeff  # of the bonus while the entropy is too low, where it is adapted
        if settings.entropy_target is not None:
            self._apply_entropy_coef(0.0)

    def update(self, rows: RowTable | TensorDictBase | Sequence[Row]) -> dict[str, float | None]:
        """A training step: ``epochs`` passes over the ``[N]`` ragged rows, an optimizer step per ``optim_batch_size``.

        Returns:
            Metrics of the step: means over its optimizer steps; ``mismatch_kl`` is that of the weights before it and
            without dropout. None where there was nothing to measure: no trained token, or no step taken.

        Raises:
            NonFiniteStep: a loss or gradient is NaN or infinite.
        """
        return self.update_share(self.step_planner().shares(RowTable.of(rows), self.version)[self.share])

    def update_share(self, share: Share) -> dict[str, float | None]:
        """:meth:`update`, given this rank's share of it."""
        began = time.perf_counter()
        rows, clean = plain_rows(share.rows), None
        own = self.within_memory(lambda: self._own(rows, self.fitting_scores(rows, share.scoring), self.log_probs))
        if self.settings.recompute:
            for row, values in zip(rows, self._whole(own, share.places, share.lengths), strict=True):
                row[keys.PROXIMAL_LOG_PROBS] = values
        elif share.scoring:  # the loss's own forward has dropout, the engine none
            clean = self._mismatch(rows, own)
        steps = [self._step(rows, passes) for passes in share.steps]
        self.version += 1
        metrics = reduce_updates(steps)
        # the later steps compare with weights that they changed
        is_clean = share.scoring and not self.settings.recompute
        metrics["mismatch_kl"] = clean if is_clean else steps[0]["mismatch_kl"]
        metrics |= {"packed": int(self.policy.shared_prompt), "optimizer_steps": self.optimizer_steps}
        return metrics | {"time/learn_s": time.perf_counter() - began}

    def step_planner(self) -> Planner:
        """Who plans :meth:`update`."""
        steady = self.settings.entropy_target is None  # else rows without an advantage may learn from a bonus, later
        return self.planner(seed=self.seed, advantage_only=self.loss.advantage_only and steady)

    def _mismatch(self, rows: Sequence[Row], own: Mapping[int, torch.Tensor]) -> float | None:
        """Mean KL of the log-probs that the ranks measured to the engine's; None over no token."""
        masks = {index: known_tokens(rows[index]) for index in sorted(own)}
        gaps = [(own[index] - rows[index][keys.LOG_PROBS])[mask] for index, mask in masks.items()]
        flat = torch.cat(gaps) if gaps else torch.zeros(0)
        terms = {"kl": mismatch(flat).sum(), "tokens": torch.tensor(float(len(flat)))}
        sums = self.ranks.sums(terms)
        return float(sums["kl"] / sums["tokens"]) if sums["tokens"] else None

    def _passes(
        self, rows: Sequence[Row], token_budget: int, *, keep_truncated: bool = False, learn: bool = True
    ) -> list[Pass]:
        """This rank's passes over the rows of one optimizer step; without ``learn`` none has a backward pass."""
        order, prompts = range(len(rows)), row_prompts(rows)
        by_rank = self.step_planner().passes(rows, order, prompts, token_budget, keep_truncated=keep_truncated)
        return [one._replace(learns=one.learns and learn) for one in by_rank[self.share]]

    @memory_for(
        "the optimizer's update",
        "use optimizer.name=adamw_8bit, train_model.lora.enabled=true or more train_model.num_devices",
    )
    def _step(self, rows: Sequence[dict[Key, Any]], passes: Sequence[Pass]) -> dict[str, float | None]:
        """One optimizer step; under fp16 an overflowing gradient skips it: the scale falls, schedule and count stay."""
        totals = self.within_memory(lambda: self._run(rows, self.fitting(rows, passes)))
        scale, rate = self.scaler.get_scale(), self.optimizer.param_groups[0]["lr"]
        if self.skips_by_itself:
            losses, metrics, norm = self._measured(totals, self._stepped(totals.losses))
        else:
            self.scaler.unscale_(self.optimizer)
            clipped = nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_grad_norm or math.inf)
            losses, metrics, norm = self._measured(totals, replicated(clipped))
        skipped = self.scaler.is_enabled() and scale > 1 and not math.isfinite(norm)
        judged = losses if skipped else {**losses, "grad_norm": norm}
        if not all(math.isfinite(value) for value in judged.values()):
            counted = [index for one in passes for index, weight in zip(one.rows, one.weights) if weight]
            self._stop_at_non_finite([rows[index] for index in counted or passes[0].rows], judged)
        if not skipped:
            if not self.skips_by_itself:
                self.before_change()
                self.scaler.step(self.optimizer)
            self.schedule.step()
            self.optimizer_steps += 1
        self._adapt_entropy_coef(metrics, skipped=skipped)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)  # their memory is an engine's until the next step
        metrics |= {**losses, "grad_norm": None if skipped else norm, "lr": None if skipped else rate}
        if self.scaler.is_enabled():
            metrics |= {"skipped_steps": int(skipped), "loss_scale": scale}
        return metrics

    @property
    def skips_by_itself(self) -> bool:
        """Whether the optimizer itself clips, and skips a step that is not finite.

        Then an optimizer step waits for the GPU once, after all of it is queued.
        """
        whole = not any(isinstance(parameter, DTensor) for parameter in self.parameters)
        alone = self.device.type == "cuda" and whole and not self.scaler.is_enabled()
        return alone and isinstance(self.optimizer, torch.optim.AdamW)

    def _stepped(self, losses: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Take the step by fused AdamW, unless a loss or a gradient is not finite; the gradient's norm."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).float()
        finite = torch.stack([norm, *(loss.float() for loss in losses.values())]).isfinite().all()
        limit = self.settings.clip_grad_norm or math.inf
        self.before_change()
        optimizer: Any = self.optimizer  # these two are how torch's GradScaler speaks to fused optimizers
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)  # as clip_grad_norm_ does it
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        return norm

    def _accumulate(
        self, rows: Sequence[Row], token_budget: int, *, keep_truncated: bool = False, learn: bool = True
    ) -> tuple[dict[str, float], dict[str, float | None]]:
        """Gradient of the whole ``rows`` in ``.grad``; the losses, and the diagnostics (None over no trained token).

        Without ``learn`` there are no backward passes and no gradient.
        """
        plain = plain_rows(rows)
        passes = self._passes(plain, token_budget, keep_truncated=keep_truncated, learn=learn)
        losses, metrics, _ = self._measured(self._run(plain, passes), torch.zeros(()))
        return losses, metrics

    def _run(self, rows: Sequence[dict[Key, Any]], passes: Sequence[Pass]) -> Totals:
        """:meth:`_accumulate` over passes of ``rows``, without a wait for the device."""
        threshold = self._keep_top_entropy(rows, passes)
        last = sum(one.learns for one in passes)
        self.policy.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses: dict[str, torch.Tensor] = {}
        sums: dict[str, torch.Tensor] = {}
        largest: list[torch.Tensor] = []
        for index, (micro, weights, learns) in enumerate(passes, start=1):
            if self.ranks.size > 1:
                reduce_gradients(self.policy, now=index == last or not self.ranks.reduce_once)
            batch = self.padded([rows[place] for place in micro], weights)
            with self.autocast(), torch.set_grad_enabled(learns):
                out = self.loss(batch)
            terms = {name: value for name, value in out.items() if name.startswith("loss_")}
            if learns:
                self.scaler.scale(torch.stack(list(terms.values())).sum()).backward()
            _add(losses, terms)
            _add(sums, dict(out.sums.items()))
            largest.append(out.gradient_squared_max)
        top = torch.stack(largest).amax(0, keepdim=True)
        if self.ranks.size > 1:
            losses, sums = self.ranks.sums(losses), self.ranks.sums(sums)
            top = self.ranks.joined(top.cpu())[0]
        share = top.amax().to(sums["tokens"].device) / sums["gradient_squared"]
        return Totals(losses, diagnostic_means(sums) | {"tokens": sums["tokens"], SHARE: share}, threshold)

    def _measured(self, totals: Totals, norm: torch.Tensor) -> tuple[dict[str, float], dict[str, float | None], float]:
        """Losses, diagnostics (None over no trained token) and the gradient's norm as numbers, in one transfer."""
        values = [*totals.losses.values(), *totals.means.values(), norm]
        device = next(iter(totals.losses.values())).device
        numbers = torch.stack([value.to(device, torch.float64) for value in values]).tolist()
        names = [METRIC_NAMES.get(name, name) for name in (*totals.losses, *totals.means)]
        losses = dict(zip(names, numbers[: len(totals.losses)]))
        means = dict(zip(names[len(losses) :], numbers[len(losses) : -1])) | totals.threshold
        unmeasured = {SHARE} if math.isnan(means[SHARE]) else set()  # where no token has a gradient
        unmeasured |= set() if means.pop("tokens") > 0 else means.keys()
        diagnostics = {name: None if name in unmeasured else value for name, value in means.items()}
        return losses, diagnostics, numbers[-1]

    def _keep_top_entropy(self, rows: Sequence[dict[Key, Any]], passes: Sequence[Pass]) -> dict[str, float]:
        """Mark which trained tokens of the whole step the surrogate keeps; the least entropy of these, if not all are.

        The entropies are the policy's before the step and without dropout, of all ranks, however the step is split.
        """
        if self.settings.top_entropy_quantile >= 1:
            return {}
        micros = [(one.rows, any(one.weights)) for one in passes]
        entropy = self._own(rows, micros, lambda batch: self._policy_outputs(batch).get(ENTROPY))
        weights = {index: weight for one in passes for index, weight in zip(one.rows, one.weights) if weight}
        trained = {index: rows[index][keys.ASSISTANT_MASK] for index in weights}
        own = torch.cat([torch.zeros(0), *(entropy[index][mask] for index, mask in trained.items())])
        every, mine = self.ranks.joined(own)
        kept = top_entropy_tokens(
            every, torch.ones_like(every, dtype=torch.bool), share=self.settings.top_entropy_quantile
        )
        sizes = [int(mask.sum()) for mask in trained.values()]
        for (index, mask), values in zip(trained.items(), kept[mine].split(sizes)):
            rows[index][keys.OBJECTIVE_MASK] = torch.zeros_like(mask).masked_scatter(mask, values)
        return {"entropy_threshold": every[kept].min().item() if kept.any() else math.nan}

    def _adapt_entropy_coef(self, metrics: dict[str, float | None], *, skipped: bool) -> None:
        """Note the coefficient that a step applied, and let its entropy decide on that of the next."""
        settings = self.settings
        if settings.entropy_target is None:
            return
        metrics["entropy_coef"], entropy = self.loss.entropy_coeff, metrics["entropy"]
        if entropy is not None and not skipped:
            bounds = {"delta": settings.entropy_coef_delta, "largest": settings.entropy_coef_max}
            adapted = adapted_entropy_coef(self.entropy_coef, entropy, target=settings.entropy_target, **bounds)
            self.entropy_coef, applied = adapted
            self._apply_entropy_coef(applied)

    @property
    def _entropy_coefs(self) -> list[float]:
        return [self.entropy_coef, self.loss.entropy_coeff]

    def _apply_entropy_coef(self, applied: float) -> None:
        """What the next step's loss multiplies the entropy by; the head computes no gradient for a bonus of 0."""
        self.loss.entropy_coeff = applied
        self.policy.scorer.entropy_grad = applied > 0

    def give_back(self) -> None:
        """Return to the device what this process holds there in reserve only, for who takes turns on it."""
        torch.cuda.empty_cache()

    def gradient(self, rows: Sequence[Row], *, token_budget: int) -> dict[str, torch.Tensor]:
        """This rank's part of the gradient of one step over ``rows``, by parameter, on the CPU; nothing is updated.

        Truncated rows take part, since all may be; adapter dropout is off. Advantages and log-probs are not those of
        the rows: see :meth:`_unclipped`.
        """
        gradients = {name: value.cpu() for name, value in self._gradients(self._unclipped(rows), token_budget)}
        self.optimizer.zero_grad(set_to_none=True)
        return gradients

    def gradient_gap(self, rows: Sequence[Row], token_budgets: tuple[int, int]) -> GradientGap:
        """How far :meth:`gradient` under the second budget is from that under the first.

        The first waits on the CPU and comes back one parameter at a time, so that a GPU holds no more than in a step.
        On a CPU both are computed in float32 if the parameters are, whatever the precision of training: there it is the
        same code, and nothing of a mistake is hidden by rounding. A GPU has other kernels for half precision, and would
        need more memory.
        """
        trained = self.settings.precision
        precision = "fp32" if self.single and self.device.type == "cpu" else trained
        first, second = token_budgets
        norms, gaps = [], []
        with contextlib.nullcontext() if precision == trained else self.computing(precision):
            rows = self._unclipped(rows)
            one = {name: value.cpu() for name, value in self._gradients(rows, first)}
            self.optimizer.zero_grad(set_to_none=True)
            for name, other in self._gradients(rows, second):
                own = one.pop(name).to(other.device)
                if is_first_holder(self.trainable[name], self.ranks):
                    norms.append(own.norm())
                    gaps.append(own.sub_(other).norm())
        self.optimizer.zero_grad(set_to_none=True)
        norm = self._norm(norms)
        return GradientGap(norm, self._norm(gaps) / max(norm, 1e-30), self.single and precision == "fp32")

    def _gradients(self, rows: Sequence[Row], token_budget: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Of a dry run, each where it lies: in ``.grad``, which the caller empties."""
        self._dry_run(rows, token_budget)
        scale = self.scaler.get_scale()
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                yield name, local(parameter.grad.detach()).div_(scale)

    def _norm(self, parts: Sequence[torch.Tensor]) -> float:
        """Over all ranks, from the norms of what is this one's to count."""
        own = torch.stack(list(parts)).norm() if parts else torch.zeros(())
        return float(own if self.ranks.size == 1 else self.ranks.total(own.double().square()).sqrt())

    def perturb(self, but: Collection[str] = ()) -> None:
        """Change every trainable tensor ``but`` these, by name, in place and each time alike, until :meth:`restore`."""
        self.before_change()
        self.changed = perturb(parameter for name, parameter in self.trainable.items() if name not in but)

    def trainable_names(self) -> list[str]:
        """The names of the trainable tensors."""
        return list(self.trainable)

    def restore(self) -> None:
        """Take back each bit of :meth:`perturb`."""
        restore(self.changed)
        self.changed = []

    def diagnose(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """The objective's own diagnostics (``ess``, ``mismatch_kl``, ...) of a step, and ``packed``; none is taken.

        Rows get a random advantage, so that a batch without any has clipped tokens too; truncated rows take part,
        since all may be; adapter dropout is off.
        """
        generator = torch.Generator().manual_seed(self.seed)
        changed = plain_rows(rows)
        for row in changed:
            row[keys.ADVANTAGE] = torch.randn((1, 1), generator=generator)
        if self.settings.recompute:
            for row, values in self.scored(changed):
                row[keys.PROXIMAL_LOG_PROBS] = values
        metrics = self._dry_run(changed, self.settings.micro_batch_tokens, learn=False)
        return metrics | {"packed": int(self.policy.shared_prompt)}

    def coefficients(self, rows: Sequence[Row]) -> torch.Tensor:
        """:meth:`GRPOLoss.coefficients` of every token, flat ``[sum T_i]``, as if this policy had sampled the rows.

        Their advantages are used as they are; a teacher agrees with them.
        """
        sampled = []
        for row, own in self._with_ratio(rows):
            teacher = {keys.REF_LOG_PROBS: own + row[keys.ADVANTAGE].flatten()} if self.loss.distill_coeff else {}
            sampled.append(row | teacher)
        with without_dropout(self.policy), self.autocast():
            return torch.cat(self._by_row(sampled, self.loss.coefficients, weight=1.0))

    def _with_ratio(self, rows: Sequence[Row], log_ratio: float = 0.0) -> Iterator[tuple[dict[Key, Any], torch.Tensor]]:
        """Copies of the rows whose tokens all have this log-ratio, each with the policy's log-probs ``[T_i]``."""
        for row, own in self.scored(plain_rows(rows)):
            old = torch.where(row[keys.ASSISTANT_MASK], own - log_ratio, 0.0)
            yield {**row, keys.LOG_PROBS: old, keys.PROXIMAL_LOG_PROBS: old}, own

    def _dry_run(self, rows: Sequence[Row], token_budget: int, *, learn: bool = True) -> dict[str, float | None]:
        with without_dropout(self.policy):
            return self._accumulate(rows, token_budget, keep_truncated=True, learn=learn)[1]

    def _unclipped(self, rows: Sequence[Row]) -> list[dict[Key, Any]]:
        """Copies with advantages above 0 and all ratios near a half, so that no objective clips, caps or masks a token.

        One whose weight is a function of a whole row's ratio (VESPO) is given ratios of 1: 0.5^100 would weigh nothing.

        In half precision rounding moves a token's ratio by several per cent and a sequence's (GSPO) by less, yet clips
        are as narrow as 3e-4. Which tokens are clipped, and so the gradient, would depend on how rows are packed:
        0.4 % of the tokens made 0.23 of its norm. A positive advantage is clipped from above alone, so a half is far
        from every clip; the correction's weight, from one stored log-prob to its equal, is exactly 1.
        """
        generator = torch.Generator().manual_seed(self.seed)
        log_ratio = 0.0 if self.loss.surrogate.weighs_rows else -math.log(2)
        unclipped = []
        for row, own in self._with_ratio(rows, log_ratio):
            row[keys.ADVANTAGE] = 0.5 + torch.rand((1, 1), generator=generator)
            if self.loss.distill_coeff:  # a teacher that likes every token better adds no token that is clipped
                row[keys.REF_LOG_PROBS] = own + torch.rand(own.shape, generator=generator)
            unclipped.append(row)
        return unclipped

    def _stop_at_non_finite(self, rows: Sequence[Row], metrics: dict[str, float]) -> None:
        """Of several ranks each writes the rows that it computed."""
        rank = "" if self.ranks.leads else f".rank_{self.ranks.rank}"
        path = self.dump_dir / f"non_finite_step_{self.optimizer_steps}{rank}.pt"
        batch = pad_rows(rows, pad_token_id=self.pad_token_id)
        torch.save({"batch": batch.to_dict(), "metrics": metrics}, path)
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        beside = "" if self.ranks.size == 1 else " and in those of the other ranks beside it"
        raise NonFiniteStep(
            f"Optimizer step {self.optimizer_steps} is not finite ({bad}); it changed no weight, and its batch is in "
            f"{path}{beside}. A smaller optimizer.lr or train.precision=fp32 are the usual cures."
        )

    def state_dict(self, kept: Callable[[torch.Tensor], Any] = gathered) -> dict[str, Any]:
        """Trainable parameters, optimizer, schedule, scaler and counters, all of plain types.

        Its form is the same for any number of ranks. Of several all must take part, and rank 0's alone is whole.

        Args:
            kept: what of each tensor, as this rank holds it, is to stand in the state.
        """
        return {
            "model": {name: kept(parameter.detach()) for name, parameter in self.trainable.items()},
            "optimizer": optimizer_state(self.optimizer, kept),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            **({} if self.settings.entropy_target is None else {"entropy_coef": self._entropy_coefs}),
            **({"halved_to": self.settings.micro_batch_tokens} if self.halved else {}),
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, bit for bit on as many ranks; each is given the whole, or where it lies."""
        missing = self.trainable.keys() ^ state["model"].keys()
        if missing:
            raise UserError(
                f"The checkpoint and the model differ in {len(missing)} trainable parameters, for example "
                f"{min(missing)}; resume with the model.name and train_model.lora of the run that wrote it."
            )
        self.before_change()
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                local(parameter).copy_(local(divided(state["model"][name], parameter)))
        load_optimizer_state(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        factor = learning_rate_factor(self.schedule.last_epoch, self.settings)  # of a run that may be longer now
        for group, peak in zip(self.optimizer.param_groups, self.schedule.base_lrs):
            group["lr"] = peak * factor
        self.scaler.load_state_dict(state["scaler"])
        if self.settings.entropy_target is not None and "entropy_coef" in state:  # older ones had no such coefficient
            self.entropy_coef, applied = state["entropy_coef"]
            self._apply_entropy_coef(applied)
        if not self.halved and state.get("halved_to") == self.half:  # else it was given other micro-batches
            self.halve()
        self.version = state["version"]
        self.optimizer_steps = state["optimizer_steps"]


class Totals(NamedTuple):
    """What an optimizer step's passes summed up, on the device, and the metric of :meth:`Learner._keep_top_entropy`."""

    losses: dict[str, torch.Tensor]
    means: dict[str, torch.Tensor]
    threshold: dict[str, float]


def _add(totals: dict[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, value in values.items():
        totals[name] = totals.get(name, 0) + value.detach()


@dataclass
class Compared:
    """Names of weights by what the engines hold; and the engines that do not tell.

    ``unread``: some engine has it under no such name, or its elements in another order.
    """

    equal: set[str] = field(default_factory=set)
    differing: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Publisher:
    """Pushes the learner's weights to every engine.

    Contract. Consumes: the weights as they stand. Produces: engines that serve them. Waits for: every engine.
    Unblocked by: the last engine's answer. When an engine fails its exception ends the run.

    Args:
        weights: named tensors under the names of the base model, adapters merged, ``lm_head.weight`` included; or the
            adapter alone, for engines that merge it (:class:`~sota_grpo.policy.lora.AdapterPack`).
        engines: who receives them.
        make_room: the engines stand on the learner's devices, so each makes room for the other: this gives back what
            the learner's side holds there in reserve. None: they have their own.
        whole: what engines that were given an adapter alone hold then: all weights, it merged.
    """

    weights: Callable[[], Any]
    engines: Sequence[Engine]
    make_room: Callable[[], object] | None = None
    whole: Callable[[], Iterable[tuple[str, torch.Tensor]]] | None = None
    seconds: float = field(default=0.0, init=False)

    def publish(self, version: int) -> None:
        """Return when every engine samples its next token from the weights called ``version``."""
        began = time.perf_counter()
        pushes = [self.weights() for _ in self.engines]  # what gathering them takes is given back before anybody wakes
        self.wake()
        for engine, weights in zip(self.engines, pushes):
            engine.update_weights(weights, version)
            if engine.version != version:
                raise RuntimeError(f"Engine {engine.name} serves version {engine.version} after a push of {version}.")
        self.seconds = time.perf_counter() - began

    def compared(self) -> Compared:
        """The weights that the engines hold, with the learner's."""
        result = Compared()
        for engine in self.engines:
            if (held := engine.weight_sums()) is None:
                result.silent.add(engine.name)
                continue
            for name, value in (self.whole or self.weights)():
                own = held.get(name)
                wanted = None if own is None else Checksum.of(value, own.dtype)
                if own is None or wanted is None or (wanted != own and wanted.total == own.total):
                    result.unread.add(name)
                elif wanted == own:
                    result.equal.add(name)
                else:
                    result.differing.add(name)
        return result

    def sleep(self) -> None:
        """Leave shared GPUs to the learner; nothing where the engines have their own."""
        if self.make_room is not None:
            for engine in self.engines:
                engine.sleep()

    def wake(self) -> None:
        """Undo :meth:`sleep`. An engine in another process finds only the memory that this one has given back."""
        if self.make_room is not None:
            self.make_room()
        for engine in self.engines:
            engine.wake()
