"""Drawing tokens: counter-based uniform numbers, the processed distribution, and inversion of its CDF."""

from __future__ import annotations

import torch

from sota_grpo.records import Sampling

_BITS = 24  # every multiple of 2^-24 in [0, 1) is a float32


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 read as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniforms(seeds: torch.Tensor, num: int) -> torch.Tensor:
    """One stream of uniform numbers per seed: ``u[n, t] = (splitmix64(seeds[n] + (t + 1) gamma) >> 40) / 2^24``.

    The number at position ``t`` depends on its seed and on ``t`` only: not on ``num``, the other rows or the device.

    Args:
        seeds: int64 ``[N]``.
        num: numbers per stream.

    Returns:
        float32 ``[N, num]`` in ``[0, 1)``.

    Source: splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".

    >>> u = uniforms(torch.tensor([3, 5]), 4)
    >>> u.shape, bool((u == torch.cat([uniforms(torch.tensor([3]), 4), uniforms(torch.tensor([5]), 4)])).all())
    (torch.Size([2, 4]), True)
    """
    counter = torch.arange(1, num + 1, dtype=torch.int64, device=seeds.device)
    x = seeds[:, None] + counter * _GAMMA
    for bits, multiplier in _MIX:
        x = (x ^ _shift_right(x, bits)) * multiplier
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 64 - _BITS).to(torch.float32) / (1 << _BITS)


def sampled_log_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities of the distribution that tokens are drawn from: ``log softmax(keep(logits / temperature))``.

    ``keep`` sets to minus infinity what top-k, then top-p, leaves out, so the rest is renormalised. At temperature 0
    (greedy, a point mass) the raw distribution at temperature 1 is reported, as vLLM does.

    Args:
        logits: ``[N, V]``, any float type.
        sampling: temperature, top_p, top_k.

    Returns:
        float32 ``[N, V]``.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0]])
    >>> sampled_log_probs(logits, Sampling(max_tokens=1, top_k=1)).exp().tolist()
    [[0.0, 0.0, 1.0]]
    """
    scores = logits.to(torch.float32)
    if sampling.temperature > 0:
        scores = scores / sampling.temperature
        if 0 < sampling.top_k < scores.shape[-1]:
            floor = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if sampling.top_p < 1:
            scores = _keep_nucleus(scores, sampling.top_p)
    return scores.log_softmax(-1)


def _keep_nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose mass reaches ``top_p``, at least one."""
    ranked, order = scores.sort(dim=-1, descending=True)
    probs = ranked.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    outside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
    return scores.masked_fill(outside, -torch.inf)


def draw(log_probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Invert the CDF: the first token whose cumulative probability exceeds ``u``; never one of probability 0.

    Args:
        log_probs: float32 ``[N, V]``.
        u: float32 ``[N]`` in ``[0, 1)``.

    Returns:
        int64 ``[N]``.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]]).log().expand(3, 3), torch.tensor([0.0, 0.25, 0.99])).tolist()
    [0, 2, 2]
    """
    cdf = log_probs.exp().cumsum(-1)
    total = cdf[:, -1:]  # 1 up to rounding; the threshold must stay below it, or no token would exceed it
    threshold = torch.minimum(u[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
