"""The order in which prompts are drawn: a fresh permutation every epoch, resumable to the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sota_grpo.rl.records import Example, sample_seed


class PromptStream:
    """An endless, deterministic sequence of ``(group id, example)``.

    Draw ``k`` is element ``k mod n`` of the permutation of ``n`` examples that ``(seed, k div n)`` gives, so it depends
    on nothing but the seed and ``k``. Group ids count draws: the same example drawn twice has two.

    Args:
        examples: what to draw from.
        seed: of the permutations.
        shuffle: False draws in the given order, every epoch.

    Raises:
        ValueError: no examples, or a state of another stream.

    >>> stream = PromptStream([Example(f"{i} + 1?", str(i + 1)) for i in range(3)], seed=0, shuffle=False)
    >>> [(group_id, example.query) for group_id, example in stream.draw(4)]
    [(0, '0 + 1?'), (1, '1 + 1?'), (2, '2 + 1?'), (3, '0 + 1?')]
    >>> stream.state_dict()
    {'seed': 0, 'num_examples': 3, 'epoch': 1, 'position': 1, 'next_group_id': 4}
    >>> stream.example_of(2).query
    '2 + 1?'
    """

    def __init__(self, examples: Sequence[Example], *, seed: int = 0, shuffle: bool = True):
        if not len(examples):
            raise ValueError("there are no examples to draw prompts from; give a task with at least one.")
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.next_group_id = 0
        self._first_group_id = 0  # of the draws under this seed
        self._orders: dict[int, list[int]] = {}
        self._start_epoch(0)

    def draw(self, num_groups: int) -> list[tuple[int, Example]]:
        """The next ``num_groups`` prompts, each with a group id that no other draw has."""
        drawn = []
        for _ in range(num_groups):
            if self._position == len(self._order):
                self._start_epoch(self._epoch + 1)
            drawn.append((self.next_group_id, self.examples[self._order[self._position]]))
            self._position += 1
            self.next_group_id += 1
        return drawn

    def example_of(self, group_id: int) -> Example:
        """The example that was drawn as ``group_id``; changes nothing.

        Raises:
            ValueError: no prompt has been drawn under that id with the stream's present seed.
        """
        if not self._first_group_id <= group_id < self.next_group_id:
            raise ValueError(
                f"group {group_id} is not of this stream: under its seed it has drawn the groups "
                f"{self._first_group_id} to {self.next_group_id - 1}."
            )
        epoch, position = divmod(group_id - self._first_group_id, len(self.examples))
        return self.examples[self._order_of(epoch)[position]]

    def reseed(self, seed: int) -> None:
        """Start over with another seed; group ids go on, so that they stay unique."""
        self.seed = seed
        self._first_group_id = self.next_group_id
        self._orders.clear()
        self._start_epoch(0)

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands, as plain integers."""
        return {
            "seed": self.seed,
            "num_examples": len(self.examples),
            "epoch": self._epoch,
            "position": self._position,
            "next_group_id": self.next_group_id,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ValueError: the state is of a stream over another number of examples or with another seed: its position
                would mean other prompts here.
        """
        for name, own in (("num_examples", len(self.examples)), ("seed", self.seed)):
            if state_dict[name] != own:
                raise ValueError(
                    f"the saved stream of prompts has {name}={state_dict[name]} and this one {name}={own}; resume "
                    "with the dataset and the seed of the saved run."
                )
        self._start_epoch(state_dict["epoch"])
        self._position = state_dict["position"]
        self.next_group_id = state_dict["next_group_id"]
        self._first_group_id = self.next_group_id - self._epoch * len(self.examples) - self._position

    def _start_epoch(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> list[int]:
        """The permutation of ``epoch``; the last two are kept, for groups in flight reach into the epoch before."""
        if epoch not in self._orders:
            while len(self._orders) > 1:
                self._orders.pop(next(iter(self._orders)))
            count = len(self.examples)
            order = list(range(count))
            if self.shuffle:
                generator = torch.Generator().manual_seed(sample_seed(self.seed, epoch))
                order = torch.randperm(count, generator=generator).tolist()
            self._orders[epoch] = order
        return self._orders[epoch]
