"""What the entropy of a token's distribution decides: which tokens learn, and how large the bonus is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ROUNDING = 1e-9  # 0.8 * 5 is 4, and where it comes out a little above, a token more must not be left out


def top_entropy_tokens(entropy: Tensor, mask: Tensor, *, share: float) -> Tensor:
    """True on the ``share`` of the trained tokens whose entropy is highest.

    ``H_t >= tau``, ``tau`` the quantile ``1 - share`` of ``H`` over the ``n`` tokens of the mask: the value at place
    ``ceil((1 - share) (n - 1))`` of the sorted ones, counted from 0. Which tokens are kept depends on no order. Tokens
    whose entropy equals ``tau`` are all kept, so there is always one, and of equal entropies all.

    Args:
        entropy: ``[N, T]`` or ``[n]``, nats; what stands off the mask is not read.
        mask: bool of the same shape, all trained tokens of an optimizer step; so is the result.
        share: above 0, up to 1, which keeps them all, else ``ValueError``; the paper's is 0.2.

    Source: Wang et al. 2025, "Beyond the 80/20 Rule" (arXiv:2506.01939), rho and tau of its objective; the rank is
    that of a linear quantile, as TRL's ``top_entropy_quantile`` takes it.

    >>> entropy = torch.tensor([[0.1, 2.0, 0.3], [0.0, 1.0, 9.0]])
    >>> mask = torch.tensor([[True, True, True], [True, True, False]])
    >>> top_entropy_tokens(entropy, mask, share=0.4).tolist()  # 3 of 5 are left out: (1 - 0.4) * 4 = 2.4, rank 3
    [[False, True, False], [False, True, False]]
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; keep more than none of the tokens, and at most all: 1.")
    values = entropy[mask]
    if len(values) == 0:
        return torch.zeros_like(mask)
    rank = math.ceil((1 - share) * (len(values) - 1) - _ROUNDING)
    return (entropy >= values.sort().values[rank]) & mask


def adapted_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float, largest: float
) -> tuple[float, float]:
    """The coefficient ``c'`` of the entropy bonus after a step of mean entropy ``H``, and the next step's ``alpha``.

    ``c' = min(c + delta, c_max)`` where ``H <= H*``, else ``max(c - delta, 0)``; ``alpha = c' 1[H <= H*]``: the bonus
    grows while the entropy is too low, shrinks while it is not, and acts only while it is too low.

    ``coef`` is the ``c`` of the step, ``entropy`` the mean ``H`` over its trained tokens and ``target`` ``H*``, in
    nats, ``delta`` the change and ``largest`` ``c_max``.

    Source: He et al. 2025, "Skywork Open Reasoner 1" (arXiv:2505.22312), adaptive entropy control, whose bonus acts by
    the entropy of the step itself; here and in TRL 1.16 (``use_adaptive_entropy``, the bounds included) it is that of
    the step before, for which nothing has to be computed twice.

    >>> adapted_entropy_coef(0.25, 0.1, target=0.2, delta=0.125, largest=1.0)
    (0.375, 0.375)
    >>> adapted_entropy_coef(0.25, 0.3, target=0.2, delta=0.125, largest=1.0)
    (0.125, 0.0)
    """
    low = entropy <= target
    moved = min(coef + delta, largest) if low else max(coef - delta, 0.0)
    return moved, moved if low else 0.0
