"""A TorchRL ``ReplayBuffer`` of prompt groups, and their admission to it by slots, which bounds the age of tokens."""

from __future__ import annotations

import bisect
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import ListStorage
from torchrl.data.replay_buffers.writers import Writer
from torchrl.envs.transforms import Transform

from sota_grpo import keys
from sota_grpo.envs.prompts import PromptStream
from sota_grpo.errors import RunFailed, UserError
from sota_grpo.functional import max_groups_admitted
from sota_grpo.rl.records import Example
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
        return sum(group is not None for group in self._storage)

    def state_dict(self) -> dict[str, Any]:
        sizes = [0 if group is None else len(group) for group in self._storage]
        return {"sizes": sizes, "rows": RowTable.cat([group for group in self._storage if group]).state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = iter(RowTable.of_state(state_dict["rows"]).split([size for size in state_dict["sizes"] if size]))
        self._storage = [next(groups) if size else None for size in state_dict["sizes"]]


def _refuse_files(part: object, path: Any) -> None:
    raise NotImplementedError("Save and load the buffer's state_dict() instead.")


class OldestGroups(Sampler):
    """A sampler that returns each group once: by default oldest admission version first, then first in, first out.

    The default is rule 3 of :func:`sota_grpo.functional.max_groups_admitted`, which bounds the age of a token. The
    groups of a batch are sorted by group id.

    Args:
        sampler: a TorchRL ``Sampler`` that chooses among the finished groups instead. It must return as many different
            indices as requested, such as ``SamplerWithoutReplacement(drop_last=True)``. Each group is still sampled
            once, but the order does not bound the age of a token: the collector only checks it in every batch.

    Attributes:
        taken: {group id: admission version} of the groups that :meth:`pick` chose last.
    """

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.sampler = sampler
        self._empty()

    def _empty(self) -> None:
        self.taken: dict[int, int] = {}
        self.sampled: list[int] = []  # indices of the last sample
        self._finished: dict[int, tuple[int, int, int]] = {}  # {index: (admission version, arrival, group id)}
        self._arrivals = itertools.count()
        self._picked: list[int] = []

    def __len__(self) -> int:
        return len(self._finished)

    @property
    def versions(self) -> Counter[int]:
        """{admission version: number of groups that can be sampled}."""
        return Counter(version for version, *_ in self._finished.values())

    def put(self, index: int, version: int, group_id: int) -> None:
        """Register a finished group: its storage index and its admission version."""
        self._finished[index] = (version, next(self._arrivals), group_id)

    def pick(self, storage: GroupStorage, num_groups: int) -> None:
        """Choose the groups that the next :meth:`sample` returns; a collector calls this under its lock.

        RuntimeError: fewer than ``num_groups`` are finished. RunFailed: ``sampler`` failed, or did not choose as many.
        """
        if num_groups > len(self):
            has = f"holds {len(self)} finished groups" if len(self) else "is empty: Cannot sample from an empty storage"
            raise RuntimeError(f"{num_groups} groups were requested, but the buffer {has}; add groups first.")
        oldest = sorted(self._finished, key=self._finished.__getitem__)
        if self.sampler is not None:
            view = GroupStorage(len(oldest))
            view._storage = [storage._storage[index] for index in oldest]
            named = f"The sampler {type(self.sampler).__name__}"
            try:
                chosen = torch.as_tensor(self.sampler.sample(view, num_groups)[0]).flatten().tolist()
            except Exception as error:  # of the user's program
                reason = sentence(error).rstrip(".")
                raise RunFailed(f"{named} failed ({reason}); correct the sampler, or use none.") from error
            picked = {index: oldest[int(index)] for index in chosen if index in range(len(oldest))}
            if len(picked) != num_groups or len(chosen) != num_groups:
                wanted = f"return {num_groups} different indices below {len(oldest)}"
                raise RunFailed(f"{named} chose the groups {chosen}; {wanted}.")
            oldest = list(picked.values())
        self._picked = sorted(oldest[:num_groups], key=lambda index: self._finished[index][2])  # by group id
        taken = map(self._finished.pop, self._picked)
        self.taken = {group_id: version for version, _, group_id in taken}

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

    dumps = loads = _refuse_files


class GroupWriter(Writer):
    """Writes whole groups to free indices of the storage, and registers each with ``sampler``."""

    def __init__(self, sampler: OldestGroups):
        super().__init__()
        self._sampler, self._write_count = sampler, 0
        #: Maps a group id to its admission version; None: use the version of its oldest token, 0 without versions.
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
            versions = rows.get(keys.POLICY_VERSION)  # TorchRL's rows have none, or one as text: first in, first out
            version = int(versions.min()) if isinstance(versions, torch.Tensor) else 0
        held.set(index, rows)
        self._sampler.put(index, version, group_id)
        self._write_count += 1
        return index

    def extend(self, data: Any) -> torch.Tensor:
        """Write several groups, each of consecutive rows with one ``group_id``; return their indices."""
        rows = RowTable.of(data)
        if not rows.has(keys.GROUP_ID):
            raise KeyError(
                f"the rows have no {keys.GROUP_ID}, equal for the responses of a group; write it to all rows."
            )
        _, sizes = torch.unique_consecutive(rows.get(keys.GROUP_ID).flatten(), return_counts=True)
        return torch.tensor([self.add(group) for group in rows.split(sizes.tolist())])

    def _empty(self, empty_write_count: bool = True) -> None:  # the storage is emptied by the buffer
        self._write_count = 0 if empty_write_count else self._write_count

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """No-op: the writer has no state."""

    dumps = loads = _refuse_files


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


@dataclass(eq=False)
class Group:
    """A prompt group that was drawn and is not yet in a batch."""

    group_id: int
    example: Example
    version: int  # admission version: the policy version of the engines when the prompt was drawn
    step: int  # training step of the draw, from 0
    index: int  # number of the draw in its step, from 0


#: Counters of :class:`Refill` that a checkpoint contains.
_COUNTS = ("step", "num_draws", "num_held", "num_replaced", "_replaced", "_began")


class Refill:
    """Dynamic sampling: keeps a step's zero-advantage groups, and decides when new prompts may replace them.

    In synchronous rounds, round 1 draws one batch of groups, and round ``r + 1`` replaces the zero-advantage groups of
    round ``r``. After ``max_draws`` rounds, the zero-advantage groups drawn last complete the batch. Here groups are
    graded in any order, and a new prompt is drawn as soon as it is certain that the rounds would draw it. With ``B_r``
    the number of draws of the first ``r`` rounds::

        B_1 = draws that began the step,   B_{r+1} = B_1 + (zero-advantage groups among the first B_r draws of the step)

    ``B_r`` never decreases when another outcome becomes known. So every draw below ``B_{max_draws}``, computed from the
    known outcomes, is one that the rounds make, too; once all outcomes are known, both have made the same draws. Each
    zero-advantage group that was drawn in an earlier step adds 1 to ``B_1``. No step replaces more than
    ``(max_draws - 1) * num_groups`` groups.

    The ``num_held`` zero-advantage groups drawn last hold a slot; the others have been replaced. Call
    :meth:`begin_draw` for each prompt drawn for a free slot, and :meth:`replace` only while :meth:`may_draw` is True.

    Args:
        num_groups: groups per batch.
        slots: most zero-advantage groups, replaced ones included, that :meth:`replace` keeps.
        max_draws: largest number of rounds per step.

    >>> refill = Refill(num_groups=2, slots=2, max_draws=2)
    >>> refill.start_step()
    >>> [refill.begin_draw(), refill.begin_draw()]
    [(1, 0), (1, 1)]
    >>> refill.add(Group(1, None, 0, 1, 1), []), refill.may_draw(), refill.replace()
    (None, True, (1, 2))
    >>> refill.add(Group(2, None, 0, 1, 2), []), refill.may_draw()       # of round 2, and there is no third
    (None, False)
    >>> [group.group_id for group, _ in refill.settle()]
    [2]
    """

    def __init__(self, *, num_groups: int, slots: int, max_draws: int):
        self.num_groups, self.slots, self.max_draws = num_groups, slots, max_draws
        self.step = -1
        self.num_held = 0
        self.num_replaced = 0  # since the last batch, a metric
        self._pool: list[tuple[Group, RowTable]] = []  # the step's zero-advantage groups, by group id
        self.start_step()

    def start_step(self) -> None:
        """Start a new training step: reset the step's counts, keep the zero-advantage groups that hold a slot."""
        self._pool = self._pool[len(self._pool) - self.num_held :]
        self.step += 1
        self.num_draws = self._replaced = 0  # in this step
        self._began = self.num_held  # groups held from an earlier step count in round 1
        self._zero_draws: list[int] = []  # indexes of this step's draws of zero-advantage groups, ascending

    def begin_draw(self) -> tuple[int, int]:
        """Count the draw of a prompt for a free slot; return the step and the draw's index in it, both from 0."""
        self._began += 1
        self.num_draws += 1
        return self.step, self.num_draws - 1

    def add(self, group: Group, rows: RowTable) -> None:
        """Add a zero-advantage group and its rows; one more slot is held, always by the added groups drawn last."""
        bisect.insort(self._pool, (group, rows), key=lambda entry: entry[0].group_id)
        self.num_held += 1
        if group.step == self.step:
            bisect.insort(self._zero_draws, group.index)
        else:
            self._began += 1

    def may_draw(self) -> bool:
        """Return whether a new prompt may replace a zero-advantage group now."""
        if not self.num_held or self._replaced >= (self.max_draws - 1) * self.num_groups:
            return False
        limit = self._began  # of the draws: B_r of the known outcomes, for r = 1, 2, .. max_draws
        for _ in range(self.max_draws - 1):
            following = self._began + bisect.bisect_left(self._zero_draws, limit)
            if following == limit:
                break
            limit = following
        return self.num_draws < limit

    def replace(self) -> tuple[int, int]:
        """Free the slot of the oldest held group for a new prompt: count the draw, return its step and index.

        Call it only while :meth:`may_draw` is True.
        """
        self.num_held -= 1
        self.num_replaced += 1
        self._replaced += 1
        del self._pool[: max(0, len(self._pool) - self.slots)]  # no batch needs more
        self.num_draws += 1
        return self.step, self.num_draws - 1

    def settle(self) -> list[tuple[Group, RowTable]]:
        """Return the zero-advantage groups that hold a slot, to complete the batch; remove all groups."""
        remaining = self._pool[len(self._pool) - self.num_held :]
        self._pool, self.num_held = [], 0
        return remaining

    def held_versions(self) -> Counter[int]:
        """Return {admission version: number of zero-advantage groups that hold a slot}."""
        return Counter(group.version for group, _ in self._pool[len(self._pool) - self.num_held :])

    def state_dict(self) -> dict[str, Any]:
        """Return the step's counts and the zero-advantage groups, as tensors and plain values."""
        return {
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "zero_draws": list(self._zero_draws),
            "pool": [[g.group_id, g.version, g.step, g.index, len(rows)] for g, rows in self._pool],
            "rows": RowTable.cat([rows for _, rows in self._pool]).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], example_of: Callable[[int], Example]) -> None:
        """Restore ``state``; ``example_of`` returns the example of a group id."""
        for name in _COUNTS:
            setattr(self, name, state["counts"][name])
        self._zero_draws = list(state["zero_draws"])
        tables = RowTable.of_state(state["rows"]).split([count for *_, count in state["pool"]])
        self._pool = [
            (Group(group_id, example_of(group_id), *draw), rows)
            for (group_id, *draw, _), rows in zip(state["pool"], tables, strict=True)
        ]


