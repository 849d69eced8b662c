"""Many tensors as few: rows and states that travel to the ranks of a learner, rows in a checkpoint, sampled groups.

A pickle of a thousand rows describes and copies every tensor of each: 2.7 MB and 1.8 s for rows that pack into 0.2 MB
in 0.06 s. A :class:`sota_grpo.policy.weight_pack.WeightPack` travels as one buffer, by reference where the transport
allows.

A sampled group travels as three joined tensors in place of three for every sample: a pickled group of eight samples
takes 0.8 ms to read that way, which is what it costs to make its rows, and 0.03 ms joined. Importing this module makes
every pickle of a group so, Ray's included.
"""

from __future__ import annotations

import copyreg
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor
from torch.utils._pytree import tree_map_only

from sota_grpo import keys
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.rl.collate import Key, Row, plain_rows
from sota_grpo.rl.records import GroupOutput, KeptTokens, Sample

Shapes = Sequence[int | tuple[int, ...]]  # of the values of one entry, row by row: that of ``[n]`` is n

_COPIES = (keys.PROMPT_TOKENS, keys.RESPONSE_TOKENS)  # they stand in the full tokens


def _stays(name: Key) -> bool:
    """Whether an entry is of no use to a learner: copies, and the terms of the reward, which a row may lack."""
    return name in _COPIES or name[: len(keys.REWARD_TERMS)] == keys.REWARD_TERMS


@dataclass(frozen=True)
class RowPack:
    """The tensors of ragged rows, each entry joined over the rows; text and terms of the reward stay behind.

    >>> rows = [TensorDict({"tokens": {"full": torch.arange(n)}}) for n in (1, 2)]
    >>> [row["tokens", "full"].tolist() for row in RowPack.of(rows).rows()]
    [[0], [0, 1]]
    """

    columns: WeightPack
    shapes: Mapping[Key, Shapes]

    @classmethod
    def of(cls, rows: Sequence[TensorDictBase] | Sequence[Row], names: Sequence[Any] | None = None) -> RowPack:
        """Pack rows that have the same entries.

        Args:
            rows: at least one.
            names: of the entries that travel; None: all tensors of the first row that are of use to a learner.

        Raises:
            ValueError: there is no row, or an entry of the first row is missing in another.
        """
        if not rows:
            raise ValueError("RowPack.of got no rows; a batch needs at least one.")
        plain = rows if isinstance(rows[0], dict) else plain_rows(rows)
        if names is None:
            names = [name for name in plain[0] if not _stays(name)]
        columns: dict[Key, list[torch.Tensor]] = {}
        for name in names:
            try:
                columns[name] = [row[name] for row in plain]
            except KeyError:
                missing = next(index for index, row in enumerate(plain) if name not in row)
                raise ValueError(
                    f"{name} is missing in row {missing}; write it to all rows of a batch or to none."
                ) from None
        shapes: dict[Key, Shapes] = {}
        for name, values in columns.items():
            flat = set(map(torch.Tensor.dim, values)) == {1}
            own: Shapes = list(map(torch.Tensor.numel, values)) if flat else [tuple(value.shape) for value in values]
            shapes[name] = next(
                (known for known in shapes.values() if known == own), own
            )  # equal ones are pickled once
        return cls(WeightPack.joined((str(name), values) for name, values in columns.items()), shapes)

    def rows(self) -> list[dict[Key, torch.Tensor]]:
        """The rows again, as dicts of views that are not to be written into."""
        columns = dict(self.columns.tensors())
        split = {name: _split(columns[str(name)], shapes) for name, shapes in self.shapes.items()}
        return [dict(zip(split, parts)) for parts in zip(*split.values(), strict=True)]


def _split(flat: torch.Tensor, shapes: Shapes) -> Sequence[torch.Tensor]:
    """Views of ``flat`` in these shapes, with as few calls per row as they allow.

    >>> [part.shape for part in _split(torch.arange(5), [2, (3, 1)])]
    [torch.Size([2]), torch.Size([3, 1])]
    """
    if all(shape == shapes[0] for shape in shapes):
        first = shapes[0]
        return flat.view(len(shapes), *(first if isinstance(first, tuple) else (first,))).unbind(0)
    parts = flat.split([math.prod(shape) if isinstance(shape, tuple) else shape for shape in shapes])
    return [each.view(shape) if isinstance(shape, tuple) else each for each, shape in zip(parts, shapes)]


