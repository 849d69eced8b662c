"""The replay buffer between collector and learner: a TorchRL ``ReplayBuffer`` whose items are prompt groups."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import ListStorage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.errors import RunFailed
from sota_grpo.rl.table import RowTable
from sota_grpo.text import sentence


class GroupStorage(ListStorage):
    """A storage with one prompt group per index; :meth:`get` raises IndexError for a group that was sampled.

    ``as_table``: :meth:`get` returns one :class:`~sota_grpo.rl.table.RowTable`, else a ``LazyStackedTensorDict``.
    """

    def __init__(self, max_groups: int, *, as_table: bool = False):
        super().__init__(max_groups)
        self.as_table = as_table

    def get(self, index: int | Sequence[int] | slice) -> Any:
        groups = super().get(index.tolist() if isinstance(index, torch.Tensor) else index)
        if groups is None or (not isinstance(groups, RowTable) and None in groups):
            raise IndexError(f"The group at index {index} was sampled and removed; request another index.")
        rows = groups if isinstance(groups, RowTable) else RowTable.cat(groups)
        return rows if self.as_table else rows.stack()

    def __len__(self) -> int:
        """Return the number of groups in the storage."""
        return sum(group is not None for group in self._storage)

    def state_dict(self) -> dict[str, Any]:
        sizes = [0 if group is None else len(group) for group in self._storage]
        return {"sizes": sizes, "rows": RowTable.cat([group for group in self._storage if group]).state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = iter(RowTable.of_state(state_dict["rows"]).split([size for size in state_dict["sizes"] if size]))
        self._storage = [next(groups) if size else None for size in state_dict["sizes"]]


class OldestGroups(Sampler):
    """A sampler that returns each group once: by default oldest admission version first, then first in, first out.

    The default is rule 3 of :func:`sota_grpo.functional.max_groups_admitted`, which bounds the age of a token. The
    groups of a batch are sorted by group id.

    Args:
        sampler: a TorchRL ``Sampler`` that chooses among the finished groups instead. It must return as many different
            indices as requested, such as ``SamplerWithoutReplacement(drop_last=True)``. Each group is still sampled
            once, but the order does not bound the age of a token: the collector only checks it in every batch.

    Attributes:
        versions: {admission version: number of groups that can be sampled}.
        taken: {group id: admission version} of the groups that :meth:`pick` chose last.
    """

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.sampler = sampler
        self._empty()

    def _empty(self) -> None:
        self.versions: Counter[int] = Counter()
        self.taken: dict[int, int] = {}
        self.sampled: list[int] = []  # indices of the last sample
        self._finished: dict[int, tuple[int, int, int]] = {}  # {index: (admission version, arrival, group id)}
        self._arrivals = itertools.count()
        self._picked: list[int] = []

    def __len__(self) -> int:
        return len(self._finished)

    def put(self, index: int, version: int, group_id: int) -> None:
        """Register a finished group: its storage index and its admission version."""
        self._finished[index] = (version, next(self._arrivals), group_id)
        self.versions[version] += 1

    def pick(self, storage: GroupStorage, num_groups: int) -> None:
        """Choose the groups that the next :meth:`sample` returns; a collector calls this under its lock.

        RuntimeError: fewer than ``num_groups`` are finished. RunFailed: ``sampler`` failed, or did not choose as many.
        """
        if num_groups > len(self):
            holds = (
                f"holds {len(self)} finished groups" if len(self) else "is empty: Cannot sample from an empty storage"
            )
            raise RuntimeError(f"{num_groups} groups were requested, but the buffer {holds}; add groups first.")
        oldest = sorted(self._finished, key=self._finished.__getitem__)
        if self.sampler is not None:
            view = GroupStorage(len(oldest))
            view._storage = [storage._storage[index] for index in oldest]
            named = f"The sampler {type(self.sampler).__name__}"
            try:
                chosen = torch.as_tensor(self.sampler.sample(view, num_groups)[0]).flatten().tolist()
            except Exception as error:  # of the user's program
                raise RunFailed(
                    f"{named} failed ({sentence(error).rstrip('.')}); correct the sampler, or use none."
                ) from error
            picked = {index: oldest[int(index)] for index in chosen if index in range(len(oldest))}
            if len(picked) != num_groups or len(chosen) != num_groups:
                wanted = f"return {num_groups} different indices below {len(oldest)}"
                raise RunFailed(f"{named} chose the groups {chosen}; {wanted}.")
            oldest = list(picked.values())
        self._picked = sorted(oldest[:num_groups], key=lambda index: self._finished[index][2])  # by group id
        self.taken = {}
        for index in self._picked:
            version, _, group_id = self._finished.pop(index)
            self.taken[group_id] = version
            self.versions[version] -= 1

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        if not self._picked:
            self.pick(storage, batch_size)
        self.sampled, self._picked = self._picked, []
        return torch.tensor(self.sampled), {}

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        return len(self) // batch_size

    def state_dict(self) -> dict[str, Any]:
        state = {} if self.sampler is None else {"sampler": self.sampler.state_dict()}
        return {"waiting": [[index, *entry] for index, entry in self._finished.items()], **state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._empty()
        if self.sampler is not None and "sampler" in state_dict:
            self.sampler.load_state_dict(state_dict["sampler"])
        for index, version, _, group_id in sorted(state_dict["waiting"], key=lambda entry: entry[2]):
            self.put(index, version, group_id)

    def dumps(self, path: Any) -> None:
        raise NotImplementedError("Save and load the buffer's state_dict() instead.")

    loads = dumps


class GroupWriter(Writer):
    """Writes whole groups to free indices of the storage, and registers each with ``sampler``."""

    def __init__(self, sampler: OldestGroups):
        super().__init__()
        self._sampler, self._write_count = sampler, 0
        #: Maps a group id to its admission version; None: use the version of its oldest token.
        self.admitted: Callable[[int], int | None] | None = None

    def add(self, data: Any) -> int:
        """Write the rows of one group; return its index in the storage. RuntimeError if the storage is full."""
        rows = RowTable.of([data] if isinstance(data, TensorDictBase) and not data.batch_dims else data)
        held: ListStorage = self._storage
        index = next((i for i, group in enumerate(held._storage) if group is None), len(held._storage))
        if index >= held.max_size:
            raise RuntimeError(
                f"The buffer holds {held.max_size} groups and is full; sample some before adding more, or raise "
                "max_groups."
            )
        group_id = int(rows.get(keys.GROUP_ID)[0])
        version = self.admitted(group_id) if self.admitted is not None else None
        if version is None:
            version = int(rows.get(keys.POLICY_VERSION).min())
        held.set(index, rows)
        self._sampler.put(index, version, group_id)
        self._write_count += 1
        return index

    def extend(self, data: Any) -> torch.Tensor:
        """Write several groups, each of consecutive rows with one ``group_id``; return their indices."""
        rows = RowTable.of(data)
        _, sizes = torch.unique_consecutive(rows.get(keys.GROUP_ID).flatten(), return_counts=True)
        return torch.tensor([self.add(group) for group in rows.split(sizes.tolist())])

    def _empty(self, empty_write_count: bool = True) -> None:
        """Reset the count of writes; the storage is emptied by the buffer."""
        self._write_count = 0 if empty_write_count else self._write_count

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """No-op: the writer has no state."""

    def dumps(self, path: Any) -> None:
        raise NotImplementedError("Save and load the buffer's state_dict() instead.")

    loads = dumps


class Timed(Transform):
    """Applies ``transform``; ``seconds`` is the duration of the last call, for the metric ``time/{phase}_s``."""

    def __init__(self, phase: str, transform: Callable[[Any], Any]):
        super().__init__()
        self.phase, self.transform, self.seconds = phase, transform, 0.0

    def forward(self, rows: Any) -> Any:
        began = time.perf_counter()
        rows = self.transform(rows)
        self.seconds = time.perf_counter() - began
        return rows


class GroupReplayBuffer(ReplayBuffer):
    """A replay buffer of whole prompt groups; each group is sampled once, by default the oldest first.

    If a :class:`~sota_grpo.source.collector.PromptGroupCollector` fills it, :meth:`sample` waits until the groups of
    the next batch are finished. Without a collector, add whole groups with ``extend``: consecutive rows of equal
    ``group_id``.

    Args:
        max_groups: number of groups above which ``extend`` raises RuntimeError; a collector needs exactly
            ``(max_policy_age + 1) * num_groups``.
        num_groups: groups per batch.
        transform: transform of each batch, such as :class:`~sota_grpo.rl.transforms.GroupAdvantage`.
        as_table: batches are :class:`~sota_grpo.rl.table.RowTable`; False: ``LazyStackedTensorDict``.
        sampler: chooses the groups of a batch instead of their age; see :class:`OldestGroups`.

    >>> def rows(group_id, version):
    ...     row = {keys.GROUP_ID: torch.tensor(group_id), keys.POLICY_VERSION: torch.tensor([version])}
    ...     return RowTable.of([row, row])
    >>> buffer = GroupReplayBuffer(3, 2, as_table=True)
    >>> for group_id, version in ((7, 1), (5, 0), (4, 0)):
    ...     _ = buffer.extend(rows(group_id, version))
    >>> buffer.sample().get("group_id").tolist(), len(buffer)
    ([4, 4, 5, 5], 1)
    """

    def __init__(
        self,
        max_groups: int,
        num_groups: int,
        *,
        transform: Transform | None = None,
        as_table: bool = False,
        sampler: Sampler | None = None,
    ):
        group_sampler = OldestGroups(sampler)
        super().__init__(
            storage=GroupStorage(max_groups, as_table=as_table),
            sampler=group_sampler,
            writer=GroupWriter(group_sampler),
            transform=transform,
            batch_size=num_groups,
            collate_fn=_as_sampled,
        )
        #: Set by the collector: a wrapper of each sample() that first waits for the groups, then records metrics.
        self.around_sample: Callable[[Callable[[], Any]], Any] | None = None
        #: Set by the collector: returns whether it has collected all of its batches.
        self.is_over: Callable[[], bool] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Yield batches until the collector ends; without a collector, until fewer groups than a batch are left."""
        while not self.is_over() if self.is_over is not None else len(self) >= self.batch_size:
            yield self.sample()

    def seconds(self) -> dict[str, float]:
        """Return {phase: seconds} that the :class:`Timed` transforms took for the last batch."""
        seconds: dict[str, float] = {}
        for transform in self._transform.modules():
            if isinstance(transform, Timed):
                seconds[transform.phase] = seconds.get(transform.phase, 0.0) + transform.seconds
        return seconds

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Remove the next ``batch_size`` groups, return their rows sorted by group id; with a collector, wait for them.

        ``batch_size`` is ``num_groups`` by default; with a collector, another number is a ValueError. ``return_info``:
        return (rows, info). RuntimeError: there are too few groups. Further errors: see
        :meth:`PromptGroupCollector.next_batch`.
        """
        if self.around_sample is not None and batch_size not in (None, self.batch_size):
            raise ValueError(
                f"{batch_size} groups were requested, but the collector's batches have {self.batch_size}; leave "
                "batch_size out."
            )

        def draw() -> Any:
            self.sampler.sampled = []
            try:
                return super(GroupReplayBuffer, self).sample(batch_size, return_info)
            finally:  # the groups are removed even if a transform fails
                for index in self.sampler.sampled:
                    self.storage._storage[index] = None

        return draw() if self.around_sample is None else self.around_sample(draw)

    def set_(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError, like ``set_at_``, ``update_`` and ``write_all``: sampled rows are copies."""
        raise NotImplementedError("Rows sampled from a GroupReplayBuffer are copies; change them in a transform.")

    set_at_ = update_ = write_all = set_


def _as_sampled(rows: Any) -> Any:
    return rows
