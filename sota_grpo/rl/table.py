"""A columnar table of sample rows: one tensor per entry for all rows, ragged or not.

Example: two rows of one prompt, with responses of one and three tokens; only the second row has a ``dialog``::

    ("tokens", "full")   values [5 6 1 5 6 2 3 4]   lengths [3, 5]
    ("next", "reward")   values [[1.] [0.]]
    "query"              values ["a?", "a?"]
    "dialog"             values ["{..}"]            rows [1]

(One TensorDict per response would cost about 100 microseconds and 50 objects.) :meth:`RowTable.stack` converts a table
to TensorDicts for TorchRL, :meth:`RowTable.of` converts back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Concatenate, NamedTuple, ParamSpec, overload

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    lazy_stack,
)
from torch import Tensor

from sota_grpo.policy.weight_pack import readable

P = ParamSpec("P")
Key = str | tuple[str, ...]
Row = Mapping[Key, Any]  # one sample: a TensorDict, or a dict of entries


class Column(NamedTuple):
    """The values of one entry, for the rows that have the entry.

    Args:
        values: tensor ``[n, ..]`` with one item per row; or ``[sum of lengths]``, the rows' values concatenated; or a
            list of values, if they are not tensors or differ in more than their length.
        lengths: length of each row's value in a concatenated tensor; else None.
        rows: ascending indices of the rows that have the entry; None: all rows.
    """

    values: Any
    lengths: list[int] | None = None
    rows: list[int] | None = None

    @classmethod
    def of(cls, values: Sequence[Any], rows: list[int] | None = None) -> Column:
        """Return the column of ``values``, at least one; item ``i`` is that of row ``rows[i]`` (None: ``i``)."""
        kinds = {(value.dtype, value.device) if isinstance(value, Tensor) else None for value in values}
        if None in kinds or len(kinds) > 1:
            return cls(list(values), None, rows)
        if len({value.shape for value in values}) == 1:
            return cls(torch.stack(list(values)), None, rows)
        if any(value.dim() != 1 for value in values):
            return cls(list(values), None, rows)
        return cls(torch.cat(list(values)), list(map(len, values)), rows)

    def cells(self) -> Sequence[Any]:
        """Return the values as views, one per row that has the entry."""
        if self.lengths is not None:
            return self.values.split(self.lengths)
        return self.values.unbind(0) if isinstance(self.values, Tensor) else self.values

    def flat(self) -> Column:
        """Return the tensor column in concatenated form, with ``lengths``."""
        if self.lengths is not None:
            return self
        sizes = [self.values.shape[1:].numel()] * len(self.values)
        return self._replace(values=self.values.flatten(), lengths=sizes)

    def take(self, indices: Sequence[int]) -> Column:
        """Return the column for the rows ``indices`` of its table, in this order."""
        rows = None
        if self.rows is not None:
            known = {row: at for at, row in enumerate(self.rows)}
            having = [new for new, index in enumerate(indices) if index in known]
            rows = having if len(having) < len(indices) else None
            indices = [known[indices[new]] for new in having]
        if isinstance(self.values, list):
            return Column([self.values[index] for index in indices], None, rows)
        if self.lengths is None:
            return Column(self.values[torch.tensor(indices, dtype=torch.int64)], None, rows)
        ends = list(accumulate(self.lengths, initial=0))
        pieces = [self.values[ends[first] : ends[last]] for first, last in _runs(indices)]
        return Column(torch.cat(pieces or [self.values[:0]]), [self.lengths[index] for index in indices], rows)


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield runs of consecutive indices as ``(first, last + 1)``."""
    start = 0
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            yield indices[start], indices[end - 1] + 1
            start = end


def _joined(columns: Sequence[Column]) -> tuple[Any, list[int] | None]:
    """Return the concatenated values of the columns and their lengths (None if not ragged)."""
    kinds = {(c.values.dtype, c.values.device) if isinstance(c.values, Tensor) else None for c in columns}
    alike = None not in kinds and len(kinds) == 1
    if alike and len({None if column.lengths is not None else column.values.shape[1:] for column in columns}) > 1:
        alike = all(column.lengths is not None or column.values.dim() == 2 for column in columns)
        columns = [column.flat() for column in columns] if alike else columns
    if not alike:
        return [value for column in columns for value in column.cells()], None
    lengths = None if columns[0].lengths is None else [n for column in columns for n in column.lengths or ()]
    return torch.cat([column.values for column in columns]), lengths