def pack_rows(rows: Sequence[TensorDictBase]) -> dict[str, Any]:
    """Ragged rows as a few tensors and lists, one column per key, so that a checkpoint of 10,000 groups stays small.

    The inverse is :func:`unpack_rows`; the round trip is exact, a key that only some rows have included. Two rows with
    ``x`` of 1 and 2 values and a text::

        columns   path ["x"]      rows [0, 1]   shapes [[1], [2]]   values [x0, x1, x1]
                  path ["query"]  rows [0, 1]   plain ["a?", "b?"]

    >>> rows = [TensorDict({"x": torch.ones(n), "query": "a?"}) for n in (1, 2)]
    >>> packed = pack_rows(rows)
    >>> [row["x"].shape[0] for row in unpack_rows(packed)], packed["columns"][0]["values"].tolist()
    ([1, 2], [1.0, 1.0, 1.0])
    """
    columns: dict[tuple[Any, ...], list[tuple[int, Any]]] = {}
    for index, row in enumerate(rows):
        for path, value in _leaves(row, ()):
            kind = (value.dtype, value.ndim) if isinstance(value, torch.Tensor) else (None, None)
            columns.setdefault((path, *kind), []).append((index, value))
    return {"num_rows": len(rows), "columns": [_column(kind, entries) for kind, entries in columns.items()]}


def _column(kind: tuple[Any, ...], entries: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    path, dtype, ndim = kind
    indexes, values = zip(*entries)
    column = {"path": list(path), "rows": torch.tensor(indexes)}
    if dtype is None:
        return column | {"plain": list(values)}
    shapes = torch.tensor([list(value.shape) for value in values], dtype=torch.int64).reshape(len(values), ndim)
    return column | {"shapes": shapes, "values": torch.cat([value.detach().reshape(-1) for value in values])}


def unpack_rows(packed: Mapping[str, Any]) -> list[TensorDictBase]:
    """The rows that :func:`pack_rows` was given; no tensor shares memory with another."""
    entries: list[dict[str, Any]] = [{} for _ in range(packed["num_rows"])]
    for column in packed["columns"]:
        *parents, name = column["path"]
        for index, value in zip(column["rows"].tolist(), _values(column)):
            entry = entries[index]
            for parent in parents:
                entry = entry.setdefault(parent, {})
            entry[name] = value
    return [TensorDict(entry, batch_size=[]) for entry in entries]


def _values(column: Mapping[str, Any]) -> list[Any]:
    if "plain" in column:
        return [NonTensorData(value) for value in column["plain"]]
    shapes = column["shapes"]
    parts = column["values"].split(shapes.prod(1).tolist())
    return [values.reshape(shape).clone() for values, shape in zip(parts, shapes.tolist())]


def _leaves(row: TensorDictBase, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in row.items():
        if is_non_tensor(value):
            yield (*path, key), value.data
        elif isinstance(value, TensorDictBase):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


@dataclass(frozen=True)
class _Tensor:
    """Stands where a tensor was."""

    name: str


@dataclass(frozen=True)
class StatePack:
    """Nested dicts, lists and tuples with tensors and plain values, the tensors in one buffer.

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
        """What was packed, each tensor in memory of its own: ``torch.save`` refuses one memory under two dtypes.

        Args:
            views: of the buffer instead, which are to be read only.
        """
        tensors = {name: tensor if views else tensor.clone() for name, tensor in self.tensors.tensors()}
        return tree_map_only(_Tensor, lambda value: tensors[value.name], self.rest)


def packed(group: GroupOutput) -> tuple[Any, ...]:
    """What :mod:`pickle` needs to make ``group`` again: :func:`unpacked` and its arguments.

    >>> sample = Sample(torch.tensor([5, 6]), torch.tensor([-1.0, -2.0]), torch.tensor([0, 0]), truncated=False)
    >>> make, parts = packed(GroupOutput(7, (sample, sample)))
    >>> parts[1].tolist(), make(*parts).samples[1].token_ids.tolist()
    ([5, 6, 5, 6], [5, 6])
    """
    samples = group.samples
    if not samples:
        return GroupOutput, (group.group_id, ())
    columns = ([getattr(each, name) for each in samples] for name in ("token_ids", "log_probs", "versions"))
    joined = [torch.cat(column).detach().cpu().numpy() for column in columns]
    masks = [None if each.assistant_mask is None else each.assistant_mask.numpy() for each in samples]
    lengths = [len(each.token_ids) for each in samples]
    kept = [None if each.kept is None else tuple(array.numpy() for array in each.kept) for each in samples]
    return unpacked, (group.group_id, *joined, lengths, [each.truncated for each in samples], masks, kept)


def unpacked(
    group_id: int,
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    versions: np.ndarray,
    lengths: Sequence[int],
    truncated: Sequence[bool],
    masks: Sequence[np.ndarray | None],
    kept: Sequence[tuple[np.ndarray, np.ndarray] | None],
) -> GroupOutput:
    """The group; its samples are views of three tensors of its own."""
    columns = (torch.tensor(column).split(lengths) for column in (token_ids, log_probs, versions))
    own_masks = (None if mask is None else torch.tensor(mask) for mask in masks)
    own_kept = (None if sets is None else KeptTokens(*map(torch.tensor, sets)) for sets in kept)
    by_sample = zip(*columns, truncated, own_masks, [None] * len(lengths), own_kept, strict=True)
    return GroupOutput(group_id, tuple(Sample(*parts) for parts in by_sample))


copyreg.pickle(GroupOutput, packed)  # type: ignore[arg-type]
