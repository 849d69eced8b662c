"""What a policy says about rows, micro-batch by micro-batch and on any number of ranks; nothing is trained here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from sota_grpo import keys
from sota_grpo.functional.balance import PromptGroup, rank_shares
from sota_grpo.functional.flops import ModelShape, shared_load, step_flops
from sota_grpo.functional.weighting import Aggregation
from sota_grpo.policy.causal import ENTROPY, CausalPolicy, base_model
from sota_grpo.policy.sharding import Ranks
from sota_grpo.policy.weight_pack import copy_to
from sota_grpo.rl.collate import micro_batches, pad_rows, prompt_groups


@dataclass(frozen=True)
class LearnerSettings:
    """How rows become optimizer steps.

    Args:
        lr, weight_decay, beta1, beta2, eps: AdamW.
        clip_grad_norm: largest gradient norm; 0 leaves the gradient as it is.
        schedule: ``constant``, or ``linear`` or ``cosine`` to 0 at ``total_steps``; each after ``warmup_steps``.
        optim_batch_size: rows per optimizer step.
        optim_groups: prompts per optimizer step, in its place where groups differ in size; None: rows are counted.
        epochs: passes over a batch.
        micro_batch_tokens: packed tokens per forward pass: each prompt once for its group, and every response.
        aggregation: ``token``, ``sequence`` or ``constant`` (DESIGN 4.3).
        max_response_tokens: the constant of ``constant``.
        drop_truncated: truncated rows take no part in the loss.
        top_entropy_quantile: share of the tokens of an optimizer step, those of highest entropy, that the surrogate
            keeps; below 1 a forward pass before each optimizer step measures them.
        entropy_target, entropy_coef_delta, entropy_coef_max: of
            :func:`sota_grpo.functional.entropy.adapted_entropy_coef`; without a target the coefficient stays.
        recompute: the proximal log-probs are recomputed by this learner before the first step on a batch.
        precision: ``fp32``, ``bf16`` or ``fp16`` autocast; fp16 scales the loss.
    """

    lr: float
    total_steps: int
    optim_batch_size: int
    optim_groups: int | None = None
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad_norm: float = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    epochs: int = 1
    micro_batch_tokens: int = 16384
    aggregation: Aggregation = "sequence"
    max_response_tokens: int | None = None
    drop_truncated: bool = False
    top_entropy_quantile: float = 1.0
    entropy_target: float | None = None
    entropy_coef_delta: float = 0.005
    entropy_coef_max: float = 1.0
    recompute: bool = False
    precision: str = "fp32"


def learning_rate_factor(step: int, settings: LearnerSettings) -> float:
    """Share of the peak learning rate at optimizer step ``step`` (0-based).

    >>> settings = LearnerSettings(lr=1.0, total_steps=10, optim_batch_size=8, schedule="linear", warmup_steps=2)
    >>> [learning_rate_factor(step, settings) for step in (0, 1, 2, 6)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    done = (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps)
    done = min(1.0, done)
    return 1.0 - done if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))


class Pass(NamedTuple):
    """One micro-batch of an optimizer step.

    Args:
        rows: what goes through the policy.
        real: False for rows that only keep this rank in step with the others and count for nothing.
        learns: whether a backward pass follows.
    """

    rows: list[TensorDictBase]
    real: bool
    learns: bool


