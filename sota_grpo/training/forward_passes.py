"""What a policy says about rows, micro-batch by micro-batch and on any number of ranks; nothing is trained here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from sota_grpo import keys
from sota_grpo.functional.flops import ModelShape
from sota_grpo.functional.weighting import Aggregation
from sota_grpo.policy.causal import ENTROPY, CausalPolicy, base_model
from sota_grpo.policy.load import dropouts
from sota_grpo.policy.sharding import Ranks
from sota_grpo.policy.weight_pack import copy_to
from sota_grpo.rl.collate import Row, pad_rows, row_prompts
from sota_grpo.training.step_plan import Planner, as_weights


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


class ForwardPasses:
    """Forward passes of ``policy``; the arguments are those of :class:`sota_grpo.training.learner.Learner`."""

    def __init__(self, policy: CausalPolicy, settings: LearnerSettings, pad_token_id: int, ranks: Ranks | None):
        self.policy = policy
        self.settings = settings
        self.pad_token_id = pad_token_id
        self.ranks = ranks or Ranks()
        self.device = next(policy.parameters()).device

    def padded(
        self, rows: Sequence[TensorDictBase] | Sequence[Row], weights: Sequence[float] | None = None
    ) -> TensorDictBase:
        """Right-padded ``[N, T]`` batch on the learner's device, with its layout where the policy packs rows.

        ``weights`` are those of a trained token of each row. The layout is computed before the copy, and all goes in
        one, so that the host need not wait for the device.
        """
        batch = pad_rows(rows, pad_token_id=self.pad_token_id)
        if weights is not None:
            batch.set(keys.LOSS_WEIGHT, as_weights(weights, batch.get(keys.ASSISTANT_MASK)))
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
        prompts, budget = row_prompts(rows), self.settings.micro_batch_tokens
        micros = self.planner().micro_batches(range(len(rows)), prompts, budget)[self.ranks.rank]
        places, lengths = range(len(rows)), [prompt.tokens for prompt in prompts]
        return self._whole(self._own(rows, micros, measure), places, lengths, *width)

    def _own(
        self,
        rows: Sequence[TensorDictBase] | Sequence[Row],
        micros: Sequence[tuple[list[int], bool]],
        measure: Callable[[TensorDictBase], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """``measure`` of these micro-batches, by the place of the row."""
        values = [measure(self.padded([rows[index] for index in micro])) for micro, _ in micros]  # fetched at the end
        return {
            index: own[: rows[index][keys.FULL_TOKENS].shape[-1]].clone()
            for (micro, real), found in zip(micros, values)
            if real
            for index, own in zip(micro, found.cpu())
        }

    def _whole(
        self, found: Mapping[int, torch.Tensor], places: Sequence[int], lengths: Sequence[int], *width: int
    ) -> list[torch.Tensor]:
        """What all ranks found of this one's rows, whose places in the whole and whose lengths are given."""
        if self.ranks.size == 1:
            return [found[index] for index in range(len(places))]
        flat = torch.zeros(sum(lengths), *width)
        parts = flat.split(list(lengths))  # each rank fills in its rows; what the others measured is 0 there
        for index, value in found.items():
            parts[places[index]].copy_(value)
        summed = self.ranks.sum(flat).cpu().split(list(lengths))
        return [summed[place] for place in places]

    def log_prob_gaps(self, rows: Sequence[TensorDictBase]) -> torch.Tensor:
        """Trainer's minus engine's log-prob of every sampled token, flat, in nats."""
        gaps = [(own - row.get(keys.LOG_PROBS))[row.get(keys.ASSISTANT_MASK)] for row, own in self.scored(rows)]
        return torch.cat(gaps)

    def planner(self, *, seed: int = 0, advantage_only: bool = False) -> Planner:
        """Who cuts rows into this policy's micro-batches and shares them out over its ranks."""
        sizes = (self.ranks.size, self.policy.shared_prompt)
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
