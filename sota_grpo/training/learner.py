"""The learner: turns rows (prompt, response, advantage) into optimizer steps, and returns metrics."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from sota_grpo import keys
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.functional import adapted_entropy_coef, top_entropy_tokens
from sota_grpo.functional.flops import ModelShape
from sota_grpo.functional.loss_terms import SURROGATES
from sota_grpo.policy import sharding
from sota_grpo.policy.causal import ENTROPY, CausalPolicy, base_model, head_width, layer_matrices
from sota_grpo.policy.decoder_layer import compile_options
from sota_grpo.policy.load import save_hf
from sota_grpo.policy.optimizers import make_optimizer
from sota_grpo.policy.sharding import Ranks, gather, local
from sota_grpo.policy.weight_pack import copy_to
from sota_grpo.recording.metrics import reduce_updates
from sota_grpo.rl.collate import known_tokens, pad_rows, padded_entries
from sota_grpo.rl.objectives import GRPOLoss, diagnostic_means, losses_with_slopes, mismatch
from sota_grpo.rl.planner import LearnerSettings, Pass, Planner, Share, learning_rate_factor, row_prompts
from sota_grpo.rl.records import GradientGap
from sota_grpo.rl.table import Key, Row, RowTable
from sota_grpo.text import first_line

logger = logging.getLogger(__name__)
AnyRow = TypeVar("AnyRow", bound=Row)
Result = TypeVar("Result")
Totals = tuple[dict[str, Tensor], dict[str, Tensor]]  # losses and mean diagnostics of an optimizer step, on the device

METRIC_NAMES = {
    "ESS": "ess",
    "kl_to_ref": "kl",
    "loss_objective": "loss/objective",
    "loss_kl_to_ref": "loss/kl",
    "loss_entropy": "loss/entropy",
    "reverse_kl": "distill/reverse_kl",
}
AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}  # dtype by ``LearnerSettings.precision``
SHARE = "gradient_share/max_token"
PROBE_SHARE = 0.01  # fraction of a tensor's elements that change sign: moves it by 2 sqrt(0.01) = 0.2 of its norm
TRIMMED_EVERY = 8  # updates on a CPU; trimming costs about a second of page faults


class NonFiniteStep(UserError):
    """A loss or gradient is NaN or infinite; the message has the path of the saved batch."""


class Learner:
    """Trains ``policy`` with ``loss``; every :meth:`update` is a training step and increments ``version``.

    Args:
        policy: computes log-probs of padded rows; its trainable parameters are optimised.
        dump_dir: folder in which the batch of a step with a NaN or infinite loss or gradient is saved.
        seed: seed of the order of prompt groups in the second and later epochs.
        ranks: the processes that train this policy together; each has a shard of it
            (:func:`sota_grpo.policy.sharding.shard`) and receives the same calls. None: this process alone.
        tokenizer: saved by :meth:`export_hf`, which needs it.
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
        tokenizer: PreTrainedTokenizerBase | None = None,
    ):
        self.policy, self.settings, self.pad_token_id = policy, settings, pad_token_id
        self.ranks = ranks or Ranks()
        self.share, self.num_shares = self.ranks.share, self.ranks.num_shares  # data-parallel rank and size
        self.device = next(policy.parameters()).device
        self.halved = False  # micro-batches were halved after an out-of-memory error
        self.loss, self.dump_dir, self.seed, self.tokenizer = loss, dump_dir, seed, tokenizer
        self.version = self.optimizer_steps = 0
        # named as in checkpoints
        self.trainable = {name: p for name, p in policy.scorer.named_parameters() if p.requires_grad}
        self.parameters = list(self.trainable.values())
        self.changed: list[tuple[Tensor, Tensor, Tensor]] = []  # (tensor, changed positions, original values)
        #: Called before parameters or optimizer state change; waits for a checkpoint that is copying them.
        self.before_change: Callable[[], object] = lambda: None
        self.optimizer = make_optimizer(settings.optimizer, self.parameters, layer_matrices(policy), settings)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: learning_rate_factor(step, settings)
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=settings.precision == "fp16")
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        alone = self.device.type == "cuda" and not self.is_sharded and not self.scaler.is_enabled()
        #: The fused optimizer clips the gradient and skips non-finite steps: then a step has one GPU sync.
        self.skips_by_itself = alone and isinstance(self.optimizer, torch.optim.AdamW)
        self.drops_out = bool(dropouts(policy))
        self.entropy_coef = loss.entropy_coeff  # under entropy_target: applied only while the entropy is below it
        if settings.entropy_target is not None:
            self._apply_entropy_coef(self.entropy_coef, 0.0)
        steady = policy.fused and settings.entropy_target is None and loss.surrogate in SURROGATES.values()
        loss.fused = _compiled_losses() if steady and self.device.type == "cuda" else None

    def update(self, rows: RowTable | TensorDictBase | Sequence[Row]) -> dict[str, float | None]:
        """Do a training step: ``epochs`` epochs, in optimizer steps of ``optim_batch_size`` rows.

        Return metrics, combined over the optimizer steps (mostly means); None for one that could not be measured, such
        as ``entropy`` if no token was trained. ``mismatch_kl`` is measured with the weights before the step, without
        dropout, on the rows of the first optimizer step.

        Raises:
            NonFiniteStep: a loss or gradient is NaN or infinite (in fp16, an infinite gradient only skips its optimizer
                step); the optimizer steps before have changed the weights.
            RunFailed: a device has too little memory; see :meth:`within_memory`.
        """
        return self.update_share(self.step_planner().shares(RowTable.of(rows), self.version)[self.share])

    def update_share(self, share: Share) -> dict[str, float | None]:
        """Do this rank's ``share`` of a training step; return :meth:`update`'s metrics. All ranks must call this."""
        began = time.perf_counter()
        rows, clean = share.rows.rows(), None
        if micros := share.scoring:
            scored = [index for micro, _ in micros for index in micro]

            def score() -> dict[int, Tensor]:  # micro-batches that were halved after they were planned are split again
                cut = self._cut(rows, scored, self.settings.scoring_tokens) if self.halved else micros
                return self._local(rows, cut, self.log_probs)

            scores = self.within_memory(score)
            if self.settings.recompute:
                for row, values in zip(rows, self._whole(scores, share.positions, share.lengths), strict=True):
                    row[keys.PROXIMAL_LOG_PROBS] = values
            else:  # the loss's forward pass has dropout, the engine has none
                clean = self._mismatch(rows, scores)
        try:
            steps = [self._step(rows, passes) for passes in share.steps]
        except torch.OutOfMemoryError as error:  # not of a micro-batch, for which within_memory raises RunFailed
            raise RunFailed(
                f"The device lacks memory for the optimizer's update ({first_line(error).rstrip('.')}); use "
                "optimizer.name=adamw_8bit, train_model.lora.enabled=true or more train_model.num_devices."
            ) from error
        self.version += 1
        if self.device.type == "cpu" and self.version % TRIMMED_EVERY == 0:
            # glibc keeps most of what was freed, and ever more as micro-batches differ in size
            with contextlib.suppress(AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
        metrics = reduce_updates(steps)
        # later optimizer steps measure the mismatch of weights that already changed
        metrics["mismatch_kl"] = clean if share.scoring and not self.settings.recompute else steps[0]["mismatch_kl"]
        metrics |= {"packed": int(self.policy.shared_prompt), "optimizer_steps": self.optimizer_steps}
        return metrics | {"time/learn_s": time.perf_counter() - began}

    def step_planner(self) -> Planner:
        """Return the planner that :meth:`update` uses to split rows into optimizer steps, ranks and micro-batches."""
        steady = self.settings.entropy_target is None  # else zero-advantage rows may get an entropy gradient later
        learns_less = self.loss.advantage_only and steady
        sizes = (self.num_shares, self.policy.shared_prompt)
        return Planner(self.settings, self.seed, *sizes, learns_less, self.drops_out, self.shape)

    def _mismatch(self, rows: Sequence[Row], measured: Mapping[int, Tensor]) -> float | None:
        """Return the mean KL between the engine's log-probs and ``measured``, over all ranks; None without tokens."""
        masks = {index: known_tokens(rows[index]) for index in sorted(measured)}
        gaps = [(measured[index] - rows[index][keys.LOG_PROBS])[mask] for index, mask in masks.items()]
        flat = torch.cat([torch.zeros(0), *gaps])
        sums = self.ranks.sums({"kl": mismatch(flat).sum(), "tokens": torch.tensor(float(len(flat)))})
        return float(sums["kl"] / sums["tokens"]) if sums["tokens"] else None

    def _passes(self, rows: Sequence[Row], token_budget: int, *, keep_truncated: bool = False) -> list[Pass]:
        order, prompts = range(len(rows)), row_prompts(rows)
        planned = self.step_planner().passes(rows, order, prompts, token_budget, keep_truncated=keep_truncated)
        return planned[self.share]

    def _step(self, rows: Sequence[dict[Key, Any]], passes: Sequence[Pass]) -> dict[str, float | None]:
        """Do an optimizer step and return its metrics; fp16 overflow skips the update and lowers the loss scale."""
        totals = self.within_memory(lambda: self._run(rows, self._fitting(rows, passes) if self.halved else passes))
        scale, rate = self.scaler.get_scale(), self.optimizer.param_groups[0]["lr"]
        if self.skips_by_itself:
            gradient_norm = self._stepped(totals[0])
        else:
            self.scaler.unscale_(self.optimizer)
            limit = self.settings.clip_grad_norm or math.inf
            gradient_norm = nn.utils.clip_grad_norm_(self.parameters, limit)
            gradient_norm = sharding.replicated(gradient_norm) if self.is_sharded else gradient_norm
        losses, metrics, norm = self._measured(totals, gradient_norm)
        skipped = self.scaler.is_enabled() and scale > 1 and not math.isfinite(norm)
        judged = losses if skipped else {**losses, "grad_norm": norm}
        if not all(map(math.isfinite, judged.values())):
            counted = [index for micro in passes for index, weight in zip(micro.rows, micro.weights) if weight]
            raise self._non_finite([rows[index] for index in counted or passes[0].rows], judged)
        if not skipped:
            if not self.skips_by_itself:
                self.before_change()
                self.scaler.step(self.optimizer)
            self.schedule.step()
            self.optimizer_steps += 1
        chosen = self.settings
        if chosen.entropy_target is not None:
            metrics["entropy_coef"] = self.loss.entropy_coeff
            if (entropy := metrics["entropy"]) is not None and not skipped:  # adapts the next step's coefficient
                options = {"delta": chosen.entropy_coef_delta, "largest": chosen.entropy_coef_max}
                self._apply_entropy_coef(
                    *adapted_entropy_coef(self.entropy_coef, entropy, target=chosen.entropy_target, **options)
                )
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)  # a colocated engine may use this memory
        metrics |= {**losses, "grad_norm": None if skipped else norm, "lr": None if skipped else rate}
        if self.scaler.is_enabled():
            metrics |= {"skipped_steps": int(skipped), "loss_scale": scale}
        return metrics

    def _stepped(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Step with fused AdamW unless a loss or gradient is not finite; return the gradient norm before clipping."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]).float()
        finite = torch.stack([norm, *(loss.float() for loss in losses.values())]).isfinite().all()
        limit = self.settings.clip_grad_norm or math.inf
        self.before_change()
        optimizer: Any = self.optimizer  # attributes by which torch's GradScaler controls fused optimizers
        optimizer.grad_scale = ((norm + 1e-6) / limit).clamp(min=1.0)  # as clip_grad_norm_ does it
        optimizer.found_inf = (~finite).float()
        optimizer.step()
        return norm

    def _run(self, rows: Sequence[dict[Key, Any]], passes: Sequence[Pass]) -> Totals:
        """Run micro-batches without a GPU sync; return losses and mean diagnostics, with gradients in ``.grad``."""
        last = sum(one.learns for one in passes)
        self.policy.train()
        self.optimizer.zero_grad(set_to_none=True)
        losses: dict[str, Tensor] = {}
        sums: dict[str, Tensor] = {}
        largest: list[Tensor] = []
        half = None if self.is_sharded else AUTOCAST[self.settings.precision]
        with contextlib.nullcontext() if half is None else self.policy.half_weights(half, last > 1):
            threshold = self._keep_top_entropy(rows, passes) if self.settings.top_entropy_quantile < 1 else {}
            for index, (micro, weights, learns) in enumerate(passes, start=1):
                if self.ranks.size > 1:
                    sharding.reduce_gradients(self.policy, now=index == last or not self.ranks.reduce_once)
                batch = self.padded([rows[position] for position in micro], weights)
                with self.autocast(), torch.set_grad_enabled(learns):
                    out = self.loss(batch)
                terms = {name: value for name, value in out.items() if name.startswith("loss_")}
                if learns:
                    self.scaler.scale(functools.reduce(torch.add, map(_whole, terms.values()))).backward()
                for totals, values in ((losses, terms), (sums, dict(out.sums.items()))):
                    if totals.keys() == values.keys():  # by one kernel
                        torch._foreach_add_(list(totals.values()), [values[name].detach() for name in totals])
                    else:
                        totals |= {name: totals.get(name, 0) + value.detach() for name, value in values.items()}
                largest.append(out.gradient_squared_max)
        top = torch.stack(largest).amax(0, keepdim=True)
        if self.ranks.size > 1:
            losses, sums = self.ranks.sums(losses), self.ranks.sums(sums)
            top = self.ranks.joined(top.cpu())[0]
        share = top.amax().to(sums["tokens"].device) / sums["gradient_squared"]
        return losses, diagnostic_means(sums) | {"tokens": sums["tokens"], SHARE: share} | threshold

    def _measured(self, totals: Totals, norm: Tensor) -> tuple[dict[str, float], dict[str, float | None], float]:
        """Return (losses, diagnostics, gradient norm) as floats; a diagnostic is None if no token is trained."""
        values = [value for each in totals for value in each.values()]
        numbers = torch.stack([value.to(values[0].device, torch.float64) for value in (*values, norm)]).tolist()
        names = [METRIC_NAMES.get(name, name) for each in totals for name in each]
        count = len(totals[0])
        losses, means = dict(zip(names, numbers[:count])), dict(zip(names[count:], numbers[count:-1]))
        unmeasured = {SHARE} if math.isnan(means[SHARE]) else set()  # no token has a gradient
        unmeasured |= set() if means.pop("tokens") > 0 else means.keys()
        diagnostics = {name: None if name in unmeasured else value for name, value in means.items()}
        return losses, diagnostics, numbers[-1]

    def _keep_top_entropy(self, rows: Sequence[dict[Key, Any]], passes: Sequence[Pass]) -> dict[str, Tensor]:
        """Set ``OBJECTIVE_MASK`` to the tokens of highest entropy over all ranks; return the entropy threshold."""
        micros = [(micro.rows, any(micro.weights)) for micro in passes]
        entropy = self._local(rows, micros, lambda batch: self._policy_outputs(batch).get(ENTROPY))
        weights = {index: weight for micro in passes for index, weight in zip(micro.rows, micro.weights) if weight}
        trained = {index: known_tokens(rows[index]) for index in weights}
        entropies = torch.cat([torch.zeros(0), *(entropy[index][mask] for index, mask in trained.items())])
        every, mine = self.ranks.joined(entropies)
        whole = torch.ones_like(every, dtype=torch.bool)
        top = top_entropy_tokens(every, whole, share=self.settings.top_entropy_quantile)
        sizes = [int(mask.sum()) for mask in trained.values()]
        for (index, mask), values in zip(trained.items(), top[mine].split(sizes)):
            rows[index][keys.OBJECTIVE_MASK] = torch.zeros_like(mask).masked_scatter(mask, values)
        return {"entropy_threshold": every[top].min() if top.any() else torch.tensor(math.nan)}

    def _apply_entropy_coef(self, coef: float, applied: float) -> None:
        """Set the entropy coefficient of the next step; with 0 applied, the head computes no entropy gradient."""
        self.entropy_coef, self.loss.entropy_coeff = coef, applied
        self.policy.scorer.entropy_grad = applied > 0

    def give_back(self) -> None:
        """Release cached CUDA memory, so that a colocated engine can use it."""
        torch.cuda.empty_cache()

    def gradient(self, rows: Sequence[Row], *, token_budget: int) -> dict[str, Tensor]:
        """Return {name: this rank's gradient shard, on the CPU} for made-up advantages; all ranks must call this."""
        return {name: value.cpu() for name, value in self._gradients(self._unclipped(rows), token_budget)}

    def gradient_gap(self, rows: Sequence[Row], token_budgets: tuple[int, int]) -> GradientGap:
        """Compare :meth:`gradient` at two micro-batch token budgets: norm and relative change, over all ranks.

        All ranks must call this. Both gradients are computed in float32 on a CPU with float32 parameters, else in the
        precision of training. Budgets up to ``micro_batch_tokens`` need no more GPU memory than a training step.
        """
        trained = self.settings.precision
        precision = "fp32" if self.single and self.device.type == "cpu" else trained
        first, second = token_budgets
        norms, gaps = [], []
        with contextlib.nullcontext() if precision == trained else self.computing(precision):
            rows = self._unclipped(rows)
            one = {name: value.cpu() for name, value in self._gradients(rows, first)}
            for name, other in self._gradients(rows, second):
                gradient = one.pop(name).to(other.device)
                if sharding.is_first_holder(self.trainable[name], self.ranks):
                    norms.append(gradient.norm())
                    gaps.append(gradient.sub_(other).norm())
        norm = self._norm(norms)
        return GradientGap(norm, self._norm(gaps) / max(norm, 1e-30), self.single and precision == "fp32")

    def _gradients(self, rows: Sequence[Row], token_budget: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, gradient) of a dry run over ``rows``; clear ``.grad`` at the end."""
        self._dry_run(rows, token_budget)
        scale = self.scaler.get_scale()
        for name, parameter in self.trainable.items():
            if parameter.grad is not None:
                yield name, local(parameter.grad.detach()).div_(scale)
        self.optimizer.zero_grad(set_to_none=True)

    def _norm(self, norms: Sequence[Tensor]) -> float:
        local = torch.stack(list(norms)).norm() if norms else torch.zeros(())
        return float(local if self.ranks.size == 1 else self.ranks.total(local.double().square()).sqrt())

    @torch.no_grad()
    def perturb(self, but: Collection[str] = ()) -> None:
        """Change all trainable tensors in place, except those named in ``but``, until :meth:`restore`.

        Always the same elements change sign: about :data:`PROBE_SHARE` of each shard, at least one (zeros become 1).
        """
        self.before_change()
        for name, parameter in self.trainable.items():
            tensor, generator = local(parameter.data), torch.Generator().manual_seed(0)
            if name in but or not tensor.numel():
                continue
            count = max(1, round(PROBE_SHARE * tensor.numel()))
            indices = torch.randint(tensor.numel(), (count,), generator=generator).to(tensor.device)
            values = tensor.take(indices)
            self.changed.append((tensor, indices, values))
            tensor.put_(indices, torch.where(values == 0, 1.0, -values))

    def trainable_names(self) -> list[str]:
        return list(self.trainable)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the values that :meth:`perturb` changed, bit for bit; no-op if there are none."""
        for tensor, indices, values in reversed(self.changed):  # a tensor may have been changed twice
            tensor.put_(indices, values)
        self.changed = []

    def diagnose(self, rows: Sequence[Row]) -> dict[str, float | None]:
        """Return the loss's diagnostics (``ess``, ...) without a step, and ``packed``: 1 if rows are packed, else 0.

        Advantages are random, truncated rows and rows with a grader error are included, and dropout is off. A
        diagnostic is None if no token is trained. All ranks must call this.
        """
        generator = torch.Generator().manual_seed(self.seed)
        changed = RowTable.of(rows).rows()
        for row in changed:
            row[keys.ADVANTAGE] = torch.randn((1, 1), generator=generator)
        if self.settings.recompute:
            for row, values in self.scored(changed):
                row[keys.PROXIMAL_LOG_PROBS] = values
        metrics = self._dry_run(changed, self.settings.micro_batch_tokens, learn=False)
        return metrics | {"packed": int(self.policy.shared_prompt)}

    def coefficients(self, rows: Sequence[Row]) -> Tensor:
        """Return ``-d surrogate loss / d log_prob`` of every token, at ratio 1 and loss weight 1: ``[sum T_i]``, CPU.

        Row ``i`` has ``T_i`` tokens and an advantage. The value is 0 off the assistant mask. All ranks must call this.
        """
        sampled = []
        for row, measured in self._with_ratio(rows):
            if self.loss.distill_coeff:  # makes the teacher agree with the advantage
                row[keys.REF_LOG_PROBS] = measured + row[keys.ADVANTAGE].flatten()
            row[keys.LOSS_WEIGHT] = row[keys.ASSISTANT_MASK].float()
            sampled.append(row)
        with without_dropout(self.policy), self.autocast():
            return torch.cat(self._by_row(sampled, self.loss.coefficients))

    def _with_ratio(self, rows: Sequence[Row], log_ratio: float = 0.0) -> Iterator[tuple[dict[Key, Any], Tensor]]:
        """Yield (row copy, policy log-probs ``[T_i]``), with old log-probs such that every token has this log-ratio."""
        for row, measured in self.scored(RowTable.of(rows).rows()):
            old = torch.where(row[keys.ASSISTANT_MASK], measured - log_ratio, 0.0)
            yield {**row, keys.LOG_PROBS: old, keys.PROXIMAL_LOG_PROBS: old}, measured

    def _dry_run(self, rows: Sequence[Row], token_budget: int, *, learn: bool = True) -> dict[str, float | None]:
        """Return a step's diagnostics without updating; no dropout, truncated rows included, gradients in ``.grad``."""
        plain = RowTable.of(rows).rows()
        passes = self._passes(plain, token_budget, keep_truncated=True)
        with without_dropout(self.policy):
            totals = self._run(plain, passes if learn else [micro._replace(learns=False) for micro in passes])
        return self._measured(totals, torch.zeros(()))[1]

    def _unclipped(self, rows: Sequence[Row]) -> list[dict[Key, Any]]:
        """Return copies of the rows with advantages above 0 and ratios of 0.5: no objective clips or masks a token.

        At a clip bound, rounding would decide. Ratios are 1 for VESPO, whose sequence weight 0.5^100 would be 0.
        """
        generator = torch.Generator().manual_seed(self.seed)
        log_ratio = 0.0 if self.loss.surrogate.weighs_rows else -math.log(2)
        unclipped = []
        for row, measured in self._with_ratio(rows, log_ratio):
            row[keys.ADVANTAGE] = 0.5 + torch.rand((1, 1), generator=generator)
            if self.loss.distill_coeff:  # a teacher with higher log-probs everywhere causes no clipping
                row[keys.REF_LOG_PROBS] = measured + torch.rand(measured.shape, generator=generator)
            unclipped.append(row)
        return unclipped

    def _non_finite(self, rows: Sequence[Row], metrics: dict[str, float]) -> NonFiniteStep:
        """Save this rank's rows to ``dump_dir``; return the error."""
        rank = "" if self.ranks.leads else f".rank_{self.ranks.rank}"
        path = self.dump_dir / f"non_finite_step_{self.optimizer_steps}{rank}.pt"
        batch = pad_rows(rows, pad_token_id=self.pad_token_id)
        others = "" if self.ranks.size == 1 else " and in the files of the other ranks in that folder"
        where = f"is in {path}{others}"
        try:
            torch.save({"batch": batch.to_dict(), "metrics": metrics}, path)
        except (OSError, RuntimeError) as error:  # torch's writer raises both
            where = f"could not be saved to {path} ({first_line(error).rstrip('.')})"
        bad = {name: value for name, value in metrics.items() if not math.isfinite(value)}
        return NonFiniteStep(
            f"The loss or gradient of optimizer step {self.optimizer_steps} is NaN or infinite ({bad}); this step "
            f"changed no weight, and its batch {where}. Try a smaller optimizer.lr or train.precision=fp32."
        )

    def state_dict(self, full: Callable[[Tensor], Any] = gather) -> dict[str, Any]:
        """Return trainable parameters, optimizer, schedule, scaler and counters, for ``torch.load(weights_only=True)``.

        All ranks must call this; only rank 0 gets gathered tensors, the others None. Tensors that are not sharded are
        not copied. ``full`` maps each tensor, which may be sharded, to its entry.
        """
        adapts = self.settings.entropy_target is not None
        return {
            "model": {name: full(parameter.detach()) for name, parameter in self.trainable.items()},
            "optimizer": sharding.optimizer_state(self.optimizer, full),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            **({"entropy_coef": [self.entropy_coef, self.loss.entropy_coeff]} if adapts else {}),
            **({"halved_to": self.settings.micro_batch_tokens} if self.halved else {}),
            "version": self.version,
            "optimizer_steps": self.optimizer_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a gathered :meth:`state_dict` of any number of ranks; its tensors may be in memory or in files.

        UserError: the state has other parameters. ValueError, RuntimeError: a parameter has another shape.
        """
        missing = self.trainable.keys() ^ state["model"].keys()
        if missing:
            raise UserError(
                f"{len(missing)} trainable parameters are only in the checkpoint or only in the model, for example "
                f"{min(missing)}; resume with the model.name and train_model.lora of the saved run."
            )
        self.before_change()
        with torch.no_grad():
            for name, parameter in self.trainable.items():
                local(parameter).copy_(local(sharding.divided(state["model"][name], parameter)))
        sharding.load_optimizer_state(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        factor = learning_rate_factor(self.schedule.last_epoch, self.settings)  # total_steps may have grown
        for group, peak in zip(self.optimizer.param_groups, self.schedule.base_lrs):
            group["lr"] = peak * factor
        self.scaler.load_state_dict(state["scaler"])
        if self.settings.entropy_target is not None:
            self._apply_entropy_coef(*state["entropy_coef"])
        # not if another train.micro_batch_tokens was set; several ranks would split their rows among all ranks again
        if self.ranks.size == 1 and not self.halved and state.get("halved_to") == self._half:
            self._halve()
        self.version, self.optimizer_steps = state["version"], state["optimizer_steps"]

    def export_hf(self, folder: Path, progress: Callable[[], object] = lambda: None) -> None:
        """Save model (LoRA merged) and tokenizer in Hugging Face format; rank 0 writes, but all ranks must call it."""
        assert self.tokenizer is not None
        save_hf(self.policy.model, self.tokenizer, folder, progress)

    def within_memory(self, compute: Callable[[], Result]) -> Result:
        """Return ``compute()``; at the run's first out-of-memory error, halve the micro-batches and call it again.

        The smaller size is kept for the rest of the run. ``compute`` must not update state; gradients are dropped.
        RunFailed: out of memory a second time, or with several ranks, which would have to agree on the size.
        """
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            tokens, half = self.settings.micro_batch_tokens, self._half
            lacking = (
                f"The learner's device lacks memory for a computation with micro-batches of {tokens:,} tokens "
                f"({first_line(error).rstrip('.')})"
            )
            if self.halved or self.ranks.size > 1:
                raise RunFailed(
                    f"{lacking}; use train.micro_batch_tokens={half} with train.resume=auto, which continues from the "
                    "last checkpoint, or start a new run with train_model.gradient_checkpointing=true."
                ) from error
        self._halve()  # outside of except: the exception holds the tensors of the failed call
        self.policy.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        logger.warning(
            "%s; it is repeated with train.micro_batch_tokens=%d, which the rest of the run keeps.", lacking, half
        )
        return self.within_memory(compute)

    @property
    def _half(self) -> int:
        return max(1, self.settings.micro_batch_tokens // 2)

    def _halve(self) -> None:
        self.halved, scoring = True, max(1, self.settings.scoring_tokens // 2)
        self.settings = replace(self.settings, micro_batch_tokens=self._half, forward_tokens=scoring)

    def _fitting(self, rows: Sequence[Row], passes: Sequence[Pass]) -> Sequence[Pass]:
        """Cut ``passes`` anew into micro-batches of the halved budget."""
        weights = {index: weight for one in passes for index, weight in zip(one.rows, one.weights)}
        planned = []
        for learns in (True, False):
            chosen = [index for one in passes if one.learns == learns for index in one.rows]
            micros = self._cut(rows, chosen, self.settings.micro_batch_tokens)
            planned += [Pass(micro, [weights[index] for index in micro], learns) for micro, _ in micros]
        return planned

    def _cut(self, rows: Sequence[Row], chosen: Sequence[int], token_budget: int) -> list[tuple[list[int], bool]]:
        return self.step_planner().micro_batches(chosen, row_prompts(rows), token_budget)[self.share]

    def padded(self, rows: Sequence[Row], weights: Sequence[float] | None = None) -> TensorDictBase:
        """Return the rows as a right-padded ``[N, T]`` batch on the learner's device, with the layout if it is packed.

        ``weights``: one loss weight per row, for its trained tokens; None: none are set. ValueError as in ``pad_rows``.
        """
        entries = padded_entries(rows, self.pad_token_id)  # a TensorDict only at the end: its Python calls add up
        if weights is not None:
            by_row = torch.tensor(weights, dtype=torch.float32).unsqueeze(-1)
            entries[keys.LOSS_WEIGHT] = torch.where(entries[keys.ASSISTANT_MASK], by_row, 0.0)
        layout = self.policy.layout(entries)
        device = self.device if self.device.type == "cuda" else None
        if device is not None:
            moved = copy_to([*entries.values(), *([] if layout is None else layout.tensors())], device)
            layout = None if layout is None else layout.on(moved[len(entries) :])
            entries = dict(zip(entries, moved))
        batch = TensorDict(entries, batch_size=[len(rows)], device=device)
        return batch if layout is None else batch.set_non_tensor(keys.LAYOUT, layout)

    def log_probs(self, batch: TensorDictBase) -> Tensor:
        """Return log-probs ``[N, T]`` of a padded batch, without gradient or dropout; 0 off the assistant mask."""
        return self._policy_outputs(batch).get(keys.LOG_PROBS)

    @torch.no_grad()
    def _policy_outputs(self, batch: TensorDictBase) -> TensorDictBase:
        training = self.policy.training
        self.policy.eval()
        with self.autocast():
            outputs = self.policy(batch)
        self.policy.train(training)
        return outputs

    def scored(self, rows: Sequence[AnyRow]) -> Iterator[tuple[AnyRow, Tensor]]:
        """Return an iterator of (row, its :meth:`log_probs` ``[T_i]`` on the CPU); all ranks must call this."""
        return zip(rows, self._by_row(rows, self.log_probs))

    def measured(self, rows: Sequence[Row]) -> Tensor:
        """Return log-probs and entropies of the rows' tokens in nats, ``[2, sum T_i]``, on the CPU, without dropout.

        Both are 0 off the assistant mask. All ranks must call this.
        """

        def both(batch: TensorDictBase) -> Tensor:
            outputs = self._policy_outputs(batch)
            return torch.stack([outputs.get(keys.LOG_PROBS), outputs.get(ENTROPY)], dim=-1)

        return torch.cat(self._by_row(rows, both, 2)).T.contiguous()

    def measured_with_rounding(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
        """Return (:meth:`measured`, half-precision log-probs minus float32 log-probs ``[sum T_i]``).

        The half precision is that of training, or bf16 if training is fp32. The second value is None if not all
        parameters are float32. All ranks must call this.
        """
        measured, trained = self.measured(rows), self.settings.precision
        if not self.single:
            return measured, None
        with self.computing("bf16" if trained == "fp32" else "fp32"):
            other = self.measured(rows)
        return measured, (other - measured if trained == "fp32" else measured - other)[0]

    @property
    def single(self) -> bool:
        """Whether all weights are float32."""
        return all(parameter.dtype == torch.float32 for parameter in self.policy.parameters())

    @contextlib.contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """Compute in ``fp32``, ``bf16`` or ``fp16`` in a ``with`` block, with compiled layers run eagerly."""
        trained = self.settings
        eager = torch.compiler.set_stance("force_eager") if self.policy.fused else contextlib.nullcontext()
        self.settings = replace(trained, precision=precision)
        try:
            with eager:
                yield
        finally:
            self.settings = trained

    def _by_row(self, rows: Sequence[Row], measure: Callable[[TensorDictBase], Tensor], *width: int) -> list[Tensor]:
        """Apply ``measure`` (to ``[N, T, *width]``) to padded batches; return ``[T_i, *width]`` per row, on the CPU."""
        rows, positions = list(rows), range(len(rows))
        micros = self._cut(rows, positions, self.settings.scoring_tokens)
        lengths = [row[keys.FULL_TOKENS].shape[-1] for row in rows]
        return self._whole(self._local(rows, micros, measure), positions, lengths, *width)

    def _local(
        self,
        rows: Sequence[Row],
        micros: Sequence[tuple[list[int], bool]],
        measure: Callable[[TensorDictBase], Tensor],
    ) -> dict[int, Tensor]:
        """Apply ``measure`` to this rank's micro-batches; return {row index: values ``[T_i, ...]``} on the CPU."""
        values = [measure(self.padded([rows[index] for index in micro])) for micro, _ in micros]  # fetched at the end
        return {
            index: row_values[: rows[index][keys.FULL_TOKENS].shape[-1]].clone()
            for (micro, real), batch in zip(micros, values)
            if real
            for index, row_values in zip(micro, batch.cpu())
        }

    def _whole(
        self, local: Mapping[int, Tensor], positions: Sequence[int], lengths: Sequence[int], *width: int
    ) -> list[Tensor]:
        """Exchange values among ranks; return those of the rows ``positions``. ``lengths``: tokens of every row."""
        if self.ranks.size == 1:
            return [local[index] for index in range(len(positions))]
        flat = torch.zeros(sum(lengths), *width)
        pieces = flat.split(list(lengths))  # each rank fills in its rows; what the others measured is 0 there
        for index, value in local.items():
            pieces[positions[index]].copy_(value)
        summed = self.ranks.sum(flat).cpu().split(list(lengths))
        return [summed[position] for position in positions]

    @functools.cached_property
    def shape(self) -> ModelShape:
        """The policy's sizes for counting FLOPs, cached."""
        model = base_model(self.policy.model)
        config, decoder, head = model.config.get_text_config(), model.get_decoder(), model.get_output_embeddings()
        tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
        matrices = [weight for weight in decoder.parameters() if weight.dim() == 2 and id(weight) not in tables]
        return ModelShape(
            trainable_weights=sum(weight.numel() for weight in matrices if weight.requires_grad),
            frozen_weights=sum(weight.numel() for weight in matrices if not weight.requires_grad),
            attention_width=config.num_hidden_layers * config.num_attention_heads * head_width(config),
            head_weights=head.weight.numel(),
            head_trainable=head.weight.requires_grad,
        )

    def autocast(self) -> contextlib.AbstractContextManager:
        """Return the autocast context of every forward pass, including the reference's; no-op in fp32."""
        if (dtype := AUTOCAST[self.settings.precision]) is None:
            return contextlib.nullcontext()
        # the cache would keep a copy of every layer that FSDP2 gathers, until the pass ends
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=self.ranks.size == 1)


def _whole(loss: Tensor) -> Tensor:
    return loss.sum() if loss.dim() else loss  # losses of single tokens; the sum of one number would be a kernel


@functools.cache
def _compiled_losses() -> Callable[..., Any]:
    return torch.compile(losses_with_slopes, **compile_options())


def dropouts(module: nn.Module) -> list[nn.Dropout]:
    """Return the dropout modules of ``module`` with a rate above 0."""
    return [child for child in module.modules() if isinstance(child, nn.Dropout) and child.p > 0]


@contextlib.contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Set every ``nn.Dropout`` in ``module`` to rate 0 in the ``with`` block."""
    rates = [(child, child.p) for child in dropouts(module)]
    for child, _ in rates:
        child.p = 0.0
    try:
        yield
    finally:
        for child, rate in rates:
            child.p = rate
