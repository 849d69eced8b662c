"""What a loss is given: its keywords, checked; its batch and the actor's output, read as dense finite tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn

from sota_grpo import keys
from sota_grpo.collate import pad_rows, unpad_rows
from sota_grpo.functional.divergences import KL_ESTIMATORS

TORCHRL_AGGREGATIONS = {"token_mean": "token", "prompt_mean": "sequence", "none": "none"}
_CHOICES: dict[str, tuple[Any, ...]] = {
    "objective": ("clipped", "cispo", "reinforce"),
    "ratio": ("token", "sequence"),
    "kl_estimator": tuple(KL_ESTIMATORS),
    "aggregation": (None, *TORCHRL_AGGREGATIONS),
    "loss_aggregation": (None, "token", "sequence", "constant"),
    "masking_strategy": ("sft", "rlhf", "generic"),
    "correction": (None, "token", "sequence"),
    "correction_mode": ("truncate", "mask"),
}
_MEANINGLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    "samples_mc_entropy": ((1,), "the entropy is exact, nothing is sampled"),
    "gamma": ((None,), "a response is one decision, nothing is discounted"),
    "reduction": ((None, "mean", "none"), "the loss weights decide the reduction; see loss_aggregation"),
    "clip_value": ((None, False), "there is no value network"),
    "ref_log_prob_padding_side": (("left",), "all entries of a batch are padded together"),
    "ref_log_prob_padding_value": ((0.0,), "padding is masked, its value has no effect"),
}


@dataclass(frozen=True)
class LossTokens:
    """One batch as the surrogates read it: all ``[N, T]``, the advantage possibly ``[N, 1]``; 0 off the mask.

    ``mask`` marks the tokens that take part. Only ``log_prob`` and ``entropy`` carry a gradient.
    """

    log_prob: Tensor
    behaviour: Tensor
    advantage: Tensor
    mask: Tensor
    weight: Tensor
    proximal: Tensor | None = None
    ref: Tensor | None = None
    entropy: Tensor | None = None


def read_tokens(
    batch: TensorDictBase,
    actor: nn.Module,
    names: Any,
    *,
    masking_strategy: str,
    with_entropy: bool,
    kl_mask_threshold: float | None,
    derive_weight: Callable[[Tensor], Tensor],
) -> LossTokens:
    """Run the actor on the batch and read what the loss needs, selecting 0 wherever the mask is False.

    A module that writes log-probs itself is given the right-padded batch. A TorchRL wrapper is given ragged rows, which
    it pads on the left, and we with it, or, with ``pad_output=True``, the padded batch. Log-probs in half precision are
    widened to float32.

    Args:
        batch: dense ``[N, T]``, or a lazy stack of ragged rows.
        actor: as ``actor_network`` of :class:`sota_grpo.objectives.GRPOLoss`.
        names: the loss's ``tensor_keys``.
        masking_strategy: ``sft``, ``rlhf`` or ``generic``.
        with_entropy: compute a wrapper's entropy, which costs a ``[N, T, V]`` softmax; a module's own is read anyway.
        kl_mask_threshold: tokens with a larger ``(log_prob - behaviour)^2 / 2`` leave the mask.
        derive_weight: from the mask to the loss weights, where the batch has none; tokens of weight 0 leave the mask.

    Raises:
        KeyError: where the batch or the actor's output lacks a required key.
        ValueError: on ``generic`` with a module that writes log-probs of the assistant tokens only.
    """
    if hasattr(actor, "get_dist") or hasattr(actor, f"_get_{masking_strategy}_dist"):
        read = _read_wrapper(batch, actor, names, masking_strategy, with_entropy)
    else:
        read = _read_module(batch, actor, names, masking_strategy)
    read = {name: _widen(value, read["log_prob"].shape) for name, value in read.items() if value is not None}
    mask = read.pop("mask")
    if kl_mask_threshold is not None:
        drift = 0.5 * (read["log_prob"].detach() - read["behaviour"]).square()
        mask = mask & (drift <= kl_mask_threshold)
    weight = read.pop("weight", None)
    if weight is None:
        weight = derive_weight(mask)
    mask = mask & (weight != 0)
    selected = {name: torch.where(mask, value, 0.0) for name, value in read.items()}
    return LossTokens(mask=mask, weight=torch.where(mask, weight, 0.0), **selected)


def _read_module(batch: TensorDictBase, actor: nn.Module, names: Any, masking_strategy: str) -> dict[str, Any]:
    if masking_strategy == "generic":
        raise ValueError(
            "masking_strategy='generic' trains on prompt tokens too, but this actor_network gives log-probs of the "
            "assistant tokens only; use 'sft' or 'rlhf'."
        )
    mask = _required(batch, names.mask, "right").bool()
    # read first: a module that works in place overwrites the log-probs of the behaviour policy
    stored = _stored(batch, names, "right")
    ragged = isinstance(batch, LazyStackedTensorDict)
    out = actor(pad_rows(batch, pad_token_id=0) if ragged else batch.copy())
    log_prob = _required(out, keys.LOG_PROBS, "right")
    return {**stored, "log_prob": log_prob, "mask": mask, "entropy": out.get("entropy", None)}


def _read_wrapper(
    batch: TensorDictBase, actor: Any, names: Any, masking_strategy: str, with_entropy: bool
) -> dict[str, Any]:
    ragged = isinstance(batch, LazyStackedTensorDict)
    if getattr(actor, "pad_output", False):
        # TorchRL stacks the assistant masks of such a wrapper's token input without padding them first
        tokens_in = getattr(actor, "input_mode", None) == "tokens"
        visible = pad_rows(batch, pad_token_id=0) if ragged and tokens_in else batch.copy()
        side = "left" if ragged and not tokens_in else "right"
    else:
        batch = batch if ragged else unpad_rows(batch)
        visible, side = batch.copy(), "left"
    stored = _stored(batch, names, side)
    if keys.ASSISTANT_MASK in visible.keys(include_nested=True):
        # the wrapper would mask by the *padded* prompt's width, which is right only if all prompts are equally long
        visible = visible.exclude(keys.PROMPT_TOKENS)
    own = getattr(actor, f"_get_{masking_strategy}_dist", None)
    dist = actor.get_dist(visible, logits_key="logits") if own is None else own(visible)
    action = visible.get(names.action, as_padded_tensor=True, padding_side=side, padding_value=-100)
    # TorchRL writes NaN where the engine gave no log-prob for a token; such a token cannot be trained on
    return {
        **stored,
        "log_prob": dist.log_prob(action),
        "mask": dist.mask.bool() & stored["behaviour"].isfinite(),
        "entropy": dist.entropy() if with_entropy else None,
    }


def _stored(batch: TensorDictBase, names: Any, side: str) -> dict[str, Any]:
    """The entries that came with the batch, by field of :class:`LossTokens`."""
    advantage = _required(batch, names.advantage, side)
    stored = {
        "advantage": advantage.unsqueeze(-1) if advantage.dim() == 1 else advantage,
        "behaviour": _required(batch, names.sample_log_prob, side),
        "proximal": _per_token(batch, names.proximal_log_prob, side),
        "ref": _per_token(batch, names.ref_log_probs, side),
        "weight": _per_token(batch, names.loss_weight, side),
    }
    return {name: None if value is None else value.detach() for name, value in stored.items()}


def _per_token(batch: TensorDictBase, key: NestedKey, side: str) -> Tensor | None:
    if not isinstance(batch, LazyStackedTensorDict):
        return batch.get(key, None)
    return batch.get(key, None, as_padded_tensor=True, padding_side=side, padding_value=0)


def _required(batch: TensorDictBase, key: NestedKey, side: str) -> Tensor:
    value = _per_token(batch, key, side)
    if value is None:
        raise KeyError(f"the batch has no {key}; it has {sorted(map(str, batch.keys(True, True)))}.")
    return value


def _widen(value: Tensor, shape: torch.Size) -> Tensor:
    """``[N, T]`` (or ``[N, 1]``), a trailing 1 dropped, half precision widened to float32."""
    value = value.squeeze(-1) if value.dim() == len(shape) + 1 else value
    if value.shape != shape and value.shape != (shape[0], 1):
        raise ValueError(f"a per-token entry is {list(value.shape)}, but the log-probs are {list(shape)}.")
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def check_keywords(given: Mapping[str, Any]) -> None:
    """Refuse a choice that does not exist, and a keyword that would silently do nothing.

    Raises:
        ValueError: naming the keyword, its value, and what to do.

    >>> check_keywords({"clip_value": 0.2})
    Traceback (most recent call last):
    ValueError: clip_value is 0.2, which has no effect in this loss: there is no value network; drop it.
    """
    for name, (accepted, reason) in _MEANINGLESS.items():
        if given.get(name, accepted[0]) not in accepted:
            raise ValueError(f"{name} is {given[name]!r}, which has no effect in this loss: {reason}; drop it.")
    for name, choices in _CHOICES.items():
        if given.get(name, choices[0]) not in choices:
            raise ValueError(f"{name} is {given[name]!r}; choose one of {', '.join(map(repr, choices))}.")
    if given.get("aggregation") not in (None, "token_mean") and given.get("loss_aggregation") is not None:
        raise ValueError(
            f"aggregation is {given['aggregation']!r} and loss_aggregation is {given['loss_aggregation']!r}; give one."
        )
    if given.get("dual_clip") is not None and given["objective"] != "clipped":
        raise ValueError(f"dual_clip is {given['dual_clip']} but the objective is {given['objective']!r}; drop it.")
    if given.get("ratio") == "sequence" and given["objective"] == "reinforce":
        raise ValueError("ratio is 'sequence' but the objective is 'reinforce', which has no ratio; drop it.")