class RowTable(Sequence[Row]):
    """Sample rows with one :class:`Column` per entry (:mod:`sota_grpo.keys`).

    Columns are replaced, never modified, so tables can share them. A row is a dict of views of the columns.

    >>> table = RowTable(2, {"group_id": Column(torch.tensor([7, 7])), "x": Column(torch.arange(3), [1, 2])})
    >>> [row["x"].tolist() for row in table.rows()], table.get("group_id").tolist()
    ([[0], [1, 2]], [7, 7])
    """

    def __init__(self, num_rows: int, columns: Mapping[Key, Column]):
        self.num_rows, self.columns = num_rows, dict(columns)

    @classmethod
    def of(cls, rows: RowTable | TensorDictBase | Sequence[Row]) -> RowTable:
        """Return the table of rows given as TensorDicts (lazy, dense or a list) or dicts; a table is returned as is."""
        if isinstance(rows, RowTable):
            return rows
        if isinstance(rows, TensorDictBase) and _is_dense(rows):
            return cls(len(rows), {key: Column(value) for key, value in _entries(rows)})
        entries: dict[Key, tuple[list[int], list[Any]]] = {}
        listed = _plain_rows(rows)
        for index, row in enumerate(listed):
            for key, value in row.items():
                at, values = entries.setdefault(key, ([], []))
                at.append(index)
                values.append(value)
        number = len(listed)
        columns = {key: Column.of(values, at if len(at) < number else None) for key, (at, values) in entries.items()}
        return cls(number, columns)

    @classmethod
    def cat(cls, tables: Sequence[RowTable]) -> RowTable:
        """Concatenate the rows of tables; an entry may be missing in some tables."""
        *starts, num_rows = accumulate((len(table) for table in tables), initial=0)
        columns = {}
        for key in dict.fromkeys(key for table in tables for key in table.columns):
            rows, have = [], []
            for start, table in zip(starts, tables):
                if key in table.columns and len(table):
                    have.append(column := table.columns[key])
                    rows += [start + row for row in (range(len(table)) if column.rows is None else column.rows)]
            if have:
                columns[key] = Column(*_joined(have), rows if len(rows) < num_rows else None)
        return cls(num_rows, columns)

    def __len__(self) -> int:
        return self.num_rows

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> RowTable: ...
    def __getitem__(self, index: int | slice) -> Row | RowTable:
        return self.take(range(len(self))[index]) if isinstance(index, slice) else self.rows()[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows())

    def has(self, key: Key) -> bool:
        """Return whether any row has the entry."""
        return key in self.columns

    def get(self, key: Key, default: Any = None) -> Any:
        """Return an entry of all ``N`` rows, ``[N, ..]`` or a list; ``default`` if no row has it.

        ValueError if only some rows have the entry, or its lengths differ.
        """
        if key not in self.columns:
            return default
        values, lengths, rows = self.columns[key]
        if rows is not None:
            raise ValueError(f"{_missing(key, len(self) - len(rows), len(self))}; write it to all rows, or read cells.")
        if lengths is None:
            return values
        if len(set(lengths)) > 1:
            raise ValueError(f"{key} differs in length between rows; use flat, cells or columns.")
        return values.view(len(self), -1)

    def set(self, key: Key, values: Tensor | Sequence[Any]) -> None:
        """Write an entry: a tensor ``[N, ..]`` or one value per row; a row with None lacks it; all None remove it."""
        if isinstance(values, Tensor):
            self.columns[key] = Column(values)
        elif rows := [index for index, value in enumerate(values) if value is not None]:
            self.columns[key] = Column.of([values[row] for row in rows], rows if len(rows) < len(self) else None)
        else:
            self.columns.pop(key, None)

    def names(self, prefix: tuple[str, ...]) -> list[str]:
        """Return the names of the entries directly below ``prefix``, without the prefix."""
        return [key[-1] for key in self.columns if isinstance(key, tuple) and key[:-1] == prefix]

    def flat(self, key: Key) -> Tensor:
        """Return the values of a tensor entry, concatenated over the rows that have it; KeyError if no row has it."""
        return self.columns[key].flat().values

    def lengths(self, key: Key) -> list[int]:
        """Return a tensor entry's number of elements in each row that has it; KeyError if no row has it."""
        return self.columns[key].flat().lengths or []

    def sums(self, key: Key) -> Tensor:
        """Return the number of True values of a mask entry in each row that has it, int64 ``[rows]``."""
        column = self.columns[key].flat()
        ends = torch.tensor([0, *column.lengths], device=column.values.device).cumsum(0)  # type: ignore[misc]
        counted = torch.cat([ends[:1], column.values.cumsum(0)])
        return counted[ends].diff()

    def cells(self, key: Key) -> Sequence[Any]:
        """Return each row's value as a view, None for rows without the entry; KeyError if no row has it."""
        column = self.columns[key]
        if column.rows is None:
            return column.cells()
        values = dict(zip(column.rows, column.cells()))
        return [values.get(row) for row in range(len(self))]

    def take(self, indices: Sequence[int]) -> RowTable:
        """Return a table of the rows ``indices``, in this order; if these are all rows in order, the table itself."""
        if list(indices) == list(range(len(self))):
            return self
        taken = {key: column.take(indices) for key, column in self.columns.items()}
        return RowTable(len(indices), {key: column for key, column in taken.items() if column.rows != []})

    def without(self, *names: Key) -> RowTable:
        """Return a new table without the named entries."""
        return self.only(key for key in self.columns if key not in names)

    def split(self, counts: Iterable[int]) -> list[RowTable]:
        """Split into consecutive tables, table ``i`` with ``counts[i]`` rows; drop the rows after the last."""
        ends, rows = list(accumulate(counts, initial=0)), self.rows()
        return [RowTable.of(rows[start:end]) for start, end in pairwise(ends)]

    def only(self, names: Iterable[Key]) -> RowTable:
        """Return a new table with the named entries only; a name without an entry is ignored."""
        return RowTable(len(self), {key: self.columns[key] for key in names if key in self.columns})

    def rows(self, *names: Key) -> list[dict[Key, Any]]:
        """Return each row as a dict of its entries, or those in ``names``; values are views: do not write to them."""
        rows: list[dict[Key, Any]] = [{} for _ in range(len(self))]
        for key in names or self.columns:
            if (column := self.columns.get(key)) is not None:
                having = rows if column.rows is None else [rows[index] for index in column.rows]
                for row, value in zip(having, column.cells(), strict=True):
                    row[key] = value
        return rows

    def stack(self) -> LazyStackedTensorDict:
        """Return the rows, at least one, as a lazy stack of TensorDicts."""
        rows = ({k: v if isinstance(v, Tensor) else NonTensorData(v) for k, v in row.items()} for row in self.rows())
        return lazy_stack([TensorDict(row, batch_size=[]) for row in rows])  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Return the table as tensors and plain values, for a checkpoint."""
        columns = []
        for key, (values, lengths, rows) in self.columns.items():
            indices = torch.tensor(rows if rows is not None else range(len(self)), dtype=torch.int64)
            saved: dict[str, Any] = {"path": [key] if isinstance(key, str) else list(key), "rows": indices}
            if isinstance(values, list):
                saved["plain"] = values
            elif lengths is None:
                shape = torch.tensor([values.shape[1:]], dtype=torch.int64)
                saved |= {"shapes": shape.expand(len(indices), -1).contiguous(), "values": values.flatten()}
            else:
                saved |= {"shapes": torch.tensor(lengths).unsqueeze(1), "values": values.flatten()}
            columns.append(saved)
        return {"num_rows": len(self), "columns": columns}

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> RowTable:
        """Return the table of a :meth:`state_dict`; ValueError if its rows, shapes and values do not fit together."""
        table = cls(state["num_rows"], {})
        for saved in state["columns"]:
            key = saved["path"][0] if len(saved["path"]) == 1 else tuple(saved["path"])
            table.columns[key] = _read_column(saved, len(table))
        return table

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle tensors as NumPy arrays, which pickle protocol 5 can transfer without a copy."""
        columns = [
            (key, values.detach().cpu().numpy() if isinstance(values, Tensor) else values, *others)
            for key, (values, *others) in self.columns.items()
        ]
        return _read, (len(self), columns)


