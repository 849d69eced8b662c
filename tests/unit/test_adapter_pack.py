"""An adapter that travels alone and is merged where it lands equals the merged weights, bit for bit."""

from __future__ import annotations

import pytest
import torch

from sota_grpo.policy.lora import AdapterPack, add_lora, base_pack, engine_weights
from tests.engine_rigs import tiny_model

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_merged_at_the_engine_equals_merged_at_the_learner(dtype: torch.dtype, tied: bool, device: str) -> None:
    model = add_lora(tiny_model(tied=tied).to(dtype), r=3, alpha=7).to(device)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    base = base_pack(model)
    found, expected = dict(AdapterPack.of(model).merged(base, device)), dict(engine_weights(model))
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name].cpu()) for name in expected)
    assert any(not torch.equal(found[name], weight) for name, weight in base.tensors())


def test_the_adapter_is_a_fraction_of_the_model() -> None:
    model = add_lora(tiny_model(), r=1, alpha=1)
    assert AdapterPack.of(model).pack.num_bytes < 0.1 * base_pack(model).num_bytes


def test_a_model_without_adapter_is_refused() -> None:
    with pytest.raises(ValueError, match="no adapter"):
        AdapterPack.of(tiny_model())
