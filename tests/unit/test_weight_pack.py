"""Weights survive the packing bit for bit, whatever their dtype, and a view costs no copy."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import pytest
import torch

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.policy.lora import AdapterPack, add_lora, packed_weights
from sota_grpo.policy.weight_pack import WeightPack, WeightPacks
from sota_grpo.training.learner import Publisher, perturb
from tests.engine_rigs import EOS, PAD, tiny_model

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
    assert pack.buffer.nbytes == 2 * embedding.numel() * 4
    assert {name: torch.equal(tensor, embedding) for name, tensor in pack.tensors()} == dict.fromkeys(
        ("embed", "head", "other"), True
    )


def test_temporaries_that_reuse_memory_are_not_taken_for_tied_ones() -> None:
    """A merged LoRA weight lives only until the next one is computed, often at the same address."""
    values = torch.randn(50)
    pack = WeightPack.of((str(i), torch.full((64,), float(value))) for i, value in enumerate(values))
    assert [float(tensor[0]) for _, tensor in pack.tensors()] == values.tolist()


def test_a_pack_is_filled_as_the_weights_come() -> None:
    weights = random_weights()
    counted = WeightPack.of(weights.items())
    filled = WeightPack.of(
        ((name, tensor.clone()) for name, tensor in weights.items()), room=10 * counted.buffer.nbytes
    )
    assert filled.buffer.nbytes == counted.buffer.nbytes
    assert [name for name, _ in filled.tensors()] == list(weights)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in filled.tensors())


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
        pack = packed_weights(model, dtype=dtype) if lora else WeightPack.of_model(model, dtype=dtype)
        engine.update_weights(pack, len(served) + 1)
        served.append((pack.buffer.nbytes, {name: value.clone() for name, value in engine._model.state_dict().items()}))
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
        base, update = packed_weights(model, merged=False), engine.update_weights
        engine.update_weights = lambda adapter, version: update(adapter.merged(base), version)  # as a worker does it
        publisher = Publisher(partial(AdapterPack.of, model), [engine], whole=partial(packed_weights, model))
    else:
        named = list(model.state_dict().items())
        halves = lambda: WeightPacks((WeightPack.of(named[:5]), WeightPack.of(named[5:])))  # noqa: E731
        publisher = Publisher(halves, [engine])
    perturb(parameter for parameter in model.parameters() if parameter.requires_grad)
    publisher.publish(1)
    assert publisher.compared().equal == engine._model.state_dict().keys()
    name, held = list(engine._model.named_parameters())[3]
    held.data[0] *= 1.1
    assert publisher.compared().differing == {name}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_is_whole_and_has_no_adapter_is_packed_to_the_same_bytes_as_any_other(
    tied: bool, dtype: torch.dtype | None
) -> None:
    model: Any = tiny_model(tied=tied, seed=2)
    plain, general = WeightPack.of_model(model, dtype=dtype), packed_weights(model, dtype=dtype)
    assert plain.places == general.places
    assert list(plain.places) == list(general.places)
    assert plain.buffer.tobytes() == general.buffer.tobytes()


def test_protocol_5_carries_the_buffer_out_of_band() -> None:
    pack = WeightPack.of(random_weights().items())
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(pack, protocol=5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) == pack.buffer.nbytes
    assert len(body) < 10_000
    back = pickle.loads(body, buffers=buffers)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(back.tensors(), pack.tensors()))
