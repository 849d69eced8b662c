"""The protocol that every rollout engine honours: groups in, sampled token ids and their log-probs out.

An engine never sees text. It is given token ids and returns the token ids it sampled (token-in token-out), with the
log-probability of each under the distribution it was sampled from (after temperature) and the version of the weights
that produced it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn.

    Args:
        max_tokens: most tokens of one response, EOS included.
        temperature: logits are divided by it; 0 means greedy.
        top_p: nucleus mass, 1 keeps every token.
        top_k: number of most likely tokens kept, 0 keeps every token.
        ignore_eos: keep sampling to ``max_tokens`` even after EOS (benchmarks).
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True)
class GroupRequest:
    """One prompt to be sampled ``num_samples`` times.

    Sample ``i`` is drawn from the random stream ``sample_seed(seed, i)``, so that it depends on no other request.
    """

    group_id: int
    prompt_ids: tuple[int, ...]
    num_samples: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """One response: ids ``[R]`` (EOS included), log-probs ``[R]`` f32, policy version of each token ``[R]``.

    ``truncated`` is True when the engine stopped for length, never inferred from the ids.
    """

    token_ids: torch.Tensor
    log_probs: torch.Tensor
    versions: torch.Tensor
    truncated: bool


@dataclass(frozen=True)
class GroupOutput:
    """The finished group: ``samples[i]`` answers sample index ``i`` of the request."""

    group_id: int
    samples: tuple[Sample, ...]


@runtime_checkable
class Engine(Protocol):
    """What a collector needs of an inference engine.

    ``generate`` yields each group once, as soon as all its samples are complete, in any order. A prompt that leaves no
    room for one token in the context raises ``ValueError`` before anything is sampled. ``update_weights`` returns when
    the next sampled token comes from the new weights; ``version`` then equals the version given. ``close`` is
    idempotent and leaves no process behind.
    """

    name: str
    version: int
    max_model_len: int

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]: ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_64 = (1 << 64) - 1


def sample_seed(*parts: int) -> int:
    """Mix integers into one 62-bit seed (splitmix64's finaliser over each part in turn; Steele et al. 2014).

    Deterministic, order-sensitive, and without collisions on small inputs.

    >>> sample_seed(0, 7, 1) == sample_seed(0, 7, 1), sample_seed(0, 7, 1) == sample_seed(0, 1, 7)
    (True, False)
    """
    state = 0
    for part in parts:
        state = (state + _GOLDEN_GAMMA + (part & _MASK_64)) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state & ((1 << 62) - 1)
