"""Tasks whose problems are drawn when they are needed, and which side of the split a problem belongs to."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sota_grpo.rl.records import Example, sample_seed
from sota_grpo.tasks.dataset import ChatTask, text_of

HELDOUT_SHARE = 8  # one problem in eight is held out


def is_heldout(problem: object) -> bool:
    """Whether a problem belongs to the held-out split: ``hash(str(problem)) mod 8 == 0``, whatever the seed."""
    digest = hashlib.blake2b(str(problem).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELDOUT_SHARE == 0


@dataclass(frozen=True)
class DrawnExamples(Sequence[Example]):
    """A sequence whose example ``i`` is ``draw(rng, heldout)``, its random numbers from ``(seed, heldout, i)``.

    So it depends on the seed, the side and ``i`` only, and a longer sequence begins with the shorter one. An example
    may come twice.

    Args:
        draw: draws a problem of one side of the split; picklable.
        seed: of the draws.
        heldout: the side.
        num_examples: length.

    Raises:
        ValueError: no examples to train on.
        IndexError: the index is outside ``[-num_examples, num_examples)``.

    >>> numbers = DrawnExamples(lambda rng, heldout: Example(str(rng.random()), ""), 0, False, 1 << 40)
    >>> numbers[7] == numbers[:8][-1], numbers[0] == numbers[1]
    (True, False)
    """

    draw: Callable[[random.Random, bool], Example]
    seed: int
    heldout: bool
    num_examples: int

    def __post_init__(self) -> None:
        name, least = ("num_heldout", 0) if self.heldout else ("num_train", 1)
        if self.num_examples < least:
            raise ValueError(f"{name}={self.num_examples} must be at least {least}.")

    def __len__(self) -> int:
        return self.num_examples

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(self.num_examples)[index]]
        position = operator.index(index)
        if not -self.num_examples <= position < self.num_examples:
            raise IndexError(f"index {position} is outside a split of {self.num_examples} problems.")
        position %= self.num_examples
        return self.draw(random.Random(sample_seed(self.seed, int(self.heldout), position)), self.heldout)


class ProceduralTask(ChatTask):
    """Draws both splits, and asks a question after a system prompt, if there is one; the answer ends in ``#### N``.

    A task says how to :meth:`draw` a problem, and has a ``default_prompt`` if it asks for something.

    Args:
        seed: of the draws; the split is the same for every seed.
        num_train: length of ``train``.
        num_heldout: length of ``heldout``.
        system_prompt: replaces the task's own, where it has one; an empty text is no system turn.

    Raises:
        ValueError: no examples to train on.
    """

    default_prompt = ""

    def __init__(
        self, seed: int = 0, num_train: int = 8192, num_heldout: int = 512, *, system_prompt: str | None = None
    ) -> None:
        self.train: Sequence[Example] = DrawnExamples(self.draw, seed, False, num_train)
        self.heldout: Sequence[Example] = DrawnExamples(self.draw, seed, True, num_heldout)
        self.system_prompt = self.default_prompt if system_prompt is None else system_prompt

    def draw(self, rng: random.Random, heldout: bool) -> Example:
        """A problem of one side of the split."""
        raise NotImplementedError

    def gold_response(self, example: Example) -> str | None:
        """The worked answer; it earns the full reward."""
        return example.answer

    def read_row(self, row: Mapping[str, Any], place: str) -> Example:
        """Of the columns ``answer`` (a number, alone or after ``####``) and, where it is there, ``question``.

        Raises:
            DatasetError: the answer is missing.
        """
        return Example(query=str(row.get("question", "")), answer=text_of(row, "answer", place))
