"""Takes tensors out of learner states and sampled groups, and joins many into few before they are pickled.

The token ids, log-probs and versions of a group are pickled as three tensors instead of three per sample: eight samples
are unpickled in 0.03 ms instead of 0.8 ms. Importing this module registers this for every pickle, including Ray's.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.records import GroupOutput, Sample, SamplingSupport

_MARK = "stored_tensor"


def emptied(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a nested state into (state without tensors, {dotted name: tensor}), without copies; empty tensors stay.

    ``{"stored_tensor": name}`` replaces each tensor. ValueError if two tensors have the same dotted name.

    >>> emptied({"model": [torch.ones(1)], "step": 3})
    ({'model': [{'stored_tensor': 'model.0'}], 'step': 3}, {'model.0': tensor([1.])})
    """
    tensors: dict[str, torch.Tensor] = {}

    def without(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor) and value.numel():
            name = ".".join(path)
            if name in tensors:
                raise ValueError(f"two tensors of a state have the dotted name {name}; rename one of their keys")
            tensors[name] = value
            return {_MARK: name}
        if isinstance(value, Mapping):
            return {key: without(item, (*path, str(key))) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(without(item, (*path, str(index))) for index, item in enumerate(value))
        return value

    return without(state, ()), tensors


def filled(rest: Any, tensors: Mapping[str, Any]) -> Any:
    """Undo :func:`emptied`: return ``rest`` with ``tensors[name]`` for each ``{"stored_tensor": name}``."""
    if isinstance(rest, dict):
        if rest.keys() == {_MARK}:
            return tensors[rest[_MARK]]
        return {key: filled(item, tensors) for key, item in rest.items()}
    if isinstance(rest, (list, tuple)):
        return type(rest)(filled(item, tensors) for item in rest)
    return rest


@dataclass(frozen=True)
class StatePack:
    """A nested state of dicts, lists and tuples, whose tensors (except empty ones) are in one CPU buffer.

    >>> StatePack.of({"model": {"w": torch.ones(2)}, "betas": (0.9, 0.99)}).state()
    {'model': {'w': tensor([1., 1.])}, 'betas': (0.9, 0.99)}
    """

    tensors: WeightPack
    rest: Any

    @classmethod
    def of(cls, state: Any) -> StatePack:
        """Pack ``state``: copy its tensors to the CPU, but keep empty ones as they are; raise as :func:`emptied`."""
        rest, tensors = emptied(state)
        return cls(WeightPack.of(tensors.items()), rest)

    def state(self, *, views: bool = False) -> Any:
        """Return the state with copies of its tensors, or with ``views`` that you must not write or ``torch.save``."""
        return filled(self.rest, {name: tensor if views else tensor.clone() for name, tensor in self.tensors.tensors()})


def packed(group: GroupOutput) -> tuple[Any, ...]:
    """Return (a function, its arguments), from which pickle rebuilds ``group``: :func:`unpacked`, if it has samples.

    >>> sample = Sample(torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), torch.tensor([0, 0]), truncated=False)
    >>> make, parts = packed(GroupOutput(7, (sample, sample)))
    >>> parts[2].tolist(), make(*parts).samples[1].token_ids.tolist()
    ([5, 6, 5, 6], [5, 6])
    """
    samples = group.samples
    if not samples:
        return GroupOutput, (group.group_id, (), group.prompt_ids)
    columns = ([getattr(one, name) for one in samples] for name in ("token_ids", "log_probs", "versions"))
    joined = [torch.cat(column).detach().cpu().numpy() for column in columns]
    lengths = [len(one.token_ids) for one in samples]
    others = ("truncated", "assistant_mask", "record", "support", "text", "parents")  # in the order of Sample
    plain = [[_as_array(getattr(one, name)) for one in samples] for name in others]
    return unpacked, (group.group_id, group.prompt_ids, *joined, lengths, *plain)


def unpacked(
    group_id: int,
    prompt_ids: tuple[int, ...] | None,
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    versions: np.ndarray,
    lengths: Sequence[int],
    *others: Sequence[Any],
) -> GroupOutput:
    """Rebuild a group from the arguments that :func:`packed` returns."""
    columns = (torch.tensor(column).split(lengths) for column in (token_ids, log_probs, versions))
    by_sample = zip(*columns, *(map(_as_tensor, column) for column in others), strict=True)
    return GroupOutput(group_id, tuple(Sample(*columns_of) for columns_of in by_sample), prompt_ids)


def _as_array(value: Any) -> Any:
    if isinstance(value, SamplingSupport):
        return tuple(array.numpy() for array in value)
    return value.numpy() if isinstance(value, torch.Tensor) else value


def _as_tensor(value: Any) -> Any:
    if isinstance(value, tuple):
        return SamplingSupport(*map(torch.tensor, value))
    return torch.tensor(value) if isinstance(value, np.ndarray) else value


copyreg.pickle(GroupOutput, packed)  # type: ignore[arg-type]
