"""Floating-point operations of a training step, counted from the shape of a model and the layout of its rows.

A multiply-add is 2 operations. Per weight and position the forward pass takes 2, the backward pass 4: 2 for the
gradient of the input and 2 for the gradient of the weight, unless it is frozen. A (query, key) pair takes 4 per unit of
attention width forward and 8 backward. Norms, activations, softmax, the optimizer and recomputation are not counted.
One prompt of 3 tokens with responses of 2 and 1 tokens::

    positions             3 + 2 + 1 = 6
    pairs of one layer    prompt 6, responses (2 * 3 + 3) + (1 * 3 + 1)

Sources: Kaplan et al. 2020 (arXiv:2001.08361, table 1); Chowdhery et al. 2022 (arXiv:2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense decoder that determine its number of operations."""

    trainable_weights: int  # entries of trained decoder matrices, adapters included, without the embedding
    frozen_weights: int  # entries of frozen decoder matrices
    attention_width: int  # query heads times head size, summed over the layers
    head_weights: int  # entries of the output layer: vocabulary times hidden size
    head_trainable: bool = True


@dataclass(frozen=True)
class Load:
    """Workload: number of decoder positions, of causal (query, key) pairs in one layer, and of positions with logits.

    Pairs ignore sliding windows; ``+`` and ``times`` act on each count.

    >>> shared_load(3, [2, 1]).times(2) + shared_load(2, [])
    Load(positions=14, pairs=41, predicted=6)
    """

    positions: int = 0
    pairs: int = 0
    predicted: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.positions + other.positions, self.pairs + other.pairs, self.predicted + other.predicted)

    def times(self, count: int) -> Load:
        return Load(count * self.positions, count * self.pairs, count * self.predicted)


def shared_load(prompt: int, responses: Sequence[int]) -> Load:
    """Return the load of one prompt of ``P`` tokens, computed once, and its responses of ``R`` tokens each.

    Only response tokens get logits. Positions ``P + sum R``, pairs ``P (P + 1) / 2 + sum (R P + R (R + 1) / 2)``.

    >>> shared_load(3, [2, 1])
    Load(positions=6, pairs=19, predicted=3)
    """
    completion_tokens = sum(responses)
    within = sum(length * (length + 1) // 2 for length in responses)
    pairs = prompt * (prompt + 1) // 2 + completion_tokens * prompt + within
    return Load(prompt + completion_tokens, pairs, completion_tokens)


def forward_flops(shape: ModelShape, load: Load) -> int:
    """Return the floating-point operations of one forward pass.

    >>> shape, load = ModelShape(100, 0, 8, 50), Load(positions=6, pairs=19, predicted=3)
    >>> forward_flops(shape, load), backward_flops(shape, load), step_flops(shape, load)  # 1200 + 608 + 300; twice that
    (2108, 4216, 6324)
    """
    weights = (shape.trainable_weights + shape.frozen_weights) * load.positions + shape.head_weights * load.predicted
    return 2 * weights + 4 * shape.attention_width * load.pairs


def backward_flops(shape: ModelShape, load: Load) -> int:
    """Return the floating-point operations of one backward pass; a frozen weight takes half of a trained one's."""
    per_position = 4 * shape.trainable_weights + 2 * shape.frozen_weights
    head = (4 if shape.head_trainable else 2) * shape.head_weights
    return per_position * load.positions + 8 * shape.attention_width * load.pairs + head * load.predicted


def step_flops(shape: ModelShape, load: Load) -> int:
    """Return the floating-point operations of forward and backward pass without recomputation, as MFU counts them."""
    return forward_flops(shape, load) + backward_flops(shape, load)
