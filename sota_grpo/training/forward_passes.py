"""The forward passes of a training step: which rank computes which rows, and what a policy says about them.

The plan (:class:`Planner`) is made of lengths and masks alone: optimizer steps, ranks and micro-batches. For four rows
of two prompts, two ranks and one optimizer step, where a token of row ``i`` weighs ``1 / (4 |o_i|)`` (``sequence``)::

    rows            0 1 (prompt A)   2 3 (prompt B)
    share of rank 0 rows 0 1         one pass [0, 1]
    share of rank 1 rows 2 3         one pass [2, 3]

The plan of all ranks is one function of the rows, so it is made once, where the rows are, and each rank is sent its own
rows only. What its rows weigh is part of the plan, because it depends on the whole optimizer step.

:class:`ForwardPasses` computes micro-batch by micro-batch, on any number of ranks; nothing is trained here.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from sota_grpo import keys
from sota_grpo.errors import RunFailed
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.functional.micro_batches import Aggregation, PromptGroup, rank_shares, row_weights
from sota_grpo.policy.causal import ENTROPY, CausalPolicy, base_model
from sota_grpo.policy.optimizers import Rates
from sota_grpo.policy.sharding import Ranks
from sota_grpo.policy.weight_pack import copy_to
from sota_grpo.rl.collate import Prompt, filled, groups_by_prompt, pad_rows, row_prompts
from sota_grpo.rl.records import sample_seed
from sota_grpo.rl.table import Row, RowTable
from sota_grpo.text import first_line

logger = logging.getLogger(__name__)
AnyRow = TypeVar("AnyRow", bound=Row)
Result = TypeVar("Result")


@dataclass(frozen=True)
class LearnerSettings:
    """How rows become optimizer steps; most are options of the config (``optimizer``, ``train``).

    Args:
        lr, weight_decay, beta1, beta2, eps: AdamW; ``momentum`` is Muon's, of the gradients of matrices.
        clip_grad_norm: largest gradient norm; 0 leaves the gradient as it is.
        schedule: ``constant``, or ``linear`` or ``cosine`` to 0 at ``total_steps``; each after ``warmup_steps``.
        optim_batch_size: rows per optimizer step.
        optim_groups: prompts per optimizer step, in its place where groups differ in size; None: rows are counted.
        micro_batch_tokens: packed tokens per forward pass: each prompt once for its group, and every response.
        forward_tokens: those of a pass that scores rows without a gradient; None: ``micro_batch_tokens``.
        top_entropy_quantile: share of the tokens of an optimizer step, those of highest entropy, that the surrogate
            keeps; below 1 a forward pass before each optimizer step measures them.
        entropy_target, entropy_coef_delta, entropy_coef_max: of
            :func:`sota_grpo.functional.divergences.adapted_entropy_coef`; without a target the coefficient stays.
        recompute: the proximal log-probs are recomputed by this learner before the first step on a batch.
        precision: ``fp32``, ``bf16`` or ``fp16`` autocast; fp16 scales the loss.
    """

    lr: float
    total_steps: int
    optim_batch_size: int
    optim_groups: int | None = None
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.95
    clip_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    epochs: int = 1
    micro_batch_tokens: int = 16384
    forward_tokens: int | None = None
    aggregation: Aggregation = "sequence"
    max_response_tokens: int | None = None
    drop_truncated: bool = False
    top_entropy_quantile: float = 1.0
    entropy_target: float | None = None
    entropy_coef_delta: float = 0.005
    entropy_coef_max: float = 1.0
    recompute: bool = False
    precision: str = "fp32"

    @property
    def scoring_tokens(self) -> int:
        return self.forward_tokens or self.micro_batch_tokens

    @property
    def rates(self) -> Rates:
        return Rates(self.lr, self.weight_decay, (self.beta1, self.beta2), self.eps, self.momentum)


def learning_rate_factor(step: int, settings: LearnerSettings) -> float:
    """Share of the peak learning rate at optimizer step ``step`` (0-based)."""
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps))
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Pass(NamedTuple):
    """One micro-batch of an optimizer step: the positions of its rows, and the weight of a trained token of each.

    Where all weights are 0 the rows only keep this rank in step with the others; ``learns``: a backward pass follows.
    """

    rows: list[int]
    weights: list[float]
    learns: bool


class Share(NamedTuple):
    """What one rank does in a training step.

    Args:
        rows: those that this rank reads, in the order of the whole.
        steps: the passes of each optimizer step; their rows are positions in ``rows``.
        scoring: micro-batches of ``rows`` whose log-probs are computed before the first step, each with False where it
            only keeps this rank in step.
        places: the position of each of ``rows`` in the whole.
        lengths: tokens of every row of the whole.
    """

    rows: RowTable
    steps: list[list[Pass]]
    scoring: list[tuple[list[int], bool]]
    places: list[int]
    lengths: list[int]


@dataclass(frozen=True)
class Planner:
    """Plans training steps; equal planners plan equal rows alike.

    Args:
        settings, seed: those of the learner.
        num_ranks: at least 1.
        shared_prompt: whether a prompt is computed once for its siblings of a micro-batch.
        advantage_only: rows without an advantage have no gradient.
        drops_out: adapters have dropout, so the first step's rows are scored without it.
        shape: what a row costs.
    """

    settings: LearnerSettings
    seed: int
    num_ranks: int
    shared_prompt: bool
    advantage_only: bool
    drops_out: bool
    shape: ModelShape

    def shares(self, table: RowTable, version: int) -> list[Share]:
        """The share of each rank in the training step that follows ``version``."""
        settings = self.settings
        prompts = row_prompts(table)
        rows = table.rows(keys.GROUP_ID, keys.ADVANTAGE, keys.TRUNCATED, keys.REWARD_ERROR)
        lengths = [prompt.tokens for prompt in prompts]
        batches = [b for epoch in range(settings.epochs) for b in self.mini_batches(rows, prompts, epoch, version)]
        scoring: list[list[tuple[list[int], bool]]] = [[] for _ in range(self.num_ranks)]
        if settings.recompute or self.drops_out:
            scored = range(len(rows)) if settings.recompute else batches[0]
            scoring = self.micro_batches(scored, prompts, settings.scoring_tokens)
        steps = [self.passes(rows, batch, prompts, settings.micro_batch_tokens) for batch in batches]
        return [_share(table, lengths, [step[rank] for step in steps], scoring[rank]) for rank in range(self.num_ranks)]

    def mini_batches(
        self, rows: Sequence[Row], prompts: Sequence[Prompt], epoch: int, version: int
    ) -> Iterator[list[int]]:
        """Rows of each optimizer step; the second and later epochs mix groups, so that siblings still share a prompt.

        Where the size of a step is no multiple of the groups' sizes, a group is cut at its edge; under ``optim_groups``
        none is, whatever its size.
        """
        order = list(range(len(rows)))
        if epoch:
            generator = torch.Generator().manual_seed(sample_seed(self.seed, version, epoch))
            groups = groups_by_prompt(prompts, order)
            mixed = torch.randperm(len(groups), generator=generator).tolist()
            order = [index for place in mixed for index in groups[place].rows]
        pieces, size = [[index] for index in order], self.settings.optim_batch_size
        if self.settings.optim_groups is not None:
            groups_of: dict[int, list[int]] = {}
            for index in order:
                groups_of.setdefault(int(rows[index][keys.GROUP_ID]), []).append(index)
            pieces, size = list(groups_of.values()), self.settings.optim_groups
        for start in range(0, len(pieces), size):
            yield [index for piece in pieces[start : start + size] for index in piece]

    def passes(
        self,
        rows: Sequence[Row],
        batch: Sequence[int],
        prompts: Sequence[Prompt],
        token_budget: int,
        *,
        keep_truncated: bool = False,
    ) -> list[list[Pass]]:
        """Each rank's passes over the rows ``batch`` of an optimizer step: those that learn come first.

        Where the loss of a token is a multiple of its advantage, groups whose advantages are all exactly 0 (all right,
        all wrong) have no gradient and are only measured; a row of weight 0 is neither. At least one row learns, since
        a gradient of zeros is a gradient: an optimizer with momentum moves.
        """
        settings = self.settings
        chosen = [rows[index] for index in batch]
        counts = torch.tensor([prompts[index].sampled for index in batch])
        if not keep_truncated:
            left_out = [keys.REWARD_ERROR, *([keys.TRUNCATED] if settings.drop_truncated else [])]
            flags = [[row.get(key, None) for key in left_out] for row in chosen]
            counts[[any(flag is not None and bool(flag.any()) for flag in own) for own in flags]] = 0
        weights = row_weights(counts, settings.aggregation, max_response_tokens=settings.max_response_tokens).tolist()
        moving = [True] * len(batch)
        if self.advantage_only:
            moving = torch.stack([row[keys.ADVANTAGE] for row in chosen]).flatten(1).any(1).tolist()
        weight = dict(zip(batch, weights))
        weighted = [(index, moves) for index, moves in zip(batch, moving, strict=True) if weight[index]]
        moved = {prompts[index].text for index, moves in weighted if moves}
        live = [index for index, _ in weighted if prompts[index].text in moved]
        still = [index for index, _ in weighted if prompts[index].text not in moved]
        if not live:
            live, still = still[:1] or list(batch[:1]), still[1:]
        by_rank: list[list[Pass]] = [[] for _ in range(self.num_ranks)]
        for indices, learns in ((live, True), (still, False)):
            for passes, micros in zip(by_rank, self.micro_batches(indices, prompts, token_budget)):
                passes += [Pass(m, [weight[i] if real else 0.0 for i in m], learns) for m, real in micros]
        return by_rank

    def micro_batches(
        self, chosen: Sequence[int], prompts: Sequence[Prompt], token_budget: int
    ) -> list[list[tuple[list[int], bool]]]:
        """Each rank's micro-batches of the rows ``chosen``, and whether they are its own.

        Ranks gather their layers together, so each must make as many passes as the busiest: one with fewer
        micro-batches goes through the shortest row again, which then counts for nothing.
        """
        fitting = partial(filled, prompts, token_budget=token_budget, shared_prompt=self.shared_prompt)
        if self.num_ranks == 1:
            return [[(micro, True) for micro in fitting(chosen)]]
        groups = groups_by_prompt(prompts, chosen)
        if not self.shared_prompt:
            groups = [group.subset([member]) for group in groups for member in range(len(group.rows))]

        def cost(group: PromptGroup) -> int:
            return step_flops(self.shape, shared_load(group.prompt, group.responses))

        shares = rank_shares(groups, self.num_ranks, cost)
        parts = [fitting([index for piece in share for index in piece.rows]) for share in shares]
        most = max(map(len, parts))
        again = [min(chosen, key=lambda index: prompts[index].tokens)] if most else []
        return [[(micro, True) for micro in own] + [(again, False)] * (most - len(own)) for own in parts]


def _share(rows: RowTable, lengths: list[int], steps: list[list[Pass]], scoring: list[tuple[list[int], bool]]) -> Share:
    """A rank's part, whose rows are counted anew."""
    read = {index for step in steps for one in step for index in one.rows} | {i for micro, _ in scoring for i in micro}
    places = sorted(read)
    new = {place: index for index, place in enumerate(places)}
    own = [[one._replace(rows=[new[index] for index in one.rows]) for one in step] for step in steps]
    scored = [([new[index] for index in micro], real) for micro, real in scoring]
    return Share(rows.take(places), own, scored, places, lengths)


