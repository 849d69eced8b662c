"""The protocol that every rollout engine honours: groups in, sampled token ids and their log-probs out.

An engine never sees text. It is given token ids and returns the token ids it sampled (token-in token-out), with the
log-probability of each under the distribution it was sampled from (after temperature) and the version of the weights
that produced it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from sota_grpo.records import GroupOutput, GroupRequest, Sampling


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
