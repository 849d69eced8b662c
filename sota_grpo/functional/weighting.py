"""Aggregation as data: the weight of every trainable token, computed once over a whole optimizer step.

With ``loss = sum_it w_it x_it`` the loss of a step is a plain sum, so it may be cut into micro-batches and ranks in any
way and the gradients add up to the same. Three rows of 2, 0 and 4 trainable tokens and ``max_response_tokens=8``:

===========  ======  ======  ======  ===============================================
aggregation  row 0   row 1   row 2   reading
===========  ======  ======  ======  ===============================================
token        1/6     0       1/6     mean over the 6 trainable tokens
sequence     1/4     0       1/8     mean over the 2 rows that have any, of row means
constant     1/24    0       1/24    sum over tokens / (3 rows * 8 tokens)
===========  ======  ======  ======  ===============================================

A row without trainable tokens (a truncated response that is dropped, for one) has no mean of its own, so it is not
counted under ``sequence``, as its tokens are not counted under ``token``. It does count under ``constant``: the point
of that aggregation is a divisor that no sampled response can change.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["token", "sequence", "constant"]


def row_weights(lengths: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Weight of each trainable token of row i; a row's tokens all weigh the same.

    ``token``: ``1 / sum_j |o_j|``. ``sequence``: ``1 / (M |o_i|)``, M the number of rows with ``|o_i| > 0``.
    ``constant``: ``1 / (N max_response_tokens)``. Rows of length 0 get 0. The lengths must be those of the whole
    optimizer step, before it is split.

    Args:
        lengths: int64 ``[N]``, trainable tokens of each row.
        aggregation: which of the three.
        max_response_tokens: most tokens that one response may have; read by ``constant`` only.

    Returns:
        float32 ``[N]``.

    Raises:
        ValueError: on an unknown aggregation, lengths that are not ``[N]``, or ``constant`` without a positive
            ``max_response_tokens``.

    Sources: sequence, Shao et al. 2024 (arXiv:2402.03300, eq. 3); token, Yu et al. 2025 (arXiv:2503.14476, section
    3.3); constant, Liu et al. 2025 (arXiv:2503.20783, section 3.2).

    >>> lengths = torch.tensor([2, 0, 4])
    >>> row_weights(lengths, "sequence").tolist()
    [0.25, 0.0, 0.125]
    >>> row_weights(lengths, "constant", max_response_tokens=8).mul(24).tolist()
    [1.0, 0.0, 1.0]
    """
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be [N], one per row, but it is {list(lengths.shape)}.")
    divisor = _divisor(lengths.double(), aggregation, max_response_tokens)
    return torch.where(lengths > 0, divisor.reciprocal(), 0.0).float()


def loss_weights(mask: Tensor, aggregation: Aggregation, *, max_response_tokens: int | None = None) -> Tensor:
    """Weight of every slot: :func:`row_weights` of the mask's row sums on the mask, 0 off it.

    Args:
        mask: bool ``[N, T]``, the trainable tokens.
        aggregation: as in :func:`row_weights`.
        max_response_tokens: as in :func:`row_weights`.

    Returns:
        float32 ``[N, T]``.

    Raises:
        ValueError: as :func:`row_weights`.

    >>> loss_weights(torch.tensor([[False, True, True], [True, False, False]]), "sequence").tolist()
    [[0.0, 0.25, 0.25], [0.5, 0.0, 0.0]]
    """
    weights = row_weights(mask.sum(-1), aggregation, max_response_tokens=max_response_tokens)
    return torch.where(mask, weights.unsqueeze(-1), 0.0)


def soft_overlong_penalty(lengths: Tensor, max_tokens: int, buffer_tokens: int) -> Tensor:
    """DAPO's length penalty, to be added to the reward.

    0 up to ``max_tokens - buffer_tokens``, then falling in a straight line, ``(max_tokens - buffer_tokens - |o|) /
    buffer_tokens``, to -1 at ``max_tokens`` and beyond.

    Args:
        lengths: int64 ``[N]``, response tokens.
        max_tokens: longest response that is not fully penalised.
        buffer_tokens: tokens over which the penalty grows, 1 to ``max_tokens``.

    Returns:
        float32 ``[N]``, in [-1, 0].

    Raises:
        ValueError: if ``buffer_tokens`` is not in that range.

    Source: Yu et al. 2025 (arXiv:2503.14476, eq. 13).

    >>> soft_overlong_penalty(torch.tensor([10, 80, 85, 100, 120]), max_tokens=100, buffer_tokens=20).tolist()
    [0.0, 0.0, -0.25, -1.0, -1.0]
    """
    if not 1 <= buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens is {buffer_tokens} and max_tokens is {max_tokens}; "
            "the buffer is the end of the allowed length, from 1 token up to all of it."
        )
    left = (max_tokens - buffer_tokens - lengths).clamp(min=-buffer_tokens, max=0)
    return (left.double() / buffer_tokens).float()


def _divisor(lengths: Tensor, aggregation: Aggregation, max_response_tokens: int | None) -> Tensor:
    if aggregation == "token":
        return lengths.sum().expand_as(lengths)
    if aggregation == "sequence":
        return (lengths > 0).sum() * lengths
    if aggregation != "constant":
        raise ValueError(f"aggregation is {aggregation!r}; choose one of {', '.join(get_args(Aggregation))}.")
    if max_response_tokens is None or max_response_tokens < 1:
        raise ValueError(
            f"max_response_tokens is {max_response_tokens}; aggregation 'constant' divides by it, "
            "so give the most tokens that one response may have."
        )
    return torch.full_like(lengths, float(len(lengths) * max_response_tokens))