def _read_column(saved: Mapping[str, Any], num_rows: int) -> Column:
    indices = saved["rows"].tolist()
    rows = None if len(indices) == num_rows else indices
    if any(not 0 <= index < num_rows for index in indices) or any(one >= other for one, other in pairwise(indices)):
        raise ValueError(
            f"corrupt state: column {saved['path']} has row indices that are unsorted or not below {num_rows}"
        )
    if "plain" in saved:
        if len(saved["plain"]) != len(indices):
            raise ValueError(
                f"corrupt state: column {saved['path']} has {len(saved['plain'])} values for {len(indices)} rows"
            )
        return Column(saved["plain"], None, rows)
    shapes, values = saved["shapes"].tolist(), saved["values"]
    if len(shapes) != len(indices) or sum(map(prod, shapes)) != len(values):
        values_of = f"{len(values)} values for {len(indices)} rows with {len(shapes)} shapes"
        raise ValueError(f"corrupt state: column {saved['path']} has {values_of}")
    if shapes and all(shape == shapes[0] for shape in shapes):
        return Column(values.view(len(shapes), *shapes[0]), None, rows)
    return Column(values, [length for (length,) in shapes], rows)


def _read(num_rows: int, columns: Iterable[tuple[Any, ...]]) -> RowTable:
    tensors = ((key, readable(v) if isinstance(v, np.ndarray) else v, others) for key, v, *others in columns)
    return RowTable(num_rows, {key: Column(values, *others) for key, values, others in tensors})


