"""Log-probs under truncated sampling (top-k, top-p, min-p), renormalised over the sampling support of each token.

The sampling support ``S`` of a position is the set of tokens that truncation leaves; the token is sampled from
``q(v) = p(v) 1[v in S] / p(S)``. Every policy in the loss is renormalised over the same ``S``, the engine's when it
sampled the token. Then the mean of ``q_new(v) / q(v)`` over samples of ``q`` is 1, as importance sampling requires;
the mean of ``p_new(v) / p(v)`` is not. Only the logits in ``S`` are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sota_grpo.functional.log_probs import LOGITS_BYTES, LOGITS_BYTES_ON_CPU


class SupportSets(NamedTuple):
    """Sampling supports of ``M`` positions, concatenated: ``K`` tokens in all.

    >>> sets = SupportSets.of(torch.tensor([3, 5, 8]), torch.tensor([1, 2]), torch.tensor([3, 8]))
    >>> sets.ids[sets.drawn].tolist(), sets.rows.tolist(), sets.columns.tolist(), sets.largest
    ([3, 8], [0, 1, 1], [0, 0, 1], 2)
    """

    ids: Tensor  # int64 [K], token ids
    rows: Tensor  # int64 [K], position of each token, ascending
    columns: Tensor  # int64 [K], index of each token in its position's set
    drawn: Tensor  # int64 [M], index in ``ids`` of each position's sampled token
    largest: int  # number of tokens of the largest set

    @classmethod
    def of(cls, ids: Tensor, counts: Tensor, targets: Tensor) -> SupportSets:
        """Build the sets from token ids ``[K]``, the size of each set ``[M]``, and the sampled tokens, int64 ``[M]``.

        ValueError if a sampled token is missing or repeated in its set, or the sizes do not add up to K.
        """
        ids, counts = ids.long(), counts.long()
        if int(counts.sum()) != len(ids):
            raise ValueError(f"{len(ids)} token ids were passed, but the set sizes add up to {int(counts.sum())}.")
        every = torch.arange(len(counts), device=ids.device)
        rows = every.repeat_interleave(counts)
        columns = torch.arange(len(ids), device=ids.device) - (counts.cumsum(0) - counts)[rows]
        drawn = (ids == targets[rows]).nonzero().squeeze(1)
        if not torch.equal(rows[drawn], every):
            wrong = every[torch.bincount(rows[drawn], minlength=len(counts)) != 1]
            raise ValueError(
                f"{len(wrong)} of {len(counts)} sampled tokens are missing or repeated in their sampling support "
                f"(the first is token {int(targets[wrong[0]])}): the engine's supports do not match its tokens."
            )
        return cls(ids, rows, columns, drawn, int(counts.max()) if len(counts) else 0)

    def to(self, device: torch.device) -> SupportSets:
        ids, rows, columns, drawn = (tensor.to(device) for tensor in self[:4])
        return SupportSets(ids, rows, columns, drawn, self.largest)


def support_log_probs(
    hidden: Tensor,
    weight: Tensor,
    sets: SupportSets,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    logits_bytes: int | None = None,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return each sampled token's log-prob under the softmax over its sampling support, and that softmax's entropy.

    ``log q_m = z_m[target_m] - log sum_{v in S_m} exp z_m[v]`` and ``entropy_m = -sum_{v in S_m} q_m(v) log q_m(v)``,
    with ``z`` the scaled logits. If every set is the whole vocabulary, the result equals that of
    :func:`sota_grpo.functional.log_probs.chunked_log_probs` up to rounding. For a set of one token the log-prob, the
    entropy and the gradients are exactly 0.

    Cost: ``K H`` multiply-adds for ``K`` tokens in all sets and the hidden size ``H``, and memory for ``M max |S|``
    numbers. On CUDA gradients are summed in no fixed order.

    Args:
        sets: sampling supports of the ``M`` tokens.
        hidden, weight, bias, temperature, softcap, with_entropy, entropy_grad: see ``chunked_log_probs``, for the dtype
            of the results too.
        logits_bytes: memory for gathered rows of ``hidden`` and ``weight``; default as in ``chunked_log_probs``.

    Source of importance sampling: Owen 2013, "Monte Carlo theory, methods and examples", section 9.1.

    >>> hidden, weight = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 5.0], [9.0, -5.0]])
    >>> sets = SupportSets.of(torch.tensor([0, 1]), torch.tensor([2]), torch.tensor([1]))
    >>> log_probs, entropy = support_log_probs(hidden, weight, sets, with_entropy=True)
    >>> round(log_probs.item(), 4), round(entropy.item(), 4)  # a support of two equal logits: -log 2 and log 2
    (-0.6931, 0.6931)
    """
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    if logits_bytes is None:
        logits_bytes = LOGITS_BYTES_ON_CPU if hidden.device.type == "cpu" else LOGITS_BYTES
    logits = _SupportLogits.apply(hidden, weight, bias, sets, logits_bytes)
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    lowest = torch.finfo(logits.dtype).min  # finite, and its exp is 0: no infinity is ever multiplied
    z = logits.new_full((len(hidden), sets.largest), lowest).index_put((sets.rows, sets.columns), logits)
    top = z.detach().amax(1, keepdim=True) if z.numel() else z.detach().sum(1, keepdim=True)
    z = z - top
    p = z.exp()
    mass = p.sum(1)
    log_probs = logits.index_select(0, sets.drawn) - top.squeeze(1) - mass.log()
    if not with_entropy:
        return log_probs, None
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = mass.log() - (z * p).sum(1) / mass
    return log_probs, entropy


