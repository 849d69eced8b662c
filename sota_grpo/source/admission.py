"""Admission of prompt groups, so that no token of a batch is too old; without threads or clocks."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sota_grpo import keys
from sota_grpo.envs.prompts import PromptStream
from sota_grpo.errors import UserError
from sota_grpo.functional import max_groups_admitted, zero_advantage_mask
from sota_grpo.rl.collate import graded_rows
from sota_grpo.rl.records import Example
from sota_grpo.rl.table import RowTable
from sota_grpo.source.replay_buffer import GroupReplayBuffer

#: What a checkpoint keeps of a :class:`Refill`.
_COUNTS = ("step", "num_draws", "num_held", "num_replaced", "_replaced", "_began")


@dataclass(eq=False)
class Group:
    """A prompt group between its draw and its batch.

    Args:
        group_id, example: the prompt.
        version: the version that the engines served at its admission.
        step, index: the group is the ``index``-th draw of training step ``step``.
    """

    group_id: int
    example: Example
    version: int
    step: int
    index: int


class Refill:
    """Dynamic sampling: the zero-advantage groups of a training step, and whether fresh prompts may replace them.

    Synchronous, round 1 of a step has as many groups as the batch, round ``r + 1`` as many as round ``r`` had
    zero-advantage ones, and there are at most ``max_draws`` rounds; then those of them that were drawn last complete
    the batch. Here outcomes arrive in any order and a fresh prompt is drawn as soon as it is certain that the rounds
    would have drawn it. With ``B_r`` the number of draws of the first ``r`` rounds::

        B_1 = draws that began the step,   B_{r+1} = B_1 + (zero-advantage groups among the first B_r draws of the step)

    ``B_r`` grows with every such group that becomes known and falls with none, so a draw below ``B_{max_draws}`` is one
    that the rounds make too; when all outcomes are known the two are equal. One of an earlier step adds one to ``B_1``,
    and no step replaces more than ``(max_draws - 1) * num_groups`` groups.

    Of the step's zero-advantage groups the ``num_held`` drawn last still hold a slot: nothing replaced them yet.

    Args:
        num_groups: groups per batch.
        slots: most groups that may hold one.
        max_draws: rounds.

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
        self.num_replaced = 0  # since the last batch, for the metrics
        self._pool: list[tuple[Group, RowTable]] = []  # the step's zero-advantage groups in the order drawn
        self.start_step()

    def start_step(self) -> None:
        """Slots were freed: a new count of draws begins; zero-advantage groups that were replaced are gone for good."""
        self._pool = self._pool[len(self._pool) - self.num_held :]
        self.step += 1
        self.num_draws = self._replaced = 0  # of this step
        self._began = self.num_held  # what an earlier step left over counts to round 1
        self._zero_draws: list[int] = []  # indexes of this step's draws of zero-advantage groups, ascending

    def begin_draw(self) -> tuple[int, int]:
        """Count a draw for a free slot; its ``(step, index)``."""
        self._began += 1
        self.num_draws += 1
        return self.step, self.num_draws - 1

    def add(self, group: Group, rows: RowTable) -> None:
        """Add a zero-advantage group; it holds its slot until it is replaced."""
        bisect.insort(self._pool, (group, rows), key=lambda entry: entry[0].group_id)
        self.num_held += 1
        if group.step == self.step:
            bisect.insort(self._zero_draws, group.index)
        else:
            self._began += 1

    def may_draw(self) -> bool:
        """Whether a fresh prompt may replace a zero-advantage group now."""
        spent = self._replaced >= (self.max_draws - 1) * self.num_groups
        return self.num_held > 0 and not spent and self.num_draws < self._limit()

    def replace(self) -> tuple[int, int]:
        """Count the draw of a fresh prompt in place of a zero-advantage group; its ``(step, index)``."""
        self.num_held -= 1
        self.num_replaced += 1
        self._replaced += 1
        del self._pool[: max(0, len(self._pool) - self.slots)]  # more than these never complete a batch
        self.num_draws += 1
        return self.step, self.num_draws - 1

    def settle(self) -> list[tuple[Group, RowTable]]:
        """Return the zero-advantage groups that complete the batch: those drawn last."""
        remaining = self._pool[len(self._pool) - self.num_held :]
        self._pool, self.num_held = [], 0
        return remaining

    def held_versions(self) -> Counter[int]:
        """Return the number of zero-advantage groups that hold a slot, by admission version."""
        return Counter(group.version for group, _ in self._pool[len(self._pool) - self.num_held :])

    def _limit(self) -> int:
        """``B_{max_draws}`` from the outcomes known so far."""
        limit = self._began
        for _ in range(self.max_draws - 1):
            following = self._began + bisect.bisect_left(self._zero_draws, limit)
            if following == limit:
                break
            limit = following
        return limit

    def state_dict(self) -> dict[str, Any]:
        """Return the step's counts and its zero-advantage groups, as tensors and plain values."""
        return {
            "counts": {name: getattr(self, name) for name in _COUNTS},
            "zero_draws": list(self._zero_draws),
            "pool": [[g.group_id, g.version, g.step, g.index, len(rows)] for g, rows in self._pool],
            "rows": RowTable.cat([rows for _, rows in self._pool]).state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], example_of: Callable[[int], Example]) -> None:
        """Continue from ``state``; ``example_of`` looks up a group's example."""
        for name in _COUNTS:
            setattr(self, name, state["counts"][name])
        self._zero_draws = list(state["zero_draws"])
        tables = RowTable.of_state(state["rows"]).split([count for *_, count in state["pool"]])
        self._pool = [
            (Group(group_id, example_of(group_id), *draw), rows)
            for (group_id, *draw, _), rows in zip(state["pool"], tables, strict=True)
        ]


