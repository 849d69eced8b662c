"""Drawing tokens: counter-based uniform numbers, the processed distribution, and inversion of its CDF."""

from __future__ import annotations

import math

import torch

from sota_grpo.rl.records import Sampling

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


def sampled_probs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution that tokens are drawn from: ``softmax(keep(logits / temperature))``.

    ``keep`` sets to minus infinity what top-k, then top-p, leaves out, so the rest is renormalised. At temperature 0
    (greedy, a point mass) the raw distribution at temperature 1 is reported, as vLLM does.

    Args:
        logits: ``[N, V]``, any float type.
        sampling: temperature, top_p, top_k.

    Returns:
        float32 ``[N, V]``.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0]])
    >>> sampled_probs(logits, Sampling(max_tokens=1, top_k=1)).tolist()
    [[0.0, 0.0, 1.0]]
    """
    scores = logits
    if sampling.temperature > 0:
        if sampling.temperature != 1:
            scores = scores.to(torch.float32) / sampling.temperature
        if 0 < sampling.top_k < scores.shape[-1]:
            floor = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < floor, -torch.inf)
        if sampling.top_p < 1:
            scores = _keep_nucleus(scores.to(torch.float32), sampling.top_p)
    return scores.softmax(-1, dtype=torch.float32)


def _keep_nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest most likely tokens whose mass reaches ``top_p``, at least one."""
    ranked, order = scores.sort(dim=-1, descending=True)
    probs = ranked.softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    outside = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, mass_before >= top_p)
    return scores.masked_fill(outside, -torch.inf)


def draw(probs: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Invert the CDF: the first token whose cumulative probability exceeds ``u``; never one of probability 0.

    The vocabulary is cut into about ``sqrt(V)`` runs of tokens: ``u`` first chooses a run by the sums of the runs, then
    a token of it by what of ``u`` is left. Cumulative sums over all of it would take longer than the softmax before.

    Args:
        probs: float32 ``[N, V]``.
        u: float32 ``[N]`` in ``[0, 1)``.

    Returns:
        int64 ``[N]``.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]]).expand(3, 3), torch.tensor([0.0, 0.25, 0.99])).tolist()
    [0, 2, 2]
    """
    vocab = probs.shape[1]
    length = math.isqrt(vocab)
    whole = vocab - vocab % length
    sums = probs[:, :whole].unflatten(1, (-1, length)).sum(-1)
    if whole < vocab:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=1)
    run, rest = _invert(sums, u * sums.sum(-1))
    tokens = run.unsqueeze(1) * length + torch.arange(length, device=probs.device)
    inside = probs.gather(1, tokens.clamp(max=vocab - 1)).masked_fill_(tokens >= vocab, 0.0)
    return run * length + _invert(inside, rest)[0]


def _invert(mass: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the cumulative sum of ``mass`` ``[N, K]`` first exceeds ``threshold`` ``[N]``, and how far into it."""
    cdf = mass.cumsum(-1)
    total = cdf[:, -1]  # rounding may put the threshold above it, and then nothing would exceed the threshold
    threshold = torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total))).unsqueeze(1)
    index = torch.searchsorted(cdf, threshold, right=True)
    entered = threshold - torch.where(index > 0, cdf.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index.squeeze(1), entered.squeeze(1)
