"""The joined decoder layer: transformers' layer with fewer products, and matrices that are cast once per step."""

from __future__ import annotations

import copy
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

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
    for module in (shared_prompt, decoder_layer, causal):
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
    with policy.half_weights(precision) if halves else nullcontext():
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


def llama(**changes: Any) -> torch.nn.Module:
    return make_model("llama", head_dim=8, **changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_model("gemma2", head_dim=8),
        lambda: make_model("granite", head_dim=8),
        lambda: llama(attention_bias=True),
        lambda: llama(hidden_act="gelu"),
        lambda: add_lora(llama(), r=2, alpha=4),
        lambda: llama().to(torch.bfloat16),
    ],
    ids=["gemma2", "granite", "biases", "gelu", "adapter", "bfloat16"],
)
def test_other_layers_stay_transformers(make: Callable[[], torch.nn.Module]) -> None:
    policy = CausalPolicy(make())
    assert not joins_products(base_model(policy.model))
    assert not any("forward" in vars(layer) for layer in decoder_layers(base_model(policy.model)))


def test_a_layer_that_computes_something_else_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its classes and parameters are those of a Qwen3, but what its attention adds is doubled."""
    policy = CausalPolicy(make_model("qwen3", head_dim=8))
    for layer in decoder_layers(base_model(policy.model)):
        layer.self_attn.o_proj.register_forward_hook(lambda module, given, output: 2 * output)
    with caplog.at_level(logging.WARNING):
        assert not joins_products(base_model(policy.model))
    assert "are not joined: that changes its output" in caplog.text
    assert not any("forward" in vars(layer) for layer in decoder_layers(base_model(policy.model)))


def test_copies_and_second_policies_of_a_joined_model_compute_packed_rows() -> None:
    policy, rows = joined_of(CausalPolicy(make_model("qwen3", head_dim=8).train())), make_groups(GROUPS)
    expected, _ = outcome(policy, rows, torch.bfloat16)
    for model in (policy.model, copy.deepcopy(policy.model), pickle.loads(pickle.dumps(policy.model))):
        other = CausalPolicy(model)
        assert other.shared_prompt
        assert torch.equal(outcome(other, rows, torch.bfloat16)[0], expected)


def test_gradients_that_are_there_are_added_to() -> None:
    """Two contexts, and a padded micro-batch before a packed one, as without copies."""
    policy, rows = joined_of(CausalPolicy(make_model("qwen3", head_dim=8).train())), make_groups(GROUPS)

    def accumulated(precision: torch.dtype | None) -> torch.Tensor:
        policy.zero_grad()
        for shared in (True, True, False, True):
            policy.shared_prompt = shared
            with policy.half_weights(precision), torch.autocast("cpu", torch.bfloat16):
                policy(rows)[keys.LOG_PROBS].sum().backward()
        return torch.cat([each.grad.flatten() for each in policy.parameters()])

    expected = accumulated(None)
    assert torch.equal(accumulated(torch.bfloat16), expected)


def test_a_layer_with_some_frozen_matrices_has_no_copies() -> None:
    policy, rows = joined_of(CausalPolicy(make_model("qwen3", head_dim=8).train())), make_groups(GROUPS)
    first = decoder_layers(base_model(policy.model))[0]
    first.self_attn.q_proj.weight.requires_grad_(False)
    with policy.half_weights(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        policy(rows)[keys.LOG_PROBS].sum().backward()
    trained = {name for name, each in policy.named_parameters() if each.grad is not None}
    assert trained == {name for name, each in policy.named_parameters() if each.requires_grad}


def test_a_failed_allocation_leaves_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = joined_of(CausalPolicy(make_model("qwen3", head_dim=8).train()))

    def out_of_memory(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "_foreach_copy_", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError), policy.half_weights(torch.bfloat16):
        pass
    assert all(layer.joined.halves is None for layer in decoder_layers(base_model(policy.model)))


def test_a_model_whose_layers_have_no_name_takes_half_precision() -> None:
    policy = CausalPolicy(make_model("qwen3"))
    base_model(policy.model)._no_split_modules = None
    assert not joins_products(base_model(policy.model))
    with policy.half_weights(torch.bfloat16):
        pass


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_layers_of_other_numbers_are_not_computed_by_compiled_code_of_the_first() -> None:
    """A Qwen2 of full and sliding layers, and one with another epsilon, whose matrices have the same shapes."""
    torch._dynamo.reset()
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    rows = make_groups(GROUPS)
    for changes in ({"head_dim": 8, **mixed}, {"head_dim": 8, "rms_norm_eps": 0.5}):
        policy = CausalPolicy(make_model("qwen2", **changes).train())
        expected, _ = outcome(policy, rows, None)
        joined = CausalPolicy(copy.deepcopy(policy.model))
        assert joins_products(base_model(joined.model))
        with torch.compiler.set_stance("default"):
            assert distance(outcome(joined, rows, None)[0], expected) < 1e-5
