"""Which examples are held out: a choice that depends on the questions and the seed, never on their order."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

from sota_grpo.records import Example
from sota_grpo.tasks.dataset import DatasetError, Row, load_rows

logger = logging.getLogger(__name__)


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


def load_sides(
    read_examples: Callable[[Sequence[Row], str], list[Example]],
    *,
    source: str,
    config: str,
    path: str | None,
    eval_path: str | None,
    num_heldout: int,
    seed: int,
) -> tuple[list[Example], list[Example]]:
    """What is trained on and what is held out, of local files or of a dataset on the hub with a test split.

    Questions that come twice (letter case and spacing aside) are kept once, and never on both sides.

    Args:
        read_examples: makes examples of rows, given the name of the place that they come from.
        source: name on the hub.
        config: of the hub dataset.
        path: local file to train on; None asks the hub.
        eval_path: local file of the held-out problems; None holds out the hub's test split, or ``num_heldout`` rows of
            ``path``, the same for every order of its rows.
        num_heldout: see ``eval_path``.
        seed: of the choice of the held-out rows.

    Raises:
        DatasetError: rows that cannot be used (see :mod:`sota_grpo.tasks.dataset`), or too few of them.
    """
    place = path or f"{source} (train)"
    train = read_examples(load_rows(source, path=path, config=config), place)
    if eval_path is not None:
        heldout = read_examples(load_rows(source, path=eval_path), eval_path)
    elif path is None:
        heldout = read_examples(load_rows(source, split="test", config=config), f"{source} (test)")
    else:
        train, heldout = split_examples(train, num_heldout, seed, path)
    kept, heldout = disjoint(train, heldout, place)
    if len(kept) < len(train):
        left_out = len(train) - len(kept)
        logger.info("%d of %d problems are repeated or held out: they are not trained on.", left_out, len(train))
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
        fewer = f"env.num_heldout={max(1, len(unique) // 10)} or " if len(unique) > 1 else ""
        raise DatasetError(
            f"{source} has {len(unique)} different questions, so env.num_heldout={num_heldout} leaves none to train "
            f"on; use {fewer}a larger file."
        )
    keyed = sorted(unique, key=lambda e: hashlib.sha256(f"{seed}:{normalised(e.query)}".encode()).digest())
    chosen = {normalised(example.query) for example in keyed[:num_heldout]}
    heldout = [example for example in unique if normalised(example.query) in chosen]
    return [example for example in unique if normalised(example.query) not in chosen], heldout
