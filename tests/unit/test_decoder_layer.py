"""The joined decoder layer: transformers' layer with fewer products, and matrices that are cast once per step."""

from __future__ import annotations

import copy
import cProfile
import logging
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from torch._dynamo.utils import counters

from sota_grpo import keys
from sota_grpo.policy import causal, decoder_layer, shared_prompt
from sota_grpo.policy.causal import CausalPolicy, base_model, decoder_layers, joins_products
from sota_grpo.policy.load import enable_gradient_checkpointing
from sota_grpo.policy.lora import add_lora
from tests.pretended_cuda import kernels
from tests.unit.test_fused import LENGTHS, attention_of_cpus
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
    monkeypatch.setitem(sys.modules, "sota_grpo.policy.attention_kernels", attention_of_cpus())
    with torch.compiler.set_stance("force_eager"):
        yield


def outcome(
    policy: CausalPolicy, rows: TensorDict, precision: torch.dtype | None, halves: Any = False, passes: int = 1
):
    """Log-probs, and the gradient summed over ``passes`` weighted micro-batches."""
    policy.zero_grad()
    with policy.half_weights(precision, halves == "summed") if halves else nullcontext():
        for index in range(passes):
            with nullcontext() if precision is None else torch.autocast("cpu", precision):
                log_probs = policy(rows)[keys.LOG_PROBS]
            (log_probs.sum() * (index + 1)).backward()
    return log_probs.detach(), torch.cat([each.grad.flatten() for each in policy.parameters() if each.requires_grad])


def joined_of(policy: CausalPolicy) -> CausalPolicy:
    other = copy.deepcopy(policy)
    assert joins_products(base_model(other.model))
    return other


def qwen3(**changes: Any) -> CausalPolicy:
    """With joined layers."""
    return joined_of(CausalPolicy(make_model("qwen3", head_dim=8, **changes).train()))


def layers_of(policy: CausalPolicy) -> list[Any]:
    return list(decoder_layers(base_model(policy.model)))


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


TIED = {"tie_word_embeddings": True}
CAST = {name: (name, {}, "nothing") for name in decoder_layer.FAMILIES} | {"tied head": ("qwen3", TIED, "nothing")}
CAST |= {f"frozen {name}": ("qwen2", {}, name) for name in ("norm", "bias", "layers.0", "embed", "_proj.weight")}


@pytest.mark.parametrize("case", CAST)
@pytest.mark.parametrize("precision", HALF)
def test_matrices_that_are_cast_once_give_the_same_gradients(case: str, precision: torch.dtype) -> None:
    family, changes, frozen = CAST[case]
    policy = joined_of(CausalPolicy(make_model(family, head_dim=8, **changes).train()))
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(frozen not in name)
    rows, added = make_groups(GROUPS), mock.Mock(wraps=torch._foreach_add_)
    head = mock.Mock(wraps=causal.chunked_log_probs)
    expected = outcome(policy, rows, precision, passes=3)
    with mock.patch.object(torch, "_foreach_add_", added), mock.patch.object(causal, "chunked_log_probs", head):
        for actual, one in zip(outcome(policy, rows, precision, "summed", passes=3), expected):
            assert torch.equal(actual, one)
    assert all(call.kwargs["copy"].dtype == precision for call in head.mock_calls)
    small = sum(one.dim() == 1 and one.requires_grad for layer in layers_of(policy) for one in layer.parameters())
    assert [len(call.args[0]) for call in added.mock_calls] == [small, small]  # by one kernel a backward pass
    assert all(layer.joined.halves is None for layer in layers_of(policy))
    assert policy.scorer.half_head is None
    for actual, one in zip(outcome(policy, rows, precision, "once"), outcome(policy, rows, precision)):
        assert torch.equal(actual, one)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_are_computed_in_blocks_unless_they_are_checkpointed(checkpointed: bool) -> None:
    policy, rows = qwen3(num_hidden_layers=8), make_groups(GROUPS)
    calls = mock.Mock(wraps=decoder_layer._computed)
    with mock.patch.object(decoder_layer, "block_size", return_value=1):
        expected = outcome(policy, rows, torch.bfloat16)
    if checkpointed:
        enable_gradient_checkpointing(base_model(policy.model))
    with mock.patch.object(decoder_layer, "_compiled", return_value=calls):
        for actual, one in zip(outcome(policy, rows, torch.bfloat16), expected):
            assert torch.equal(actual, one)
    assert [len(call.args[0]) for call in calls.mock_calls] == ([1] * 16 if checkpointed else [4, 4])