def oldest_are_finished(num_groups: int, admitted: Mapping[int, int], finished: Mapping[int, int]) -> bool:
    """Return whether the ``num_groups`` groups of the oldest admission versions are finished; False if there are fewer.

    This is rule 3 of the age bound (:func:`sota_grpo.functional.max_groups_admitted`).

    Args:
        admitted: {admission version: groups that hold a slot and are not in the current batch}.
        finished: {admission version: finished groups among these}.

    >>> oldest_are_finished(2, {0: 1, 1: 3}, {1: 3}), oldest_are_finished(2, {0: 1, 1: 3}, {0: 1, 1: 1})
    (False, True)
    """
    missing = num_groups
    for version in sorted(version for version, count in admitted.items() if count):
        if finished.get(version, 0) < min(missing, admitted[version]):
            return False
        missing -= admitted[version]
        if missing <= 0:
            return True
    return False


def require_age(rows: RowTable, version: int, max_policy_age: int, sampler: object = None) -> None:
    """Raise RuntimeError if a token is more than ``max_policy_age`` versions older than ``version``, or all are newer.

    ``sampler`` is the user's sampler, if it chose the groups: then RunFailed is raised.
    """
    versions = rows.get(keys.POLICY_VERSION)
    oldest = int(versions.where(versions != -1, version).min())  # -1: an agent that made no request
    if not 0 <= version - oldest <= max_policy_age:
        fault = (
            f"The batch's oldest token is of policy version {oldest} in training at version {version}; the difference "
            f"must be 0 to max_policy_age={max_policy_age}."
        )
        if sampler is None:
            raise RuntimeError(fault)
        raise RunFailed(
            f"{fault} The sampler {type(sampler).__name__} took that group too late: make it take old groups first."
        )


