"""Which examples are held out: a choice that depends on the questions and the seed, never on their order."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from sota_grpo.records import Example
from sota_grpo.tasks.dataset import DatasetError


def normalised(question: str) -> str:
    """The question with letter case and spacing taken out, for comparison.

    >>> normalised(" How  many\\nApples? ")
    'how many apples?'
    """
    return " ".join(question.casefold().split())


def unique_examples(examples: Sequence[Example], taken: set[str] | None = None) -> list[Example]:
    """Each question once, the first kept, without those ``taken`` (normalised)."""
    seen = set(taken or ())
    kept = []
    for example in examples:
        question = normalised(example.query)
        if question not in seen:
            seen.add(question)
            kept.append(example)
    return kept


def disjoint(train: Sequence[Example], heldout: Sequence[Example], source: str) -> tuple[list[Example], list[Example]]:
    """Both sides with each question once; one that stands on both is held out.

    Raises:
        DatasetError: nothing is left to train on.

    >>> one, two = Example("1 + 1?", "2"), Example("2 + 2?", "4")
    >>> disjoint([one, two, two], [one, one], "demo") == ([two], [one])
    True
    """
    heldout = unique_examples(heldout)
    kept = unique_examples(train, taken={normalised(example.query) for example in heldout})
    if not kept:
        raise DatasetError(f"every question of {source} is held out; give other problems to train on.")
    return kept, heldout


def split_examples(
    examples: Sequence[Example], num_heldout: int, seed: int, source: str
) -> tuple[list[Example], list[Example]]:
    """Hold out the ``num_heldout`` questions whose hash with the seed is smallest; both sides keep the file's order.

    The choice depends on the questions and the seed, not on their order. Repeated questions are kept once.

    Raises:
        DatasetError: nothing would be left to train on.

    >>> examples = [Example(f"{i} + 1?", f"#### {i + 1}") for i in range(5)]
    >>> train, heldout = split_examples(examples, 2, 0, "demo")
    >>> len(train), len(heldout), {e.query for e in train} & {e.query for e in heldout}
    (3, 2, set())
    """
    unique = unique_examples(examples)
    if num_heldout >= len(unique):
        raise DatasetError(
            f"{source} has {len(unique)} different questions, so env.num_heldout={num_heldout} leaves none to train "
            f"on; use env.num_heldout={max(1, len(unique) // 10)} or a larger file."
        )
    keyed = sorted(unique, key=lambda e: hashlib.sha256(f"{seed}:{normalised(e.query)}".encode()).digest())
    chosen = {normalised(example.query) for example in keyed[:num_heldout]}
    heldout = [example for example in unique if normalised(example.query) in chosen]
    return [example for example in unique if normalised(example.query) not in chosen], heldout
