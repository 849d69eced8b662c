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
class Generates(Protocol):
    """What the gate, the evaluation, the publisher and the collector need: one engine, or many behind one front.

    ``generate`` yields each of its groups once, as soon as all its samples are complete, in any order. Several streams
    may be open at once, in one thread or in several; a stream that is dropped takes its groups along. A prompt that
    leaves no room for one token in the context raises ``ValueError`` before anything is taken in.

    ``update_weights`` returns when the next sampled token of everything in flight comes from the new weights;
    ``version`` then equals the version given. ``close`` is idempotent and leaves no process behind.
    """

    name: str
    version: int
    max_model_len: int

    def generate(self, requests: Sequence[GroupRequest], sampling: Sampling) -> Iterator[GroupOutput]: ...

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Engine(Generates, Protocol):
    """An inference engine that a pump can drive; :class:`~sota_grpo.engines.stepping.SteppingEngine` helps.

    ``add`` takes groups in and returns a ticket for each; equal group ids may be in flight under several tickets.
    ``step`` moves everything in flight on by about one token and returns what ended, each ticket once.
    ``num_in_flight`` counts the groups added and not yet returned; ``abort`` forgets them all. ``device`` is where this
    process can compute with weights before it pushes them: a GPU where the engine's own lie on one of this process's.
    ``weight_dtype`` is the one that all its matrices have, so that pushed ones may be rounded to it beforehand; None
    where they have several, or that is not known.
    """

    device: torch.device
    weight_dtype: torch.dtype | None

    @property
    def num_in_flight(self) -> int: ...

    def add(self, requests: Sequence[GroupRequest], sampling: Sampling) -> list[int]: ...

    def step(self) -> list[tuple[int, GroupOutput]]: ...

    def abort(self) -> None: ...
