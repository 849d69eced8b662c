"""Weights survive the packing bit for bit, whatever their dtype, and a view costs no copy."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.policy.lora import adapter_pack, add_lora, packed_weights
from sota_grpo.policy.weight_pack import WeightPack
from sota_grpo.source.weight_sync import EngineWeightSync
from tests.engine_rigs import EOS, PAD, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)


def random_weights() -> dict[str, torch.Tensor]:
    shapes = [(), (3,), (2, 5), (0,), (1, 2, 3)]
    return {
        f"{dtype}.{i}": (10 * torch.randn(shape)).to(dtype) for dtype in DTYPES for i, shape in enumerate(shapes)
    } | {"transposed": torch.randn(4, 3).t()}


def test_every_tensor_comes_back_bit_for_bit_in_order() -> None:
    """Counted first, copied as it comes, and by pickle's protocol 5, which carries the buffer out of band."""
    weights = random_weights()
    counted = WeightPack.of(weights.items())
    size = counted.buffers[0][0].nbytes
    filled = WeightPack.of(((name, tensor.clone()) for name, tensor in weights.items()), room=10 * size)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(counted, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == filled.buffers[0][0].nbytes == size
    assert len(body) < 10_000
    for pack in (counted, filled, pickle.loads(body, buffers=buffers)):
        actual = list(pack.tensors())
        assert [name for name, _ in actual] == list(weights)
        for name, tensor in actual:
            assert tensor.dtype == weights[name].dtype
            assert torch.equal(tensor, weights[name])


def test_a_tied_tensor_is_stored_once() -> None:
    embedding = torch.randn(16, 8)
    pack = WeightPack.of([("embed", embedding), ("head", embedding), ("other", embedding.clone())])
    assert pack.buffers[0][0].nbytes == 2 * embedding.numel() * 4
    assert {name: torch.equal(tensor, embedding) for name, tensor in pack.tensors()} == dict.fromkeys(
        ("embed", "head", "other"), True
    )


def test_temporaries_that_reuse_memory_are_not_taken_for_tied_ones() -> None:
    """A merged LoRA weight lives only until the next one is computed, often at the same address."""
    values = torch.randn(50)
    pack = WeightPack.of((str(i), torch.full((64,), float(value))) for i, value in enumerate(values))
    assert [float(tensor[0]) for _, tensor in pack.tensors()] == values.tolist()


@pytest.mark.parametrize("lora", [False, True])
def test_weights_rounded_before_they_travel_are_what_the_engine_would_have_made_of_them(lora: bool) -> None:
    model: Any = tiny_model(tied=True, seed=2)
    engine = TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD, dtype=torch.bfloat16)
    assert engine.weight_dtype == torch.bfloat16
    if lora:
        model = add_lora(model, r=2, alpha=4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    served = []
    for dtype in (None, engine.weight_dtype):
        pack = packed_weights(model, dtype=dtype) if lora else WeightPack.of(model.state_dict().items(), dtype=dtype)
        engine.update_weights(pack, len(served) + 1)
        held = {name: value.clone() for name, value in engine._model.state_dict().items()}
        served.append((pack.buffers[0][0].nbytes, held))
    (wide_bytes, by_engine), (narrow_bytes, beforehand) = served
    assert narrow_bytes < 0.52 * wide_bytes
    assert all(torch.equal(by_engine[name], beforehand[name]) for name in by_engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pushed", ["packs of several ranks", "an adapter"])
def test_what_an_engine_holds_is_compared_by_name_however_it_came(pushed: str, dtype: torch.dtype) -> None:
    model: Any = tiny_model(seed=2)
    engine = TransformersEngine(model, eos_token_ids=[EOS], pad_token_id=PAD, dtype=dtype)
    if pushed == "an adapter":
        model = add_lora(model, r=2, alpha=4)
        engine.base = packed_weights(model, merged=False).tensors
        weight_sync = EngineWeightSync(partial(adapter_pack, model), engine, whole=partial(packed_weights, model))
    else:
        named = list(model.state_dict().items())
        halves = lambda: WeightPack(WeightPack.of(named[:5]).buffers + WeightPack.of(named[5:]).buffers)  # noqa: E731
        weight_sync = EngineWeightSync(halves, engine)
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        parameter.data.neg_().add_(1.0)
    weight_sync.send(version=1)
    assert weight_sync.compared().equal == engine._model.state_dict().keys()
    name, held = list(engine._model.named_parameters())[3]
    held.data[0] *= 1.1
    assert weight_sync.compared().differing == {name}
