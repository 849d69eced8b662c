"""Finished groups between the rollouts and the learner: a TorchRL replay buffer that loses and repeats none of them."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, is_non_tensor, lazy_stack
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from sota_grpo import keys

ROWS, ADMISSION_VERSION = "rows", "admission_version"  # entries of an item of the buffer
_FILE = "groups.pt"


class FreePlaceWriter(Writer):
    """Writes an item to a place that holds none; what was not taken is never overwritten.

    It also knows the order in which items are due: by (admission version, order of arrival). An item is
    ``{"rows": lazily stacked rows [G], "admission_version": int}``.

    Raises:
        RuntimeError: every place holds an item that was not taken.
    """

    def __init__(self) -> None:
        super().__init__()
        self._empty()

    def register_storage(self, storage: Storage) -> None:
        super().register_storage(storage)
        self._empty()
        for place in range(len(storage)):
            self._enter(place, storage.get(place))

    def add(self, data: Any) -> int:
        if not self._free and len(self._storage) == self._storage.max_size:
            raise RuntimeError(
                f"All {self._storage.max_size} places of the buffer hold a group that was not taken; take some, or "
                "give it more places."
            )
        place = heapq.heappop(self._free) if self._free else len(self._storage)
        self._storage.set(place, data)
        self._enter(place, data)
        return place

    def extend(self, data: Sequence) -> torch.Tensor:
        return torch.tensor([self.add(item) for item in data])

    def take(self, count: int) -> list[int]:
        """The places of the ``count`` items that are due first, ordered by group id; they are free from now on.

        Raises:
            RuntimeError: there are fewer.
        """
        if count > len(self._due):
            raise RuntimeError(f"{count} finished groups were asked for and the buffer holds {len(self._due)}.")
        taken = [heapq.heappop(self._due) for _ in range(count)]
        for version, _, _, place in taken:
            self.versions[version] -= 1
            heapq.heappush(self._free, place)
        return [place for _, _, _, place in sorted(taken, key=lambda item: item[2])]

    def due(self) -> list[tuple[int, int, int]]:
        """``(admission version, group id, place)`` of what is held, in the order of :meth:`take`."""
        return [(version, group_id, place) for version, _, group_id, place in sorted(self._due)]

    def __len__(self) -> int:
        return len(self._due)

    def _enter(self, place: int, item: TensorDictBase) -> None:
        version, group_id = int(item.get(ADMISSION_VERSION)), int(item.get(ROWS)[0].get(keys.GROUP_ID))
        heapq.heappush(self._due, (version, self._arrivals, group_id, place))
        self._arrivals += 1
        self.versions[version] += 1

    def _empty(self, empty_write_count: bool = True) -> None:
        self._free: list[int] = []  # places written before and taken since
        self._due: list[tuple[int, int, int, int]] = []
        self._arrivals = 0
        self.versions: Counter[int] = Counter()  # items held, by admission version

    def state_dict(self) -> dict[str, Any]:
        """Nothing of its own: all is rebuilt from the items, see :meth:`GroupBuffer.state_dict`."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`state_dict`."""

    def dumps(self, path: Any) -> None:
        """As :meth:`state_dict`."""

    def loads(self, path: Any) -> None:
        """As :meth:`state_dict`."""


class OldestFirstSampler(Sampler):
    """Takes the items that are due first, each once: rule 3 of :func:`sota_grpo.functional.max_groups_admitted`.

    Args:
        writer: of the same buffer; it knows what is due.
    """

    def __init__(self, writer: FreePlaceWriter) -> None:
        self._writer = writer

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict]:
        return torch.tensor(self._writer.take(batch_size)), {}

    def can_sample(self, storage: Storage, batch_size: int) -> bool:
        return len(self._writer) >= batch_size

    def _empty(self) -> None:
        """The writer forgets what was due."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As :meth:`state_dict`."""

    def dumps(self, path: Any) -> None:
        """As :meth:`state_dict`."""

    def loads(self, path: Any) -> None:
        """As :meth:`state_dict`."""


