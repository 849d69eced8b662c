"""The count of operations: by hand, by torch's own counter, and shared prompts against padded rows."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.trainer_work import padded_load, recomputed_flops
from sota_grpo.functional.flops import Load, ModelShape, backward_flops, forward_flops, shared_load, step_flops


def test_one_group_by_hand() -> None:
    """2 matrices of 16 weights at 5 positions; 3 + 3 + 7 pairs, 2 products of 4 for each; 20 head weights at 3."""
    shape, load = ModelShape(32, 0, attention_width=4, head_weights=20), shared_load(2, [1, 2])
    assert load == Load(positions=5, pairs=13, predicted=3)
    assert forward_flops(shape, load) == 320 + 208 + 120
    assert backward_flops(shape, load) == 2 * (320 + 208 + 120)
    assert step_flops(shape, load) == 3 * 648
    assert recomputed_flops(shape, load, checkpointing=False) == 120
    assert recomputed_flops(shape, load, checkpointing=True) == 648
    assert padded_load(1, 7, predicted=4) == shared_load(3, [4])  # a padded row alone costs what a shared one does


def test_frozen_weights_have_no_gradient_of_their_own() -> None:
    """An adapter of 6 weights on 32 frozen ones: 6 + 2 of 4 operations per weight and position in the backward pass."""
    load = shared_load(2, [1, 2])
    lora = ModelShape(6, 32, attention_width=4, head_weights=20, head_trainable=False)
    assert forward_flops(lora, load) == 2 * 38 * 5 + 208 + 120
    assert backward_flops(lora, load) == (4 * 6 + 2 * 32) * 5 + 416 + 120
    assert recomputed_flops(lora, load, checkpointing=False) == 0  # its head keeps slopes


@pytest.mark.parametrize("frozen", [False, True])
def test_torchs_counter_finds_the_same_products(frozen: bool) -> None:
    """Two linear layers and attention over every pair, not the causal half: what torch counts, forward and backward."""
    width, length = 8, 5
    up, down = (torch.nn.Linear(width, width, bias=False).requires_grad_(not frozen) for _ in range(2))
    rows = torch.randn(1, length, width, requires_grad=True)
    shape = ModelShape(0 if frozen else 2 * width**2, 2 * width**2 if frozen else 0, width, 0)
    with FlopCounterMode(display=False) as counter:
        hidden = up(rows)
        mixed = (hidden @ hidden.transpose(1, 2)).softmax(-1) @ hidden
        down(mixed).sum().backward()
    assert counter.get_total_flops() == step_flops(shape, Load(length, length**2, 0))
