"""Weights survive the packing bit for bit, whatever their dtype, and a view costs no copy."""

from __future__ import annotations

import pickle

import torch

from sota_grpo.policy.weight_pack import WeightPack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def random_weights() -> dict[str, torch.Tensor]:
    shapes = [(), (3,), (2, 5), (0,), (1, 2, 3)]
    return {
        f"{dtype}.{i}": (10 * torch.randn(shape)).to(dtype) for dtype in DTYPES for i, shape in enumerate(shapes)
    } | {"transposed": torch.randn(4, 3).t()}


def test_every_tensor_comes_back_bit_for_bit_in_order() -> None:
    weights = random_weights()
    found = list(WeightPack.of(weights.items()).tensors())
    assert [name for name, _ in found] == list(weights)
    for name, tensor in found:
        assert tensor.dtype == weights[name].dtype
        assert torch.equal(tensor, weights[name])


def test_a_tied_tensor_is_stored_once() -> None:
    embedding = torch.randn(16, 8)
    pack = WeightPack.of([("embed", embedding), ("head", embedding), ("other", embedding.clone())])
    assert pack.num_bytes == 2 * embedding.numel() * 4
    assert {name: torch.equal(tensor, embedding) for name, tensor in pack.tensors()} == dict.fromkeys(
        ("embed", "head", "other"), True
    )


def test_temporaries_that_reuse_memory_are_not_taken_for_tied_ones() -> None:
    """A merged LoRA weight lives only until the next one is computed, often at the same address."""
    values = torch.randn(50)
    pack = WeightPack.of((str(i), torch.full((64,), float(value))) for i, value in enumerate(values))
    assert [float(tensor[0]) for _, tensor in pack.tensors()] == values.tolist()


def test_protocol_5_carries_the_buffer_out_of_band() -> None:
    pack = WeightPack.of(random_weights().items())
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(pack, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == pack.num_bytes
    assert len(body) < 10_000
    back = pickle.loads(body, buffers=buffers)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(back.tensors(), pack.tensors()))
