"""The floor: the operations of the work over the rate at which this machine multiplies matrices of its shapes.

Every quantity is computed once, each prompt once per group, and only matrix products count: no norm, no softmax, no
sampling, no optimizer, no Python. Nothing can be much faster in float32, so the distance from it is what is left.

A step generates (one forward pass, what is decoded in products of one row per response), scores the reference (one
forward pass) and learns (one forward and one backward pass, twice a forward).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from benchmarks.peers.work import SHAPE, Case
from sota_grpo.functional.flops import Load, ModelShape, backward_flops, forward_flops, shared_load

TILES = (16, 64, 256, 1024, 4096)  # rows of a product; a caller with many positions may choose among them
MOST_COLUMNS = 4096  # of a product; a wider matrix is cut, so that the part stays in the cache
SECONDS_PER_PRODUCT = 0.01


def matrices() -> list[tuple[int, int]]:
    """``(in, out)`` of a decoder layer's matrices."""
    hidden, mlp = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    keys = hidden * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    return [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden), *[(hidden, mlp)] * 2, (mlp, hidden)]


def model_shape(case: Case) -> ModelShape:
    """The numbers of the model that its operations depend on.

    >>> shape = model_shape(Case("base"))
    >>> shape.trainable_weights, shape.head_weights
    (786432, 524288)
    """
    layers = SHAPE["num_hidden_layers"]
    return ModelShape(
        trainable_weights=layers * sum(rows * columns for rows, columns in matrices()),
        frozen_weights=0,
        attention_width=layers * SHAPE["hidden_size"],
        head_weights=case.vocab * SHAPE["hidden_size"],
    )


def load_of(case: Case, prompt_lengths: Sequence[int]) -> Load:
    """Positions, pairs and predictions of one step, each prompt computed once."""
    return sum((shared_load(length, [case.response] * case.group) for length in prompt_lengths), Load())


class Floor:
    """Seconds that the work of a case takes at least.

    Args:
        case: the case.
        prompt_lengths: of the prompts of one step.
    """

    def __init__(self, case: Case, prompt_lengths: Sequence[int]):
        self.case, self.shape = case, model_shape(case)
        self.load = load_of(case, prompt_lengths)
        self.forward = forward_flops(self.shape, self.load)
        prompts = sum((shared_load(length, []) for length in prompt_lengths), Load())
        self.prefill = forward_flops(self.shape, prompts)
        self.backward = backward_flops(self.shape, self.load)

    def measure(self) -> dict[str, float]:
        """Seconds of each phase, of the whole, and the two rates (operations/s), all measured now."""
        wide, narrow = self._rate([*TILES, self.case.rows]), self._rate([self.case.rows])
        measured = {
            "generate": self.prefill / wide + (self.forward - self.prefill) / narrow,
            "ref": self.forward / wide,
            "learn": (self.forward + self.backward) / wide,
        }
        return measured | {"whole": sum(measured.values()), "rate_wide": wide, "rate_narrow": narrow}

    def _rate(self, tiles: Sequence[int]) -> float:
        """Operations per second of a forward pass, in products of the best of ``tiles`` rows; attention as layers."""
        per_position = {shape: seconds_per_row(tiles, *shape) for shape in set(matrices())}
        layer = sum(per_position[shape] for shape in matrices())
        layers = SHAPE["num_hidden_layers"] * layer * self.load.positions
        weights = 2 * self.shape.trainable_weights * self.load.positions
        pairs = 4 * self.shape.attention_width * self.load.pairs
        head = seconds_per_row(tiles, SHAPE["hidden_size"], self.case.vocab) * self.load.predicted
        return self.forward / (layers * (1 + pairs / weights) + head)


def seconds_per_row(tiles: Sequence[int], inner: int, columns: int) -> float:
    """Least seconds per row of ``[rows, inner] @ [inner, columns]`` in float32, ``rows`` one of ``tiles``."""
    width = min(columns, MOST_COLUMNS)
    return min(matmul_seconds(rows, inner, width) / rows for rows in tiles) * columns / width


def matmul_seconds(rows: int, inner: int, columns: int) -> float:
    """Seconds of one float32 product: the best of as many as fit into a moment."""
    left, right = torch.randn(rows, inner), torch.randn(columns, inner).t()
    out = torch.empty(rows, columns)
    best, until = float("inf"), time.perf_counter() + SECONDS_PER_PRODUCT
    while best == float("inf") or time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - began)
    return best
