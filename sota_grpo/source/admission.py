"""Which groups are admitted and which are due, so that no token is too old; without threads or clocks.

Finished groups wait for the learner in a TorchRL replay buffer that loses and repeats none of them.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.writers import Writer

from sota_grpo import keys
from sota_grpo.envs.task_env import PromptStream
from sota_grpo.errors import UserError
from sota_grpo.functional import max_groups_admitted
from sota_grpo.rl.records import Example
from sota_grpo.workers.packing import pack_rows, unpack_rows

Rows = list[TensorDictBase]
ROWS, ADMISSION_VERSION = "rows", "admission_version"  # entries of an item of the buffer
_FILE = "groups.pt"


@dataclass(eq=False)
class Group:
    """One drawn prompt on its way to a batch.

    Args:
        group_id, example: what was drawn.
        version: the version that the engines served when it was admitted.
        turn, index: it was the ``index``-th draw of turn ``turn``.
    """

    group_id: int
    example: Example
    version: int
    turn: int
    index: int


class Refill:
    """The flat groups of a turn (all rewards equal), and whether a fresh prompt may take the place of one.

    In lockstep, round 1 of a turn has as many groups as the batch, round ``r + 1`` as many as round ``r`` had flat
    ones, and there are at most ``max_draws`` rounds; then the flat groups drawn last complete the batch. Here outcomes
    arrive in any order and a fresh prompt is drawn as soon as it is certain that the rounds would have drawn it. With
    ``B_r`` the number of draws of the first ``r`` rounds::

        B_1 = draws that began the turn,   B_{r+1} = B_1 + (flat groups among the first B_r draws of the turn)

    ``B_r`` grows with every flat group that becomes known and falls with none, so a draw below ``B_{max_draws}`` is
    one that the rounds make too; when all outcomes are known the two are equal. A flat group of an earlier turn adds
    one to ``B_1``, and no turn replaces more than ``(max_draws - 1) * num_groups`` groups.

    Of the turn's flat groups the ``num_held`` drawn last still hold a slot: nothing replaced them yet.

    Args:
        num_groups: groups per batch.
        slots: most groups that may hold one.
        max_draws: rounds.

    >>> refill = Refill(num_groups=2, slots=2, max_draws=2)
    >>> refill.start_turn()
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
        self.turn = 0
        self.num_held = 0
        self.num_replaced = 0  # since the last batch, for the metrics
        self._pool: list[tuple[Group, list[TensorDictBase]]] = []  # the turn's flat groups in the order drawn
        self._clear_turn()

    def _clear_turn(self) -> None:
        self._draws = self._replaced = 0
        self._began = self.num_held  # what an earlier turn left over counts to round 1
        self._flat: list[int] = []  # indexes of this turn's draws that came out flat, ascending

    def start_turn(self) -> None:
        """Slots were freed: a new count of draws begins; flat groups that were replaced are gone for good."""
        self._pool = self._pool[len(self._pool) - self.num_held :]
        self.turn += 1
        self._clear_turn()

    def begin_draw(self) -> tuple[int, int]:
        """Count a draw for a free slot; its ``(turn, index)``."""
        self._began += 1
        return self._count_draw()

    def add(self, group: Group, rows: list[TensorDictBase]) -> None:
        """``group`` came out flat; it holds its slot until it is replaced."""
        bisect.insort(self._pool, (group, rows), key=lambda entry: entry[0].group_id)
        self.num_held += 1
        if group.turn == self.turn:
            bisect.insort(self._flat, group.index)
        else:
            self._began += 1

    def may_draw(self) -> bool:
        """Whether a fresh prompt may replace a flat group now."""
        spent = self._replaced >= (self.max_draws - 1) * self.num_groups
        return self.num_held > 0 and not spent and self._draws < self._limit()

    def replace(self) -> tuple[int, int]:
        """Count the draw of a fresh prompt in place of a flat group; its ``(turn, index)``."""
        self.num_held -= 1
        self.num_replaced += 1
        self._replaced += 1
        del self._pool[: max(0, len(self._pool) - self.slots)]  # more than these never complete a batch
        return self._count_draw()

    def settle(self) -> list[tuple[Group, list[TensorDictBase]]]:
        """The flat groups that stay, because the batch needs them now: those drawn last."""
        kept = self._pool[len(self._pool) - self.num_held :]
        self._pool, self.num_held = [], 0
        return kept

    def held_versions(self) -> Counter[int]:
        """Flat groups that hold a slot, by admission version."""
        return Counter(group.version for group, _ in self._pool[len(self._pool) - self.num_held :])

    @property
    def num_draws(self) -> int:
        """Draws of this turn."""
        return self._draws

    def _count_draw(self) -> tuple[int, int]:
        self._draws += 1
        return self.turn, self._draws - 1

    def _limit(self) -> int:
        """``B_{max_draws}`` by what is known."""
        limit = self._began
        for _ in range(self.max_draws - 1):
            following = self._began + bisect.bisect_left(self._flat, limit)
            if following == limit:
                break
            limit = following
        return limit

    def state_dict(self) -> dict[str, Any]:
        """The turn's counts and its flat groups, as tensors and plain values."""
        counts = ("turn", "num_held", "num_replaced", "_draws", "_replaced", "_began")
        return {
            "counts": {name: getattr(self, name) for name in counts},
            "flat": list(self._flat),
            "pool": [[g.group_id, g.version, g.turn, g.index, len(rows)] for g, rows in self._pool],
            "rows": pack_rows([row for _, rows in self._pool for row in rows]),
        }

    def load_state_dict(self, state: Mapping[str, Any], example_of: Callable[[int], Example]) -> None:
        """Go on where ``state`` was taken; ``example_of`` looks up a group's example."""
        for name, value in state["counts"].items():
            setattr(self, name, value)
        self._flat = list(state["flat"])
        rows = iter(unpack_rows(state["rows"]))
        self._pool = [
            (Group(group_id, example_of(group_id), *place), [next(rows) for _ in range(count)])
            for group_id, *place, count in state["pool"]
        ]


