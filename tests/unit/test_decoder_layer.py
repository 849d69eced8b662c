"""The joined decoder layer: transformers' layer with fewer products, and matrices that are cast once per step."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict

from sota_grpo import keys
from sota_grpo.policy import causal, decoder_layer, shared_prompt
from sota_grpo.policy.causal import CausalPolicy, base_model, decoder_layers, joins_products
from sota_grpo.policy.lora import add_lora
from tests.pretended_cuda import kernels
from tests.unit.test_fused import without_autocast
from tests.unit.test_shared_prompt import GROUPS, make_groups
from tests.unit.tiny_models import make_model

HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows in any precision take the way that half precision takes on CUDA; layers run eagerly."""
    for module in (shared_prompt, decoder_layer):
        monkeypatch.setattr(module, "takes_kernels", lambda device, dtype, width: True)
    monkeypatch.setattr(causal, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(kernels, "HALF", (*HALF, torch.float32))
    for operation, kernel in (
        (shared_prompt.packed_attention, kernels.packed_attention),
        (shared_prompt._packed_attention_backward, kernels.packed_attention_backward),
    ):
        operation.register_kernel("cpu", without_autocast(kernel))
    with torch.compiler.set_stance("force_eager"):
        yield


def outcome(
    policy: CausalPolicy, rows: TensorDict, precision: torch.dtype | None, halves: bool = False, passes: int = 1
):
    """Log-probs, and the gradient summed over ``passes`` weighted micro-batches."""
    policy.zero_grad()
    with policy.half_weights(precision if halves else None):
        for index in range(passes):
            with nullcontext() if precision is None else torch.autocast("cpu", precision):
                log_probs = policy(rows)[keys.LOG_PROBS]
            (log_probs.sum() * (index + 1)).backward()
    return log_probs.detach(), torch.cat([each.grad.flatten() for each in policy.parameters()])


def joined_of(policy: CausalPolicy) -> CausalPolicy:
    other = copy.deepcopy(policy)
    assert joins_products(base_model(other.model))
    return other


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("family", decoder_layer.FAMILIES)
def test_a_joined_layer_is_the_layer(family: str) -> None:
    """In float32 to its rounding; in half precision as far from float32 as transformers' own."""
    policy = CausalPolicy(make_model(family, head_dim=8).train())
    joined, rows = joined_of(policy), make_groups(GROUPS)
    exact = outcome(policy, rows, None)
    for mine, true in zip(outcome(joined, rows, None), exact):
        assert distance(mine, true) < 1e-6
    for precision in HALF:
        for mine, theirs, true in zip(outcome(joined, rows, precision), outcome(policy, rows, precision), exact):
            assert distance(mine, true) < 1.1 * distance(theirs, true)


@pytest.mark.parametrize("precision", HALF)
def test_matrices_that_are_cast_once_give_the_same_gradients(precision: torch.dtype) -> None:
    policy = joined_of(CausalPolicy(make_model("qwen3", head_dim=8).train()))
    rows = make_groups(GROUPS)
    expected = outcome(policy, rows, precision, passes=3)
    for actual, one in zip(outcome(policy, rows, precision, halves=True, passes=3), expected):
        assert torch.equal(actual, one)
    assert all(layer.joined.halves is None for layer in decoder_layers(base_model(policy.model)))


def test_copies_of_a_model_have_layers_of_their_own() -> None:
    policy = joined_of(CausalPolicy(make_model("qwen3", head_dim=8).train()))
    rows = make_groups(GROUPS)
    expected, _ = outcome(policy, rows, None)
    other = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert torch.equal(outcome(other, rows, None)[0], expected)


@pytest.mark.parametrize("family", ["gemma2", "granite", "llama with biases", "llama with an adapter"])
def test_other_layers_stay_transformers(family: str) -> None:
    name, _, special = family.partition(" ")
    model = make_model(
        "llama" if name in ("llama", "adapter") else name, **({"attention_bias": True} if special else {})
    )
    model = add_lora(model, r=2, alpha=4) if name == "adapter" else model
    policy = CausalPolicy(model)
    assert not joins_products(base_model(policy.model))
    assert not any("forward" in vars(layer) for layer in decoder_layers(base_model(policy.model)))


def test_a_layer_that_computes_something_else_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its parameters are those of a Qwen3, but the sum after its attention is scaled."""
    policy = CausalPolicy(make_model("qwen3", head_dim=8))
    for layer in decoder_layers(base_model(policy.model)):
        layer.self_attn.o_proj.register_forward_hook(lambda module, given, output: 2 * output)
    with caplog.at_level(logging.WARNING):
        assert not joins_products(base_model(policy.model))
    assert "joined products change their output" in caplog.text
    assert not any("forward" in vars(layer) for layer in decoder_layers(base_model(policy.model)))