class Slots:
    """The slots of prompt groups, each held from the draw of a prompt to the end of its training step.

    A slot is held by a group that is in flight (``in_flight``), finished (in ``buffer``), of zero advantage and not
    replaced (in ``refill``), or in the batch of :meth:`take` until :meth:`release`. It has no thread and no clock, and
    is not thread-safe.

    Args:
        buffer: holds finished groups; its size is the number of slots.
        num_groups: groups per batch; ValueError if below 1.
        max_policy_age: there are ``(max_policy_age + 1) * num_groups`` slots; ValueError if negative.
        version: returns the current policy version, at which a group is admitted.
        max_draws: see :class:`Refill`.
    """

    def __init__(
        self,
        stream: PromptStream,
        buffer: GroupReplayBuffer,
        *,
        num_groups: int,
        max_policy_age: int,
        version: Callable[[], int],
        max_draws: int,
    ):
        self.num_groups, self.max_policy_age = num_groups, max_policy_age
        self.count = max_groups_admitted(max_policy_age, num_groups)
        self.buffer, self._finished = buffer, buffer.sampler
        buffer.writer.admitted = lambda group_id: getattr(self.in_flight.get(group_id), "version", None)
        self.refill = Refill(num_groups=num_groups, slots=self.count, max_draws=max_draws)
        self.in_flight: dict[int, Group] = {}
        self._stream, self._version = stream, version
        self.num_taken = 0

    def fill(self) -> list[Group]:
        """Draw a prompt for each free slot and for each group that ``refill`` replaces; return the new groups."""
        free = self.count - len(self.in_flight) - len(self._finished) - self.refill.num_held - self.num_taken
        fresh = []
        while free > 0 or self.refill.may_draw():
            step, index = self.refill.begin_draw() if free > 0 else self.refill.replace()
            free -= 1
            ((group_id, example),) = self._stream.draw(1)
            self.in_flight[group_id] = Group(group_id, example, self._version(), step, index)
            fresh.append(self.in_flight[group_id])
        return fresh

    def discard(self, group: Group, rows: RowTable) -> list[Group]:
        """Move a zero-advantage group from ``in_flight`` to ``refill``; return replacements drawn, perhaps none."""
        del self.in_flight[group.group_id]
        self.refill.add(group, rows)
        return self.fill()  # no slot is free

    def finish(self, group: Group, rows: RowTable) -> None:
        """Move a finished group from ``in_flight`` to the buffer."""
        self.buffer.add(rows)
        del self.in_flight[group.group_id]

    def _oldest_are(self, finished: Counter[int], others: Counter[int]) -> bool:
        """Return whether the groups admitted first are ``finished``, of these, ``others`` and those in flight."""
        in_flight = Counter(group.version for group in self.in_flight.values())
        return oldest_are_finished(self.num_groups, in_flight + finished + others, finished)

    def batch_is_ready(self) -> bool:
        """Return whether the groups of the next batch are finished."""
        if self._finished.sampler is not None:
            return len(self._finished) >= self.num_groups
        return self._oldest_are(self._finished.versions, self.refill.held_versions())

    def settle(self) -> list[tuple[Group, RowTable]]:
        """If zero-advantage groups complete the next batch, move all held ones to ``in_flight`` and return them.

        Call it only if :meth:`batch_is_ready` is False and ``refill`` holds groups.
        """
        done = self._finished.versions + self.refill.held_versions()
        if self.in_flight if self._finished.sampler is not None else not self._oldest_are(done, Counter()):
            return []
        settled = self.refill.settle()
        self.in_flight |= {group.group_id: group for group, _ in settled}
        return settled

    def take(self) -> None:
        """Choose the groups of the buffer's next sample(), once the batch is ready; RunFailed if the sampler fails."""
        self._finished.pick(self.buffer.storage, self.num_groups)
        self.num_taken = self.num_groups

    def take_back(self) -> list[Group]:
        """Put the groups of the batch in flight again, after a transform failed; return them, to be sampled again."""
        self.num_taken = 0
        again = {  # as drawn by an earlier step: a zero-advantage one counts in round 1
            group_id: Group(group_id, self._stream.example_of(group_id), version, self.refill.step - 1, 0)
            for group_id, version in sorted(self._finished.taken.items())
        }
        self.in_flight |= again
        return list(again.values())

    def release(self) -> list[Group]:
        """Free the slots of the current batch and start a new step; return newly drawn groups for all free slots."""
        self.num_taken = 0
        self.refill.start_step()
        return self.fill()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompt stream, the ids of groups in flight, and the rows of finished groups."""
        return {
            "num_groups": self.num_groups,
            "max_policy_age": self.max_policy_age,
            "stream": self._stream.state_dict(),
            "in_flight": [[g.group_id, g.version, g.step, g.index] for g in self.in_flight.values()],
            "finished": [self.buffer.storage.state_dict(), self._finished.state_dict()],
            "refill": self.refill.state_dict(),
            "released": self.num_taken == 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore ``state``; a batch that was taken counts as trained and released.

        UserError: the saved batch size differs or ``max_policy_age`` is larger. ValueError: another prompt stream.
        """
        saved = (state["num_groups"], state["max_policy_age"])
        if saved[0] != self.num_groups or saved[1] > self.max_policy_age:
            raise UserError(
                f"the saved run has {saved[0]} groups per batch and train.max_policy_age={saved[1]}, but this one has "
                f"{self.num_groups} and {self.max_policy_age}; resume with the same values."
            )
        self._stream.load_state_dict(state["stream"])
        self.in_flight = {
            group_id: Group(group_id, self._stream.example_of(group_id), *draw)
            for group_id, *draw in sorted(state["in_flight"])
        }
        for target, saved in zip((self.buffer.storage, self._finished), state["finished"], strict=True):
            target.load_state_dict(saved)
        self.refill.load_state_dict(state["refill"], self._stream.example_of)
        if not state["released"]:
            self.refill.start_step()
