"""Log-probs of given tokens from hidden states, without ever holding the ``[M, V]`` logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

DEFAULT_CHUNK = 512


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target token under ``softmax((hidden weight^T + bias) / temperature)``, and the entropy.

    ``log_prob_m = z_m[target_m] - lse_m`` and ``entropy_m = -sum_v p_mv log p_mv``, with ``z`` the scaled logits.
    Rows are taken ``chunk`` at a time. The forward pass keeps the inputs and the ``[M]`` vectors only; the backward
    pass computes each chunk's logits again and adds ``(1[v = target] - p_v) g - p_v (log p_v + entropy) h`` through to
    ``hidden``, ``weight`` and ``bias``, as far as they ask for a gradient. Most memory beyond inputs and gradients: a
    few ``[chunk, V]`` buffers, whatever M is. The chunk size changes the result by rounding only.

    The logits are multiplied in the dtype of ``hidden`` (under autocast in its dtype, as ``torch.nn.Linear`` would) and
    everything after is float32, or float64 when ``hidden`` is. The gradient of ``weight`` is summed over the chunks in
    that wider dtype too.

    Args:
        hidden: ``[M, H]``, the states that predict the targets.
        weight: ``[V, H]``, the output embedding; another dtype is converted to that of ``hidden``.
        targets: int64 ``[M]``, ids in ``[0, V)``.
        bias: ``[V]``, if the output layer has one.
        temperature: the logits are divided by it; that of the sampling.
        chunk: rows per piece.
        with_entropy: also return the entropy of every row.
        entropy_grad: let the gradient through the entropy; without it the entropy is a detached diagnostic.

    Returns:
        log-probs ``[M]`` and entropy ``[M]`` (None unless asked for), in nats, float32 (float64 for float64 input).

    Raises:
        ValueError: if the shapes do not fit, ``temperature`` or ``chunk`` is not positive, or ``entropy_grad`` is asked
            for without ``with_entropy``.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 5.0], [0.0, -5.0]])
    >>> log_probs, entropy = chunked_log_probs(hidden, weight, torch.tensor([1]), with_entropy=True)
    >>> round(log_probs.item(), 4), round(entropy.item(), 4)  # three equal logits: -log 3 and log 3
    (-1.0986, 1.0986)
    """
    _check_shapes(hidden, weight, targets, bias)
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; log-probs of a sampled token need one above 0.")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1 row.")
    if entropy_grad and not with_entropy:
        raise ValueError("entropy_grad=True needs with_entropy=True: there is no entropy to differentiate.")
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    log_probs, entropy = _ChunkedLogProbs.apply(
        hidden, weight, bias, targets, float(temperature), chunk, with_entropy, entropy_grad
    )
    return log_probs, entropy


class _ChunkedLogProbs(torch.autograd.Function):
    """Saves hidden, weight, bias, targets and one or two ``[M]`` vectors; never a tensor with V * M elements."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk: int,
        with_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[Tensor, Tensor | None]:
        lse = torch.empty(len(hidden), dtype=_wide(hidden.dtype), device=hidden.device)
        log_probs = torch.empty_like(lse)
        entropy = torch.empty_like(lse) if with_entropy else None
        for rows, logits in _chunks(hidden, weight, bias, temperature, chunk):
            lse[rows] = logits.logsumexp(-1)
            log_p = logits.sub_(lse[rows].unsqueeze(-1))
            log_probs[rows] = log_p.gather(-1, targets[rows].unsqueeze(-1)).squeeze(-1)
            if entropy is not None:  # not lse - sum(p z), which loses its digits to logits of some thousands
                entropy[rows] = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy if entropy_grad else None)
        ctx.temperature, ctx.chunk = temperature, chunk
        if entropy is not None and not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if wants_bias else None
        weight_as_used = weight.to(hidden.dtype)
        for rows, logits in _chunks(hidden, weight, bias, ctx.temperature, ctx.chunk):
            log_p = logits.sub_(lse[rows].unsqueeze(-1))
            grad_row = grad_log_probs[rows].unsqueeze(-1)
            if entropy is None:
                grad_logits = log_p.exp_().mul_(-grad_row)
            else:
                through_entropy = (log_p + entropy[rows].unsqueeze(-1)).mul_(grad_entropy[rows].unsqueeze(-1))
                grad_logits = through_entropy.add_(grad_row).mul_(log_p.exp_()).neg_()
            grad_logits.scatter_add_(-1, targets[rows].unsqueeze(-1), grad_row)
            grad_logits.div_(ctx.temperature)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_product = grad_logits.to(hidden.dtype)
            with torch.autocast(hidden.device.type, enabled=False):
                if grad_hidden is not None:
                    grad_hidden[rows] = grad_product @ weight_as_used
                if grad_weight is not None:
                    _add_product(grad_weight, grad_product.t(), hidden[rows])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    """Each piece of rows with its own fresh, scaled logits ``[<= chunk, V]``."""
    weight_as_used = weight.to(hidden.dtype)
    wide = _wide(hidden.dtype)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, min(start + chunk, len(hidden)))
        with torch.autocast(hidden.device.type, enabled=False):
            logits = (hidden[rows] @ weight_as_used.t()).to(wide)
        if bias is not None:
            logits += bias
        yield rows, logits.div_(temperature)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total += left @ right``, in one kernel where the dtypes agree, else summed in the dtype of ``total``."""
    if total.dtype == right.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None) -> None:
    fits = hidden.dim() == 2 and weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    fits = fits and targets.shape == hidden.shape[:1] and (bias is None or bias.shape == weight.shape[:1])
    if not fits:
        shapes = f"{list(hidden.shape)}, {list(weight.shape)}, {list(targets.shape)}"
        raise ValueError(
            f"hidden, weight, targets must be [M, H], [V, H], [M] and bias [V], but they are {shapes} and "
            f"{None if bias is None else list(bias.shape)}."
        )