class _Stateless:
    """What a replay buffer asks of its parts when it is saved; all is rebuilt, see :meth:`GroupBuffer.state_dict`."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def dumps(self, path: Any) -> None: ...

    def loads(self, path: Any) -> None: ...


class FreePlaceWriter(_Stateless, Writer):
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


class OldestFirstSampler(_Stateless, Sampler):
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


def oldest_are_finished(num_groups: int, admitted: Mapping[int, int], finished: Mapping[int, int]) -> bool:
    """Whether the ``num_groups`` oldest admitted groups are finished (rule 3; within one version the order is free).

    Args:
        num_groups: groups per batch.
        admitted: groups that hold a slot and were not given out, by admission version.
        finished: those of them that are finished.

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


class Slots:
    """The groups between the draw of their prompt and the end of their turn; not thread-safe.

    A slot is held by a group in flight (``in_flight``), finished (in ``buffer``), flat and not replaced (in
    ``refill``), or given out by :meth:`take` and not yet freed by :meth:`release`.

    Args:
        stream: prompts.
        num_groups: groups per batch.
        max_policy_age: slots are ``(max_policy_age + 1) * num_groups``.
        version: the version under which a group is admitted.
        max_draws: of :class:`Refill`.

    Raises:
        ValueError: an age below 0, or no group per batch.
    """

    def __init__(
        self,
        stream: PromptStream,
        *,
        num_groups: int,
        max_policy_age: int,
        version: Callable[[], int],
        max_draws: int,
    ):
        self.num_groups, self.max_policy_age = num_groups, max_policy_age
        self.count = max_groups_admitted(max_policy_age, num_groups)
        self.buffer = GroupBuffer(self.count)
        self.refill = Refill(num_groups=num_groups, slots=self.count, max_draws=max_draws)
        self.in_flight: dict[int, Group] = {}
        self._in_flight_versions: Counter[int] = Counter()
        self._stream, self._version = stream, version
        self._given_out = 0

    def fill(self) -> list[Group]:
        """New groups for all free slots, and in place of flat groups as far as the turn allows."""
        held = len(self.in_flight) + len(self.buffer) + self.refill.num_held + self._given_out
        return [self._admit(*self.refill.begin_draw()) for _ in range(self.count - held)] + self._replace()

    def flat(self, group: Group, rows: Rows) -> list[Group]:
        """``group`` has no signal; the fresh groups that replace it or others."""
        self._land(group)
        self.refill.add(group, rows)
        return self._replace()

    def finish(self, group: Group, rows: Rows) -> None:
        """``group`` is finished and waits in the buffer."""
        self._land(group)
        self.buffer.add_group(rows, version=group.version)

    def batch_is_ready(self) -> bool:
        """Whether the groups that the next batch must have are finished."""
        admitted = self._in_flight_versions + self.buffer.versions + self.refill.held_versions()
        return oldest_are_finished(self.num_groups, admitted, self.buffer.versions)

    def settle(self) -> list[tuple[Group, Rows]]:
        """The flat groups that stay, if the next batch waits for nothing else; they are in flight again."""
        held = self.refill.held_versions()
        done = self.buffer.versions + held
        if not held or not oldest_are_finished(self.num_groups, self._in_flight_versions + done, done):
            return []
        kept = self.refill.settle()
        for group, _ in kept:
            self._launch(group)
        return kept

    def take(self) -> TensorDictBase:
        """Give out the next batch, which is ready.

        Raises:
            RuntimeError: the batch before was not released.
        """
        self.require_released()
        rows = self.buffer.take(self.num_groups)
        self._given_out = self.num_groups
        return rows

    def require_released(self) -> None:
        """Raise RuntimeError while a batch is given out: its slots are held, so the next one might never stand."""
        if self._given_out:
            raise RuntimeError("a batch was asked for before the last one was released; release it after the publish.")

    def release(self) -> list[Group]:
        """The slots of the batch given out are free and the engines serve its weights; the groups that get them."""
        self._given_out = 0
        self.refill.start_turn()
        return self.fill()

    def _replace(self) -> list[Group]:
        fresh = []
        while self.refill.may_draw():
            fresh.append(self._admit(*self.refill.replace()))
        return fresh

    def _admit(self, turn: int, index: int) -> Group:
        ((group_id, example),) = self._stream.draw(1)
        return self._launch(Group(group_id, example, self._version(), turn, index))

    def _launch(self, group: Group) -> Group:
        self.in_flight[group.group_id] = group
        self._in_flight_versions[group.version] += 1
        return group

    def _land(self, group: Group) -> None:
        del self.in_flight[group.group_id]
        self._in_flight_versions[group.version] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Position in the prompts, groups in flight by id, finished groups with their rows."""
        return {
            "num_groups": self.num_groups,
            "max_policy_age": self.max_policy_age,
            "stream": self._stream.state_dict(),
            "in_flight": [[g.group_id, g.version, g.turn, g.index] for g in self.in_flight.values()],
            "finished": self.buffer.state_dict(),
            "refill": self.refill.state_dict(),
            "released": self._given_out == 0,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken; a batch that was given out counts as trained and released.

        A state without groups, as lockstep used to save, is a position in the prompts.

        Raises:
            UserError: the state is of another batch size, or of a larger ``max_policy_age``: its groups would
                become older than these slots allow.
        """
        if "in_flight" not in state:
            self._stream.load_state_dict(state["stream"])
            return
        saved = (state["num_groups"], state["max_policy_age"])
        if saved[0] != self.num_groups or saved[1] > self.max_policy_age:
            raise UserError(
                f"the saved run has {saved[0]} groups per batch and train.max_policy_age={saved[1]}, this one "
                f"{self.num_groups} and {self.max_policy_age}; resume with the same."
            )
        self._stream.load_state_dict(state["stream"])
        self.in_flight, self._in_flight_versions = {}, Counter()
        for group_id, *place in sorted(state["in_flight"]):
            self._launch(Group(group_id, self._stream.example_of(group_id), *place))
        self.buffer.load_state_dict(state["finished"])
        self.refill.load_state_dict(state["refill"], self._stream.example_of)
        if not state["released"]:
            self.refill.start_turn()
