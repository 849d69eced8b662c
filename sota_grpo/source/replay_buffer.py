"""The replay buffer between the collector and the learner: TorchRL's, with an item for each prompt group."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import ListStorage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.rl.table import RowTable


class GroupStorage(ListStorage):
    """Items are whole prompt groups, each a :class:`~sota_grpo.rl.table.RowTable`; an item that was taken is None.

    Args:
        max_groups: most groups held.
        as_table: what :meth:`get` gives: the groups' rows as one table, for our learner; else as a
            ``LazyStackedTensorDict`` with a row per response.
    """

    def __init__(self, max_groups: int, *, as_table: bool = False):
        super().__init__(max_groups)
        self.as_table = as_table

    def get(self, index: int | Sequence[int] | slice) -> Any:
        groups = super().get(index.tolist() if isinstance(index, torch.Tensor) else index)
        if groups is None:
            raise IndexError(f"The group at {index} was taken.")
        rows = groups if isinstance(groups, RowTable) else RowTable.cat(groups)
        return rows if self.as_table else rows.stack()

    def __len__(self) -> int:
        """Groups that wait."""
        return sum(one is not None for one in self._storage)

    def free(self, index: Sequence[int]) -> None:
        """Forget the groups at ``index``."""
        for one in index:
            self._storage[one] = None

    def state_dict(self) -> dict[str, Any]:
        held = [one for one in self._storage if one is not None]
        sizes = [0 if one is None else len(one) for one in self._storage]
        return {"sizes": sizes, "rows": RowTable.cat(held).state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = iter(RowTable.of_state(state_dict["rows"]).split([size for size in state_dict["sizes"] if size]))
        self._storage = [next(groups) if size else None for size in state_dict["sizes"]]


class OldestGroups(Sampler):
    """Each group once: the oldest admission version first, then first in, first out.

    That is rule 3 of :func:`sota_grpo.functional.max_groups_admitted`, which bounds the age of a token.

    Attributes:
        versions: number of groups that wait, by admission version.
        taken: the admission version of each group that was sampled last, by group id.
    """

    def __init__(self) -> None:
        self.versions: Counter[int] = Counter()
        self.taken: dict[int, int] = {}
        self._waiting: dict[int, tuple[int, int, int]] = {}  # by index: admission version, arrival, group id
        self._arrivals = itertools.count()
        self._picked: list[int] = []
        self.sampled: list[int] = []  # what the last sample() gave

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, index: int, version: int, group_id: int) -> None:
        """The group at ``index`` of the storage waits."""
        self._waiting[index] = (version, next(self._arrivals), group_id)
        self.versions[version] += 1

    def pick(self, num_groups: int) -> None:
        """Choose what the next :meth:`sample` gives; a collector does it under the lock of their arrival.

        Raises:
            RuntimeError: fewer groups wait.
        """
        if num_groups > len(self):
            raise RuntimeError(f"{num_groups} finished groups were requested and the buffer holds {len(self)}.")
        oldest = sorted(self._waiting, key=self._waiting.__getitem__)[:num_groups]
        self._picked = sorted(oldest, key=lambda index: self._waiting[index][2])  # in the order drawn
        self.taken = {}
        for index in self._picked:
            version, _, group_id = self._waiting.pop(index)
            self.taken[group_id] = version
            self.versions[version] -= 1

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        if not self._picked:
            self.pick(batch_size)
        if len(self._picked) != batch_size:
            raise ValueError(
                f"{batch_size} groups were requested, and the collector's batches have {len(self._picked)}."
            )
        self.sampled, self._picked = self._picked, []
        return torch.tensor(self.sampled), {}

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        return len(self) // batch_size

    def _empty(self) -> None:
        self.__init__()  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        return {"waiting": [[index, *waits] for index, waits in self._waiting.items()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._empty()
        for index, version, _, group_id in sorted(state_dict["waiting"], key=lambda waits: waits[2]):
            self.put(index, version, group_id)

    def dumps(self, path: Any) -> None:
        raise NotImplementedError("Save the buffer's state_dict().")

    loads = dumps


class GroupWriter(Writer):
    """Puts whole groups where no other waits.

    Raises:
        RuntimeError: on writing, the buffer is full, or a group has come that is not whole.
    """

    def __init__(self, sampler: OldestGroups, admitted: Callable[[int], int | None]):
        super().__init__()
        self._sampler, self._admitted, self._write_count = sampler, admitted, 0

    def add(self, data: Any) -> int:
        """One group."""
        rows = data if isinstance(data, RowTable) else RowTable.of(data)
        held: ListStorage = self._storage
        index = next((i for i, one in enumerate(held._storage) if one is None), len(held._storage))
        if index >= held.max_size:
            raise RuntimeError(
                f"All {held.max_size} places of the buffer hold a group that was not taken; take some, or give it more "
                "places."
            )
        group_id = int(rows.get(keys.GROUP_ID)[0])
        version = self._admitted(group_id)
        if version is None:
            version = int(rows.get(keys.POLICY_VERSION).min())
        held.set(index, rows)
        self._sampler.put(index, version, group_id)
        self._write_count += 1
        return index

    def extend(self, data: Any) -> torch.Tensor:
        """Groups whose rows follow each other."""
        rows = data if isinstance(data, RowTable) else RowTable.of(data)
        _, sizes = torch.unique_consecutive(rows.get(keys.GROUP_ID).flatten(), return_counts=True)
        return torch.tensor([self.add(group) for group in rows.split(sizes.tolist())])

    def _empty(self, empty_write_count: bool = True) -> None:
        """The storage is emptied with the buffer."""
        self._write_count = 0 if empty_write_count else self._write_count

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """There is none."""

    def dumps(self, path: Any) -> None:
        raise NotImplementedError("Save the buffer's state_dict().")

    loads = dumps


class Timed(Transform):
    """``transform``, and in ``seconds`` how long it took last: for the metric ``time/{phase}_s``."""

    def __init__(self, phase: str, transform: Callable[[Any], Any]):
        super().__init__()
        self.phase, self.transform, self.seconds = phase, transform, 0.0

    def forward(self, rows: Any) -> Any:
        began = time.perf_counter()
        rows = self.transform(rows)
        self.seconds = time.perf_counter() - began
        return rows


class GroupReplayBuffer(ReplayBuffer):
    """TorchRL's replay buffer of whole prompt groups, each trained on once, the oldest first.

    A :class:`~sota_grpo.source.collector.PromptGroupCollector` fills it; :meth:`sample` then waits for the groups that
    are due. By itself it is a plain buffer: ``extend`` takes rows whose ``group_id`` tells whole groups apart.

    Args:
        max_groups: most groups held; a collector needs ``(max_policy_age + 1) * num_groups``.
        num_groups: groups per batch.
        transform: of a sampled batch, such as :class:`~sota_grpo.rl.transforms.GroupAdvantage`.
        as_table: batches are :class:`~sota_grpo.rl.table.RowTable`, not ``LazyStackedTensorDict``.

    >>> def rows(group_id, version):
    ...     row = {keys.GROUP_ID: torch.tensor(group_id), keys.POLICY_VERSION: torch.tensor([version])}
    ...     return RowTable.of([row, row])
    >>> buffer = GroupReplayBuffer(3, 2, as_table=True)
    >>> for group_id, version in ((7, 1), (5, 0), (4, 0)):
    ...     _ = buffer.extend(rows(group_id, version))
    >>> buffer.sample().get("group_id").tolist(), buffer.num_waiting
    ([4, 4, 5, 5], 1)
    """

    def __init__(self, max_groups: int, num_groups: int, *, transform: Transform | None = None, as_table: bool = False):
        sampler = OldestGroups()
        super().__init__(
            storage=GroupStorage(max_groups, as_table=as_table),
            sampler=sampler,
            writer=GroupWriter(sampler, lambda group_id: self.admitted(group_id)),
            transform=transform,
            batch_size=num_groups,
            collate_fn=lambda rows: rows,
        )
        #: The version under which a group was admitted; None: that of its oldest token.
        self.admitted: Callable[[int], int | None] = lambda group_id: None
        #: Called with the draw of a batch: a collector waits before it, and counts.
        self.around_sample: Callable[[Callable[[], Any]], Any] = lambda draw: draw()
        #: Whether iterating ends.
        self.is_over: Callable[[], bool] = lambda: False

    def __iter__(self) -> Iterator[Any]:
        """Batches, until the collector that fills it has given as many as it was made for."""
        while not self.is_over():
            yield self.sample()

    @property
    def num_waiting(self) -> int:
        """Groups that can be sampled."""
        return len(self.sampler)

    def seconds(self) -> dict[str, float]:
        """What its :class:`Timed` transforms took for the last batch, by phase."""
        seconds: dict[str, float] = {}
        for one in self._transform.modules():
            if isinstance(one, Timed):
                seconds[one.phase] = seconds.get(one.phase, 0.0) + one.seconds
        return seconds

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """The next ``num_groups`` groups, ordered by group id; with a collector, once all of them are finished.

        Raises:
            RuntimeError: without a collector, fewer groups wait.
        """

        def draw() -> Any:
            try:
                return super(GroupReplayBuffer, self).sample(batch_size, return_info)
            finally:  # whatever a transform thinks of them, they were taken
                self.storage.free(self.sampler.sampled)

        return self.around_sample(draw)
