"""GRPO as a TorchRL ``LossModule``, with losses and diagnostics that add over micro-batches.

Every reduction is ``sum(loss_weight * per_token)``, so losses, gradients and diagnostics of micro-batches add up to
exactly those of the whole optimizer step. Only entries named ``loss_*`` carry a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorClass, TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchrl.objectives.common import LossModule

from sota_grpo import keys
from sota_grpo.functional import loss_terms
from sota_grpo.functional.advantages import distilled_advantages
from sota_grpo.functional.loss_terms import KL_ESTIMATORS, of_terms, sequence_log_ratio
from sota_grpo.rl.collate import pad_rows, padded_entry, require_plain, unpad_rows
from sota_grpo.rl.custom_objectives import ObjectiveError, surrogate
from sota_grpo.rl.table import row_list

Side = Literal["left", "right"]
TORCHRL_AGGREGATIONS = {"token_mean": "token", "prompt_mean": "sequence", "none": "none"}
_CHOICES: dict[str, Collection[Any]] = {
    "ratio": ("token", "sequence"),
    "kl_estimator": tuple(KL_ESTIMATORS),
    "aggregation": (None, *TORCHRL_AGGREGATIONS),
    "loss_aggregation": (None, "token", "sequence", "constant"),
    "masking_strategy": ("sft", "rlhf", "generic"),
    "correction": (None, "token", "sequence", "geometric"),
    "correction_mode": ("truncate", "mask", "reject"),
}
_MEANINGLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "samples_mc_entropy": ((1,), "the entropy is exact, nothing is sampled"),
    "gamma": ((None,), "a response is one decision, nothing is discounted"),
    "reduction": ((None, "mean", "none"), "the loss weights decide the reduction; see loss_aggregation"),
    "clip_value": ((None, False), "there is no value network"),
    "ref_log_prob_padding_side": (("left",), "all entries of a batch are padded together"),
    "ref_log_prob_padding_value": ((0.0,), "padding is masked, its value has no effect"),
}

_WRITTEN_BY: dict[Any, str] = {  # entries that TorchRL's wrappers and environments do not write
    **dict.fromkeys(
        (keys.ASSISTANT_MASK, keys.LOG_PROBS),
        ", which sota_grpo.envs.complete_rows writes on rows of TorchRL's wrappers",
    ),
    keys.ADVANTAGE: ", which sota_grpo.rl.transforms.GroupAdvantage writes",
}


class LossTokens(NamedTuple):
    """Inputs of the loss for a batch of ``N`` rows: all ``[N, T]``, and all but ``kept`` 0 where ``mask`` is False.

    ``kept`` (or ``[N, 1]``) marks tokens with a surrogate loss; None: all. ``log_prob``, ``entropy`` have a gradient.
    """

    log_prob: Tensor
    behaviour: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor
    old: Tensor  # log-probs in the denominator of the ratio: proximal if the batch has them, else behaviour
    proximal: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None
    kept: Tensor | None = None


def _per_token(batch: TensorDictBase, key: Any, side: Side, *, optional: bool = False) -> Any:
    """Return an entry, ragged rows padded on ``side``; if it is missing, None if ``optional``, else KeyError.

    ValueError if some ragged rows lack it.
    """
    ragged = isinstance(batch, LazyStackedTensorDict)
    value = padded_entry(row_list(batch), key, 0, side) if ragged else batch.get(key, None)
    if value is None and not optional:
        there = ", ".join(sorted(_dotted(name) for name in batch.keys(True, True)))
        raise KeyError(
            f"the batch{' or the output of actor_network' if key == keys.LOG_PROBS else ''} has no "
            f"{_dotted(key)}{_WRITTEN_BY.get(key, '')}; it has {there}."
        )
    return value


def _dotted(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(key)  # a KeyError shows its text with quotes escaped


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raise ValueError if a keyword of :class:`GRPOLoss` is unknown or has no effect, or the objective is unusable."""
    for name, (accepted, reason) in _MEANINGLESS.items():
        if keywords.get(name, accepted[0]) not in accepted:
            raise ValueError(f"{name} is {keywords[name]!r}, which has no effect in this loss: {reason}; drop it.")
    for name, choices in _CHOICES.items():
        if name in keywords and keywords[name] not in choices:
            raise ValueError(f"{name} is {keywords[name]!r}; choose one of {', '.join(map(repr, choices))}.")
    if keywords.get("aggregation") not in (None, "token_mean") and keywords.get("loss_aggregation") is not None:
        raise ValueError(
            f"aggregation is {keywords['aggregation']!r} and loss_aggregation is {keywords['loss_aggregation']!r}; "
            "give one of them."
        )
    objective, chosen = keywords["objective"], surrogate(keywords["objective"])
    if keywords["dual_clip"] is not None and not (chosen.reads("dual_clip") or keywords.get("kl_unbiased")):
        raise ValueError(f"dual_clip is {keywords['dual_clip']}, not read by the objective {objective!r}; use None.")
    if keywords["ratio"] == "sequence" and not (chosen.reads("log_ratio") and "sequence" in chosen.ratios):
        reason = "takes it per token" if chosen.reads("log_ratio") else "has no ratio"
        raise ValueError(f"ratio is 'sequence' but the objective is {objective!r}, which {reason}; use 'token'.")
    if keywords.get("correction") is not None and chosen.weighs_rows:
        raise ValueError(
            f"correction is {keywords['correction']!r} but the objective is {objective!r}, which already "
            "weights whole rows; use correction=None."
        )
    if keywords.get("kl_unbiased") and keywords["kl_estimator"] == "k2":
        raise ValueError("kl_unbiased does not work with kl_estimator 'k2', which is biased; use 'k1' or 'k3'.")