class ForwardPasses:
    """Forward passes of ``policy``; the arguments are those of :class:`sota_grpo.training.learner.Learner`."""

    def __init__(self, policy: CausalPolicy, settings: LearnerSettings, pad_token_id: int, ranks: Ranks | None):
        self.policy = policy
        self.settings = settings
        self.pad_token_id = pad_token_id
        self.ranks = ranks or Ranks()
        self.device = next(policy.parameters()).device

    def padded(self, rows: Sequence[TensorDictBase]) -> TensorDictBase:
        """Right-padded ``[N, T]`` batch on the learner's device, with its layout where the policy packs rows.

        The layout is computed before the copy, and all goes in one, so that the host need not wait for the device.
        """
        batch = pad_rows(rows, pad_token_id=self.pad_token_id)
        layout = self.policy.layout(*(batch.get(key) for key in self.policy.in_keys))
        if self.device.type == "cuda":
            names, values = zip(*batch.items(include_nested=True, leaves_only=True))
            moved = copy_to([*values, *([] if layout is None else layout.tensors())], self.device)
            batch = TensorDict(dict(zip(names, moved)), batch_size=batch.batch_size, device=self.device)
            layout = None if layout is None else layout.on(moved[len(names) :])
        return batch if layout is None else batch.set_non_tensor(keys.LAYOUT, layout)

    def log_probs(self, batch: TensorDictBase) -> torch.Tensor:
        """Log-probs ``[N, T]`` of a padded batch without dropout, 0 off the assistant mask."""
        return self._policy_outputs(batch).get(keys.LOG_PROBS)

    @torch.no_grad()
    def _policy_outputs(self, batch: TensorDictBase) -> TensorDictBase:
        """What the policy writes to a padded batch without dropout."""
        training = self.policy.training
        self.policy.eval()
        with self.autocast():
            found = self.policy(batch)
        self.policy.train(training)
        return found

    def scored(self, rows: Sequence[TensorDictBase]) -> Iterator[tuple[TensorDictBase, torch.Tensor]]:
        """Each row with its log-probs ``[T_i]`` (on the CPU) as :meth:`log_probs` gives them, in the order given."""
        return zip(rows, self._by_row(rows, self.log_probs))

    def measured(self, rows: Sequence[TensorDictBase]) -> torch.Tensor:
        """Log-probs and entropies, ``[2, sum T_i]`` on the CPU, row after row; without dropout, 0 off the mask."""

        def both(batch: TensorDictBase) -> torch.Tensor:
            found = self._policy_outputs(batch)
            return torch.stack([found.get(keys.LOG_PROBS), found.get(ENTROPY)], dim=-1)

        return torch.cat(self._by_row(rows, both, 2)).T.contiguous()

    def measured_with_rounding(self, rows: Sequence[TensorDictBase]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """:meth:`measured`, and what half precision alone does to its log-probs, ``[sum T_i]``: half minus float32.

        The other of the two precisions costs one forward pass. Half is bf16 where training is in float32. None where
        parameters are in half precision: nothing else is known of them.
        """
        found, trained = self.measured(rows), self.settings.precision
        if not self.single:
            return found, None
        with self.computing("bf16" if trained == "fp32" else "fp32"):
            other = self.measured(rows)
        return found, (other - found if trained == "fp32" else found - other)[0]

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
        self, rows: Sequence[TensorDictBase], measure: Callable[[TensorDictBase], torch.Tensor], *width: int
    ) -> list[torch.Tensor]:
        """``measure`` of padded batches, ``[N, T, *width]``, as ``[T_i, *width]`` on the CPU for each row."""
        found = self._own(rows, measure)
        if self.ranks.size > 1:  # each rank fills in its rows; what the others measured is 0 there
            lengths = [row.get(keys.FULL_TOKENS).shape[-1] for row in rows]
            flat = torch.cat([found.get(id(row), torch.zeros(length, *width)) for row, length in zip(rows, lengths)])
            return list(self.ranks.sum(flat).cpu().split(lengths))
        return [found[id(row)] for row in rows]

    def _own(
        self, rows: Sequence[TensorDictBase], measure: Callable[[TensorDictBase], torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """``measure`` of this rank's share, by the identity of the row."""
        parts = self.own_micro_batches(rows, self.settings.micro_batch_tokens)
        values = [measure(self.padded(micro)) for micro, _ in parts]  # fetched when all of them are under way
        return {
            id(row): own[: row.get(keys.FULL_TOKENS).shape[-1]].clone()
            for (micro, real), found in zip(parts, values)
            if real
            for row, own in zip(micro, found.cpu())
        }

    def log_prob_gaps(self, rows: Sequence[TensorDictBase]) -> torch.Tensor:
        """Trainer's minus engine's log-prob of every sampled token, flat, in nats."""
        gaps = [(own - row.get(keys.LOG_PROBS))[row.get(keys.ASSISTANT_MASK)] for row, own in self.scored(rows)]
        return torch.cat(gaps)

    def own_micro_batches(
        self, rows: Sequence[TensorDictBase], token_budget: int
    ) -> list[tuple[list[TensorDictBase], bool]]:
        """This rank's share of ``rows``, and whether it is one.

        Ranks gather their layers together, so each must make as many passes as the busiest: one with fewer
        micro-batches goes through the shortest row again, which then counts for nothing.
        """
        if self.ranks.size == 1:
            return [(part, True) for part in self._micro_batches(rows, token_budget)]
        groups = prompt_groups(rows)
        if not self.policy.shared_prompt:
            groups = [group.part([member]) for group in groups for member in range(len(group.rows))]
        shares = rank_shares(groups, self.ranks.size, self._cost)
        parts = [
            self._micro_batches([rows[index] for piece in share for index in piece.rows], token_budget)
            for share in shares
        ]
        mine = [(part, True) for part in parts[self.ranks.rank]]
        missing = max(map(len, parts)) - len(mine)
        again = [min(rows, key=lambda row: row.get(keys.FULL_TOKENS).shape[-1])] if missing else []
        return mine + [(again, False)] * missing

    def passes(self, rows: Sequence[TensorDictBase], token_budget: int, *, advantage_only: bool) -> list[Pass]:
        """This rank's passes over the weighted rows of an optimizer step: those that learn come first."""
        live, still = split_zero_advantage(rows, advantage_only=advantage_only)
        return [
            Pass(micro, real, learns)
            for part, learns in ((live, True), (still, False))
            for micro, real in self.own_micro_batches(part, token_budget)
        ]

    def _micro_batches(self, rows: Sequence[TensorDictBase], token_budget: int) -> list[list[TensorDictBase]]:
        return micro_batches(rows, token_budget=token_budget, shared_prompt=self.policy.shared_prompt)

    def _cost(self, group: PromptGroup) -> int:
        return step_flops(self.shape, shared_load(group.prompt, group.responses))

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


def split_zero_advantage(
    rows: Sequence[TensorDictBase], *, advantage_only: bool
) -> tuple[list[TensorDictBase], list[TensorDictBase]]:
    """Weighted rows that have a gradient, and those that are only measured; a row of weight 0 is neither.

    Where the loss of a token is a multiple of its advantage, groups whose advantages are all exactly 0 (all right, all
    wrong) have no gradient. At least one row is among the first, since a gradient of zeros is a gradient: an optimizer
    with momentum moves.

    Args:
        rows: ragged rows with ``loss_weight`` and ``advantage``.
        advantage_only: whether every term of the loss is such a multiple; False: each weighted row has a gradient.

    >>> from tensordict import TensorDict
    >>> def row(group, advantage, weight):
    ...     masks = {"masks": {"all_assistant_mask": torch.zeros(1).bool()}}
    ...     tokens = {"tokens": {"full": torch.full((1,), group)}, **masks}
    ...     signal = {"advantage": torch.full((1, 1), advantage), "loss_weight": torch.tensor([weight])}
    ...     return TensorDict({"group_id": group, **tokens, **signal})
    >>> rows = [row(0, 0.0, 1.0), row(0, 1.0, 1.0), row(1, 0.0, 1.0), row(2, 3.0, 0.0)]
    >>> [[int(one["group_id"]) for one in part] for part in split_zero_advantage(rows, advantage_only=True)]
    [[0, 0], [1]]
    """
    weighted = [row for row in rows if bool(row.get(keys.LOSS_WEIGHT).any())]
    moving = [not advantage_only or bool(row.get(keys.ADVANTAGE).any()) for row in weighted]
    live, still = weighted, list[TensorDictBase]()
    if not all(moving):
        groups = prompt_groups(weighted)
        chosen = {index for group in groups if any(moving[index] for index in group.rows) for index in group.rows}
        live = [row for index, row in enumerate(weighted) if index in chosen]
        still = [row for index, row in enumerate(weighted) if index not in chosen]
    return (live, still) if live else (still[:1] or list(rows[:1]), still[1:])
