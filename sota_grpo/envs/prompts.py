"""The order in which the prompts of a task are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from sota_grpo.rl.records import Example, sample_seed
from sota_grpo.tasks.mixture import MixedExamples


class PromptStream:
    """An endless, deterministic sequence of ``(group id, example)``.

    Draw ``k`` is element ``k mod n`` of the permutation of ``n`` examples that ``(seed, k div n)`` gives, so it depends
    on nothing but the seed and ``k``. Group ids count draws: the same example drawn twice has two.

    Of :class:`~sota_grpo.tasks.mixture.MixedExamples` it is so within each task, whose draws are those that its weight
    gives it, under a seed of its own.

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
        if not len(examples) or (isinstance(examples, MixedExamples) and not all(map(len, examples.parts.values()))):
            raise ValueError("there are no examples to draw prompts from; give a task with at least one.")
        self.examples, self.seed, self.shuffle = examples, seed, shuffle
        self.next_group_id = 0
        self._first_group_id = 0  # of the draws under this seed

    def draw(self, num_groups: int) -> list[tuple[int, Example]]:
        """The next ``num_groups`` prompts, each with a group id that no other draw has."""
        group_ids = range(self.next_group_id, self.next_group_id + num_groups)
        self.next_group_id += num_groups
        return [(group_id, self.example_of(group_id)) for group_id in group_ids]

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
        name, draw = self._task_of(group_id)
        count = len(self.examples.parts[name] if isinstance(self.examples, MixedExamples) else self.examples)
        return self._example(name, self._index(draw, count, self._seed_of(name)))

    def observe(self, group_id: int, passes: int, trials: int) -> None:
        """What the responses of a group earned, where somebody draws by it."""

    def update(self, held: Collection[int]) -> None:
        """A batch was released; of the groups before it those ``held`` may be asked for again."""

    def metrics(self) -> dict[str, float]:
        """What there is to say of the draws."""
        return {}

    def reseed(self, seed: int) -> None:
        """Start over with another seed; group ids go on, so that they stay unique."""
        self.seed = seed
        self._first_group_id = self.next_group_id

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as plain integers; of a mixture also what it is made of."""
        epoch, position = divmod(self.next_group_id - self._first_group_id, len(self.examples))
        place = {"epoch": epoch, "position": position, "next_group_id": self.next_group_id}
        return self._identity() | place

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken.

        Raises:
            ValueError: the state is of a stream over another number of examples, with another seed, another mixture or
                another curriculum: its position would mean other prompts here.
        """
        own = {"mixture": None, "curriculum": None, "num_examples": 0, "seed": 0} | self._identity()
        for name, value in own.items():
            if state_dict.get(name) != value:
                what = "the curriculum" if name == "curriculum" else "the dataset and the seed"
                raise ValueError(
                    f"the saved stream of prompts has {name}={state_dict.get(name)} and this one {name}={value}; "
                    f"resume with {what} of the saved run."
                )
        self.next_group_id = state_dict["next_group_id"]
        drawn = state_dict["epoch"] * len(self.examples) + state_dict["position"]
        self._first_group_id = self.next_group_id - drawn

    def _index(self, draw: int, count: int, seed: int) -> int:
        """Which of ``count`` examples their draw ``draw`` gives."""
        epoch, position = divmod(draw, count)
        return _permutation(count, seed, epoch)[position] if self.shuffle else position

    def _task_of(self, group_id: int) -> tuple[str, int]:
        """The task of a mixture that a draw is of, and the draws of that task before it; without a mixture ``""``."""
        draw = group_id - self._first_group_id
        return self.examples.drawn(draw) if isinstance(self.examples, MixedExamples) else ("", draw)

    def _seed_of(self, task: str) -> int:
        if not task:
            return self.seed
        return sample_seed(self.seed, int.from_bytes(hashlib.blake2b(task.encode(), digest_size=8).digest()))

    def _example(self, task: str, index: int) -> Example:
        return self.examples.example(task, index) if isinstance(self.examples, MixedExamples) else self.examples[index]

    def _identity(self) -> dict[str, Any]:
        """What a state must have alike; of a mixture the number of examples of each task and its weight, too."""
        own = {"seed": self.seed, "num_examples": len(self.examples)}
        if not isinstance(self.examples, MixedExamples):
            return own
        parts, weights = self.examples.parts, self.examples.weights
        return own | {"mixture": {name: [len(part), str(weights[name])] for name, part in parts.items()}}


@lru_cache(maxsize=32)  # groups in flight reach into the epoch before, and each task of a mixture has one
def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(sample_seed(seed, epoch))
    return torch.randperm(count, generator=generator).tolist()
