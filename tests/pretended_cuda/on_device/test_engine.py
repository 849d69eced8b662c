"""The embedded engine samples on the device what it samples on the CPU, and gives the device's memory back."""

from __future__ import annotations

import pytest
import torch

from sota_grpo.engines.transformers_engine import TransformersEngine
from sota_grpo.rl.records import Sampling
from tests.engine_rigs import EOS, PAD, changed_weights, generate, largest_gap, ragged_requests, tiny_model, token_lists


def engine(device: str, dtype: torch.dtype) -> TransformersEngine:
    return TransformersEngine(tiny_model(), eos_token_ids=[EOS], pad_token_id=PAD, device=device, dtype=dtype)


def test_it_samples_the_tokens_of_the_cpu() -> None:
    """In float32 the two differ by the order of sums; one token in a million would flip, so the seed is fixed."""
    requests, sampling = ragged_requests(seed=2), Sampling(max_tokens=30, temperature=0.7)
    weights = changed_weights(tiny_model())
    actual = []
    for device in ("cuda", "cpu"):
        one = engine(device, torch.float32)
        before = token_lists(generate(one, requests, sampling))
        one.update_weights(((name, weight.to(device)) for name, weight in weights.items()), 4)
        actual.append((before, token_lists(generate(one, requests, sampling))))
    assert actual[0] == actual[1]
    assert actual[0][0] != actual[0][1]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 2**-7), (torch.bfloat16, 2**-4)])
def test_log_probs_of_half_precision_are_the_models(dtype: torch.dtype, close: float) -> None:
    """Logits of size 2 in 8 (bf16) or 11 bits, divided by the temperature, are off by half a unit in the last place."""
    requests = ragged_requests(3, seed=2)
    outputs = generate(engine("cuda", dtype), requests, Sampling(max_tokens=20, temperature=0.7))
    assert 0 < largest_gap(tiny_model(), requests, outputs, 0.7) < close


def test_it_sleeps_outside_the_device() -> None:
    before = torch.cuda.memory_allocated()
    one, requests, sampling = engine("cuda", torch.bfloat16), ragged_requests(2, seed=2), Sampling(max_tokens=5)
    first = token_lists(generate(one, requests, sampling))
    assert torch.cuda.memory_allocated() > before
    one.sleep()
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()
    assert token_lists(generate(one, requests, sampling)) == first
