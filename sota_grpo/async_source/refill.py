"""Dynamic sampling without rounds: which groups without signal a fresh prompt replaces, and which ones stay."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase

from sota_grpo.group_buffer import pack_rows, unpack_rows
from sota_grpo.records import Example


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