def dropouts(module: nn.Module) -> list[nn.Dropout]:
    """The dropouts that drop."""
    return [child for child in module.modules() if isinstance(child, nn.Dropout) and child.p > 0]


@contextlib.contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Every dropout of ``module`` is the identity inside."""
    rates = [(child, child.p) for child in dropouts(module)]
    for child, _ in rates:
        child.p = 0.0
    try:
        yield
    finally:
        for child, rate in rates:
            child.p = rate


class ForwardPasses:
    """Forward passes of ``policy``; the arguments are those of :class:`sota_grpo.training.learner.Learner`."""

    def __init__(self, policy: CausalPolicy, settings: LearnerSettings, pad_token_id: int, ranks: Ranks | None):
        self.policy = policy
        self.settings = settings
        self.pad_token_id = pad_token_id
        self.ranks = ranks or Ranks()
        self.share, self.num_shares = self.ranks.share, self.ranks.num_shares  # which of the rows, of how many
        self.device = next(policy.parameters()).device
        self.halved = False  # the micro-batches, where the device once lacked memory

    def within_memory(self, compute: Callable[[], Result]) -> Result:
        """``compute()``; where the device lacks memory for the first time, once more in micro-batches of half the size.

        They stay so for the rest of the run; several ranks, which would have to agree on it, end at once. Gradients are
        dropped; ``compute`` must not have updated anything yet.

        Raises:
            RunFailed: memory is lacking again, or there are several ranks.
        """
        tokens, half = self.settings.micro_batch_tokens, self.half
        try:
            return compute()
        except torch.OutOfMemoryError as error:
            lacking = f"The learner's device lacks memory for micro-batches of {tokens:,} tokens ({first_line(error)})"
            if self.halved or self.ranks.size > 1:
                raise RunFailed(
                    f"{lacking}; use train.micro_batch_tokens={half} or train_model.gradient_checkpointing=true with "
                    "train.resume=auto, which continues from the last checkpoint."
                ) from error
        self.halve()  # from here on: what was computed lives no longer than its exception
        self.policy.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        logger.warning("%s; the step is computed anew, with train.micro_batch_tokens=%d from now on.", lacking, half)
        return self.within_memory(compute)

    @property
    def half(self) -> int:
        return max(1, self.settings.micro_batch_tokens // 2)

    def halve(self) -> None:
        """Compute in micro-batches of half the size for the rest of the run."""
        self.halved, scoring = True, max(1, self.settings.scoring_tokens // 2)
        self.settings = replace(self.settings, micro_batch_tokens=self.half, forward_tokens=scoring)

    def fitting(self, rows: Sequence[Row], passes: Sequence[Pass]) -> Sequence[Pass]:
        """Passes that may have been planned before the micro-batches were halved, as they would be planned now."""
        if not self.halved:
            return passes
        weights = {index: weight for one in passes for index, weight in zip(one.rows, one.weights)}
        planned = []
        for learns in (True, False):
            chosen = [index for one in passes if one.learns == learns for index in one.rows]
            micros = self._cut(rows, chosen, self.settings.micro_batch_tokens)
            planned += [Pass(micro, [weights[index] for index in micro], learns) for micro, _ in micros]
        return planned

    def fitting_scores(
        self, rows: Sequence[Row], scoring: Sequence[tuple[list[int], bool]]
    ) -> Sequence[tuple[list[int], bool]]:
        """:meth:`fitting`, of micro-batches without a gradient."""
        chosen = [index for micro, _ in scoring for index in micro]
        return self._cut(rows, chosen, self.settings.scoring_tokens) if self.halved else scoring

    def _cut(self, rows: Sequence[Row], chosen: Sequence[int], token_budget: int) -> list[tuple[list[int], bool]]:
        return self.planner().micro_batches(chosen, row_prompts(rows), token_budget)[self.share]

    def padded(self, rows: Sequence[Row], weights: Sequence[float] | None = None) -> TensorDictBase:
        """Right-padded ``[N, T]`` batch on the learner's device; ``weights`` are those of a trained token of each row.

        Its layout, where the policy packs rows, is computed before the copy, and all goes in one, so that the host need
        not wait for the device.
        """
        batch = pad_rows(rows, pad_token_id=self.pad_token_id)
        if weights is not None:
            by_row = torch.tensor(weights, dtype=torch.float32).unsqueeze(-1)
            batch.set(keys.LOSS_WEIGHT, torch.where(batch.get(keys.ASSISTANT_MASK), by_row, 0.0))
        layout = self.policy.layout(batch)
        if self.device.type == "cuda":
            names, values = zip(*batch.items(include_nested=True, leaves_only=True))
            moved = copy_to([*values, *([] if layout is None else layout.tensors())], self.device)
            batch = TensorDict(dict(zip(names, moved)), batch_size=batch.batch_size, device=self.device)
            layout = None if layout is None else layout.on(moved[len(names) :])
        return batch if layout is None else batch.set_non_tensor(keys.LAYOUT, layout)

    def log_probs(self, batch: TensorDictBase) -> Tensor:
        """Log-probs ``[N, T]`` of a padded batch without dropout, 0 off the assistant mask."""
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
        """Each row with its log-probs ``[T_i]`` (on the CPU) as :meth:`log_probs` gives them."""
        return zip(rows, self._by_row(rows, self.log_probs))

    def measured(self, rows: Sequence[Row]) -> Tensor:
        """Log-probs and entropies, ``[2, sum T_i]`` on the CPU, row after row; without dropout, 0 off the mask."""

        def both(batch: TensorDictBase) -> Tensor:
            outputs = self._policy_outputs(batch)
            return torch.stack([outputs.get(keys.LOG_PROBS), outputs.get(ENTROPY)], dim=-1)

        return torch.cat(self._by_row(rows, both, 2)).T.contiguous()

    def measured_with_rounding(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor | None]:
        """:meth:`measured`, and what half precision changes in its log-probs, ``[sum T_i]``: half minus float32.

        Half is bf16 where training is in float32. None where parameters are in half precision.
        """
        measured, trained = self.measured(rows), self.settings.precision
        if not self.single:
            return measured, None
        with self.computing("bf16" if trained == "fp32" else "fp32"):
            other = self.measured(rows)
        return measured, (other - measured if trained == "fp32" else measured - other)[0]

    @property
    def single(self) -> bool:
        """Whether all parameters are in float32, so that the policy can be computed in it."""
        return all(parameter.dtype == torch.float32 for parameter in self.policy.parameters())

    @contextlib.contextmanager
    def computing(self, precision: str) -> Iterator[None]:
        """Compute in another precision than that of training; layers are not compiled again for it."""
        trained = self.settings
        eager = torch.compiler.set_stance("force_eager") if self.policy.fused else contextlib.nullcontext()
        self.settings = replace(trained, precision=precision)
        try:
            with eager:
                yield
        finally:
            self.settings = trained

    def _by_row(
        self,
        rows: Sequence[Row],
        measure: Callable[[TensorDictBase], Tensor],
        *width: int,
        weight: float | None = None,
    ) -> list[Tensor]:
        """``measure`` of padded batches, ``[N, T, *width]``, as ``[T_i, *width]`` on the CPU for each row.

        ``weight`` is the loss weight of each trained token; None: the batches have none.
        """
        rows, places = list(rows), range(len(rows))
        micros = self._cut(rows, places, self.settings.scoring_tokens)
        lengths = [row[keys.FULL_TOKENS].shape[-1] for row in rows]
        return self._whole(self._own(rows, micros, measure, weight), places, lengths, *width)

    def _own(
        self,
        rows: Sequence[Row],
        micros: Sequence[tuple[list[int], bool]],
        measure: Callable[[TensorDictBase], Tensor],
        weight: float | None = None,
    ) -> dict[int, Tensor]:
        """``measure`` of these micro-batches, by the place of the row."""
        chosen = [[rows[index] for index in micro] for micro, _ in micros]
        weights = [None if weight is None else [weight] * len(micro) for micro in chosen]
        values = [measure(self.padded(*one)) for one in zip(chosen, weights)]  # fetched at the end
        return {
            index: own[: rows[index][keys.FULL_TOKENS].shape[-1]].clone()
            for (micro, real), batch in zip(micros, values)
            if real
            for index, own in zip(micro, batch.cpu())
        }

    def _whole(
        self, own: Mapping[int, Tensor], places: Sequence[int], lengths: Sequence[int], *width: int
    ) -> list[Tensor]:
        """What all ranks found of this one's rows, whose places in the whole and whose lengths are given."""
        if self.ranks.size == 1:
            return [own[index] for index in range(len(places))]
        flat = torch.zeros(sum(lengths), *width)
        parts = flat.split(list(lengths))  # each rank fills in its rows; what the others measured is 0 there
        for index, value in own.items():
            parts[places[index]].copy_(value)
        summed = self.ranks.sum(flat).cpu().split(list(lengths))
        return [summed[place] for place in places]

    def planner(self, *, seed: int = 0, advantage_only: bool = False) -> Planner:
        """Who cuts rows into this policy's micro-batches and shares them out over its ranks."""
        sizes = (self.num_shares, self.policy.shared_prompt)
        return Planner(self.settings, seed, *sizes, advantage_only, bool(dropouts(self.policy)), self.shape)

    @cached_property
    def shape(self) -> ModelShape:
        """The numbers of the policy that its operations are counted from."""
        model = base_model(self.policy.model)
        config, decoder, head = model.config.get_text_config(), model.get_decoder(), model.get_output_embeddings()
        tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
        matrices = [weight for weight in decoder.parameters() if weight.dim() == 2 and id(weight) not in tables]
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return ModelShape(
            trainable_weights=sum(weight.numel() for weight in matrices if weight.requires_grad),
            frozen_weights=sum(weight.numel() for weight in matrices if not weight.requires_grad),
            attention_width=config.num_hidden_layers * config.num_attention_heads * head_dim,
            head_weights=head.weight.numel(),
            head_trainable=head.weight.requires_grad,
        )

    def autocast(self) -> contextlib.AbstractContextManager:
        """The precision of every forward pass, the reference's included."""
        if self.settings.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.bfloat16 if self.settings.precision == "bf16" else torch.float16
        # its cache would hold a copy of every layer that FSDP2 gathers and gives back, until the pass ends
        return torch.autocast(self.device.type, dtype=dtype, cache_enabled=self.ranks.size == 1)