class _SupportLogits(torch.autograd.Function):
    """Compute ``hidden[rows_k] . weight[ids_k] + bias[ids_k]``, ``[K]``; the backward gathers the rows again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sets: SupportSets, num_bytes: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, sets.rows, sets.ids)
        ctx.num_bytes, ctx.bias_shape = num_bytes, None if bias is None else bias.shape
        logits = hidden.new_empty(len(sets.ids), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for piece in _pieces(len(logits), hidden, num_bytes):
            state, embedding = _gather(hidden, weight, sets.rows[piece], sets.ids[piece])
            logits[piece] = (state * embedding).sum(1)
        return logits if bias is None else logits + bias.index_select(0, sets.ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids = ctx.saved_tensors
        to_hidden, to_weight, to_bias = (None, None, None)
        if ctx.needs_input_grad[0]:
            to_hidden = torch.zeros_like(hidden, dtype=grad.dtype)
        if ctx.needs_input_grad[1]:
            to_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, grad.dtype))
        if ctx.needs_input_grad[2]:
            to_bias = grad.new_zeros(ctx.bias_shape).index_add_(0, ids, grad)
        for piece in _pieces(len(grad), hidden, ctx.num_bytes):
            state, embedding = _gather(hidden, weight, rows[piece], ids[piece])
            pull = grad[piece].unsqueeze(1)
            if to_hidden is not None:
                to_hidden.index_add_(0, rows[piece], embedding * pull)
            if to_weight is not None:
                to_weight.index_add_(0, ids[piece], (state * pull).to(to_weight.dtype))
        to_hidden = None if to_hidden is None else to_hidden.to(hidden.dtype)
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), to_bias, None, None


def _gather(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and embeddings of some logits in float32 (64); embeddings rounded to ``hidden``'s dtype."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.index_select(0, rows).to(wide), weight.index_select(0, ids).to(hidden.dtype).to(wide)


def _pieces(total: int, hidden: Tensor, num_bytes: int) -> list[slice]:
    """Split ``range(total)`` into slices whose gathered rows and products take ``num_bytes``."""
    size = max(1, num_bytes // (3 * hidden.shape[1] * max(4, hidden.element_size())))
    return [slice(start, start + size) for start in range(0, total, size)]
