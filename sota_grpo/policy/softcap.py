"""Log-probabilities for heads that squash their logits, ``c tanh(logits / c)`` (Gemma 2, arXiv:2408.00118, sec. 2)."""

from __future__ import annotations

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from sota_grpo.functional.log_probs import DEFAULT_CHUNK


def softcapped_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    softcap: float,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk: int = DEFAULT_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``log softmax(c tanh(z / c) / temperature)[target]`` and the entropy of that distribution.

    ``z = hidden weight^T + bias``. One chunk of rows is alive at a time: the backward pass recomputes its logits.

    Args:
        hidden: [M, H].
        weight: [V, H].
        targets: int64 [M].
        softcap: the bound ``c`` of the logits, above 0.
        bias: [V] or None.
        temperature: logits are divided by it, above 0.
        chunk: rows of logits alive at once.

    Returns:
        Log-probabilities [M] and entropies [M] in nats, both float32 (float64 for float64 input).

    >>> import torch
    >>> log_probs, entropy = softcapped_log_probs(torch.zeros(1, 2), torch.ones(4, 2), torch.tensor([3]), softcap=30.0)
    >>> bool(torch.isclose(log_probs, -entropy)), round(entropy.item(), 4)
    (True, 1.3863)
    """

    def one_chunk(rows: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = linear(rows, weight, bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        log_softmax = torch.log_softmax(softcap * torch.tanh(logits / softcap) / temperature, dim=-1)
        return log_softmax.gather(-1, ids[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)

    pairs = zip(hidden.split(chunk), targets.split(chunk), strict=True)
    parts = [checkpoint(one_chunk, rows, ids, use_reentrant=False) for rows, ids in pairs]
    log_probs, entropy = zip(*parts, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)