_MAX_LOG_RATIO = 300.0  # the square of its exponential is still finite in float64


class GRPOLossOutput(TensorClass["tensor_only"]):  # type: ignore[name-defined]
    """Output of :class:`GRPOLoss`; an entry that was not computed is None, and ``keys()`` leaves it out.

    The loss is the sum of the ``loss_*`` entries; add it over micro-batches. The other entries are diagnostics of this
    batch. For those of a whole step, add the ``sums`` (detached, float64, over trained tokens) of all its micro-batches
    and ranks, and call :func:`diagnostic_means`. ``sums["gradient_squared"]`` is the sum over tokens of
    ``(d loss / d logp)^2``, 0 under ``torch.no_grad``; ``gradient_squared_max`` is the largest term.

    TorchRL's recipes differentiate ``mean(reduce=True)`` or ``sum(reduce=True)``: here these reduce each ``loss_*``
    entry and add the results. TorchRL's own methods would include the diagnostics.
    """

    loss_objective: Tensor
    clip_fraction: Tensor
    kl_approx: Tensor
    ESS: Tensor
    mismatch_kl: Tensor
    gradient_squared_max: Tensor
    sums: TensorDict
    loss_kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    loss_entropy: Tensor | None = None
    kl_to_ref: Tensor | None = None
    entropy: Tensor | None = None
    correction_fraction: Tensor | None = None
    off_policy_fraction: Tensor | None = None
    reverse_kl: Tensor | None = None
    kl_to_inference: Tensor | None = None

    def mean(self, *args: Any, reduce: bool | None = None, **options: Any) -> Any:
        return self._loss(Tensor.mean) if reduce else super().mean(*args, reduce=reduce, **options)

    def sum(self, *args: Any, reduce: bool | None = None, **options: Any) -> Any:
        return self._loss(Tensor.sum) if reduce else super().sum(*args, reduce=reduce, **options)

    def _loss(self, reduction: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.stack([reduction(value) for name, value in self.items() if name.startswith("loss_")]).sum()


def diagnostic_means(sums: Mapping[str, Tensor] | TensorDictBase) -> dict[str, Tensor]:
    """Return the diagnostics of a step, means over its trained tokens, from the added ``sums`` of its micro-batches.

    ``clip_fraction``: fraction of tokens whose gradient is 0 because of the clip. ``kl_approx``: ``logp_behaviour -
    logp``. ``mismatch_kl``: k3 of KL(engine, trainer), see :class:`GRPOLoss`. ``kl_to_ref``, ``kl_to_inference``,
    ``entropy``: nats. ``correction_fraction``: fraction of tokens whose correction weight was above the cap or below
    the floor. ``off_policy_fraction``: fraction that ``off_policy_threshold`` masked; these do not count as clipped.
    ``reverse_kl``: ``logp_behaviour - logp_teacher``, k1 of KL(behaviour policy, teacher). ``ESS``: ``(sum w)^2 / (n
    sum w^2)``, ``w = exp(logp - logp_behaviour)``, 1 if all weights are equal. Without trained tokens, each is NaN.

    >>> sums = {"tokens": torch.tensor(4.0), "clip_fraction": torch.tensor(1.0)}
    >>> sums |= {"ratio": torch.tensor(8.0), "ratio_squared": torch.tensor(32.0)}
    >>> {name: value.item() for name, value in diagnostic_means(sums).items()}
    {'clip_fraction': 0.25, 'ESS': 0.5}
    """
    special = ("tokens", "ratio", "ratio_squared", "gradient_squared")
    means = {name: value / sums["tokens"] for name, value in sums.items() if name not in special}
    return means | {"ESS": sums["ratio"].square() / sums["ratio_squared"] / sums["tokens"]}


class GRPOLoss(LossModule):
    """Group-relative policy optimisation over sampled tokens; its variants (DAPO, GSPO, ..) are choices of its options.

    ``loss_objective = sum_t w_t f(rho_t, A_t) c_t``: ``f`` is the ``objective``, ``rho = exp(logp - logp_old)``;
    ``logp_old`` is the batch's proximal log-prob, else its behaviour log-prob; ``w`` is the batch's ``loss_weight``, or
    weights derived from its mask; ``c`` is 1, or the weight of ``correction`` (proximal over behaviour policy). KL and
    entropy use the same ``w``. Where the batch's ``objective_mask`` is False, only the surrogate is 0. Masked tokens,
    NaN included, change neither value nor gradient; a token whose behaviour log-prob is not finite is masked too.

    ``actor_network`` is a transformers causal LM, which is wrapped in a
    :class:`~sota_grpo.policy.causal.CausalPolicy`; a module whose call on the right-padded batch returns
    ``("log_probs", "full")`` and, if it can, ``"entropy"`` (``[N, T]``); or a TorchRL LLM wrapper with
    ``_get_sft_dist`` or ``get_dist``. The batch is dense ``[N, T]`` or a lazy stack of ragged rows; the advantage
    ``[N, 1, 1]``, ``[N, T, 1]``, ``[N, 1]`` or ``[N]``.

    ``mismatch_kl`` compares the engine's log-probs with the proximal log-probs if the batch has them, else with the
    current ones. ``kl_to_ref`` is reported if the batch has reference log-probs. As a loss, k1 has a gradient of mean 0
    (unless ``kl_unbiased``), so use k2 or k3.

    Args:
        clip_epsilon: clip width, or (low, high).
        kl_mask_threshold: tokens with ``(logp - logp_behaviour)^2 / 2`` above it are masked.
        aggregation: TorchRL's names: ``token_mean``, ``prompt_mean`` (per row, then over rows), ``none`` (per-token
            losses ``[N, T, 1]``, 0 off-mask, unweighted).
        entropy_bonus, entropy_coeff: ``loss_entropy = -entropy_coeff * entropy``, unless ``entropy_bonus`` is False.
        kl_to_ref_coeff, kl_to_inference_coeff: coefficients of the KL to the reference and to the behaviour policy.
        device: device to which the batch is moved; None: it is not moved.
        masking_strategy: ``sft`` and ``rlhf`` train on the assistant mask; ``generic`` on every token (wrappers only).
        samples_mc_entropy, gamma, clip_value, ref_log_prob_padding_*: only TorchRL's defaults are accepted.
        reduction: None or ``mean``; ``none`` is ``aggregation="none"``.
        objective: a built-in surrogate (PPO's ``clipped``, ``cispo``, ``reinforce``, ..), a function of your own, such
            as ``functools.partial(sapo_surrogate, tau_positive=2.0)``, or ``FILE.py:FUNCTION`` (docs/extending.md).
        ratio: ``token``, or ``sequence`` for GSPO's ``exp(mean_t log rho_t)``.
        dual_clip: upper bound of the ratio for negative advantages, and of ``kl_unbiased``'s weight; None: no bound.
        off_policy_threshold: see :func:`sota_grpo.functional.loss_terms.off_policy_tokens`; such tokens are masked in
            the surrogate, but not in KL and entropy.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        kl_unbiased: multiply the KL to the reference by ``pi / pi_behaviour`` of the token, with gradient. The expected
            gradient is then that of KL(policy, reference), even for older samples and with recomputed log-probs
            (DeepSeek-V3.2, arXiv:2512.02556, eq. 7).
        loss_aggregation: ``token``, ``sequence`` or ``constant``; replaces ``aggregation``. Of both, only ``none``
            has an effect if the batch has ``loss_weight``.
        distill_coeff, advantage_coeff: weights of a teacher, whose log-probs are the batch's ``ref_log_probs``, and of
            the batch's advantage: see :func:`sota_grpo.functional.advantages.distilled_advantages`.
        max_response_tokens: divisor of ``constant``.
        correction, correction_mode, correction_cap, correction_floor: see
            :func:`sota_grpo.functional.loss_terms.importance_weights`.

    Raises:
        ValueError: an option is unknown or has no effect; in ``forward``: the batch has another shape or entries that
            the actor does not read or support, or a required entropy is missing or has no gradient.
        ObjectiveError: your objective cannot be used, or does not return ``[N, T]`` with a gradient.
        KeyError: in ``forward``: the batch lacks a key that the options need.

    Sources: Shao et al. 2024 (arXiv:2402.03300, eq. 3); the terms in :mod:`sota_grpo.functional.loss_terms`.

    >>> class Actor(nn.Module):
    ...     def forward(self, td):
    ...         return td.set(("log_probs", "full"), torch.full((1, 3), -0.5, requires_grad=True))
    >>> batch = TensorDict({
    ...     "tokens": {"full": torch.tensor([[4, 5, 6]])}, "log_probs": {"full": torch.full((1, 3), -0.5)},
    ...     "masks": {"all_assistant_mask": torch.tensor([[False, True, True]])}, "advantage": torch.ones(1, 1, 1),
    ... }, batch_size=[1])
    >>> GRPOLoss(Actor(), entropy_bonus=False)(batch).loss_objective.item()
    -1.0
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        advantage: NestedKey = keys.ADVANTAGE
        action: NestedKey = keys.FULL_TOKENS
        sample_log_prob: NestedKey = keys.LOG_PROBS
        ref_log_probs: NestedKey = keys.REF_LOG_PROBS
        proximal_log_prob: NestedKey = keys.PROXIMAL_LOG_PROBS
        loss_weight: NestedKey = keys.LOSS_WEIGHT
        mask: NestedKey = keys.ASSISTANT_MASK
        objective_mask: NestedKey = keys.OBJECTIVE_MASK

    def __init__(
        self,
        actor_network: nn.Module,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: str | None = "token_mean",
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float = 0.01,
        gamma: float | None = None,
        reduction: str | None = None,
        clip_value: bool | float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | str | None = None,
        masking_strategy: Literal["sft", "rlhf", "generic"] = "sft",
        ref_log_prob_padding_side: Literal["left", "right"] = "left",
        ref_log_prob_padding_value: float = 0.0,
        objective: str | Callable[..., Tensor] = "clipped",
        ratio: Literal["token", "sequence"] = "token",
        dual_clip: float | None = None,
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        loss_aggregation: Literal["token", "sequence", "constant"] | None = None,
        max_response_tokens: int | None = None,
        correction: Literal["token", "sequence", "geometric"] | None = None,
        correction_mode: Literal["truncate", "mask", "reject"] = "truncate",
        correction_cap: float = 2.0,
        correction_floor: float = 0.0,
        off_policy_threshold: float | None = None,
        kl_unbiased: bool = False,
        distill_coeff: float = 0.0,
        advantage_coeff: float = 1.0,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        check_keywords(arguments)
        if hasattr(actor_network, "get_output_embeddings"):
            from sota_grpo.policy.causal import CausalPolicy  # brings transformers

            actor_network = CausalPolicy(actor_network)
        scorer: Any = getattr(actor_network, "scorer", None)
        if entropy_bonus and entropy_coeff > 0 and getattr(scorer, "with_entropy", False):
            scorer.entropy_grad = True
        self.actor_network = actor_network
        pair = clip_epsilon if isinstance(clip_epsilon, (tuple, list)) else (clip_epsilon, clip_epsilon)
        self.clip_epsilon_low, self.clip_epsilon_high = map(float, pair)
        self.kl_mask_threshold, self.max_response_tokens = kl_mask_threshold, max_response_tokens
        averaged = loss_aggregation or TORCHRL_AGGREGATIONS[aggregation or "token_mean"]
        self.aggregation: Any = "none" if reduction == "none" else averaged
        self.entropy_bonus, self.entropy_coeff = entropy_bonus, entropy_coeff if entropy_bonus else 0.0
        self.kl_to_ref_coeff, self.kl_to_inference_coeff = kl_to_ref_coeff, kl_to_inference_coeff
        self.distill_coeff, self.advantage_coeff = distill_coeff, advantage_coeff
        self.batch_device, self.masking_strategy = device, masking_strategy
        self.surrogate = surrogate(objective)
        #: :func:`losses_with_slopes`, or its compiled form, to compute losses and gradients in one call; None: not.
        #: It has no effect under ``aggregation="none"``, and its losses have no second derivatives.
        self.fused: Callable[..., Any] | None = None
        self.optional_terms = {name for name in ("entropy", "ref_log_prob") if self.surrogate.reads(name)}
        self.ratio, self.dual_clip = ratio, dual_clip
        self.kl_estimator, self.kl_unbiased, self.off_policy_threshold = kl_estimator, kl_unbiased, off_policy_threshold
        self.correction, self.correction_mode = correction, correction_mode
        self.correction_cap, self.correction_floor = correction_cap, correction_floor

    @property
    def in_keys(self) -> list[NestedKey]:
        names = [getattr(self.tensor_keys, name) for name in ("action", "sample_log_prob", "advantage", "mask")]
        return list(dict.fromkeys([*getattr(self.actor_network, "in_keys", []), *names]))

    @property
    def out_keys(self) -> list[NestedKey]:
        return [name for name in GRPOLossOutput.__dataclass_fields__ if name != "sums"]

    @property
    def advantage_only(self) -> bool:
        """Whether tokens with advantage 0 have no gradient, because every term is a multiple of the advantage."""
        terms = (self.kl_to_ref_coeff, self.kl_to_inference_coeff, self.entropy_coeff, self.distill_coeff)
        return self.surrogate.advantage_only and not any(terms)

    def _forward_value_estimator_keys(self, **_: Any) -> None:
        """No-op: there is no value estimator, and ``set_keys`` calls this."""

    def forward(self, tensordict: TensorDictBase) -> GRPOLossOutput:
        """Return the losses and diagnostics of a (micro-)batch; the class has formulas and exceptions."""
        entries = self._read(tensordict)
        log_prob, entropy = entries["log_prob"], entries.get("entropy")
        if self.entropy_coeff and (entropy is None or (log_prob.requires_grad and not entropy.requires_grad)):
            output = "none" if entropy is None else "one without a gradient"
            raise ValueError(
                f"entropy_coeff is {self.entropy_coeff} but actor_network gives {output} under 'entropy'; "
                "write a differentiable entropy, or pass entropy_bonus=False."
            )
        if self.fused is not None and log_prob.requires_grad and self.aggregation != "none":
            losses, sums, means, slopes = self.fused(self, {name: value.detach() for name, value in entries.items()})
            entropy = entropy if self.entropy_coeff else None
            losses = dict(zip(losses, _WithSlopes.apply(log_prob, entropy, *losses.values(), *slopes)))
            return GRPOLossOutput(**losses, **means, sums=TensorDict(sums, batch_size=[]), batch_size=[])
        tokens = self._tokens(entries)
        losses, sums = self._losses(tokens)
        loss = torch.stack([value.sum() for value in losses.values()]).sum()
        if tokens.log_prob.requires_grad and not loss.requires_grad:
            raise ObjectiveError("the loss of algorithm.objective has no gradient; remove detach() or no_grad from it.")
        sums, means = with_slope(sums, derivative(loss, tokens.log_prob))
        return GRPOLossOutput(**losses, **means, sums=TensorDict(sums, batch_size=[]), batch_size=[])

    def _losses(self, tokens: LossTokens) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the reduced losses, and the sums over the trained tokens without the gradient's."""
        stale, used = None, tokens
        if self.off_policy_threshold is not None:
            read = (tokens.log_prob, tokens.behaviour, tokens.advantage, tokens.mask)
            stale = loss_terms.off_policy_tokens(*read, threshold=self.off_policy_threshold)
            # ratio 1 without gradient, so that masked tokens cannot overflow
            used = tokens._replace(log_prob=torch.where(stale, tokens.old, tokens.log_prob))
        value, clipped = self._surrogate(used)
        left_out: dict[str, Tensor] = {}  # tokens whose surrogate or weight is changed, by diagnostic
        if stale is not None:
            value, left_out["off_policy_fraction"] = value.masked_fill(stale, 0.0), stale
        if self.correction is not None:
            if tokens.proximal is None:
                raise KeyError(
                    f"correction is {self.correction!r} but the batch has no "
                    f"{_dotted(self.tensor_keys.proximal_log_prob)}; recompute the log-probs before the first epoch, "
                    "or set correction=None."
                )
            gap, cap, floor = tokens.proximal - tokens.behaviour, self.correction_cap, self.correction_floor
            raw = loss_terms.raw_weights(gap, tokens.mask, level=self.correction)
            left_out["correction_fraction"] = (raw > cap) | (raw < floor)
            how: dict[str, Any] = {"level": self.correction, "mode": self.correction_mode, "cap": cap, "floor": floor}
            value = value * loss_terms.importance_weights(gap, tokens.mask, **how)
        sums = self._sums(tokens, clipped, left_out)
        losses, divergence = {"loss_objective": value}, KL_ESTIMATORS[self.kl_estimator]
        if self.kl_to_ref_coeff:
            ref = self._reference(f"kl_to_ref_coeff is {self.kl_to_ref_coeff}", tokens)
            largest = math.log(self.dual_clip) if self.dual_clip else math.inf
            gap = tokens.log_prob - tokens.behaviour
            weight = gap.masked_fill(gap > largest, largest).exp() if self.kl_unbiased else 1.0
            losses["loss_kl_to_ref"] = self.kl_to_ref_coeff * divergence(tokens.log_prob, ref) * weight
        if self.kl_to_inference_coeff:
            losses["loss_kl_to_inference"] = self.kl_to_inference_coeff * divergence(tokens.log_prob, tokens.behaviour)
        if self.entropy_coeff and tokens.entropy is not None:
            losses["loss_entropy"] = -self.entropy_coeff * tokens.entropy
        return {name: self._reduce(per_token, tokens) for name, per_token in losses.items()}, sums

    @torch.no_grad()
    def coefficients(self, batch: TensorDictBase) -> Tensor:
        """Return ``-d loss_objective / d log_prob`` ``[N, T]``: positive if a step makes the token likelier.

        ``correction`` and off-policy masks are ignored; masked tokens have 0. RuntimeError: aggregation ``none``.
        """
        tokens = self._tokens(self._read(batch))
        with torch.enable_grad():
            log_prob = tokens.log_prob.detach().requires_grad_()
            value, _ = self._surrogate(tokens._replace(log_prob=log_prob))
            return 0.0 - derivative(self._reduce(value, tokens), log_prob)  # no negative zeros

    def _surrogate(self, tokens: LossTokens) -> tuple[Tensor, Tensor]:
        """Return the surrogate loss of each token ``[N, T]`` and a bool mask of the clipped tokens."""
        log_ratio = tokens.log_prob - tokens.old
        if self.ratio == "sequence":
            log_ratio = sequence_log_ratio(tokens.log_prob, tokens.old, tokens.mask)
        advantage = tokens.advantage
        if self.distill_coeff:
            weights = {"distill_coeff": self.distill_coeff, "advantage_coeff": self.advantage_coeff}
            teacher = self._reference(f"distill_coeff is {self.distill_coeff}", tokens)
            advantage = distilled_advantages(advantage, tokens.log_prob, teacher, **weights)
        terms: dict[str, Any] = {"log_prob": tokens.log_prob, "log_ratio": log_ratio, "advantage": advantage}
        terms |= {"mask": tokens.mask, "clip_low": self.clip_epsilon_low, "clip_high": self.clip_epsilon_high}
        terms["dual_clip"] = self.dual_clip
        if "entropy" in self.optional_terms:
            if tokens.entropy is None:
                raise ValueError(
                    "the objective reads the entropy; let actor_network write 'entropy', or, for a TorchRL wrapper, "
                    "give the loss entropy_bonus=True."
                )
            terms["entropy"] = tokens.entropy.detach()
        if "ref_log_prob" in self.optional_terms:
            terms["ref_log_prob"] = self._reference("the objective reads ref_log_prob", tokens)
        measure = self.surrogate.clipped
        clipped = torch.zeros_like(tokens.mask) if measure is None else of_terms(measure, terms)
        value = of_terms(self.surrogate.loss, terms)
        if value.shape != tokens.mask.shape:
            raise ObjectiveError(
                f"algorithm.objective returned a loss of shape {list(value.shape)}, but the tokens have "
                f"{list(tokens.mask.shape)}; return one number per token, without a sum or a mean."
            )
        return (value, clipped) if tokens.kept is None else (value.where(tokens.kept, 0.0), clipped & tokens.kept)

    def _reference(self, reader: str, tokens: LossTokens) -> Tensor:
        if tokens.ref is None:
            raise KeyError(
                f"{reader} but the batch has no {_dotted(self.tensor_keys.ref_log_probs)}; write the reference's "
                "log-probs with ReferenceKL, or drop the term."
            )
        return tokens.ref

    def _read(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Run the actor and return the entries of :class:`LossTokens`, unmasked, padded on the right.

        They are padded on the left if a TorchRL wrapper pads. The weight may be missing.
        """
        if batch.batch_dims > 1:
            raise ValueError(f"the batch has the shape {list(batch.batch_size)}; pass rows [N]: batch.reshape(-1).")
        if self.batch_device is not None:
            batch = batch.to(self.batch_device)
        wrapper_methods = ("get_dist", f"_get_{self.masking_strategy}_dist")
        is_wrapper = any(hasattr(self.actor_network, name) for name in wrapper_methods)
        fields = (keys.FULL_TOKENS, keys.ASSISTANT_MASK) if is_wrapper else getattr(self.actor_network, "in_keys", None)
        for name in ("action", "mask"):
            if fields and (key := getattr(self.tensor_keys, name)) not in fields:
                raise ValueError(
                    f"the loss takes {name} from {_dotted(key)}, but actor_network reads only "
                    f"{', '.join(map(_dotted, fields))}; use one name in the batch, in set_keys({name}=...) and in "
                    "actor_network."
                )
        entries = self._read_wrapper(batch) if is_wrapper else self._read_module(batch)
        shape, read = entries["log_prob"].shape, {}  # each [N, T] or [N, 1], and not in half precision
        for name, value in entries.items():
            value = value.squeeze(-1) if value.dim() == len(shape) + 1 else value
            if value.shape not in (shape, (shape[0], 1)):
                raise ValueError(
                    f"a per-token entry of the batch has the shape {list(value.shape)}; it must be that of the "
                    f"log-probs, {list(shape)}, or {[shape[0], 1]}."
                )
            read[name] = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        return read

    def _tokens(self, entries: Mapping[str, Tensor]) -> LossTokens:
        """Return the loss's inputs from what :meth:`_read` returned."""
        read = dict(entries)
        # NaN is TorchRL's mark of a token without a log-prob from the engine; it cannot be trained on
        mask = read.pop("mask") & read["behaviour"].isfinite()
        if self.kl_mask_threshold is not None:
            drift = 0.5 * (read["log_prob"].detach() - read["behaviour"]).square()
            mask = mask & (drift <= self.kl_mask_threshold)
        weight, kept = read.pop("weight", None), read.pop("kept", None)
        if weight is None and self.aggregation == "none":
            weight = mask.float()
        elif weight is None:
            weight = loss_terms.loss_weights(mask, self.aggregation, max_response_tokens=self.max_response_tokens)
        mask = mask & (weight != 0)
        zero = mask.new_zeros((), dtype=torch.float32)  # on a GPU each 0.0 would be a kernel
        selected = {name: torch.where(mask, value, zero) for name, value in read.items()}
        selected["old"] = selected.get("proximal", selected["behaviour"])
        return LossTokens(mask=mask, weight=torch.where(mask, weight, zero), kept=kept, **selected)

    def _read_module(self, batch: TensorDictBase) -> dict[str, Any]:
        if self.masking_strategy == "generic":
            raise ValueError(
                "masking_strategy='generic' trains on prompt tokens too, but this actor_network gives log-probs of "
                "assistant tokens only; use 'sft' or 'rlhf'."
            )
        mask = _per_token(batch, self.tensor_keys.mask, "right").bool()
        # before the call, because an in-place module overwrites the behaviour log-probs
        stored = self._stored(batch, "right")
        if isinstance(batch, LazyStackedTensorDict):
            batch = pad_rows(batch, pad_token_id=0)
        elif not getattr(self.actor_network, "copies_rows", False):
            batch = batch.copy()
        out = self.actor_network(batch)
        read = {**stored, "log_prob": _per_token(out, keys.LOG_PROBS, "right"), "mask": mask}
        return read if (entropy := out.get("entropy", None)) is None else {**read, "entropy": entropy}

    def _read_wrapper(self, batch: TensorDictBase) -> dict[str, Any]:
        actor: Any = self.actor_network
        ragged = isinstance(batch, LazyStackedTensorDict)
        require_plain(row_list(batch) if ragged else [batch])
        if getattr(actor, "pad_output", False):
            # for token input of such a wrapper, TorchRL stacks the assistant masks without padding
            tokens_in = getattr(actor, "input_mode", None) == "tokens"
            visible = pad_rows(batch, pad_token_id=0) if ragged and tokens_in else batch.copy()
            side: Side = "left" if ragged and not tokens_in else "right"
        else:
            batch = batch if ragged else unpad_rows(batch)
            visible, side = batch.copy(), "left"
        stored = self._stored(batch, side)
        if keys.ASSISTANT_MASK in visible.keys(include_nested=True):
            # else the wrapper masks by the padded prompt length, which is wrong for shorter prompts
            visible = visible.exclude(keys.PROMPT_TOKENS)
        get_dist = getattr(actor, f"_get_{self.masking_strategy}_dist", None)
        dist = actor.get_dist(visible, logits_key="logits") if get_dist is None else get_dist(visible)
        action = visible.get(self.tensor_keys.action, as_padded_tensor=True, padding_side=side, padding_value=-100)
        read = {**stored, "log_prob": dist.log_prob(action), "mask": dist.mask.bool()}
        return {**read, "entropy": dist.entropy()} if self.entropy_bonus else read  # which costs a [N, T, V] softmax

    def _stored(self, batch: TensorDictBase, side: Side) -> dict[str, Tensor]:
        """Return the entries that the batch has, by field name of :class:`LossTokens`."""
        names = self.tensor_keys
        optional = {"proximal": names.proximal_log_prob, "ref": names.ref_log_probs}
        optional |= {"weight": names.loss_weight, "kept": names.objective_mask}
        stored = {name: _per_token(batch, key, side, optional=True) for name, key in optional.items()}
        advantage = _per_token(batch, names.advantage, side)
        stored["advantage"] = advantage.unsqueeze(-1) if advantage.dim() == 1 else advantage
        stored["behaviour"] = _per_token(batch, names.sample_log_prob, side)
        return {name: value.detach() for name, value in stored.items() if value is not None}

    def _reduce(self, per_token: Tensor, tokens: LossTokens) -> Tensor:
        if self.aggregation == "none":
            return torch.where(tokens.mask, per_token, 0.0).unsqueeze(-1)
        return torch.where(tokens.mask, tokens.weight * per_token, 0.0).sum()

    @torch.no_grad()
    def _sums(self, tokens: LossTokens, clipped: Tensor, left_out: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return sums over the trained tokens of all quantities that the batch's entries allow, and of ``left_out``."""
        log_ratio = tokens.log_prob - tokens.behaviour
        weight = log_ratio.double().clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        trainer = tokens.log_prob if tokens.proximal is None else tokens.proximal
        measured = {"tokens": tokens.mask, "ratio": weight, "ratio_squared": weight.square(), "clip_fraction": clipped}
        measured |= {"kl_approx": -log_ratio, "mismatch_kl": mismatch(trainer - tokens.behaviour)}
        if tokens.ref is not None:
            measured["kl_to_ref"] = KL_ESTIMATORS[self.kl_estimator](tokens.log_prob, tokens.ref)
        if self.kl_to_inference_coeff:
            measured["kl_to_inference"] = KL_ESTIMATORS[self.kl_estimator](tokens.log_prob, tokens.behaviour)
        if tokens.ref is not None and self.distill_coeff:
            measured["reverse_kl"] = tokens.behaviour - tokens.ref
        if tokens.entropy is not None:
            measured["entropy"] = tokens.entropy
        measured |= left_out
        zero = tokens.mask.new_zeros((), dtype=torch.float32)
        return {
            name: torch.where(tokens.mask, value.detach(), zero).sum(dtype=torch.float64)
            for name, value in measured.items()
        }


def losses_with_slopes(
    loss: GRPOLoss, entries: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """Return losses, sums, means and slopes of a batch's ``entries``, detached, for :attr:`GRPOLoss.fused`.

    The slopes are the derivatives of each loss by the log-probs, and then, if the loss has an entropy term, of each by
    the entropy, all ``[N, T]``. torch.compile makes about five GPU kernels of all this, where eager mode has a hundred.
    """
    names = ["log_prob", "entropy"] if loss.entropy_coeff else ["log_prob"]

    def losses_of(*values: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return loss._losses(loss._tokens({**entries, **dict(zip(names, values))}))

    differentiated: Any = torch.func.vjp(losses_of, *(entries[name] for name in names), has_aux=True)
    losses, pull, sums = differentiated
    slopes = [  # by log-prob and, if asked, entropy of each loss
        pull({name: torch.full_like(losses[name], float(name == one)) for name in losses}) for one in losses
    ]
    by_log_prob, *by_entropy = (list(each) for each in zip(*slopes))
    sums, means = with_slope(sums, sum(by_log_prob[1:], by_log_prob[0]))
    return losses, sums, means, sum(by_entropy, by_log_prob)


class _WithSlopes(torch.autograd.Function):
    """Give losses the gradients that :func:`losses_with_slopes` computed."""

    @staticmethod
    def forward(ctx: Any, log_prob: Tensor, entropy: Tensor | None, *losses_and_slopes: Tensor) -> tuple[Tensor, ...]:
        count = len(losses_and_slopes) // (2 if entropy is None else 3)
        ctx.save_for_backward(*losses_and_slopes[count:])
        return losses_and_slopes[:count]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        slopes, count = ctx.saved_tensors, len(grads)
        pulled = [
            sum((g * slope for g, slope in zip(grads[1:], of_value[1:])), grads[0] * of_value[0])
            for of_value in (slopes[:count], slopes[count:])
            if of_value
        ]
        return *pulled, *([None] * (2 - len(pulled) + count + len(slopes)))


def with_slope(sums: dict[str, Tensor], slope: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums and the diagnostics of a batch, given ``d loss / d log_prob`` ``[N, T]``."""
    squares = slope.double().square()
    sums = {**sums, "gradient_squared": squares.sum()}
    return sums, diagnostic_means(sums) | {"gradient_squared_max": squares.amax()}


def mismatch(gap: Tensor) -> Tensor:
    """Return k3 of KL(engine, trainer) of each token, float64; ``gap``: trainer minus engine log-prob, at most 300."""
    gap = gap.double().clamp(max=_MAX_LOG_RATIO)
    return KL_ESTIMATORS["k3"](torch.zeros_like(gap), gap)


def derivative(loss: Tensor, log_prob: Tensor) -> Tensor:
    """Return ``d loss / d log_prob`` of the scalar ``loss``, or zeros without a graph; keep the graph."""
    if not (loss.requires_grad and log_prob.requires_grad):
        return torch.zeros_like(log_prob)
    (slope,) = torch.autograd.grad(loss, log_prob, retain_graph=True, allow_unused=True)
    return torch.zeros_like(log_prob) if slope is None else slope
