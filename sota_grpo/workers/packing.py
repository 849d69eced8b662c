"""Joins many tensors into few before they are pickled: learner states and sampled groups.

A group is pickled as three concatenated tensors instead of three per sample: unpickling a group of eight samples takes
0.03 ms instead of 0.8 ms. Importing this module registers this for every pickle of a group, including Ray's.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.records import GroupOutput, Sample, SamplingSupport


@dataclass(frozen=True)
class _Tensor:
    """Placeholder for the tensor ``name`` in a packed state."""

    name: str


@dataclass(frozen=True)
class StatePack:
    """A nested state of dicts, lists and tuples, with all tensors in one CPU buffer.

    >>> StatePack.of({"model": {"w": torch.ones(2)}, "betas": (0.9, 0.99)}).state()
    {'model': {'w': tensor([1., 1.])}, 'betas': (0.9, 0.99)}
    """

    tensors: WeightPack
    rest: Any

    @classmethod
    def of(cls, state: Any) -> StatePack:
        """Pack ``state``; its tensors are copied to the CPU."""
        tensors: list[tuple[str, torch.Tensor]] = []

        def emptied(value: torch.Tensor) -> _Tensor:
            tensors.append((str(len(tensors)), value))
            return _Tensor(tensors[-1][0])

        rest = tree_map_only(torch.Tensor, emptied, state)
        return cls(WeightPack.of(tensors), rest)

    def state(self, *, views: bool = False) -> Any:
        """Return the packed state; its tensors are copies, or with ``views`` read-only views of the buffer.

        ``torch.save`` refuses views, because tensors of different dtypes share one storage.
        """
        tensors = {name: tensor if views else tensor.clone() for name, tensor in self.tensors.tensors()}
        return tree_map_only(_Tensor, lambda value: tensors[value.name], self.rest)


def packed(group: GroupOutput) -> tuple[Any, ...]:
    """Return (:func:`unpacked`, its arguments) to pickle ``group``; records, parents and ``prompt_ids`` are lost.

    >>> sample = Sample(torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), torch.tensor([0, 0]), truncated=False)
    >>> make, parts = packed(GroupOutput(7, (sample, sample)))
    >>> parts[1].tolist(), make(*parts).samples[1].token_ids.tolist()
    ([5, 6, 5, 6], [5, 6])
    """
    samples = group.samples
    if not samples:
        return GroupOutput, (group.group_id, ())
    columns = ([getattr(one, name) for one in samples] for name in ("token_ids", "log_probs", "versions"))
    joined = [torch.cat(column).detach().cpu().numpy() for column in columns]
    masks = [None if one.assistant_mask is None else one.assistant_mask.numpy() for one in samples]
    lengths = [len(one.token_ids) for one in samples]
    supports = [None if one.support is None else tuple(array.numpy() for array in one.support) for one in samples]
    plain = [one.truncated for one in samples], masks, supports, [one.text for one in samples]
    return unpacked, (group.group_id, *joined, lengths, *plain)


def unpacked(
    group_id: int,
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    versions: np.ndarray,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    masks: Sequence[np.ndarray | None],
    support_arrays: Sequence[tuple[np.ndarray, np.ndarray] | None],
    texts: Sequence[str | None],
) -> GroupOutput:
    """Rebuild a group from the arguments that :func:`packed` returns; its samples are views of three tensors."""
    columns = (torch.tensor(column).split(lengths) for column in (token_ids, log_probs, versions))
    mask_tensors = (None if mask is None else torch.tensor(mask) for mask in masks)
    supports = (None if sets is None else SamplingSupport(*map(torch.tensor, sets)) for sets in support_arrays)
    by_sample = zip(*columns, truncated, mask_tensors, [None] * len(lengths), supports, texts, strict=True)
    return GroupOutput(group_id, tuple(Sample(*columns_of) for columns_of in by_sample))


copyreg.pickle(GroupOutput, packed)  # type: ignore[arg-type]