llama = partial(make_model, "llama", head_dim=8)
OTHERS: dict[str, Callable[[], torch.nn.Module]] = {
    "gemma2": lambda: make_model("gemma2", head_dim=8),
    "granite": lambda: make_model("granite", head_dim=8),
    "biases": lambda: llama(attention_bias=True),
    "gelu": lambda: llama(hidden_act="gelu"),
    "adapter": lambda: add_lora(llama(), r=2, alpha=4),
    "bfloat16": lambda: llama().to(torch.bfloat16),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_stay_transformers(name: str) -> None:
    policy = CausalPolicy(OTHERS[name]())
    assert not joins_products(base_model(policy.model))
    assert not any("forward" in vars(layer) for layer in layers_of(policy))


def test_a_layer_that_computes_something_else_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its classes and parameters are those of a Qwen3, but what its attention adds is doubled."""
    policy = CausalPolicy(make_model("qwen3", head_dim=8))
    for layer in layers_of(policy):
        layer.self_attn.o_proj.register_forward_hook(lambda module, given, output: 2 * output)
    with caplog.at_level(logging.WARNING):
        assert not joins_products(base_model(policy.model))
    assert "are not joined: that changes its output" in caplog.text
    assert not any("forward" in vars(layer) for layer in layers_of(policy))


def test_copies_and_second_policies_of_a_joined_model_compute_packed_rows() -> None:
    """Copies with layers of their own, which the model's weights do not change."""
    policy, rows = qwen3(), make_groups(GROUPS)
    expected, _ = outcome(policy, rows, torch.bfloat16)
    models = (policy.model, copy.deepcopy(policy.model), pickle.loads(pickle.dumps(policy.model)))
    second, *copies = (CausalPolicy(model) for model in models)
    assert all(other.shared_prompt for other in (second, *copies))
    assert torch.equal(outcome(second, rows, torch.bfloat16)[0], expected)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    assert all(torch.equal(outcome(other, rows, torch.bfloat16)[0], expected) for other in copies)


def test_gradients_that_are_there_are_added_to() -> None:
    """Two contexts, and a padded micro-batch before a packed one, as without copies; none without a backward pass."""
    policy, rows = qwen3(), make_groups(GROUPS)

    def accumulated(precision: torch.dtype | None) -> torch.Tensor:
        policy.zero_grad()
        for shared in (True, True, False, True):
            policy.shared_prompt = shared
            with policy.half_weights(precision), torch.autocast("cpu", torch.bfloat16):
                policy(rows)[keys.LOG_PROBS].sum().backward()
        return torch.cat([each.grad.flatten() for each in policy.parameters()])

    expected = accumulated(None)
    assert torch.equal(accumulated(torch.bfloat16), expected)
    policy.zero_grad()
    with policy.half_weights(torch.bfloat16), torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        policy(rows)
    assert all(each.grad is None for each in policy.parameters())


def test_a_layer_with_some_frozen_matrices_has_no_copies_nor_has_any_after_a_failed_allocation(monkeypatch) -> None:
    policy, rows = qwen3(), make_groups(GROUPS)
    layers_of(policy)[0].self_attn.q_proj.weight.requires_grad_(False)
    with policy.half_weights(torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
        policy(rows)[keys.LOG_PROBS].sum().backward()
    trained = {name for name, each in policy.named_parameters() if each.grad is not None}
    assert trained == {name for name, each in policy.named_parameters() if each.requires_grad}
    monkeypatch.setattr(torch, "_foreach_copy_", mock.Mock(side_effect=torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError), policy.half_weights(torch.bfloat16):
        pass
    assert all(layer.joined.halves is None for layer in layers_of(policy))
    nameless = CausalPolicy(make_model("qwen3"))
    base_model(nameless.model)._no_split_modules = None
    assert not joins_products(base_model(nameless.model))
    with nameless.half_weights(torch.bfloat16):
        pass


def test_layers_of_other_numbers_are_not_computed_by_compiled_code_of_the_first(monkeypatch) -> None:
    """A Qwen2 of full and sliding layers, and one with another epsilon, whose matrices have the same shapes."""
    torch._dynamo.reset()
    compiled = cache(partial(torch.compile, dynamic=True, backend="aot_eager"))  # which code is chosen, not what it is
    monkeypatch.setattr(decoder_layer, "_compiled", compiled)
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True, "sliding_window": 4}
    rows = make_groups(GROUPS)
    for changes in (mixed, {"rms_norm_eps": 0.5}):
        policy = CausalPolicy(make_model("qwen2", head_dim=8, **changes).train())
        expected, _ = outcome(policy, rows, None)
        joined = joined_of(policy)
        with torch.compiler.set_stance("default"):
            assert distance(outcome(joined, rows, None)[0], expected) < 1e-5


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_block_is_one_graph_for_all_rows_and_costs_python_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 as eager layers; a further layer and micro-batch cost 306 calls when each layer was compiled alone."""
    torch._dynamo.reset()
    counters.clear()
    calls, whole = [], torch.contiguous_format
    nothing_computed = SimpleNamespace(
        packed_attention=lambda query, *rest: (
            query.clone(memory_format=whole),
            query[:, :, 0].t().float().contiguous(),
        ),
        packed_attention_backward=lambda grad, *rest: tuple([each.clone(memory_format=whole) for each in rest[:3]]),
        unrotate=lambda pulls, states, norms, *rest: (states.clone(), torch.stack(list(norms))),
    )
    for layers in (4, 8):
        policy = qwen3(num_hidden_layers=layers)
        for groups in LENGTHS:
            rows = make_groups(groups)
            expected = outcome(policy, rows, None)
            with torch.compiler.set_stance("default"):
                for actual, one in zip(outcome(policy, rows, None, "summed"), expected):
                    assert distance(actual, one) < 1e-6
        monkeypatch.setitem(sys.modules, "sota_grpo.policy.attention_kernels", nothing_computed)
        with torch.compiler.set_stance("default"), policy.half_weights(torch.float32):
            policy(rows)[keys.LOG_PROBS].sum().backward()
            profile = cProfile.Profile()
            profile.enable()
            policy(rows)[keys.LOG_PROBS].sum().backward()
            profile.disable()
        monkeypatch.setitem(sys.modules, "sota_grpo.policy.attention_kernels", attention_of_cpus())
        calls.append(sum(entry.callcount for entry in profile.getstats() if not isinstance(entry.code, str)))
    assert counters["stats"]["unique_graphs"] == 1
    assert calls[1] - calls[0] < 4 * 140, calls