def oldest_are_finished(num_groups: int, admitted: Mapping[int, int], finished: Mapping[int, int]) -> bool:
    """Whether the ``num_groups`` oldest admitted groups are finished (rule 3; within one version the order is free).

    Args:
        num_groups: groups per batch.
        admitted: groups that hold a slot and were not taken, by admission version.
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


def require_age(rows: RowTable, version: int, max_policy_age: int, sampler: object = None) -> None:
    """Assert the bound on the age of every row's oldest token.

    Args:
        rows: a batch.
        version: the version that the engines serve.
        max_policy_age: largest age, in pushes.
        sampler: of the user, which chose the groups.

    Raises:
        RuntimeError: a token is older than ``max_policy_age`` versions, or all are newer than ``version``.
    """
    oldest = int(rows.get(keys.POLICY_VERSION).min())
    if not 0 <= version - oldest <= max_policy_age:
        fix = "" if sampler is None else f" {type(sampler).__name__} chose its group too late: prefer older groups."
        raise RuntimeError(
            f"The batch has a token of policy version {oldest} at version {version}; train.max_policy_age is "
            f"{max_policy_age}.{fix}"
        )


def zero_advantage_rows(rows: RowTable) -> Tensor:
    """For each row, whether all graded rewards of its group are equal; those of a failed grader do not count."""
    rewards = rows.get(keys.GRADED_REWARD if rows.has(keys.GRADED_REWARD) else keys.REWARD)
    return zero_advantage_mask(rewards.flatten(), rows.get(keys.GROUP_ID), graded_rows(rows))


class Slots:
    """The slots of groups between the draw of their prompt and the end of their step; not thread-safe.

    A slot is held by a group in flight (``in_flight``), finished (in ``buffer``), without variance and not replaced (in
    ``refill``), or taken by :meth:`take` and not yet freed by :meth:`release`.

    Args:
        stream: prompts.
        buffer: where finished groups wait, with a place for each slot.
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
        buffer.writer.admitted = lambda group_id: (
            self.in_flight[group_id].version if group_id in self.in_flight else None
        )
        self.refill = Refill(num_groups=num_groups, slots=self.count, max_draws=max_draws)
        self.in_flight: dict[int, Group] = {}
        self._in_flight_versions: Counter[int] = Counter()
        self._stream, self._version = stream, version
        self.num_taken = 0

    def fill(self) -> list[Group]:
        """Admit groups to all free slots, and in place of zero-advantage groups as far as the step allows."""
        held = len(self.in_flight) + len(self._finished) + self.refill.num_held + self.num_taken
        return [self._admit(*self.refill.begin_draw()) for _ in range(self.count - held)] + self._replace()

    def discard(self, group: Group, rows: RowTable) -> list[Group]:
        """Discard a zero-advantage group; return the fresh groups that replace it or others."""
        self._remove(group)
        self.refill.add(group, rows)
        return self._replace()

    def finish(self, group: Group, rows: RowTable) -> None:
        """Put a finished group into the buffer."""
        self.buffer.add(rows)
        self._remove(group)

    def batch_is_ready(self) -> bool:
        """Whether the groups of the next batch are finished."""
        if self._finished.sampler is not None:
            return len(self._finished) >= self.num_groups
        finished = self._finished.versions
        admitted = self._in_flight_versions + finished + self.refill.held_versions()
        return oldest_are_finished(self.num_groups, admitted, finished)

    def settle(self) -> list[tuple[Group, RowTable]]:
        """Return zero-advantage groups to complete the next batch, if it waits for nothing else."""
        if not self.refill.num_held:
            return []
        done = self._finished.versions + self.refill.held_versions()
        waits = bool(self.in_flight)
        if self._finished.sampler is None:
            waits = not oldest_are_finished(self.num_groups, self._in_flight_versions + done, done)
        if waits:
            return []
        settled = self.refill.settle()
        for group, _ in settled:
            self._launch(group)
        return settled

    def take(self) -> None:
        """Choose the next batch, which is ready; the buffer's next sample returns it."""
        self._finished.pick(self.buffer.storage, self.num_groups)
        self.num_taken = self.num_groups

    def take_back(self) -> list[Group]:
        """Put the groups of a batch that cannot be trained on in flight again, and return them."""
        self.num_taken = 0
        return [  # as if an earlier step had drawn them: one without an advantage counts to round 1
            self._launch(Group(group_id, self._stream.example_of(group_id), version, self.refill.step - 1, 0))
            for group_id, version in sorted(self._finished.taken.items())
        ]

    def release(self) -> list[Group]:
        """Free the slots of the taken batch; return the groups that are admitted to them."""
        self.num_taken = 0
        self.refill.start_step()
        return self.fill()

    def _replace(self) -> list[Group]:
        fresh = []
        while self.refill.may_draw():
            fresh.append(self._admit(*self.refill.replace()))
        return fresh

    def _admit(self, step: int, index: int) -> Group:
        ((group_id, example),) = self._stream.draw(1)
        return self._launch(Group(group_id, example, self._version(), step, index))

    def _launch(self, group: Group) -> Group:
        self.in_flight[group.group_id] = group
        self._in_flight_versions[group.version] += 1
        return group

    def _remove(self, group: Group) -> None:
        del self.in_flight[group.group_id]
        self._in_flight_versions[group.version] -= 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts, the ids of groups in flight, and the rows of finished groups."""
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
        """Continue from ``state``; a batch that was taken counts as trained and released.

        Raises:
            UserError: the state is of another batch size, or of a larger ``max_policy_age``: its groups would
                become older than these slots allow.
        """
        saved = (state["num_groups"], state["max_policy_age"])
        if saved[0] != self.num_groups or saved[1] > self.max_policy_age:
            raise UserError(
                f"the saved run has {saved[0]} groups per batch and train.max_policy_age={saved[1]}, this one "
                f"{self.num_groups} and {self.max_policy_age}; resume with the same."
            )
        self._stream.load_state_dict(state["stream"])
        self.in_flight, self._in_flight_versions = {}, Counter()
        for group_id, *draw in sorted(state["in_flight"]):
            self._launch(Group(group_id, self._stream.example_of(group_id), *draw))
        for target, saved in zip((self.buffer.storage, self._finished), state["finished"], strict=True):
            target.load_state_dict(saved)
        self.refill.load_state_dict(state["refill"], self._stream.example_of)
        if not state["released"]:
            self.refill.start_step()