class GroupBuffer(ReplayBuffer):
    """Complete groups, taken once each, oldest admission version first; then first in, first out.

    A :class:`torchrl.data.ReplayBuffer` of which one item is one group. ``sample(k)`` gives the rows of ``k`` groups,
    lazily stacked and ordered by group id. A ``transform`` sees rows too: those of one group when it is written
    (``inv``), those of the batch when it is sampled (``forward``).

    Args:
        max_groups: places. A full buffer refuses to write.
        transform: of TorchRL.

    >>> def rows(group_id):
    ...     return [TensorDict({"group_id": torch.tensor(group_id), "x": torch.zeros(i + 1)}) for i in range(2)]
    >>> buffer = GroupBuffer(3)
    >>> for group_id, version in ((7, 1), (5, 0), (4, 0)):
    ...     buffer.add_group(rows(group_id), version=version)
    >>> buffer.take(2)["group_id"].tolist(), len(buffer)
    ([4, 4, 5, 5], 1)
    """

    def __init__(self, max_groups: int, *, transform: Any = None):
        writer = FreePlaceWriter()
        super().__init__(
            storage=ListStorage(max_groups),
            writer=writer,
            sampler=OldestFirstSampler(writer),
            collate_fn=_rows_of,
            transform=transform,
        )

    def __len__(self) -> int:
        return len(self._writer)

    @property
    def versions(self) -> Counter[int]:
        """Number of groups held, by admission version."""
        return self._writer.versions

    def add(self, data: TensorDictBase) -> int:
        """Keep one item, see :class:`FreePlaceWriter`; its place."""
        rows = self._transform.inv(data.get(ROWS)) if len(self._transform) else data.get(ROWS)
        return self._add(TensorDict({ROWS: rows, ADMISSION_VERSION: data.get(ADMISSION_VERSION)}, batch_size=[]))

    def extend(self, data: Sequence[TensorDictBase], *, update_priority: bool | None = None) -> torch.Tensor:
        """Keep several items; their places. There are no priorities to update."""
        return torch.tensor([self.add(item) for item in data])

    def add_group(self, rows: Sequence[TensorDictBase], *, version: int) -> None:
        """Keep one complete group that was admitted under ``version``.

        Raises:
            RuntimeError: the buffer is full.
        """
        self.add(TensorDict({ROWS: lazy_stack(list(rows)), ADMISSION_VERSION: torch.tensor(version)}))

    def take(self, num_groups: int) -> TensorDictBase:
        """``sample`` that also lets go of what it returns, so that trained rows do not stay in memory.

        Raises:
            RuntimeError: fewer groups are held.
        """
        rows, info = self.sample(num_groups, return_info=True)
        for place in info["index"].tolist():
            self._storage.set(place, None)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The groups held, in the order in which they are due, as tensors and plain values."""
        due = self._writer.due()
        groups = [self._storage.get(place).get(ROWS).unbind(0) for _, _, place in due]
        return {
            "groups": [[version, len(rows)] for (version, _, _), rows in zip(due, groups)],
            "rows": pack_rows([row for rows in groups for row in rows]),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hold what ``state_dict`` says and nothing else.

        Raises:
            RuntimeError: it holds more groups than this buffer has places.
        """
        self.empty()
        rows = iter(unpack_rows(state_dict["rows"]))
        for version, count in state_dict["groups"]:
            self.add_group([next(rows) for _ in range(count)], version=version)

    def dumps(self, path: Any) -> None:
        """Write :meth:`state_dict` into the directory ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / _FILE)

    def loads(self, path: Any) -> None:
        """Read what :meth:`dumps` wrote."""
        self.load_state_dict(torch.load(Path(path) / _FILE, weights_only=True))


def _rows_of(groups: Sequence[TensorDictBase]) -> TensorDictBase:
    return lazy_stack([row for group in groups for row in group.get(ROWS).unbind(0)])


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
    return {"num_rows": len(rows), "columns": [_column(kind, found) for kind, found in columns.items()]}


def _column(kind: tuple[Any, ...], found: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    path, dtype, ndim = kind
    indexes, values = zip(*found)
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
    return [part.reshape(shape).clone() for part, shape in zip(parts, shapes.tolist())]


def _leaves(row: TensorDictBase, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in row.items():
        if is_non_tensor(value):
            yield (*path, key), value.data
        elif isinstance(value, TensorDictBase):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