def in_place(write: Callable[Concatenate[RowTable, P], None]) -> Callable[..., Any]:
    """Decorator of ``write(table, ..)``: it also takes a list or TensorDict of rows, writes to that and returns it.

    ValueError if an entry is written to some rows only, but the TensorDict is dense.
    """

    @wraps(write)
    def written(rows: RowTable | TensorDictBase | Sequence[TensorDictBase], *args: Any, **by_name: Any) -> Any:
        table = RowTable.of(rows)
        known = dict(table.columns)
        write(table, *args, **by_name)
        if table is not rows:
            for key in known | table.columns:
                if (column := table.columns.get(key)) is not known.get(key):
                    _put(rows, key, [None] * len(table) if column is None else table.cells(key))  # type: ignore[arg-type]
        return rows

    return written


def _put(rows: TensorDictBase | Sequence[TensorDictBase], key: Key, values: Sequence[Any]) -> None:
    """Set an entry in each row, or delete it where the value is None."""
    if not isinstance(rows, TensorDictBase):
        for row, value in zip(rows, values, strict=True):
            _put(row, key, [value])
    elif isinstance(rows, LazyStackedTensorDict) and rows.stack_dim == 0:
        ends = accumulate((piece.numel() for piece in rows.tensordicts), initial=0)
        for piece, (start, end) in zip(rows.tensordicts, pairwise(ends)):
            _put(piece, key, values[start:end])
    elif all(value is None for value in values):
        rows.exclude(key, inplace=True)
    elif rows.batch_size == torch.Size([]):
        rows.set(key, values[0] if isinstance(values[0], Tensor) else NonTensorData(values[0]))
    elif any(value is None for value in values):
        raise ValueError(
            f"{_missing(key, sum(value is None for value in values), len(values))}; use a lazy stack, which allows it, "
            "or write it to all rows."
        )
    elif isinstance(values[0], Tensor):
        rows.set(key, torch.stack(list(values)).reshape(*rows.batch_size, *values[0].shape))
    else:
        nested = np.array(list(values), dtype=object).reshape(rows.batch_size).tolist()
        rows.set(key, NonTensorStack.from_list(nested))


def _missing(key: Key, missing: int, count: int) -> str:
    return f"{key} is missing in {missing} of {count} rows"


def row_list(rows: Sequence[Any] | TensorDictBase) -> list[Any]:
    """Return the rows of a batch as a list; writing to rows of a lazy stack modifies the stack."""
    return list(rows.unbind(0)) if isinstance(rows, TensorDictBase) else list(rows)


def _plain_rows(rows: Sequence[Any] | TensorDictBase) -> list[dict[Key, Any]]:
    """Return each row as a dict; a TensorDict with several batch dimensions is flattened."""
    if not isinstance(rows, TensorDictBase):
        return [dict(row if isinstance(row, dict) else _entries(row)) for row in rows]
    if rows.batch_size == torch.Size([]):
        return [dict(_entries(rows))]
    return [plain for row in row_list(rows) for plain in _plain_rows(row)]


def _is_dense(rows: TensorDictBase) -> bool:
    """Return whether the batch has one dimension and every entry is one tensor or list over its rows."""
    lazy = isinstance(rows, LazyStackedTensorDict) and not is_non_tensor(rows)
    children = () if lazy else (value for value in rows.values() if is_tensor_collection(value))
    dense = (is_non_tensor(child) or _is_dense(_plain(child)) for child in children)
    return not lazy and rows.batch_dims == 1 and all(dense)


def _entries(rows: TensorDictBase, path: tuple[str, ...] = ()) -> Iterator[tuple[Key, Any]]:
    """Yield ``(key, value)`` of the tensors and plain values of a row or of dense rows."""
    for name, value in rows.items():
        if is_non_tensor(value):
            yield (*path, name) if path else name, value.tolist()
        elif is_tensor_collection(value):
            yield from _entries(_plain(value), (*path, name))
        elif isinstance(value, Tensor):
            yield (*path, name) if path else name, value


def _plain(rows: Any) -> TensorDictBase:
    """Return the TensorDict inside a TensorClass, which TorchRL's LLM wrappers write."""
    return rows if isinstance(rows, TensorDictBase) else rows._tensordict
